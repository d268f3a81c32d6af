"""A run that learns nothing, so early stopping ends it at the same step in all processes."""

from pathlib import Path

import numpy as np
import optax
from flax import nnx

from shardwise import Batches, EarlyStop, Keep, Mean, Run


def loss(model, batch):
    return Mean(model(batch["x"])[:, 0] ** 2)


def recipe(steps: int = 20, out: Path | None = None, patience: int = 2) -> Run:
    data = Batches(
        {"x": np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)}, 8
    )
    return Run(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(0.0),
        data=data,
        eval_data=data,
        eval_every=2,
        steps=steps,
        sample=lambda model: f"{float(model.bias[0]):.1f}",
        stop_when=EarlyStop(patience=patience),
        keep=Keep(last=1, best=1),
        out=out,
    )
