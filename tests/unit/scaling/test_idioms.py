"""Roles in models where parameters meet more than activations of the batch.

Features of positions, learned queries, noise that the loss draws, and normalized kernels.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.scaling.check import check_coordinates
from shardwise.scaling.roles import find_roles
from tests.helpers.sizes import image_run


class Net(nnx.Module):
    """A layer from 8 rows of pixels to the width, and the output layer."""

    def __init__(self, width, rngs):
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image):
        tokens = self.first(image.reshape(len(image), 8, 8))
        return self.head(nnx.gelu(self.mix(tokens)).mean(1))


class PositionFeatures(Net):
    """Two layers make an embedding of positions from sines and cosines."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.one = nnx.Linear(6, width, rngs=rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)

    def mix(self, tokens):
        angles = jnp.arange(8.0)[:, None] * jnp.array([0.1, 0.2, 0.4])
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return tokens + self.two(nnx.gelu(self.one(features)))


class PositionTable(Net):
    """A table of positions passes through a layer."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.table = nnx.Embed(8, width, rngs=rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)

    def mix(self, tokens):
        return tokens + self.two(self.table(jnp.arange(8)))


class LearnedQueries(Net):
    """The queries of an attention layer are parameters, as in a Perceiver."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (5, width)))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)

    def mix(self, tokens):
        query = self.query(self.norm(self.queries[...])).reshape(5, -1, 8)
        key = self.key(tokens).reshape(*tokens.shape[:2], -1, 8)
        weights = nnx.softmax(jnp.einsum("qhd,bthd->bhqt", query, key))
        mixed = jnp.einsum("bhqt,bthd->bqhd", weights, key)
        return mixed.reshape(len(tokens), 5, -1)


class BroadcastQueries(LearnedQueries):
    """The same with a copy for each example, and a layer of Flax."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.attention = nnx.MultiHeadAttention(
            width // 8, width, decode=False, rngs=rngs
        )

    def mix(self, tokens):
        shape = (len(tokens), *self.queries.shape)
        queries = jnp.broadcast_to(self.queries[...], shape)
        return self.attention(self.norm(queries), self.key(tokens))


class Normalized(Net):
    """The kernel of a layer is divided by its largest singular value, found by iteration."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)
        self.start = nnx.BatchStat(jnp.ones((1, width)))

    def mix(self, tokens):
        kernel = self.two.kernel[...]
        left = self.start[...] @ kernel.T
        right = left / jnp.linalg.norm(left) @ kernel
        largest = jnp.linalg.norm(right)
        self.start[...] = jax.lax.stop_gradient(right / largest)
        return tokens @ (kernel / largest) + self.two.bias[...]


class Product(Net):
    """A kernel is the product of two parameters."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        normal = jax.random.normal
        self.down = nnx.Param(normal(rngs.params(), (width, 4)))
        self.up = nnx.Param(normal(rngs.params(), (4, width)))

    def mix(self, tokens):
        return tokens + tokens @ (self.down[...] @ self.up[...])


class LowRankUpdate(Product):
    """The same, added to another kernel."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.two = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def mix(self, tokens):
        return tokens @ (self.two.kernel[...] + self.down[...] @ self.up[...])


class Times(nnx.Module):
    """The velocity of a flow at random times, which an MLP embeds."""

    def __init__(self, width, rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.one = nnx.Linear(1, width, rngs=rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, image, time):
        embedded = self.two(nnx.silu(self.one(time[:, None])))
        return self.head(nnx.silu(self.first(image.reshape(len(image), -1)) + embedded))


def flow_loss(model, batch, rngs):
    image = batch["image"].reshape(len(batch["image"]), -1)
    noise = jax.random.normal(rngs.noise(), image.shape)
    time = jax.random.uniform(rngs.noise(), image.shape[:1])
    mixed = image + time[:, None] * (noise - image)
    return jnp.square(model(mixed, time) - noise + image).mean()


NET = {
    "first/kernel": "input",
    "first/bias": "vector",
    "head/kernel": "output",
    "head/bias": "finite",
}
TWO = {"two/kernel": "hidden", "two/bias": "vector"}
QUERIES = {"queries": "vector", "norm/scale": "vector", "norm/bias": "vector"}
QUERIES |= {"key/kernel": "hidden", "key/bias": "vector"}


def roles(model, overrides=None, **options):
    def make_run(width):
        return replace(image_run(lambda rngs: model(width, rngs)), **options)

    found = find_roles(make_run, 32, overrides).parameters
    return {path: parameter.role for path, parameter in found.items()}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (PositionFeatures, {"one/kernel": "input", "one/bias": "vector"} | TWO),
        (PositionTable, {"table/embedding": "vector"} | TWO),
        (
            LearnedQueries,
            {"query/kernel": "hidden", "query/bias": "vector"} | QUERIES,
        ),
        (Normalized, TWO),
    ],
)
def test_what_takes_the_place_of_activations(model, expected):
    assert roles(model) == NET | expected


def test_queries_that_are_copied_for_each_example():
    found = roles(BroadcastQueries)
    assert found.items() >= QUERIES.items()
    for name in ("query", "key", "value", "out"):
        assert found[f"attention/{name}/kernel"] == "hidden"


def test_a_coordinate_check_of_learned_queries():
    def make_run(width):
        return image_run(lambda rngs: BroadcastQueries(width, rngs))

    found = check_coordinates(make_run, (16, 32), 1, 1, "queries", lambda text: None)
    names = {slopes.name for slopes in found.slopes}
    assert {"attention/query/kernel", "attention/key/kernel"} <= names


def test_random_times_are_activations():
    times = {"one/kernel": "input", "one/bias": "vector"} | TWO
    assert roles(Times, loss=flow_loss) == NET | times


@pytest.mark.parametrize("model", [Product, LowRankUpdate])
def test_the_product_of_two_parameters_is_refused(model):
    with pytest.raises(ConfigError, match=r"--role 'down=hidden'(.|\n)*'up=hidden'"):
        roles(model)
    overrides = {"down": "output", "up": "input"}
    found = roles(model, overrides)
    assert found.items() >= (NET | overrides).items()
    assert found.get("two/kernel", "hidden") == "hidden"
