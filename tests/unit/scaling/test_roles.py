"""The roles of parameters follow from shapes and a trace, for models that nobody annotated."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shardwise import MoE
from shardwise.errors import ConfigError
from shardwise.scaling.roles import find_roles
from shardwise.scaling.values import _reshaped
from shardwise.text import any_layer
from tests.helpers.sizes import (
    DigitsNet,
    Mixer,
    Perceptron,
    Recurrent,
    Transformer,
    gpt_run,
    image_run,
    llama_run,
    perceptron_run,
    token_run,
)


def roles(make_run, base=32, **options):
    found = find_roles(make_run, base, **options).parameters
    return {any_layer(path): parameter.role for path, parameter in found.items()}


def model_run(model, make_run):
    return lambda width: make_run(lambda rngs: model(width, rngs))


GPT = {
    "attn/out/bias": "vector",
    "attn/out/kernel": "hidden",
    "attn/qkv/bias": "vector",
    "attn/qkv/kernel": "hidden",
    "mlp/down/bias": "vector",
    "mlp/down/kernel": "hidden",
    "mlp/up/bias": "vector",
    "mlp/up/kernel": "hidden",
    "norm1/bias": "vector",
    "norm1/scale": "vector",
    "norm2/bias": "vector",
    "norm2/scale": "vector",
}
LLAMA = dict.fromkeys(["down", "gate", "key", "out", "query", "up", "value"], "hidden")
LLAMA |= dict.fromkeys(["norm1/scale", "norm2/scale"], "vector")


def named(prefix, found, **others):
    return {f"{prefix}/{name}": role for name, role in found.items()} | others


@pytest.mark.parametrize("scan_layers", [False, True])
def test_gpt(scan_layers):
    found = roles(partial(gpt_run, scan_layers=scan_layers))
    prefix = "blocks" if scan_layers else "blocks/*"
    expected = named(prefix, GPT, tokens="tied", positions="vector")
    expected |= {"norm/scale": "vector", "norm/bias": "vector"}
    assert found == expected


def test_the_multiplier_of_a_tied_table_goes_into_the_last_norm():
    found = find_roles(gpt_run, 32).parameters
    assert found["tokens"].folds == {"norm/scale", "norm/bias"}
    found = find_roles(partial(llama_run, tied=True), 32).parameters
    assert found["tokens"].folds == {"norm/scale"}


def test_layers_of_a_scan_are_known():
    found = find_roles(partial(gpt_run, scan_layers=True), 32).parameters
    kernel = found["blocks/mlp/up/kernel"]
    assert (kernel.layers, kernel.inputs, kernel.outputs) == ((0,), (1,), (2,))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_llama(scan_layers):
    found = roles(partial(llama_run, scan_layers=scan_layers))
    prefix = "blocks" if scan_layers else "blocks/*"
    others = {"head": "output", "norm/scale": "vector", "tokens": "input"}
    assert found == named(prefix, LLAMA, **others)


def test_experts():
    found = roles(partial(llama_run, num_experts=4))
    assert found["blocks/moe/router"] == "output"
    for name in ("gate", "up", "down"):
        assert found[f"blocks/moe/{name}"] == "hidden"


def test_digits_net():
    assert roles(model_run(DigitsNet, image_run)) == {
        "conv1/kernel": "input",
        "conv1/bias": "vector",
        "norm1/scale": "vector",
        "norm1/bias": "vector",
        "conv2/kernel": "hidden",
        "conv2/bias": "vector",
        "norm2/scale": "vector",
        "norm2/bias": "vector",
        "out/kernel": "output",
        "out/bias": "finite",
    }


def test_mixer():
    found = roles(model_run(Mixer, image_run))
    expected = {
        "stem/kernel": "input",
        "patches/kernel": "finite",
        "up/kernel": "hidden",
        "down/kernel": "hidden",
        # Each channel has its own filter.
        "depthwise/kernel": "input",
        "head/kernel": "output",
    }
    assert found.items() >= expected.items()


def test_transformer_of_plain_layers():
    found = roles(model_run(Transformer, token_run))
    kernels = {path: role for path, role in found.items() if path.endswith("/kernel")}
    assert kernels == {
        "attention/query/kernel": "hidden",
        "attention/key/kernel": "hidden",
        "attention/value/kernel": "hidden",
        "attention/out/kernel": "hidden",
        "head/kernel": "output",
    }
    assert found["embed/embedding"] == "input"
    assert found["start"] == "vector"


def test_recurrent_net():
    found = roles(model_run(Recurrent, token_run))
    kernels = {path: role for path, role in found.items() if path.endswith("/kernel")}
    hidden = [path for path in kernels if path.startswith("rnn")]
    assert len(hidden) == 8
    assert {kernels.pop(path) for path in hidden} == {"hidden"}
    assert kernels == {"head/kernel": "output"}


def test_residual_branches():
    found = find_roles(gpt_run, 32)
    members = {path for branch in found.branches for path in branch}
    kernels = {path for path in members if path.endswith("kernel")}
    biases = members - kernels
    assert {any_layer(path) for path in kernels} == {
        "blocks/*/attn/out/kernel",
        "blocks/*/mlp/down/kernel",
    }
    assert {any_layer(path) for path in biases} == {
        "blocks/*/attn/out/bias",
        "blocks/*/mlp/down/bias",
    }


class Sparse(nnx.Module):
    """A residual layer of experts, which choose tokens up to a capacity if there is one."""

    def __init__(self, width, rngs, capacity=None):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        options = {"num_experts": 4, "top_k": 2, "capacity": capacity}
        self.moe = MoE(width, 2 * width, rngs=rngs, **options)
        self.head = nnx.Linear(width, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(x)[0])


@pytest.mark.parametrize(
    ("make_run", "expected"),
    [
        (
            partial(llama_run, num_experts=4, scan_layers=False),
            {"blocks/*/out", "blocks/*/moe/down"},
        ),
        (partial(llama_run, num_experts=4), {"blocks/out", "blocks/moe/down"}),
        (model_run(Sparse, token_run), {"moe/down"}),
        (model_run(partial(Sparse, capacity=1.25), token_run), {"moe/down"}),
    ],
)
def test_residual_branches_of_experts(make_run, expected):
    found = find_roles(make_run, 32)
    members = {any_layer(path) for branch in found.branches for path in branch}
    assert members == expected
    assert not found.unscaled


class Branches(nnx.Module):
    """A stream to which `add` adds branches."""

    def __init__(self, add, width, rngs):
        self.add = add
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.inner = nnx.Linear(width, width, rngs=rngs)
        self.first = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        # This is `x + 0.04 * x**3`, but not a branch with parameters.
        x = nnx.gelu(self.embed(tokens))
        return self.head(self.add(self, x))


def dropped(model, x):
    return x + model.dropout(model.first(nnx.relu(model.inner(x))))


def masked(model, x):
    return x + jnp.where(x > 0, model.first(nnx.relu(model.inner(x))), 0)


def mixed(model, x):
    """Two experts, whose sum is weighted."""
    gate = jax.nn.softmax(x[..., :2])
    total = jnp.zeros_like(x)
    for i, expert in enumerate((model.first, model.second)):
        total = total + gate[..., i, None] * expert(nnx.relu(x))
    return x + total


def stacked(model, x):
    gate = jax.nn.softmax(x[..., :2])
    outputs = jnp.stack([model.first(nnx.relu(x))] * 2, axis=-1)
    return x + (gate[..., None, :] * outputs).sum(-1)


def parallel(model, x):
    hidden = nnx.relu(model.inner(x))
    return x + model.first(hidden) + model.second(hidden)


def in_turn(model, x):
    x = x + model.first(nnx.relu(model.inner(x)))
    return x + model.second(nnx.relu(x))


def squashed(model, x):
    return x + jnp.tanh(model.inner(x))


SECOND = {"second/kernel", "second/bias"}


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (dropped, {"first/kernel"}),
        (masked, {"first/kernel"}),
        (mixed, {"first/kernel", *SECOND}),
        (stacked, {"first/kernel"}),
        (parallel, {"first/kernel", *SECOND}),
        (in_turn, {"first/kernel", *SECOND}),
        (squashed, set()),
    ],
)
def test_which_parameters_scale_a_branch(add, expected):
    found = find_roles(model_run(partial(Branches, add), token_run), 32)
    assert {path for branch in found.branches for path in branch} == expected
    places = [place.rpartition(":")[0] for place in found.unscaled]
    assert places == ([] if expected else ["test_roles.py"])


class Buffer(nnx.Module):
    """Tokens are written into an array of parameters."""

    def __init__(self, width, rngs):
        self.buffer = nnx.Param(jax.random.normal(rngs.params(), (17, width)))
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.head = nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, tokens):
        x = jnp.broadcast_to(self.buffer[...], (len(tokens), *self.buffer.shape))
        return self.head(x.at[:, 1:].set(self.embed(tokens))[:, 1:])


def test_an_array_that_activations_are_written_to_is_used():
    found = find_roles(model_run(Buffer, token_run), 32).parameters["buffer"]
    assert found.role == "vector"
    assert found.why.startswith("scatter (test_roles.py:")


def test_overrides_by_path():
    found = roles(perceptron_run, overrides={"hidden/*": "vector"})
    assert found["hidden/kernel"] == "vector"
    assert found["first/kernel"] == "input"
    with pytest.raises(ConfigError, match=r"matches no parameter\. Did you mean"):
        roles(perceptron_run, overrides={"hiden/kernel": "vector"})
    with pytest.raises(ConfigError, match=r"role 'hiden' of .* is unknown"):
        roles(perceptron_run, overrides={"*": "hiden"})


def test_heads_that_grow_are_refused():
    def make_run(width):
        return gpt_run(width, head_width=width // 2)

    with pytest.raises(ConfigError, match="Keep the width of a head constant"):
        find_roles(make_run, 32)


class TiedWithoutNorm(nnx.Module):
    def __init__(self, width, rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, inputs):
        return self.embed.attend(nnx.relu(self.hidden(self.embed(inputs))))


def test_a_tied_table_without_a_norm_is_refused():
    with pytest.raises(ConfigError, match=r"'embed/embedding'.*Untie it"):
        find_roles(model_run(TiedWithoutNorm, token_run), 32)


class TwoHeads(nnx.Module):
    def __init__(self, width, rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.value = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, inputs):
        x = self.norm(self.embed(inputs))
        return self.embed.attend(x) + self.value(x)


def test_a_norm_with_two_readers_is_refused():
    with pytest.raises(ConfigError, match="'value/kernel' reads the same activations"):
        find_roles(model_run(TwoHeads, token_run), 32)


class Unknown(Perceptron):
    def __call__(self, x):
        order = jnp.cumsum(self.hidden.kernel[...] * x.mean(), axis=0)
        return super().__call__(x) + order.sum()


def test_other_uses_do_not_hide_a_matmul():
    assert roles(model_run(Unknown, image_run))["hidden/kernel"] == "hidden"


def test_an_argument_that_is_not_a_width_is_refused():
    with pytest.raises(ConfigError, match="no parameter grows from width 16 to 32"):
        find_roles(lambda width: perceptron_run(64), 16)
    with pytest.raises(ConfigError, match="have different parameters: blocks"):
        find_roles(lambda depth: gpt_run(32, depth), 2)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), [{0, 1}]),
        ((24,), (4, 6), [{0}, {0}]),
        ((4, 1, 6), (4, 6, 1), [{0}, {2}, set()]),
        ((2, 3, 4), (6, 2, 2), [{0, 1}, {2}, {2}]),
        ((1, 5), (5,), [{1}]),
    ],
)
def test_dims_after_a_reshape(before, after, expected):
    dims = tuple(frozenset([dim]) for dim in range(len(before)))
    assert list(_reshaped(before, dims, after)) == expected


def test_kernels_of_gpus_do_not_hide_the_roles(monkeypatch):
    expected = roles(gpt_run)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert roles(gpt_run) == expected
