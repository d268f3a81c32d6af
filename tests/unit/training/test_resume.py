"""A resumed run says what it compared, and refuses another computation of the loss."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from shardwise import Batches, Mean, Run, fit, optim
from shardwise.errors import ConfigError

X = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")


def model(rate: float = 0.1, epsilon: float = 1e-6) -> Callable[[nnx.Rngs], nnx.Module]:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            nnx.Linear(4, 8, rngs=rngs),
            nnx.LayerNorm(8, epsilon=epsilon, rngs=rngs),
            nnx.Dropout(rate, rngs=rngs),
            nnx.Linear(8, 1, rngs=rngs),
        )

    return make


def loss(scale: float = 1.0) -> Callable[[nnx.Module, dict[str, jax.Array]], Mean]:
    def squares(module: nnx.Module, batch: dict[str, jax.Array]) -> Mean:
        return Mean(scale * module(batch["x"])[:, 0] ** 2)

    return squares


def printed(run: Run) -> str:
    console = Console(file=io.StringIO(), width=300)
    fit(run, console=console, plan=False)
    return console.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    saved = Run(
        model=model(),
        loss=loss(),
        optimizer=optim.adamw(1e-3),
        data=Batches({"x": X}, 16),
        steps=2,
        out=tmp_path / "run",
    )
    printed(saved)
    return replace(saved, steps=3)


def test_an_unchanged_run_lists_what_was_compared(run: Run) -> None:
    # New functions, which compute the same.
    text = printed(replace(run, model=model(), loss=loss()))
    (line,) = [line for line in text.splitlines() if "resuming" in line]
    assert "no differences in model, loss, data, lr, optimizer, seed" in line
    assert "not compared" not in text


def test_another_mesh_is_not_another_loss(run: Run) -> None:
    text = printed(replace(run, mesh="data=2,fsdp=4"))
    assert "resharded" in text
    assert "loss/fingerprint" not in text


CHANGES = {
    "factor of the loss": {"loss": loss(100.0)},
    "dropout rate": {"model": model(rate=0.5)},
    "epsilon": {"model": model(epsilon=1e-3)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_computation_is_refused(run: Run, change: str) -> None:
    changed = replace(run, **CHANGES[change])
    with pytest.raises(ConfigError, match=r"(?s)loss/fingerprint.*pass --accept loss "):
        printed(changed)
    text = printed(replace(changed, accept=("loss",)))
    assert "accepted: the loss or the model computes something else" in text
