"""What benchmarks/cpu.py and benchmarks/gpu.py share: parts that run in processes of their own, and one record of what they found."""

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
    """Runs `python -m module args --json FILE` and reads FILE; what it prints passes through."""
    path = folder / f"{name}.json"
    print(f"# {name}", flush=True)
    subprocess.run([sys.executable, "-m", module, *map(str, args), "--json", str(path)], check=True)
    return json.loads(path.read_text())


def start(folder: Path, *words: str, pairs: int = 1) -> dict[str, Any]:
    """The same run started twice, each to the end of its first step: of several such pairs the one in the middle, and all ratios."""
    found = sorted(
        (_pair(folder / str(n), *words) for n in range(pairs)), key=lambda pair: pair["ratio"]
    )
    return {**found[pairs // 2], "ratios": [pair["ratio"] for pair in found]}


def _pair(folder: Path, *words: str) -> dict[str, Any]:
    found = {}
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
        subprocess.run(
            command, check=True, env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        )
        found[name] = json.loads((folder / name / "starting.jsonl").read_text())
    return {**found, "ratio": found["second"]["total"] / found["first"]["total"]}


def run_parts(
    about: str,
    kind: str,
    parts: dict[str, Part],
    ratios: Callable[[dict[str, Any]], list[tuple[str, float, str]]],
) -> None:
    """Runs the parts that are asked for; the others stay as they are in the record. Ends with one table of ratios."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument(
        "--torch", metavar="PYTHON", help="an interpreter that has PyTorch, if it is another one"
    )
    parser.add_argument("--record", type=Path, default=RECORDS / f"{kind}.json")
    options = parser.parse_args()
    about_it = describe(
        kind, options.torch
    )  # now: a record that has changed is a change of the source
    for name in options.parts:
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = parts[name](Path(folder), options)
            except Exception:
                traceback.print_exc()  # the other parts still count
                continue
        if found:
            save(options.record, name, {**found, **about_it, "seconds": round(time.time() - began)})
        print(f"# {name}: {time.time() - began:.0f} s", flush=True)
    for what, ratio, goal in ratios(json.loads(options.record.read_text())):
        print(f"{ratio:8.3f}  {what} (goal: {goal})")
