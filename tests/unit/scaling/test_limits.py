"""Models and optimizers that a measurement at two small sizes does not show completely."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import optim
from shardwise.errors import ConfigError
from shardwise.scaling.scaled import find_scaling
from shardwise.scaling.size import Size
from tests.helpers.sizes import gpt_run, image_run, perceptron_run, token_run


class Layers(nnx.Module):
    """Linear layers with and without residual connections."""

    def __init__(self, width, rngs, *, depth=1, hidden=None, **options):
        self.first = nnx.Linear(64, width, use_bias=False, rngs=rngs, **options)
        hidden = width if hidden is None else hidden
        pairs = [(width, hidden), (hidden, width)]
        self.up, self.down = (
            nnx.List(
                [nnx.Linear(*sizes, use_bias=False, rngs=rngs) for _ in range(depth)]
            )
            for sizes in pairs
        )
        self.head = nnx.Linear(width, 10, use_bias=False, rngs=rngs)
        self.factor = 1.0

    def __call__(self, images):
        x = self.first(images.reshape(len(images), -1))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.factor * down(nnx.relu(up(x)))
        return self.head(x)


def factors(make_run, size, base, **options):
    scaling = find_scaling(make_run, size, base, **options)
    return {path: (p.init, p.rate) for path, p in scaling.parameters.items()}


def test_the_epsilon_of_adam_does_not_change_rates():
    def found(eps):
        optimizer = optax.adam(1e-3, eps=eps)
        return factors(
            lambda size: replace(perceptron_run(size.width), optimizer=optimizer),
            Size(512),
            Size(64),
        )

    assert found(1e-8) == found(1e-6) == found(1e-5)
    assert found(1e-8)["hidden/kernel"][1] == 1 / 8
    with pytest.raises(ConfigError, match="epsilon of the optimizer is not small"):
        found(1e-3)


def test_labels_that_depend_on_sizes_are_refused():
    def labels(params):
        return jax.tree.map(lambda x: "adam" if 4096 in x.shape else "sgd", params)

    parts = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)}
    optimizer = optax.multi_transform(parts, labels)

    def model(width):
        return lambda rngs: nnx.Sequential(
            nnx.Embed(4096, width, rngs=rngs), nnx.Linear(width, 32, rngs=rngs)
        )

    with pytest.raises(ConfigError, match="treats parameters by their sizes"):
        factors(
            lambda size: token_run(model(size.width), optimizer), Size(512), Size(64)
        )


def test_sizes_that_grow_later_are_refused():
    def rounded(size):
        hidden = 256 * -(-size.width // 256)
        return image_run(lambda rngs: Layers(size.width, rngs, hidden=hidden))

    with pytest.raises(ConfigError, match=r"differs .* in more than .* down/0/kernel"):
        factors(rounded, Size(512), Size(32))

    def deeper(size):
        depth = 1 + size.width // 256
        return image_run(lambda rngs: Layers(size.width, rngs, depth=depth))

    with pytest.raises(ConfigError, match=r"differs .* in more than .* down/1/kernel"):
        factors(deeper, Size(512), Size(64))


def test_initializations_that_are_no_powers_are_measured():
    glorot = nnx.initializers.xavier_uniform()

    def make_run(size):
        return image_run(lambda rngs: Layers(size.width, rngs, kernel_init=glorot))

    for width in (16, 64, 2**14):
        found = factors(make_run, Size(width), Size(32))
        # Glorot's variance is 2 / (64 + width).
        init = np.sqrt((64 + width) / (64 + 32))
        np.testing.assert_allclose(found["first/kernel"][0], init, rtol=0.02)
        # Square, so it shrinks as it should.
        assert found["up/0/kernel"][0] == 1


def test_gradients_inside_of_branches_shrink_with_the_depth():
    def make_run(size):
        return image_run(
            lambda rngs: Layers(size.width, rngs, depth=size.depth), optimizer
        )

    sizes = Size(32, 8), Size(32, 2)
    optimizer = optax.sgd(0.1)
    found = factors(make_run, *sizes)
    assert found["down/0/kernel"] == (0.25, 0.25)
    assert found["up/0/kernel"] == (1, 4)
    assert found["first/kernel"] == found["head/kernel"] == (1, 1)
    optimizer = optax.adam(0.1)
    found = factors(make_run, *sizes)
    assert found["down/0/kernel"] == (0.25, 0.25)
    assert found["up/0/kernel"] == (1, 1)


class Modulated(nnx.Module):
    """Residual blocks whose norm is modulated by two halves of one array."""

    def __init__(self, width, depth, rngs):
        def linear(*sizes):
            return nnx.Linear(*sizes, use_bias=False, rngs=rngs)

        self.first, self.condition = linear(64, width), linear(64, width)
        self.modulation = nnx.List([linear(width, 2 * width) for _ in range(depth)])
        self.norm = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(depth)])
        self.down = nnx.List([linear(width, width) for _ in range(depth)])
        self.head = linear(width, 10)

    def __call__(self, images):
        pixels = images.reshape(len(images), -1)
        x, condition = self.first(pixels), self.condition(pixels)
        for modulate, norm, down in zip(
            self.modulation, self.norm, self.down, strict=True
        ):
            shift, scale = jnp.split(modulate(condition), 2, axis=-1)
            x = x + down(norm(x) * (1 + scale) + shift)
        return self.head(x)


def test_halves_of_one_array_are_no_residual_stream():
    def make_run(size):
        return image_run(lambda rngs: Modulated(size.width, size.depth, rngs))

    found = factors(make_run, Size(32, 4), Size(32, 2))
    assert found["norm/0/scale"] == found["norm/0/bias"] == (1, 1)
    assert found["down/0/kernel"] == (0.5, 0.5)


def test_a_square_kernel_and_its_transpose_are_hidden():
    class Tied(nnx.Module):
        def __init__(self, width, rngs):
            self.first = nnx.Linear(64, width, use_bias=False, rngs=rngs)
            self.kernel = nnx.Param(
                jax.random.normal(rngs.params(), (width, width)) / width**0.5
            )
            self.head = nnx.Linear(width, 10, use_bias=False, rngs=rngs)

        def __call__(self, images):
            x = nnx.relu(self.first(images.reshape(len(images), -1)))
            return self.head(nnx.relu(x @ self.kernel[...]) @ self.kernel[...].T)

    found = factors(
        lambda size: image_run(lambda rngs: Tied(size.width, rngs)), Size(128), Size(32)
    )
    assert found["kernel"] == (1, 0.25)


def test_multipliers_that_depend_on_a_size_are_reported():
    def model(size, rngs):
        layers = Layers(size.width, rngs, depth=size.depth)
        layers.factor = float(np.sqrt(size.width)) / size.depth
        return layers

    def make_run(size):
        return image_run(lambda rngs: model(size, rngs))

    by_width = find_scaling(make_run, Size(64, 2), Size(16, 2)).warnings
    assert len(by_width) == 1
    assert "depends on the width: 2 at width 16, 2.828 at 32" in by_width[0]
    assert by_width[0].startswith("test_limits.py:")
    both = find_scaling(make_run, Size(64, 4), Size(16, 2)).warnings
    assert "depends on the depth: 2 at depth 2, 1 at 4" in both[1]
    # Means, norms, attention and losses divide by sizes, and that is right.
    assert (
        find_scaling(lambda size: gpt_run(size.width, 1), Size(64), Size(32)).warnings
        == ()
    )


def test_overrides():
    def make_run(size):
        return perceptron_run(size.width)

    found = factors(make_run, Size(128), Size(32), roles={"first/*": "finite"})
    assert found["first/kernel"] == found["first/bias"] == (1, 1)
    with pytest.raises(ConfigError, match="'tied' of 'head/kernel' cannot be set"):
        factors(make_run, Size(128), Size(32), roles={"head/kernel": "tied"})


def test_muon_is_not_refused_for_what_it_masks():
    def make_run(size):
        run = perceptron_run(size.width)
        return replace(run, optimizer=optim.muon(1e-3, adam=("first/*", "head/*")))

    assert factors(make_run, Size(512), Size(64))["hidden/kernel"][1] == 8**-0.5


class Additive(nnx.Module):
    """Scores of positions as sums over elementwise products, as in additive attention."""

    def __init__(self, width, rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.keys = nnx.Linear(width, width, rngs=rngs)
        self.query = nnx.Param(jax.random.normal(rngs.params(), (width,)) / width)
        self.gain = nnx.Param(jnp.ones((width,)))
        self.head = nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        # A norm by hand: squares and means do not count.
        x = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1e-6)
        x = x * self.gain[...] - jnp.mean(x * self.gain[...], -1, keepdims=True)
        scores = (jnp.tanh(self.keys(x)) * self.query[...]).sum(-1)
        pooled = (nnx.softmax(scores)[..., None] * x).sum(1, keepdims=True)
        return self.head(x + pooled)


def test_a_vector_whose_products_are_summed_is_an_output():
    def make_run(size):
        return token_run(lambda rngs: Additive(size.width, rngs))

    found = factors(make_run, Size(128), Size(32))
    # Initialized like 1 / width by the model itself, so only its updates get a factor.
    assert found["query"] == (pytest.approx(1, rel=0.1), 0.25)
    assert found["gain"] == (1, 1)
    assert found["keys/kernel"] == (1, 0.25)
    by_hand = find_scaling(make_run, Size(128), Size(32)).parameters["query"]
    assert by_hand.parameter.role == "output"


class Towers(nnx.Module):
    """Users and items, whose embeddings are compared."""

    def __init__(self, width, rngs, *, compare, hidden=True):
        self.users, self.items = (nnx.Embed(32, width, rngs=rngs) for _ in range(2))
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(2 * hidden)]
        )
        self.compare = compare

    def __call__(self, tokens):
        towers = [self.users(tokens), self.items(tokens[:, ::-1])]
        if self.layers:
            towers = [f(x) for f, x in zip(self.layers, towers, strict=True)]
        score = self.compare(*towers)
        return jnp.stack([score] * 32, axis=-1)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    "compare",
    [
        lambda a, b: (a * b).sum(-1),
        lambda a, b: (a * b).astype(jnp.float32).sum(axis=-1, keepdims=True)[..., 0],
        lambda a, b: jnp.einsum("bld,bld->bl", a, b),
    ],
)
def test_growing_embeddings_that_are_compared_are_refused(compare, hidden):
    def make_run(size):
        return token_run(
            lambda rngs: Towers(size.width, rngs, compare=compare, hidden=hidden)
        )

    with pytest.raises(ConfigError, match=r"test_limits.py:\d+.* over 32 .* 64 at"):
        factors(make_run, Size(128), Size(32))


def test_means_of_products_are_not_refused():
    def make_run(size):
        def compare(a, b):
            return jnp.mean(a * b, axis=-1)

        return token_run(lambda rngs: Towers(size.width, rngs, compare=compare))

    assert factors(make_run, Size(128), Size(32))["layers/0/kernel"] == (1, 0.25)
