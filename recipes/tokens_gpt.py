"""Train a GPT on your text, after preparing it once.

    shardwise data prepare my_text/ --out data
    shardwise train recipes/tokens_gpt.py --data data
    shardwise train recipes/tokens_gpt.py --data data --pack --preset gpt2 --length 1024
    shardwise data show recipes/tokens_gpt.py --data data --step 100

A step processes batch_size x length tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax

from shardwise import (
    Batches,
    InitFrom,
    Mean,
    Packed,
    Run,
    Tokens,
    open_tokens,
    optim,
    split,
)
from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS

# The vocabulary is rounded up to a multiple of this, so that meshes and matrix units divide it.
VOCAB_MULTIPLE = 128


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss of each token, in nats.

    In packed sequences, the last token of a document has weight 0: its label would belong to the
    next document.
    """
    features, table = model.features(
        batch["inputs"], batch.get("segment_ids"), batch.get("positions")
    )
    nats = linear_cross_entropy(features, table, batch["labels"])
    if "weights" in batch:
        return Mean(nats * batch["weights"], batch["weights"])
    return Mean(nats)


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
    clip: float = 1.0,
    compute_dtype: str | None = None,
    remat: Literal["none", "block", "dots"] = "none",
    scan_layers: bool = False,
    eval_every: int = 100,
    save_every: int = 0,
) -> Run:
    """Train a GPT on prepared tokens.

    Args:
        data: Directory written by `shardwise data prepare`.
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        init_from: Start from the weights of another run, or of a GPT-2 as `transformers` saves it.
        seed: Seed of the initial weights and the data order.
        preset: Size of the model.
        batch_size: Sequences per step.
        length: Tokens per sequence.
        pack: Separate the documents in a sequence: tokens attend to their own document only.
        held_out: Fraction of the data that is used for validation.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        compute_dtype: Dtype of the computation, such as bfloat16. None uses that of the parameters.
        remat: What the backward pass recomputes: nothing, blocks, or all but matmuls and attention.
        scan_layers: Compile one block for all layers.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    tokens = open_tokens(data)
    source = Packed(tokens, length) if pack else Tokens(tokens, length)
    # Neighboring sequences often come from the same document, so a large source is split in blocks
    # of 16 sequences. A small source would have too few blocks.
    block = 16 if len(source) > 10_000 else 1
    train, validation = split(source, held_out, seed=0, block=block)
    vocab_size = tokens.info.get("vocab_size", PRESETS[preset].vocab_size)
    config = replace(
        PRESETS[preset],
        vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        max_length=length,
        remat=remat,
        scan_layers=scan_layers,
    )
    schedule = optim.cosine(lr, steps, warmup=0.05, end=lr / 10)
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optim.adamw(schedule, b2=0.99, weight_decay=0.1, clip=clip or None),
        data=Batches(train, batch_size, seed=seed),
        eval_data=Batches(validation, min(batch_size, len(validation))),
        steps=steps,
        mesh=mesh,
        init_from=None if init_from is None else InitFrom(init_from),
        seed=seed,
        compute_dtype=compute_dtype,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
