"""One of several processes that train a small model on some meshes and record what they saw.

python worker.py COORDINATOR COUNT INDEX DEVICES FILE MODEL LAYOUT...
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
from layouts import BATCH_SIZE, LENGTH, MODELS, STEPS, data, loss, optimizer

from shardwise import (
    Rules,
    abstract_state,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    use_cpu_devices,
)
from shardwise.cluster.group import ProcessGroup, start_group
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch
from shardwise.data import Prefetch, part_of
from shardwise.loop import evaluate, steps


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def run(model: str, layout: str) -> dict:
    source, batches = data()
    spec = abstract_state(MODELS[model], optimizer(), make_mesh(layout), Rules())
    step = make_train_step(spec, loss, batches.example(), seed=7, accumulate=2)
    source.read.clear()
    # Each process reads only its own examples.
    layout = step.layout.per_process()
    shards: dict[int, dict[str, str]] = {}
    losses = []

    def place(batch: dict) -> dict:
        placed = layout.place(batch)
        number = len(shards)
        shards[number] = {}
        for shard in placed["inputs"].addressable_shards:
            rows, tokens = (
                range(size)[index]
                for size, index in zip((BATCH_SIZE, LENGTH), shard.index, strict=True)
            )
            name = f"{rows.start}-{rows.stop}-{tokens.start}-{tokens.stop}"
            shards[number][name] = digest(np.asarray(shard.data))
        return placed

    feed = Prefetch(part_of(batches, layout.ranges), 0, STEPS, place=place)
    state = init_state(spec, 3)
    for n, state, metrics in steps(step, state, feed, until=STEPS):
        losses.append(float(metrics["loss"]))
        assert n == len(losses) == int(state.step)
    read = sorted(map(int, source.read))
    held_out = evaluate(make_eval_step(spec, loss, batches.example()), state, batches)
    return {
        "losses": losses,
        "shards": shards,
        "read": read,
        "ranges": step.layout.ranges,
        "held_out": held_out["loss"],
    }


def main(
    coordinator: str,
    count: str,
    index: str,
    devices: str,
    file: str,
    model: str,
    *layouts: str,
) -> None:
    use_cpu_devices(int(devices))
    group = (
        start_group(coordinator, int(count), int(index))
        if int(count) > 1
        else ProcessGroup()
    )
    assert (group.count, group.index, jax.device_count()) == (int(count), int(index), 8)
    with Watch(group, Stop()):
        Path(file).write_text(
            json.dumps({layout: run(model, layout) for layout in layouts})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
