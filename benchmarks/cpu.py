"""Measure every claim about CPUs in one run on one machine: `make bench`.

This takes about 15 minutes on 2 cores.

    python -m benchmarks.cpu --torch PYTHON       all parts; PYTHON has PyTorch
    python -m benchmarks.cpu --parts loop data    some parts; other entries do not change

Each part runs in separate processes and writes one entry of benchmarks/records/cpu.json.
`python -m benchmarks.page` generates docs/performance.md from the record.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.parts import Part, child, run_parts, start


def torch(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the model of the default recipe, and one twice as deep, with PyTorch."""
    if options.torch is None:
        print("# torch: skipped, because --torch PYTHON is not set", flush=True)
        return {}
    return child(folder, "torch", "benchmarks.compare_torch", "--torch", options.torch)


PARTS: dict[str, Part] = {
    "torch": torch,
    "loop": lambda folder, _: child(folder, "loop", "benchmarks.loop"),
    "nnx_jit": lambda folder, _: child(folder, "nnx_jit", "benchmarks.nnx_jit"),
    "start": lambda folder, _: start(folder, "recipes/stdlib_gpt.py", pairs=5),
    "optimizers": lambda folder, _: child(
        folder, "optimizers", "benchmarks.optimizers", "--preset", "byte"
    ),
    "data": lambda folder, _: child(folder, "data", "benchmarks.data"),
    "checkpoints": lambda folder, _: child(
        folder, "checkpoints", "benchmarks.checkpoint"
    ),
    "growth": lambda folder, _: child(folder, "growth", "benchmarks.growth"),
}


def ratios(record: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return (description, ratio, goal) of all ratios of a record."""
    found = []
    for row in record.get("torch", {}).get("rows", []):
        if row["side"] != "shardwise":
            found.append(
                (
                    f"step time, {row['model']}, relative to PyTorch ({row['side']})",
                    row["shardwise_over_it"],
                    "at most 1",
                )
            )
    for name in ("small", "medium"):
        if case := record.get("loop", {}).get(name):
            found.append(
                (
                    f"loop with log, steps of {case['by_hand_s'] * 1e3:.0f} ms, "
                    "relative to a hand-written loop",
                    case["fit_ratio"],
                    "at most 1.02",
                )
            )
    if "start" in record:
        found.append(
            (
                "second start until the end of the first step, relative to the first",
                record["start"]["ratio"],
                "at most 0.33",
            )
        )
    for name, answer in record.get("optimizers", {}).get("optimizers", {}).items():
        found.append(
            (
                f"update time of {name}, relative to its memory traffic",
                answer["ratio"],
                "at most 1.3 on a GPU",
            )
        )
    if "data" in record:
        found.append(
            (
                "speed of Batches, sequences of 1024 tokens, relative to hand-written NumPy",
                record["data"]["1024"]["ratio"]["batches"],
                "at least 1",
            )
        )
    for name, ratio in record.get("checkpoints", {}).get("ratios", {}).items():
        found.append((name, ratio, "small"))
    return found


if __name__ == "__main__":
    run_parts(__doc__, "cpu", PARTS, ratios)
