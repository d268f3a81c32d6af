"""Checks in a recipe, as a user meets them on the command line."""

import json

import pytest

from tests.helpers.command import run

RECIPE = """
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import checkify

from shardwise import Batches, Mean, Run


def loss(model, batch):
    top = batch["y"].max()
    checkify.check(top < 4, "labels must be below 4, the largest is {top}", top=top)
    logits = model(batch["x"])
    return Mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def recipe(*, fixed: bool = False, out: Path | None = None) -> Run:
    data = {"x": np.ones((64, 8), np.float32), "y": np.arange(64, dtype=np.int32) % 4}

    def batches(n):
        labels = data["y"][:16].copy()
        if n == 4 and not fixed:
            labels[3] = 11
        return {"x": data["x"][:16], "y": labels}

    return Run(
        model=lambda rngs: nnx.Linear(8, 4, rngs=rngs),
        loss=loss,
        optimizer=optax.adam(1e-2),
        data=batches,
        steps=8,
        save_every=2,
        mesh="fsdp=8",
        out=out,
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("checks")
    (place / "recipe.py").write_text(RECIPE)
    return place


@pytest.mark.slow
def test_a_failed_check_ends_with_exit_code_5_and_the_fixed_run_resumes(folder):
    words = ("train", "recipe.py", "--cpu-devices", 8, "--out", "runs/a", "--no-plan")
    failed = run(*words, cwd=folder)
    assert failed.returncode == 5
    last = failed.stderr.strip().splitlines()[-1]
    assert last == (
        "shardwise: step 5: check failed: labels must be below 4, the largest is 11 "
        f"({folder / 'recipe.py'}, line 15). The update was not applied. The newest checkpoint "
        "is step 4."
    )
    assert "Traceback" not in failed.stderr
    assert "details in runs/a/bad/5" in failed.stderr

    resumed = run(*words, "--fixed", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming runs/a at step 4" in resumed.stderr
    lines = (folder / "runs/a/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 9)]
