"""Llama 2 and 3, from a toy to 405 billion parameters; on random tokens, to plan and to time, unless --data is given:

    shardwise train recipes/llama.py
    shardwise train recipes/llama.py --size 8b --mesh fsdp=-1 --batch-size 64 --length 8192 --remat block
    shardwise train recipes/llama.py --data data --size 8b --mesh fsdp=-1 --remat block --keep qkv --loss-chunks 8

A step sees batch_size x length tokens. What the backward pass needs of a block is computed again with --remat block, but for
what --keep and --offload name: "input" of the block, "qkv" (after the rotation), "attention" (the heads' outputs), "out" (their
projection), "up" (both products that enter the MLP's middle), "down" (the MLP's output). Offloaded values wait in the host's memory.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from shardwise import Batches, InitFrom, Mean, Run, Tokens, constrain, open_tokens, optim
from shardwise.models.loss import cross_entropy
from shardwise.models.llama import SIZES, Kept, Llama, matmul

Array = jax.Array


def loss(model: Llama, batch: dict[str, Array], chunks: int = 1) -> Mean:
    """Nats for each token. In several chunks, the logits of one of them exist at a time, and are computed again for the gradient."""
    tokens, labels = batch["inputs"], batch["labels"]
    x, kernel = model.features(tokens), model.output()
    rows, length = tokens.shape
    if length % chunks:
        raise ValueError(f"rows of {length} tokens cannot be cut into {chunks} chunks for the loss")

    def nats(part: tuple[Array, Array]) -> Array:
        x, labels = part
        return cross_entropy(matmul(constrain(x, "batch"), kernel), labels)

    if chunks == 1:
        return Mean(nats((x, labels)))
    cut = lambda value: value.reshape(rows, chunks, length // chunks, *value.shape[2:]).swapaxes(
        0, 1
    )  # noqa: E731
    parts = cut(x), cut(labels)
    return Mean(jax.lax.map(jax.checkpoint(nats), parts).swapaxes(0, 1).reshape(rows, length))


@dataclass(frozen=True)
class RandomTokens:
    """Rows without meaning: the same for the same index, whatever is asked for with it."""

    vocab_size: int
    length: int
    num_rows: int = 1 << 20

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        windows = np.stack(
            [
                np.random.default_rng(int(i)).integers(
                    self.vocab_size, size=self.length + 1, dtype=np.int32
                )
                for i in indices
            ]
        )
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    def fingerprint(self) -> dict[str, Any]:
        return {"random": [self.vocab_size, self.length, self.num_rows]}


def recipe(
    steps: int = 20,
    mesh: str = "data=-1",
    out: Path | None = None,
    data: Path | None = None,
    init_from: Path | None = None,
    seed: int = 0,
    size: Literal["tiny", "7b", "70b-llama2", "8b", "70b", "405b"] = "tiny",
    vocab: int | None = None,
    mlp_width: int | None = None,
    tied: bool = False,
    batch_size: int = 8,
    length: int = 128,
    accumulate: int = 1,
    lr: float = 3e-4,
    compute_dtype: str | None = "bfloat16",
    param_dtype: Literal["float32", "bfloat16"] = "float32",
    remat: Literal["none", "block", "dots"] = "none",
    keep: tuple[Kept, ...] = (),
    offload: tuple[Kept, ...] = (),
    scan_layers: bool = True,
    loss_chunks: int = 1,
    save_every: int = 0,
) -> Run:
    tokens = open_tokens(data) if data is not None else None
    known = (
        vocab
        or (tokens.info.get("vocab_size") if tokens is not None else None)
        or SIZES[size].vocab_size
    )
    vocabulary = -(-known // 128) * 128  # so that meshes and matrix units divide it
    config = replace(
        SIZES[size],
        vocab_size=vocabulary,
        mlp_width=mlp_width or SIZES[size].mlp_width,
        tied=tied,
        param_dtype=param_dtype,
    )
    config = replace(
        config, scan_layers=scan_layers, remat=remat, keep=keep, offload=offload, max_length=length
    )
    source = RandomTokens(known, length) if tokens is None else Tokens(tokens, length)
    return Run(
        model=lambda rngs: Llama(config, rngs),
        loss=partial(loss, chunks=loss_chunks),
        optimizer=optim.adamw(
            optim.cosine(lr, steps, warmup=0.05, end=lr / 10), b2=0.95, weight_decay=0.1, clip=1.0
        ),
        data=Batches(source, batch_size, seed=seed),
        steps=steps,
        mesh=mesh,
        init_from=InitFrom(init_from, cast=True) if init_from is not None else None,
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
