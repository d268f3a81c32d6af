"""Search for the fastest mesh: consider all meshes of a number of devices, compile a few.

A candidate is a mesh with options of the recipe (rematerialization, accumulation). Before anything
is compiled, exact arithmetic on the abstract state drops the candidates that cannot fit. Then the
candidate with the shortest expected time is compiled, over and over. Each plan corrects what is
expected of the others, in time and in memory. Accumulation, which only saves memory, is tried where
memory is short.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from jax.sharding import Mesh

from shardwise.axes import BATCH, CONTEXT, EXPERT, FSDP, SEARCHED, STAGE, TENSOR
from shardwise.data import as_batches
from shardwise.data.layout import make_layout, num_tokens
from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh, show_sizes
from shardwise.models.stack import bubble
from shardwise.module import ModuleDef, num_experts, num_layers
from shardwise.plan.compile import find_idle_axes
from shardwise.plan.plan import OptionValue, Plan
from shardwise.plan.roofline import axis_rate
from shardwise.plan.target import Target
from shardwise.run import Run, describe_state
from shardwise.sharding import Pipeline, context_axes, num_batch_shards, num_stages
from shardwise.state import StateSpec
from shardwise.step import num_rows
from shardwise.text import Json, show_bytes
from shardwise.tree import Batch

# A context axis is tried for sequences of at least this many tokens. Shorter ones fit on a device,
# and an axis for examples, which communicates less, can use the devices.
LONG_SEQUENCE = 8192
# A stage axis is tried from this many devices on. Fewer can gather the parameters of a layer faster
# than a pipeline fills.
MANY_DEVICES = 32
# The share of a pipeline that is idle is expected for this many microbatches per stage.
MICROBATCHES = 4
# The option that saves memory and never makes a step faster.
SAVING = "accumulate"
# An uncompiled candidate may compute in this fraction of the best known compute time.
OPTIMISM = 0.85
# An uncompiled candidate is assumed to need at least this fraction of the memory for temporaries
# that a similar compiled candidate suggests.
MEMORY_OPTIMISM = 0.9
# The search ends when no candidate is expected to run in less than this multiple of the best time.
CLOSE_ENOUGH = 1.02
# Share of the collectives along an axis that no computation hides, before a plan shows it.
DEFAULT_WAITED = 0.5


class Status(StrEnum):
    """What became of a candidate. The order is that of the ranking."""

    COMPILED = "compiled"
    TOO_LARGE = "too large"
    NOT_COMPILED = "not compiled"
    PRUNED = "pruned"
    REFUSED = "refused"


_RANK = {status: rank for rank, status in enumerate(Status)}


@dataclass(frozen=True)
class Candidate:
    """A mesh with options of the recipe.

    Attributes:
        mesh: the mesh, such as "data=4,model=2".
        options: names and values, sorted, such as `(("accumulate", 2), ("remat", "block"))`.
    """

    mesh: str
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __getitem__(self, name: str) -> OptionValue:
        return dict(self.options).get(name)

    def with_option(self, name: str, value: OptionValue) -> "Candidate":
        """Return the candidate with one option changed or added."""
        return replace(self, options=_sorted({**dict(self.options), name: value}))


def _sorted(options: Mapping[str, OptionValue]) -> tuple[tuple[str, OptionValue], ...]:
    return tuple((name, options[name]) for name in sorted(options))


@dataclass(frozen=True)
class Entry:
    """A candidate and what became of it.

    Attributes:
        candidate: the candidate.
        status: what became of it.
        why: the reason, for any status but `COMPILED`.
        plan: its plan, if it was compiled.
        expected: expected seconds per step before it was compiled.
    """

    candidate: Candidate
    status: Status
    why: str = ""
    plan: Plan | None = None
    expected: float = math.inf

    @property
    def seconds(self) -> float:
        """Planned seconds per step, or infinity."""
        if self.plan is None or self.plan.times is None:
            return math.inf
        return self.plan.times.total

    @property
    def peak(self) -> float:
        """Planned peak memory of a device in bytes, or infinity."""
        return self.plan.memory.peak if self.plan is not None else math.inf

    def as_json(self) -> Json:
        """Return the entry as a row of the ranking, with None for unknown figures."""
        plan = self.plan
        times = plan.times if plan else None
        return {
            "mesh": self.candidate.mesh,
            "options": dict(self.candidate.options),
            "status": self.status,
            "why": self.why,
            "seconds": times.total if times else None,
            "bound": times.bound if times else None,
            "peak": plan.memory.peak if plan else None,
            "items_per_second": plan.items_per_second if plan else None,
            "mfu": plan.mfu if plan else None,
            "expected": self.expected if math.isfinite(self.expected) else None,
        }


@dataclass
class Search:
    """The results of a search. They are valid at any moment, so an interruption loses nothing.

    Attributes:
        entries: the entries so far.
        num_candidates: number of candidates that are left after exact arithmetic.
        num_compiled: number of candidates that were compiled.
    """

    entries: dict[Candidate, Entry] = field(default_factory=dict)
    num_candidates: int = 0
    num_compiled: int = 0

    @property
    def ranking(self) -> list[Entry]:
        """All entries, best first: by status, then by time."""
        return sorted(
            self.entries.values(),
            key=lambda entry: (
                _RANK[entry.status],
                entry.seconds,
                entry.expected,
                entry.peak,
            ),
        )

    @property
    def best(self) -> Entry | None:
        """The fastest candidate that was compiled and fits, or None."""
        ranking = self.ranking
        return ranking[0] if ranking and ranking[0].status == Status.COMPILED else None

    @property
    def waiting(self) -> list[Entry]:
        """The entries that could be compiled next."""
        return [
            entry
            for entry in self.entries.values()
            if entry.status == Status.NOT_COMPILED
        ]

    def add(self, entry: Entry) -> None:
        """Add an entry, or replace that of the same candidate."""
        self.entries[entry.candidate] = entry


MakeRun: TypeAlias = Callable[[Candidate], Run]
MakePlan: TypeAlias = Callable[[Candidate, Run], Plan]


def searched_axes(batch: Batch, model: ModuleDef, num_devices: int) -> list[str]:
    """Return the mesh axes that a search tries.

    Devices along the last axes are neighbors. Stages communicate least, tensor axes most.

    Args:
        batch: a batch, as arrays or shapes.
        model: the model.
        num_devices: the number of devices.
    """
    is_long = (num_tokens(batch) or 0) >= LONG_SEQUENCE
    has_stages = num_layers(model) > 1 and num_devices >= MANY_DEVICES
    return [
        *(STAGE[:1] if has_stages else ()),
        *(axis for axis in SEARCHED if axis not in TENSOR),
        *(EXPERT[:1] if num_experts(model) > 1 else ()),
        *(CONTEXT[:1] if is_long else ()),
        *(axis for axis in SEARCHED if axis in TENSOR),
    ]


def find_meshes(num_devices: int, axes: Sequence[str] = SEARCHED) -> list[str]:
    """Return all meshes over `axes` that use every device. Axes of size 1 are omitted.

    Example:
        >>> find_meshes(2)
        ['model=2', 'fsdp=2', 'data=2']
    """
    meshes = []
    for sizes in _factorizations(num_devices, len(axes)):
        mesh = {name: size for name, size in zip(axes, sizes, strict=True) if size > 1}
        meshes.append(show_sizes(mesh or {axes[0]: 1}))
    return list(dict.fromkeys(meshes))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of `count` factors, in order."""
    if count == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _factorizations(number // factor, count - 1):
                yield (factor, *rest)


def search(
    make: MakeRun,
    compile_one: MakePlan,
    target: Target,
    meshes: Sequence[str],
    options: Mapping[str, Sequence[OptionValue]],
    *,
    budget: int | None = None,
    result: Search | None = None,
    before_compile: Callable[[Search, Candidate], None] = lambda search, candidate: (
        None
    ),
) -> Search:
    """Compile candidates until no other is expected to be faster than the best one.

    Args:
        make: returns the run of a candidate.
        compile_one: returns the plan of a candidate and its run.
        target: the devices to plan for.
        meshes: the meshes to consider.
        options: the values of each option to consider.
        budget: maximum number of compilations. By default a third of the candidates, and more
            while nothing fits.
        result: filled during the search. A new one by default.
        before_compile: called before each compilation.

    Returns:
        The results: `result`, if it was given.
    """
    result = Search() if result is None else result
    searcher = _Searcher(
        make=make,
        compile_one=compile_one,
        target=target,
        options=options,
        result=result,
        predictor=_Predictor(target),
    )
    searcher.consider_all(meshes)
    limit = budget or max(1, math.ceil(result.num_candidates / 3))
    while result.num_compiled < limit or (budget is None and result.best is None):
        entry = min(result.waiting, key=lambda entry: entry.expected, default=None)
        if entry is None:
            break
        best = result.best
        if best is not None and entry.expected > best.seconds * CLOSE_ENOUGH:
            break
        before_compile(result, entry.candidate)
        searcher.compile(entry)
    searcher.explain_waiting()
    return result


@dataclass(frozen=True)
class _Searcher:
    """The steps of a search; see `search` for the fields."""

    make: MakeRun
    compile_one: MakePlan
    target: Target
    options: Mapping[str, Sequence[OptionValue]]
    result: Search
    predictor: "_Predictor"

    def consider_all(self, meshes: Sequence[str]) -> None:
        """Add all candidates with the least accumulation."""
        values = {
            name: list(choices[:1] if name == SAVING else choices)
            for name, choices in self.options.items()
        }
        for mesh in meshes:
            for chosen in itertools.product(*values.values()):
                options = dict(zip(values, chosen, strict=True))
                if not self.consider(Candidate(mesh, _sorted(options))):
                    # The mesh itself cannot work.
                    break
        num_saving = len(self.options.get(SAVING, [1]))
        self.result.num_candidates = len(self.result.waiting) * num_saving

    def consider(self, candidate: Candidate) -> bool:
        """Add a candidate, unless it cannot work.

        Returns:
            False if the mesh cannot work with any options.
        """
        try:
            run = self.make(candidate)
            mesh = make_mesh(candidate.mesh, self.target.devices)
        except ConfigError as error:
            self._refuse(candidate, str(error).splitlines()[0])
            return True
        try:
            spec = describe_state(replace(run, mesh=mesh))
            batch = as_batches(run.data)(0)
            examples = num_rows(batch)
            make_layout(batch, examples, examples, mesh, run.rules)
        except ConfigError as error:
            self._refuse(candidate, str(error).splitlines()[0])
            return False
        shards = num_batch_shards(mesh, run.rules)
        if examples < shards * run.accumulate:
            parts = f" in {run.accumulate} parts" if run.accumulate > 1 else ""
            why = f"a batch of {examples} examples cannot be sharded over {shards} devices{parts}"
            self._refuse(candidate, why)
            return True
        state_bytes = float(spec.bytes_per_device)
        limit = self.target.limit
        if state_bytes > limit:
            needed = f"{show_bytes(state_bytes)} of {show_bytes(limit)}"
            why = f"parameters and optimizer alone need {needed}"
            self.result.add(Entry(candidate, Status.PRUNED, why))
            return False
        self.predictor.add(candidate, run, spec, examples / shards)
        expected = self.predictor.seconds(candidate)
        self.result.add(Entry(candidate, Status.NOT_COMPILED, expected=expected))
        return True

    def _refuse(self, candidate: Candidate, why: str) -> None:
        self.result.add(Entry(candidate, Status.REFUSED, why))

    def compile(self, entry: Entry) -> None:
        """Compile a candidate and update what is expected of the others."""
        candidate = entry.candidate
        run = self.make(candidate)
        try:
            plan = self.compile_one(candidate, run)
        except ConfigError as error:
            self._refuse(candidate, str(error))
            return
        self.result.num_compiled += 1
        if idle := find_idle_axes(plan, run.rules):
            # A model whose tokens cannot stay sharded cannot use other context axes either.
            for other in (entry, *self.result.waiting):
                if self.predictor.sizes[other.candidate].num_context > 1:
                    self._refuse(other.candidate, idle[0].fact)
            return
        if plan.fits:
            self.result.add(replace(entry, status=Status.COMPILED, plan=plan))
        else:
            why = f"needs {show_bytes(plan.memory.peak)} of {show_bytes(plan.limit)}"
            self.result.add(replace(entry, status=Status.TOO_LARGE, why=why, plan=plan))
            self._save_memory(candidate)
        self.predictor.learn(candidate, plan)
        self._update_waiting()

    def _update_waiting(self) -> None:
        for entry in self.result.waiting:
            if self.predictor.is_too_large(entry.candidate):
                why = "expected to be too large, judging by those that were compiled"
                self.result.add(replace(entry, status=Status.PRUNED, why=why))
                self._save_memory(entry.candidate)
            else:
                expected = self.predictor.seconds(entry.candidate)
                self.result.add(replace(entry, expected=expected))

    def _save_memory(self, candidate: Candidate) -> None:
        """Consider the same candidate with the next value of the option that saves memory."""
        values = list(self.options.get(SAVING, ()))
        if not values:
            return
        following = values[values.index(candidate[SAVING]) + 1 :]
        if following:
            other = candidate.with_option(SAVING, following[0])
            if other not in self.result.entries:
                self.consider(other)

    def explain_waiting(self) -> None:
        """Note why the remaining candidates were not compiled."""
        best = self.result.best
        for entry in self.result.waiting:
            is_slower = best is not None and entry.expected > best.seconds
            why = "expected to be slower" if is_slower else "not reached"
            self.result.add(replace(entry, why=why))


# The options of a candidate that change what is computed.
_Kind: TypeAlias = tuple[OptionValue, ...]


@dataclass(frozen=True)
class _Sizes:
    """What is known about a candidate before it is compiled. Sizes are those of one device.

    Attributes:
        mesh: the mesh.
        kind: the options that change what is computed.
        num_context: number of devices along the axes that shard tokens.
        num_tensor: number of devices along the axes that shard neither examples nor tokens.
        used_bytes: bytes of the parameters in the layout in which the loss uses them.
        stored_bytes: bytes of the gradients in the layout in which parameters are stored.
        state_bytes: bytes of the training state.
        examples: examples of one micro-batch. A quarter of the tokens of an example is 0.25.
        accumulate: number of micro-batches.
        busy: the share of the time in which a stage of a pipeline works; 1 without a pipeline.
    """

    mesh: Mesh
    kind: _Kind
    num_context: int
    num_tensor: int
    used_bytes: float
    stored_bytes: float
    state_bytes: float
    examples: float
    accumulate: int
    busy: float


class _Predictor:
    """Predicts the time and memory of candidates from the plans of others.

    The time of a candidate is that of its computation, taken from a plan that computes the same,
    plus the time to move the bytes that each mesh axis implies over its links.
    """

    def __init__(self, target: Target):
        self.target = target
        self.sizes: dict[Candidate, _Sizes] = {}
        # (kind, num_tensor) -> seconds of a step without waiting for collectives.
        self.computing: dict[tuple[_Kind, int], float] = {}
        self.temporaries: list[tuple[_Sizes, float]] = []
        # Bytes of activations along expert, context and tensor axes, for each example of a device.
        self.expert_bytes = 0.0
        self.context_bytes = 0.0
        self.tensor_bytes = 0.0
        # Share of the collectives along each axis that no computation hides.
        self.waited: dict[str, float] = {}

    def add(
        self, candidate: Candidate, run: Run, spec: StateSpec, examples: float
    ) -> None:
        """Add a candidate with `examples` examples per device."""
        item_bytes = 2 if run.compute_dtype in ("bfloat16", "float16") else 4
        used = stored = 0
        for path, placement in spec.params.items():
            used += math.prod(spec.at_use(path).shard_shape(placement.shape))
            stored += math.prod(
                spec.sharding(placement.spec).shard_shape(placement.shape)
            )
        axes = spec.mesh.shape.items()
        context = context_axes(spec.mesh, run.rules)
        num_context = math.prod(spec.mesh.shape[axis] for axis in context)
        stages = num_stages(spec.mesh, run.rules)
        self.sizes[candidate] = _Sizes(
            mesh=spec.mesh,
            kind=tuple(value for name, value in candidate.options if name != SAVING),
            num_context=num_context,
            num_tensor=math.prod(
                size
                for name, size in axes
                if name not in (*run.rules.batch, *run.rules.context)
            ),
            used_bytes=used * item_bytes,
            stored_bytes=stored * item_bytes,
            state_bytes=float(spec.bytes_per_device),
            examples=examples / run.accumulate / num_context,
            accumulate=run.accumulate,
            busy=1 - bubble(stages, Pipeline(MICROBATCHES * stages, run.rounds)),
        )

    def seconds(self, candidate: Candidate) -> float:
        """Return the expected seconds per step of a candidate."""
        sizes, chip = self.sizes[candidate], self.target.chip
        total = self._compute_seconds(sizes) / sizes.busy
        if chip is None:
            return total
        for axis, size in sizes.mesh.shape.items():
            if size == 1:
                continue
            if axis in STAGE:
                # The activations of one microbatch at a time, which is little.
                moved = 0.0
            elif axis in FSDP:
                # Parameters are gathered for the forward and for the backward pass, and gradients
                # reduced, once for each micro-batch.
                moved = 3 * sizes.used_bytes * sizes.accumulate
            elif axis in BATCH:
                # An all-reduce of the gradients sends each byte twice.
                moved = 2 * sizes.stored_bytes
                if axis in EXPERT:
                    moved += self.expert_bytes * sizes.examples * sizes.accumulate
            elif axis in CONTEXT:
                moved = self.context_bytes * sizes.examples * sizes.accumulate
                if not any(sizes.mesh.shape.get(name, 1) > 1 for name in FSDP):
                    # FSDP axes reduce the gradients over context as well.
                    moved += 2 * sizes.stored_bytes
            else:
                moved = self.tensor_bytes * sizes.examples * sizes.accumulate
            waited = self.waited.get(axis, DEFAULT_WAITED)
            total += (
                waited * moved * (size - 1) / size / axis_rate(sizes.mesh, chip, axis)
            )
        return total

    def _compute_seconds(self, sizes: _Sizes) -> float:
        """Return the expected seconds of computation.

        They are known for the same options and the same tensor parallelism. Otherwise they scale as
        they do for other options that are known for both. Otherwise they are an optimistic guess,
        so that the candidate is tried.
        """
        known = self.computing
        if not known:
            # Candidates that only shard the batch come first.
            return sizes.num_tensor * 1e-3
        if (sizes.kind, sizes.num_tensor) in known:
            return known[sizes.kind, sizes.num_tensor]
        for (kind, num_tensor), seconds in known.items():
            if kind != sizes.kind:
                continue
            for other in {kind for kind, _ in known}:
                here = known.get((other, sizes.num_tensor))
                there = known.get((other, num_tensor))
                if here is not None and there is not None:
                    return seconds * here / there
        return OPTIMISM * min(known.values())

    def is_too_large(self, candidate: Candidate) -> bool:
        """Return whether a candidate should not fit even under optimistic assumptions.

        These are that temporaries shrink in proportion to the examples and the tensor parallelism
        of a device.
        """
        sizes = self.sizes[candidate]
        least = 0.0
        for other, size in self.temporaries:
            if other.kind == sizes.kind:
                by_examples = min(1.0, sizes.examples / other.examples)
                by_tensor = min(1.0, other.num_tensor / sizes.num_tensor)
                least = max(least, size * by_examples * by_tensor)
        return sizes.state_bytes + MEMORY_OPTIMISM * least > self.target.limit

    def learn(self, candidate: Candidate, plan: Plan) -> None:
        """Learn from the plan of a candidate."""
        sizes = self.sizes[candidate]
        self.temporaries.append((sizes, plan.memory.temporaries))
        # The compiler stops optimizing a program that does not fit, so its times are too coarse.
        if plan.times is None or not plan.fits:
            return
        key = (sizes.kind, sizes.num_tensor)
        seconds = (plan.times.arithmetic + plan.times.memory) * (1 - plan.bubble)
        self.computing[key] = min(seconds, self.computing.get(key, math.inf))
        others = (*BATCH, *CONTEXT)
        tensor = {axis for axis in sizes.mesh.axis_names if axis not in others}
        if moved := _moved_bytes(plan, tensor):
            self.tensor_bytes = moved / sizes.examples / sizes.accumulate
        if moved := _moved_bytes(plan, set(EXPERT)):
            self.expert_bytes = moved / sizes.examples / sizes.accumulate
        if moved := _moved_bytes(plan, set(CONTEXT)):
            self.context_bytes = moved / sizes.examples / sizes.accumulate
        for axis in sizes.mesh.axis_names:
            along = [traffic for traffic in plan.traffic if traffic.axes == axis]
            total = sum(traffic.seconds for traffic in along)
            if total > 0:
                self.waited[axis] = sum(traffic.waited for traffic in along) / total


def _moved_bytes(plan: Plan, axes: set[str]) -> float:
    """Return the bytes of the collectives that span only `axes`. An all-reduce moves them twice."""
    return sum(
        traffic.bytes * (2.0 if traffic.kind == "all-reduce" else 1.0)
        for traffic in plan.traffic
        if set(traffic.axes.split("*")) <= axes
    )
