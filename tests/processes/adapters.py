"""A recipe that trains LoRA adapters on a small Llama."""

from pathlib import Path

import numpy as np
import optax

from shardwise import Batches, InitFrom, Mean, Run, lora, optim
from shardwise.checkpoint.reader import read_json
from shardwise.weights.hf_config import config_from_hf, model_of

PATTERNS = [
    f"blocks/*{name}" for name in ("query", "key", "value", "out", "gate", "up", "down")
]


def loss(model, batch):
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(
            model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        )
    )


def recipe(
    base: Path, steps: int = 6, out: Path | None = None, mesh: str = "data=-1"
) -> Run:
    config = config_from_hf(read_json(base / "config.json"))
    tokens = (
        np.random.default_rng(0)
        .integers(0, config.vocab_size, (64, 17))
        .astype(np.int32)
    )
    return Run(
        model=lora(lambda rngs: model_of(config, rngs), PATTERNS, rank=4),
        loss=loss,
        optimizer=optim.adamw(3e-3, ema=0.5),
        data=Batches({"tokens": tokens}, 16),
        steps=steps,
        save_every=3,
        mesh=mesh,
        init_from=InitFrom(base),
        out=out,
    )
