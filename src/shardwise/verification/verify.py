"""`verify`: the same run on one device and on each of some meshes; either they agree, or the first leaf that does not is named."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.mesh import make_mesh, mesh_text
from shardwise.run import Run
from shardwise.sharding import Rules, show_spec
from shardwise.state import StateSpec
from shardwise.tree import named_leaves
from shardwise.verification.compare import (
    BATCH,
    GRADIENT,
    INITIAL,
    LOSS,
    OPTIMIZER,
    PARAMETER,
    RUN_LOSS,
    RUN_PARAMETERS,
    STATISTIC,
    Comparison,
    Moment,
    Record,
    Side,
    compare,
    make_side,
    record,
)
from shardwise.verification.diagnose import diagnose

COLUMNS = {
    "initial state": (INITIAL,),
    "batches": (BATCH,),
    "loss": (LOSS,),
    "gradients": (GRADIENT,),
    "statistics": (STATISTIC,),
    "update": (PARAMETER, OPTIMIZER),
    "whole run": (RUN_LOSS, RUN_PARAMETERS),
}


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same, and what is known of it."""

    step: int  # counted from 1; 0 is the state before the first
    kind: str
    leaf: str
    shape: tuple[int, ...]
    layout: str  # how the leaf is cut, such as "(-, model)"
    why: str  # it is
    difference: float
    tolerance: float
    devices: str
    also: tuple[str, ...]  # what else differs at this step
    meaning: str


@dataclass(frozen=True)
class MeshResult:
    """One mesh beside one device: the comparison of each kind that comes closest to its tolerance, and the first that exceeds it."""

    mesh: str
    worst: Mapping[str, Comparison]
    first: Difference | None
    seconds: float


@dataclass(frozen=True)
class Verification:
    steps: int
    devices: str
    results: tuple[MeshResult, ...]
    left_out: Mapping[str, str]  # meshes that the run cannot have, and why

    @property
    def ok(self) -> bool:
        return all(result.first is None for result in self.results)

    def table(self) -> Table:
        table = Table(
            title=f"{self.steps} steps on {self.devices}, beside one device", title_justify="left"
        )
        table.caption = "the largest difference, and how much of its tolerance that is"
        for column in ("mesh", *COLUMNS):
            table.add_column(column, no_wrap=True)
        for result in self.results:
            table.add_row(result.mesh, *(_cell(result, kinds) for kinds in COLUMNS.values()))
        return table

    def lines(self) -> list[str]:
        """What the table does not say."""
        found = [f"left out: {mesh}: {why}" for mesh, why in self.left_out.items()]
        for result in self.results:
            if (first := result.first) is not None:
                found += ["", *_told(result.mesh, first)]
        agree = sum(result.first is None for result in self.results)
        return [*found, "", f"{agree} of {len(self.results)} meshes agree with one device."]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "steps": self.steps,
            "devices": self.devices,
            "meshes": [
                {
                    "mesh": result.mesh,
                    "ok": result.first is None,
                    "seconds": round(result.seconds, 1),
                    "worst": {kind: {**vars(c), "ok": c.ok} for kind, c in result.worst.items()},
                    "first_difference": None if result.first is None else vars(result.first),
                }
                for result in self.results
            ],
            "left_out": dict(self.left_out),
        }


def verify(
    run: Run | Callable[[str], Run],
    meshes: Sequence[str] | None = None,
    steps: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Takes `steps` steps on one device and on each mesh, in float32, and compares them.

    run: also a function that makes it for a mesh; then what the recipe itself makes of the mesh is compared, too.
    meshes: such as "data=4,model=2", over all devices; when not said, those that the model can use.
    tell: is called with what is being done, before it is done.
    """
    if steps < 1:
        raise ConfigError(f"{steps} steps to verify; there must be at least 1.")
    devices = jax.devices()
    if jax.process_count() > 1:
        raise ConfigError(
            "`verify` compares in one process; run it on one machine, or with virtual devices."
        )
    if len(devices) < 2:
        raise ConfigError(
            "there is one device only, and nothing to compare it with: --cpu-devices 8 gives 8 virtual ones."
        )
    make = run if callable(run) else lambda mesh: _again(run)
    with jax.default_matmul_precision("highest"):
        one = make_side(make("data=1"), make_mesh("data=1", devices[:1]))
        sides, results = [], []
        left_out: dict[str, str] = {}
        for text in (
            meshes if meshes is not None else find_meshes(one.spec, one.run.rules, len(devices))
        ):
            with _leaving_out(text, left_out, is_given=meshes is not None):
                sides.append(make_side(make(text), make_mesh(text)))
        tell("one device: compiling, then steps and tolerances")
        with _as_mistakes("one device"):
            known = record(one, steps)
        for many in sides:
            text = mesh_text(many.spec.mesh)
            with _leaving_out(text, left_out, is_given=meshes is not None), _as_mistakes(text):
                results.append(_verify_mesh(one, many, known, tell))
    if not results:
        raise ConfigError(
            "\n".join(
                [
                    "there is no mesh to verify:",
                    *(f"  {mesh}: {why}" for mesh, why in left_out.items()),
                ]
            )
        )
    return Verification(
        steps, f"{len(devices)} {devices[0].platform} devices", tuple(results), left_out
    )


def find_meshes(spec: StateSpec, rules: Rules, devices: int) -> list[str]:
    """A handful over all devices that use every axis the model knows: alone, and together."""
    data = next(
        (axis for axis in ("data", *rules.batch) if axis in rules.batch and axis not in rules.fsdp),
        None,
    )
    fsdp = next(iter(rules.fsdp), None)
    tensor = _tensor_axes(spec, rules)
    found = [{axis: devices} for axis in (data, fsdp, *tensor)]
    if devices % 2 == 0:
        found += [{data: devices // 2, axis: 2} for axis in tensor]
        found += [{data: 2, fsdp: devices // 2}] if not tensor else []
    if devices % 4 == 0:
        found += [{data: devices // 4, fsdp: 2, axis: 2} for axis in tensor]
    texts = [
        ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
        for mesh in found
        if None not in mesh
    ]
    return list(dict.fromkeys(texts))


def _tensor_axes(spec: StateSpec, rules: Rules) -> list[str]:
    """The axes that annotations and rules name and that split no batch; of those that mean the same, the first."""
    leaves = {**spec.definition.params, **spec.definition.frozen, **spec.definition.other}.values()
    entries = [entry for leaf in leaves for entry in leaf.annotation or ()] + [
        entry for _, axes in rules.paths for entry in axes
    ]
    names = [
        name
        for entry in entries
        if entry is not None
        for name in ([entry] if isinstance(entry, str) else entry)
    ]
    axes = []
    for name in names:
        mapped = rules.logical.get(name, name)
        axes += [mapped] if isinstance(mapped, str) else list(mapped or ())[:1]
    return [
        axis for axis in dict.fromkeys(axes) if axis not in rules.batch and axis not in rules.fsdp
    ]


def _again(run: Run) -> Run:
    if not callable(run.data) and iter(run.data) is run.data:
        raise ConfigError(
            "the data of the run are an iterator, which can be read once. Give `verify` a function that makes the run."
        )
    return run


@contextmanager
def _leaving_out(mesh: str, left_out: dict[str, str], is_given: bool) -> Iterator[None]:
    """A mesh that was asked for by name must work; one that was found need not."""
    try:
        yield
    except ConfigError as error:
        if is_given:
            raise
        left_out[mesh] = str(error).splitlines()[0]


@contextmanager
def _as_mistakes(mesh: str) -> Iterator[None]:
    """What the user's own code raises on a mesh only, with the place in it."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the step cannot be carried out on {mesh}: {where(error)}") from error


def _verify_mesh(one: Side, many: Side, known: Record, tell: Callable[[str], None]) -> MeshResult:
    """Until the first step that differs."""
    start = time.monotonic()
    mesh = mesh_text(many.spec.mesh)
    tell(f"{mesh}: compiling, then steps")
    worst: dict[str, Comparison] = {}
    first = None
    for moment, found in zip([None, *known.moments], compare(many, known), strict=False):
        for c in found:
            if c.kind not in worst or c.ratio > worst[c.kind].ratio:
                worst[c.kind] = c
        if not all(c.ok for c in found):
            tell(f"{mesh}: differs at step {found[0].step}; trying out why")
            first = _difference(one, many, moment, found)
            break
    return MeshResult(mesh, worst, first, time.monotonic() - start)


def _difference(
    one: Side, many: Side, moment: Moment | None, found: Sequence[Comparison]
) -> Difference:
    wrong = [c for c in found if not c.ok]
    first = next((c for c in wrong if c.kind not in (LOSS, RUN_LOSS)), wrong[0])
    halves = [
        c for c in wrong if c.kind not in (RUN_LOSS, RUN_PARAMETERS)
    ] or wrong  # what they do to the run needs no telling
    also = []
    for kind in dict.fromkeys(c.kind for c in halves):
        of_kind = [c for c in wrong if c.kind == kind]
        farthest = max(of_kind, key=lambda c: c.ratio)
        number = f"{len(of_kind)} of {sum(c.kind == kind for c in found)}"
        also.append(
            f"{kind}: {number}, farthest off '{farthest.leaf}' ({_size(kind, farthest.difference, farthest.tolerance)})"
        )
    shape, layout, why = _placed(many, first)
    devices = _show_devices(many.spec.mesh, first.devices)
    meaning = diagnose(one, many, moment, found)
    return Difference(
        first.step,
        first.kind,
        first.leaf,
        shape,
        layout,
        why,
        first.difference,
        first.tolerance,
        devices,
        tuple(also),
        meaning,
    )


def _placed(many: Side, first: Comparison) -> tuple[tuple[int, ...], str, str]:
    """(shape, layout, reason) of the leaf of a comparison."""
    spec = many.spec
    if first.kind == BATCH:
        leaves = named_leaves(many.step.batch)
        return (
            leaves[first.leaf].shape if first.leaf in leaves else (),
            show_spec(many.step.layout.sharding.spec),
            "rows of the batch",
        )
    places = {
        GRADIENT: spec.params,
        PARAMETER: spec.params,
        STATISTIC: spec.other,
        OPTIMIZER: spec.opt_state,
    }
    placements, leaf = places.get(first.kind, {}), first.leaf
    if first.kind == INITIAL:
        part, _, leaf = first.leaf.partition("/")
        placements = {
            "params": spec.params,
            "frozen": spec.frozen,
            "other": spec.other,
            "opt_state": spec.opt_state,
        }.get(part, {})
    if leaf not in placements:
        return (), "whole", "belongs to no leaf"
    placement = placements[leaf]
    return placement.shape, show_spec(placement.spec), placement.reason


def _show_devices(mesh: Mesh, places: Iterable[int]) -> str:
    """ "all 8 devices", or where on the mesh they are."""
    places = list(places)
    if len(places) in (0, mesh.size):
        return f"all {mesh.size} devices" if places else "the host"
    at = [np.unravel_index(place, mesh.devices.shape) for place in places[:4]]
    names = [
        ",".join(f"{axis}={index}" for axis, index in zip(mesh.shape, indices, strict=True))
        for indices in at
    ]
    return f"{len(places)} of {mesh.size} devices: {'; '.join(names)}{' ...' if len(places) > 4 else ''}"


def _told(mesh: str, first: Difference) -> list[str]:
    place = "before the first step" if first.step == 0 else f"at step {first.step}"
    what = f"{first.kind}{' of' if first.kind == GRADIENT else ''} '{first.leaf}'"
    shape = " x ".join(map(str, first.shape)) or "scalar"
    return [
        f"{mesh} differs from one device {place}, first in the {what}",
        f"  by       {_size(first.kind, first.difference, first.tolerance)}, on {first.devices}",
        f"  layout   {first.layout} of {shape} ({first.why})",
        *(f"  {'differ' if i == 0 else '':8} {text}" for i, text in enumerate(first.also)),
        f"  usually  {first.meaning}",
    ]


def _size(kind: str, difference: float, tolerance: float) -> str:
    if kind in (INITIAL, BATCH):
        return (
            f"{difference:.0f} entries have other bits"
            if math.isfinite(difference)
            else "another shape"
        )
    return f"{difference:.2g} apart, tolerance {tolerance:.2g}"


def _cell(result: MeshResult, kinds: Iterable[str]) -> str:
    """The comparison of these kinds that is closest to its tolerance, or beyond it."""
    found = [result.worst[kind] for kind in kinds if kind in result.worst]
    if not found:
        return "-"
    c = max(found, key=lambda c: c.ratio)
    if c.kind in (INITIAL, BATCH):
        return "same bits" if c.ok else "[red]other bits[/red]"
    share = f"{c.ratio:.0%}" if c.ratio < 10 else f"{c.ratio:.0e} x"
    text = f"{c.difference:.1e} ({share})"
    return text if c.ok else f"[red]{text}[/red]"
