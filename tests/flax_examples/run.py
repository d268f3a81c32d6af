"""Train Flax's own examples unchanged, and print a table.

git clone https://github.com/google/flax
python -m tests.flax_examples.run --flax flax
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from shardwise import use_cpu_devices

use_cpu_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from shardwise import Run, fit, make_mesh, verify  # noqa: E402
from shardwise.mesh import mesh_text, parse_sizes, show_sizes  # noqa: E402
from shardwise.metrics import read_metrics  # noqa: E402
from shardwise.run import prepare  # noqa: E402
from shardwise.state import TrainState  # noqa: E402
from tests.flax_examples.examples import EXAMPLES  # noqa: E402


def losses(out: Path) -> np.ndarray:
    """Return the losses that a run has logged."""
    return np.array([record["loss"] for record in read_metrics(out / "metrics.jsonl")])


def train(run: Run, out: Path) -> TrainState:
    """Train and return the final state."""
    return fit(replace(run, out=out, save_every=2)).state


def row(name: str, run: Run) -> str:
    """Return a row of the table: losses on two meshes, verification, resuming."""
    folder = Path(tempfile.mkdtemp())
    mesh = make_mesh(run.mesh)
    one = show_sizes(dict.fromkeys(parse_sizes(mesh_text(mesh)), 1))
    train(replace(run, mesh=make_mesh(one, jax.devices()[:1])), folder / "one")
    final = train(run, folder / "many")
    expected, found = losses(folder / "one"), losses(folder / "many")
    difference = float(np.max(np.abs(found - expected) / np.abs(expected)))

    train(replace(run, steps=2), folder / "parts")
    resumed = train(run, folder / "parts")
    pairs = zip(jax.tree.leaves(final), jax.tree.leaves(resumed), strict=True)
    is_same = all(np.array_equal(a, b) for a, b in pairs)

    agrees = verify(run, [mesh_text(mesh)], steps=2).ok
    is_explicit = prepare(run).step.spec.is_explicit
    shutil.rmtree(folder)
    cells = (
        name,
        mesh_text(mesh),
        "Explicit" if is_explicit else "Auto",
        f"{difference:.1e}",
        "agrees" if agrees else "DIFFERS",
        "bit-identical" if is_same else "DIFFERS",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flax", type=Path, required=True, help="a checkout of Flax")
    parser.add_argument("--only", default="", help="a part of the names to run")
    options = parser.parse_args()
    print("| example | mesh | axes | 1 to 8 devices | `verify` | resumed |")
    print("| --- | --- | --- | --: | --- | --- |")
    for name, make_run in EXAMPLES.items():
        if options.only in name:
            try:
                print(row(name, make_run(options.flax)), flush=True)
            except Exception as error:
                text = " ".join(str(error).split())[:500]
                print(
                    f"| {name} | FAILED: {type(error).__name__}: {text} |", flush=True
                )


if __name__ == "__main__":
    main()
