"""A run that resumes on other devices each time equals a run that never stopped."""

import hashlib
import io
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from shardwise import (
    Batches,
    Checkpoints,
    Mean,
    Rules,
    Run,
    abstract_state,
    fit,
    make_mesh,
    optim,
)
from shardwise.tree import named_leaves

LENGTH = 50
CHAIN = [
    ("data=4,fsdp=2", 8),
    ("fsdp=4", 4),
    ("data=1", 1),
    ("model=2", 2),
    ("data=4,fsdp=2", 8),
]
PATHS = (("up/kernel", (None, "model")), ("down/kernel", ("model", None)))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(320, 16)).astype("f4")
DATA = {"x": X, "y": np.tanh(X @ RNG.normal(size=(16, 8)).astype("f4"))}


class Net(nnx.Module):
    """Has everything that a resume can lose: dropout, and batch statistics.

    The optimizer adds an average and a schedule.
    """

    def __init__(self, rngs):
        # No bias before BatchNorm: its gradient is rounding error, which Adam would scale up to
        # full steps.
        self.up = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def loss(model, batch):
    return Mean(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


def train(out, mesh, devices, steps, seen):
    batches = Batches(DATA, 32, seed=3)

    def watched(step):
        batch = batches(step)
        seen[step] = hashlib.sha256(
            b"".join(batch[name].tobytes() for name in sorted(batch))
        ).hexdigest()
        return batch

    optimizer = optim.adamw(
        optim.cosine(1e-2, LENGTH, warmup=5), weight_decay=0.1, clip=1.0, ema=0.9
    )
    rules = Rules(paths=PATHS, fsdp_min_size=16)
    run = Run(
        model=Net,
        loss=loss,
        optimizer=optimizer,
        data=watched,
        steps=steps,
        mesh=make_mesh(mesh, jax.devices()[:devices]),
        rules=rules,
        seed=7,
        accumulate=2,
        coupled_examples="separate",
        save_every=10,
        eval_data=Batches(DATA, 32),
        eval_every=10,
        out=out,
    )
    return fit(run, console=Console(file=io.StringIO()))


def lines(out):
    return [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def bits(state):
    return {
        name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state).items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out, seen = tmp_path_factory.mktemp("straight"), {}
    return out, seen, train(out, *CHAIN[0], LENGTH, seen)


@pytest.mark.slow
def test_chain_has_the_same_batches_and_losses(straight, tmp_path):
    straight_out, straight_seen, _ = straight
    seen: dict[int, str] = {}
    for leg, (mesh, devices) in enumerate(CHAIN):
        result = train(tmp_path, mesh, devices, 10 * (leg + 1), seen)
        assert int(result.state.step) == 10 * (leg + 1)
    assert seen == straight_seen
    pairs = list(zip(lines(tmp_path), lines(straight_out), strict=True))
    assert [a["step"] for a, _ in pairs] == [b["step"] for _, b in pairs]
    for a, b in pairs:
        for name in {"loss", "eval_loss"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-5), (a["step"], name)


@pytest.mark.slow
def test_run_is_bit_identical_after_it_returns_to_the_first_layout(straight, tmp_path):
    straight_out, _, result = straight
    shutil.copytree(
        straight_out / "checkpoints" / "40", tmp_path / "checkpoints" / "40"
    )
    shutil.copy(straight_out / "metrics.jsonl", tmp_path / "metrics.jsonl")
    # Each of the other layouts restores the checkpoint and saves it again.
    for mesh, devices in CHAIN[1:4]:
        spec = abstract_state(
            Net,
            result.spec.optimizer,
            make_mesh(mesh.replace("model", "fsdp"), jax.devices()[:devices]),
            Rules(fsdp_min_size=16),
        )
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            state, metadata = checkpoints.restore(spec, 40), checkpoints.metadata(40)
            shutil.rmtree(checkpoints.path(40))
            checkpoints.save(state, metadata)
    again = train(tmp_path, *CHAIN[0], LENGTH, {})
    assert bits(again.state) == bits(result.state)
    assert [line.get("loss") for line in lines(tmp_path)] == [
        line.get("loss") for line in lines(straight_out)
    ]
