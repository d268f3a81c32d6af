"""Everything that is claimed of a GPU, measured in one run on one machine: `python -m benchmarks.gpu`.

Each part runs in processes of its own and ends as one entry of benchmarks/records/gpu.json, with the versions, the hardware
and the source it was measured with; docs/performance.md is made from that (`python -m benchmarks.page`).

    python -m benchmarks.gpu                      all parts, about a quarter of an hour
    python -m benchmarks.gpu --parts gpt2 xl      some; the others stay as they are in the record
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, describe, save

PYTHON = sys.executable
LONG = {"16k": (4, 16384), "64k": (1, 65536)}


def child(folder: Path, name: str, module: str, *args: object) -> dict[str, Any]:
    """Runs `python -m module args --json FILE` and reads FILE; what it prints passes through."""
    path = folder / f"{name}.json"
    print(f"# {name}", flush=True)
    subprocess.run([PYTHON, "-m", module, *map(str, args), "--json", str(path)], check=True)
    return json.loads(path.read_text())


def gpt2(folder: Path) -> dict[str, Any]:
    """124M, 64 x 1024: tokens a second beside both PyTorch models, and the losses of 200 steps from the same weights."""
    size = ("--rows", 64, "--steps", 200, "--share", folder / "share")
    ours = child(folder, "shardwise", "benchmarks.gpt2", *size)
    theirs = {model: child(folder, model, "benchmarks.gpt2_torch", *size, "--model", model) for model in ("compact", "transformers")}
    answer: dict[str, Any] = {"shardwise": ours, **theirs}
    best = min(theirs, key=lambda model: theirs[model]["step_ms"])
    apart = [abs(a - b) / b for a, b in zip(ours["losses"], theirs[best]["losses"], strict=True)]
    answer |= {"best": best, "ratio": theirs[best]["step_ms"] / ours["step_ms"], "largest_loss_difference": max(apart)}
    answer["mean_loss_difference"] = sum(apart) / len(apart)
    print(f"# {answer['ratio']:.3f} times the tokens/s of {best}; losses at most {max(apart):.2%} apart", flush=True)
    return answer


def chunks(folder: Path) -> dict[str, Any]:
    """The loss with 8 parts of the logits, one at a time, beside the whole."""
    whole, parts = (child(folder, f"chunks{n}", "benchmarks.gpt2", "--rows", 64, "--steps", 80, "--chunks", n) for n in (1, 8))
    return {"whole": whole, "parts": parts, "ratio": parts["step_ms"] / whole["step_ms"]}


def long(folder: Path) -> dict[str, Any]:
    """124M with rows of 16,384 and 65,536 tokens."""
    answer = {}
    for name, (rows, length) in LONG.items():
        size = ("--rows", rows, "--length", length, "--steps", 60, "--share", folder / f"share{name}")
        ours = child(folder, f"shardwise {name}", "benchmarks.gpt2", *size)
        theirs = child(folder, f"compact {name}", "benchmarks.gpt2_torch", *size)
        answer[name] = {"shardwise": ours, "compact": theirs, "ratio": theirs["step_ms"] / ours["step_ms"]}
    return answer


def xl(folder: Path) -> dict[str, Any]:
    """1.5 billion parameters, with the largest batch that `shardwise plan` says will fit."""
    options = ("--preset", "gpt2-xl", "--remat", "block", "--loss-chunks", 8)
    path = folder / "plan.json"
    words = ["plan", "recipes/gpt2.py", *map(str, options), "--largest-batch", "--json", str(path)]
    subprocess.run([PYTHON, "-m", "shardwise.cli", *words], check=True)
    plan = json.loads(path.read_text())["plan"]
    rows = plan["batch"]["inputs"][0]
    size = ("--preset", "gpt2-xl", "--remat", "block", "--chunks", 8, "--scan", "--rows", rows, "--steps", 60)
    ran = child(folder, "xl", "benchmarks.gpt2", *size)
    return {"rows": rows, "planned_gib": plan["memory"]["peak"] / 2**30, "planned_ms": plan["times"]["total"] * 1e3, **ran}


def loop(folder: Path) -> dict[str, Any]:
    """`fit()` with data, log and checkpoints beside a jitted loop written by hand."""
    return child(folder, "loop", "benchmarks.loop", "--cases", "gpt2", "--rounds", 5)


def start(folder: Path) -> dict[str, Any]:
    """The same run started twice, to its first step."""
    words = ["train", "recipes/gpt2.py", "--steps", "3", "--batch-size", "32"]
    seconds = []
    for n in range(2):
        out = folder / f"run{n}"
        subprocess.run(
            [PYTHON, "-m", "shardwise.cli", *words, "--out", str(out)],
            check=True,
            env={**__import__("os").environ, "XDG_CACHE_HOME": str(folder / "cache")},
        )
        seconds.append(json.loads((out / "starting.jsonl").read_text()))
    return {"first": seconds[0], "second": seconds[1], "ratio": seconds[1]["total"] / seconds[0]["total"]}


PARTS = {"gpt2": gpt2, "chunks": chunks, "xl": xl, "long": long, "loop": loop, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--record", type=Path, default=RECORDS / "gpu.json")
    options = parser.parse_args()
    for name in options.parts:
        began = time.time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = PARTS[name](Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"# {name} failed: {error}", flush=True)
                continue
        save(options.record, name, {**found, **describe("gpu"), "seconds": round(time.time() - began)})
        print(f"# {name}: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
