"""Plan large models on many devices, with and without context, expert and stage axes.

    python benchmarks/parallelism.py                  every row, each in its own process
    python benchmarks/parallelism.py fsdp context     some rows

Each row compiles the training step ahead of time and prints its memory and its collectives per
device. This needs the compilers for TPUs and GPUs, `pip install 'shardwise[tpu-plan,gpu-plan]'`,
but neither a TPU nor a GPU. A row takes up to 15 minutes on 2 cores.
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

from shardwise.text import show_bytes

RECIPE = Path(__file__).parent.parent / "recipes" / "llama.py"


@dataclass(frozen=True)
class Row:
    """A model on a mesh.

    Attributes:
        size: the size of the Llama.
        length: tokens per sequence.
        mesh: the mesh.
        batch_size: sequences per step.
        remat: what the backward pass recomputes.
        target: the devices.
        is_plain: leave attention, experts and layers to XLA's partitioner, as code without
            shardwise does.
    """

    size: str
    length: int
    mesh: str
    batch_size: int
    remat: str = "block"
    target: str = "v5p:4x4x4"
    is_plain: bool = False


LONG, SHORT = 131_072, 8192
_small = partial(Row, remat="none", target="v5e:2x4")
ROWS = {
    "small-context": _small("tiny", 4096, "data=2,context=4", 8),
    "small-context-plain": _small("tiny", 4096, "data=2,context=4", 8, is_plain=True),
    "small-expert": _small("tiny-moe", 1024, "data=2,expert=4", 64),
    "small-expert-plain": _small(
        "tiny-moe", 1024, "data=2,expert=4", 64, is_plain=True
    ),
    "small-stage": _small("tiny", 1024, "stage=2,data=4", 64),
    "small-stage-plain": _small("tiny", 1024, "stage=2,data=4", 64, is_plain=True),
    "fsdp": Row("8b", LONG, "fsdp=64", 64),
    "context": Row("8b", LONG, "fsdp=8,context=8", 8),
    "plain": Row("8b", LONG, "fsdp=8,context=8", 8, is_plain=True),
    "fsdp-no-remat": Row("8b", LONG, "fsdp=64", 64, "none"),
    "context-no-remat": Row("8b", LONG, "fsdp=8,context=8", 8, "none"),
    "more-context-no-remat": Row("8b", LONG, "fsdp=4,context=16", 4, "none"),
    "8b": Row("8b", SHORT, "fsdp=64", 256),
    "8x7b-fsdp": Row("8x7b", SHORT, "fsdp=64", 256),
    "8x7b-expert": Row("8x7b", SHORT, "fsdp=8,expert=8", 256),
    "70b-fsdp": Row("70b", SHORT, "fsdp=64", 64),
    "70b-stage": Row("70b", SHORT, "stage=8,model=8", 32),
    "70b-stage-fsdp": Row("70b", SHORT, "stage=4,fsdp=16", 256),
    "70b-stage-512": Row(
        "70b", SHORT, "stage=8,fsdp=8,model=8", 256, target="v5p:8x8x8"
    ),
    "gpu-8b": Row("8b", SHORT, "fsdp=8", 16, target="h200:8"),
    "gpu-8b-long": Row("8b", LONG, "fsdp=8,context=8", 8, target="h200:64"),
    "gpu-8x7b-fsdp": Row("8x7b", SHORT, "fsdp=64", 128, target="h200:64"),
    "gpu-8x7b-expert": Row("8x7b", SHORT, "fsdp=8,expert=8", 128, target="h200:64"),
    "gpu-70b-fsdp": Row("70b", SHORT, "fsdp=64", 128, target="h200:64"),
    "gpu-70b-model": Row("70b", SHORT, "fsdp=8,model=8", 128, target="h200:64"),
    "gpu-70b-stage-fsdp": Row("70b", SHORT, "stage=8,fsdp=8", 128, target="h200:64"),
    "gpu-70b-stage": Row("70b", SHORT, "stage=8,model=8", 32, target="h200:64"),
}


@contextmanager
def plain_layers() -> Iterator[None]:
    """Compute with attention that shards sequences and heads only, and without own collectives."""
    from shardwise.axes import TENSOR
    from shardwise.kernels import attention, experts
    from shardwise.models import stack

    kernel = partial(attention.tpu_attention, heads=TENSOR)
    with (
        mock.patch.object(experts, "expert_layout", return_value=None),
        mock.patch.object(stack, "is_pipelined", return_value=False),
        mock.patch.object(attention, "context_attention", return_value=None),
        mock.patch.object(attention, "tpu_attention", kernel),
    ):
        yield


def plan(row: Row) -> dict[str, object]:
    """Return the plan of a row as JSON."""
    from shardwise import plan_run
    from shardwise.recipe import load_recipe

    run = load_recipe(RECIPE, "recipe")(
        size=row.size,
        length=row.length,
        mesh=row.mesh,
        batch_size=row.batch_size,
        remat=row.remat,
        loss_chunks=16,
    )
    if not row.is_plain:
        return plan_run(run, row.target).as_json()
    with plain_layers():
        return plan_run(run, row.target).as_json()


def show(name: str, found: dict) -> str:
    """Return a row of the table in docs/parallelism.md."""
    moved: dict[str, str] = {}
    largest = max(traffic["bytes"] for traffic in found["traffic"])
    for traffic in found["traffic"]:
        text = f"{traffic['kind']} {show_bytes(traffic['bytes'])}"
        if traffic["bytes"] >= largest / 100:
            known = moved.get(traffic["axes"])
            moved[traffic["axes"]] = f"{known}, {text}" if known else text
    collectives = "; ".join(f"{axes}: {text}" for axes, text in moved.items())
    peak = show_bytes(found["peak"]) + ("" if found["fits"] else " (!)")
    row = ROWS[name]
    return (
        f"| `{name}` | {row.target} | `{row.mesh}` | {row.batch_size} | {row.remat} | "
        f"{collectives} | "
        f"{show_bytes(found['memory']['temporaries'])} | {peak} | "
        f"{found['seconds']:.3g} s | {found['mfu']:.1%} |"
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
