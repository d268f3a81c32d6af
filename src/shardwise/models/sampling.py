"""Generation of text, token by token, from any model that returns logits.

A model maps tokens (B, T) to logits (B, T, V), each computed from the tokens up to it. If it also
has `empty_cache` and `decode`, as the models of `shardwise.models` do, each new token is computed
once. Any other model processes the complete text again for each token. The generated tokens are the
same.

A model with `config.max_length` sees at most that many of the last tokens. A model that only
accepts sequences of one length is always called with sequences of that length, `window`, padded
after the text.

Nothing is compiled for the length of a particular prompt: lengths are padded to powers of two, and
above `CHUNK` to multiples of it. `decode` serves prompts and single tokens alike. A separate
program draws tokens from logits.

Shapes: B sequences, T tokens, V vocabulary size.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np
from flax import nnx

from shardwise.models.kv_cache import Cache
from shardwise.tracing.assertions import drop_checks
from shardwise.tree import PyTree

Array = jax.Array
# The static part of a model, from `nnx.split`.
_GraphDef: TypeAlias = nnx.GraphDef[nnx.Module]
_Leaves: TypeAlias = list[Array]

# Tokens of a prompt that the model processes at once.
CHUNK = 256

# The shortest length that prompts are padded to.
SMALLEST = 16

_REQUIRED = "to be sampled, it must return logits (B, T, V) for tokens (B, T)"


class _LanguageModel(Protocol):
    """A model that maps tokens (B, T) to logits (B, T, V)."""

    def __call__(self, tokens: Array) -> Array: ...

    def empty_cache(self, batch_size: int, capacity: int) -> Cache: ...

    def decode(
        self, tokens: Array, count: Array, cache: Cache
    ) -> tuple[Array, Cache]: ...


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits.

    Attributes:
        temperature: logits are divided by it. With 0, the most likely token is always chosen.
        top_k: keep only the `top_k` most likely tokens.
        top_p: nucleus sampling: keep the smallest set of tokens whose probability reaches this
            value.
        vocab_size: keep only tokens below this number. Embedding tables are often padded with
            rows that no token uses.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k is {self.top_k}; it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if problems:
            raise ValueError("; ".join(problems))


def warp(logits: Array, sampling: Sampling) -> Array:
    """Return logits whose softmax is the distribution that `sampling` draws from.

    They are divided by the temperature, then filtered by top-k, then by top-p of the remaining
    tokens. Tokens of equal probability are kept or removed together.

    Args:
        logits: (..., V).
        sampling: the settings.

    Returns:
        Logits (..., V), float32, with minus infinity for tokens that must not be drawn.
    """
    kept = logits.astype(jnp.float32)
    if sampling.vocab_size is not None:
        kept = jnp.where(
            jnp.arange(kept.shape[-1]) < sampling.vocab_size, kept, -jnp.inf
        )
    if sampling.temperature:
        kept = kept / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < kept.shape[-1]:
        threshold = jax.lax.top_k(kept, sampling.top_k)[0][..., -1:]
        kept = jnp.where(kept < threshold, -jnp.inf, kept)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_logits = jnp.sort(kept, axis=-1, descending=True)
        probabilities = jax.nn.softmax(sorted_logits, axis=-1)
        # The probability of all tokens that are more likely than each token.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        in_nucleus = jnp.where(before < sampling.top_p, sorted_logits, jnp.inf)
        threshold = in_nucleus.min(-1, keepdims=True)
        kept = jnp.where(kept < threshold, -jnp.inf, kept)
    return kept


def choose(logits: Array, key: Array, sampling: Sampling) -> Array:
    """Draw a token for each sequence.

    The token of a sequence does not depend on the number of sequences.

    Args:
        logits: (B, V).
        key: a random key.
        sampling: the settings.

    Returns:
        Tokens (B,), int32; -1 where a logit is NaN.
    """
    if sampling.temperature:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(logits)))
        choice = jax.vmap(jax.random.categorical)(keys, warp(logits, sampling))
    else:
        choice = warp(logits, Sampling(0.0, vocab_size=sampling.vocab_size)).argmax(-1)
    return jnp.where(jnp.isnan(logits).any(-1), -1, choice).astype(jnp.int32)


def generate(
    model: nnx.Module,
    prompt: jax.typing.ArrayLike,
    num_tokens: int,
    key: Array,
    temperature: float = 0.8,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    vocab_size: int | None = None,
) -> Array:
    """Continue a prompt.

    Args:
        model: a model that maps tokens (B, T) to logits (B, T, V).
        prompt: tokens (B, P).
        num_tokens: the number of tokens to generate.
        key: a random key.
        temperature: see `Sampling`, as for the other options.
        top_k: see `Sampling`.
        top_p: see `Sampling`.
        vocab_size: see `Sampling`.

    Returns:
        The prompt and the generated tokens, (B, P + num_tokens).
    """
    prompt = jnp.asarray(prompt)
    sampling = Sampling(temperature, top_k, top_p, vocab_size)
    tokens = list(stream(model, prompt, num_tokens, key, sampling))
    if not tokens:
        return prompt
    return jnp.concatenate(
        [prompt, np.stack(tokens, axis=1).astype(prompt.dtype)], axis=1
    )


def stream(
    model: nnx.Module,
    prompt: jax.typing.ArrayLike | list[list[int]],
    num_tokens: int,
    key: Array,
    sampling: Sampling | None = None,
    *,
    window: int | None = None,
    cached: bool = True,
) -> Iterator[np.ndarray]:
    """Yield the tokens that continue a prompt, one by one.

    While the caller looks at a token, the next one is already being computed.

    Args:
        model: a model that maps tokens (B, T) to logits (B, T, V).
        prompt: tokens (B, P), at least one per sequence.
        num_tokens: the number of tokens to generate.
        key: a random key.
        sampling: how tokens are drawn from logits.
        window: the number of tokens that the model can see, by default its `config.max_length` if
            it has one. Beyond the window, each token is computed from the last `window` tokens. All
            of them have new positions then, so the cache is useless and the complete window is
            computed for each token.
        cached: use the cache of the model if it has one.

    Yields:
        The next token of each sequence, (B,).

    Raises:
        ValueError: if the model does not return logits (B, T, V), if the prompt is empty, or if the
            logits are not finite numbers.
    """
    sampling = sampling or Sampling()
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(
            f"a prompt must have shape (B, T) with at least one token, not {prompt.shape}"
        )
    _check_call(model)
    generation = _Generation(
        _Plan.make(model, prompt.shape, num_tokens, window), key, sampling
    )
    if num_tokens and cached and generation.plan.fits_cache:
        yield from generation.with_cache(cast(_LanguageModel, model), prompt)
    yield from generation.without_cache(prompt)


@dataclass(frozen=True)
class _Plan:
    """The lengths of a generation, and the programs that compute logits.

    Attributes:
        length: the number of tokens in the prompt.
        total: the number of tokens after the generation.
        visible: the largest number of tokens that the model sees.
        shown: the number of tokens that a model without a cache is called with.
        has_cache: whether the model has `decode` and `empty_cache`.
        leaves: the arrays of the model.
        decode: see `_programs`.
        extend: see `_programs`.
    """

    length: int
    total: int
    visible: int
    shown: int
    has_cache: bool
    leaves: _Leaves
    decode: Callable[..., tuple[Array, Cache]]
    extend: Callable[..., tuple[Array, Array]]

    @staticmethod
    def make(
        model: nnx.Module, shape: tuple[int, int], num_tokens: int, window: int | None
    ) -> "_Plan":
        """Return the plan for prompts of a shape."""
        limit: int | None = window or getattr(
            getattr(model, "config", None), "max_length", None
        )
        batch_size, length = shape
        total = length + num_tokens
        visible = min(limit or total, total)
        graphdef, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        has_cache = hasattr(model, "decode") and hasattr(model, "empty_cache")
        shown = padded(visible)
        if limit is not None:
            shown = min(shown, limit)
            accepts = partial(
                _accepts, graphdef, structure, leaves, (batch_size, shown)
            )
            if shown < limit and not has_cache and not accepts():
                shown = limit
        decode, extend = _programs_of(graphdef, structure, shown)
        return _Plan(length, total, visible, shown, has_cache, leaves, decode, extend)

    @property
    def fits_cache(self) -> bool:
        """Whether the prompt can be put into a cache."""
        return self.has_cache and self.length <= self.visible


class _Generation:
    """The tokens of one call of `stream`, which are computed one token ahead of the caller."""

    def __init__(self, plan: _Plan, key: Array, sampling: Sampling):
        self.plan = plan
        self._key = key
        self._sampling = sampling
        # The generated tokens that the caller has received, each (B,).
        self._yielded: list[np.ndarray] = []

    def with_cache(
        self, model: _LanguageModel, prompt: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield tokens until the window of the model is full."""
        plan = self.plan
        cache = model.empty_cache(len(prompt), padded(plan.visible))
        for start in range(0, plan.length, CHUNK):
            chunk = prompt[:, start : start + CHUNK]
            count = chunk.shape[1]
            tokens = np.pad(chunk, ((0, 0), (0, padded(count) - count)))
            logits, cache = plan.decode(plan.leaves, tokens, np.int32(count), cache)
        token = self._draw(logits, plan.length)
        for position in range(plan.length + 1, min(plan.total - 1, plan.visible) + 1):
            logits, cache = plan.decode(plan.leaves, token, np.int32(1), cache)
            next_token = self._draw(logits, position)
            yield self._receive(token)
            token = next_token
        yield self._receive(token)

    def without_cache(self, prompt: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the remaining tokens, each computed from all tokens in the window."""
        plan = self.plan
        start = plan.length + len(self._yielded)
        if start == plan.total:
            return
        text = np.concatenate(
            [prompt, *(tokens[:, None] for tokens in self._yielded)], axis=1
        )
        size = max(padded(plan.total), plan.shown)
        buffer: np.ndarray | Array = np.pad(text, ((0, 0), (0, size - start)))
        token: np.ndarray | Array = text[:, -1:]
        for position in range(start, plan.total):
            logits, buffer = plan.extend(plan.leaves, buffer, token, np.int32(position))
            next_token = self._draw(logits, position)
            if position > start:
                yield self._receive(token)
            token = next_token
        yield self._receive(token)

    def _draw(self, logits: Array, position: int) -> Array:
        tokens: Array = _draw(logits, self._key, np.int32(position), self._sampling)
        return tokens

    def _receive(self, tokens: np.ndarray | Array) -> np.ndarray:
        """Wait for tokens (B, 1), and return them as (B,)."""
        received = np.asarray(tokens)[:, 0]
        self._yielded.append(received)
        if (received < 0).any():
            position = self.plan.length + len(self._yielded) - 1
            raise ValueError(
                f"the logits after {position} tokens are not finite numbers"
            )
        return received


def padded(count: int) -> int:
    """Return the length that prompts are padded to.

    Args:
        count: number of tokens in the prompt.
    """
    if count < CHUNK:
        return max(SMALLEST, 1 << (count - 1).bit_length())
    return -(-count // CHUNK) * CHUNK


@partial(jax.jit, static_argnums=3)
def _draw(logits: Array, key: Array, position: Array, sampling: Sampling) -> Array:
    """Draw token number `position` of each sequence, (B, 1).

    This is a separate program, because random numbers take longest to compile and all other
    programs can share it.
    """
    return choose(logits, jax.random.fold_in(key, position), sampling)[:, None]


def _check_call(model: object) -> None:
    """Refuse a model that cannot be called with tokens alone."""
    if not callable(model):
        raise ValueError(f"{type(model).__name__} has no __call__; {_REQUIRED}")
    try:
        inspect.signature(model).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}.__call__ cannot be called with tokens alone: {error}; "
            f"{_REQUIRED}"
        ) from None


def vocabulary_of(model: nnx.Module, length: int) -> int | None:
    """Return the size of the vocabulary of a model, that of its logits. Nothing is computed.

    Args:
        model: a model as `generate` takes it.
        length: a number of tokens that it can be called with.

    Returns:
        The size, or None if the model does not return logits for these tokens.
    """
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def call(leaves: _Leaves, tokens: Array) -> Array:
        return _merge(graphdef, structure, leaves)(tokens)

    try:
        logits = jax.eval_shape(drop_checks(call), leaves, tokens)
        _check_logits(logits, tokens.shape)
    except Exception:
        # `generate` raises it again, with the reason.
        return None
    return int(logits.shape[-1])


def _accepts(
    graphdef: _GraphDef,
    structure: jax.tree_util.PyTreeDef,
    leaves: _Leaves,
    shape: tuple[int, int],
) -> bool:
    """Return whether a model can be called with tokens of this shape. Nothing is computed."""
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    try:
        jax.eval_shape(
            drop_checks(
                lambda leaves, tokens: _merge(graphdef, structure, leaves)(tokens)
            ),
            leaves,
            tokens,
        )
    except Exception:
        # Any exception may be about the length. If it is not, the real call raises it again.
        return False
    return True


def _merge(
    graphdef: _GraphDef, structure: jax.tree_util.PyTreeDef, leaves: _Leaves
) -> _LanguageModel:
    """Return the model in evaluation mode."""
    model = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
    model.eval()
    return cast(_LanguageModel, model)


def _programs_of(
    graphdef: _GraphDef, structure: jax.tree_util.PyTreeDef, window: int
) -> tuple[Callable[..., tuple[Array, Cache]], Callable[..., tuple[Array, Array]]]:
    """Return `_programs`, which are built again if an attribute of the model has no hash."""
    try:
        hash(graphdef)
    except TypeError:
        return _programs.__wrapped__(graphdef, structure, window)
    return _programs(graphdef, structure, window)


@lru_cache(maxsize=8)
def _programs(
    graphdef: _GraphDef, structure: jax.tree_util.PyTreeDef, window: int
) -> tuple[Callable[..., tuple[Array, Cache]], Callable[..., tuple[Array, Array]]]:
    """Return two programs that compute the logits (B, V) of the next token.

    The first uses a cache, the second a buffer with all tokens. Each is compiled once for each
    shape of its arguments.
    """

    def decode(
        leaves: _Leaves, tokens: Array, count: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        return _merge(graphdef, structure, leaves).decode(tokens, count, cache)

    def extend(
        leaves: _Leaves, buffer: Array, token: Array, position: Array
    ) -> tuple[Array, Array]:
        """Write `token` (B, 1) as the last of `position` tokens to the buffer; call the model."""
        buffer = jax.lax.dynamic_update_slice_in_dim(
            buffer, token, position - 1, axis=1
        )
        start = jnp.maximum(0, position - window)
        tokens = jax.lax.dynamic_slice_in_dim(buffer, start, window, axis=1)
        logits = _merge(graphdef, structure, leaves)(tokens)
        _check_logits(logits, (len(buffer), window))
        last = position - 1 - start
        return jax.lax.dynamic_index_in_dim(
            logits, last, axis=1, keepdims=False
        ), buffer

    return (
        jax.jit(drop_checks(decode), donate_argnames="cache"),
        jax.jit(drop_checks(extend), donate_argnames="buffer"),
    )


def _check_logits(logits: PyTree, token_shape: tuple[int, int]) -> None:
    shape = getattr(logits, "shape", f"a {type(logits).__name__}")
    if len(shape) != 3 or shape[:2] != token_shape:
        raise ValueError(
            f"the model returns {shape} for tokens {token_shape}; {_REQUIRED}"
        )
