"""The dtype that models compute in, and sums of 16-bit floats in float32, for any model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Mean, init_state, make_mesh
from shardwise.flops import matmul_dtypes
from shardwise.precision import sums_in_float32
from shardwise.state import abstract_state
from shardwise.step import make_eval_step, make_train_step
from shardwise.weights.adapters import lora

TOKENS = 20_000
WEIGHTS = np.random.default_rng(0).uniform(0.5, 1.5, (TOKENS, 8)).astype("f4")


class Model(nnx.Module):
    """An embedding of one token, and a bias: both gradients are sums over all tokens."""

    def __init__(self, scan, rngs):
        self.embed = nnx.Embed(4, 8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.scan = scan

    def __call__(self, tokens):
        def layer(linear, x):
            return linear(x)

        x = self.embed(tokens)
        if not self.scan:
            return layer(self.linear, x)
        axes = {"in_axes": (None, nnx.Carry), "out_axes": nnx.Carry}
        return nnx.scan(nnx.remat(layer), **axes, length=1)(self.linear, x)


def gradients(compute_dtype, scan, accumulate=1):
    """Return the gradients of the weighted sum of all outputs."""

    def loss(model, batch):
        return Mean(
            (model(batch["tokens"]) * batch["weights"]).sum(-1).astype(jnp.float32),
            1 / TOKENS,
        )

    spec = abstract_state(
        lambda rngs: Model(scan, rngs), optax.sgd(1.0), make_mesh("data=8")
    )
    batch = {
        "tokens": np.zeros(TOKENS, "i4"),
        "weights": WEIGHTS.astype(compute_dtype or "f4"),
    }
    step = make_train_step(
        spec, loss, batch, compute_dtype=compute_dtype, accumulate=accumulate
    )
    return step.gradients(init_state(spec, 0), step.place(batch))[0]


@pytest.mark.parametrize(("scan", "accumulate"), [(False, 1), (True, 1), (False, 4)])
def test_gradients_of_embeddings_and_biases_are_accurate_in_bfloat16(scan, accumulate):
    exact = gradients(None, scan)
    half = gradients("bfloat16", scan, accumulate)
    for layer, name in (("embed", "embedding"), ("linear", "bias")):
        want = exact[layer][name]
        tolerance = 0.01 * float(jnp.abs(want).max())
        np.testing.assert_allclose(
            half[layer][name], want, rtol=0.02, atol=tolerance, err_msg=name
        )


def test_jax_alone_loses_most_of_such_a_sum():
    """This is why the module exists: most of the gradient of a frequent token is lost."""
    g = jnp.asarray(WEIGHTS, jnp.bfloat16)

    def pull(table):
        return jax.vjp(lambda t: t[jnp.zeros(TOKENS, int)], table)[1](g)[0]

    table, exact = jnp.zeros((4, 8), jnp.bfloat16), WEIGHTS.astype(np.float64).sum(0)
    assert (np.asarray(jax.jit(pull)(table), np.float64)[0] < 0.1 * exact).all()
    np.testing.assert_allclose(
        np.asarray(jax.jit(sums_in_float32(pull))(table), np.float64)[0],
        exact,
        rtol=0.01,
    )


def test_other_sums_and_structures_do_not_change():
    def function(x, more):
        return {"sum": x.sum(), "more": [more, None], "count": jnp.cumsum(more)}

    x, more = jnp.arange(6.0), jnp.arange(3)
    plain, wide = function(x, more), sums_in_float32(function)(x, more)
    assert jax.tree.structure(plain) == jax.tree.structure(wide)
    jax.tree.map(np.testing.assert_array_equal, plain, wide)


# Models of float32 inputs (B, 6, 8), written as Flax users write them. `options` are those of every
# layer: none for shardwise, and `dtype=jnp.bfloat16` for the reference.
class MLP(nnx.Module):
    def __init__(self, rngs, **options):
        self.first = nnx.Linear(8, 32, rngs=rngs, **options)
        self.norm = nnx.LayerNorm(32, rngs=rngs, **options)
        self.activation = nnx.PReLU(**options)
        self.last = nnx.Linear(32, 4, rngs=rngs, **options)

    def __call__(self, x):
        return self.last(self.activation(self.norm(self.first(x))))


class CNN(nnx.Module):
    def __init__(self, rngs, **options):
        self.conv = nnx.Conv(8, 16, 3, rngs=rngs, **options)
        self.batch_norm = nnx.BatchNorm(16, rngs=rngs, **options)
        self.transposed = nnx.ConvTranspose(16, 16, 3, rngs=rngs, **options)
        self.group_norm = nnx.GroupNorm(16, 4, rngs=rngs, **options)
        self.head = nnx.LinearGeneral((6, 16), 4, axis=(1, 2), rngs=rngs, **options)

    def __call__(self, x):
        x = nnx.relu(self.batch_norm(self.conv(x)))
        return self.head(nnx.relu(self.group_norm(self.transposed(x))))


class Embedding(nnx.Module):
    def __init__(self, rngs, **options):
        self.embed = nnx.Embed(16, 8, rngs=rngs, **options)
        self.norm = nnx.RMSNorm(8, rngs=rngs, **options)
        self.einsum = nnx.Einsum("bti,ij->btj", (8, 8), (8,), rngs=rngs, **options)

    def __call__(self, x):
        x = self.embed((x[..., 0] * 4).astype(jnp.int32) % 16)
        return self.embed.attend(self.einsum(self.norm(x)))


class Attention(nnx.Module):
    def __init__(self, rngs, **options):
        self.attention = nnx.MultiHeadAttention(
            2, 8, normalize_qk=True, decode=False, rngs=rngs, **options
        )
        # `nnx.LoRALinear` passes no dtype on to its adapters.
        self.lora = nnx.LoRA(8, 2, 4, rngs=rngs, **options)

    def __call__(self, x):
        return self.lora(self.attention(x))


class Recurrent(nnx.Module):
    def __init__(self, rngs, cell, **options):
        self.rnn = nnx.RNN(cell(8, 16, rngs=rngs, **options))
        self.head = nnx.Linear(16, 4, rngs=rngs, **options)

    def __call__(self, x):
        return self.head(self.rnn(x))


class LSTM(Recurrent):
    def __init__(self, rngs, **options):
        super().__init__(rngs, nnx.OptimizedLSTMCell, **options)


class GRU(Recurrent):
    def __init__(self, rngs, **options):
        super().__init__(rngs, nnx.GRUCell, **options)


class SimpleRNN(Recurrent):
    def __init__(self, rngs, **options):
        super().__init__(rngs, nnx.SimpleCell, **options)


class Stack(nnx.Module):
    """Layers in one scan, whose backward pass computes them again."""

    def __init__(self, rngs, **options):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return nnx.Linear(8, 8, rngs=rngs, **options)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def apply(layer, x):
            return nnx.tanh(layer(x)).astype(jnp.float32)

        return apply(self.layers, x)


INPUTS = np.random.default_rng(1).normal(size=(8, 6, 8)).astype("f4")
# bfloat16 rounds 1234.5 to 1232.
TARGET = np.full(8, 1234.5, "f4")


def squared_error(model, batch):
    assert batch["inputs"].dtype == batch["targets"].dtype == jnp.float32
    outputs = model(batch["inputs"])
    return Mean((outputs.mean((1, *range(2, outputs.ndim))) - batch["targets"]) ** 2)


def on_one_device(model, compute_dtype="bfloat16", loss=squared_error):
    """Return a spec, a batch, and the training step for it."""
    spec = abstract_state(
        model, optax.sgd(1e-3), make_mesh("data=1", jax.devices()[:1])
    )
    batch = {"inputs": INPUTS, "targets": TARGET}
    return spec, batch, make_train_step(spec, loss, batch, compute_dtype=compute_dtype)


def dtypes_of(step):
    """Return the dtypes of all matmuls of a training step, forward and backward."""
    return set(matmul_dtypes(step.trace().jaxpr.jaxpr).flops)


NETWORKS = [MLP, CNN, Embedding, Attention, LSTM, GRU, Stack]


@pytest.mark.parametrize("network", [*NETWORKS, SimpleRNN])
def test_layers_compute_in_the_compute_dtype_with_float32_inputs(network):
    spec, batch, step = on_one_device(network)
    forward = jax.make_jaxpr(lambda state: step.spec.module(state)(INPUTS))
    assert set(matmul_dtypes(forward(spec.abstract).jaxpr).flops) == {"bfloat16"}
    # JAX computes the scores of an attention in float32, so their gradients are float32, too.
    if network is not Attention:
        assert dtypes_of(step) == {"bfloat16"}
    state, metrics = step(init_state(spec, 0), step.place(batch))
    assert metrics["loss"].dtype == jnp.float32
    # The targets are not rounded: a target of 1232 would change the loss by 0.4 %.
    np.testing.assert_allclose(metrics["loss"], 1234.5**2, rtol=1e-3)
    for leaf in jax.tree.leaves((state.params, state.other)):
        assert leaf.dtype == jnp.float32


# Flax cannot scan over a `SimpleCell` in bfloat16, so that it has no reference.
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(network, marks=[pytest.mark.slow] * (network in (LSTM, GRU)))
        for network in NETWORKS
    ],
)
def test_loss_and_gradients_are_those_of_a_flax_model_built_with_the_dtype(network):
    spec, batch, step = on_one_device(network)
    state = init_state(spec, 0)
    reference = network(nnx.Rngs(0), dtype=jnp.bfloat16)
    nnx.update(reference, nnx.state(spec.module(state), nnx.Param))

    @nnx.jit
    @nnx.value_and_grad
    def value_and_grad(model):
        return squared_error(model, batch).total.mean()

    value, want = value_and_grad(reference)
    got, means, _ = step.gradients(state, step.place(batch))
    assert float(means["loss"].value) == float(value)
    # Sums over many terms differ: shardwise computes them in float32.
    total = sum(jnp.sum(x**2) for x in jax.tree.leaves(want))
    pairs = zip(
        jax.tree.leaves(got), jax.tree.leaves(nnx.to_pure_dict(want)), strict=True
    )
    assert sum(jnp.sum((a - b) ** 2) for a, b in pairs) < 0.05**2 * total


def test_evaluation_computes_in_the_same_dtype_and_keeps_running_statistics():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(x))

    spec, batch, _ = on_one_device(Normed)
    state = init_state(spec, 0)
    # bfloat16 would round this mean to 1.
    state.other["norm"]["mean"] = jnp.full(8, 1.001)
    seen = []

    def loss(model, batch):
        normed = model.norm(batch["inputs"])
        assert model.head(normed).dtype == normed.dtype == jnp.bfloat16
        seen.append(True)
        return normed.astype(jnp.float32).mean()

    shifted = {**batch, "inputs": np.full_like(INPUTS, 1.0)}
    evaluate = make_eval_step(spec, loss, shifted, compute_dtype="bfloat16")
    got = float(evaluate(state, shifted, 8)["loss"].value)
    assert seen
    np.testing.assert_allclose(got, -0.001, rtol=0.02)


class Chosen(nnx.Module):
    """A model with layers and variables that stay in float32."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(4, 8, dtype=jnp.float32, rngs=rngs)
        self.hidden = nnx.Linear(8, 8, rngs=rngs)
        self.router = nnx.Linear(8, 4, dtype=jnp.float32, rngs=rngs)
        self.kept = nnx.Linear(
            8, 4, kernel_metadata={"keep_dtype": True}, use_bias=False, rngs=rngs
        )

    def __call__(self, x):
        hidden = self.hidden(x)
        assert hidden.dtype == jnp.bfloat16
        embedded = self.embed(jnp.zeros(len(x), jnp.int32))
        outputs = {"router": self.router(hidden), "kept": self.kept(hidden)}
        assert {x.dtype for x in (embedded, *outputs.values())} == {np.dtype("float32")}
        return {"embed": embedded, "hidden": hidden, **outputs}


def test_layers_with_a_dtype_of_their_own_keep_it_and_their_exact_weights():
    def loss(model, batch):
        outputs = model(batch["inputs"])
        total = sum(x.astype(jnp.float32).sum() for x in outputs.values())
        return total, {
            "router": outputs["router"][0, 0, 0],
            "embed": outputs["embed"][0, 0],
        }

    spec, batch, step = on_one_device(Chosen, loss=loss)
    state = init_state(spec, 0)
    reference = spec.module(state)
    hidden = nnx.jit(lambda m, x: m(x))(step.spec.module(state), INPUTS)["hidden"]
    want = hidden.astype(jnp.float32) @ reference.router.kernel[...]
    embed = reference.embed.embedding[0, 0]
    assert embed != embed.astype(jnp.bfloat16)
    _, metrics = step(jax.tree.map(jnp.copy, state), step.place(batch))
    # Equal but for the order of the sum; a rounded kernel would be off by 0.1 %.
    np.testing.assert_allclose(metrics["router"], want[0, 0, 0], rtol=1e-5)
    assert metrics["embed"] == embed


def test_a_weight_with_adapters_computes_in_the_compute_dtype():
    spec, _, step = on_one_device(lora(MLP, "first/kernel", rank=2))
    forward = jax.make_jaxpr(lambda state: step.spec.module(state)(INPUTS))
    found = matmul_dtypes(forward(spec.abstract).jaxpr)
    # The product of both adapters is float32, by choice.
    assert found.flops["float32"] == 2 * 8 * 2 * 32
    assert not found.unasked
    assert step.spec.module(init_state(spec, 0))(INPUTS).dtype == jnp.bfloat16


def test_raw_matmuls_of_float32_inputs_stay_float32_and_are_found():
    class Raw(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones((8, 4)))

        def __call__(self, x):
            return x @ self.kernel[...]

    _, _, step = on_one_device(Raw)
    found = step.traced.matmuls
    line = f"test_precision.py:{Raw.__call__.__code__.co_firstlineno + 1}"
    assert found.unasked_lines == {"float32": line}
    (finding,) = step.traced.findings
    assert finding.name == "matmul-dtype"
    assert f"100.0 % of the matmul FLOPs are in float32 ({line})" in finding.fact
    # Without a compute dtype, float32 is what the user asked for.
    assert not on_one_device(Raw, None)[2].traced.findings


def test_a_model_whose_layers_all_have_another_dtype_is_found():
    def model(rngs):
        return MLP(rngs, dtype=jnp.float32)

    (finding,) = on_one_device(model)[2].traced.findings
    assert "100.0 % of the matmul FLOPs are in float32" in finding.fact
    assert not on_one_device(MLP)[2].traced.findings
