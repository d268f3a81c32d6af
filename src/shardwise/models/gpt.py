"""The GPT-2 family as plain NNX modules, from a byte-level toy to 1.5 billion parameters.

Shapes: B rows, T tokens, N = B * T, D width, H heads, K width of a head, V vocabulary. Between the layers the tokens of
all rows stand in one matrix (N, D); only attention looks at rows. Three dimensions would leave XLA a choice of layouts:
on GPUs it then transposes every layer's activations, on CPUs its backward products are slower.

Parameters carry logical names ("embed", "heads", "mlp", "vocab") that a mesh may map to its axes. Nothing here
mentions a mesh or a dtype of computation: both are choices of the run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.kernels.activation import bias_gelu_between, plain_between
from shardwise.kernels.attention import causal_attention
from shardwise.kernels.lookup import look_up
from shardwise.kernels.norm import ResidualNorm, add_late
from shardwise.models.kv_cache import Cache, cached_attention, empty_cache, longer

Array = jax.Array


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 50304  # GPT-2's 50257, rounded up so that meshes and matrix units divide it
    max_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0  # after the embedding, the attention and the MLP
    scan_layers: bool = (
        False  # one compiled block for all layers: compile time does not grow with depth
    )
    remat: str = "none"  # what the backward pass recomputes: "none", "block" (all of it) or "dots" (all but matrix products and attention)


PRESETS = {
    "byte": GPTConfig(vocab_size=256, max_length=128, num_layers=2, num_heads=4, width=128),
    "gpt2": GPTConfig(),  # 124M
    "gpt2-medium": GPTConfig(num_layers=24, num_heads=16, width=1024),  # 355M
    "gpt2-large": GPTConfig(num_layers=36, num_heads=20, width=1280),  # 774M
    "gpt2-xl": GPTConfig(num_layers=48, num_heads=25, width=1600),  # 1.5B
    "gpt-7b": GPTConfig(
        num_layers=32, num_heads=32, width=4096
    ),  # the same family, wider and deeper: 6.7B
    "gpt-70b": GPTConfig(num_layers=86, num_heads=64, width=8192),  # 69.7B
}


class Linear(nnx.Module):
    """What takes (N, ins) to (N, outs), each of one or more dims: x @ kernel + bias. Who uses it says how the bias is added."""

    def __init__(
        self,
        ins: tuple[int, ...],
        outs: tuple[int, ...],
        names: tuple[str | None, ...],
        stddev: float,
        rngs: nnx.Rngs,
    ):
        init = nnx.with_partitioning(nnx.initializers.normal(stddev), names)
        self.kernel = nnx.Param(init(rngs.params(), (*ins, *outs)))
        self.bias = nnx.Param(
            nnx.with_partitioning(nnx.initializers.zeros, names[len(ins) :])(rngs.params(), outs)
        )


def project(x: Array, kernel: Array) -> Array:
    contracted = tuple(range(1, x.ndim)), tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


@jax.custom_vjp
def products(x: Array, kernels: list[Array]) -> list[Array]:
    """x (N, D) times each of the kernels (D, F)."""
    return [x @ kernel for kernel in kernels]


def _products_forward(x: Array, kernels: list[Array]) -> tuple[list[Array], Any]:
    return [x @ kernel for kernel in kernels], (
        x,
        kernels,
    )  # not by `products`, which hides them from policies of `jax.checkpoint`


def _products_backward(
    saved: tuple[Array, list[Array]], grads: list[Array]
) -> tuple[Array, list[Array]]:
    x, kernels = saved
    dx = grads[0] @ kernels[0].T
    for g, kernel in zip(grads[1:], kernels[1:], strict=True):
        dx = g @ kernel.T + dx  # in this order: XLA lets a product add what stands behind it
    return dx, [x.T @ g for g in grads]


products.defvjp(_products_forward, _products_backward)


class Attention(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        c = config
        head = c.width // c.num_heads
        self.qkv = Linear(
            (c.width,), (3, c.num_heads, head), ("embed", None, "heads", None), 0.02, rngs
        )
        out_stddev = 0.02 / math.sqrt(2 * c.num_layers)  # each residual branch adds this much less
        self.out = Linear(
            (c.num_heads, head), (c.width,), ("heads", None, "embed"), out_stddev, rngs
        )

    def __call__(
        self, x: Array, length: int, segment_ids: Array | None = None
    ) -> tuple[Array, Array]:
        return self._project_out(causal_attention(*self.heads(x, length), segment_ids))

    def decode(
        self, x: Array, length: int, cache: Cache, layer: int | Array
    ) -> tuple[tuple[Array, Array], Cache]:
        mixed, cache = cached_attention(*self.heads(x, length), cache, layer)
        return self._project_out(mixed), cache

    def _project_out(self, mixed: Array) -> tuple[Array, Array]:
        """(B, T, H, K) -> (N, D) without the bias, and the bias: with that of the values, seen through this layer (see `heads`)."""
        kernel = self.out.kernel[...]
        bias = project(self.qkv.bias[...][2][None], kernel)[0] + self.out.bias[...]
        return project(mixed.reshape(-1, *mixed.shape[2:]), kernel), bias

    def heads(self, x: Array, length: int) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each (B, T, H, K), without the biases of keys and values.

        A bias of the keys adds the same to all scores of a query, so it changes no weight: it has no effect and no gradient. The
        weights of a query sum to 1, so a bias of the values passes through them as it is, and its gradient need not be summed
        over all tokens.
        """
        kernel, bias = self.qkv.kernel[...], self.qkv.bias[...]
        # Three products, not one: their outputs need not be taken apart, nor the gradients put together.
        # Of matrices, not (N, H, K): then the product itself adds the bias.
        parts = [kernel[:, i].reshape(len(kernel), -1) for i in range(3)]
        q, k, v = products(x, parts)
        q, k, v = (y.reshape(-1, length, *bias.shape[1:]) for y in (q + bias[0].reshape(-1), k, v))
        return q, k, v


class MLP(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        c = config
        self.up = Linear((c.width,), (4 * c.width,), ("embed", "mlp"), 0.02, rngs)
        self.down = Linear(
            (4 * c.width,), (c.width,), ("mlp", "embed"), 0.02 / math.sqrt(2 * c.num_layers), rngs
        )
        self.is_kept = (
            c.remat == "dots"
        )  # the product alone, so that the GELU can be computed again from it

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """(N, D) -> (N, D) without the last bias, and the bias."""
        between = plain_between if self.is_kept else bias_gelu_between
        return between(
            x, self.up.kernel[...], self.up.bias[...], self.down.kernel[...]
        ), self.down.bias[...]


class Block(nnx.Module):
    """A stream (N, D), and what (D,) is still to be added to all of it -> the same: the last bias is left to the next norm."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.norm1 = ResidualNorm(config.width, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.norm2 = ResidualNorm(config.width, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x: Array, late: Array | None, length: int, segment_ids: Array | None = None
    ) -> tuple[Array, Array | None]:
        x, normal = self.norm1(x, late)
        x, normal = self.norm2(*self._add(x, *self.attn(normal, length, segment_ids)))
        return self._add(x, *self.mlp(normal))

    def _add(self, x: Array, branch: Array, bias: Array) -> tuple[Array, Array | None]:
        if self.dropout.rate == 0:
            return x + branch, bias
        return x + self.dropout(branch + bias), None

    def decode(
        self, x: Array, length: int, cache: Cache, layer: int | Array
    ) -> tuple[Array, Cache]:
        x, normal = self.norm1(x)
        (mixed, bias), cache = self.attn.decode(normal, length, cache, layer)
        x, normal = self.norm2(x + mixed, bias)
        branch, bias = self.mlp(normal)
        return x + branch + bias, cache


class GPT(nnx.Module):
    """tokens (B, T) -> logits (B, T, V); the output layer is the embedding, transposed.

    Of several documents packed into a row, `segment_ids` (B, T) tell which token belongs to which, and `positions` (B, T)
    where it stands in its own: no token then sees another document's.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        c = config
        if c.width % c.num_heads:
            raise ValueError(f"width {c.width} is not divisible by {c.num_heads} heads")
        if c.remat not in REMAT:
            raise ValueError(f"remat '{c.remat}' is none of {', '.join(REMAT)}")
        self.config = c
        normal = nnx.initializers.normal(0.02)
        self.tokens = nnx.Param(
            nnx.with_partitioning(normal, ("vocab", "embed"))(
                rngs.params(), (c.vocab_size, c.width)
            )
        )
        self.positions = nnx.Param(
            nnx.with_partitioning(normal, (None, "embed"))(rngs.params(), (c.max_length, c.width))
        )
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)
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
        self.norm = ResidualNorm(c.width, epsilon=1e-5, rngs=rngs)

    def __call__(
        self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        features, table = self.features(tokens, segment_ids, positions)
        return jax.lax.dot_general(features, table, (((1,), (1,)), ((), ()))).reshape(
            *tokens.shape, -1
        )

    def features(
        self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None
    ) -> tuple[Array, Array]:
        """What goes into the output layer, (N, D), and its weights, (V, D): for `chunked_cross_entropy`."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"a sequence of {length} tokens; the model has {self.config.max_length} positions"
            )
        table = self.tokens[...]
        x = look_up(table, tokens.reshape(-1))
        if positions is None:
            x = x + jnp.tile(self.positions[...][:length], (tokens.shape[0], 1))
        else:
            x = x + look_up(self.positions[...], positions.reshape(-1))
        x = self.dropout(x)
        block = REMAT[self.config.remat](lambda block, x, late: block(x, late, length, segment_ids))
        late: Array | None = None
        if self.config.scan_layers:

            def whole(layer: Block, x: Array) -> Array:
                return add_late(
                    *block(layer, x, None)
                )  # left to the next norm, it would be added in a pass of its own

            x = nnx.scan(whole, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for layer in self.blocks:
                x, late = block(layer, x, late)
        return self.norm(x, late)[1], table

    def empty_cache(self, rows: int, size: int) -> Cache:
        c = self.config
        return empty_cache(
            c.num_layers, rows, c.num_heads, size, c.width // c.num_heads, self.tokens[...].dtype
        )

    def decode(self, tokens: Array, count: Array, cache: Cache) -> tuple[Array, Cache]:
        """The next `count` of the tokens (B, T) -> logits (B, V) of what follows the last of them, and the cache with them in it.

        There is no dropout. What stands behind the `count` tokens only fills the array up.
        """
        rows, length = tokens.shape
        places = jnp.minimum(cache.length + jnp.arange(length), self.config.max_length - 1)
        x = look_up(self.tokens[...], tokens.reshape(-1)) + jnp.tile(
            look_up(self.positions[...], places), (rows, 1)
        )
        if self.config.scan_layers:
            decode = nnx.scan(
                lambda block, layer, carry: block.decode(carry[0], length, carry[1], layer),
                in_axes=(0, 0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            x, cache = decode(self.blocks, jnp.arange(self.config.num_layers), (x, cache))
        else:
            for layer, block in enumerate(self.blocks):
                x, cache = block.decode(x, length, cache, layer)
        x = jax.lax.dynamic_index_in_dim(
            x.reshape(rows, length, -1), count - 1, axis=1, keepdims=False
        )
        return self.norm(x)[1] @ self.tokens[...].T, longer(cache, count)


REMAT: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "block": nnx.remat,
    "dots": partial(
        nnx.remat,
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("attention"),
        ),
    ),
}
