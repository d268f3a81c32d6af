"""Meshes that the user makes: the same losses as on the mesh that a text describes."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardwise.data.batches import Batches
from shardwise.errors import ConfigError
from shardwise.loop import steps
from shardwise.mesh import make_mesh, mesh_text
from shardwise.metrics import Mean
from shardwise.state import abstract_state, init_state
from shardwise.step import make_train_step

SHAPE, NAMES = (4, 2), ("data", "model")
TEXT = "data=4,model=2"


class Net(nnx.Module):
    """An embedding, a column-parallel layer, a row-parallel layer and a head."""

    def __init__(self, rngs):
        def init(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.embed = nnx.Embed(32, 16, embedding_init=init("model", None), rngs=rngs)
        self.up = nnx.Linear(16, 64, kernel_init=init(None, "model"), rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=init("model", None), rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(nnx.relu(self.up(x)))
        return self.embed.attend(x)


def loss(model, batch):
    logits = model(batch["x"])
    return Mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def train(mesh):
    tokens = np.random.default_rng(0).integers(0, 32, (64, 9)).astype(np.int32)
    batches = Batches({"x": tokens[:, :-1], "y": tokens[:, 1:]}, 16)
    spec = abstract_state(Net, optax.adam(1e-2), mesh)
    step = make_train_step(spec, loss, batches(0))
    losses = [
        float(metrics["loss"])
        for _, _, metrics in steps(step, init_state(spec, seed=0), batches, until=4)
    ]
    return spec, losses


def devices():
    return np.array(jax.devices()).reshape(SHAPE)


MESHES = {
    "jax.make_mesh": lambda: jax.make_mesh(SHAPE, NAMES),
    "explicit": lambda: jax.make_mesh(
        SHAPE, NAMES, axis_types=(AxisType.Explicit,) * 2
    ),
    "mixed": lambda: jax.make_mesh(
        SHAPE, NAMES, axis_types=(AxisType.Auto, AxisType.Explicit)
    ),
    "auto": lambda: jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Auto,) * 2),
    "Mesh": lambda: Mesh(devices(), NAMES),
    "explicit Mesh": lambda: Mesh(
        devices()[::-1], NAMES, axis_types=(AxisType.Explicit,) * 2
    ),
}


@pytest.fixture(scope="module")
def by_text():
    return train(TEXT)


@pytest.mark.parametrize("kind", MESHES)
def test_losses_equal_those_of_the_text(kind, by_text):
    given = MESHES[kind]()
    spec, losses = train(given)
    np.testing.assert_allclose(losses, by_text[1], rtol=1e-6)
    assert losses[-1] < losses[0]
    assert spec.mesh.are_all_axes_auto
    assert mesh_text(spec.mesh) == TEXT
    assert (spec.mesh.devices == given.devices).all()
    assert spec.params["down/kernel"].spec == P("model", None)


def test_a_current_mesh_with_explicit_axes_is_refused():
    with (
        jax.set_mesh(MESHES["explicit"]()),
        pytest.raises(ConfigError, match="Remove jax"),
    ):
        train(TEXT)


def test_a_current_mesh_with_auto_axes_changes_nothing(by_text):
    with jax.set_mesh(MESHES["auto"]()):
        _, losses = train(TEXT)
    np.testing.assert_allclose(losses, by_text[1], rtol=1e-6)


def test_a_mesh_with_auto_axes_is_returned_as_it_is():
    mesh = MESHES["auto"]()
    assert make_mesh(mesh) is mesh
