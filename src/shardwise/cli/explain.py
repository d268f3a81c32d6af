"""`shardwise explain`: how each array is sharded, and what the optimizer does to it."""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.cli.recipes import load_run, split_recipe
from shardwise.text import Json

if TYPE_CHECKING:
    from shardwise.sharding import Placement


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise explain`; return what `--json` writes, and the exit code."""
    target, _, recipe_args = split_recipe("explain", args)
    run, _ = load_run("explain", target, recipe_args, shared)
    from rich.console import Console

    from shardwise.explanation.explain import explain_state
    from shardwise.mesh import make_mesh, mesh_text
    from shardwise.sharding import placement_table
    from shardwise.state import abstract_state

    mesh = make_mesh(run.mesh)
    spec = abstract_state(run.model, run.optimizer, mesh, run.rules, run.wrt)
    console = Console(width=None if sys.stdout.isatty() else 160)
    kinds = {
        "parameters": spec.params,
        "other variables": spec.other,
        "optimizer": spec.opt_state,
    }
    for kind, placements in kinds.items():
        if placements:
            title = f"{kind} on mesh {mesh_text(mesh)}"
            console.print(placement_table(placements.values(), title))
    scaling = getattr(run.model, "scaling", None)
    if scaling is not None:
        console.print(scaling.table())
        for warning in scaling.warnings:
            console.print(f"warning: {warning}", soft_wrap=True)
    with console.status(f"measuring the optimizer over {run.steps} steps"):
        explanation = explain_state(spec, run.steps)
    console.print(explanation.table())
    for line in explanation.lines():
        console.print(line, highlight=False, soft_wrap=True)
    if shared.plot is not None:
        explanation.plot(shared.plot)
        console.print(f"learning rates: {shared.plot}", highlight=False, soft_wrap=True)
    answer = {
        "mesh": dict(mesh.shape),
        "leaves": _leaves(kinds),
        "optimizer": explanation.as_json(),
        "scaling": None if scaling is None else scaling.as_json(),
    }
    return answer, 0


def _leaves(kinds: Mapping[str, Mapping[str, "Placement"]]) -> list[Json]:
    """Return how every array is sharded, as JSON."""
    return [
        {
            "kind": kind,
            "path": placement.path,
            "shape": placement.shape,
            "dtype": str(placement.dtype),
            "spec": list(placement.spec),
            "why": placement.reason,
            "bytes": placement.bytes_per_device,
        }
        for kind, placements in kinds.items()
        for placement in placements.values()
    ]
