"""Compare GPT-2, written with the layers of Flax, with the GPT of shardwise on one accelerator.

    python -m benchmarks.plain_gpt                  as it is written
    python -m benchmarks.plain_gpt --accelerate     with shardwise.accelerate around the loss

Both models run in one process, and print one line of JSON each. The plain model uses `nnx.Linear`,
`nnx.LayerNorm`, `nnx.Embed`, `nnx.gelu`, `jax.nn.dot_product_attention` and the cross entropy of
Optax. On GPUs its attention is that of cuDNN unless `--attention xla` is given.
"""

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.gpt2 import make_run, measure
from shardwise import Mean, Run, accelerate
from shardwise.models.gpt import PRESETS, GPTConfig

Implementation = Literal["xla", "cudnn"] | None


class Attention(nnx.Module):
    """Causal self-attention with one layer for queries, keys and values."""

    def __init__(
        self, config: GPTConfig, implementation: Implementation, rngs: nnx.Rngs
    ):
        """Create the parameters."""
        c = config
        self.num_heads = c.num_heads
        self.implementation = implementation
        normal = nnx.initializers.normal
        out_init = normal(0.02 / math.sqrt(2 * c.num_layers))
        self.qkv = nnx.Linear(c.width, 3 * c.width, kernel_init=normal(0.02), rngs=rngs)
        self.out = nnx.Linear(c.width, c.width, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the attention of tokens (B, T, D)."""
        batch_size, length, width = x.shape
        heads = batch_size, length, self.num_heads, width // self.num_heads
        q, k, v = (y.reshape(heads) for y in jnp.split(self.qkv(x), 3, axis=-1))
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """A transformer block."""

    def __init__(
        self, config: GPTConfig, implementation: Implementation, rngs: nnx.Rngs
    ):
        """Create the parameters."""
        c = config
        normal = nnx.initializers.normal
        out_init = normal(0.02 / math.sqrt(2 * c.num_layers))
        self.norm1 = nnx.LayerNorm(c.width, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(c, implementation, rngs)
        self.norm2 = nnx.LayerNorm(c.width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(c.width, 4 * c.width, kernel_init=normal(0.02), rngs=rngs)
        self.down = nnx.Linear(4 * c.width, c.width, kernel_init=out_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to tokens (B, T, D)."""
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class PlainGPT(nnx.Module):
    """GPT-2 as a user of Flax writes it. The output layer is the embedding, transposed."""

    def __init__(
        self, config: GPTConfig, implementation: Implementation, rngs: nnx.Rngs
    ):
        """Create the parameters."""
        c = config
        init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(c.vocab_size, c.width, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(
            c.max_length, c.width, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List(
            [Block(c, implementation, rngs) for _ in range(c.num_layers)]
        )
        self.norm = nnx.LayerNorm(c.width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits (B, T, V) of tokens (B, T)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def plain_loss(model: PlainGPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss of each token."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def make_plain_run(
    config: GPTConfig,
    rows: int,
    length: int,
    *,
    is_accelerated: bool,
    implementation: Implementation,
) -> Run:
    """Return the run of `benchmarks.gpt2` with the plain model."""
    return replace(
        make_run(config, rows, length),
        model=partial(PlainGPT, config, implementation),
        loss=accelerate(plain_loss) if is_accelerated else plain_loss,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, default=64, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attention", choices=["xla", "cudnn"])
    parser.add_argument(
        "--only", choices=["own", "plain"], help="measure one of the two models"
    )
    options = parser.parse_args()
    config = replace(PRESETS[options.preset], max_length=options.length)
    implementation = options.attention or (
        "cudnn" if jax.default_backend() == "gpu" else "xla"
    )
    runs = {
        "own": make_run(config, options.rows, options.length),
        "plain": make_plain_run(
            config,
            options.rows,
            options.length,
            is_accelerated=options.accelerate,
            implementation=implementation,
        ),
    }
    for name, run in runs.items():
        if options.only not in (None, name):
            continue
        answer = measure(run, config, options.steps)
        losses = answer.pop("losses")
        line = {
            "model": name,
            "accelerate": name == "plain" and options.accelerate,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "tokens": [options.rows, options.length],
            **answer,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
