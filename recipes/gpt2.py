r"""The GPT-2 family, from 124 million to 70 billion parameters: plan, time, and train.

    shardwise plan recipes/gpt2.py --preset gpt2-xl --on v5e:4x4 --search
    shardwise plan recipes/gpt2.py --preset gpt-7b --on v5p:8x8x8 --mesh fsdp=512 \
        --batch-size 512 --remat block
    shardwise train recipes/gpt2.py --data data --steps 1000

Without --data, the recipe uses random tokens, which is enough to plan and time a run. A step
processes batch_size x length tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from shardwise import Batches, Mean, Rules, Run, Tokens, open_tokens, optim
from shardwise.kernels.cross_entropy import chunked_cross_entropy, linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS

Preset = Literal[
    "byte", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-7b", "gpt-70b"
]


def random_tokens(count: int) -> np.ndarray:
    """Return random tokens below 256."""
    return np.random.default_rng(0).integers(0, 256, count).astype(np.uint16)


def recipe(
    data: Path | None = None,
    steps: int = 1000,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    preset: Preset = "gpt2",
    batch_size: int = 32,
    length: int = 1024,
    accumulate: int = 1,
    microbatches: int = 0,
    rounds: int = 1,
    optimizer: Literal["adamw", "muon"] = "adamw",
    lr: float = 6e-4,
    clip: float = 1.0,
    compute_dtype: str | None = "bfloat16",
    matmul_dtype: Literal["float8"] | None = None,
    remat: Literal["none", "dots", "block"] = "none",
    scan_layers: bool = True,
    loss_chunks: int = 1,
    save_every: int = 0,
) -> Run:
    """Train a GPT-2 on prepared tokens, or on random ones.

    Args:
        data: Directory written by `shardwise data prepare`. None uses random tokens.
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights and the data order.
        preset: Size of the model.
        batch_size: Sequences per step.
        length: Tokens per sequence.
        accumulate: Number of micro-batches per step.
        microbatches: Parts of a batch in a pipeline (mesh axis `stage`). 0 chooses 4 per stage.
        rounds: How often each of them passes through all stages.
        optimizer: Optimizer. Muon uses Adam for embedding tables and vectors.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        compute_dtype: Dtype of the computation. None uses that of the parameters.
        matmul_dtype: "float8" uses matmuls of 8 bits, on Hopper GPUs.
        remat: What the backward pass recomputes: nothing, blocks, or all but matmuls and attention.
        scan_layers: Compile one block for all layers: faster to compile, but slower to run on GPUs.
        loss_chunks: Number of chunks in which the logits are computed, to save memory.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    config = replace(
        PRESETS[preset], max_length=length, remat=remat, scan_layers=scan_layers
    )
    if data is None:
        source = Tokens(random_tokens(2 * batch_size * length + 1), length)
    else:
        source = Tokens(open_tokens(data), length)

    def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
        """Return the loss of each token, in nats."""
        features, table = model.features(batch["inputs"])
        labels = batch["labels"]
        if loss_chunks == 1:
            return Mean(linear_cross_entropy(features, table, labels))
        total = chunked_cross_entropy(features, table, labels, loss_chunks)
        return Mean(total, labels.size)

    # Replicate these biases in large models: they are small, and hundreds of chips divide none of
    # their dimensions.
    replicated: tuple[tuple[str, tuple[()]], ...] = ()
    if config.width >= 4096:
        layer = "" if scan_layers else "*/"
        replicated = ((f"blocks/{layer}attn/qkv/bias", ()),)
    schedule = optim.cosine(lr, steps, warmup=0.05, end=lr / 10)
    if optimizer == "muon":
        tx = optim.muon(
            schedule,
            adam=("tokens", "positions"),
            stacked=("blocks/*",) if scan_layers else (),
            weight_decay=0.1,
            clip=clip or None,
        )
    else:
        tx = optim.adamw(schedule, b2=0.95, weight_decay=0.1, clip=clip or None)
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=tx,
        data=Batches(source, batch_size, seed=seed),
        steps=steps,
        mesh=mesh,
        rules=Rules(paths=replicated),
        seed=seed,
        accumulate=accumulate,
        microbatches=microbatches,
        rounds=rounds,
        compute_dtype=compute_dtype,
        matmul_dtype=matmul_dtype,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
