"""Random keys for a few examples of a batch, with the random numbers of the complete batch.

A pipeline computes a layer for one microbatch at a time. Dropout must not depend on how the batch
is divided, so a draw for a microbatch must consist of the entries of the draw for the complete
batch. The random bits of an entry are a function of the key and of the position of the entry in the
array (`jax_threefry_partitionable`). So a key that also knows the positions of its examples in the
batch can compute their bits alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.random import define_prng_impl, threefry2x32_p, threefry_prng_impl

from shardwise.errors import ConfigError
from shardwise.tracing.jaxpr import inner_jaxprs, shape_of
from shardwise.tracing.reach import reached

Array = jax.Array
Shape: TypeAlias = tuple[int, ...]

# The number of 32-bit words of a key of JAX's default generator.
WORDS = 2


@dataclass(frozen=True)
class Draws:
    """The random operations of a function.

    Attributes:
        bits: the shapes of all draws of random numbers.
        splits: the shapes of all arrays of keys that are split from a key.
    """

    bits: frozenset[Shape] = frozenset()
    splits: frozenset[Shape] = frozenset()


def find_draws(jaxpr: Jaxpr) -> Draws:
    """Return the random operations of a traced function."""
    return Draws(_shapes(jaxpr, "random_bits"), _shapes(jaxpr, "random_split"))


def _shapes(jaxpr: Jaxpr, primitive: str) -> frozenset[Shape]:
    shapes: set[Shape] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            shapes.add(tuple(equation.params["shape"]))
        for inner in inner_jaxprs(equation.params):
            shapes |= _shapes(inner, primitive)
    return frozenset(shapes)


def folds_numbers(
    closed: ClosedJaxpr, is_example: Sequence[bool], batch_size: int
) -> bool:
    """Return whether keys are derived from the numbers of the examples, 0 to B - 1.

    As in `jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(x)))`. Each microbatch would
    count its examples from 0.

    Args:
        closed: a traced layer.
        is_example: for each input, whether it has an entry per example.
        batch_size: the number B of examples.
    """
    from_examples = reached(closed, is_example)

    def folds(jaxpr: Jaxpr) -> bool:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "random_fold_in":
                data = equation.invars[1]
                is_per_example = shape_of(data)[:1] == (batch_size,)
                if is_per_example and data not in from_examples:
                    return True
            if any(map(folds, inner_jaxprs(equation.params))):
                return True
        return False

    return folds(closed.jaxpr)


def is_positional(key: Array) -> bool:
    """Return whether the bits of a draw from `key` are a function of key and position alone."""
    is_threefry = str(jax.random.key_impl(key)) == "threefry2x32"
    return is_threefry and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def example_key(
    key_data: Array, examples: Array, batch_size: int, draws: Draws
) -> Array:
    """Return a key for some examples of a batch.

    Args:
        key_data: the words of the key for the complete batch, uint32.
        examples: the position of each example in the batch, (b,), uint32.
        batch_size: the number B of examples in the batch.
        draws: what is drawn for the complete batch. A draw of shape (b, ...), or keys of this
            shape, are those of these examples if the shape (B, ...) is one of them. Any other draw
            is the same for all microbatches.

    Returns:
        A random key.

    Raises:
        ConfigError: if a shape (b, ...) is drawn for the complete batch as well.
    """
    count = len(examples)
    rests = [
        frozenset(shape[1:] for shape in shapes if shape[:1] == (batch_size,))
        for shapes in (draws.bits, draws.splits)
    ]
    for shapes, found in zip((draws.bits, draws.splits), rests, strict=True):
        both = [
            rest for rest in found if (count, *rest) in shapes and count != batch_size
        ]
        if both:
            raise ConfigError(
                f"a layer draws random numbers or keys of shape {(batch_size, *both[0])} and of "
                f"shape {(count, *both[0])}. With {count} examples in a microbatch, a pipeline "
                "cannot tell them apart. Use another number of microbatches."
            )
    generator = _generator(batch_size, count, *rests)
    words = jnp.concatenate([key_data, examples])
    key: Array = jax.random.wrap_key_data(words, impl=cast(str, generator))
    return key


# One generator for equal arguments, because JAX compares the types of keys.
@lru_cache(maxsize=256)
def _generator(
    batch_size: int,
    num_examples: int,
    bits: frozenset[Shape],
    splits: frozenset[Shape],
) -> object:
    """Return a generator whose keys are the words of a key and the positions of examples.

    Args:
        batch_size: the number B of examples in the batch.
        num_examples: the number b of examples.
        bits: the shapes of draws with one entry per example, without their first dimension.
        splits: the shapes of arrays of keys with one entry per example, without theirs.
    """

    def seed(_: Array) -> Array:
        raise NotImplementedError("an example key comes from `example_key`")

    def with_examples(words: Array, key: Array) -> Array:
        examples = jnp.broadcast_to(key[WORDS:], (*words.shape[:-1], num_examples))
        joined: Array = jnp.concatenate([words, examples], axis=-1)
        return joined

    def split(key: Array, shape: Shape) -> Array:
        is_of_examples = shape[:1] == (num_examples,) and shape[1:] in splits
        if not is_of_examples:
            return with_examples(threefry_prng_impl.split(key[:WORDS], shape), key)
        # Those of the complete batch: two words for each example.
        keys = threefry_prng_impl.split(key[:WORDS], (batch_size, *shape[1:]))
        return with_examples(keys[key[WORDS:]], key)

    def fold_in(key: Array, data: int) -> Array:
        return with_examples(threefry_prng_impl.fold_in(key[:WORDS], data), key)

    def random_bits(key: Array, bit_width: int, shape: Shape) -> Array:
        if shape[:1] != (num_examples,) or shape[1:] not in bits:
            plain: Array = threefry_prng_impl.random_bits(key[:WORDS], bit_width, shape)
            return plain
        high, low = _positions(key[WORDS:], shape[1:])
        words: list[Array] = threefry2x32_p.bind(key[0], key[1], high, low)
        first, second = words
        dtype = np.dtype(f"uint{bit_width}")
        if bit_width == 64:
            return (first.astype(dtype) << 32) | second.astype(dtype)
        return (first ^ second).astype(dtype)

    return define_prng_impl(
        key_shape=(WORDS + num_examples,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name="examples",
        tag=f"examples{num_examples}",
    )


def _positions(examples: Array, rest: Shape) -> tuple[Array, Array]:
    """Return the positions of entries in an array (B, *rest), as 64 bits in two uint32 arrays.

    Args:
        examples: the positions of the examples, (b,), uint32.
        rest: the shape of one example.
    """
    size = math.prod(rest)
    entries = jnp.arange(size, dtype=jnp.uint32).reshape(rest)
    examples = examples.reshape(-1, *(1,) * len(rest))
    # The 64-bit product of an example and the size, from 16-bit halves of the example.
    low_half, high_half = examples & 0xFFFF, examples >> 16
    size_low, size_high = (jnp.uint32(part) for part in (size & 0xFFFF, size >> 16))
    middle = low_half * size_high
    other = high_half * size_low
    low = low_half * size_low
    high = high_half * size_high + (middle >> 16) + (other >> 16)
    for part in (middle << 16, other << 16, entries):
        total = low + part
        high = high + (total < part).astype(jnp.uint32)
        low = total
    return jnp.broadcast_to(high, low.shape), low
