"""Llama 2 and 3, and Mixtral, as plain NNX modules: RMSNorm, rotary positions, grouped-query
attention, SwiGLU. Mixtral is a Llama whose MLPs are experts (`models.moe`).

Shapes: B sequences, T tokens, D width, H query heads, G key and value heads, K head width, V
vocabulary size. Parameters carry logical axis names ("embed", "heads", "mlp", "vocab") that a mesh
may map to its axes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from shardwise.kernels.attention import causal_attention
from shardwise.kernels.lookup import look_up
from shardwise.kernels.norm import computed_again
from shardwise.models.annotate import annotated
from shardwise.models.kv_cache import Cache, advance, cached_attention, empty_cache
from shardwise.models.moe import MoE, Routing, empty_routing
from shardwise.models.stack import run_layers, stack_layers
from shardwise.sharding import constrain

Array = jax.Array

# The values of a block that `remat="block"` can keep or offload: the input of the block; queries,
# keys and values after the rotation; the outputs of the heads; their projection; the two inputs of
# the SwiGLU; the output of the MLP.
Kept = Literal["input", "qkv", "attention", "out", "up", "down"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary positions for longer sequences, as in Llama 3.1.

    Attributes:
        factor: slow rotations are slowed down by this factor.
        low: wavelengths of at least `original_length / low` tokens are scaled by the full factor.
        high: wavelengths of at most `original_length / high` tokens are not scaled. Between the
            two, the scaling is interpolated.
        original_length: the sequence length of the first training.
    """

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture of a Llama.

    Attributes:
        vocab_size: the number of tokens.
        num_layers: the number of transformer blocks.
        num_heads: the number of query heads. It must divide `width`.
        num_kv_heads: the number of key and value heads. It must divide `num_heads`: each is shared
            by `num_heads / num_kv_heads` query heads.
        width: the width of the residual stream.
        mlp_width: the hidden width of the MLP.
        rope_theta: about the longest wavelength of the rotary positions, in tokens.
        rope_scaling: scaling of the rotary positions, or None.
        max_length: the sequence length that the model is meant for. Only sampling enforces it.
        norm_epsilon: added to the mean square in RMSNorm.
        tied: use the transposed embedding as the output layer.
        param_dtype: the dtype of the parameters.
        scan_layers: compile one block for all layers, so that compile time does not grow with
            depth.
        remat: what the backward pass recomputes: "none", "block" (everything inside a block except
            `keep` and `offload`) or "dots" (everything except matmuls).
        keep: with `remat="block"`, the values (see `Kept`) that stay in device memory.
        offload: with `remat="block"`, the values that wait in host memory.
        num_experts: the number of experts in each block, as in Mixtral; 0 for an MLP.
        top_k: the number of experts per token; 0 without experts.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    width: int
    mlp_width: int
    rope_theta: float = 5e5
    rope_scaling: RopeScaling | None = None
    max_length: int = 8192
    norm_epsilon: float = 1e-5
    tied: bool = False
    param_dtype: str = "float32"
    scan_layers: bool = True
    remat: str = "none"
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    num_experts: int = 0
    top_k: int = 0


# "7b" and "70b-llama2" are Llama 2; "8b", "70b" and "405b" are Llama 3. For sequences of more than
# 8192 tokens, Llama 3.1 adds a `RopeScaling`. "8x7b" is Mixtral.
SIZES = {
    "tiny": LlamaConfig(256, 2, 4, 2, 64, 192),
    "tiny-moe": LlamaConfig(256, 2, 4, 2, 64, 96, num_experts=8, top_k=2),
    "7b": LlamaConfig(32000, 32, 32, 32, 4096, 11008, rope_theta=1e4, max_length=4096),
    "70b-llama2": LlamaConfig(
        32000, 80, 64, 8, 8192, 28672, rope_theta=1e4, max_length=4096
    ),
    "8b": LlamaConfig(128256, 32, 32, 8, 4096, 14336),
    "70b": LlamaConfig(128256, 80, 64, 8, 8192, 28672),
    "405b": LlamaConfig(128256, 126, 128, 8, 16384, 53248),
    "8x7b": LlamaConfig(
        32000,
        32,
        32,
        8,
        4096,
        14336,
        rope_theta=1e6,
        max_length=32768,
        num_experts=8,
        top_k=2,
    ),
}


def _weight(
    config: LlamaConfig,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    dims: str = "io",
) -> nnx.Param[Array]:
    """Return a new weight.

    Args:
        config: the configuration, for the dtype.
        rngs: random number generators.
        shape: the shape of the weight.
        names: a logical axis name for each dimension.
        dims: "i" for each input dimension and "o" for each output dimension. `lora` reads this,
            because no bias has a shape that would show it.
    """
    init = annotated(nnx.initializers.normal(0.02), names)
    return nnx.Param(
        init(rngs.params(), shape, jnp.dtype(config.param_dtype)), dims=dims
    )


def matmul(x: Array, kernel: Array, dims: int = 1) -> Array:
    """Contract the last `dims` dimensions of `x` with the first `dims` dimensions of `kernel`.

    Args:
        x: (..., ins).
        kernel: (ins, outs).
        dims: the number of dimensions in `ins`.

    Returns:
        An array (..., outs).
    """
    contracted = tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary positions: rotate value i of a head together with value i + K / 2.

    Args:
        x: heads, (B, T, H, K).
        cos: cosines of the angles, (T, K / 2).
        sin: sines of the angles, (T, K / 2).

    Returns:
        The rotated heads, (B, T, H, K).
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(
        x.dtype
    )


def rotations(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """Return cosines and sines of the rotary angles, each (T, K / 2).

    Args:
        config: sizes of the model. K is the width of a head.
        positions: positions of the tokens, (T,).
    """
    width = config.width // config.num_heads
    frequencies = config.rope_theta ** -(jnp.arange(0, width, 2) / width)
    if (scaling := config.rope_scaling) is not None:
        # The number of turns in a sequence of the first training.
        turns = scaling.original_length * frequencies / (2 * jnp.pi)
        unscaled = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling.factor)
    angles = positions[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


class RMSNorm(nnx.Module):
    """Root mean square normalization, computed in float32."""

    def __init__(self, config: LlamaConfig):
        """Create the scale, (D,).

        Args:
            config: sizes of the model, and the epsilon of its norms.
        """
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.width, jnp.dtype(config.param_dtype)))

    def __call__(self, x: Array) -> Array:
        """Normalize `x` (..., D)."""
        normalize = computed_again(partial(_rms_norm, epsilon=self.epsilon))
        return normalize(x, self.scale[...])


def _rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.square(x32).mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype) * scale


class LlamaBlock(nnx.Module):
    """A transformer block: attention and an MLP, each with a norm before it."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.
        """
        c = config
        weight = partial(_weight, c, rngs)
        head_width = c.width // c.num_heads
        self.config = c
        self.norm1 = RMSNorm(c)
        self.query = weight(
            (c.width, c.num_heads, head_width), ("embed", "heads", None), "ioo"
        )
        self.key = weight(
            (c.width, c.num_kv_heads, head_width), ("embed", "heads", None), "ioo"
        )
        self.value = weight(
            (c.width, c.num_kv_heads, head_width), ("embed", "heads", None), "ioo"
        )
        self.out = weight(
            (c.num_heads, head_width, c.width), ("heads", None, "embed"), "iio"
        )
        self.norm2 = RMSNorm(c)
        if c.num_experts:
            self.moe = MoE(
                c.width,
                c.mlp_width,
                num_experts=c.num_experts,
                top_k=c.top_k,
                param_dtype=c.param_dtype,
                rngs=rngs,
            )
            return
        self.gate = weight((c.width, c.mlp_width), ("embed", "mlp"))
        self.up = weight((c.width, c.mlp_width), ("embed", "mlp"))
        # Without a name for the last dimension, FSDP shards the first, which is larger. A narrow
        # last dimension would be padded.
        self.down = weight((c.mlp_width, c.width), ("mlp", None))

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        """Apply the block to (B, T, D). `cos` and `sin` come from `rotations`."""
        return self.routed(x, cos, sin)[0]

    def routed(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Routing | None]:
        """Apply the block, and return how its experts were chosen; None without experts."""
        x = self._named(constrain(x, "batch", "tokens"), "input")
        x = x + self._named(self._attention(self.norm1(x), cos, sin), "out")
        y, routing = self._mlp(self.norm2(x))
        x = x + self._named(y, "down")
        return constrain(x, "batch", "tokens"), routing

    def _named(self, x: Array, name: Kept) -> Array:
        """Name a value for the policy of `remat`.

        An offloaded value gets the same layout in both passes. To change the layout, XLA would
        bring the values of all layers back to the device at once. The attention kernel sets the
        layout of "qkv".
        """
        if name in self.config.offload and name != "qkv":
            x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        named: Array = checkpoint_name(x, name)
        return named

    def decode(
        self, x: Array, cos: Array, sin: Array, cache: Cache, layer: int | Array
    ) -> tuple[Array, Cache]:
        """Apply the block to new tokens (B, T, D)."""
        mixed, cache = cached_attention(
            *self._heads(self.norm1(x), cos, sin), cache, layer
        )
        x = x + matmul(mixed, self.out[...], dims=2)
        return x + self._mlp(self.norm2(x))[0], cache

    def _attention(self, x: Array, cos: Array, sin: Array) -> Array:
        return matmul(
            causal_attention(*self._heads(x, cos, sin)), self.out[...], dims=2
        )

    def _heads(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Return queries (B, T, H, K), keys and values (B, T, G, K)."""
        q, k, v = (
            matmul(x, kernel[...]) for kernel in (self.query, self.key, self.value)
        )
        q, k, v = (
            self._named(heads, "qkv")
            for heads in (rotate(q, cos, sin), rotate(k, cos, sin), v)
        )
        return q, k, v

    def _mlp(self, x: Array) -> tuple[Array, Routing | None]:
        if self.config.num_experts:
            return self.moe(x)
        gate, up = (
            self._named(matmul(x, kernel[...]), "up") for kernel in (self.gate, self.up)
        )
        return matmul(jax.nn.silu(gate) * up, self.down[...]), None


class Llama(nnx.Module):
    """A Llama language model."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.

        Raises:
            ValueError: if width, heads and key heads do not divide each other, if only one of
                `num_experts` and `top_k` is set, or if `keep` or `offload` are used without
                `remat="block"`.
        """
        c = config
        if c.width % c.num_heads or c.num_heads % c.num_kv_heads:
            raise ValueError(
                f"width={c.width}, num_heads={c.num_heads} and num_kv_heads={c.num_kv_heads}: "
                "each must be divisible by the next."
            )
        if bool(c.num_experts) != bool(c.top_k):
            raise ValueError(
                f"num_experts={c.num_experts} and top_k={c.top_k}: set both, or none of them."
            )
        if (c.keep or c.offload) and c.remat != "block":
            raise ValueError(
                f"keep={c.keep} and offload={c.offload} have no effect with remat='{c.remat}'. "
                "Use remat='block', or remove them."
            )
        self.config = c
        self.tokens = _weight(c, rngs, (c.vocab_size, c.width), ("vocab", "embed"))
        self.blocks: LlamaBlock | nnx.List[LlamaBlock]
        if c.scan_layers:
            self.blocks = stack_layers(partial(LlamaBlock, c), c.num_layers, rngs)
        else:
            self.blocks = nnx.List([LlamaBlock(c, rngs) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c)
        head_names = "embed", "vocab"
        self.head = (
            None if c.tied else _weight(c, rngs, (c.width, c.vocab_size), head_names)
        )

    def __call__(self, tokens: Array) -> Array:
        """Return the logits (B, T, V) of the tokens that follow `tokens` (B, T)."""
        return matmul(self.features(tokens), self.output())

    def output(self) -> Array:
        """Return the kernel of the output layer, (D, V)."""
        return self.tokens[...].T if self.head is None else self.head[...]

    def features(self, tokens: Array) -> Array:
        """Return the input of the output layer, (B, T, D), for `tokens` (B, T)."""
        return self._features(tokens)[0]

    def features_and_routing(self, tokens: Array) -> tuple[Array, Routing]:
        """Return `features`, and how experts were chosen, as a mean over the layers.

        Add `routing.balance` to the loss of each sequence, so that experts are used evenly.

        Args:
            tokens: (B, T).

        Raises:
            ValueError: if the model has no experts.

        Example:
            >>> features, routing = model.features_and_routing(tokens)  # doctest: +SKIP
            >>> nats = linear_cross_entropy(features, model.output().T, labels)
            >>> return Mean(nats + 0.01 * routing.balance[:, None])
        """
        x, total = self._features(tokens)
        if total is None:
            raise ValueError("the model has no experts: its num_experts is 0.")
        mean = jax.tree.map(lambda value: value / self.config.num_layers, total)
        return x, mean

    def _features(self, tokens: Array) -> tuple[Array, Routing | None]:
        """Return the input of the output layer, and the sum of the routing of all layers."""
        c = self.config
        cos, sin = rotations(c, jnp.arange(tokens.shape[1]))
        x = look_up(self.tokens[...], tokens)

        def apply_block(block: LlamaBlock, stream: _Stream) -> _Stream:
            x, total = stream
            x, routing = block.routed(x, cos, sin)
            return x, jax.tree.map(jnp.add, total, routing)

        run_block = _remat(c)(apply_block)
        start = empty_routing(len(tokens), c.num_experts) if c.num_experts else None
        stream: _Stream = (x, start)
        if c.scan_layers:
            stream = run_layers(self._stack(), run_block, stream)
        else:
            for block in self._layers():
                stream = run_block(block, stream)
        x, total = stream
        return self.norm(x), total

    def _stack(self) -> LlamaBlock:
        """Return the block whose parameters have a leading layer dimension (`scan_layers=True`)."""
        return cast(LlamaBlock, self.blocks)

    def _layers(self) -> Iterable[LlamaBlock]:
        """Return the separate blocks (`scan_layers=False`)."""
        return cast(Iterable[LlamaBlock], self.blocks)

    def empty_cache(self, batch_size: int, capacity: int) -> Cache:
        """Return a cache for `decode`.

        Args:
            batch_size: the number of sequences.
            capacity: the largest number of tokens per sequence.
        """
        c = self.config
        dtype = self.tokens[...].dtype
        head_width = c.width // c.num_heads
        return empty_cache(
            c.num_layers, batch_size, c.num_kv_heads, capacity, head_width, dtype
        )

    def decode(self, tokens: Array, count: Array, cache: Cache) -> tuple[Array, Cache]:
        """Process new tokens of each sequence.

        Args:
            tokens: (B, T). The tokens after the first `count` are padding.
            count: int32, the number of new tokens.
            cache: the keys and values of the previous tokens.

        Returns:
            The logits (B, V) of the token after the last new one, and the updated cache.
        """
        cos, sin = rotations(self.config, cache.length + jnp.arange(tokens.shape[1]))
        x = look_up(self.tokens[...], tokens)
        if self.config.scan_layers:
            decode = nnx.scan(
                lambda block, layer, carry: block.decode(
                    carry[0], cos, sin, carry[1], layer
                ),
                in_axes=(0, 0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            x, cache = decode(
                self._stack(), jnp.arange(self.config.num_layers), (x, cache)
            )
        else:
            for layer, block in enumerate(self._layers()):
                x, cache = block.decode(x, cos, sin, cache, layer)
        last = jax.lax.dynamic_index_in_dim(x, count - 1, axis=1, keepdims=False)
        return matmul(self.norm(last), self.output()), advance(cache, count)


# What a block passes to the next: tokens (B, T, D), and the sum of the routing so far.
_Stream: TypeAlias = tuple[Array, Routing | None]
_ApplyBlock: TypeAlias = Callable[[LlamaBlock, _Stream], _Stream]


def _remat(config: LlamaConfig) -> Callable[[_ApplyBlock], _ApplyBlock]:
    """Return how `config.remat` wraps the function that applies a block."""
    policies = jax.checkpoint_policies
    if config.remat == "none":
        return lambda apply_block: apply_block
    if config.remat == "dots":
        return nnx.remat(policy=policies.dots_with_no_batch_dims_saveable)
    if not config.offload:
        return nnx.remat(policy=policies.save_only_these_names(*config.keep))
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(config.keep),
        names_which_can_be_offloaded=list(config.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return nnx.remat(policy=policy)
