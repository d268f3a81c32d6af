"""A small byte-level GPT learns Python from the standard library's own source code.

    shardwise train recipes/stdlib_gpt.py
    shardwise train recipes/stdlib_gpt.py --mesh data=4,model=2 --cpu-devices 8
    shardwise train recipes/stdlib_gpt.py --compute-dtype bfloat16 --remat block --scan-layers

A step sees batch_size x length = 16 x 128 = 2,048 bytes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise import Batches, Mean, Run, Tokens, stdlib_bytes
from shardwise.models.gpt import GPT, PRESETS, cross_entropy, generate


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Nats for each byte: an entry for each of them, so that padding and micro-batches cannot change the mean."""
    nats = cross_entropy(model(batch["inputs"]), batch["labels"])
    return Mean(nats)


def sample(model: GPT, prompt: str = "def ", num_bytes: int = 300) -> str:
    tokens = jnp.array([list(prompt.encode())])
    written = generate(model, tokens, num_bytes, jax.random.key(0))
    return bytes(np.asarray(written[0], np.uint8)).decode(errors="replace")


def recipe(
    steps: int = 1000,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    batch_size: int = 16,
    length: int = 128,
    accumulate: int = 1,
    lr: float = 4e-3,
    dropout: float = 0.0,
    compute_dtype: str | None = None,
    remat: Literal["none", "block", "dots"] = "none",
    scan_layers: bool = False,
    eval_every: int = 250,
    save_every: int = 0,
) -> Run:
    train, held_out = stdlib_bytes()
    config = replace(PRESETS["byte"], max_length=length, dropout=dropout, remat=remat, scan_layers=scan_layers)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, warmup_steps=min(50, steps // 10), decay_steps=steps, end_value=lr / 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=schedule, b2=0.99, weight_decay=0.1),
    )
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optimizer,
        data=Batches(Tokens(train, length), batch_size, seed=seed),
        eval_data=Batches(Tokens(held_out[: 64 * 1024], length), batch_size),
        steps=steps,
        mesh=mesh,
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        sample=sample,
        unit="tokens",
    )
