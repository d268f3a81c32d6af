"""Continuations of a prompt, token by token: from any model that gives logits, and faster from one that keeps keys and values.

A model takes tokens (B, T) and gives logits (B, T, V), each from the tokens up to it alone. One that also has `empty_cache` and
`decode`, as those of `shardwise.models` do, computes each new token once; any other sees the whole text again for each.
The tokens are the same. A model with `config.max_length` sees at most so many of the last tokens. A model of another kind that takes
rows of one length only is always called on rows of that length, `window`; what stands behind the text only fills them up.

Nothing is compiled for the length of a prompt: lengths are filled up to powers of two, beyond `CHUNK` to multiples of it.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = jax.Array
CHUNK = 256  # tokens of a prompt that go through the model at once
SMALLEST = 16
NEEDED = "to be sampled it must give logits (B, T, V) for tokens (B, T)"


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int | None = None  # only one of the so many likeliest
    top_p: float | None = None  # only one of the likeliest that together have this probability
    vocab_size: int | None = (
        None  # only one below this: rows of a table that only fill it up mean nothing
    )

    def __post_init__(self) -> None:
        wrong = []
        if not 0 <= self.temperature < float("inf"):
            wrong.append(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            wrong.append(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if wrong:
            raise ValueError("; ".join(wrong))


def warp(logits: Array, sampling: Sampling) -> Array:
    """Logits (..., V) whose softmax is what `sampling` draws from: divided by the temperature, then top-k, then top-p of what is left.

    What must not be drawn is minus infinity. Tokens that are equally likely stay or go together.
    """
    kept = logits.astype(jnp.float32)
    if sampling.vocab_size is not None:
        kept = jnp.where(jnp.arange(kept.shape[-1]) < sampling.vocab_size, kept, -jnp.inf)
    if sampling.temperature:
        kept = kept / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < kept.shape[-1]:
        least = jax.lax.top_k(kept, sampling.top_k)[0][..., -1:]
        kept = jnp.where(kept < least, -jnp.inf, kept)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = jnp.sort(kept, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
        kept = jnp.where(kept < least, -jnp.inf, kept)
    return kept


def choose(logits: Array, key: Array, sampling: Sampling) -> Array:
    """A token for each row of logits (B, V); -1 where they are not numbers. What a row gets does not depend on how many rows there are."""
    if sampling.temperature:
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(logits)))
        choice = jax.vmap(jax.random.categorical)(keys, warp(logits, sampling))
    else:
        choice = warp(logits, Sampling(0.0, vocab_size=sampling.vocab_size)).argmax(-1)
    return jnp.where(jnp.isnan(logits).any(-1), -1, choice).astype(jnp.int32)


def generate(
    model: Any, prompt: Any, num_tokens: int, key: Array, temperature: float = 0.8, **options: Any
) -> Array:
    """`prompt` (B, P) continued by `num_tokens` tokens, as `stream` does; `options` are those of `Sampling`."""
    prompt = jnp.asarray(prompt)
    tokens = list(stream(model, prompt, num_tokens, key, Sampling(temperature, **options)))
    return (
        jnp.concatenate([prompt, np.stack(tokens, axis=1).astype(prompt.dtype)], axis=1)
        if tokens
        else prompt
    )


def stream(
    model: Any,
    prompt: Any,
    num_tokens: int,
    key: Array,
    sampling: Sampling | None = None,
    *,
    window: int | None = None,
    cached: bool = True,
) -> Iterator[np.ndarray]:
    """The `num_tokens` tokens that follow `prompt` (B, P), one by one, each (B,).

    While one of them is looked at, the next is computed already. Beyond `window` (that of the model, if it has one) each token
    sees the last so many: they all have new positions then, so the whole window is computed for each.
    """
    sampling = sampling or Sampling()
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"a prompt is rows of at least one token, not an array of shape {prompt.shape}"
        )
    limit = window or getattr(getattr(model, "config", None), "max_length", None)
    rows, length = prompt.shape
    total = length + num_tokens
    seen = min(limit or total, total)  # tokens that are looked at, at most
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    has_cache = hasattr(model, "decode") and hasattr(model, "empty_cache")
    _check_call(model)
    shown = (
        padded(seen) if limit is None else min(padded(seen), limit)
    )  # tokens that a model without a cache is called on
    if (
        limit is not None
        and shown < limit
        and not has_cache
        and not _takes(graphdef, structure, leaves, (rows, shown))
    ):
        shown = limit
    decode, extend = _programs(graphdef, structure, shown)
    told: list[np.ndarray] = []
    token: Any

    def pick(logits: Array, at: int) -> Array:
        return _pick(logits, key, np.int32(at), sampling)

    def tell(tokens: Array) -> np.ndarray:
        told.append(np.asarray(tokens)[:, 0])
        if (told[-1] < 0).any():
            raise ValueError(f"the logits after {length + len(told) - 1} tokens are not numbers")
        return told[-1]

    if num_tokens and cached and length <= seen and has_cache:
        cache = model.empty_cache(rows, padded(seen))
        for start in range(0, length, CHUNK):
            part = prompt[:, start : start + CHUNK]
            tokens = np.pad(part, ((0, 0), (0, padded(part.shape[1]) - part.shape[1])))
            logits, cache = decode(leaves, tokens, np.int32(part.shape[1]), cache)
        token = pick(logits, length)
        for at in range(length + 1, min(total - 1, seen) + 1):
            logits, cache = decode(leaves, token, np.int32(1), cache)
            following = pick(logits, at)
            yield tell(token)
            token = following
        yield tell(token)
        del cache
    begun = length + len(told)
    if begun == total:
        return
    text = np.concatenate([prompt, *(tokens[:, None] for tokens in told)], axis=1)
    buffer: Any = np.pad(text, ((0, 0), (0, max(padded(total), shown) - begun)))
    token = text[:, -1:]
    for at in range(begun, total):
        logits, buffer = extend(leaves, buffer, token, np.int32(at))
        following = pick(logits, at)
        if at > begun:
            yield tell(token)
        token = following
    yield tell(token)


def padded(count: int) -> int:
    """The length that this many tokens are filled up to."""
    return (
        max(SMALLEST, 1 << (count - 1).bit_length())
        if count < CHUNK
        else -(-count // CHUNK) * CHUNK
    )


@partial(jax.jit, static_argnums=3)
def _pick(logits: Array, key: Array, at: Array, sampling: Sampling) -> Array:
    """Token number `at` of each row, (B, 1). A program of its own: random numbers take longest to compile, and all others share it."""
    return choose(logits, jax.random.fold_in(key, at), sampling)[:, None]


def _check_call(model: Any) -> None:
    """Refuses a model that needs more than tokens."""
    if not callable(model):
        raise ValueError(f"{type(model).__name__} has no __call__; {NEEDED}")
    try:
        inspect.signature(model).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.__call__ cannot be called with tokens alone: {error}; {NEEDED}"
        ) from None


def _takes(graphdef: Any, structure: Any, leaves: Any, shape: tuple[int, int]) -> bool:
    """Whether a model can be called on tokens of this shape; it is traced, and nothing is computed."""
    try:
        jax.eval_shape(
            lambda leaves, tokens: _merged(graphdef, structure, leaves)(tokens),
            leaves,
            jax.ShapeDtypeStruct(shape, jnp.int32),
        )
    except Exception:  # whatever a model raises about a length; if it is something else, it raises it again when it is called
        return False
    return True


def _merged(graphdef: Any, structure: Any, leaves: Any) -> Any:
    model = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
    model.eval()
    return model


@lru_cache(maxsize=8)
def _programs(
    graphdef: Any, structure: Any, window: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Logits (B, V) of the next token, with a cache and without; each compiled once for a shape of its arguments."""

    def decode(leaves: Any, tokens: Array, count: Array, cache: Any) -> tuple[Array, Any]:
        return _merged(graphdef, structure, leaves).decode(tokens, count, cache)

    def extend(leaves: Any, buffer: Array, token: Array, at: Array) -> tuple[Array, Array]:
        """`at` tokens are in the buffer, when `token` has been written as the last of them."""
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, token, at - 1, axis=1)
        start = jnp.maximum(0, at - window)
        logits = _merged(graphdef, structure, leaves)(
            jax.lax.dynamic_slice_in_dim(buffer, start, window, axis=1)
        )
        shape = getattr(logits, "shape", f"a {type(logits).__name__}")
        if len(shape) != 3 or shape[:2] != (len(buffer), window):
            raise ValueError(
                f"the model gives {shape} for tokens {(len(buffer), window)}; {NEEDED}"
            )
        return jax.lax.dynamic_index_in_dim(logits, at - 1 - start, axis=1, keepdims=False), buffer

    return jax.jit(decode, donate_argnames="cache"), jax.jit(extend, donate_argnames="buffer")
