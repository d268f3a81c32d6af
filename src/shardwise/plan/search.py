"""Which mesh: every way to lay the run on a number of devices, the promising ones compiled, the best first.

A candidate is a mesh with options of the recipe (rematerialization, accumulation). Before anything is compiled, exact arithmetic on
the abstract state drops what cannot fit. Of the rest the one that should be fastest is compiled next; each answer corrects what is
expected of the others, in time and in memory. Accumulation, which only saves memory, is tried where memory lacks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from shardwise.axes import BATCH, FSDP, SEARCHED
from shardwise.data import as_batches
from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh, show_sizes
from shardwise.plan.plan import Plan
from shardwise.plan.roofline import axis_rate
from shardwise.plan.target import Target
from shardwise.run import Run, describe_state
from shardwise.sharding import num_batch_shards
from shardwise.state import StateSpec
from shardwise.step import num_rows
from shardwise.text import show_bytes

SAVING = "accumulate"  # the option that never makes a step faster
HOPE = 0.85  # of the shortest computing time known, that what was not compiled yet may take


@dataclass(frozen=True)
class Candidate:
    mesh: str
    options: tuple[tuple[str, Any], ...] = ()  # such as (("accumulate", 2), ("remat", "block"))

    def __getitem__(self, name: str) -> Any:
        return dict(self.options).get(name)

    def but(self, name: str, value: Any) -> "Candidate":
        return replace(self, options=tuple(sorted({**dict(self.options), name: value}.items())))


@dataclass(frozen=True)
class Entry:
    """A candidate and what came of it."""

    candidate: Candidate
    status: str  # "compiled", "too large", "pruned", "not compiled", "refused"
    why: str = ""
    plan: Plan | None = None
    expected: float = math.inf  # seconds of a step, before it is compiled

    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "mesh": self.candidate.mesh,
            "options": dict(self.candidate.options),
            "status": self.status,
            "why": self.why,
            "seconds": plan.times.total if plan and plan.times else None,
            "bound": plan.times.bound if plan and plan.times else None,
            "peak": plan.memory.peak if plan else None,
            "items_per_second": plan.items_per_second if plan else None,
            "mfu": plan.mfu if plan else None,
            "expected": self.expected if math.isfinite(self.expected) else None,
        }


@dataclass
class Search:
    """The state of a search: `entries` is what is known so far, at any moment."""

    entries: dict[Candidate, Entry] = field(default_factory=dict)
    num_candidates: int = 0  # that exact arithmetic leaves
    num_compiled: int = 0

    @property
    def ranking(self) -> list[Entry]:
        """Best first: what fits by its time, then what does not, then what was not compiled."""
        order = {"compiled": 0, "too large": 1, "not compiled": 2, "pruned": 3, "refused": 4}
        return sorted(
            self.entries.values(),
            key=lambda e: (order[e.status], _seconds(e), e.expected, _peak(e)),
        )

    @property
    def best(self) -> Entry | None:
        first = next(iter(self.ranking), None)
        return first if first is not None and first.status == "compiled" else None


def find_meshes(num_devices: int, axes: Sequence[str] = SEARCHED) -> list[str]:
    """All meshes over `axes` that use every device; axes of size 1 are left out."""

    def factor(left: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in (d for d in range(1, left + 1) if left % d == 0):
            for rest in factor(left // size, axes[1:]):
                yield {axes[0]: size, **rest}

    found = []
    for sizes in factor(num_devices, axes):
        kept = {name: size for name, size in sizes.items() if size > 1} or {axes[0]: 1}
        found.append(show_sizes(kept))
    return list(dict.fromkeys(found))


def search(
    make: Callable[[Candidate], Run],
    compile_one: Callable[[Candidate, Run], Plan],
    target: Target,
    meshes: Sequence[str],
    options: Mapping[str, Sequence[Any]],
    *,
    budget: int | None = None,
    found: Search | None = None,
    tell: Callable[[Search, Candidate], None] = lambda search, candidate: None,
) -> Search:
    """Compiles candidates until none that is left should beat the best, or `budget` are compiled (by default a third of all, or more
    if nothing fits so far).

    make: the run of a candidate. compile_one: its plan. options: the values of each. tell: called before each compilation.
    `found` is filled while this goes on, so that an interruption loses nothing.
    """
    found = found if found is not None else Search()
    guess = _Guess(target)
    free = {name: values for name, values in options.items() if name != SAVING}
    first = {name: values[:1] for name, values in options.items() if name == SAVING}
    for mesh in meshes:
        for values in itertools.product(*{**first, **free}.values()):
            chosen = dict(zip({**first, **free}, values, strict=True))
            if not _consider(
                Candidate(mesh, tuple(sorted(chosen.items()))), make, target, guess, found
            ):
                break  # it is the mesh that cannot work
    possible = sum(entry.status == "not compiled" for entry in found.entries.values())
    found.num_candidates = possible * len(options.get(SAVING, [1]))
    third = max(1, math.ceil(found.num_candidates / 3))
    while found.num_compiled < (budget or third) or (budget is None and found.best is None):
        waiting = [entry for entry in found.entries.values() if entry.status == "not compiled"]
        if not waiting:
            break
        entry = min(waiting, key=lambda e: e.expected)
        if found.best is not None and entry.expected > _seconds(found.best) * 1.02:
            break
        candidate = entry.candidate
        tell(found, candidate)
        run = make(candidate)
        try:
            plan = compile_one(candidate, run)
        except ConfigError as error:
            found.entries[candidate] = Entry(candidate, "refused", str(error))
            continue
        found.num_compiled += 1
        if plan.fits:
            found.entries[candidate] = Entry(candidate, "compiled", "", plan, entry.expected)
        else:
            lacking = f"needs {show_bytes(plan.memory.peak)} of {show_bytes(plan.limit)}"
            found.entries[candidate] = Entry(candidate, "too large", lacking, plan, entry.expected)
            _save_more(candidate, make, target, guess, found, options)
        guess.learn(candidate, plan)
        for other in [e for e in found.entries.values() if e.status == "not compiled"]:
            if guess.is_too_large(other.candidate):
                found.entries[other.candidate] = replace(
                    other, status="pruned", why="should be too large, like those that were compiled"
                )
                _save_more(other.candidate, make, target, guess, found, options)
            else:
                found.entries[other.candidate] = replace(
                    other, expected=guess.seconds(other.candidate)
                )
    for other in [e for e in found.entries.values() if e.status == "not compiled"]:
        slower = found.best is not None and other.expected > _seconds(found.best)
        found.entries[other.candidate] = replace(
            other, why="should be slower" if slower else "not reached"
        )
    return found


def _save_more(
    candidate: Candidate,
    make: Callable[[Candidate], Run],
    target: Target,
    guess: "_Guess",
    found: Search,
    options: Mapping[str, Sequence[Any]],
) -> None:
    """The same candidate with the next value of the option that saves memory."""
    values = list(options.get(SAVING, ()))
    for value in values[values.index(candidate[SAVING]) + 1 :][:1] if values else []:
        if (other := candidate.but(SAVING, value)) not in found.entries:
            _consider(other, make, target, guess, found)


def _consider(
    candidate: Candidate,
    make: Callable[[Candidate], Run],
    target: Target,
    guess: "_Guess",
    found: Search,
) -> bool:
    """Enters a candidate as one to compile, unless it cannot work; False if that is the mesh's fault, whatever the options."""
    try:
        run = make(candidate)
        mesh = make_mesh(candidate.mesh, target.devices)
    except ConfigError as error:
        found.entries[candidate] = Entry(candidate, "refused", str(error).splitlines()[0])
        return True
    try:
        spec = describe_state(replace(run, mesh=mesh))
    except ConfigError as error:
        found.entries[candidate] = Entry(candidate, "refused", str(error).splitlines()[0])
        return False
    rows, shards = _rows(run), num_batch_shards(mesh, run.rules)
    if rows < shards * run.accumulate:
        parts = f"{shards} devices{f' in {run.accumulate} parts' if run.accumulate > 1 else ''}"
        found.entries[candidate] = Entry(
            candidate, "refused", f"a batch of {rows} rows cannot be split over {parts}"
        )
        return True
    state = float(spec.bytes_per_device)
    if state > target.limit:
        why = (
            f"parameters and optimizer alone take {show_bytes(state)} of {show_bytes(target.limit)}"
        )
        found.entries[candidate] = Entry(candidate, "pruned", why)
        return False
    guess.know(candidate, run, spec, rows / shards, state)
    found.entries[candidate] = Entry(candidate, "not compiled", expected=guess.seconds(candidate))
    return True


@dataclass(frozen=True)
class _Known:
    """What is known of a candidate before it is compiled: sizes on one device."""

    mesh: Mesh
    kind: tuple[Any, ...]  # the options that change what is computed
    others: int  # devices along axes that do not split the batch
    used: float  # bytes of the parameters where the loss uses them
    cut: float  # bytes of the gradients as they are kept
    state: float
    rows: float  # of one part, if the batch is worked off in parts
    accumulate: int


class _Guess:
    """How long a candidate should take: what computing takes elsewhere, and bytes along each axis over the rate of its links."""

    def __init__(self, target: Target):
        self.target = target
        self.known: dict[Candidate, _Known] = {}
        self.computing: dict[
            tuple[tuple[Any, ...], int], float
        ] = {}  # (kind, others) -> seconds without waiting
        self.temporaries: list[tuple[_Known, float]] = []
        self.per_row: float | None = (
            None  # bytes along the axes that do not split the batch, for each row of a device
        )
        self.waited: dict[str, float] = {}  # share of an axis' exchanges that nothing covers

    def know(
        self, candidate: Candidate, run: Run, spec: StateSpec, rows: float, state: float
    ) -> None:
        width = 2 if run.compute_dtype in ("bfloat16", "float16") else 4
        used = sum(
            math.prod(spec.at_use(path).shard_shape(p.shape)) * width
            for path, p in spec.params.items()
        )
        cut = sum(
            math.prod(spec.sharding(p.spec).shard_shape(p.shape)) * width
            for p in spec.params.values()
        )
        others = math.prod(
            size for name, size in spec.mesh.shape.items() if name not in run.rules.batch
        )
        kind = tuple(value for name, value in candidate.options if name != SAVING)
        self.known[candidate] = _Known(
            spec.mesh, kind, others, used, cut, state, rows / run.accumulate, run.accumulate
        )

    def seconds(self, candidate: Candidate) -> float:
        known, chip = self.known[candidate], self.target.chip
        total = self._computing(known)
        for axis, size in known.mesh.shape.items():
            if size == 1 or chip is None:
                continue
            if axis in FSDP:
                moved = 3 * known.used * known.accumulate
            elif axis in BATCH:
                moved = 2 * known.cut
            else:
                moved = (self.per_row or 0.0) * known.rows * known.accumulate
            total += (
                self.waited.get(axis, 0.5)
                * moved
                * (size - 1)
                / size
                / axis_rate(known.mesh, chip, axis)
            )
        return total

    def _computing(self, known: _Known) -> float:
        """As known for the same kind and cut; else in proportion, where another kind is known for both cuts; else a hope."""
        if not self.computing:
            return (
                known.others * 1e-3
            )  # nothing is known yet: those that cut only the batch come first
        if (seconds := self.computing.get((known.kind, known.others))) is not None:
            return seconds
        for (kind, others), seconds in self.computing.items():
            if kind == known.kind:
                for other in {kind for kind, _ in self.computing}:
                    here, there = (
                        self.computing.get((other, known.others)),
                        self.computing.get((other, others)),
                    )
                    if here is not None and there is not None:
                        return seconds * here / there
        return HOPE * min(self.computing.values())

    def is_too_large(self, candidate: Candidate) -> bool:
        """Whether even the least that can be hoped for, temporaries that shrink with rows and cuts, exceeds the memory."""
        known = self.known[candidate]
        least = max(
            (
                size * min(1.0, known.rows / k.rows) * min(1.0, k.others / known.others)
                for k, size in self.temporaries
                if k.kind == known.kind
            ),
            default=0.0,
        )
        return known.state + 0.9 * least > self.target.limit

    def learn(self, candidate: Candidate, plan: Plan) -> None:
        known = self.known[candidate]
        self.temporaries.append((known, plan.memory.temporaries))
        if (
            plan.times is None or not plan.fits
        ):  # the times of what does not fit are coarser: the compiler gave up on it
            return
        key = (known.kind, known.others)
        self.computing[key] = min(
            plan.times.arithmetic + plan.times.memory, self.computing.get(key, math.inf)
        )
        inner = {name for name, size in known.mesh.shape.items() if size > 1 and name not in BATCH}
        moved = sum(
            t.bytes * (2.0 if t.kind == "all-reduce" else 1.0)
            for t in plan.traffic
            if set(t.axes.split("*")) <= inner
        )
        if moved:
            self.per_row = moved / known.rows / known.accumulate
        for axis in known.mesh.axis_names:
            spent = [t for t in plan.traffic if t.axes == axis]
            if (seconds := sum(t.seconds for t in spent)) > 0:
                self.waited[axis] = sum(t.waited for t in spent) / seconds


def _rows(run: Run) -> int:
    return num_rows(as_batches(run.data)(0))


def _seconds(entry: Entry) -> float:
    return (
        entry.plan.times.total
        if entry.plan is not None and entry.plan.times is not None
        else math.inf
    )


def _peak(entry: Entry) -> float:
    return entry.plan.memory.peak if entry.plan is not None else math.inf
