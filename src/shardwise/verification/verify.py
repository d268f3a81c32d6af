"""`verify`: run the same run on one device and on meshes, and compare.

Either they agree, or the result names the first leaf that differs.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from shardwise.axes import DATA
from shardwise.data.layout import num_tokens
from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.mesh import make_mesh, mesh_text, parse_sizes, show_sizes
from shardwise.module import num_experts, num_layers
from shardwise.plan.compile import check_divided, compile_run
from shardwise.run import Run
from shardwise.sharding import (
    Rules,
    axes_of_entry,
    context_axes,
    expert_axis,
    show_spec,
)
from shardwise.state import StateSpec
from shardwise.text import Json
from shardwise.tree import named_leaves
from shardwise.verification.choices import ChangedChoices
from shardwise.verification.compare import (
    Comparison,
    Evaluation,
    Quantity,
    Reference,
    ReferenceStep,
    Side,
    changed_choices,
    compare,
    make_side,
    record,
    with_attribute,
)
from shardwise.verification.diagnose import diagnose, placements_of

# Columns of the table, and the kinds of comparisons in each.
COLUMNS = {
    "initial state": (Quantity.INITIAL,),
    "batches": (Quantity.BATCH,),
    "loss": (Quantity.LOSS,),
    "gradients": (Quantity.GRADIENT,),
    "statistics": (Quantity.STATISTIC,),
    "update": (Quantity.PARAMETER, Quantity.OPTIMIZER),
    "evaluation": (Quantity.EVALUATION,),
    "entire run": (Quantity.RUN_LOSS, Quantity.RUN_PARAMETERS),
}
# Positions of at most this many devices are listed.
MAX_DEVICES = 4


@dataclass(frozen=True)
class FirstDifference:
    """The first leaf that differs, and what is known about it.

    Attributes:
        step: counted from 1. 0 is the state before the first step.
        kind: what differs.
        leaf: name of the leaf.
        shape: global shape of the leaf.
        layout: how the leaf is sharded, such as "(-, model)".
        why: the rule that decided the sharding.
        difference: largest difference of an entry, or number of entries that are not identical.
        tolerance: the largest difference that is accepted.
        devices: the devices on which it differs, as text.
        also: what else differs at this step, a line for each kind.
        meaning: what this usually means.
    """

    step: int
    kind: Quantity
    leaf: str
    shape: tuple[int, ...]
    layout: str
    why: str
    difference: float
    tolerance: float
    devices: str
    also: tuple[str, ...]
    meaning: str

    def lines(self, name: str, against: str) -> list[str]:
        """Return the difference as lines of text.

        Args:
            name: what was compared, such as the mesh.
            against: what it was compared with.
        """
        when = "before the first step" if self.step == 0 else f"at step {self.step}"
        what = "gradient of" if self.kind == Quantity.GRADIENT else self.kind
        shape = " x ".join(map(str, self.shape)) or "()"
        size = _show_difference(self.kind, self.difference, self.tolerance)
        lines = [
            f"{name} differs from {against} {when}, first in the {what} '{self.leaf}'",
            f"  size      {size}, on {self.devices}",
            f"  sharding  {self.layout}, shape {shape} ({self.why})",
        ]
        lines += [
            f"  {'' if i else 'wrong':9} {text}" for i, text in enumerate(self.also)
        ]
        return [*lines, f"  likely    {self.meaning}"]


@dataclass(frozen=True)
class MeshResult:
    """One mesh compared with one device.

    Attributes:
        mesh: the mesh, such as "data=4,model=2".
        worst: for each kind, the comparison that is closest to its tolerance, or furthest beyond.
        first: the first difference, or None if the mesh agrees with one device.
        seconds: how long the comparison took.
        note: what was not tested on this mesh, or an empty text.
        against: what it was compared with.
        choices: how many choices of experts the mesh makes differently.
    """

    mesh: str
    worst: Mapping[Quantity, Comparison]
    first: FirstDifference | None
    seconds: float
    note: str = ""
    against: str = "one device"
    choices: ChangedChoices = field(default_factory=ChangedChoices)

    def as_json(self) -> Json:
        """Return the result as a JSON object."""
        worst = {}
        for kind, comparison in self.worst.items():
            worst[kind] = {**asdict(comparison), "ok": comparison.ok}
        return {
            "mesh": self.mesh,
            "ok": self.first is None,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "choices": asdict(self.choices),
            "worst": worst,
            "first_difference": None if self.first is None else asdict(self.first),
        }


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        steps: number of steps that were compared.
        devices: the devices, as text.
        results: a result for each mesh.
        left_out: meshes that the run cannot use, and why.
        accumulation: micro-batches compared with the complete batch, on one device. None if the
            run does not accumulate.
    """

    steps: int
    devices: str
    results: tuple[MeshResult, ...]
    left_out: Mapping[str, str]
    accumulation: MeshResult | None = None

    @property
    def ok(self) -> bool:
        """Whether all meshes agree with one device, and micro-batches with the batch."""
        return all(result.first is None for result in self._all)

    @property
    def _all(self) -> tuple[MeshResult, ...]:
        accumulation = self.accumulation
        return (() if accumulation is None else (accumulation,)) + self.results

    def table(self) -> Table:
        """Return a table with a row for each mesh."""
        title = f"{self.steps} steps on {self.devices}, compared with one device"
        table = Table(title=title, title_justify="left")
        table.caption = "largest difference, and its share of the tolerance"
        columns = dict(COLUMNS)
        # Many runs have no validation data.
        if not any(Quantity.EVALUATION in result.worst for result in self.results):
            del columns["evaluation"]
        for column in ("mesh", *columns):
            table.add_column(column, no_wrap=True)
        for result in self._all:
            table.add_row(
                result.mesh, *(_cell(result, kinds) for kinds in columns.values())
            )
        return table

    def lines(self) -> list[str]:
        """Return what the table does not show: skipped meshes, differences and the verdict."""
        lines = [f"skipped {mesh}: {why}" for mesh, why in self.left_out.items()]
        lines += [
            f"{result.mesh}: {result.note}" for result in self._all if result.note
        ]
        lines += self._choice_lines()
        for result in self._all:
            if result.first is not None:
                lines += ["", *result.first.lines(result.mesh, result.against)]
        num_ok = sum(result.first is None for result in self.results)
        return [
            *lines,
            "",
            f"{num_ok} of {len(self.results)} meshes agree with one device.",
        ]

    def _choice_lines(self) -> list[str]:
        """Return how many tokens got other experts; no lines for a model without experts."""
        changed = [
            f"{result.mesh}: {result.choices}"
            for result in self._all
            if result.choices.changed
        ]
        compared = max((result.choices.total for result in self._all), default=0)
        if changed or not compared:
            return changed
        return [f"all {compared:,} choices of experts are the same on every mesh"]

    def as_json(self) -> Json:
        """Return the verification as a JSON object."""
        return {
            "ok": self.ok,
            "steps": self.steps,
            "devices": self.devices,
            "meshes": [result.as_json() for result in self.results],
            "accumulation": self.accumulation and self.accumulation.as_json(),
            "left_out": dict(self.left_out),
        }


def verify(
    run: Run | Callable[[str], Run],
    meshes: Sequence[str] | None = None,
    steps: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run `steps` steps on one device and on each mesh, in float32, and compare them.

    Args:
        run: the run, or a function from a mesh such as "data=8" to the run. With a function, what
            the recipe itself derives from the mesh is compared, too.
        meshes: meshes over all devices, such as "data=4,model=2". By default a handful that the
            model can use.
        steps: number of steps to compare.
        tell: called with a progress message before each phase.

    Raises:
        ConfigError: there is only one device, several processes, or no mesh that the run can use.
        NumericsError: a step on one device is not finite.

    Example:
        >>> shardwise.verify(run, ["data=8", "data=4,model=2"]).ok  # doctest: +SKIP
        True
    """
    devices = _check_devices(steps)
    make = run if callable(run) else _same_run(run)
    is_given = meshes is not None
    with jax.default_matmul_precision("highest"):
        first = make("data=1")
        text = _one_device(meshes or [first.mesh])
        one = make_side(first, make_mesh(text, devices[:1]))
        if meshes is None:
            # Explicit axes cannot shard tokens.
            is_explicit = one.step.spec.is_explicit
            length = None if is_explicit else num_tokens(one.step.batch)
            meshes = meshes_to_verify(one.spec, one.run.rules, len(devices), length)
            if is_explicit:
                meshes = [_with_axes(mesh, one.spec.mesh.axis_names) for mesh in meshes]
        sides: list[Side] = []
        results: list[MeshResult] = []
        skipped: dict[str, str] = {}
        for mesh in meshes:
            with _skipping(mesh, skipped, is_given):
                sides.append(make_side(make(mesh), make_mesh(mesh), one.spec))
        tell("one device: compiling, running and measuring tolerances")
        with _as_config_error("one device"):
            reference = record(one, steps)
            accumulation = _verify_accumulation(one, tell)
        while sides:
            # The programs of a mesh are freed after it. Each takes about 1,000 memory maps, and
            # Linux allows 65,530 in a process.
            many = sides.pop(0)
            mesh = mesh_text(many.spec.mesh)
            with _skipping(mesh, skipped, is_given), _as_config_error(mesh):
                many = _with_divided_work(many, tell)
                results.append(_verify_mesh(one, many, reference, tell))
    if not results:
        reasons = [f"  {mesh}: {why}" for mesh, why in skipped.items()]
        raise ConfigError("\n".join(["there is no mesh to verify:", *reasons]))
    name = f"{len(devices)} {devices[0].platform} devices"
    return Verification(steps, name, tuple(results), skipped, accumulation)


def _one_device(meshes: Sequence[str | Mesh]) -> str:
    """Return a mesh of one device that has all axes of `meshes`, which the model may name."""
    sizes = [
        parse_sizes(mesh) if isinstance(mesh, str) else mesh.shape for mesh in meshes
    ]
    axes = [DATA, *(axis for mesh in sizes for axis in mesh)]
    return show_sizes(dict.fromkeys(axes, 1))


def _with_axes(mesh: str, axes: Iterable[str]) -> str:
    """Return a mesh with all of `axes`; those that it does not have get size 1."""
    return show_sizes({**dict.fromkeys(axes, 1), **parse_sizes(mesh)})


def _check_devices(steps: int) -> list[jax.Device]:
    """Return the devices to compare, or raise if there is nothing to compare."""
    if steps < 1:
        raise ConfigError(f"steps={steps}: `verify` must compare at least 1 step.")
    if jax.process_count() > 1:
        raise ConfigError(
            f"`verify` compares in one process, but there are {jax.process_count()}. Run it on one "
            "machine, or with virtual devices (--cpu-devices 8)."
        )
    devices = jax.devices()
    if len(devices) < 2:
        raise ConfigError(
            "there is only 1 device, so there is nothing to compare. Use --cpu-devices 8 for 8 "
            "virtual devices."
        )
    return devices


def meshes_to_verify(
    spec: StateSpec, rules: Rules, num_devices: int, length: int | None = None
) -> list[str]:
    """Return a handful of meshes that use every axis the model knows, alone and combined.

    Args:
        spec: the abstract state.
        rules: the sharding rules.
        num_devices: the number of devices of each mesh.
        length: the number of tokens in a sequence. None if the examples are not sequences: then no
            mesh has a context axis.
    """
    batch_axes = [axis for axis in (DATA, *rules.batch) if axis in rules.batch]
    data = next((axis for axis in batch_axes if axis not in rules.fsdp), None)
    fsdp = next(iter(rules.fsdp), None)
    tensor = _tensor_axes(spec, rules)
    layers, experts = num_layers(spec.definition), num_experts(spec.definition)
    expert = expert_axis(rules) if experts else None
    stage = next(iter(rules.stage), None) if layers else None
    half, quarter = num_devices // 2, num_devices // 4
    meshes = [{axis: num_devices} for axis in (data, fsdp, *tensor)]
    if num_devices % 2 == 0:
        meshes += [{data: half, axis: 2} for axis in tensor]
        if not tensor:
            meshes.append({data: 2, fsdp: half})
        if stage is not None and layers % 2 == 0:
            meshes.append({stage: 2, data: half})
        shards = math.gcd(experts, half)
        if shards > 1:
            meshes.append({data: num_devices // shards, expert: shards})
    if num_devices % 4 == 0:
        meshes += [{data: quarter, fsdp: 2, axis: 2} for axis in tensor]
    if length is not None and num_devices % 2 == 0:
        shards = half if num_devices > 2 else 2
        context = [axis for axis in rules.context[:1] if length % shards == 0]
        meshes += [{data: num_devices // shards, axis: shards} for axis in context]
    texts: list[str] = []
    for mesh in meshes:
        sizes = {axis: size for axis, size in mesh.items() if axis is not None}
        if len(sizes) == len(mesh):
            texts.append(
                show_sizes({axis: size for axis, size in sizes.items() if size > 1})
            )
    return list(dict.fromkeys(texts))


def _tensor_axes(spec: StateSpec, rules: Rules) -> list[str]:
    """Return the mesh axes of annotations and rules that do not shard the batch.

    A logical name that is mapped to several axes counts as the first of them.
    """
    definition = spec.definition
    entries = []
    for leaf in {**definition.params, **definition.frozen, **definition.other}.values():
        entries += list(leaf.annotation or ())
    for _, axes in rules.path_rules:
        entries += list(axes)
    mesh_axes: list[str] = []
    for entry in entries:
        for name in axes_of_entry(entry):
            mapped = rules.logical.get(name, name)
            mesh_axes += axes_of_entry(mapped)[:1]
    others = (*rules.batch, *rules.fsdp, *rules.context)
    return [axis for axis in dict.fromkeys(mesh_axes) if axis not in others]


def _same_run(run: Run) -> Callable[[str], Run]:
    """Return a function that returns the same run for each mesh."""
    if hasattr(run.data, "__next__"):
        raise ConfigError(
            "the data of the run is an iterator, which can be read once. Pass `verify` a function "
            "that makes the run."
        )
    return lambda mesh: run


@contextmanager
def _skipping(mesh: str, skipped: dict[str, str], is_given: bool) -> Iterator[None]:
    """Skip a mesh that the run cannot use, unless the user has asked for it."""
    try:
        yield
    except ConfigError as error:
        if is_given:
            raise ConfigError(f"on {mesh}: {error}") from error
        skipped[mesh] = str(error).splitlines()[0]


@contextmanager
def _as_config_error(mesh: str) -> Iterator[None]:
    """Turn an exception of the user's code into a `ConfigError` with its place in that code."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the step fails on {mesh}: {where(error)}") from error


def _verify_accumulation(one: Side, tell: Callable[[str], None]) -> MeshResult | None:
    """Compare the first step of a run that accumulates with that of the complete batch.

    Both are computed on one device, and without dropout, whose masks differ.
    """
    run = one.run
    if run.accumulate == 1 or run.coupled_examples == "separate":
        return None
    run = replace(run, eval_data=None)
    if one.spec.definition.rngs:
        run = with_attribute(run, "deterministic")
    parts = make_side(run, one.spec.mesh)
    whole = make_side(replace(run, accumulate=1), one.spec.mesh)
    tell(f"accumulate={run.accumulate}: compiling and running")
    result = _verify_mesh(whole, parts, record(whole, 1), tell)
    name = f"accumulate={run.accumulate}"
    return replace(result, mesh=name, note="", against="accumulate=1")


def _with_divided_work(many: Side, tell: Callable[[str], None]) -> Side:
    """Return a side with its step compiled, if its mesh has a context axis.

    Raises:
        ConfigError: the context axis divides no work, so training would refuse the mesh.
    """
    if not context_axes(many.spec.mesh, many.run.rules):
        return many
    tell(f"{mesh_text(many.spec.mesh)}: compiling")
    plan, prepared = compile_run(many.run, many.prepared)
    check_divided(plan, many.run.rules)
    return replace(many, prepared=prepared)


def _verify_mesh(
    one: Side, many: Side, reference: Reference, tell: Callable[[str], None]
) -> MeshResult:
    """Compare a mesh with one device, up to the first step that differs."""
    start = time.monotonic()
    mesh = mesh_text(many.spec.mesh)
    tell(f"{mesh}: compiling and running")
    fsdp = [
        axis for axis in many.spec.rules.fsdp if many.spec.mesh.shape.get(axis, 1) > 1
    ]
    note = ""
    if fsdp and not many.num_fsdp_leaves:
        note = (
            f"no parameter can be sharded over {', '.join(fsdp)}, so it is not tested"
        )
    worst: dict[Quantity, Comparison] = {}
    first = None
    choices = ChangedChoices()
    # The initial state comes before the first step, and the evaluation after the last.
    expected_steps = [None, *reference.steps, reference.evaluation]
    for expected, comparisons in zip(
        expected_steps, compare(many, reference), strict=False
    ):
        for comparison in comparisons:
            known = worst.get(comparison.kind)
            if known is None or comparison.ratio > known.ratio:
                worst[comparison.kind] = comparison
        if isinstance(expected, ReferenceStep):
            choices += changed_choices(many, expected)
        if not all(comparison.ok for comparison in comparisons):
            tell(
                f"{mesh}: differs at step {comparisons[0].step}, looking for the cause"
            )
            first = _first_difference(one, many, expected, comparisons)
            break
    seconds = time.monotonic() - start
    return MeshResult(mesh, worst, first, seconds, note, choices=choices)


def _first_difference(
    one: Side,
    many: Side,
    expected: ReferenceStep | Evaluation | None,
    comparisons: Sequence[Comparison],
) -> FirstDifference:
    wrong = [comparison for comparison in comparisons if not comparison.ok]
    # The loss names no parameter, so a leaf is more useful.
    leaves = [
        item for item in wrong if item.kind not in (Quantity.LOSS, Quantity.RUN_LOSS)
    ]
    first = (leaves or wrong)[0]
    shape, layout, why = _placement(many, first)
    return FirstDifference(
        step=first.step,
        kind=first.kind,
        leaf=first.leaf,
        shape=shape,
        layout=layout,
        why=why,
        difference=first.difference,
        tolerance=first.tolerance,
        devices=_show_devices(many.spec.mesh, first.devices),
        also=_summaries(wrong, comparisons),
        meaning=diagnose(one, many, expected, comparisons),
    )


def _summaries(
    wrong: Sequence[Comparison], comparisons: Sequence[Comparison]
) -> tuple[str, ...]:
    """Return a line for each kind that differs: how many leaves, and the worst of them."""
    # If a single step is wrong, it is clear that the free run is.
    kinds = [item.kind for item in wrong if not item.kind.is_of_run]
    lines = []
    for kind in dict.fromkeys(kinds or [item.kind for item in wrong]):
        wrong_of_kind = [item for item in wrong if item.kind == kind]
        total = sum(item.kind == kind for item in comparisons)
        worst = max(wrong_of_kind, key=lambda item: item.ratio)
        size = _show_difference(kind, worst.difference, worst.tolerance)
        lines.append(
            f"{kind}: {len(wrong_of_kind)} of {total}, most in '{worst.leaf}' ({size})"
        )
    return tuple(lines)


def _placement(many: Side, first: Comparison) -> tuple[tuple[int, ...], str, str]:
    """Return the shape of a leaf, its sharding, and the rule that decided it."""
    spec = many.spec
    if first.kind == Quantity.BATCH:
        leaves = named_leaves(many.step.batch)
        shape = leaves[first.leaf].shape if first.leaf in leaves else ()
        return shape, show_spec(many.step.layout.sharding.spec), "examples of the batch"
    placements, leaf = placements_of(spec, first.kind), first.leaf
    if first.kind == Quantity.INITIAL:
        part, _, leaf = first.leaf.partition("/")
        if part in ("params", "frozen", "other", "opt_state"):
            placements = getattr(spec, part)
    if leaf not in placements:
        return (), "replicated", "not an array of the state"
    placement = placements[leaf]
    return placement.shape, show_spec(placement.spec), placement.reason


def _show_devices(mesh: Mesh, positions: Iterable[int]) -> str:
    """Return "all 8 devices", or where on the mesh the devices are."""
    positions = list(positions)
    if not positions:
        return "the host"
    if len(positions) == mesh.size:
        return f"all {mesh.size} devices"
    places = []
    for position in positions[:MAX_DEVICES]:
        indices = np.unravel_index(position, mesh.devices.shape)
        places.append(show_sizes(dict(zip(mesh.shape, map(int, indices), strict=True))))
    more = " ..." if len(positions) > MAX_DEVICES else ""
    return f"{len(positions)} of {mesh.size} devices: {'; '.join(places)}{more}"


def _show_difference(kind: Quantity, difference: float, tolerance: float) -> str:
    if not kind.is_exact:
        return f"{difference:.2g}, tolerance {tolerance:.2g}"
    if math.isfinite(difference):
        return f"{difference:.0f} entries are not bit-identical"
    return "another shape"


def _cell(result: MeshResult, kinds: Iterable[Quantity]) -> str:
    """Return the comparison of these kinds that is closest to its tolerance, or beyond it."""
    comparisons = [result.worst[kind] for kind in kinds if kind in result.worst]
    if not comparisons:
        return "-"
    worst = max(comparisons, key=lambda comparison: comparison.ratio)
    if worst.kind.is_exact:
        text = "identical" if worst.ok else "different"
    else:
        share = f"{worst.ratio:.0%}" if worst.ratio < 10 else f"{worst.ratio:.0e} x"
        text = f"{worst.difference:.1e} ({share})"
    return text if worst.ok else f"[red]{text}[/red]"
