"""What a model factory may return: arguments by name, and arrays outside of variables."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from shardwise import optim
from shardwise.checkpoint.store import Checkpoints
from shardwise.errors import ConfigError
from shardwise.explanation.explain import explain
from shardwise.loop import steps
from shardwise.sharding import Rules
from shardwise.state import abstract_state, init_state
from shardwise.step import make_train_step
from shardwise.weights.adapters import freeze

TABLE = np.linspace(0.5, 2.0, 8)


def data(step):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": x**2}


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class Constants(nnx.Module):
    """A model with arrays of each kind that NNX accepts as attributes."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.numpy = TABLE
        self.jax = jnp.arange(8.0)
        self.data = nnx.data(jnp.ones(8))
        self.items = nnx.data([jnp.ones(8), np.zeros(8, np.float32)])
        self.calls = jnp.array(0)

    def __call__(self, x):
        self.calls += 1
        first, second = self.items
        return self.linear(x) * self.numpy + self.jax * self.data + first * second


class Variables(nnx.Module):
    """The same model with a variable for each of these arrays."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.numpy = nnx.Variable(jnp.asarray(TABLE))
        self.jax = nnx.Variable(jnp.arange(8.0))

    def __call__(self, x):
        return self.linear(x) * self.numpy + self.jax


def train(model, mesh, until=4, **options):
    rules = Rules(fsdp_min_size=1)
    wrt = {"wrt": options.pop("wrt")} if "wrt" in options else {}
    spec = abstract_state(model, optax.adam(1e-2), mesh, rules, **wrt)
    step = make_train_step(spec, loss, data(0), **options)
    state, losses = init_state(spec, 0), []
    for _, new_state, metrics in steps(step, state, data, until=until):
        losses.append(float(metrics["loss"]))
        state = new_state
    return spec, state, losses


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=4,fsdp=2"])
def test_arrays_outside_of_variables_are_like_variables(mesh):
    _, state, losses = train(Constants, mesh)
    _, _, expected = train(Variables, mesh)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    # What the forward pass assigns is kept from step to step, as `nnx.jit` keeps it.
    assert int(state.other["calls"]) == 4


def test_arrays_outside_of_variables_are_saved(tmp_path):
    spec, state, _ = train(Constants, "fsdp=8")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, {})
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(spec, 4)
    jax.tree.map(np.testing.assert_array_equal, restored.other, state.other)


class Linear(nnx.Module):
    def __init__(self, din, dout, *, rngs):
        self.w = jax.random.normal(rngs.params(), (din, dout))
        self.b = jnp.zeros((dout,))

    def __call__(self, x):
        return x @ self.w + self.b


class Mlp(nnx.Module):
    """A model without variables, which trains its arrays."""

    def __init__(self, *, rngs):
        self.calls = jnp.array(0)
        self.hidden = Linear(8, 32, rngs=rngs)
        self.out = Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        self.calls += 1
        return self.out(nnx.relu(self.hidden(x)))


def is_weight(path, value):
    return path[-1] in ("w", "b")


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_arrays_can_be_trained(options):
    spec, _, losses = train(Mlp, "data=4,fsdp=2", wrt=is_weight, **options)
    assert sorted(spec.params) == ["hidden/b", "hidden/w", "out/b", "out/w"]
    assert "fsdp" in str(spec.params["hidden/w"].spec)

    model, optimizer = Mlp(rngs=nnx.Rngs(jax.random.key(0))), optax.adam(1e-2)
    params, rest = nnx.split(model, is_weight, ...)[1:]
    opt_state = optimizer.init(params)
    expected = []
    for n in range(4):

        def objective(params):
            built = nnx.merge(nnx.graphdef(model), params, rest)
            return loss(built, data(n))  # noqa: B023

        value, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_trained_array_must_not_be_assigned():
    class Assigns(Mlp):
        def __call__(self, x):
            self.hidden.b = self.hidden.b + 1
            return super().__call__(x)

    with pytest.raises(ConfigError, match="assigns to the parameter 'hidden/b'"):
        train(Assigns, "data=8", wrt=is_weight)


class KeywordOnly(nnx.Module):
    def __init__(self, width=4, *, rngs):
        self.linear = nnx.Linear(8, width, rngs=rngs)


class Positional(nnx.Module):
    def __init__(self, width=4, rngs=None):
        self.linear = nnx.Linear(8, width, rngs=rngs)


@pytest.mark.parametrize(
    ("factory", "width"),
    [
        (KeywordOnly, 4),
        (partial(KeywordOnly, 6), 6),
        (partial(KeywordOnly, width=6), 6),
        (Positional, 4),
        (partial(Positional, 6), 6),
        (lambda rngs: Positional(2, rngs), 2),
        (lambda r: KeywordOnly(rngs=r), 4),
        (lambda *, rngs: KeywordOnly(rngs=rngs), 4),
    ],
)
def test_random_streams_are_passed_by_name(factory, width):
    spec = abstract_state(factory, optax.sgd(1e-2), "data=8")
    assert spec.params["linear/kernel"].shape == (8, width)


class Tied(nnx.Module):
    """An embedding that is the output layer too, and a block that is used twice."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.block = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)
        self.head.kernel = self.embed.kernel
        self.twice = nnx.List([self.block])

    def __call__(self, x):
        return self.head(self.twice[0](self.block(self.embed(x))))


@pytest.mark.parametrize("path", ["embed/kernel", "head/kernel"])
def test_a_tied_parameter_answers_to_all_its_paths(path):
    rules = Rules(paths={path: (None, "model")})
    spec = abstract_state(Tied, optax.sgd(0.1), "data=4,model=2", rules=rules)
    assert spec.params["embed/kernel"].spec == PartitionSpec(None, "model")
    frozen = abstract_state(freeze(Tied, path), optax.sgd(0.1), "data=8")
    assert set(frozen.frozen) == {"embed/kernel"}
    only = abstract_state(
        Tied, optax.sgd(0.1), "data=8", wrt=nnx.PathContains(path.partition("/")[0])
    )
    assert "embed/kernel" in only.params


def test_parameters_of_a_shared_module_answer_to_all_its_paths():
    frozen = abstract_state(freeze(Tied, "twice/*"), optax.sgd(0.1), "data=8")
    assert set(frozen.frozen) == {"block/bias", "block/kernel"}


def test_groups_of_an_optimizer_name_the_path_of_a_tied_parameter():
    groups = [optim.Group("head/kernel", name="head"), optim.Group("*", name="rest")]
    optimizer = optim.adamw(1e-3, groups=groups)
    with pytest.raises(ConfigError, match="'head/kernel' is 'embed/kernel'"):
        abstract_state(Tied, optimizer, "data=8")
    explanation = explain(optax.adam(1e-3), Tied, steps=10)
    rows = {row.path: row.other_paths for row in explanation.rows}
    assert rows["embed/kernel"] == ("head/kernel",)
    assert "embed/kernel is also head/kernel" in explanation.table().caption
