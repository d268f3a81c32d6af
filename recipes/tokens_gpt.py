"""A GPT on text of your own, prepared once:

    shardwise data prepare my_text/ --out data
    shardwise train recipes/tokens_gpt.py --data data
    shardwise train recipes/tokens_gpt.py --data data --pack --preset gpt2 --length 1024 --compute-dtype bfloat16
    shardwise data show recipes/tokens_gpt.py --data data --step 100

A step sees batch_size x length tokens. With --pack no token sees another document's, and no label is another document's.
--init-from begins with the weights of another run, or of GPT-2 in a directory as `transformers` writes it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax

from shardwise import Batches, InitFrom, Mean, Packed, Run, Tokens, open_tokens, optim, split
from shardwise.models.loss import linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Nats for each token. Where rows are packed, the last label of a document has no weight."""
    features, table = model.features(
        batch["inputs"], batch.get("segment_ids"), batch.get("positions")
    )
    nats = linear_cross_entropy(features, table, batch["labels"])
    return Mean(nats * batch["weights"], batch["weights"]) if "weights" in batch else Mean(nats)


def recipe(
    data: Path,
    steps: int = 200,
    mesh: str = "data=-1",
    out: Path | None = None,
    init_from: Path | None = None,
    seed: int = 0,
    preset: Literal["byte", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "byte",
    batch_size: int = 8,
    length: int = 64,
    pack: bool = False,
    held_out: float = 0.05,
    lr: float = 2e-3,
    compute_dtype: str | None = None,
    remat: Literal["none", "block", "dots"] = "none",
    scan_layers: bool = False,
    eval_every: int = 100,
    save_every: int = 0,
) -> Run:
    tokens = open_tokens(data)
    # Rows next to each other often come from one document: they are held out 16 at a time, of a small source one by one.
    source = Packed(tokens, length) if pack else Tokens(tokens, length)
    train, rest = split(source, held_out, seed=0, block=16 if len(source) > 10_000 else 1)
    vocabulary = (
        -(-tokens.info.get("vocab_size", PRESETS[preset].vocab_size) // 128) * 128
    )  # so that meshes and matrix units divide it
    config = replace(
        PRESETS[preset],
        vocab_size=vocabulary,
        max_length=length,
        remat=remat,
        scan_layers=scan_layers,
    )
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optim.adamw(
            optim.cosine(lr, steps, warmup=0.05, end=lr / 10), b2=0.99, weight_decay=0.1, clip=1.0
        ),
        data=Batches(train, batch_size, seed=seed),
        eval_data=Batches(rest, min(batch_size, len(rest))),
        steps=steps,
        mesh=mesh,
        init_from=InitFrom(init_from) if init_from is not None else None,
        seed=seed,
        compute_dtype=compute_dtype,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
