"""Measure every claim about GPUs in one run on one machine: `python -m benchmarks.gpu`.

Each part runs in separate processes and writes one entry of benchmarks/records/gpu.json, with
versions, hardware and source. `python -m benchmarks.page` generates docs/performance.md from the
record.

    python -m benchmarks.gpu                      all parts, about 24 minutes
    python -m benchmarks.gpu --parts gpt2 xl      some parts; other entries do not change
"""

import argparse
import json
import statistics
import subprocess
import sys
import traceback
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.parts import Part, child, run_parts, start

# Number of sequences and their length.
LONG = {"16k": (4, 16384), "64k": (1, 65536)}


def gpt2(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Compare tokens per second, and losses of 200 steps, of GPT-2 124M with both PyTorch
    models.

    Next to them: matmuls of 8 bits, by shardwise and (where it is installed) by torchao, and Muon.
    """
    size = ("--rows", 64, "--steps", 200, "--share", folder / "share")
    ours = watched(folder, "shardwise", "benchmarks.gpt2", *size)
    theirs = {
        model: watched(folder, model, "benchmarks.gpt2_torch", *size, "--model", model)
        for model in ("compact", "transformers")
    }
    answer: dict[str, Any] = {"shardwise": ours, **theirs}
    variants: dict[str, tuple[object, ...]] = {
        "float8": ("benchmarks.gpt2", *size, "--float8")
    }
    if find_spec("torchao") is not None:
        variants["torchao"] = ("benchmarks.gpt2_torch", *size, "--float8")
    for name, dtype in (("muon", "float32"), ("muon16", "bfloat16")):
        muon = ("--optimizer", "muon", "--iterate-in", dtype)
        variants[name] = ("benchmarks.gpt2", *size, *muon)
    for name, (module, *options) in variants.items():
        try:
            answer[name] = watched(folder, name, str(module), *options)
        except subprocess.CalledProcessError:
            # The comparison took minutes. It is kept without this row.
            traceback.print_exc()
    best = min(theirs, key=lambda model: theirs[model]["step_ms"])
    answer |= {"best": best, "ratio": theirs[best]["step_ms"] / ours["step_ms"]}
    answer["largest_loss_difference"], answer["mean_loss_difference"] = apart(
        ours, theirs[best]
    )
    answer["between_pytorch"] = apart(theirs["compact"], theirs["transformers"])
    print(
        f"# {answer['ratio']:.3f} times the tokens/s of {best}; "
        f"losses differ by at most {answer['largest_loss_difference']:.2%}",
        flush=True,
    )
    return answer


def watched(folder: Path, name: str, module: str, *args: object) -> dict[str, Any]:
    """Call `child`, and add the median clock (MHz) and power (W) of the GPU while it was busy."""
    words = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu,clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
        "--loop-ms=500",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as smi:
        try:
            answer = child(folder, name, module, *args)
        finally:
            smi.terminate()
        seen = [line.split(", ") for line in smi.communicate()[0].splitlines()]
    busy = [
        (float(moment[1]), float(moment[2]))
        for moment in seen
        if moment[0] in ("99", "100")
    ]
    if busy:
        answer["clock_mhz"], answer["power_w"] = map(
            statistics.median, zip(*busy, strict=True)
        )
        print(
            f"# GPU: {answer['clock_mhz']:.0f} MHz, {answer['power_w']:.0f} W",
            flush=True,
        )
    return answer


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Return the largest and the mean relative difference of the losses of two runs."""
    differences = [
        abs(a - b) / b for a, b in zip(one["losses"], other["losses"], strict=True)
    ]
    return max(differences), sum(differences) / len(differences)


def chunks(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Compare a loss in 8 chunks with a loss of all logits at once."""
    whole, parts = (
        child(
            folder,
            f"chunks{n}",
            "benchmarks.gpt2",
            "--rows",
            64,
            "--steps",
            60,
            "--chunks",
            n,
        )
        for n in (1, 8)
    )
    return {
        "whole": whole,
        "parts": parts,
        "ratio": parts["step_ms"] / whole["step_ms"],
    }


def long(folder: Path, _: argparse.Namespace, rows: int, length: int) -> dict[str, Any]:
    """Compare GPT-2 124M with PyTorch on long sequences."""
    size = (
        "--rows",
        rows,
        "--length",
        length,
        "--steps",
        24,
        "--share",
        folder / "share",
    )
    ours = child(folder, "shardwise", "benchmarks.gpt2", *size)
    theirs = child(folder, "compact", "benchmarks.gpt2_torch", *size)
    return {
        "shardwise": ours,
        "compact": theirs,
        "ratio": theirs["step_ms"] / ours["step_ms"],
    }


def xl(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Measure GPT-2 1.5B with the largest batch that `shardwise plan` finds.

    Everything except matmul outputs is rematerialized. Layers are not scanned: XLA copies the
    values that a scan keeps into and out of a stack of all layers, which costs a tenth of the step.
    """
    options = (
        "--preset",
        "gpt2-xl",
        "--remat",
        "dots",
        "--loss-chunks",
        8,
        "--no-scan-layers",
        "--batch-size",
        56,
    )
    path = folder / "plan.json"
    words = [
        "plan",
        "recipes/gpt2.py",
        *map(str, options),
        "--largest-batch",
        "--json",
        str(path),
    ]
    subprocess.run([sys.executable, "-m", "shardwise.cli", *words], check=True)
    plan = json.loads(path.read_text())["plan"]
    rows = plan["batch"]["inputs"][0]
    size = (
        "--preset",
        "gpt2-xl",
        "--remat",
        "dots",
        "--chunks",
        8,
        "--rows",
        rows,
        "--steps",
        24,
    )
    ran = child(folder, "xl", "benchmarks.gpt2", *size)
    return {
        "rows": rows,
        "planned_gib": sum(plan["memory"].values()) / 2**30,
        "planned_ms": plan["times"]["total"] * 1e3,
        **ran,
    }


PARTS: dict[str, Part] = {
    "memory": lambda folder, _: child(folder, "memory", "benchmarks.memory"),
    "gpt2": gpt2,
    "chunks": chunks,
    "xl": xl,
    **{
        name: partial(long, rows=rows, length=length)
        for name, (rows, length) in LONG.items()
    },
    "loop": lambda folder, _: child(
        folder, "loop", "benchmarks.loop", "--cases", "gpt2", "--rounds", 5
    ),
    "start": lambda folder, _: start(folder, "recipes/gpt2.py", "--batch-size", "32"),
    "start_unrolled": lambda folder, _: start(
        folder, "recipes/gpt2.py", "--batch-size", "32", "--no-scan-layers"
    ),
}


def ratios(record: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return (description, ratio, goal) of all ratios of a record."""
    found = []
    if entry := record.get("gpt2"):
        found.append(
            (
                f"tokens/s of GPT-2 124M, relative to the faster PyTorch ({entry['best']})",
                entry["ratio"],
                "at least 1.2",
            )
        )
        found.append(
            (
                "largest relative difference of the losses",
                entry["largest_loss_difference"],
                "at most 0.01",
            )
        )
    for name, entry in record.get("memory", {}).items():
        if name.startswith("gpt2"):
            found.append(
                (
                    f"bytes per parameter, {name}: state, gradient and temporaries",
                    entry["total"],
                    "at most 16",
                )
            )
    if entry := record.get("chunks"):
        found.append(
            (
                "step time with the loss in 8 chunks, relative",
                entry["ratio"],
                "at most 1.05",
            )
        )
    if entry := record.get("xl"):
        found.append(
            (
                f"MFU of GPT-2 1.5B with {entry['rows']} sequences",
                entry["mfu"],
                "at least 0.5",
            )
        )
    for name in LONG:
        if entry := record.get(name):
            found.append(
                (
                    f"tokens/s, sequences of {name} tokens, relative to PyTorch",
                    entry["ratio"],
                    "at least 1",
                )
            )
    if entry := record.get("loop", {}).get("gpt2"):
        found.append(
            (
                "fit() with data, log and a checkpoint, relative to a hand-written loop",
                entry["with_checkpoint_ratio"],
                "at most 1.01",
            )
        )
    for name, layers in (
        ("start", "scanned layers"),
        ("start_unrolled", "unrolled layers"),
    ):
        if entry := record.get(name):
            found.append(
                (
                    f"second start until the end of the first step, relative, {layers}",
                    entry["ratio"],
                    "at most 0.33",
                )
            )
    return found


if __name__ == "__main__":
    run_parts(__doc__, "gpu", PARTS, ratios)
