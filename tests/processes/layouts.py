"""The model, the data and the meshes that the processes of these tests train with."""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import Batches, Mean
from shardwise.models.gpt import GPT, GPTConfig

# The first axis of each is across processes.
LAYOUTS = (
    "data=8",
    "fsdp=8",
    "model=8",
    "data=2,fsdp=2,model=2",
    "model=2,fsdp=4",
    "data=2,context=4",
    "context=4,fsdp=2",
)
STEPS, BATCH_SIZE, LENGTH = 20, 16, 12
CONFIG = GPTConfig(
    vocab_size=64, max_length=LENGTH, num_layers=1, num_heads=8, width=32, dropout=0.1
)


@dataclass
class Recorded:
    """A source of token sequences that records which of them are read."""

    tokens: np.ndarray
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read += indices.tolist()
        return {"inputs": self.tokens[indices, :-1], "labels": self.tokens[indices, 1:]}


def data() -> tuple[Recorded, Batches]:
    tokens = (
        np.random.default_rng(5)
        .integers(0, CONFIG.vocab_size, (100, LENGTH + 1))
        .astype(np.int32)
    )
    source = Recorded(tokens)
    return source, Batches(source, BATCH_SIZE, seed=11)


def gpt(rngs):
    return GPT(CONFIG, rngs)


class Bigrams(nnx.Module):
    """Predicts each token from the previous one, with dropout and a layer sharded over "model".

    It compiles quickly.
    """

    def __init__(self, rngs):
        sharded = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), (None, "model")
        )
        self.embed = nnx.Embed(CONFIG.vocab_size, 64, rngs=rngs)
        self.up = nnx.Linear(64, 128, kernel_init=sharded, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(128, CONFIG.vocab_size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.dropout(nnx.tanh(self.up(self.embed(tokens)))))


MODELS = {"gpt": gpt, "bigrams": Bigrams}


def loss(model, batch) -> Mean:
    logits = model(batch["inputs"]).astype(jnp.float32)
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
