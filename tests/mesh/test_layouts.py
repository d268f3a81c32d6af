"""The central promise: a mesh changes speed, never the math.

Each case trains 20 float32 steps with dropout and accumulation, and with batch statistics if the
model has them, on one device and on eight layouts of eight devices (one or two in the quick tests).
Initial parameters are bit-identical, and losses differ by less than 2e-6.
"""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

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
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.loss import cross_entropy
from shardwise.tree import named_leaves

LAYOUTS = [
    "data=8",
    "fsdp=8",
    "model=8",
    "data=4,model=2",
    "data=2,model=4",
    "data=2,fsdp=2,model=2",
    "fsdp=4,model=2",
    "replica=2,fsdp=4",
]


# Each axis, alone and combined.
SOME = [
    "fsdp=8",
    "data=4,model=2",
    "data=2,fsdp=2,model=2",
    "replica=2,fsdp=4",
]


@dataclass(frozen=True)
class Case:
    factory: Any
    loss: Any
    batches: Batches
    rules: Rules = Rules(fsdp_min_size=64)  # noqa: RUF009


def gpt_case(num_layers=2, **changes):
    config = replace(
        PRESETS["byte"],
        num_layers=num_layers,
        num_heads=8,
        width=64,
        max_length=32,
        dropout=0.1,
        **changes,
    )
    # 16 of 256 tokens occur, so that there is something to learn.
    tokens = np.random.default_rng(0).integers(0, 16, 10_000)

    def loss(model, batch):
        nats = cross_entropy(model(batch["inputs"]), batch["labels"])
        return Mean(nats, jnp.ones_like(nats))

    return Case(lambda rngs: GPT(config, rngs), loss, Batches(Tokens(tokens, 32), 16))


def digits_case():
    path = Path(__file__).parents[2] / "recipes" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits_recipe", path)
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    images, labels = load_digits(return_X_y=True)
    data = {"image": (images / 16).reshape(-1, 8, 8, 1).astype("f4"), "label": labels}
    rules = Rules(
        fsdp_min_size=64, paths=(("conv2/kernel", (None, None, "fsdp", "model")),)
    )
    return Case(digits.ConvNet, digits.loss, Batches(data, 32), rules)


class Mixer(nnx.Module):
    """Mixes positions and channels, with a custom variable and a custom random stream."""

    class Calls(nnx.Variable):
        pass

    def __init__(self, rngs):
        self.positions = nnx.Linear(16, 16, rngs=rngs)
        self.channels = nnx.Linear(
            8,
            32,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, "model")
            ),
        )
        self.norm = nnx.BatchNorm(32, momentum=0.8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((32,)), out_sharding=("model",))
        self.calls = Mixer.Calls(jnp.zeros(()))
        self.noise = rngs.fork()
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):  # (B, 16, 8)
        x = x + 0.01 * jax.random.normal(self.noise.default(), x.shape)
        x = x + nnx.tanh(self.positions(x.swapaxes(1, 2))).swapaxes(1, 2)
        x = self.norm(nnx.relu(self.channels(x))) * self.scale
        self.calls[...] += 1
        return self.head(self.dropout(x).mean(1))[:, 0]


def mixer_case():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 16, 8)).astype("f4")
    data = {
        "x": x,
        "y": np.tanh(x[:, 3, 2] * x[:, 5, 1]).astype("f4"),
        "w": rng.integers(0, 3, 400).astype("f4"),
    }

    def loss(model, batch):
        return Mean((model(batch["x"]) - batch["y"]) ** 2 * batch["w"], batch["w"])

    return Case(Mixer, loss, Batches(data, 32))


def train(case, mesh):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    spec = abstract_state(case.factory, optimizer, mesh, case.rules)
    # BatchNorm of the digits net normalizes each micro-batch.
    options = {"accumulate": 2, "coupled_examples": "separate"}
    step = make_train_step(spec, case.loss, case.batches(0), **options)
    state = init_state(spec, 3)
    initial = {
        name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state).items()
    }
    losses = [
        metrics["loss"] for _, _, metrics in steps(step, state, case.batches, until=20)
    ]
    return initial, np.array(jax.device_get(losses))


def gpt_one_layer_case():
    return gpt_case(num_layers=1)


def gpt_scan_case():
    return gpt_case(scan_layers=True, remat="block")


@pytest.mark.parametrize(
    ("make_case", "layouts"),
    [
        pytest.param(gpt_one_layer_case, [SOME[2]], id="gpt", marks=pytest.mark.slow),
        pytest.param(digits_case, [SOME[3]], id="digits"),
        pytest.param(mixer_case, SOME, id="mixer", marks=pytest.mark.slow),
        pytest.param(gpt_scan_case, SOME[2:3], id="gpt-scan", marks=pytest.mark.slow),
        pytest.param(gpt_case, LAYOUTS, id="gpt-everywhere", marks=pytest.mark.slow),
        pytest.param(
            digits_case, LAYOUTS, id="digits-everywhere", marks=pytest.mark.slow
        ),
        pytest.param(
            mixer_case, LAYOUTS, id="mixer-everywhere", marks=pytest.mark.slow
        ),
        pytest.param(
            gpt_scan_case, LAYOUTS, id="gpt-scan-everywhere", marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_trains_the_same(make_case, layouts):
    case = make_case()
    initial, losses = train(case, make_mesh("data=1", jax.devices()[:1]))
    assert losses[-5:].mean() < losses[:5].mean()
    for text in layouts:
        sharded_initial, sharded_losses = train(case, make_mesh(text))
        assert sharded_initial == initial, f"{text}: initial state differs"
        difference = np.abs(sharded_losses - losses).max()
        print(f"{text:24s} largest difference of the loss {difference:.2e}")
        assert difference < 2e-6, text
