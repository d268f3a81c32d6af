"""Measure the time and memory of planning large runs for many chips, on this machine.

    python benchmarks/plan_scale.py                     all presets and numbers of chips
    python benchmarks/plan_scale.py --chips 8 --presets gpt-7b

The runs are GPTs with 7 and 70 billion parameters on 8 to 512 TPU v5p chips. Each chip has one
sequence of 2048 tokens. Parameters and optimizer state are sharded over all chips, layers are
scanned and blocks are rematerialized. This needs libtpu, but no TPU.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOPOLOGIES = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 256: "v5p:4x8x8", 512: "v5p:8x8x8"}
RECIPE = Path(__file__).parent.parent / "recipes" / "gpt2.py"


def plan(preset: str, chips: int, folder: str) -> dict:
    """Run `shardwise plan` in a process, and return its result and the wall seconds."""
    answer = Path(folder) / f"{preset}-{chips}.json"
    words = [
        "--preset",
        preset,
        "--mesh",
        f"fsdp={chips}",
        "--batch-size",
        str(chips),
        "--length",
        "2048",
        "--remat",
        "block",
    ]
    command = [
        sys.executable,
        "-m",
        "shardwise.cli",
        "plan",
        str(RECIPE),
        "--on",
        TOPOLOGIES[chips],
        "--no-cache",
        *words,
    ]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "--json", str(answer)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    seconds = time.perf_counter() - begun
    if done.returncode not in (0, 2) or not answer.exists():
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return {
        "preset": preset,
        "chips": chips,
        "wall_s": seconds,
        **json.loads(answer.read_text())["plan"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["gpt-7b", "gpt-70b"])
    parser.add_argument(
        "--chips",
        nargs="+",
        type=int,
        default=list(TOPOLOGIES),
        choices=list(TOPOLOGIES),
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(
        f"{'':8} {'chips':>5} {'planned in':>11} {'memory':>9}   {'peak per chip':>15} "
        f"{'step':>9} {'tokens/s':>11} {'MFU':>6}"
    )
    for preset, chips in itertools.product(options.presets, options.chips):
        with tempfile.TemporaryDirectory() as folder:
            row = plan(preset, chips, folder)
            rows.append(row)
            peak = f"{row['peak'] / 2**30:.1f} GiB" + ("" if row["fits"] else " (!)")
            print(
                f"{preset:8} {chips:5d} {row['wall_s']:9.1f} s "
                f"{row['compile_memory'] / 2**30:5.1f} GiB   {peak:>15} "
                f"{row['seconds']:7.3f} s {row['items_per_second']:11,.0f} {row['mfu']:6.1%}",
                flush=True,
            )
    if options.json:
        kept = (
            "preset",
            "chips",
            "wall_s",
            "compile_memory",
            "compile_seconds",
            "peak",
            "fits",
            "seconds",
            "items_per_second",
            "mfu",
            "traffic",
        )
        options.json.write_text(
            json.dumps([{name: row[name] for name in kept} for row in rows], indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
