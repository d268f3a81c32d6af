"""Plan weak scaling: GPT 7B on 8 to 2,048 TPU v5p chips, with the best mesh at each size.

    python benchmarks/weak_scaling.py                   all sizes; up to an hour on 2 cores
    python benchmarks/weak_scaling.py --chips 8 64 --rows 4

The sequences per chip, of 2048 tokens, stay the same while chips are added. Layers are scanned and
blocks are rematerialized. At each size several meshes are compiled. The one with the shortest
estimated step that fits is selected.

"sent over links" is what one chip sends to others in a step, by mesh axes. For an array that n
chips communicate, it is (n - 1) / n of its bytes, and twice that for an all-reduce. The value in
parentheses is the part that uses each link of the chip. Links are within a slice, the network is
between slices. "waits" is the part of the step in which nothing is computed.

Efficiency is tokens per second and chip, relative to the smallest size. It may exceed 1: a torus as
small as 2x2x2 has no wrap-around links, so its chips have fewer links. Bytes and memory are from
the compiler. Times are from a model of the hardware (docs/plan.md). Plans are cached in `--cache`,
so an interrupted run resumes, and a second run takes a minute. This needs libtpu, but no TPU.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import numpy as np
from gpt2 import recipe

from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh, show_sizes
from shardwise.plan.compile import plan_run
from shardwise.plan.plan import Plan
from shardwise.plan.roofline import HOP
from shardwise.plan.target import Target, find_target

# FSDP over a complete slice, half of it, a plane of its torus, or a few chips; tensor parallelism
# for few chips.
MESHES = {
    "v5p:2x2x2": ["fsdp=8", "data=2,fsdp=4", "fsdp=4,model=2"],
    "v5p:4x4x4": [
        "fsdp=64",
        "data=2,fsdp=32",
        "data=4,fsdp=16",
        "data=8,fsdp=8",
        "fsdp=32,model=2",
    ],
    "v5p:4x8x8": ["fsdp=256", "data=2,fsdp=128", "data=4,fsdp=64", "data=32,fsdp=8"],
    "v5p:8x8x8": ["fsdp=512", "data=2,fsdp=256", "data=8,fsdp=64", "data=64,fsdp=8"],
    "v5p:8x8x16": ["fsdp=1024", "data=16,fsdp=64", "data=128,fsdp=8"],
    "v5p:8x16x16": [
        "fsdp=2048",
        "data=2,fsdp=1024",
        "data=8,fsdp=256",
        "data=32,fsdp=64",
        "data=256,fsdp=8",
    ],
    # Only the data axis crosses slices.
    "2*v5p:8x8x16": [
        "data=2,fsdp=1024",
        "data=32,fsdp=64",
        "data=256,fsdp=8",
    ],
    "4*v5p:8x8x8": ["data=4,fsdp=512", "data=32,fsdp=64"],
}
HEAD = (
    "chips | target | mesh | peak | step | bound by | waits | sent over links (each) | "
    "over the network | tokens/s | MFU | efficiency"
)
KEPT = (
    "chips target mesh is_chosen fits peak seconds times sent traffic items_per_second mfu "
    "efficiency compile_seconds compile_memory"
)


def num_chips(target: str) -> int:
    """Return the number of chips of a target."""
    slices, _, shape = target.rpartition("*")
    return int(slices or 1) * math.prod(map(int, shape.partition(":")[2].split("x")))


def sent(plan: Plan, target: Target) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the bytes that one chip sends in a step, by link and mesh axes.

    Each entry also has the bytes that use one link of the chip.
    """
    assert target.chip is not None
    mesh = make_mesh(show_sizes(plan.mesh), target.devices)
    slice_of = np.vectorize(lambda device: getattr(device, "slice_index", 0))(
        mesh.devices
    )
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for t in plan.traffic:
        along = slice_of[
            tuple(
                slice(None) if name in t.axes.split("*") else 0
                for name in mesh.axis_names
            )
        ]
        size = (
            len(np.unique(slice_of))
            if t.link == "network"
            else int((along == slice_of.flat[0]).sum())
        )
        share = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(
            t.kind, (size - 1) / size
        )
        moving = t.seconds - t.count * HOP * max(1, math.ceil(math.log2(size)))
        total, each = found.setdefault(t.link, {}).get(t.axes, (0.0, 0.0))
        found[t.link][t.axes] = (
            total + share * t.bytes,
            each
            + moving * (target.chip.link if t.link == "links" else target.chip.network),
        )
    return found


def plan_all(name: str, rows: int, cache: Path) -> list[dict[str, Any]]:
    """Return the plans of all meshes of a target, the shortest step that fits first."""
    target, found = find_target(name), []
    for mesh in MESHES[name]:
        chips = len(target.devices)
        run = recipe(
            preset="gpt-7b",
            batch_size=rows * chips,
            length=2048,
            mesh=mesh,
            remat="block",
        )
        try:
            plan = plan_run(run, target, {"remat": "block"}, cache)
        except ConfigError as error:
            print(f"{name} {mesh}: {error}", file=sys.stderr, flush=True)
            continue
        assert plan.times is not None
        seconds = f"{plan.compile_seconds:.0f} s"
        words = f"{plan.line()}, bound by {plan.times.bound}, planned in {seconds}"
        print(f"{name} {mesh}: {words}", file=sys.stderr, flush=True)
        found.append(
            {**plan.as_json(), "chips": chips, "mesh": mesh, "sent": sent(plan, target)}
        )
    return sorted(found, key=lambda row: (not row["fits"], row["seconds"]))


def line(row: dict[str, Any]) -> str:
    """Return a row of the Markdown table."""

    def show(link: str) -> str:
        found = [
            (axes, total / 1e9, each / 1e9)
            for axes, (total, each) in sorted(row["sent"].get(link, {}).items())
            if total >= 1e6
        ]
        return ", ".join(
            f"{axes} {total:.1f} GB ({each:.1f})"
            if link == "links"
            else f"{axes} {total:.3f} GB"
            for axes, total, each in found
        )

    times = row["times"]
    cells = [
        f"{row['chips']:,}",
        f"`{row['target']}`",
        f"`{row['mesh']}`",
        f"{row['peak'] / 2**30:.1f} GiB{'' if row['fits'] else '!'}",
    ]
    cells += [
        f"{row['seconds'] * 1e3:.0f} ms",
        times["bound"],
        f"{sum(times['network'].values()) / times['total']:.0%}",
    ]
    cells += [
        show("links"),
        show("network"),
        f"{row['items_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
        f"{row['efficiency']:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chips",
        nargs="+",
        type=int,
        default=sorted({num_chips(name) for name in MESHES}),
    )
    parser.add_argument("--rows", type=int, default=1, help="sequences per chip")
    parser.add_argument("--cache", type=Path, default=Path("plan_search_cache"))
    parser.add_argument(
        "--all",
        action="store_true",
        help="print every mesh, not only the best of each size",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"| {HEAD} |\n|{' --- |' * len(HEAD.split(' | '))}", flush=True)
    for name in (name for name in MESHES if num_chips(name) in options.chips):
        for number, row in enumerate(plan_all(name, options.rows, options.cache)):
            speed = row["items_per_second"] / row["chips"]
            rows.append(
                {**row, "is_chosen": number == 0 and row["fits"], "speed": speed}
            )
            rows[-1]["efficiency"] = speed / rows[0]["speed"]
            if rows[-1]["is_chosen"] or options.all:
                print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps(
                [{name: row[name] for name in KEPT.split()} for row in rows], indent=2
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
