"""Small runs that the tests of several packages share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from shardwise import Batches, Mean, Run, Tokens
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.loss import cross_entropy


def loss(model: GPT, batch: Mapping[str, jax.Array]) -> Mean:
    """Return the cross entropy of the next token."""
    return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))


def make_run(mesh: str = "data=8", rows: int = 16, **changes: Any) -> Run:
    """Return a run of a tiny GPT on `rows` sequences of 32 tokens.

    `changes` are fields of its config. They are `Any` because the fields differ in type.
    """
    config = replace(
        PRESETS["byte"],
        **{"max_length": 32, "width": 64, "vocab_size": 64, "num_layers": 2, **changes},
    )
    tokens = np.random.default_rng(0).integers(0, 64, 5000).astype(np.uint16)
    data = Batches(Tokens(tokens, 32), rows)
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optax.adamw(1e-3),
        data=data,
        steps=2,
        mesh=mesh,
        unit="tokens",
    )
