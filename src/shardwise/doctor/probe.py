"""Tries out JAX, its devices and one training step, in a process of its own: run as a script, it tells each stage as it goes.

What it imports may fail, abort the process or never come back. `doctor.py` hears how far it came. It imports nothing of shardwise
before the last stage, and holds no GPU memory but what it uses.
"""

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

LIBRARIES = ("flax", "optax", "orbax.checkpoint", "grain")
STAGES = {
    "jax": "importing jax",
    "devices": "looking for devices",
    "compute": "a product on one device of each kind",
    "libraries": "importing flax, optax, orbax and grain",
    "step": "a training step on all devices",
}


def main(descriptor: int) -> None:
    def tell(stage: str, **found: Any) -> None:
        os.write(descriptor, json.dumps({"stage": stage, **found}, default=str).encode() + b"\n")

    tell("jax", begun=True)
    began = time.perf_counter()
    import jax

    tell(
        "jax",
        version=jax.__version__,
        file=jax.__file__,
        seconds=time.perf_counter() - began,
        settings=_settings(jax),
    )
    tell("devices", begun=True)
    began = time.perf_counter()
    devices = jax.devices()
    tell(
        "devices",
        devices=[_describe(device) for device in devices],
        seconds=time.perf_counter() - began,
    )
    tell("compute", begun=True)
    tell(
        "compute",
        kinds=[
            _compute(jax, device)
            for device in {device.device_kind: device for device in devices}.values()
        ],
    )
    tell("libraries", begun=True)
    tell("libraries", failed=_import_libraries())
    tell("step", begun=True)
    tell("step", **_step(jax))


def _settings(jax: Any) -> dict[str, Any]:
    """Names and values of what JAX can be told by the environment."""
    return {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, bool | int | float | str | None)
    }


def _describe(device: Any) -> dict[str, Any]:
    try:
        memory = device.memory_stats() or {}
    except Exception:  # some plugins have none
        memory = {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "memory": memory.get("bytes_limit"),
        "used": memory.get("bytes_in_use"),
    }


def _compute(jax: Any, device: Any) -> dict[str, Any]:
    """A product and its gradient, right to the last digit that float32 can give."""
    import numpy as np

    began = time.perf_counter()
    rows = jax.device_put(np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 7, device)
    gradient = jax.jit(jax.grad(lambda x: jax.numpy.vdot(x, x) / 2))(rows)
    is_right = bool(np.array_equal(np.asarray(gradient), np.asarray(rows)))
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "is_right": is_right,
        "seconds": time.perf_counter() - began,
    }


def _import_libraries() -> dict[str, str]:
    failed = {}
    for name in LIBRARIES:
        try:
            __import__(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _step(jax: Any) -> dict[str, Any]:
    """Two steps of shardwise's own, the batch divided over all devices, so that these exchange their gradients."""
    import numpy as np
    import optax
    from flax import nnx

    shardwise = importlib.import_module(
        "shardwise"
    )  # all of it: this script stands below its modules
    count = jax.device_count()
    batch = {"x": np.ones((8 * count, 16), np.float32), "y": np.ones((8 * count, 4), np.float32)}
    began = time.perf_counter()
    spec = shardwise.abstract_state(
        lambda rngs: nnx.Linear(16, 4, rngs=rngs), optax.sgd(0.01), shardwise.make_mesh("data=-1")
    )
    step = shardwise.make_train_step(
        spec, lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(), batch
    )
    state, first = step(shardwise.init_state(spec, 0), step.place(batch))
    first_loss = float(first["loss"])
    compiled = time.perf_counter()
    state, second = step(state, step.place(batch))
    second_loss = float(second["loss"])
    now = time.perf_counter()
    return {
        "count": count,
        "falls": second_loss < first_loss,
        "losses": [first_loss, second_loss],
        "first": compiled - began,
        "second": now - compiled,
    }


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        text = f"{type(error).__name__}: {error}"
        os.write(
            int(sys.argv[1]),
            json.dumps({"stage": "error", "error": text, "where": where}).encode() + b"\n",
        )
        sys.exit(1)
