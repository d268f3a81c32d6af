"""Measure the cost of checkpoints: saves compared with Orbax alone, and verification with a
restore.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 500 --rounds 5

Both write and read the same arrays, in turn, in one run. The stall is the time until the training
loop can continue.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from shardwise import Checkpoints, abstract_state, init_state
from shardwise.checkpoint.store import Keep


class Layers(nnx.Module):
    """`count` matrices of 4 MiB. With the two moments of Adam, each needs 12 MiB."""

    def __init__(self, count: int, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [nnx.Linear(1024, 1024, use_bias=False, rngs=rngs) for _ in range(count)]
        )


def measure(action):
    """Return the seconds that `action` takes, and its result."""
    start = time.perf_counter()
    answer = action()
    jax.block_until_ready(answer)
    return time.perf_counter() - start, answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = max(1, round(options.megabytes * 1e6 / (3 * 4 * 1024**2)))
    spec = abstract_state(lambda rngs: Layers(count, rngs), optax.adam(1e-3), "data=1")
    state = init_state(spec, 0)
    # Random moments, because zeros would compress to almost nothing.
    fill = jax.jit(
        lambda tree: jax.tree.map(
            lambda x: (
                x if x.ndim == 0 else jax.random.normal(jax.random.key(1), x.shape)
            ),
            tree,
        )
    )
    state = replace(state, opt_state=fill(state.opt_state))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: "
        f"state of {size / 1e6:,.0f} MB, {options.rounds} rounds"
    )

    folder = Path(tempfile.mkdtemp(prefix="shardwise-bench-"))
    times: dict[str, list[float]] = {
        name: []
        for name in (
            "stall",
            "orbax stall",
            "complete save",
            "orbax save",
            "verify",
            "restore",
            "orbax restore",
        )
    }
    orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    tree = {
        "step": state.step,
        "params": state.params,
        "other": state.other,
        "opt_state": state.opt_state,
    }
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    try:
        with Checkpoints(folder / "checkpoints", Keep(last=1)) as checkpoints:
            for n in range(options.rounds + 1):
                now = replace(state, step=jnp.int32(n))

                def ours():
                    stall, _ = measure(lambda: checkpoints.save(now, {}))  # noqa: B023
                    return stall, stall + measure(checkpoints.wait)[0]

                def plain():
                    stall, _ = measure(
                        lambda: orbax.save(
                            folder / "orbax" / str(n),  # noqa: B023
                            args=ocp.args.StandardSave(tree),
                        )
                    )
                    return stall, stall + measure(orbax.wait_until_finished)[0]

                # The order alternates: the second save competes with the writeback of the first.
                if n % 2:
                    (stall, save), (orbax_stall, orbax_save) = ours(), plain()
                else:
                    (orbax_stall, orbax_save), (stall, save) = plain(), ours()
                verify, problems = measure(lambda: checkpoints.verify(n))  # noqa: B023
                assert problems == []
                restore, _ = measure(lambda: checkpoints.restore(spec, n))  # noqa: B023
                orbax_restore, _ = measure(
                    lambda: orbax.restore(
                        folder / "orbax" / str(n),  # noqa: B023
                        args=ocp.args.StandardRestore(wanted),
                    )
                )
                shutil.rmtree(folder / "orbax" / str(n))
                # The first round is a warm-up.
                if n:
                    row = (
                        stall,
                        orbax_stall,
                        save,
                        orbax_save,
                        verify,
                        restore,
                        orbax_restore,
                    )
                    for name, seconds in zip(times, row, strict=True):
                        times[name].append(seconds)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(
            f"  {name:14} {seconds * 1e3:9.1f} ms   "
            f"{' '.join(f'{value * 1e3:.0f}' for value in times[name])}"
        )
    ratios = {
        "stall of a save, relative to Orbax alone": medians["stall"]
        / medians["orbax stall"],
        "complete save, relative to Orbax alone": medians["complete save"]
        / medians["orbax save"],
        "verification, relative to a restore": medians["verify"] / medians["restore"],
        "verification, relative to a restore by Orbax alone": medians["verify"]
        / medians["orbax restore"],
    }
    for name, ratio in ratios.items():
        print(f"  {ratio:6.3f}  {name}")
    if options.json:
        options.json.write_text(
            json.dumps({"bytes": size, "seconds": medians, "ratios": ratios}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
