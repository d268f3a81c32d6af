"""Layers of Flax, JAX and Optax compute the same when they are accelerated."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import accelerate
from shardwise.acceleration.accelerate import rewrite_calls
from shardwise.kernels import activation, cross_entropy, lookup, norm
from shardwise.tracing.jaxpr import inner_jaxprs

B, T, D, V = 2, 8, 16, 24
HEADS = B, T, 4, D // 4
LABELS = np.arange(B * T, dtype=np.int32).reshape(B, T) % 5


def called(function, *args):
    """Return how often the accelerated function calls each layer of shardwise."""
    graphdef, state = nnx.split(args)

    def on_state(state):
        return jax.tree.leaves(accelerate(function)(*nnx.merge(graphdef, state)))

    names = Counter()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "jit":
                names[equation.params["name"]] += 1
            if equation.primitive.name in ("scan", "remat", "remat2", "checkpoint"):
                for inner in inner_jaxprs(equation.params):
                    visit(inner)

    visit(jax.make_jaxpr(on_state)(state).jaxpr)
    return names


class Net(nnx.Module):
    """Parts for a test, by name."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


def linear(ins, outs, **options):
    return nnx.Linear(
        ins, outs, bias_init=nnx.initializers.normal(0.5), rngs=nnx.Rngs(0), **options
    )


def layer_norm(**options):
    rngs = nnx.Rngs(1)
    scale_init = nnx.initializers.normal(1.0)
    return nnx.LayerNorm(D, scale_init=scale_init, rngs=rngs, **options)


def residual(net, x):
    x = x + net.up(x)
    y = net.norm(x)
    return (x + net.down(y)) * net.norm(net.down(y) + x)


def qkv(split):
    def attend(net, x):
        q, k, v = split(net.qkv(x))
        out = jax.nn.dot_product_attention(*(y.reshape(HEADS) for y in (q, k, v)))
        return net.out(out.reshape(x.shape))

    return attend


def grouped(net, x):
    q, k, v = (layer(x) for layer in (net.q, net.k, net.v))
    k, v = (y.reshape(B, T, 2, D // 4) for y in (k, v))
    out = jax.nn.dot_product_attention(q.reshape(HEADS), k, v, is_causal=True)
    return net.out(out.reshape(x.shape))


def masked(make_mask):
    def attend(net, x):
        return net.mha(x, mask=make_mask(x))

    return attend


def unstack_heads(y):
    return jnp.unstack(y.reshape(B, T, 3, *HEADS[2:]), axis=2)


def index_heads(y):
    y = y.reshape(B, T, 3, *HEADS[2:])
    return y[:, :, 0], y[:, :, 1], y[:, :, 2]


def slices(y):
    return y[..., :D], y[..., D : 2 * D], y[..., 2 * D :]


def losses(logits, features):
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    return nats[..., None] + 0 * features


def attention_parts():
    return {"qkv": linear(D, 3 * D), "out": linear(D, D)}


def heads_parts():
    return {
        "q": linear(D, D),
        "k": linear(D, D // 2),
        "v": linear(D, D // 2),
        "out": linear(D, D),
    }


def mha(**options):
    return {
        "mha": nnx.MultiHeadAttention(
            4, D, decode=False, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0)
        )
    } | options


def mlp(**options):
    return {"up": linear(D, 4 * D, **options), "down": linear(4 * D, D, **options)}


def embed():
    return {"embed": nnx.Embed(V, D, rngs=nnx.Rngs(0))}


def has_causal_mask(x):
    return nnx.make_causal_mask(x[..., 0])


# For each case: the parts of a model, what is computed from it and an array (B, T, D), and the
# layers that are called in its place.
CASES = {
    "norm": (
        lambda: {"norm": layer_norm()},
        lambda net, x: net.norm(x),
        {"layer_norm": 1},
    ),
    "norm, slow variance": (
        lambda: {"norm": layer_norm(use_fast_variance=False, epsilon=0.1)},
        lambda net, x: net.norm(x),
        {"layer_norm": 1},
    ),
    "norm without bias": (
        lambda: {"norm": layer_norm(use_bias=False)},
        lambda net, x: net.norm(x),
        {"layer_norm": 1},
    ),
    "norm of rows": (
        lambda: {"norm": layer_norm()},
        lambda net, x: net.norm(x[0])[None],
        {"layer_norm": 1},
    ),
    "residual": (
        lambda: {"norm": layer_norm(), "up": linear(D, D), "down": linear(D, D)},
        residual,
        {"add_layer_norm": 2},
    ),
    "mlp": (
        mlp,
        lambda net, x: net.down(nnx.gelu(net.up(x))),
        {"gelu_mlp": 1},
    ),
    "mlp without biases": (
        lambda: mlp(use_bias=False),
        lambda net, x: net.down(jax.nn.gelu(net.up(x))),
        {"gelu_mlp": 1},
    ),
    "gelu alone": (
        mlp,
        lambda net, x: net.down(2 * nnx.gelu(net.up(x))),
        {"bias_gelu": 1, "linear_layer": 2},
    ),
    "embed": (
        embed,
        lambda net, x: net.embed(LABELS) * x,
        {"look_up": 1},
    ),
    "loss of a tied layer": (
        embed,
        lambda net, x: losses(net.embed.attend(x), x),
        {"linear_token_losses": 1},
    ),
    "loss of an output layer": (
        lambda: {"head": linear(D, V, use_bias=False)},
        lambda net, x: losses(net.head(x).astype(jnp.float32), x),
        {"linear_token_losses": 1},
    ),
    "loss of an output layer with a bias": (
        lambda: {"head": linear(D, V)},
        lambda net, x: losses(net.head(x), x),
        {"token_losses": 1, "linear_layer": 1},
    ),
    "loss and another use of the logits": (
        lambda: {"head": linear(D, V, use_bias=False)},
        lambda net, x: losses(logits := net.head(x), x) * logits.max(-1, keepdims=True),
        {"token_losses": 1, "linear_layer": 1},
    ),
    "heads, split": (
        attention_parts,
        qkv(partial(jnp.split, indices_or_sections=3, axis=-1)),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "heads, sliced": (
        attention_parts,
        qkv(slices),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "heads, unstacked": (
        attention_parts,
        qkv(unstack_heads),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "heads, indexed": (
        attention_parts,
        qkv(index_heads),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "grouped heads": (
        heads_parts,
        grouped,
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "MultiHeadAttention": (
        mha,
        lambda net, x: net.mha(x),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "MultiHeadAttention, causal": (
        mha,
        lambda net, x: net.mha(x, is_causal=True),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "MultiHeadAttention, make_causal_mask": (
        mha,
        masked(has_causal_mask),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
    "MultiHeadAttention, tril": (
        mha,
        masked(lambda x: jnp.tril(jnp.ones((T, T), bool))[None, None]),
        {"attention_layer": 1, "linear_layers": 1, "linear_layer": 1},
    ),
}


def use_gpu_kernels(monkeypatch):
    """Use the kernels for GPUs, in the interpreter of Pallas."""
    for module in (activation, norm):
        monkeypatch.setattr(module, "has_gpu_kernels", lambda: True)
    for module in (cross_entropy, lookup):
        monkeypatch.setattr(module, "platform", lambda: "gpu")


def value_and_grads(loss, net, x, dtype):
    graphdef, state = nnx.split(net)

    def total(state, x):
        state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
        y = loss(nnx.merge(graphdef, state), x.astype(dtype))
        return jnp.sin(y.astype(jnp.float32)).sum()

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(state, x)


def errors(actual, expected):
    """Return the relative errors of all arrays, and the norms that they are relative to."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        # The gradient of the bias of keys is zero but for rounding.
        yield np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.1)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_flax(case):
    parts, function, layers = CASES[case]
    net = Net(**parts())
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    names = called(function, net, x)
    assert {name: names[name] for name in layers} == layers
    expected = value_and_grads(function, net, x, jnp.float32)
    actual = value_and_grads(accelerate(function), net, x, jnp.float32)
    assert max(errors(actual, expected)) < 1e-4


# Cases with different kernels. cuDNN has no interpreter; kernels/test_flash.py tests ours.
KERNELS = (
    "norm",
    "residual",
    "mlp",
    "gelu alone",
    "embed",
    "loss of an output layer",
    "loss of an output layer with a bias",
)


@pytest.mark.parametrize(
    ("case", "platform"),
    [
        ("heads, split", "cpu"),
        ("MultiHeadAttention, causal", "cpu"),
        *((case, platform) for case in KERNELS for platform in ("cpu", "gpu")),
    ],
)
@pytest.mark.slow
def test_16_bits_are_as_accurate_as_in_flax(case, platform, monkeypatch):
    parts, function, _ = CASES[case]
    if platform == "gpu":
        use_gpu_kernels(monkeypatch)
    net = Net(**parts())
    x = jax.random.normal(jax.random.key(0), (B, T, D)).astype(jnp.bfloat16)
    exact = value_and_grads(function, net, x, jnp.float32)
    plain = errors(value_and_grads(function, net, x, jnp.bfloat16), exact)
    actual = value_and_grads(accelerate(function), net, x, jnp.bfloat16)
    for error, plain_error in zip(errors(actual, exact), plain, strict=True):
        assert error < 2 * plain_error + 0.03


UNTOUCHED = {
    "RMSNorm": (
        lambda: {"norm": nnx.RMSNorm(D, rngs=nnx.Rngs(0))},
        lambda net, x: net.norm(x),
    ),
    "another layer norm": (
        lambda: {"scale": nnx.Param(jnp.ones(D))},
        lambda net, x: jax.nn.standardize(x) * net.scale[...],
    ),
    "exact gelu": (
        mlp,
        lambda net, x: net.down(nnx.gelu(net.up(x[0]), approximate=False)),
    ),
    "relu": (mlp, lambda net, x: net.down(nnx.relu(net.up(x[0])))),
    "smoothed labels": (
        embed,
        lambda net, x: optax.softmax_cross_entropy(
            net.embed.attend(x[0]), jnp.full((T, V), 1 / V)
        ),
    ),
    "attention with a scale": (
        dict,
        lambda net, x: jax.nn.dot_product_attention(*[x.reshape(HEADS)] * 3, scale=0.3),
    ),
    "attention with a mask of the input": (
        dict,
        lambda net, x: jax.nn.dot_product_attention(
            *[x.reshape(HEADS)] * 3, mask=(x[:, None, :, :T] > 0)
        ),
    ),
    "attention with a window": (
        dict,
        lambda net, x: jax.nn.dot_product_attention(
            *[x.reshape(HEADS)] * 3, is_causal=True, local_window_size=3
        ),
    ),
    "convolution": (
        lambda: {"conv": nnx.Conv(D, D, (3,), rngs=nnx.Rngs(0))},
        lambda net, x: net.conv(x),
    ),
    "vmapped layer": (
        mlp,
        lambda net, x: nnx.vmap(lambda net, y: net.up(y[0]), in_axes=(None, 0))(net, x),
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_anything_else_is_left_exactly_as_it_is(case):
    parts, function = UNTOUCHED[case]
    graphdef, state = nnx.split(Net(**parts()))
    x = jnp.ones((B, T, D))
    closed = jax.make_jaxpr(lambda state, x: function(nnx.merge(graphdef, state), x))(
        state, x
    )
    assert rewrite_calls(closed, frozenset({B})) is closed


def test_a_norm_whose_weights_depend_on_its_input_is_found():
    """The stream cannot come from the norm then: its weights need it first."""

    def adaptive(net, x):
        net.norm.scale[...] = net.norm.scale[...] + x.mean((0, 1))
        return x + net.norm(x)

    net = Net(norm=layer_norm())
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    np.testing.assert_allclose(
        accelerate(adaptive)(net, x),
        adaptive(Net(norm=layer_norm()), x),
        rtol=1e-4,
        atol=1e-5,
    )
    assert called(adaptive, Net(norm=layer_norm()), x)["layer_norm"] == 1
