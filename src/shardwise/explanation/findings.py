"""Checks that find likely mistakes in an optimizer.

Each check is a function from a `View` of the optimizer to findings. To add a check, write one such
function and add it to `CHECKS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.findings import Finding
from shardwise.optim.groups import VECTORS
from shardwise.optim.probe import PLAIN, STILL, STILL_DOUBLE, Probe
from shardwise.optim.read import ANY, Chain, ChainPart, calls_per_update
from shardwise.state import StateSpec
from shardwise.text import show_bytes
from shardwise.tree import named_leaves, num_bytes

HALF_PRECISION = ("bfloat16", "float16")
CLIPPING = ("clip", "clip_by_norm", "clip_by_global_norm", "adaptive_grad_clip")
# Transformations that divide the update by a measure of the size of the gradients.
ADAPTIVE = (
    "scale_by_adam",
    "scale_by_rms",
    "scale_by_lion",
    "scale_by_belief",
    "scale_by_yogi",
    "scale_by_radam",
    "scale_by_amsgrad",
)
# `optax.adamw` decays everything by 1e-4 by default, which is too weak to have an effect.
WEAK_DECAY = 1.5e-4
# Adam keeps 2 numbers per parameter, with a master copy and an average of the weights 4.
MAX_STATE_PER_PARAMETER = 4.5


@dataclass(frozen=True)
class Row:
    """What the optimizer does to one parameter.

    Attributes:
        path: the path of the parameter.
        shape: its shape.
        dtype: its dtype.
        group: the parameter group that it belongs to, `all` if there are none.
        transformations: the transformations that it passes through, in order.
        peak_lr: the largest learning rate of the run. Read from the factors and schedules of the
            chain, or measured if there are none.
        peak_update: root mean square of the largest update under a constant gradient, measured.
        decay: weight decay as a multiple of the learning rate, measured.
        state_bytes: bytes of optimizer state that belong to the parameter, over all devices.
        layout: the sharding of the parameter.
        moves: whether any update of the run changes the parameter.
        other_paths: the other paths of a tied parameter. Groups of an optimizer use `path`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    transformations: tuple[str, ...]
    peak_lr: float
    peak_update: float
    decay: float
    state_bytes: int
    layout: str
    moves: bool
    other_paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """Everything that a check can use.

    Attributes:
        spec: the description of the training state.
        steps: the length of the run in updates.
        rows: what the optimizer does to each parameter.
        chains: the transformations that each parameter passes through, by path.
        probe: the measurements.
        column: for each path, the index of the measured parameter that represents it.
        rates: for each path, the learning rate at each of `probe.steps`.
    """

    spec: StateSpec
    steps: int
    rows: tuple[Row, ...]
    chains: Mapping[str, Chain]
    probe: Probe
    column: Mapping[str, int]
    rates: Mapping[str, np.ndarray]

    def measured(self, name: str, run: int, path: str) -> np.ndarray:
        """Return a measurement of one parameter at the updates within the run.

        Args:
            name: a field of `Probe`: `size`, `along`, `shrink` or `lost`.
            run: one of the four runs of the probe, such as `PLAIN`.
            path: the path of the parameter.
        """
        values: np.ndarray = getattr(self.probe, name)
        return values[run, : self.probe.num_within, self.column[path]]

    def paths_where(self, test: Callable[[Row], bool]) -> tuple[str, ...]:
        """Return the paths of the parameters for which `test` is true."""
        return tuple(row.path for row in self.rows if test(row))

    def parts(self, *names: str) -> list[ChainPart]:
        """Return all parts with these names, including those that no mask lets through."""
        return [part for part in self.chains[ANY].parts if part.name in names]

    def is_raw(self, path: str) -> bool:
        """Return whether the update of a parameter is its gradient itself."""
        return bool(self.probe.is_raw[self.column[path]])


Check: TypeAlias = Callable[[View], Iterator[Finding]]


def _not_finite(view: View) -> Iterator[Finding]:
    """Find updates that are NaN or infinite for ordinary gradients.

    The cause is usually a dtype: in bfloat16, `b2=0.999` rounds to 1 and Adam divides by zero.
    """

    def is_broken(row: Row) -> bool:
        return not np.isfinite(view.measured("size", PLAIN, row.path)[:10]).all()

    if paths := view.paths_where(is_broken):
        sizes = [view.measured("size", PLAIN, path) for path in paths]
        first = min(int(np.argmin(np.isfinite(size))) for size in sizes)
        yield Finding(
            "not-finite",
            f"update {first + 1} is not finite for ordinary gradients",
            "Check the dtypes of hyperparameters, moments and parameters.",
            paths,
        )


def _half_hyperparameters(view: View) -> Iterator[Finding]:
    """Find hyperparameters that `inject_hyperparams` stores in the half precision of the model."""
    leaves = named_leaves(view.spec.abstract.opt_state)
    names = sorted(
        path.rpartition("/")[2]
        for path, leaf in leaves.items()
        if "hyperparams/" in path and str(leaf.dtype) in HALF_PRECISION
    )
    if names:
        yield Finding(
            "half-hyperparameters",
            f"{', '.join(names)} are stored in the dtype of the parameters, which rounds 0.999 "
            "to 1",
            "Use float32 parameters, or wrap the optimizer in shardwise.optim.with_master.",
        )


def _ascends(view: View) -> Iterator[Finding]:
    """Find updates in the direction of the gradient, which increase the loss.

    The part of the update that does not come from the gradient, such as decay, is subtracted.
    """

    def ascends(row: Row) -> bool:
        along = view.measured("along", PLAIN, row.path) - view.measured(
            "along", STILL, row.path
        )
        return not view.is_raw(row.path) and bool(np.nan_to_num(along).sum() > 0)

    if paths := view.paths_where(ascends):
        yield Finding(
            "ascends",
            "updates point along the gradient, so the loss increases",
            "Add the missing minus sign, or remove the second one.",
            paths,
        )


def _raw_gradient(view: View) -> Iterator[Finding]:
    """Find parameters that `optax.masked` excludes: it passes their gradient through unchanged."""
    if paths := view.paths_where(lambda row: view.is_raw(row.path)):
        yield Finding(
            "raw-gradient",
            "a mask excludes these parameters, so their update is the raw gradient: they ascend "
            "at a learning rate of 1",
            "To freeze them, use optax.partition with set_to_zero(), or Group(..., frozen=True).",
            paths,
        )


def _frozen_moves(view: View) -> Iterator[Finding]:
    """Find parameters that move although their gradient has no effect: decay still applies."""

    def drifts(row: Row) -> bool:
        with_gradient = view.measured("along", PLAIN, row.path)
        without = view.measured("along", STILL, row.path)
        has_no_effect = np.allclose(with_gradient, without, rtol=1e-4, atol=1e-12)
        moves_alone = bool(view.measured("size", STILL, row.path).any())
        return row.moves and has_no_effect and moves_alone

    if paths := view.paths_where(drifts):
        yield Finding(
            "frozen-moves",
            "weight decay is applied after freezing, so these parameters move although their "
            "gradient has no effect",
            "Freeze last in the chain, or with optax.partition.",
            paths,
        )


def _nothing_moves(view: View) -> Iterator[Finding]:
    """Find an optimizer that never changes any parameter."""
    if not any(row.moves for row in view.rows):
        yield Finding(
            "nothing-moves",
            "no update of the run changes any parameter",
            "Check the masks. selective_transform needs trees of booleans, not functions.",
        )


def _first_update_idle(view: View) -> Iterator[Finding]:
    """Find a warm-up that starts at 0: the first batch is read and nothing is learned from it."""
    moving = [row.path for row in view.rows if row.moves]
    if not moving or view.parts("MultiSteps"):
        return
    if not any(view.measured("size", PLAIN, path)[0] for path in moving):
        yield Finding(
            "first-update-idle",
            "the first update changes nothing, because the learning rate starts at 0",
            "Start the warm-up above 0, as shardwise.optim.cosine does, to use the first batch.",
        )


def _decay_reaches_nothing(view: View) -> Iterator[Finding]:
    """Find weight decay whose mask selects no parameter."""
    strengths = [
        part.settings.get("weight_decay") for part in view.parts("add_decayed_weights")
    ]
    requested = [
        value for value in strengths if value is not None and _is_nonzero(value)
    ]
    if requested and not any(row.decay for row in view.rows):
        yield Finding(
            "decay-reaches-nothing",
            f"weight_decay={requested[0]} applies to no parameter: its mask is False everywhere",
            "In the mask, compare names, not key objects: "
            "jax.tree_util.keystr(path, simple=True, separator='/').split('/').",
        )


def _decay_of_vectors(view: View) -> Iterator[Finding]:
    """Find weight decay on biases and norms, which have no reason to be small."""

    def is_vector(row: Row) -> bool:
        return len(row.shape) < 2 or row.path.rpartition("/")[2] in VECTORS

    if paths := view.paths_where(lambda row: row.decay > WEAK_DECAY and is_vector(row)):
        yield Finding(
            "decay-of-vectors",
            "weight decay applies to norms and biases",
            "Pass a mask: mask=optim.mask_fn(optim.decays_matrices).",
            paths,
        )


def _decay_grows(view: View) -> Iterator[Finding]:
    """Find weight decay with the wrong sign."""
    if paths := view.paths_where(lambda row: row.decay < 0):
        yield Finding(
            "decay-grows",
            "weight decay has the wrong sign, so the weights grow",
            "Put it before the factor -learning_rate.",
            paths,
        )


def _decay_not_decoupled(view: View) -> Iterator[Finding]:
    """Find weight decay before the adaptive part, which removes its size.

    Decoupled decay of weights twice as large is twice as large.
    """

    def is_coupled(row: Row) -> bool:
        if not row.decay:
            return False
        size = view.measured("size", STILL, row.path)
        size_of_double = view.measured("size", STILL_DOUBLE, row.path)
        acting = np.flatnonzero(size > 1e-12)
        if not len(acting):
            return False
        first = acting[0]
        return bool(size_of_double[first] < 1.5 * size[first])

    if paths := view.paths_where(is_coupled):
        yield Finding(
            "decay-not-decoupled",
            "weight decay passes through the adaptive part, which turns it into a step of fixed "
            "size",
            "Put add_decayed_weights after the adaptive part, as AdamW does.",
            paths,
        )


def _decay_too_strong(view: View) -> Iterator[Finding]:
    """Find weight decay that is not multiplied by the learning rate."""

    def is_strong(row: Row) -> bool:
        return bool((view.measured("shrink", STILL, row.path)[:5] > 0.05).any())

    if paths := view.paths_where(is_strong):
        yield Finding(
            "decay-too-strong",
            "weight decay removes more than 5 % of the weights at every update",
            "Put it before the learning rate, so that it is multiplied by it.",
            paths,
        )


def _clip_after_adaptive(view: View) -> Iterator[Finding]:
    """Find clipping that never takes effect, because it follows an adaptive part.

    The update of an adaptive part is never large, while a gradient spike stays in its moments.
    """

    def clips_late(row: Row) -> bool:
        names = [part.name for part in view.chains[row.path].parts]
        adaptive = [index for index, name in enumerate(names) if name in ADAPTIVE]
        return bool(adaptive) and any(name in CLIPPING for name in names[adaptive[0] :])

    if paths := view.paths_where(clips_late):
        yield Finding(
            "clip-after-adaptive",
            "clipping follows the adaptive part, whose updates are never large",
            "Put the clipping first in the chain.",
            paths,
        )


def _schedule(view: View) -> Iterator[Finding]:
    """Find schedules whose length does not match the run, once for each distinct schedule."""
    groups = {row.group for row in view.rows if row.moves}
    every = calls_per_update(view.chains)
    calls = np.arange(len(view.probe.steps))
    # With `MultiSteps`, only every k-th call is an update.
    is_update = calls % every == every - 1
    num_within = int(is_update[: view.probe.num_within].sum())
    seen: set[bytes] = set()
    for row in view.rows:
        rate = view.rates[row.path]
        if not row.moves or rate.tobytes() in seen:
            continue
        seen.add(rate.tobytes())
        schedule = _Schedule.thinned(
            rate[is_update], view.probe.steps[is_update], num_within
        )
        where = (f"group {row.group}",) if len(groups) > 1 else ()
        yield from _wrong_length(schedule, view.steps, where)


@dataclass(frozen=True)
class _Schedule:
    """A learning rate over the run and beyond its end.

    Attributes:
        rate: the learning rate at each sample, shape (sample,).
        numbers: the number of the update of each sample, shape (sample,).
        num_within: the number of samples within the run.
    """

    rate: np.ndarray
    numbers: np.ndarray
    num_within: int

    @classmethod
    def thinned(
        cls, rate: np.ndarray, numbers: np.ndarray, num_within: int
    ) -> "_Schedule":
        """Return the schedule with about 1,000 samples within the run.

        The difference of neighboring samples is then at least the change in 0.1 % of the run, so
        that a slow decay is not mistaken for rounding.
        """
        every = max(1, num_within // 1000)
        picked = np.r_[0:num_within:every, num_within - 1, num_within : len(rate)]
        num_beyond = len(rate) - num_within
        return cls(rate[picked], numbers[picked], len(picked) - num_beyond)


def _wrong_length(
    schedule: _Schedule, steps: int, where: tuple[str, ...]
) -> Iterator[Finding]:
    """Compare where a schedule reaches its floor with where the run ends."""
    rate = schedule.rate
    within = rate[: schedule.num_within]
    peak = rate.max()
    top = int(np.argmax(rate))
    never_falls = np.all(np.diff(within) >= -1e-6 * peak)
    if top >= schedule.num_within and within[-1] > within[0] and never_falls:
        yield Finding(
            "warmup-too-long",
            f"the warm-up ends at about update {schedule.numbers[top]}, but the run ends after "
            f"{steps} updates: the peak is never reached",
            "Set the warm-up in steps of this run, or as a fraction of it.",
            where,
        )
        return

    drops = -np.diff(rate)
    falling = np.flatnonzero(drops > 1e-4 * rate[:-1])
    # A constant schedule, or one with a few large drops, has no floor to compare.
    if len(falling) < 5 or np.median(drops[falling]) > 0.05 * peak:
        return
    last = int(falling[-1])
    # A schedule that still falls at the end, such as an inverse square root, has no floor either.
    if last >= len(rate) - 3:
        return
    floor = int(schedule.numbers[last + 1])
    is_above_floor = within[-1] > rate[-1] + 0.02 * (peak - rate[-1])
    if floor < 0.98 * steps - 1:
        yield Finding(
            "schedule-too-short",
            f"the schedule ends at update {floor}, but the run continues to update {steps} at "
            f"{rate[-1]:.3g}",
            "Set the schedule to the length of the run. In Optax, decay_steps of "
            "warmup_cosine_decay_schedule include the warm-up.",
            where,
        )
    elif last >= schedule.num_within and is_above_floor:
        yield Finding(
            "schedule-too-long",
            f"the schedule continues to about update {floor}, but the run ends after {steps} "
            f"updates at {within[-1]:.3g}, above the final value {rate[-1]:.3g}",
            "Set the schedule to the length of the run, in updates, not micro-batches or epochs.",
            where,
        )


def _two_learning_rates(view: View) -> Iterator[Finding]:
    """Find two small factors in one chain, such as `optax.adam(1e-3)` followed by a scale."""
    within = slice(view.probe.num_within)

    def has_two(row: Row) -> bool:
        parts = view.chains[row.path].parts
        # At all measured updates, because these values are known already.
        factors = [part.factors(view.probe.steps) for part in parts]
        peaks = [
            np.abs(values[within]).max() for values in factors if values is not None
        ]
        return row.moves and sum(peak < 0.1 for peak in peaks) > 1

    if paths := view.paths_where(has_two):
        peak = next(row.peak_lr for row in view.rows if row.path == paths[0])
        yield Finding(
            "two-learning-rates",
            f"two learning rates are multiplied, which makes {peak:.3g}",
            "optax.adamw and similar optimizers include a learning rate. Chain scale_by_adam "
            "instead.",
            paths,
        )


def _average_of_updates(view: View) -> Iterator[Finding]:
    """Find `optax.ema` after the learning rate: it is one more momentum, not averaged weights."""

    def averages_updates(row: Row) -> bool:
        parts = view.chains[row.path].parts
        factors = [index for index, part in enumerate(parts) if part.factor is not None]
        return bool(factors) and any(part.name == "ema" for part in parts[factors[0] :])

    if paths := view.paths_where(averages_updates):
        yield Finding(
            "average-of-updates",
            "optax.ema averages the updates, not the weights",
            "To average the weights, use shardwise.optim.keep_average, or ema= of a recipe.",
            paths,
        )


def _state_for_frozen(view: View) -> Iterator[Finding]:
    """Find memory that is used for the optimizer state of parameters that never move."""

    def has_state(row: Row) -> bool:
        return row.state_bytes >= num_bytes(row.shape, jnp.dtype(row.dtype))

    if paths := view.paths_where(lambda row: not row.moves and has_state(row)):
        total = sum(row.state_bytes for row in view.rows if row.path in paths)
        yield Finding(
            "state-for-frozen",
            f"parameters that never move have {show_bytes(total)} of optimizer state",
            "Freeze them with optax.partition or Group(..., frozen=True), which keep no state.",
            paths,
        )


def _state_too_large(view: View) -> Iterator[Finding]:
    """Find an optimizer state of an unusual size, such as one with nested averages."""
    if view.parts("scale_by_soap"):
        # Covariances and bases of matrices are larger than the matrices.
        return
    leaves = jax.tree.leaves(view.spec.abstract.opt_state)
    ratio = sum(leaf.size for leaf in leaves) / max(1, view.spec.num_params)
    if ratio > MAX_STATE_PER_PARAMETER:
        yield Finding(
            "state-too-large",
            f"the optimizer keeps {ratio:.1f} numbers per parameter; Adam keeps 2",
            "Check for gradient histories, nested wrappers, and averages that are kept twice.",
        )


def _applies_nan(view: View) -> Iterator[Finding]:
    """Find `optax.apply_if_finite`, which gives up after a number of bad updates."""
    for part in view.parts("apply_if_finite"):
        limit = part.settings.get("max_consecutive_errors")
        yield Finding(
            "applies-nan",
            f"apply_if_finite applies an update that is not finite after {limit} consecutive ones",
            "Remove it: shardwise never applies such an update, and Run(max_skips=...) stops the "
            "run.",
        )


def _updates_lost(view: View) -> Iterator[Finding]:
    """Find updates that are smaller than the spacing of numbers in half precision."""

    def lost_fraction(path: str) -> float:
        return float(np.median(view.measured("lost", PLAIN, path)))

    def is_lost(row: Row) -> bool:
        return row.dtype in HALF_PRECISION and lost_fraction(row.path) > 0.3

    if view.parts("with_master"):
        return
    if paths := view.paths_where(is_lost):
        fraction = max(lost_fraction(path) for path in paths)
        yield Finding(
            "updates-lost",
            f"{fraction:.0%} of the updates are too small for the dtype of the parameters and "
            "are lost",
            "Use float32 parameters and compute in bfloat16, or set master=True.",
            paths,
        )


def _is_nonzero(value: object) -> bool:
    """Return whether a weight decay is a schedule or a number other than 0."""
    return callable(value) or bool(value != 0)


CHECKS: tuple[Check, ...] = (
    _not_finite,
    _half_hyperparameters,
    _ascends,
    _raw_gradient,
    _frozen_moves,
    _nothing_moves,
    _first_update_idle,
    _decay_reaches_nothing,
    _decay_of_vectors,
    _decay_grows,
    _decay_not_decoupled,
    _decay_too_strong,
    _clip_after_adaptive,
    _schedule,
    _two_learning_rates,
    _average_of_updates,
    _state_for_frozen,
    _state_too_large,
    _applies_nan,
    _updates_lost,
)


def find(view: View) -> tuple[Finding, ...]:
    """Return the findings of all checks, without repeats.

    Args:
        view: what was read and measured of the optimizer.
    """
    findings = [finding for check in CHECKS for finding in check(view)]
    return tuple(
        {(finding.name, finding.paths): finding for finding in findings}.values()
    )
