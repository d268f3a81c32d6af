"""Run the parts of benchmarks/cpu.py and benchmarks/gpu.py in separate processes, and record
results."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, describe, save

Part = Callable[[Path, argparse.Namespace], dict[str, Any]]


def child(folder: Path, name: str, module: str, *args: object) -> dict[str, Any]:
    """Run `python -m module args --json FILE` and return the content of FILE."""
    path = folder / f"{name}.json"
    print(f"# {name}", flush=True)
    subprocess.run(
        [sys.executable, "-m", module, *map(str, args), "--json", str(path)], check=True
    )
    return json.loads(path.read_text())


def start(folder: Path, *words: str, pairs: int = 1) -> dict[str, Any]:
    """Start the same run twice and time each start to the end of its first step.

    The second start finds the compilation cache of the first.

    Args:
        folder: directory for runs and caches.
        words: the recipe and its arguments.
        pairs: how many pairs of starts to measure.

    Returns:
        The pair with the median ratio, and the ratios of all pairs.
    """
    found = sorted(
        (_pair(folder / str(n), *words) for n in range(pairs)),
        key=lambda pair: pair["ratio"],
    )
    return {**found[pairs // 2], "ratios": [pair["ratio"] for pair in found]}


def _pair(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    # pip compiles the modules of a package that it installs. Those of a checkout are compiled when
    # they are imported first.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("first", "second"):
        command = [
            sys.executable,
            "-m",
            "shardwise.cli",
            "train",
            *words,
            "--steps",
            "2",
            "--out",
            str(folder / name),
        ]
        subprocess.run(command, check=True, env=environment)
        found[name] = json.loads((folder / name / "starting.jsonl").read_text())
    return {**found, "ratio": found["second"]["total"] / found["first"]["total"]}


def run_parts(
    about: str,
    kind: str,
    parts: dict[str, Part],
    ratios: Callable[[dict[str, Any]], list[tuple[str, float, str]]],
) -> None:
    """Run the selected parts, update their entries of the record, and print a table of ratios.

    Args:
        about: the description of the command.
        kind: "cpu" or "gpu"; the name of the record.
        parts: the function that measures each part.
        ratios: returns (description, ratio, goal) of all ratios of a record.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument(
        "--torch",
        metavar="PYTHON",
        help="a Python interpreter with PyTorch, if this one has none",
    )
    parser.add_argument("--record", type=Path, default=RECORDS / f"{kind}.json")
    options = parser.parse_args()
    # Before the record changes: a changed record makes the source dirty.
    about_it = describe(kind, options.torch)
    for name in options.parts:
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = parts[name](Path(folder), options)
            except Exception:
                # Continue with the other parts.
                traceback.print_exc()
                continue
        if found:
            save(
                options.record,
                name,
                {**found, **about_it, "seconds": round(time.time() - began)},
            )
        print(f"# {name}: {time.time() - began:.0f} s", flush=True)
    for what, ratio, goal in ratios(json.loads(options.record.read_text())):
        print(f"{ratio:8.3f}  {what} (goal: {goal})")
