"""One of several processes that train on Grain pipelines, one run after the other.

python grain_runs.py COORDINATOR COUNT INDEX FOLDER RUN...

A run is written as KIND/NAME/STEPS. The script is that of a user: it neither uses absl, nor saves
or restores an iterator.
"""

import json
import sys
import time
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from flax import nnx

from shardwise import Mean, Run, fit, use_cpu_devices
from shardwise.cluster.group import ProcessGroup, start_group
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch
from shardwise.errors import DataError
from shardwise.rundir.phases import Phase

ROWS, BATCH_SIZE, DEVICES = 240, 16, 8
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def example(x: np.ndarray) -> dict:
    return {"x": x, "y": x.sum()}


def is_large(example: dict) -> bool:
    return example["y"] > -2


def slow(batch: dict) -> dict:
    """Slow enough for a run to be killed in its middle."""
    time.sleep(0.1)
    return batch


class Example(grain.transforms.Map):
    def map(self, x: np.ndarray) -> dict:
        return example(x)


class Slow(grain.transforms.Map):
    def map(self, batch: dict) -> dict:
        return slow(batch)


def map_dataset() -> grain.MapDataset:
    """Complete batches in every process."""
    examples = grain.MapDataset.source(X).seed(1).shuffle().repeat().map(example)
    return examples.batch(BATCH_SIZE).map(slow)


def iter_dataset(workers: int, is_sharded: bool) -> grain.IterDataset:
    """Examples of this process, or complete batches; workers filter and shuffle."""
    dataset = grain.MapDataset.source(X)
    size = BATCH_SIZE
    if is_sharded:
        options = grain.sharding.ShardByJaxProcess()
        dataset = dataset[options.shard_index :: options.shard_count]
        size //= options.shard_count
    examples = dataset.seed(1).shuffle().repeat().map(example).to_iter_dataset()
    examples = examples.filter(is_large)
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers)
        examples = examples.mp_prefetch(options)
    return examples.batch(size, drop_remainder=True).map(slow)


def data_loader() -> grain.DataLoader:
    """Batches of the examples of this process, from two workers."""
    options = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    size = BATCH_SIZE // options.shard_count
    return grain.DataLoader(
        data_source=X,
        sampler=grain.samplers.IndexSampler(
            ROWS, shard_options=options, shuffle=True, seed=2
        ),
        operations=[Example(), grain.transforms.Batch(size, True), Slow()],
        worker_count=2,
    )


# The data, and whether each process has a part of it.
KINDS = {
    "MapDataset": lambda: (map_dataset(), False),
    "IterDataset": lambda: (iter_dataset(1, is_sharded=True), True),
    "DataLoader": lambda: (data_loader(), True),
    "complete": lambda: (iter_dataset(0, is_sharded=False), False),
}


VALIDATION = [{"x": part, "y": part.sum(-1)} for part in (X[:32], X[32:40])]


def loss(model, batch):
    return Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def train(kind: str, out: Path, steps: int, watch: Watch) -> None:
    data, is_sharded = KINDS[kind]()
    run = Run(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.adam(1e-2),
        data=data,
        data_scope="process" if is_sharded else "global",
        eval_data=VALIDATION if kind == "complete" else None,
        steps=steps,
        save_every=3,
        out=out,
    )
    record = out.with_suffix(f".{jax.process_count()}.{jax.process_index()}.json")
    try:
        result = fit(run, watch=watch)
    except DataError as error:
        has_compiled = any(phase == Phase.COMPILING for phase, _ in watch.start)
        record.write_text(json.dumps({"error": str(error), "compiled": has_compiled}))
        return
    params = jax.tree.map(np.asarray, result.state.params)
    record.write_text(
        json.dumps(
            {
                "bytes": {name: x.tobytes().hex() for name, x in params.items()},
                "eval_loss": result.eval_metrics.get("loss"),
            }
        )
    )


def main(coordinator: str, count: str, index: str, folder: str, *runs: str) -> None:
    use_cpu_devices(DEVICES // int(count))
    group = ProcessGroup()
    if int(count) > 1:
        group = start_group(coordinator, int(count), int(index))
    for text in runs:
        kind, name, steps = text.split("/")
        with Watch(group, Stop()) as watch:
            train(kind, Path(folder, name), int(steps), watch)


if __name__ == "__main__":
    main(*sys.argv[1:])
