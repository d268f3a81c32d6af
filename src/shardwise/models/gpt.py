"""The GPT-2 family as plain NNX modules, from a byte-level toy to 70 billion parameters.

Shapes: B sequences, T tokens, N = B * T, D width, H heads, K head width, V vocabulary size.

Between the layers, the tokens of all sequences form one matrix (N, D), see `kernels.tokens`. Only
attention and dropout need to know the sequences. With three dimensions, XLA could choose between
layouts: on GPUs it would transpose the activations of every layer, and on CPUs the matmuls of the
backward pass would be slower.

Parameters carry logical axis names ("embed", "heads", "mlp", "vocab") that a mesh may map to its
axes. Nothing here mentions a mesh or a compute dtype: the run chooses both.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.kernels.activation import gelu_mlp, plain_gelu_mlp
from shardwise.kernels.attention import (
    causal_attention,
    causal_attention_joined_kv,
    supports_joined_kv,
)
from shardwise.kernels.float8 import Narrowed, uses_float8
from shardwise.kernels.linear import matmuls
from shardwise.kernels.lookup import look_up
from shardwise.kernels.norm import Pending, ResidualNorm, add_pending
from shardwise.kernels.tokens import merge_tokens, split_tokens
from shardwise.models.annotate import annotated
from shardwise.models.kv_cache import Cache, advance, cached_attention, empty_cache
from shardwise.models.stack import is_pipelined, run_layers, stack_layers

Array = jax.Array

# The number B of sequences, and the number T of tokens in a sequence.
BatchShape: TypeAlias = tuple[int, int]

# The result of a layer (N, D) without the bias of its last linear layer, and this bias (D,).
WithoutBias: TypeAlias = tuple[Array, Array]


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of a GPT.

    Attributes:
        vocab_size: the number of tokens. The default is the 50,257 of GPT-2, rounded up so that
            meshes and matrix units divide it.
        max_length: the largest number of tokens in a sequence.
        num_layers: the number of transformer blocks.
        num_heads: the number of attention heads. It must divide `width`.
        width: the width of the residual stream.
        dropout: the dropout rate after the embedding, the attention and the MLP.
        scan_layers: compile one block for all layers, so that compile time does not grow with
            depth.
        remat: what the backward pass recomputes: "none", "block" (everything inside a block) or
            "dots" (everything except matmuls and attention).
    """

    vocab_size: int = 50304
    max_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0
    scan_layers: bool = False
    remat: str = "none"


# "gpt2" has 124M parameters, then 355M, 774M and 1.5B as published. The last two continue the
# family with 6.7B and 69.7B.
PRESETS = {
    "byte": GPTConfig(
        vocab_size=256, max_length=128, num_layers=2, num_heads=4, width=128
    ),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(num_layers=24, num_heads=16, width=1024),
    "gpt2-large": GPTConfig(num_layers=36, num_heads=20, width=1280),
    "gpt2-xl": GPTConfig(num_layers=48, num_heads=25, width=1600),
    "gpt-7b": GPTConfig(num_layers=32, num_heads=32, width=4096),
    "gpt-70b": GPTConfig(num_layers=86, num_heads=64, width=8192),
}


class Linear(nnx.Module):
    """The parameters of a linear layer. The module that uses it decides how to add the bias.

    Attributes:
        kernel: weights of shape `(*ins, *outs)`.
        bias: of shape `outs`.
    """

    def __init__(
        self,
        ins: tuple[int, ...],
        outs: tuple[int, ...],
        names: tuple[str | None, ...],
        stddev: float,
        rngs: nnx.Rngs,
    ):
        """Create the parameters.

        Args:
            ins: the input dimensions.
            outs: the output dimensions.
            names: a logical axis name for each dimension of the kernel.
            stddev: the standard deviation of the initial weights.
            rngs: random number generators.
        """
        kernel_init = annotated(nnx.initializers.normal(stddev), names)
        bias_init = annotated(nnx.initializers.zeros, names[len(ins) :])
        self.kernel = nnx.Param(kernel_init(rngs.params(), (*ins, *outs)))
        self.bias = nnx.Param(bias_init(rngs.params(), outs))


def project(x: Array, kernel: Array) -> Array:
    """Contract all dimensions of `x` except the first with the first dimensions of `kernel`.

    Args:
        x: of shape `(N, *ins)`.
        kernel: of shape `(*ins, *outs)`.

    Returns:
        The result, of shape `(N, *outs)`.
    """
    contracted = tuple(range(1, x.ndim)), tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


class Attention(nnx.Module):
    """Causal self-attention. The bias of the output layer is returned, not added."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.
        """
        c = config
        head_width = c.width // c.num_heads
        qkv_names = "embed", None, "heads", None
        out_names = "heads", None, "embed"
        # Two residual branches per layer add to the stream, so that its variance stays bounded.
        out_stddev = 0.02 / math.sqrt(2 * c.num_layers)
        self.qkv = Linear(
            (c.width,), (3, c.num_heads, head_width), qkv_names, 0.02, rngs
        )
        self.out = Linear(
            (c.num_heads, head_width), (c.width,), out_names, out_stddev, rngs
        )

    def __call__(
        self,
        x: Array | Narrowed,
        shape: BatchShape,
        segment_ids: Array | None = None,
    ) -> WithoutBias:
        """Return the attention of tokens `x` (N, D) in sequences of this shape."""
        heads, width = self.qkv.bias.shape[1:]
        queries = jax.ShapeDtypeStruct((*shape, heads, width), x.dtype)
        if supports_joined_kv(queries):
            q, kv = self.heads(x, shape, joins_kv=True)
            mixed = causal_attention_joined_kv(q, kv, segment_ids)
        else:
            q, k, v = self.heads(x, shape)
            mixed = causal_attention(q, k, v, segment_ids)
        return self._project_out(mixed)

    def decode(
        self, x: Array, shape: BatchShape, cache: Cache, layer: int | Array
    ) -> tuple[WithoutBias, Cache]:
        """Return the attention of new tokens, and the cache with their keys and values."""
        q, k, v = self.heads(x, shape)
        mixed, cache = cached_attention(q, k, v, cache, layer)
        return self._project_out(mixed), cache

    def _project_out(self, mixed: Array) -> WithoutBias:
        """Apply the output layer to (B, T, H, K).

        The returned bias contains the bias of the values, passed through this layer (see `heads`).
        """
        kernel = self.out.kernel[...]
        bias = project(self.qkv.bias[...][2][None], kernel)[0] + self.out.bias[...]
        return project(merge_tokens(mixed), kernel), bias

    def heads(
        self, x: Array | Narrowed, shape: BatchShape, *, joins_kv: bool = False
    ) -> list[Array]:
        """Return queries, keys and values of tokens `x` (N, D), each (B, T, H, K).

        The biases of keys and values are not added. A bias of the keys adds the same number to all
        scores of a query, so it has neither an effect nor a gradient. The attention weights of a
        query sum to 1, so the bias of the values can be added to the output of the heads instead,
        where its gradient need not be summed over all tokens.

        Args:
            x: the tokens.
            shape: the numbers B and T.
            joins_kv: return keys and values in one array, see `causal_attention_joined_kv`.
        """
        kernel, (bias, *_) = self.qkv.kernel[...], self.qkv.bias[...]
        # Several matmuls instead of one: their outputs need not be split, nor the gradients joined.
        # The kernels take keys and values in one array, but not queries. Results have two
        # dimensions, not (N, H, K), so that the matmul adds the bias in its epilogue.
        parts = [slice(0, 1), slice(1, 3)] if joins_kv else range(3)
        kernels = [kernel[:, part].reshape(len(kernel), -1) for part in parts]
        q, *others = matmuls(x, kernels)
        width = bias.shape[1]
        return [
            split_tokens(y.reshape(len(y), -1, width), *shape)
            for y in (q + bias.reshape(-1), *others)
        ]


class MLP(nnx.Module):
    """Two linear layers with a GELU between them. The last bias is returned, not added."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.
        """
        c = config
        hidden = 4 * c.width
        out_stddev = 0.02 / math.sqrt(2 * c.num_layers)
        self.up = Linear((c.width,), (hidden,), ("embed", "mlp"), 0.02, rngs)
        self.down = Linear((hidden,), (c.width,), ("mlp", "embed"), out_stddev, rngs)
        # The policy "dots" saves the matmul alone, and recomputes the GELU from it.
        self.saves_matmul = c.remat == "dots"

    def __call__(self, x: Array | Narrowed) -> WithoutBias:
        """Return the MLP of tokens `x` (N, D)."""
        weights = self.up.kernel[...], self.up.bias[...], self.down.kernel[...]
        if self.saves_matmul:
            out = plain_gelu_mlp(x.wide if isinstance(x, Narrowed) else x, *weights)
        else:
            out = gelu_mlp(x, *weights)
        return out, self.down.bias[...]


def _drop_tokens(dropout: nnx.Dropout, x: Array, shape: BatchShape) -> Array:
    """Apply dropout to tokens (N, D).

    The mask is drawn for sequences (B, T, D): the order of the N tokens depends on the mesh.
    """
    if dropout.rate == 0:
        return x
    dropped: Array = dropout(split_tokens(x, *shape))
    return merge_tokens(dropped)


class GPTBlock(nnx.Module):
    """A transformer block that leaves its last bias to the norm of the next block.

    The gradient of a bias is a sum over all tokens, which is a pass over memory. The backward
    kernel of the norm reads the same values anyway, so it computes this sum as well.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.
        """
        self.norm1 = ResidualNorm(config.width, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.norm2 = ResidualNorm(config.width, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        x: Array,
        pending: Pending,
        shape: BatchShape,
        segment_ids: Array | None = None,
    ) -> tuple[Array, Pending]:
        """Apply the block.

        Args:
            x: the residual stream, (N, D).
            pending: what the preceding block has left to be added to `x`.
            shape: the numbers B and T.
            segment_ids: (B, T), as for `GPT`.

        Returns:
            The new stream (N, D), and what the caller has to add to it.
        """
        x, normalized = self.norm1.for_matmul(x, pending)
        branch, bias = self.attn(normalized, shape, segment_ids)
        x, normalized = self.norm2.for_matmul(*self._add(x, branch, bias, shape))
        return self._add(x, *self.mlp(normalized), shape)

    def _add(
        self, x: Array, branch: Array, bias: Array, shape: BatchShape
    ) -> tuple[Array, Pending]:
        """Add a branch to the stream. With dropout, the bias must be added to the branch first."""
        if self.dropout.rate:
            return x + _drop_tokens(self.dropout, branch + bias, shape), None
        return (x, (branch, bias)) if uses_float8() else (x + branch, bias)

    def decode(
        self, x: Array, shape: BatchShape, cache: Cache, layer: int | Array
    ) -> tuple[Array, Cache]:
        """Apply the block to new tokens (N, D), without dropout."""
        x, normalized = self.norm1(x)
        (mixed, bias), cache = self.attn.decode(normalized, shape, cache, layer)
        x, normalized = self.norm2(x + mixed, bias)
        branch, bias = self.mlp(normalized)
        return x + branch + bias, cache


class GPT(nnx.Module):
    """A GPT-2 language model. The output layer is the embedding, transposed.

    Example:
        >>> model = GPT(PRESETS["byte"], nnx.Rngs(0))  # doctest: +SKIP
        >>> model(jnp.zeros((2, 16), jnp.int32)).shape  # doctest: +SKIP
        (2, 16, 256)
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            rngs: random number generators.

        Raises:
            ValueError: if the heads do not divide the width, or `remat` is unknown.
        """
        c = config
        if c.width % c.num_heads:
            raise ValueError(
                f"width={c.width} is not divisible by num_heads={c.num_heads}. "
                "Use a width that is a multiple of the number of heads."
            )
        if c.remat not in REMAT:
            raise ValueError(
                f"remat='{c.remat}' is unknown. Use one of {', '.join(REMAT)}."
            )
        self.config = c
        normal = nnx.initializers.normal(0.02)
        token_init = annotated(normal, ("vocab", "embed"))
        position_init = annotated(normal, (None, "embed"))
        self.tokens = nnx.Param(token_init(rngs.params(), (c.vocab_size, c.width)))
        self.positions = nnx.Param(
            position_init(rngs.params(), (c.max_length, c.width))
        )
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)
        self.blocks: GPTBlock | nnx.List[GPTBlock]
        if c.scan_layers:
            self.blocks = stack_layers(partial(GPTBlock, c), c.num_layers, rngs)
        else:
            self.blocks = nnx.List([GPTBlock(c, rngs) for _ in range(c.num_layers)])
        self.norm = ResidualNorm(c.width, epsilon=1e-5, rngs=rngs)

    def __call__(
        self,
        tokens: Array,
        segment_ids: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Return the logits of the next tokens.

        Args:
            tokens: (B, T), integers.
            segment_ids: (B, T), the document of each token when several documents are packed into a
                sequence. Tokens attend to their own document only.
            positions: (B, T), the position of each token in its document; by default, in its
                sequence.

        Returns:
            Logits (B, T, V).
        """
        features, table = self.features(tokens, segment_ids, positions)
        rows = merge_tokens(features)
        logits = jax.lax.dot_general(rows, table, (((1,), (1,)), ((), ())))
        return split_tokens(logits, *tokens.shape)

    def features(
        self,
        tokens: Array,
        segment_ids: Array | None = None,
        positions: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the input and the weights of the output layer, for a fused loss.

        See `linear_cross_entropy` and `chunked_cross_entropy`.

        Args:
            tokens: (B, T), as for `__call__`.
            segment_ids: (B, T), as for `__call__`.
            positions: (B, T), as for `__call__`.

        Returns:
            The input of the output layer, (B, T, D), and its weights, (V, D).

        Raises:
            ValueError: if the sequences are longer than `max_length`.
        """
        batch_size, length = tokens.shape
        shape = batch_size, length
        if length > self.config.max_length:
            raise ValueError(
                f"a sequence has {length} tokens, but max_length={self.config.max_length} of the "
                "model allows fewer. Use shorter sequences, or a model with a larger max_length."
            )
        table = self.tokens[...]
        x = look_up(table, merge_tokens(tokens))
        if positions is None:
            x = x + self._repeated(self.positions[...][:length], shape)
        else:
            x = x + look_up(self.positions[...], merge_tokens(positions))
        x = _drop_tokens(self.dropout, x, shape)
        x, pending = self._apply_blocks(x, shape, segment_ids)
        return split_tokens(self.norm(x, pending)[1], *shape), table

    def _repeated(self, positions: Array, shape: BatchShape) -> Array:
        """Return the embeddings of the positions of one sequence (T, D) for all tokens (N, D)."""
        width = positions.shape[1]
        return merge_tokens(jnp.broadcast_to(positions, (*shape, width)))

    def _apply_blocks(
        self, x: Array, shape: BatchShape, segment_ids: Array | None
    ) -> tuple[Array, Pending]:
        """Return the residual stream after all blocks, and what the next norm adds to it."""

        def block_function(shape: BatchShape, segment_ids: Array | None) -> _ApplyBlock:
            def apply_block(
                block: GPTBlock, x: Array, pending: Pending
            ) -> tuple[Array, Pending]:
                return block(x, pending, shape, segment_ids)

            return REMAT[self.config.remat](apply_block)

        run_block = block_function(shape, segment_ids)
        if self.config.scan_layers and is_pipelined():

            def apply_to_sequences(
                block: GPTBlock, x: Array, segment_ids: Array | None
            ) -> Array:
                shape = x.shape[0], x.shape[1]
                run_block = block_function(shape, segment_ids)
                rows = add_pending(*run_block(block, merge_tokens(x), None))
                return split_tokens(rows, *shape)

            # A pipeline divides sequences, not their tokens.
            sequences = split_tokens(x, *shape)
            args = (self._stack(), apply_to_sequences, sequences, segment_ids)
            return merge_tokens(run_layers(*args)), None
        if self.config.scan_layers:

            def apply_layer(block: GPTBlock, x: Array) -> Array:
                # Left to the next norm, the bias would be added in a separate pass over memory.
                return add_pending(*run_block(block, x, None))

            return run_layers(self._stack(), apply_layer, x), None
        pending: Pending = None
        for block in self._layers():
            x, pending = run_block(block, x, pending)
        return x, pending

    def _stack(self) -> GPTBlock:
        """Return the block whose parameters have a leading layer dimension (`scan_layers=True`)."""
        return cast(GPTBlock, self.blocks)

    def _layers(self) -> Iterable[GPTBlock]:
        """Return the separate blocks (`scan_layers=False`)."""
        return cast(Iterable[GPTBlock], self.blocks)

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
            c.num_layers, batch_size, c.num_heads, capacity, head_width, dtype
        )

    def decode(self, tokens: Array, count: Array, cache: Cache) -> tuple[Array, Cache]:
        """Process new tokens of each sequence, without dropout.

        Args:
            tokens: (B, T). The tokens after the first `count` are padding.
            count: int32, the number of new tokens.
            cache: the keys and values of the previous tokens.

        Returns:
            The logits (B, V) of the token after the last new one, and the updated cache.
        """
        batch_size, length = tokens.shape
        shape = batch_size, length
        positions = jnp.minimum(
            cache.length + jnp.arange(length), self.config.max_length - 1
        )
        x = look_up(self.tokens[...], merge_tokens(tokens))
        x = x + self._repeated(look_up(self.positions[...], positions), shape)
        if self.config.scan_layers:
            decode = nnx.scan(
                lambda block, layer, carry: block.decode(
                    carry[0], shape, carry[1], layer
                ),
                in_axes=(0, 0, nnx.Carry),
                out_axes=nnx.Carry,
            )
            x, cache = decode(
                self._stack(), jnp.arange(self.config.num_layers), (x, cache)
            )
        else:
            for layer, block in enumerate(self._layers()):
                x, cache = block.decode(x, shape, cache, layer)
        last = jax.lax.dynamic_index_in_dim(
            split_tokens(x, *shape), count - 1, axis=1, keepdims=False
        )
        return self.norm(last)[1] @ self.tokens[...].T, advance(cache, count)


_ApplyBlock: TypeAlias = Callable[[GPTBlock, Array, Pending], tuple[Array, Pending]]

# How each value of `GPTConfig.remat` wraps the function that applies a block.
REMAT: dict[str, Callable[[_ApplyBlock], _ApplyBlock]] = {
    "none": lambda apply_block: apply_block,
    "block": nnx.remat,
    "dots": nnx.remat(
        policy=jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("attention"),
        ),
    ),
}
