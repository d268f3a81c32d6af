"""Llama 2 and 3 as plain NNX modules: RMSNorm, rotary positions, heads of keys that several heads of queries share, SwiGLU.

Shapes: B rows, T tokens, D width, H heads of queries, G heads of keys and values, K width of a head, V vocabulary.
Parameters carry logical names ("embed", "heads", "mlp", "vocab") that a mesh may map to its axes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from shardwise.kernels.attention import causal_attention
from shardwise.kernels.lookup import look_up
from shardwise.models.kv_cache import Cache, cached_attention, empty_cache, longer
from shardwise.sharding import constrain

Array = jax.Array
Kept = Literal["input", "qkv", "attention", "out", "up", "down"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1: rotations slower than a wavelength are slowed down by `factor`, for rows longer than those of the first training."""

    factor: float
    low: float  # wavelengths of original_length / low tokens and more are stretched by all of the factor
    high: float  # those of original_length / high and less not at all
    original_length: int


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # each shared by num_heads / num_kv_heads heads of queries
    width: int
    mlp_width: int
    rope_theta: float = 5e5  # the slowest of the rotations that tell positions has a wavelength of about this many tokens
    rope_scaling: RopeScaling | None = None
    max_length: int = 8192  # tokens of a row that it is meant for; nothing but sampling keeps to it
    norm_epsilon: float = 1e-5
    tied: bool = False  # the output layer is the embedding, transposed
    param_dtype: str = "float32"
    scan_layers: bool = (
        True  # one compiled block for all layers: compile time does not grow with depth
    )
    remat: str = "none"  # what the backward pass computes again: "none", "block" (all but what is kept) or "dots" (all but matrix products)
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


SIZES = {
    "tiny": LlamaConfig(256, 2, 4, 2, 64, 192),
    "7b": LlamaConfig(32000, 32, 32, 32, 4096, 11008, rope_theta=1e4, max_length=4096),  # Llama 2
    "70b-llama2": LlamaConfig(32000, 80, 64, 8, 8192, 28672, rope_theta=1e4, max_length=4096),
    "8b": LlamaConfig(
        128256, 32, 32, 8, 4096, 14336
    ),  # Llama 3; 3.1 stretches the slow rotations for rows beyond 8192 tokens
    "70b": LlamaConfig(128256, 80, 64, 8, 8192, 28672),
    "405b": LlamaConfig(128256, 126, 128, 8, 16384, 53248),
}


def weight(
    config: LlamaConfig,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    dims: str = "io",
) -> nnx.Param[Array]:
    """dims: which of them are inputs and which outputs, as `lora` asks; there are no biases that would tell."""
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), names)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)), dims=dims)


def product(x: Array, kernel: Array, dims: int = 1) -> Array:
    """(..., ins) and (ins, outs) -> (..., outs), where ins are `dims` dims."""
    contracted = tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions: number i of a head (B, T, H, K) and number i + K / 2 are turned together, by (T, K / 2) angles."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotations(config: LlamaConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines of the angles of positions (T,), each (T, K / 2)."""
    width = config.width // config.num_heads
    speeds = config.rope_theta ** -(jnp.arange(0, width, 2) / width)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_length * speeds / (2 * jnp.pi)  # in a row of the first training
        unchanged = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        speeds = speeds * (unchanged + (1 - unchanged) / scaling.factor)
    angles = positions[:, None] * speeds
    return jnp.cos(angles), jnp.sin(angles)


class RMSNorm(nnx.Module):
    def __init__(self, config: LlamaConfig):
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(config.width, jnp.dtype(config.param_dtype)))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.epsilon)
        return normal.astype(x.dtype) * self.scale[...]


class Block(nnx.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        new, head = partial(weight, c, rngs), c.width // c.num_heads
        self.config = c
        self.norm1 = RMSNorm(c)
        self.query = new((c.width, c.num_heads, head), ("embed", "heads", None), "ioo")
        self.key = new((c.width, c.num_kv_heads, head), ("embed", "heads", None), "ioo")
        self.value = new((c.width, c.num_kv_heads, head), ("embed", "heads", None), "ioo")
        self.out = new((c.num_heads, head, c.width), ("heads", None, "embed"), "iio")
        self.norm2 = RMSNorm(c)
        self.gate = new((c.width, c.mlp_width), ("embed", "mlp"))
        self.up = new((c.width, c.mlp_width), ("embed", "mlp"))
        self.down = new(
            (c.mlp_width, c.width), ("mlp", None)
        )  # FSDP cuts the larger dim: a narrow last one would be padded

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        x = self.named(constrain(x, "batch"), "input")
        x = x + self.named(self.attention(self.norm1(x), cos, sin), "out")
        x = x + self.named(self.mlp(self.norm2(x)), "down")
        return constrain(x, "batch")

    def named(self, x: Array, name: Kept) -> Array:
        """For the policy of `remat`. What goes to the host has one layout in both passes: to change it, XLA would bring
        that of all layers back at once. That of the heads is set by the attention kernel."""
        if name in self.config.offload and name != "qkv":
            x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
        return checkpoint_name(x, name)

    def decode(
        self, x: Array, cos: Array, sin: Array, cache: Cache, layer: int | Array
    ) -> tuple[Array, Cache]:
        mixed, cache = cached_attention(*self.heads(self.norm1(x), cos, sin), cache, layer)
        x = x + product(mixed, self.out[...], dims=2)
        return x + self.mlp(self.norm2(x)), cache

    def attention(self, x: Array, cos: Array, sin: Array) -> Array:
        return product(causal_attention(*self.heads(x, cos, sin)), self.out[...], dims=2)

    def heads(self, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        """Queries (B, T, H, K), keys and values (B, T, G, K)."""
        q, k, v = (product(x, kernel[...]) for kernel in (self.query, self.key, self.value))
        q, k, v = (
            self.named(heads, "qkv") for heads in (rotate(q, cos, sin), rotate(k, cos, sin), v)
        )
        return q, k, v

    def mlp(self, x: Array) -> Array:
        gate, up = (self.named(product(x, kernel[...]), "up") for kernel in (self.gate, self.up))
        return product(jax.nn.silu(gate) * up, self.down[...])


class Llama(nnx.Module):
    """tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        if c.width % c.num_heads or c.num_heads % c.num_kv_heads:
            heads = f"width {c.width}, {c.num_heads} heads and {c.num_kv_heads} of keys"
            raise ValueError(f"{heads}: each must be divisible by the next")
        if (c.keep or c.offload) and c.remat != "block":
            raise ValueError(
                f"keep and offload say what remat='block' spares; remat is '{c.remat}'"
            )
        self.config = c
        self.tokens = weight(c, rngs, (c.vocab_size, c.width), ("vocab", "embed"))
        self.blocks: Any
        if c.scan_layers:
            stack = nnx.vmap(
                partial(Block, c),
                in_axes=0,
                out_axes=0,
                transform_metadata={nnx.PARTITION_NAME: None},
            )
            self.blocks = nnx.split_rngs(splits=c.num_layers)(stack)(rngs)
        else:
            self.blocks = nnx.List([Block(c, rngs) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c)
        self.head = None if c.tied else weight(c, rngs, (c.width, c.vocab_size), ("embed", "vocab"))

    def __call__(self, tokens: Array) -> Array:
        return product(self.features(tokens), self.output())

    def output(self) -> Array:
        """The kernel (D, V) of the output layer."""
        return self.tokens[...].T if self.head is None else self.head[...]

    def features(self, tokens: Array) -> Array:
        """(B, T) -> (B, T, D), what the output layer sees."""
        c = self.config
        cos, sin = rotations(c, jnp.arange(tokens.shape[1]))
        x = look_up(self.tokens[...], tokens)
        block = remat(c)(lambda block, x: block(x, cos, sin))
        if c.scan_layers:
            x = nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for layer in self.blocks:
                x = block(layer, x)
        return self.norm(x)

    def empty_cache(self, rows: int, size: int) -> Cache:
        c = self.config
        return empty_cache(
            c.num_layers, rows, c.num_kv_heads, size, c.width // c.num_heads, self.tokens[...].dtype
        )

    def decode(self, tokens: Array, count: Array, cache: Cache) -> tuple[Array, Cache]:
        """The next `count` of the tokens (B, T) -> logits (B, V) of what follows the last of them, and the cache with them in it.

        What stands behind the `count` tokens only fills the array up.
        """
        cos, sin = rotations(self.config, cache.length + jnp.arange(tokens.shape[1]))
        x = look_up(self.tokens[...], tokens)
        if self.config.scan_layers:
            decode = nnx.scan(
                lambda block, layer, carry: block.decode(carry[0], cos, sin, carry[1], layer),
                in_axes=(0, 0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            x, cache = decode(self.blocks, jnp.arange(self.config.num_layers), (x, cache))
        else:
            for layer, block in enumerate(self.blocks):
                x, cache = block.decode(x, cos, sin, cache, layer)
        last = jax.lax.dynamic_index_in_dim(x, count - 1, axis=1, keepdims=False)
        return product(self.norm(last), self.output()), longer(cache, count)


def remat(config: LlamaConfig) -> Callable[[Any], Any]:
    policies = jax.checkpoint_policies
    if config.remat == "none":
        return lambda f: f
    if config.remat == "dots":
        return partial(nnx.remat, policy=policies.dots_with_no_batch_dims_saveable)
    if not config.offload:
        return partial(nnx.remat, policy=policies.save_only_these_names(*config.keep))
    kept, offloaded = list(config.keep), list(config.offload)
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=kept,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return partial(nnx.remat, policy=policy)
