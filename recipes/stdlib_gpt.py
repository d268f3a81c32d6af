"""Train a small byte-level GPT on the source code of the Python standard library.

    shardwise train recipes/stdlib_gpt.py
    shardwise train recipes/stdlib_gpt.py --mesh data=4,model=2 --cpu-devices 8
    shardwise train recipes/stdlib_gpt.py --compute-dtype bfloat16 --remat block --scan-layers

A step processes batch_size x length = 16 x 128 = 2,048 bytes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import Batches, Mean, Run, Tokens, optim, stdlib_bytes
from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.sampling import generate

Optimizer = Literal[
    "adamw", "sgd", "lion", "adafactor", "muon", "schedule_free", "prodigy"
]

# Heads keep their width when the model grows, so that hyperparameters transfer (docs/scale.md).
HEAD_WIDTH = 32

# Muon trains matrices. It leaves these embedding tables to Adam.
TABLES = ("tokens", "positions")

# Starts of the samples. One batch generates them all, so they have one length.
PROMPTS = (
    "def find(self, name):\n    ",
    "class Reader(object):\n    ",
    "import os\nimport sys\nfrom ",
)

# The peak learning rate that suits each optimizer.
LEARNING_RATES: dict[Optimizer, float] = {
    "adamw": 4e-3,
    "sgd": 0.1,
    "lion": 3e-4,
    "adafactor": 0.05,
    "muon": 0.02,
    "schedule_free": 4e-3,
    "prodigy": 1.0,
}


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss of each byte, in nats.

    With one entry per byte, padding and gradient accumulation cannot change the mean.
    """
    features, table = model.features(batch["inputs"])
    return Mean(linear_cross_entropy(features, table, batch["labels"]))


def sample(model: nnx.Module) -> str:
    """Return continuations of three prompts that fill the context of the model."""
    assert isinstance(model, GPT)
    prompts = jnp.array([list(prompt.encode()) for prompt in PROMPTS])
    num_bytes = model.config.max_length - prompts.shape[1]
    rows = generate(model, prompts, num_bytes, jax.random.key(0), temperature=0.7)
    texts = [bytes(row).decode(errors="replace") for row in np.asarray(rows, np.uint8)]
    return "\n\n".join(text.rstrip() for text in texts)


def make_optimizer(
    name: Optimizer,
    steps: int,
    lr: float | None = None,
    clip: float | None = None,
) -> optax.GradientTransformation:
    """Return an optimizer with the learning rate and the schedule that suit it.

    Args:
        name: the name of the optimizer.
        steps: the number of training steps.
        lr: the peak learning rate; None uses the one in `LEARNING_RATES`.
        clip: the largest norm of all gradients; 0 does not clip. None clips at 1, except for
            prodigy, which estimates its step size from the gradients.
    """
    peak = lr or LEARNING_RATES[name]
    default = None if name == "prodigy" else 1.0
    limit = default if clip is None else clip or None
    schedule = optim.cosine(peak, steps, warmup=0.05, end=peak / 10)
    match name:
        case "adamw":
            return optim.adamw(schedule, b2=0.99, weight_decay=0.1, clip=limit)
        case "sgd":
            return optim.sgd(schedule, momentum=0.9, nesterov=True, clip=limit)
        case "lion":
            return optim.lion(schedule, weight_decay=0.5, clip=limit)
        case "adafactor":
            return optim.adafactor(schedule, clip=limit)
        case "muon":
            return optim.muon(schedule, adam=TABLES, weight_decay=0.1, clip=limit)
        case "schedule_free":
            constant = optim.constant(peak, steps, warmup=0.05)
            return optim.schedule_free(constant, b1=0.95, weight_decay=0.1, clip=limit)
        case "prodigy":
            return optim.prodigy(schedule, b2=0.99, weight_decay=0.1, clip=limit)


def recipe(
    steps: int = 1600,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    width: int = 128,
    layers: int = 2,
    batch_size: int = 16,
    length: int = 128,
    accumulate: int = 1,
    optimizer: Optimizer = "muon",
    lr: float | None = None,
    clip: float | None = None,
    dropout: float = 0.0,
    compute_dtype: str | None = None,
    remat: Literal["none", "block", "dots"] = "none",
    scan_layers: bool = False,
    norms: bool = False,
    eval_every: int = 250,
    save_every: int = 0,
) -> Run:
    """Train a small byte-level GPT on the source code of the Python standard library.

    Args:
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights, the data order and dropout.
        width: Width of the model, a multiple of the head width of 32.
        layers: Number of layers.
        batch_size: Sequences per step.
        length: Bytes per sequence.
        accumulate: Number of micro-batches per step.
        optimizer: Optimizer.
        lr: Peak learning rate. None uses the one that suits the optimizer.
        clip: Largest norm of all gradients. 0 does not clip. None uses 1; prodigy does not clip.
        dropout: Dropout rate.
        compute_dtype: Dtype of the computation, such as bfloat16. None uses that of the parameters.
        remat: What the backward pass recomputes: nothing, blocks, or all but matmuls and attention.
        scan_layers: Compile one block for all layers.
        norms: Also log the norms of updates and parameters.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    train, validation = stdlib_bytes()
    config = replace(
        PRESETS["byte"],
        width=width,
        num_heads=width // HEAD_WIDTH,
        num_layers=layers,
        max_length=length,
        dropout=dropout,
        remat=remat,
        scan_layers=scan_layers,
    )
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=make_optimizer(optimizer, steps, lr, clip),
        data=Batches(Tokens(train, length), batch_size, seed=seed),
        eval_data=Batches(Tokens(validation[: 64 * 1024], length), batch_size),
        steps=steps,
        mesh=mesh,
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        norms=norms,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        sample=sample,
        unit="tokens",
    )
