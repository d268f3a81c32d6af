"""A run on a mesh beside the same run on one device, step by step: what differs, and by how much it may.

What must be equal to the bit is the initial state and every batch. The rest can differ by rounding, and how much a rounding
does depends on the model and the optimizer. So it is measured on them: on one device every step is repeated with parameters and
gradients that are moved by a few units in the last place, and the tolerance of a leaf is a multiple of what that does to it.

Each step starts from the state that the run on one device has reached, and its halves are compared alone: loss, gradients and
statistics from the same parameters, then the update from the same gradients. So no rounding has time to grow, and an optimizer
that takes the sign of a gradient cannot make a whole step of one. Beside them the training step runs on from its own start.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from shardwise.errors import NumericsError
from shardwise.module import ModelFactory
from shardwise.run import Prepared, Run, prepare
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.step import Batch, TrainStep
from shardwise.tree import named_leaves
from shardwise.weights.load import load_initial

NUDGE, TIMES, FACTOR = (
    16,
    3,
    8,
)  # units in the last place; how often; the multiple of what they do that is allowed

INITIAL, BATCH = "initial state", "batch"
LOSS, GRADIENT, STATISTIC = "loss", "gradient", "statistic"
PARAMETER, OPTIMIZER = "parameter", "optimizer state"
RUN_LOSS, RUN_PARAMETERS = "loss of the run", "parameters of the run"
# Units in the last place of the largest entry that are allowed in any case: sums are taken in another order, an update is not a sum.
FLOOR = {
    LOSS: 64,
    GRADIENT: 64,
    STATISTIC: 64,
    PARAMETER: 8,
    OPTIMIZER: 64,
    RUN_LOSS: 64,
    RUN_PARAMETERS: 8,
}

HOST = -1  # in place of a device's place on the mesh

Seen = dict[str, Mapping[str, Any]]  # kind -> leaf -> array


@dataclass(frozen=True)
class Comparison:
    """One leaf at one step, on a mesh and on one device."""

    step: int  # counted from 1, as in metrics.jsonl; 0 is the state before the first
    kind: str
    leaf: str
    difference: float  # the largest of an entry on any device; where bits must be equal, the number of entries whose are not
    tolerance: float
    devices: tuple[int, ...] = ()  # on which it is too large, by their place on the mesh

    @property
    def ratio(self) -> float:
        return (
            0.0
            if self.difference == 0
            else self.difference / self.tolerance
            if self.tolerance
            else float("inf")
        )

    @property
    def ok(self) -> bool:
        return self.ratio <= 1


@dataclass(frozen=True)
class Side:
    """A run on one mesh, ready to be taken a step at a time."""

    run: Run
    prepared: Prepared

    @property
    def spec(self) -> StateSpec:
        return self.prepared.spec

    @property
    def step(self) -> TrainStep:
        return self.prepared.step


@dataclass(frozen=True)
class Moment:
    """One step of the run on one device: what went in, what came out, and how far it may be from that elsewhere."""

    rows: Batch
    state: TrainState
    halves: tuple[Any, Any, Any]  # what `TrainStep.gradients` gave
    seen: Seen
    tolerances: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Record:
    """The run on one device."""

    initial: Mapping[str, Any]
    moments: list[Moment]


def make_side(run: Run, mesh: Mesh) -> Side:
    """The run as it is, but in float32, on `mesh`, and without what happens beside training."""
    model = _in_float32(run.model)
    run = replace(
        run,
        model=model,
        mesh=mesh,
        compute_dtype=None,
        norms=False,
        eval_data=None,
        sample=None,
        out=None,
    )
    return Side(run, prepare(run))


def _in_float32(factory: ModelFactory) -> ModelFactory:
    """Makes the same model with parameters that are not coarser than float32."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = factory(rngs)
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4:
                variable.set_value(value.astype(jnp.float32))
        return model

    return make


def begin(side: Side) -> TrainState:
    if side.run.init_from is not None:
        return load_initial(side.run.init_from, side.spec, side.run.seed)[0]
    return init_state(side.spec, side.run.seed)


def record(side: Side, steps: int) -> Record:
    """Carries out the run on one device, and measures at every step what rounding does to it."""
    state = begin(side)
    initial = on_host(named_leaves(state))
    nudged = [replace(state, params=_nudged(state.params, time)) for time in range(TIMES)]
    moments = []
    for n in range(steps):
        batch = side.step.place(side.prepared.batches(n))
        before = _copy(state)
        halves = side.step.gradients(before, batch)
        seen = _first_half(halves) | _second_half(side.step.update(before, *halves))
        state, metrics = side.step(state, batch)
        if not metrics["finite"]:
            raise NumericsError(
                f"on one device step {n + 1} is not finite (loss {metrics['loss']}): there is nothing to compare with."
            )
        seen = {kind: on_host(leaves) for kind, leaves in (seen | _whole(state, metrics)).items()}
        allowed = {kind: dict.fromkeys(leaves, 0.0) for kind, leaves in seen.items()}
        for time in range(TIMES):
            moved = _first_half(
                side.step.gradients(replace(before, params=_nudged(before.params, time)), batch)
            )
            moved |= _second_half(side.step.update(before, _nudged(halves[0], time), *halves[1:]))
            nudged[time], metrics = side.step(nudged[time], batch)
            moved |= _whole(nudged[time], metrics)
            for kind, leaves in allowed.items():
                for name in leaves:
                    leaves[name] = max(
                        leaves[name],
                        FACTOR
                        * MEASURES.get(kind, measure_gap)(
                            to_host(moved[kind][name]), seen[kind][name]
                        ),
                    )
        for kind, leaves in allowed.items():
            largest = max(map(_size, seen[kind].values()), default=0.0)
            for name, leaf in seen[kind].items():
                size = (
                    largest
                    if kind == GRADIENT
                    else _length(leaf)
                    if kind == RUN_PARAMETERS
                    else _size(leaf)
                )
                leaves[name] += FLOOR[kind] * _eps(leaf.dtype) * size
        moments.append(Moment(real_rows(side, batch), before, halves, seen, allowed))
    return Record(initial, moments)


def compare(side: Side, one: Record) -> Iterator[list[Comparison]]:
    """The comparisons of the state before the first step, then those of each step."""
    state = begin(side)
    yield _compare_bits(0, INITIAL, named_leaves(state), one.initial)
    for n, moment in enumerate(one.moments, start=1):
        batch = side.step.place(side.prepared.batches(n - 1))
        found = _compare_bits(
            n, BATCH, named_leaves(real_rows(side, batch)), named_leaves(moment.rows)
        )
        if all(c.ok for c in found):
            same, halves = on_side(side, moment)
            seen = _first_half(side.step.gradients(same, batch)) | _second_half(
                side.step.update(same, *halves)
            )
            state, metrics = side.step(state, batch)
            for kind, leaves in (seen | _whole(state, metrics)).items():
                allowed, expected = moment.tolerances[kind], moment.seen[kind]
                found += [
                    _compare(n, kind, name, leaf, expected[name], allowed[name])
                    for name, leaf in leaves.items()
                ]
        yield found


def gradients_on(side: Side, moment: Moment, rows: Batch) -> Seen:
    """Loss, gradients and statistics from the state of a moment, on any side and for any rows."""
    return _first_half(side.step.gradients(on_side(side, moment)[0], side.step.place(rows)))


def real_rows(side: Side, batch: Batch) -> Batch:
    """A placed batch back on the host, without its padding."""
    return jax.tree.map(lambda x: np.asarray(x)[: side.step.layout.rows], batch)


def on_side(side: Side, moment: Moment) -> tuple[TrainState, tuple[Any, Any, Any]]:
    """The state and the gradients of a moment, laid out as this side has them."""
    stored, whole = side.spec.shardings, side.spec.sharding(PartitionSpec())
    return jax.device_put(
        (moment.state, moment.halves), (stored, (stored.params, whole, stored.other))
    )


_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _first_half(halves: tuple[Any, Any, Any]) -> Seen:
    grads, means, other = halves
    return {
        LOSS: {"loss": means["loss"].value},
        GRADIENT: named_leaves(grads),
        STATISTIC: named_leaves(other),
    }


def _second_half(updated: tuple[TrainState, Any]) -> Seen:
    return {
        PARAMETER: named_leaves(updated[0].params),
        OPTIMIZER: named_leaves(updated[0].opt_state),
    }


def _whole(state: TrainState, metrics: Mapping[str, Any]) -> Seen:
    """All parameters as one vector: where rounding alone decides a sign, single entries go other ways."""
    params = np.concatenate([to_host(leaf).ravel() for leaf in jax.tree.leaves(state.params)])
    return {RUN_LOSS: {"loss": metrics["loss"]}, RUN_PARAMETERS: {"all": params}}


# Numbers


def _compare_bits(
    step: int, kind: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[Comparison]:
    """A leaf that only one of them has, or that has another shape, is infinitely far off."""
    alike = [
        name for name in mine if name in theirs and _raw(mine[name]).shape == theirs[name].shape
    ]
    found = [_compare(step, kind, name, mine[name], theirs[name], 0.0) for name in alike]
    return found + [
        Comparison(step, kind, name, np.inf, 0.0)
        for name in {**mine, **theirs}
        if name not in alike
    ]


def _compare(
    step: int, kind: str, name: str, leaf: Any, expected: Any, tolerance: float
) -> Comparison:
    """Every copy and every piece of the leaf, on all devices, with that part of the array on one device."""
    measure = MEASURES.get(kind, measure_gap)
    gaps: dict[int, float] = {}
    for device, index, part in _parts(leaf):
        gaps[device] = max(gaps.get(device, 0.0), measure(part, expected[index]))
    off = tuple(device for device, gap in gaps.items() if gap > tolerance and device != HOST)
    return Comparison(step, kind, name, max(gaps.values()), tolerance, off)


def _parts(leaf: Any) -> Iterator[tuple[int, Any, np.ndarray]]:
    """(place of the device on the mesh, index, values) of each shard; of a host's array, the whole."""
    if not isinstance(leaf, jax.Array):
        yield HOST, ..., np.asarray(leaf)
        return
    leaf = _raw(leaf)
    places = {device: place for place, device in enumerate(leaf.sharding.mesh.devices.flat)}
    for shard in leaf.addressable_shards:
        yield places[shard.device], shard.index, np.asarray(shard.data)


def measure_gap(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two entries; entries that are not finite must be the same."""
    if not a.size:
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(apart, nan=np.inf).max())


def _other_bits(a: np.ndarray, b: np.ndarray) -> float:
    """How many entries have other bits."""
    if a.dtype != b.dtype:
        return float(a.size)
    bits = lambda x: np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)  # noqa: E731
    return float((bits(a) != bits(b)).any(axis=1).sum())


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return _length(a.astype(np.float64) - b.astype(np.float64))


def _length(a: np.ndarray) -> float:
    return float(np.sqrt(np.square(a, dtype=np.float64).sum()))


MEASURES = {INITIAL: _other_bits, BATCH: _other_bits, RUN_PARAMETERS: _distance}


def _nudged(tree: Any, seed: int) -> Any:
    """The arrays, each entry moved up or down by NUDGE units in the last place."""
    random = np.random.default_rng(seed)

    def one(leaf: jax.Array) -> jax.Array:
        value = to_host(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        signs = random.choice(np.array([-1, 1]), value.shape)
        return jax.device_put(
            (value * (1 + NUDGE * _eps(leaf.dtype) * signs)).astype(leaf.dtype), leaf.sharding
        )

    return jax.tree.map(one, tree)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _size(leaf: np.ndarray) -> float:
    """The largest finite entry."""
    values = np.abs(leaf.astype(np.float64))
    return float(np.where(np.isfinite(values), values, 0.0).max(initial=0.0))


def _raw(leaf: Any) -> Any:
    """Random keys as the numbers that they are."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def to_host(leaf: Any) -> np.ndarray:
    return np.asarray(_raw(leaf))


def on_host(leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: to_host(leaf) for name, leaf in leaves.items()}
