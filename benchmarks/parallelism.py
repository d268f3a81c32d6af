"""Plan Llama 3 8B with sequences of 131,072 tokens on 64 TPU v5p chips, with and without context.

    python benchmarks/long_context.py                   every row, each in its own process
    python benchmarks/long_context.py fsdp context      some rows

Each row compiles the training step ahead of time and prints its memory and its collectives per
device. This needs libtpu, but no TPU. A row takes 3 to 10 minutes on 2 cores.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

RECIPE = Path(__file__).parent.parent / "recipes" / "llama.py"
TARGET = "v5p:4x4x4"


@dataclass(frozen=True)
class Row:
    """A way to train on long sequences.

    Attributes:
        mesh: the mesh.
        batch_size: sequences per step.
        remat: what the backward pass recomputes.
        is_plain: use an attention kernel that knows nothing about the context axis.
    """

    mesh: str
    batch_size: int
    remat: str = "block"
    is_plain: bool = False


ROWS = {
    "fsdp": Row("fsdp=64", 64),
    "context": Row("fsdp=8,context=8", 8),
    "plain": Row("fsdp=8,context=8", 8, is_plain=True),
    "fsdp-no-remat": Row("fsdp=64", 64, "none"),
    "context-no-remat": Row("fsdp=8,context=8", 8, "none"),
}


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention with a kernel that shards sequences and heads only, as most code does."""
    from shardwise.axes import TENSOR
    from shardwise.kernels import attention

    kernel = partial(attention.tpu_attention, heads=TENSOR)
    with (
        mock.patch.object(attention, "context_attention", return_value=None),
        mock.patch.object(attention, "tpu_attention", kernel),
    ):
        yield


def plan(row: Row) -> dict[str, object]:
    """Return the plan of a row as JSON."""
    from shardwise import plan_run
    from shardwise.recipe import load_recipe

    run = load_recipe(RECIPE, "recipe")(
        size="8b",
        length=131_072,
        mesh=row.mesh,
        batch_size=row.batch_size,
        remat=row.remat,
        loss_chunks=16,
    )
    if not row.is_plain:
        return plan_run(run, TARGET).as_json()
    with plain_attention():
        return plan_run(run, TARGET).as_json()


def show(name: str, found: dict) -> str:
    """Return a row of the table in docs/parallelism.md."""
    moved: dict[str, str] = {}
    for traffic in found["traffic"]:
        text = f"{traffic['kind']} {traffic['bytes'] / 2**30:.1f} GiB"
        if traffic["bytes"] >= 2**27:
            known = moved.get(traffic["axes"])
            moved[traffic["axes"]] = f"{known}, {text}" if known else text
    collectives = "; ".join(f"{axes}: {text}" for axes, text in moved.items())
    peak = f"{found['peak'] / 2**30:.1f} GiB" + ("" if found["fits"] else " (!)")
    row = ROWS[name]
    return (
        f"| `{name}` | `{row.mesh}` | {row.batch_size} | {row.remat} | {collectives} | "
        f"{found['memory']['temporaries'] / 2**30:.1f} GiB | {peak} | "
        f"{found['seconds']:.1f} s | {found['mfu']:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--json", type=Path, help="write the plans to this file")
    # A process for each row, since the compiler keeps memory.
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan(ROWS[options.one])))
        return
    found = {}
    for name in options.rows:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(show(name, found[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
