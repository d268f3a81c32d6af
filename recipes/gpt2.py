"""The GPT-2 family, from 124 million parameters to 70 billion: to plan, to time, and to train on prepared tokens.

    shardwise plan recipes/gpt2.py --preset gpt2-xl --on v5e:4x4 --search
    shardwise plan recipes/gpt2.py --preset gpt-7b --on v5p:8x8x8 --mesh fsdp=512 --batch-size 512 --remat block
    shardwise train recipes/gpt2.py --data data --steps 1000

Without --data the tokens are random ones, which is enough to plan and to time a run. A step sees batch_size x length tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from shardwise import Batches, Mean, Rules, Run, Tokens, open_tokens, optim
from shardwise.models.loss import chunked_cross_entropy, linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS


def recipe(
    data: Path | None = None,
    steps: int = 1000,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    preset: Literal[
        "byte", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-7b", "gpt-70b"
    ] = "gpt2",
    batch_size: int = 32,
    length: int = 1024,
    accumulate: int = 1,
    lr: float = 6e-4,
    compute_dtype: str | None = "bfloat16",
    remat: Literal["none", "dots", "block"] = "none",
    scan_layers: bool = True,
    loss_chunks: int = 1,
    save_every: int = 0,
) -> Run:
    """loss_chunks: in how many parts the logits are computed, one after the other; 1 keeps them whole.
    scan_layers: one compiled block for all layers. Without it a GPU takes longer to compile and less for each step."""
    config = replace(PRESETS[preset], max_length=length, remat=remat, scan_layers=scan_layers)
    tokens = (
        np.random.default_rng(0).integers(0, 256, 2 * batch_size * length + 1).astype(np.uint16)
        if data is None
        else open_tokens(data)
    )

    def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
        """Nats for each token."""
        inputs, labels = batch["inputs"], batch["labels"]
        if loss_chunks == 1:
            return Mean(linear_cross_entropy(*model.features(inputs), labels))
        return Mean(
            chunked_cross_entropy(*model.features(inputs), labels.reshape(-1), loss_chunks),
            labels.size,
        )

    # Few numbers, and no dim of them is divisible by hundreds of chips.
    whole = (
        ((f"blocks/{'' if scan_layers else '*/'}attn/qkv/bias", ()),)
        if config.width >= 4096
        else ()
    )
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optim.adamw(
            optim.cosine(lr, steps, warmup=0.05, end=lr / 10), b2=0.95, weight_decay=0.1, clip=1.0
        ),
        data=Batches(Tokens(tokens, length), batch_size, seed=seed),
        steps=steps,
        mesh=mesh,
        rules=Rules(paths=whole),
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
