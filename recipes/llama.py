"""Llama 2 and 3, from a toy to 405 billion parameters; on random tokens, to plan and to time, unless --data is given:

    shardwise train recipes/llama.py
    shardwise train recipes/llama.py --size 8b --mesh fsdp=-1 --batch-size 64 --length 8192 --remat block
    shardwise train recipes/llama.py --data data --size 8b --mesh fsdp=-1 --remat block --keep qkv --loss-chunks 8

A step sees batch_size x length tokens. What the backward pass needs of a block is computed again with --remat block, but for
what --keep and --offload name: "input" of the block, "qkv" (after the rotation), "attention" (the heads' outputs), "out" (their
projection), "up" (both products that enter the MLP's middle), "down" (the MLP's output). Offloaded values wait in the host's memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from shardwise import Batches, Mean, Run, Tokens, open_tokens, optim
from shardwise.models.attention import causal_attention
from shardwise.models.loss import cross_entropy
from shardwise.models.table import look_up
from shardwise.sharding import constrain

Array = jax.Array
Kept = Literal["input", "qkv", "attention", "out", "up", "down"]


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # each shared by num_heads / num_kv_heads heads of queries
    width: int
    mlp_width: int
    rope_theta: float = 5e5  # the slowest of the rotations that tell positions has a wavelength of about this many tokens
    tied: bool = False  # the output layer is the embedding, transposed
    param_dtype: str = "float32"
    scan_layers: bool = True  # one compiled block for all layers: compile time does not grow with depth
    remat: str = "none"  # what the backward pass computes again: "none", "block" (all but what is kept) or "dots" (all but matrix products)
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


SIZES = {
    "tiny": LlamaConfig(256, 2, 4, 2, 64, 192),
    "7b": LlamaConfig(32000, 32, 32, 32, 4096, 11008, rope_theta=1e4),  # Llama 2
    "70b-llama2": LlamaConfig(32000, 80, 64, 8, 8192, 28672, rope_theta=1e4),
    "8b": LlamaConfig(128256, 32, 32, 8, 4096, 14336),  # Llama 3; 3.1 stretches the slow rotations for rows beyond 8192 tokens
    "70b": LlamaConfig(128256, 80, 64, 8, 8192, 28672),
    "405b": LlamaConfig(128256, 126, 128, 8, 16384, 53248),
}


def weight(config: LlamaConfig, rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...]) -> nnx.Param[Array]:
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), names)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def product(x: Array, kernel: Array, dims: int = 1) -> Array:
    """(..., ins) and (ins, outs) -> (..., outs), where ins are `dims` dims."""
    contracted = tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions: number i of a head (B, T, H, K) and number i + K / 2 are turned together, by (T, K / 2) angles."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotations(length: int, width: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines of the angles of each position, (T, K / 2)."""
    angles = jnp.arange(length)[:, None] * theta ** -(jnp.arange(0, width, 2) / width)
    return jnp.cos(angles), jnp.sin(angles)


class RMSNorm(nnx.Module):
    def __init__(self, config: LlamaConfig):
        self.scale = nnx.Param(jnp.ones(config.width, jnp.dtype(config.param_dtype)))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-5)
        return normal.astype(x.dtype) * self.scale[...]


class Block(nnx.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        new, head = partial(weight, c, rngs), c.width // c.num_heads
        self.config = c
        self.norm1 = RMSNorm(c)
        self.query = new((c.width, c.num_heads, head), ("embed", "heads", None))
        self.key = new((c.width, c.num_kv_heads, head), ("embed", "heads", None))
        self.value = new((c.width, c.num_kv_heads, head), ("embed", "heads", None))
        self.out = new((c.num_heads, head, c.width), ("heads", None, "embed"))
        self.norm2 = RMSNorm(c)
        self.gate = new((c.width, c.mlp_width), ("embed", "mlp"))
        self.up = new((c.width, c.mlp_width), ("embed", "mlp"))
        self.down = new((c.mlp_width, c.width), ("mlp", None))  # FSDP cuts the larger dim: a narrow last one would be padded

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

    def attention(self, x: Array, cos: Array, sin: Array) -> Array:
        q, k, v = (product(x, kernel[...]) for kernel in (self.query, self.key, self.value))  # (B, T, H, K)
        q, k, v = (self.named(heads, "qkv") for heads in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        return product(causal_attention(q, k, v), self.out[...], dims=2)

    def mlp(self, x: Array) -> Array:
        gate, up = (self.named(product(x, kernel[...]), "up") for kernel in (self.gate, self.up))
        return product(jax.nn.silu(gate) * up, self.down[...])


class Llama(nnx.Module):
    """tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        if (c.keep or c.offload) and c.remat != "block":
            raise ValueError(f"keep and offload say what remat='block' spares; remat is '{c.remat}'")
        self.config = c
        self.tokens = weight(c, rngs, (c.vocab_size, c.width), ("vocab", "embed"))
        self.blocks: Any
        if c.scan_layers:
            stack = nnx.vmap(partial(Block, c), in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
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
        cos, sin = rotations(tokens.shape[1], c.width // c.num_heads, c.rope_theta)
        x = look_up(self.tokens[...], tokens)
        block = remat(c)(lambda block, x: block(x, cos, sin))
        if c.scan_layers:
            x = nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for layer in self.blocks:
                x = block(layer, x)
        return self.norm(x)


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
        names_which_can_be_saved=kept, names_which_can_be_offloaded=offloaded, offload_src="device", offload_dst="pinned_host"
    )
    return partial(nnx.remat, policy=policy)


def loss(model: Llama, batch: dict[str, Array], chunks: int = 1) -> Mean:
    """Nats for each token. In several chunks, the logits of one of them exist at a time, and are computed again for the gradient."""
    tokens, labels = batch["inputs"], batch["labels"]
    x, kernel = model.features(tokens), model.output()
    rows, length = tokens.shape
    if length % chunks:
        raise ValueError(f"rows of {length} tokens cannot be cut into {chunks} chunks for the loss")

    def nats(part: tuple[Array, Array]) -> Array:
        x, labels = part
        return cross_entropy(product(constrain(x, "batch"), kernel), labels)

    if chunks == 1:
        return Mean(nats((x, labels)))
    cut = lambda value: value.reshape(rows, chunks, length // chunks, *value.shape[2:]).swapaxes(0, 1)  # noqa: E731
    parts = cut(x), cut(labels)
    return Mean(jax.lax.map(jax.checkpoint(nats), parts).swapaxes(0, 1).reshape(rows, length))


@dataclass(frozen=True)
class RandomTokens:
    """Rows without meaning: the same for the same index, whatever is asked for with it."""

    vocab_size: int
    length: int
    num_rows: int = 1 << 20

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        windows = np.stack([np.random.default_rng(int(i)).integers(self.vocab_size, size=self.length + 1, dtype=np.int32) for i in indices])
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    def fingerprint(self) -> dict[str, Any]:
        return {"random": [self.vocab_size, self.length, self.num_rows]}


def recipe(
    steps: int = 20,
    mesh: str = "data=-1",
    out: Path | None = None,
    data: Path | None = None,
    seed: int = 0,
    size: Literal["tiny", "7b", "70b-llama2", "8b", "70b", "405b"] = "tiny",
    vocab: int | None = None,
    mlp_width: int | None = None,
    tied: bool = False,
    batch_size: int = 8,
    length: int = 128,
    accumulate: int = 1,
    lr: float = 3e-4,
    compute_dtype: str | None = "bfloat16",
    param_dtype: Literal["float32", "bfloat16"] = "float32",
    remat: Literal["none", "block", "dots"] = "none",
    keep: tuple[Kept, ...] = (),
    offload: tuple[Kept, ...] = (),
    scan_layers: bool = True,
    loss_chunks: int = 1,
    save_every: int = 0,
) -> Run:
    tokens = open_tokens(data) if data is not None else None
    known = vocab or (tokens.info.get("vocab_size") if tokens is not None else None) or SIZES[size].vocab_size
    vocabulary = -(-known // 128) * 128  # so that meshes and matrix units divide it
    config = replace(SIZES[size], vocab_size=vocabulary, mlp_width=mlp_width or SIZES[size].mlp_width, tied=tied, param_dtype=param_dtype)
    config = replace(config, scan_layers=scan_layers, remat=remat, keep=keep, offload=offload)
    source = RandomTokens(known, length) if tokens is None else Tokens(tokens, length)
    return Run(
        model=lambda rngs: Llama(config, rngs),
        loss=partial(loss, chunks=loss_chunks),
        optimizer=optim.adamw(optim.cosine(lr, steps, warmup=0.05, end=lr / 10), b2=0.95, weight_decay=0.1, clip=1.0),
        data=Batches(source, batch_size, seed=seed),
        steps=steps,
        mesh=mesh,
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
