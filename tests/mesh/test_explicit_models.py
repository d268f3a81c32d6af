"""Models that name the shardings of activations, as current Flax examples do.

JAX accepts `out_sharding=` and `reshard` on mesh axes of type Explicit only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from shardwise.errors import ConfigError
from shardwise.loop import steps
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.run import Run
from shardwise.sharding import Rules, constrain
from shardwise.state import abstract_state, init_state
from shardwise.step import make_eval_step, make_train_step
from shardwise.verification.verify import verify

VOCAB, WIDTH = 32, 16


class Block(nnx.Module):
    """An embedding, two layers and a head.

    Args:
        is_explicit: whether to name shardings of activations.
        counts: whether to count calls.
    """

    def __init__(self, is_explicit, counts=True, *, rngs):
        self.is_explicit = is_explicit
        column = {"kernel_metadata": {"out_sharding": P(None, "model")}}
        row = {"kernel_metadata": {"out_sharding": P("model", None)}}
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, **column, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, **row, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0)) if counts else None

    def __call__(self, tokens):
        if self.calls is not None:
            self.calls[...] += 1
        if not self.is_explicit:
            x = self.embed(tokens)
            x = x + self.dropout(self.down(nnx.relu(self.up(x))))
            return self.embed.attend(x)
        like_tokens = jax.typeof(tokens).sharding
        batch = like_tokens.spec[0]
        x = self.embed(tokens, out_sharding=like_tokens)
        hidden = nnx.relu(self.up(x, out_sharding=P(batch, None, "model")))
        hidden = constrain(hidden, "batch", None, "mlp")
        x = x + self.dropout(self.down(hidden, out_sharding=P(batch)))
        return reshard(self.embed.attend(x), like_tokens)


def data(step, rows=16):
    tokens = np.random.default_rng(step).integers(0, VOCAB, (rows, 9)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def loss(model, batch):
    logits = model(batch["x"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Mean(nats.astype(jnp.float32)), {"largest": Mean(logits.max(-1).max(-1))}


def train(is_explicit, mesh, rows=16, **options):
    # Padding would be counted, so it is refused for a model that counts.
    counts = rows == 16
    model = functools.partial(Block, is_explicit, counts)
    if mesh == "one":
        mesh = make_mesh("data=1,model=1", jax.devices()[:1])
    spec = abstract_state(model, optax.adam(1e-2), mesh, Rules(fsdp_min_size=1))
    step = make_train_step(spec, loss, data(0, rows), **options)
    assert step.spec.is_explicit == is_explicit
    evaluate = make_eval_step(spec, loss, data(0, rows))
    state, values = init_state(spec, 0), []
    batches = functools.partial(data, rows=rows)
    for _, new_state, metrics in steps(step, state, batches, until=3):
        values += [float(metrics[name]) for name in ("loss", "grad_norm", "largest")]
        state = new_state
    means = evaluate.on(state, batches(9), evaluate.layout(rows, rows))
    return [*values, *(float(means[name].value) for name in sorted(means))], state


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("one", {}, marks=pytest.mark.slow),
        pytest.param("data=8,model=1", {}, marks=pytest.mark.slow),
        pytest.param("data=4,model=2", {}, marks=pytest.mark.slow),
        pytest.param(
            "data=2,fsdp=2,model=2", {"accumulate": 2}, marks=pytest.mark.slow
        ),
        ("data=4,model=2", {"rows": 13}),
    ],
)
def test_the_result_is_that_of_the_plain_model_on_one_device(mesh, options):
    expected, expected_state = train(False, "one", **options)
    values, state = train(True, mesh, **options)
    np.testing.assert_allclose(values, expected, rtol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, state.other, expected_state.other)


@pytest.mark.slow
def test_verify_compares_such_a_model():
    run = Run(
        model=functools.partial(Block, True),
        loss=loss,
        optimizer=optax.adam(1e-2),
        data=data,
        steps=2,
        mesh="data=4,model=2",
    )
    found = verify(run, ["data=4,model=2", "data=2,fsdp=2,model=2"], steps=2)
    assert found.ok, str(found)


def test_the_error_of_such_a_model_is_that_of_its_own_code():
    class Wrong(Block):
        def __call__(self, tokens):
            return super().__call__(tokens) @ jnp.ones((3, 3))

    spec = abstract_state(
        functools.partial(Wrong, True), optax.sgd(1.0), "data=4,model=2"
    )
    with pytest.raises(ConfigError, match=r"dot_general.*test_explicit_models"):
        make_train_step(spec, loss, data(0))


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)

    def __call__(self, x):
        return nnx.max_pool(self.conv(x), (2, 2), strides=(2, 2))


def test_a_convolution_does_not_need_explicit_axes():
    """JAX compares the mesh of its input with the mesh of the context."""
    spec = abstract_state(Convolution, optax.sgd(0.1), "data=8")
    batch = {"x": np.ones((8, 6, 6, 1), np.float32)}
    step = make_train_step(spec, lambda model, b: (model(b["x"]) ** 2).mean(), batch)
    assert not step.spec.is_explicit


class Constrained(nnx.Module):
    """A model with JAX's own constraint on an activation."""

    def __init__(self, rngs):
        column = {"out_sharding": P(None, "model")}
        self.linear = nnx.Linear(8, 8, kernel_metadata=column, rngs=rngs)

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(self.linear(x), P("data", "model"))


def test_a_constraint_with_a_partition_spec():
    spec = abstract_state(Constrained, optax.sgd(0.1), "data=4,model=2")
    batch = {"x": np.ones((8, 8), np.float32)}
    step = make_train_step(spec, lambda model, b: (model(b["x"]) ** 2).mean(), batch)
    assert not step.spec.is_explicit
    assert "sharding_constraint" in str(step.function.trace(spec.abstract, batch).jaxpr)


def test_a_model_may_pass_a_mesh_to_shard_map():
    mesh = make_mesh("data=8")
    rows = P("data")

    class Doubled(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            double = jax.shard_map(
                lambda x: 2 * x, mesh=mesh, in_specs=rows, out_specs=rows
            )
            return self.out(double(x))

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    spec = abstract_state(Doubled, optax.sgd(0.1), mesh)
    step = make_train_step(
        spec, lambda model, batch: Mean(model(batch["x"]) ** 2), {"x": x}
    )
    state = init_state(spec, seed=0)
    expected = np.mean((2 * x @ np.asarray(state.params["out"]["kernel"])) ** 2)
    _, metrics = step(state, step.place({"x": x}))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
