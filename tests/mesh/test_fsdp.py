"""Explicit collectives of FSDP: the same numbers, and no all-reduce of a kernel.

Only steps for TPUs and GPUs use them, so these tests turn them on for 8 CPU devices. `tests/tpu`
and `tests/gpu_plan` compile such steps for real.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Batches,
    Mean,
    Rules,
    Tokens,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
    steps,
)
from shardwise.axes import TENSOR
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import linear_cross_entropy
from shardwise.step import fsdp

TOKENS = np.random.default_rng(0).integers(0, 64, 5000)
BATCHES = Batches(Tokens(TOKENS, 16), 16)


class Plain(nnx.Module):
    """Layers whose gradients are transposed, reshaped, and summed over two uses."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.attention(x, is_causal=True)
            x = x + self.down(nnx.gelu(self.up(x)))
        return self.embed.attend(x)


def plain_loss(model, batch):
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(
            model(batch["inputs"]), batch["labels"]
        )
    )


def gpt(**options):
    config = GPTConfig(
        vocab_size=64, max_length=16, num_layers=2, num_heads=4, width=32, **options
    )
    return lambda rngs: GPT(config, rngs)


def gpt_loss(model, batch):
    features = model.features(batch["inputs"])
    return Mean(linear_cross_entropy(*features, batch["labels"]))


# Both axes on one dim, in both orders: in the second one, XLA chooses the collectives.
RULES = Rules(
    fsdp_min_size=256,
    paths={
        "embed/*": ("model", None),
        "up/kernel": (None, ("model", "fsdp")),
        "down/kernel": (("fsdp", "model"), None),
        "attention/*/kernel": (),
    },
)
MODELS = {
    "plain": (Plain, plain_loss),
    "gpt": (gpt(scan_layers=False), gpt_loss),
    "scanned": (gpt(scan_layers=True, remat="block", dropout=0.1), gpt_loss),
}


def make_step(name, mesh, accumulate=1):
    factory, loss = MODELS[name]
    rules = RULES if "model" in mesh and name == "plain" else Rules(fsdp_min_size=256)
    count = 1 if mesh == "data=1" else 8
    spec = abstract_state(
        factory, optax.adamw(1e-3), make_mesh(mesh, jax.devices()[:count]), rules
    )
    return make_train_step(spec, loss, BATCHES(0), accumulate=accumulate)


def losses(step):
    state = init_state(step.spec, 0)
    metrics = [metrics for _, _, metrics in steps(step, state, BATCHES, until=8)]
    return [(float(m["loss"]), float(m["grad_norm"])) for m in metrics]


def all_reduced_bytes(step):
    """Return the bytes of the results of all-reduces in the compiled step."""
    text = step.lower().compile().as_text()
    total = 0
    for result in re.findall(r"= (.*?) all-reduce\(", text):
        for shape in re.findall(r"f32\[([\d,]*)\]", result):
            total += 4 * np.prod([int(size) for size in shape.split(",") if size])
    return total


@pytest.fixture
def as_on_accelerators(monkeypatch):
    monkeypatch.setattr(fsdp, "PLATFORMS", {"cpu": TENSOR})


MESHES = ["fsdp=8", "replica=2,fsdp=4", "fsdp=4,model=2", "data=2,fsdp=2,model=2"]
CASES = list(itertools.product(MODELS, MESHES, [1, 2]))
# XLA chooses the collectives in the stages, and those of the table are named.
CASES.append(("scanned", "stage=2,fsdp=4", 1))
QUICK = [("plain", "replica=2,fsdp=4", 1), ("gpt", "fsdp=4,model=2", 1)]


@pytest.mark.parametrize(
    ("name", "mesh", "accumulate"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_gradients_are_the_same(name, mesh, accumulate, as_on_accelerators):
    expected = losses(make_step(name, "data=1", accumulate))
    found = losses(make_step(name, mesh, accumulate))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "scanned")),
    ],
)
def test_kernels_are_not_all_reduced(name, monkeypatch):
    before = all_reduced_bytes(make_step(name, "fsdp=8"))
    monkeypatch.setattr(fsdp, "PLATFORMS", {"cpu": TENSOR})
    # Biases, norms and metrics are left, and lookups of `nnx.Embed`.
    assert all_reduced_bytes(make_step(name, "fsdp=8")) < before / 3


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_a_step_without_sharded_parameters_stays_the_same(mesh, monkeypatch):
    before = make_step("plain", mesh).lower().as_text()
    monkeypatch.setattr(fsdp, "PLATFORMS", {"cpu": TENSOR})
    assert make_step("plain", mesh).lower().as_text() == before


@pytest.mark.slow
def test_two_stages_gather_and_scatter_like_one(as_on_accelerators, monkeypatch):
    """On a large torus, neighbors communicate first, here pairs of devices."""
    expected = losses(make_step("plain", "fsdp=8"))
    groups = np.arange(8).reshape(4, 2)
    stages = [groups.tolist(), groups.T.tolist()]
    monkeypatch.setattr(
        fsdp, "_stages", lambda mesh, axes, side: stages if axes else []
    )
    found = make_step("plain", "fsdp=8")
    assert "axis_index_groups=((0, 1), (2, 3)" in str(found.trace().jaxpr)
    np.testing.assert_allclose(losses(found), expected, rtol=2e-6)


def test_batches_that_the_mesh_does_not_divide_are_left_to_xla(as_on_accelerators):
    factory, loss = MODELS["plain"]
    spec = abstract_state(
        factory, optax.sgd(0.1), make_mesh("fsdp=8"), Rules(fsdp_min_size=256)
    )
    batch = jax.tree.map(lambda x: x[:6], BATCHES(0))
    state = init_state(spec, 0)
    step = make_train_step(spec, loss, batch)
    _, metrics = step(state, step.place(batch))
    assert jnp.isfinite(metrics["loss"])
