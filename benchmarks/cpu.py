"""Everything that is claimed of a CPU, measured in one run on one machine: `make bench`, about a quarter of an hour on 2 cores.

    python -m benchmarks.cpu --torch PYTHON            all parts; PYTHON has PyTorch
    python -m benchmarks.cpu --parts loop data         some; the others stay as they are in the record

Each part runs in processes of its own and ends as one entry of benchmarks/records/cpu.json; docs/performance.md is made from that.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.parts import Part, child, run_parts, start


def torch(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The default recipe's model, and one twice as deep, beside the same in PyTorch."""
    if options.torch is None:
        print("# no --torch PYTHON: nothing to stand beside", flush=True)
        return {}
    return child(folder, "torch", "benchmarks.beside_torch", "--torch", options.torch)


PARTS: dict[str, Part] = {
    "torch": torch,
    "loop": lambda folder, _: child(folder, "loop", "benchmarks.loop"),
    "start": lambda folder, _: start(folder, "recipes/stdlib_gpt.py", pairs=5),
    "optimizers": lambda folder, _: child(
        folder, "optimizers", "benchmarks.optimizers", "--preset", "byte"
    ),
    "data": lambda folder, _: child(folder, "data", "benchmarks.data"),
    "checkpoints": lambda folder, _: child(folder, "checkpoints", "benchmarks.checkpoint"),
    "growth": lambda folder, _: child(folder, "growth", "benchmarks.growth"),
}


def ratios(record: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(what, how much, the goal) of all that the record holds."""
    found = []
    for row in record.get("torch", {}).get("rows", []):
        if row["side"] != "shardwise":
            found.append(
                (
                    f"a step of {row['model']} model, times PyTorch's ({row['side']})",
                    row["shardwise_over_it"],
                    "at most 1",
                )
            )
    for name in ("small", "medium"):
        if case := record.get("loop", {}).get(name):
            found.append(
                (
                    f"the loop with its log, {case['by_hand_s'] * 1e3:.0f} ms a step, times one by hand",
                    case["fit_ratio"],
                    "at most 1.02",
                )
            )
    if "start" in record:
        found.append(
            (
                "second start to the end of the first step, times the first",
                record["start"]["ratio"],
                "at most 0.33",
            )
        )
    for name, answer in record.get("optimizers", {}).get("optimizers", {}).items():
        found.append(
            (
                f"an update by {name}, times its memory traffic",
                answer["ratio"],
                "at most 1.3 on a GPU",
            )
        )
    if "data" in record:
        found.append(
            (
                "batches of 1024 tokens a row, times the speed of NumPy by hand",
                record["data"]["1024"]["ratio"]["batches"],
                "at least 1",
            )
        )
    for name, ratio in record.get("checkpoints", {}).get("ratios", {}).items():
        found.append((name, ratio, "small"))
    return found


if __name__ == "__main__":
    run_parts(__doc__, "cpu", PARTS, ratios)
