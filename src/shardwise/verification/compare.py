"""Compare a run on a mesh with the same run on one device, step by step.

The initial state and every batch must be bit-identical. Everything else may differ by rounding, and
how much a rounding error grows depends on the model and the optimizer. So it is measured: on one
device every step is repeated with parameters and gradients that are perturbed by a few units in the
last place. The tolerance of a leaf is a multiple of the effect.

Two independent runs drift apart, and an optimizer that takes the sign of a gradient turns a
rounding error into a full step, so a bound on free runs says little. Therefore each step starts
from the state of the run on one device, and its halves are compared separately: loss, gradients and
statistics from the same parameters, then the update from the same gradients. The free run is
compared as well, as one number. Every shard and every replica on every device is compared, not only
the first.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from types import EllipsisType
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from shardwise.data.batches import is_plain
from shardwise.data.evaluation import Once
from shardwise.data.layout import map_rows
from shardwise.errors import NumericsError
from shardwise.loop import evaluate
from shardwise.module import ModelFactory, call_factory
from shardwise.run import Prepared, Run, prepare
from shardwise.sharding import Rules, axes_of_entry
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.step import Gradients, LossValue, Metrics, TrainStep, num_rows
from shardwise.tracing.choices import Choices
from shardwise.tree import Batch, DType, PyTree, is_key, named_leaves
from shardwise.verification.choices import (
    ChangedChoices,
    HostChoices,
    choice_reader,
    choices_to_host,
    compare_choices,
)
from shardwise.weights.load import load_initial

# How far parameters and gradients are perturbed to measure rounding, in units in the last place.
NUDGE_ULPS = 16
# How often, with different random signs.
NUM_NUDGES = 3
# A leaf may differ by this multiple of the largest effect.
SAFETY_FACTOR = 8


class Quantity(StrEnum):
    """What is compared."""

    INITIAL = "initial state"
    BATCH = "batch"
    LOSS = "loss"
    GRADIENT = "gradient"
    STATISTIC = "statistic"
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer state"
    EVALUATION = "evaluation metric"
    RUN_LOSS = "loss of the run"
    RUN_PARAMETERS = "parameters of the run"

    @property
    def is_exact(self) -> bool:
        """Whether it must be bit-identical."""
        return self in (Quantity.INITIAL, Quantity.BATCH)

    @property
    def is_of_run(self) -> bool:
        """Whether it belongs to the free run, not to a single step."""
        return self in (Quantity.RUN_LOSS, Quantity.RUN_PARAMETERS)


# Units in the last place of the largest entry that are tolerated in any case. Sums are taken in
# another order on a mesh. An update of parameters has no sums.
FLOOR_ULPS = {
    Quantity.LOSS: 64,
    Quantity.GRADIENT: 64,
    Quantity.STATISTIC: 64,
    Quantity.PARAMETER: 8,
    Quantity.OPTIMIZER: 64,
    Quantity.EVALUATION: 64,
    Quantity.RUN_LOSS: 64,
    Quantity.RUN_PARAMETERS: 8,
}

# The host, in place of the position of a device on the mesh.
HOST = -1

Array: TypeAlias = jax.Array | np.ndarray
# kind -> leaf -> array
Values: TypeAlias = dict[Quantity, Mapping[str, Array]]
HostValues: TypeAlias = dict[Quantity, dict[str, np.ndarray]]
Tolerances: TypeAlias = dict[Quantity, dict[str, float]]
# Indexes the part of an array that a shard holds.
_Index: TypeAlias = tuple[slice, ...] | EllipsisType
Tree = TypeVar("Tree", bound=PyTree)


@dataclass(frozen=True)
class Comparison:
    """One leaf at one step, on a mesh and on one device.

    Attributes:
        step: counted from 1 as in metrics.jsonl. 0 is the state before the first step.
        kind: what is compared.
        leaf: name of the leaf.
        difference: largest difference of an entry on any device. For a kind that must be
            bit-identical, the number of entries that differ.
        tolerance: the largest difference that is accepted.
        devices: positions on the mesh of the devices on which the difference is too large.
    """

    step: int
    kind: Quantity
    leaf: str
    difference: float
    tolerance: float
    devices: tuple[int, ...] = ()

    @property
    def ratio(self) -> float:
        """The difference as a multiple of its tolerance."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.tolerance if self.tolerance else float("inf")

    @property
    def ok(self) -> bool:
        """Whether the difference is within its tolerance."""
        return self.ratio <= 1


@dataclass(frozen=True)
class Side:
    """A run on one mesh, ready to take single steps.

    Attributes:
        run: the run, in float32.
        prepared: `prepare(run)`.
    """

    run: Run
    prepared: Prepared

    @property
    def spec(self) -> StateSpec:
        """The abstract state."""
        return self.prepared.spec

    @property
    def step(self) -> TrainStep:
        """The training step."""
        return self.prepared.step

    def batch(self, n: int) -> Batch:
        """Return the batch of step `n`, counted from 0, on the mesh."""
        return self.step.place(self.prepared.batches(n))

    @cached_property
    def _choice_reader(self) -> Callable[[TrainState, Batch], Choices]:
        """Compiled once for all steps."""
        return choice_reader(self.run, self.step)

    def choices(self, state: TrainState, batch: Batch) -> HostChoices:
        """Return the choices in the forward pass of a step; there are none without `top_k`.

        Args:
            state: the state before the step.
            batch: the batch, on the mesh.
        """
        choices = self._choice_reader(state, batch)
        return choices_to_host(choices, self.step.layout.rows)

    @property
    def num_fsdp_leaves(self) -> int:
        """The number of parameters that are sharded over an FSDP axis."""
        fsdp = set(self.spec.rules.fsdp)
        return sum(
            any(fsdp.intersection(axes_of_entry(entry)) for entry in placement.spec)
            for placement in self.spec.params.values()
        )

    def evaluation_batches(self) -> list[Batch]:
        """Return a batch of the validation data, and a shorter one if the last one is shorter.

        Empty without validation data.
        """
        data = self.prepared.eval_batches
        if data is None:
            return []
        if isinstance(data, Once):
            largest = max(data.first, key=num_rows)
            shorter = [b for b in data.first if num_rows(b) < num_rows(largest)]
            return [largest, *shorter[:1]]
        batch = next(data.once())
        rows = num_rows(batch)
        rest = len(data.source) % rows if is_plain(data) else 0
        return [batch, first_rows(batch, rest)] if rest else [batch]

    def on_host(self, batch: Batch) -> Batch:
        """Return a batch from the mesh on the host, without its padding."""
        rows = self.step.layout.rows
        return map_rows(lambda x: np.asarray(x)[:rows], jax.device_get(batch))


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the run on one device.

    Attributes:
        batch: the batch, on the host.
        state: the state before the step.
        gradients: what `TrainStep.gradients` returned.
        values: the values to compare with.
        tolerances: how far values on a mesh may be from these.
        choices: the choices of experts in the forward pass.
    """

    batch: Batch
    state: TrainState
    gradients: Gradients
    values: HostValues
    tolerances: Tolerances
    choices: HostChoices


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the initial state on one device, without padding.

    Attributes:
        state: the initial state.
        batches: the batches, on the host.
        metrics: the metrics to compare with.
        tolerances: how far metrics on a mesh may be from these.
    """

    state: TrainState
    batches: list[Batch]
    metrics: dict[str, float]
    tolerances: dict[str, float]


@dataclass(frozen=True)
class Reference:
    """The run on one device.

    Attributes:
        initial: the state before the first step.
        steps: the steps.
        evaluation: the metrics of the initial state; None without validation data.
    """

    initial: Mapping[str, np.ndarray]
    steps: list[ReferenceStep]
    evaluation: Evaluation | None


def make_side(run: Run, mesh: Mesh, like: StateSpec | None = None) -> Side:
    """Return a run on `mesh`, in float32, without samples and files.

    Args:
        run: the run.
        mesh: the mesh.
        like: the state of the run on another mesh. If given, the smallest parameters are sharded
            over the FSDP axes, too. `Rules.fsdp_min_size` would leave small models replicated, and
            the axis would not be tested.
    """
    run = replace(
        run,
        model=_in_float32(run.model),
        mesh=mesh,
        rules=run.rules if like is None else _shard_all(run.rules, mesh, like),
        compute_dtype=None,
        norms=False,
        sample=None,
        out=None,
    )
    return Side(run, prepare(run))


def _shard_all(rules: Rules, mesh: Mesh, like: StateSpec) -> Rules:
    """Return rules with the smallest `fsdp_min_size` that the parameters allow on `mesh`."""
    shards = math.prod(mesh.shape.get(axis, 1) for axis in rules.fsdp)
    # A parameter whose shards are that large must have a dimension that `shards` divides.
    indivisible = [
        math.prod(placement.shape) // shards + 1
        for placements in (like.params, like.frozen, like.other, like.opt_state)
        for placement in placements.values()
        if not any(dim % shards == 0 for dim in placement.shape)
    ]
    smallest = max(indivisible, default=0)
    return replace(rules, fsdp_min_size=min(smallest, rules.fsdp_min_size))


def with_attribute(run: Run, attribute: str) -> Run:
    """Return a run whose loss sets an attribute to True in every layer that has it."""

    @wraps(run.loss)
    def loss(
        model: nnx.Module, batch: Batch, **arguments: nnx.Rngs | jax.Array
    ) -> LossValue:
        model.set_attributes(raise_if_not_found=False, **{attribute: True})
        return run.loss(model, batch, **arguments)

    return replace(run, loss=loss)


def first_rows(batch: Batch, rows: int) -> Batch:
    """Return the first examples of a batch."""
    return map_rows(lambda x: np.asarray(x)[:rows], batch)


def _in_float32(factory: ModelFactory) -> ModelFactory:
    """Return a factory of the same model whose parameters have at least float32 precision."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = call_factory(factory, rngs)
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4:
                variable.set_value(value.astype(jnp.float32))
        return model

    return make


def initial_state(side: Side) -> TrainState:
    """Return the state that the run starts from."""
    if side.run.init_from is not None:
        return load_initial(side.run.init_from, side.spec, side.run.seed)[0]
    return init_state(side.spec, side.run.seed)


def record(side: Side, num_steps: int) -> Reference:
    """Run on one device, and measure the effect of rounding at every step.

    Raises:
        NumericsError: a loss or a gradient is non-finite, so there is nothing to compare with.
    """
    state = initial_state(side)
    initial = to_host(named_leaves(state))
    evaluation = _record_evaluation(side, _copy(state))
    # A step donates its state, so every run needs its own copy.
    nudged = []
    for seed in range(NUM_NUDGES):
        copied = _copy(state)
        nudged.append(replace(copied, params=_nudge(copied.params, seed)))
    steps = []
    for n in range(num_steps):
        batch = side.batch(n)
        before = _copy(state)
        gradients = side.step.gradients(before, batch)
        computed = _step_values(side, before, gradients, gradients)
        state, metrics = side.step(state, batch)
        if not metrics["finite"]:
            raise NumericsError(
                f"step {n + 1} on one device is not finite (loss {metrics['loss']}), so there is "
                "nothing to compare with."
            )
        computed |= _run_values(state, metrics)
        values = {kind: to_host(leaves) for kind, leaves in computed.items()}
        effects: Tolerances = {
            kind: dict.fromkeys(leaves, 0.0) for kind, leaves in values.items()
        }
        for seed in range(NUM_NUDGES):
            perturbed = replace(before, params=_nudge(before.params, seed))
            grads, means, other = gradients
            nudged_gradients = (_nudge(grads, seed), means, other)
            moved = _step_values(
                side, before, side.step.gradients(perturbed, batch), nudged_gradients
            )
            nudged[seed], metrics = side.step(nudged[seed], batch)
            _add_effects(effects, moved | _run_values(nudged[seed], metrics), values)
        tolerances = _tolerances(effects, values)
        choices = side.choices(before, batch)
        on_host = side.on_host(batch)
        steps.append(
            ReferenceStep(on_host, before, gradients, values, tolerances, choices)
        )
    return Reference(initial, steps, evaluation)


def _record_evaluation(side: Side, state: TrainState) -> Evaluation | None:
    """Evaluate the initial state without padding, and measure the effect of rounding."""
    step, batches = side.prepared.eval_step, side.evaluation_batches()
    if step is None or not batches:
        return None
    unpadded = replace(step, pads=False)
    metrics = evaluate(unpadded, state, batches)
    tolerances = {}
    floor = FLOOR_ULPS[Quantity.EVALUATION] * _eps(np.dtype("f4"))
    nudged = [
        evaluate(unpadded, replace(state, params=_nudge(state.params, seed)), batches)
        for seed in range(NUM_NUDGES)
    ]
    for name, value in metrics.items():
        effect = max(abs(other[name] - value) for other in nudged)
        tolerances[name] = SAFETY_FACTOR * effect + floor * abs(value)
    return Evaluation(state, batches, metrics, tolerances)


def evaluation_on(
    side: Side, expected: Evaluation, batches: Sequence[Batch]
) -> dict[str, float]:
    """Return the metrics of the state of a reference, for any batches."""
    assert side.prepared.eval_step is not None
    state = jax.device_put(expected.state, side.spec.shardings)
    rows = num_rows(expected.batches[0])
    return evaluate(side.prepared.eval_step, state, batches, rows=rows)


def compare(side: Side, reference: Reference) -> Iterator[list[Comparison]]:
    """Yield the comparisons of the initial state, of each step, and of the evaluation."""
    state = initial_state(side)
    yield _compare_bits(0, Quantity.INITIAL, named_leaves(state), reference.initial)
    for n, expected in enumerate(reference.steps, start=1):
        batch = side.batch(n - 1)
        batch_leaves = named_leaves(side.on_host(batch))
        comparisons = _compare_bits(
            n, Quantity.BATCH, batch_leaves, named_leaves(expected.batch)
        )
        if all(comparison.ok for comparison in comparisons):
            before, gradients = on_side(side, expected)
            values = _step_values(
                side, before, side.step.gradients(before, batch), gradients
            )
            state, metrics = side.step(state, batch)
            values |= _run_values(state, metrics)
            for kind, leaves in values.items():
                for name, leaf in leaves.items():
                    tolerance = expected.tolerances[kind][name]
                    other = expected.values[kind][name]
                    comparisons.append(_compare(n, kind, name, leaf, other, tolerance))
        yield comparisons
    if reference.evaluation is not None:
        evaluation = reference.evaluation
        measured = evaluation_on(side, evaluation, side.evaluation_batches())
        yield [
            Comparison(
                step=0,
                kind=Quantity.EVALUATION,
                leaf=name,
                difference=abs(measured[name] - value),
                tolerance=evaluation.tolerances[name],
            )
            for name, value in evaluation.metrics.items()
        ]


def changed_choices(side: Side, expected: ReferenceStep) -> ChangedChoices:
    """Return how many choices of a reference step are made differently on this side."""
    if not expected.choices:
        return ChangedChoices()
    state, _ = on_side(side, expected)
    choices = side.choices(state, side.step.place(expected.batch))
    return compare_choices(expected.choices, choices)


def gradients_on(side: Side, expected: ReferenceStep, batch: Batch) -> Values:
    """Return loss, gradients and statistics from the state of a reference step, for any batch."""
    state, _ = on_side(side, expected)
    return _gradient_values(side.step.gradients(state, side.step.place(batch)))


def on_side(side: Side, expected: ReferenceStep) -> tuple[TrainState, Gradients]:
    """Return the state and the gradients of a reference step, sharded as they are on this side."""
    stored, replicated = side.spec.shardings, side.spec.sharding(PartitionSpec())
    shardings = (stored, (stored.params, replicated, stored.other))
    moved: tuple[TrainState, Gradients] = jax.device_put(
        (expected.state, expected.gradients), shardings
    )
    return moved


_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _step_values(
    side: Side, before: TrainState, gradients: Gradients, update_gradients: Gradients
) -> Values:
    """Return the values of both halves of a step: `gradients`, and the update from others."""
    updated, _ = side.step.update(before, *update_gradients)
    return {
        **_gradient_values(gradients),
        Quantity.PARAMETER: named_leaves(updated.params),
        Quantity.OPTIMIZER: named_leaves(updated.opt_state),
    }


def _gradient_values(gradients: Gradients) -> Values:
    grads, means, other = gradients
    return {
        Quantity.LOSS: {"loss": means["loss"].value},
        Quantity.GRADIENT: named_leaves(grads),
        Quantity.STATISTIC: named_leaves(other),
    }


def _run_values(state: TrainState, metrics: Metrics) -> Values:
    """Return the values of the free run.

    All parameters are one vector: where rounding decides the sign of an update, single entries
    may go either way.
    """
    leaves = [leaf_to_host(leaf).ravel() for leaf in jax.tree.leaves(state.params)]
    return {
        Quantity.RUN_LOSS: {"loss": metrics["loss"]},
        Quantity.RUN_PARAMETERS: {"all": np.concatenate(leaves)},
    }


# Tolerances


def _add_effects(effects: Tolerances, moved: Values, values: HostValues) -> None:
    """Raise the effect of rounding on each leaf to that of one perturbed step."""
    for kind, leaves in effects.items():
        measure = _measure(kind)
        for name in leaves:
            effect = measure(leaf_to_host(moved[kind][name]), values[kind][name])
            leaves[name] = max(leaves[name], effect)


def _tolerances(effects: Tolerances, values: HostValues) -> Tolerances:
    tolerances: Tolerances = {}
    for kind, leaves in values.items():
        # A gradient that is zero but for rounding is small next to the others.
        largest = max(map(_largest_entry, leaves.values()), default=0.0)
        tolerances[kind] = {}
        for name, leaf in leaves.items():
            if kind == Quantity.GRADIENT:
                scale = largest
            elif kind == Quantity.RUN_PARAMETERS:
                scale = _norm(leaf)
            else:
                scale = _largest_entry(leaf)
            floor = FLOOR_ULPS[kind] * _eps(leaf.dtype) * scale
            tolerances[kind][name] = SAFETY_FACTOR * effects[kind][name] + floor
    return tolerances


def _nudge(tree: Tree, seed: int) -> Tree:
    """Return arrays with each number moved up or down by `NUDGE_ULPS`. Integers are unchanged."""
    random = np.random.default_rng(seed)

    def move(value: np.ndarray, eps: float) -> np.ndarray:
        signs = random.choice(np.array([-1, 1]), value.shape)
        return value * (1 + NUDGE_ULPS * eps * signs)

    def nudge(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        value, eps = leaf_to_host(leaf), _eps(leaf.dtype)
        if np.iscomplexobj(value):
            moved = move(value.real, eps) + 1j * move(value.imag, eps)
        else:
            moved = move(value, eps)
        placed: jax.Array = jax.device_put(moved.astype(leaf.dtype), leaf.sharding)
        return placed

    nudged: Tree = jax.tree.map(nudge, tree)
    return nudged


# Differences


def _compare_bits(
    step: int,
    kind: Quantity,
    leaves: Mapping[str, Array],
    expected: Mapping[str, np.ndarray],
) -> list[Comparison]:
    """Compare leaves that must be bit-identical.

    The difference of a leaf that only one side has, or that has another shape, is infinite.
    """
    comparisons: list[Comparison] = []
    unmatched: list[Comparison] = []
    for name in {**leaves, **expected}:
        is_in_both = name in leaves and name in expected
        if is_in_both and _raw(leaves[name]).shape == expected[name].shape:
            comparisons.append(
                _compare(step, kind, name, leaves[name], expected[name], 0.0)
            )
        else:
            unmatched.append(Comparison(step, kind, name, np.inf, 0.0))
    return comparisons + unmatched


def _compare(
    step: int,
    kind: Quantity,
    name: str,
    leaf: Array,
    expected: np.ndarray,
    tolerance: float,
) -> Comparison:
    """Compare every shard and every replica of a leaf with that part of the array on one device."""
    measure = _measure(kind)
    differences: dict[int, float] = {}
    for position, index, part in _parts(leaf):
        difference = measure(part, expected[index])
        differences[position] = max(differences.get(position, 0.0), difference)
    wrong = [position for position, value in differences.items() if value > tolerance]
    devices = tuple(position for position in wrong if position != HOST)
    return Comparison(step, kind, name, max(differences.values()), tolerance, devices)


def _parts(leaf: Array) -> Iterator[tuple[int, _Index, np.ndarray]]:
    """Yield the position of the device, the index and the values of each shard."""
    if not isinstance(leaf, jax.Array):
        yield HOST, ..., np.asarray(leaf)
        return
    array = _raw(leaf)
    assert isinstance(array, jax.Array)
    assert isinstance(array.sharding, jax.sharding.NamedSharding)
    devices = array.sharding.mesh.devices.flat
    positions = {device: position for position, device in enumerate(devices)}
    for shard in array.addressable_shards:
        yield positions[shard.device], shard.index, np.asarray(shard.data)


_Measure: TypeAlias = Callable[[np.ndarray, np.ndarray], float]


def _measure(kind: Quantity) -> _Measure:
    """Return the function that measures the difference of two arrays of a kind."""
    if kind.is_exact:
        return _count_different
    return _distance if kind == Quantity.RUN_PARAMETERS else largest_difference


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two entries. Non-finite entries must be the same."""
    if not a.size:
        return 0.0
    x, y = in_double(a), in_double(b)
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        differences = np.where(is_same, 0.0, np.abs(x - y))
    return float(np.nan_to_num(differences, nan=np.inf).max())


def _count_different(a: np.ndarray, b: np.ndarray) -> float:
    """Return the number of entries that are not bit-identical."""
    if a.dtype != b.dtype:
        return float(a.size)
    return float((_as_bytes(a) != _as_bytes(b)).any(axis=1).sum())


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Return the bytes of each entry: an array of shape (entries, itemsize)."""
    return np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return _norm(in_double(a) - in_double(b))


def _norm(a: np.ndarray) -> float:
    return float(np.linalg.norm(in_double(a).ravel()))


def _eps(dtype: DType) -> float:
    """Return the relative distance of neighboring numbers, or 0 for dtypes that are exact."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _largest_entry(leaf: np.ndarray) -> float:
    """Return the largest absolute value of the finite entries."""
    values = np.abs(in_double(leaf))
    return float(np.where(np.isfinite(values), values, 0.0).max(initial=0.0))


def in_double(leaf: np.ndarray) -> np.ndarray:
    """Return an array in float64, or in complex128 if it is complex."""
    return leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)


def _raw(leaf: Array) -> Array:
    """Return the key data of random keys, and other arrays as they are."""
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf


def leaf_to_host(leaf: Array) -> np.ndarray:
    """Return a leaf as a NumPy array. Random keys become their key data."""
    return np.asarray(_raw(leaf))


def to_host(leaves: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return leaves as NumPy arrays."""
    return {name: leaf_to_host(leaf) for name, leaf in leaves.items()}
