"""The recipe of the fault experiments: a small model, and an argument for each fault."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from model import Model, break_save, corpus, entries, note, poison, wait_for_data

from shardwise import Batches, Mean, Rules, Run, Tokens, optim
from shardwise.data import array_records, json_lines, keep, open_tokens
from shardwise.models.llama import Llama, LlamaConfig


def loss(model: Model, batch: dict) -> Mean:
    """Return the mean loss of a batch."""
    return Mean(entries(model, batch))


@dataclass(frozen=True)
class Faulty(Batches):
    """Batches that are logged, and optionally slow or poisoned. For evaluation only slow."""

    pause: float = 0.0
    nan_at: int = -1
    infinite_at: int = -1
    stall_at: int = -1

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        wait_for_data(step, self.pause, self.stall_at)
        batch = poison(
            super().__call__(step), step == self.nan_at, step == self.infinite_at
        )
        note(step, batch)
        return batch

    def once(self) -> Iterator[dict[str, np.ndarray]]:
        for number, batch in enumerate(super().once()):
            wait_for_data(number, self.pause, self.stall_at)
            yield poison(batch, False, False)


def decode(record: dict | bytes) -> dict[str, np.ndarray]:
    """Return an example from {"tokens": [...]}, a record of JSON lines or the bytes of one."""
    tokens = np.array(
        (json.loads(record) if isinstance(record, bytes) else record)["tokens"],
        np.int32,
    )
    return {"inputs": tokens[:-1], "labels": tokens[1:]}


def open_data(path: Path, length: int) -> object:
    """Open JSON lines, ArrayRecord or a token file."""
    if path.suffix == ".jsonl":
        return json_lines(path, decode)
    return (
        array_records(path, decode)
        if path.suffix == ".array_record"
        else Tokens(open_tokens(path), length)
    )


def recipe(
    steps: int = 40,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    batch_size: int = 8,
    length: int = 16,
    records: int = 100,
    data: Path | None = None,
    filtered: bool = False,
    skip_bad: int = 0,
    width: int = 48,
    depth: int = 3,
    experts: int = 0,
    vocabulary: int = 128,
    dtype: Literal["float32", "bfloat16"] = "float32",
    renamed: bool = False,
    dropout: float = 0.2,
    optimizer: Literal["adamw", "sgd", "lion"] = "adamw",
    lr: float = 3e-3,
    spikes: float | None = None,
    accumulate: int = 2,
    shuffle: bool = True,
    rule: tuple[str, str] | None = None,
    eval_every: int = 20,
    eval_records: int = 24,
    eval_pause: float = 0.0,
    save_every: int = 5,
    pause: float = 0.02,
    nan_at: int = -1,
    infinite_at: int = -1,
    stall_at: int = -1,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    max_skips: int = 10,
) -> Run:
    """Return the run, with an argument for each fault.

    `rule` is (pattern, mesh axis): it shards the last dimension of these parameters over the axis.
    With `experts` the model is a Mixtral, which can use every mesh axis.
    """
    source = (
        open_data(data, length)
        if data is not None
        else Tokens(corpus(records, length, vocabulary), length)
    )
    if "BREAK_SAVE" in os.environ:
        break_save()
    if filtered:
        source = keep(source, lambda row: False)
    faults = {
        "pause": pause,
        "nan_at": nan_at,
        "infinite_at": infinite_at,
        "stall_at": stall_at,
    }
    model = partial(Model, vocabulary, width, depth, dropout, dtype, renamed)
    if experts:
        config = LlamaConfig(
            vocabulary, depth, 8, 8, width, 2 * width, num_experts=experts, top_k=2
        )
        model = partial(Llama, config)
    return Run(
        model=model,
        loss=loss,
        optimizer=getattr(optim, optimizer)(
            optim.cosine(lr, steps, warmup=0.1), clip=1.0, ema=0.999, spikes=spikes
        ),
        data=Faulty(
            source, batch_size, seed=seed, shuffle=shuffle, skip_bad=skip_bad, **faults
        ),
        eval_data=Faulty(
            Tokens(corpus(eval_records, length, vocabulary), length),
            batch_size,
            pause=eval_pause,
        ),
        steps=steps,
        mesh=mesh,
        rules=Rules(paths=((rule[0], (None, rule[1])),)) if rule else Rules(),
        seed=seed,
        accumulate=accumulate,
        coupled_examples="separate",
        eval_every=eval_every,
        save_every=save_every,
        on_nonfinite=on_nonfinite,
        max_skips=max_skips,
        out=out,
        unit="tokens",
    )
