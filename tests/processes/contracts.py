"""One of several processes that train with loaders of both contracts, and record the result.

python contracts.py COORDINATOR COUNT INDEX DEVICES FILE CASE...
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from flax import nnx

from shardwise import (
    Batches,
    Mean,
    Run,
    abstract_state,
    fit,
    init_state,
    make_mesh,
    make_train_step,
    steps,
    use_cpu_devices,
)
from shardwise.cluster.group import ProcessGroup, start_group
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch
from shardwise.data import contract
from shardwise.data.contract import FIRST_STEPS, global_shapes
from shardwise.errors import DataError
from shardwise.rundir.phases import Phase

ROWS, BATCH_SIZE, STEPS = 64, 16, 6
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sharded = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), (None, "model")
        )
        self.up = nnx.Linear(4, 8, kernel_init=sharded, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.up(x)))[:, 0]


def loss(model, batch):
    # Depends on which examples are in the batch, not on their order.
    return Mean((model(batch["x"]) - batch["x"].sum(-1)) ** 2)


def rows(first: int, size: int = BATCH_SIZE, source: np.ndarray = X) -> dict:
    return {"x": source[np.arange(first, first + size) % len(source)]}


def complete(step: int) -> dict:
    return rows(step * BATCH_SIZE)


def strided(step: int, shard: int, count: int) -> dict:
    """The examples `shard::count` of each batch: together they are the complete batch."""
    return {"x": complete(step)["x"][shard::count]}


def data_shard(mesh: str) -> tuple[int, int]:
    """The shard of the data that this process must load, and their number."""
    if mesh.startswith("model"):
        return 0, 1
    # The first axis is the outermost, so neighboring processes share a shard.
    axes = dict(axis.split("=") for axis in mesh.split(","))
    count = min(int(axes["data"]), jax.process_count())
    return jax.process_index() * count // jax.process_count(), count


def grain_dataset(batch_size: int, shard: bool) -> grain.IterDataset:
    dataset = grain.MapDataset.source(X).map(lambda x: {"x": x})
    if shard:
        dataset = dataset[jax.process_index() :: jax.process_count()]
    return dataset.batch(batch_size).repeat(None).to_iter_dataset()


def grain_loader(batch_size: int) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        ROWS, shard_options=grain.sharding.ShardByJaxProcess(), shuffle=False
    )
    return grain.DataLoader(
        data_source=X,
        sampler=sampler,
        operations=[grain.transforms.Batch(batch_size)],
        worker_count=0,
    )


def as_dicts(batches):
    for batch in batches:
        yield batch if isinstance(batch, dict) else {"x": np.asarray(batch)}


def late(step: int, bad: int) -> dict:
    """The complete batch, except in process 1 from step `bad` on."""
    if step >= bad and jax.process_index() == 1:
        return rows(step * BATCH_SIZE + 1)
    return complete(step)


def random_batches(seed: int | None) -> Callable[[int], dict]:
    def batches(step: int) -> dict:
        rng = np.random.default_rng(None if seed is None else (seed, step))
        return {"x": X[rng.integers(0, ROWS, BATCH_SIZE)]}

    return batches


def options(**fields):
    """Return fields of `Run`."""
    return fields


def arguments(case: str, mesh: str) -> dict:
    """Return the data and its scope for a case."""
    index, count = jax.process_index(), jax.process_count()
    local = BATCH_SIZE // count
    shard, num_shards = data_shard(mesh)
    cases = {
        "complete": lambda: options(data=complete),
        "complete iterator": lambda: options(data=map(complete, range(99))),
        "seeded": lambda: options(data=random_batches(3)),
        "sharded": lambda: options(
            data=partial(strided, shard=shard, count=num_shards), data_scope="process"
        ),
        "sharded iterator": lambda: options(
            data=map(partial(strided, shard=shard, count=num_shards), range(99)),
            data_scope="process",
        ),
        "sharded Batches": lambda: options(
            data=Batches({"x": X[index::count]}, local, shuffle=False),
            data_scope="process",
        ),
        "grain slice": lambda: options(
            data=grain_dataset(local, shard=True), data_scope="process"
        ),
        "grain complete": lambda: options(data=grain_dataset(BATCH_SIZE, shard=False)),
        # Each process reads a contiguous part of the source: other examples than `complete`.
        "grain loader": lambda: options(
            data=as_dicts(grain_loader(local)), data_scope="process"
        ),
        # The examples of "grain loader" with two processes, read by one.
        "halves": lambda: options(
            data=lambda step: {
                "x": np.concatenate(
                    [rows(step * 8, 8, X[:32])["x"], rows(step * 8, 8, X[32:])["x"]]
                )
            }
        ),
        # All of these are wrong.
        "wrong: grain loader": lambda: options(data=as_dicts(grain_loader(BATCH_SIZE))),
        "wrong: grain loader, local": lambda: options(
            data=as_dicts(grain_loader(local))
        ),
        "wrong: grain slice": lambda: options(
            data=grain_dataset(BATCH_SIZE, shard=True)
        ),
        "wrong: sharded": lambda: options(
            data=partial(strided, shard=index, count=count)
        ),
        "wrong: sharded Batches": lambda: options(
            data=Batches({"x": X[index::count]}, BATCH_SIZE, shuffle=False)
        ),
        "wrong: eval": lambda: options(
            data=complete, eval_data=Batches({"x": X[index::count]}, 8)
        ),
        "wrong: unseeded": lambda: options(data=random_batches(None)),
        "wrong: names": lambda: options(
            data=lambda step: {**complete(step), **({"y": X[:16]} if index else {})}
        ),
        "wrong: complete": lambda: options(data=complete, data_scope="process"),
        "wrong: by process": lambda: options(
            data=partial(strided, shard=index, count=count), data_scope="process"
        ),
        "wrong: sizes": lambda: options(
            data=lambda step: rows(step * 64 + index * 32, 8 * (1 + index)),
            data_scope="process",
        ),
        "wrong: later": lambda: options(data=partial(late, bad=2)),
        "wrong: much later": lambda: options(data=partial(late, bad=FIRST_STEPS + 2)),
    }
    return cases[case]()


def train(case: str, mesh: str, watch: Watch) -> dict:
    run = Run(
        model=Net,
        loss=loss,
        optimizer=optax.sgd(0.05),
        steps=STEPS,
        mesh=mesh,
        **arguments(case, mesh),
    )
    try:
        result = fit(run, watch=watch)
    except DataError as error:
        return {"error": str(error), "compiled": has_compiled(watch)}
    return {"loss": result.metrics["loss"], "step": int(result.state.step)}


def has_compiled(watch: Watch) -> bool:
    return any(phase == Phase.COMPILING for phase, _ in watch.start)


def own_loop(case: str, mesh: str) -> dict:
    """The same with `steps`, with complete batches or with those of this process."""
    spec = abstract_state(Net, optax.sgd(0.05), make_mesh(mesh))
    shard, count = data_shard(mesh)
    local = partial(strided, shard=shard, count=count)
    if case == "own loop":
        step = make_train_step(spec, loss, complete(0))
        batches = complete
    elif case == "own loop, sharded":
        whole = make_train_step(spec, loss, complete(0))
        shapes = global_shapes(local(0), whole.layout.sharding)
        step = make_train_step(spec, loss, shapes)
        step = replace(step, layout=step.layout.per_process())
        batches = local
    elif case == "own loop, assembled":
        step = make_train_step(spec, loss, complete(0))

        def batches(n):
            x = local(n)["x"]
            return {
                "x": jax.make_array_from_process_local_data(
                    step.layout.sharding, x, (BATCH_SIZE, *x.shape[1:])
                )
            }
    elif case == "own loop, too few":
        step = make_train_step(spec, loss, complete(0))
        batches = local
    else:
        assert case == "own loop, wrong"
        step = make_train_step(spec, loss, local(0))
        batches = local
    value, last = None, 0
    try:
        for n, _, metrics in steps(step, init_state(spec, 0), batches, until=STEPS):
            value, last = float(metrics["loss"]), n
    except DataError as error:
        return {"error": str(error), "step": last}
    return {"loss": value, "step": last}


def main(
    coordinator: str, count: str, index: str, devices: str, file: str, *cases: str
) -> None:
    use_cpu_devices(int(devices))
    group = ProcessGroup()
    if int(count) > 1:
        group = start_group(coordinator, int(count), int(index))
    # So that the last of 6 steps is compared again.
    contract.CHECK_EVERY = 5
    results = {}
    for text in cases:
        case, _, mesh = text.partition(" @ ")
        with Watch(group, Stop()) as watch:
            if case.startswith("own loop"):
                results[text] = own_loop(case, mesh)
            else:
                results[text] = train(case, mesh, watch)
    Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
