r"""nanoGPT's character-level GPT, with its two configurations, on any text file.

    shardwise train recipes/shakespeare.py --data input.txt --config cpu --out runs/cpu
    shardwise train recipes/shakespeare.py --data input.txt --config gpu --out runs/gpu
    shardwise sample runs/cpu --recipe recipes/shakespeare.py --data input.txt --config cpu \
        --tokenizer characters:input.txt --prompt "ROMEO:"

The text of nanoGPT is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn: 1,115,394
characters, 65 different ones. nanoGPT reports a best validation loss of 1.4697 for the first
configuration on a GPU, and 1.88 for the second on a CPU.

The model is written with plain Flax layers. A step processes batch_size x max_length characters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import Keep, Mean, Run, accelerate, optim
from shardwise.data import Characters
from shardwise.models.sampling import generate


@dataclass(frozen=True)
class Config:
    """One of nanoGPT's configurations.

    Attributes:
        max_length: characters per sequence.
        batch_size: sequences per step.
        num_layers: the number of transformer blocks.
        num_heads: the number of attention heads.
        width: the width of the residual stream.
        dropout: the dropout rate of embeddings, attention weights and residual branches.
        steps: the number of training steps.
        eval_batches: the number of batches of an evaluation.
        compute_dtype: the dtype of the computation. None uses that of the parameters.
    """

    max_length: int
    batch_size: int
    num_layers: int
    num_heads: int
    width: int
    dropout: float
    steps: int
    eval_batches: int
    compute_dtype: str | None


CONFIGS = {
    "gpu": Config(
        max_length=256,
        batch_size=64,
        num_layers=6,
        num_heads=6,
        width=384,
        dropout=0.2,
        steps=5000,
        eval_batches=200,
        compute_dtype="bfloat16",
    ),
    "cpu": Config(
        max_length=64,
        batch_size=12,
        num_layers=4,
        num_heads=4,
        width=128,
        dropout=0.0,
        steps=2000,
        eval_batches=20,
        compute_dtype=None,
    ),
}

# Updates until the learning rate has its peak.
WARMUP = 100
# Length of the text that the trained model generates.
SAMPLE_LENGTH = 300


class Block(nnx.Module):
    """A transformer block without biases."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        """Create the parameters."""
        c = config
        init = nnx.initializers.normal(0.02)
        # Two residual branches per layer add to the stream, so that its variance stays bounded.
        out_init = nnx.initializers.normal(0.02 / math.sqrt(2 * c.num_layers))
        self.norm1 = nnx.LayerNorm(c.width, epsilon=1e-5, use_bias=False, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            c.num_heads,
            c.width,
            dropout_rate=c.dropout,
            # Every sequence and head draws its own mask.
            broadcast_dropout=False,
            use_bias=False,
            kernel_init=init,
            out_kernel_init=out_init,
            decode=False,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(c.width, epsilon=1e-5, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(
            c.width, 4 * c.width, use_bias=False, kernel_init=init, rngs=rngs
        )
        self.down = nnx.Linear(
            4 * c.width, c.width, use_bias=False, kernel_init=out_init, rngs=rngs
        )
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the residual stream (B, T, D) after this block."""
        x = x + self.dropout(self.attn(self.norm1(x), is_causal=True))
        hidden = nnx.gelu(self.up(self.norm2(x)), approximate=False)
        return x + self.dropout(self.down(hidden))


class CharGPT(nnx.Module):
    """nanoGPT's model: GPT-2 without biases. The output layer is the embedding, transposed."""

    def __init__(self, config: Config, vocab_size: int, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            config: sizes of the model.
            vocab_size: the number of different characters.
            rngs: random number generators.
        """
        c = config
        init = nnx.initializers.normal(0.02)
        self.config = c
        self.tokens = nnx.Embed(vocab_size, c.width, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(
            c.max_length, c.width, embedding_init=init, rngs=rngs
        )
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.num_layers)])
        self.norm = nnx.LayerNorm(c.width, epsilon=1e-5, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits (B, T, V) of the next characters after tokens (B, T)."""
        positions = jnp.arange(tokens.shape[1])
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def loss(model: CharGPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss of each character, in nats."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def read_characters(path: Path) -> tuple[Characters, np.ndarray]:
    """Return the different characters of a text, and the text as indices into them."""
    text = path.read_text(encoding="utf-8")
    characters = Characters(text)
    return characters, characters.encode([text.encode()])[0]


def random_windows(
    tokens: np.ndarray, length: int, batch_size: int, seed: int
) -> Callable[[int], dict[str, np.ndarray]]:
    """Return a function from a step to its batch: windows that start anywhere, as in nanoGPT.

    They are drawn with replacement, and depend on the seed and the step alone.
    """

    def batch(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(len(tokens) - length, size=batch_size)
        windows = tokens[starts[:, None] + np.arange(length + 1)]
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    return batch


def recipe(
    data: Path,
    config: Literal["gpu", "cpu"] = "gpu",
    steps: int | None = None,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    lr: float = 1e-3,
    clip: float = 1.0,
    eval_every: int = 250,
    save_every: int = 250,
    deterministic: bool = True,
) -> Run:
    """Train nanoGPT's character-level GPT on a text file.

    Args:
        data: Text file, UTF-8. The last 10 % of its characters are the validation data.
        config: Sizes, steps and dropout: nanoGPT's configuration for a GPU, or the one for a CPU.
        steps: Number of training steps. None uses the 5,000 or 2,000 of the configuration.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights, the data and dropout.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end. The best one is kept.
        deterministic: Compute the same bits every time on GPUs too.
    """
    c = CONFIGS[config]
    num_steps = steps or c.steps
    characters, tokens = read_characters(data)
    num_train = int(0.9 * len(tokens))
    # Another seed than the training data has, and the same batches in each evaluation.
    draw = random_windows(
        tokens[num_train:], c.max_length, c.batch_size, seed + 1_000_000
    )

    def sample(model: nnx.Module) -> str:
        """Return text that the model generates after a line break."""
        prompt = np.array([[max(characters.alphabet.find("\n"), 0)]])
        drawn = generate(model, prompt, SAMPLE_LENGTH, jax.random.key(0), 0.8)
        return characters.decode(np.asarray(drawn)[0]).strip()

    schedule = optim.cosine(
        lr, num_steps, warmup=min(WARMUP, num_steps // 2), end=lr / 10
    )
    return Run(
        model=lambda rngs: CharGPT(c, characters.vocab_size, rngs),
        # The same model and parameters, computed with faster kernels.
        loss=accelerate(loss),
        optimizer=optim.adamw(schedule, b2=0.99, weight_decay=0.1, clip=clip or None),
        data=random_windows(tokens[:num_train], c.max_length, c.batch_size, seed),
        eval_data=[draw(number) for number in range(c.eval_batches)],
        steps=num_steps,
        mesh=mesh,
        seed=seed,
        compute_dtype=c.compute_dtype,
        deterministic=deterministic,
        eval_every=eval_every,
        save_every=save_every,
        # The large configuration overfits: the best step is not the last one.
        keep=Keep(last=1, best=1),
        out=out,
        sample=sample,
        sample_every=num_steps,
        unit="tokens",
    )
