"""Flip bits of a checkpoint one at a time, and count how plain Orbax reads each result."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from harness import flip_bit, leaves, pick_bit, seeded


def main(source: Path, flips: int, seed: int) -> None:
    """Print how many of the flips raised, had no effect, or gave wrong values."""
    counts, rng = {"raised": 0, "same": 0, "wrong": 0}, seeded(seed)
    with tempfile.TemporaryDirectory() as folder:
        step = shutil.copytree(source, Path(folder) / "checkpoints" / "0")
        good = leaves(Path(folder), 0)
        for _ in range(flips):
            path, bit = pick_bit(step, rng)
            flip_bit(path, bit)
            try:
                counts["same" if leaves(Path(folder), 0) == good else "wrong"] += 1
            except Exception:
                counts["raised"] += 1
            flip_bit(path, bit)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
