"""Compare plans of GPT-2 with measured time and memory, on the accelerator of this machine.

    python benchmarks/plan.py                 configurations that nothing was fitted to
    python benchmarks/plan.py --fitted        configurations that hardware.py was fitted to (H200)
    python benchmarks/plan.py --on h200       only plan them, for a GPU that is not attached

Each configuration runs in a separate process. It is planned first, without allocating memory, and
then trained for a few steps.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

FITTED = {
    "124M, 32 sequences": {"preset": "gpt2", "batch_size": 32, "scan_layers": False},
    "124M, 64 sequences, block": {"preset": "gpt2", "batch_size": 64, "remat": "block"},
    "124M, 128 sequences in 4 parts": {
        "preset": "gpt2",
        "batch_size": 128,
        "accumulate": 4,
    },
    "355M, 16 sequences, dots": {
        "preset": "gpt2-medium",
        "batch_size": 16,
        "remat": "dots",
    },
    "774M, 16 sequences, block, 8 chunks": {
        "preset": "gpt2-large",
        "batch_size": 16,
        "remat": "block",
        "loss_chunks": 8,
    },
    "1.5B, 8 sequences, block": {
        "preset": "gpt2-xl",
        "batch_size": 8,
        "remat": "block",
    },
    "1.5B, 32 sequences, block, 16 chunks": {
        "preset": "gpt2-xl",
        "batch_size": 32,
        "remat": "block",
        "loss_chunks": 16,
    },
    "124M, 64 sequences, 16 chunks": {
        "preset": "gpt2",
        "batch_size": 64,
        "loss_chunks": 16,
    },
}
OTHERS = {
    "124M, 16 sequences": {"preset": "gpt2", "batch_size": 16, "scan_layers": False},
    "124M, 32 sequences, scanned layers": {"preset": "gpt2", "batch_size": 32},
    "124M, 48 sequences, dots": {"preset": "gpt2", "batch_size": 48, "remat": "dots"},
    "124M, 8 sequences of 4096": {"preset": "gpt2", "batch_size": 8, "length": 4096},
    "355M, 32 sequences, block": {"preset": "gpt2-medium", "batch_size": 32, "remat": "block"},
    "355M, 32 sequences in 2 parts, 8 chunks": {
        "preset": "gpt2-medium", "batch_size": 32, "accumulate": 2, "loss_chunks": 8,
    },
    "774M, 8 sequences": {"preset": "gpt2-large", "batch_size": 8},
    "774M, 64 sequences in 4 parts, dots": {
        "preset": "gpt2-large", "batch_size": 64, "accumulate": 4, "remat": "dots",
    },
    "1.5B, 16 sequences, dots": {"preset": "gpt2-xl", "batch_size": 16, "remat": "dots"},
    "1.5B, 64 sequences in 4 parts, block, 8 chunks": {
        "preset": "gpt2-xl", "batch_size": 64, "accumulate": 4, "remat": "block", "loss_chunks": 8,
    },
}  # fmt: skip


def measure(arguments: dict) -> dict:
    """Return planned and measured time and memory of one configuration."""
    import jax
    from gpt2 import recipe

    from shardwise import init_state
    from shardwise.plan.compile import plan_run
    from shardwise.run import prepare

    run = recipe(steps=100, **arguments)
    plan = plan_run(run)
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    batches = [prepared.step.place(prepared.batches(n)) for n in range(2)]
    times = []
    for n in range(34):
        if n >= 4 and n % 10 == 4:
            jax.block_until_ready(state)
            times.append(time.perf_counter())
        state, _ = prepared.step(state, batches[n % 2])
    jax.block_until_ready(state)
    times.append(time.perf_counter())
    chunks = [(after - before) / 10 for before, after in itertools.pairwise(times)]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "parameters": plan.num_params,
        "planned_ms": plan.times.total * 1e3 if plan.times else None,
        "measured_ms": statistics.median(chunks) * 1e3,
        "planned_gib": plan.memory.peak / 2**30,
        "measured_gib": peak / 2**30,
        "plan_s": plan.compile_seconds,
        "device": jax.devices()[0].device_kind,
    }


def plan_only(configurations: dict[str, dict], target: str) -> None:
    """Print planned time and memory of configurations."""
    from gpt2 import recipe

    from shardwise.plan.compile import plan_run

    for name, arguments in configurations.items():
        plan = plan_run(recipe(steps=100, **arguments), target)
        assert plan.times is not None
        milliseconds, gib = 1e3 * plan.times.total, plan.memory.peak / 2**30
        print(f"{name:44} {milliseconds:7.1f} ms {gib:6.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fitted", action="store_true")
    parser.add_argument("--on", metavar="TARGET")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    configurations = FITTED if options.fitted else OTHERS
    if options.on:
        plan_only(configurations, options.on)
        return
    rows = []
    print(
        f"{'':44} {'planned':>10} {'measured':>10} {'ratio':>6}   "
        f"{'planned':>9} {'measured':>9} {'ratio':>6}"
    )
    for name, arguments in configurations.items():
        done = subprocess.run(
            [sys.executable, __file__, "--one", json.dumps(arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name:44} {done.stderr[-600:]}")
            continue
        row = {"name": name, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        times = (
            (
                row["planned_ms"],
                row["measured_ms"],
                row["planned_ms"] / row["measured_ms"],
            )
            if row["planned_ms"]
            else (0, row["measured_ms"], 0)
        )
        memory = (
            row["planned_gib"],
            row["measured_gib"],
            row["planned_gib"] / max(row["measured_gib"], 1e-9),
        )
        print(
            "{:44} {:7.1f} ms {:7.1f} ms {:6.3f}   {:5.2f} GiB {:5.2f} GiB {:6.4f}".format(
                name, *times, *memory
            ),
            flush=True,
        )
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if a["planned_ms"] and abs(a["measured_ms"] / b["measured_ms"] - 1) > 0.02
    ]
    wrong = [
        f"{a['name']} / {b['name']}"
        for a, b in pairs
        if (a["planned_ms"] < b["planned_ms"]) != (a["measured_ms"] < b["measured_ms"])
    ]
    print(
        f"{len(pairs)} pairs have step times that differ by more than 2 %; "
        f"{len(wrong)} of them are planned in the wrong order {' '.join(wrong)}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
