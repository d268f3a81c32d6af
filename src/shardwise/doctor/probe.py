"""Checks JAX, its devices and one training step. Run as a script, in a separate process.

What it imports may fail, abort the process or never return. It writes one JSON line at the start
and at the end of each stage to a pipe, so `devices.py` knows how far it came. It imports nothing of
shardwise before the last stage, and holds no GPU memory except what it uses.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import jax

Fields: TypeAlias = dict[str, object]

LIBRARIES = ("flax", "optax", "orbax.checkpoint", "grain")


def import_jax() -> Fields:
    """Import JAX, and read the settings that the environment can change."""
    import jax

    settings = {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, bool | int | float | str | None)
    }
    return {"version": jax.__version__, "settings": settings}


def find_devices() -> Fields:
    """Start the backends and describe their devices."""
    import jax

    return {"devices": [_describe(device) for device in jax.devices()]}


def _describe(device: "jax.Device") -> Fields:
    try:
        memory = device.memory_stats() or {}
    except Exception:
        # Some plugins have no statistics.
        memory = {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "memory": memory.get("bytes_limit"),
    }


def compute() -> Fields:
    """Compile and run a gradient on one device of each kind."""
    import jax

    devices = {device.device_kind: device for device in jax.devices()}
    return {"kinds": [_compute_on(device) for device in devices.values()]}


def _compute_on(device: "jax.Device") -> Fields:
    """Compute the gradient of x·x / 2, which is x exactly."""
    import jax
    import numpy as np

    started = time.perf_counter()
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 7
    gradient = jax.jit(jax.grad(lambda x: jax.numpy.vdot(x, x) / 2))(
        jax.device_put(values, device)
    )
    is_right = bool(np.array_equal(np.asarray(gradient), values))
    seconds = time.perf_counter() - started
    return {"kind": device.device_kind, "is_right": is_right, "seconds": seconds}


def import_libraries() -> Fields:
    """Import the libraries that shardwise needs."""
    failed = {}
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return {"failed": failed}


def train() -> Fields:
    """Run two training steps with the batch sharded over all devices, which communicate."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    # By name, because the doctor is below these modules and must not depend on them.
    shardwise = importlib.import_module("shardwise")
    count = jax.device_count()
    batch = {
        "x": np.ones((8 * count, 16), np.float32),
        "y": np.ones((8 * count, 4), np.float32),
    }

    def loss(model: nnx.Linear, batch: dict[str, "jax.Array"]) -> "jax.Array":
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    started = time.perf_counter()
    mesh = shardwise.make_mesh("data=-1")
    optimizer = optax.sgd(0.01)
    spec = shardwise.abstract_state(
        lambda rngs: nnx.Linear(16, 4, rngs=rngs), optimizer, mesh
    )
    step = shardwise.make_train_step(spec, loss, batch)
    state = shardwise.init_state(spec, 0)
    losses = []
    times = [started]
    for _ in range(2):
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter())
    return {
        "count": count,
        "losses": losses,
        "first": times[1] - times[0],
        "second": times[2] - times[1],
    }


# The stages in order, with what the user reads about each.
STAGES: dict[str, tuple[str, Callable[[], Fields]]] = {
    "jax": ("importing jax", import_jax),
    "devices": ("looking for devices", find_devices),
    "compute": ("computing on one device of each kind", compute),
    "libraries": ("importing flax, optax, orbax and grain", import_libraries),
    "step": ("a training step on all devices", train),
}


def main(descriptor: int) -> None:
    """Run all stages; write what happens to a file descriptor."""

    def write(stage: str, **fields: object) -> None:
        line = json.dumps({"stage": stage, **fields}, default=str)
        os.write(descriptor, line.encode() + b"\n")

    try:
        for name, (_, run) in STAGES.items():
            write(name, begun=True)
            started = time.perf_counter()
            found = run()
            write(name, total=time.perf_counter() - started, **found)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        write("error", error=f"{type(error).__name__}: {error}", where=where)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
