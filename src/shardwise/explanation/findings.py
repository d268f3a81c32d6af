"""What is probably not meant in an optimizer: a list of checks, each on what was read and measured of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.optim.groups import VECTORS
from shardwise.optim.probe import PLAIN, STILL, STILL_DOUBLE, Probe
from shardwise.optim.read import ANY, Chain, Part, evaluate
from shardwise.state import StateSpec
from shardwise.text import show_bytes
from shardwise.tree import named_leaves, num_bytes

HALF = ("bfloat16", "float16")
CLIPS = ("clip", "clip_by_norm", "clip_by_global_norm", "adaptive_grad_clip")
ADAPTIVE = (
    "scale_by_adam",
    "scale_by_rms",
    "scale_by_lion",
    "scale_by_belief",
    "scale_by_yogi",
    "scale_by_radam",
    "scale_by_amsgrad",
)


@dataclass(frozen=True)
class Row:
    """One parameter."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    transformations: tuple[str, ...]  # in order
    peak_lr: (
        float  # read from the factors and schedules of the chain; measured where there are none
    )
    peak_update: float  # RMS of the largest update under a constant gradient, measured
    decay: float  # weight decay as a multiple of the learning rate, measured
    state_bytes: int
    layout: str
    moves: bool


@dataclass(frozen=True)
class Finding:
    """Something that is probably not meant, and what to do about it."""

    name: str
    fact: str
    remedy: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """Everything that a check may look at."""

    spec: StateSpec
    steps: int
    rows: tuple[Row, ...]
    chains: Mapping[str, Chain]
    probe: Probe
    column: Mapping[str, int]
    rates: Mapping[str, np.ndarray]

    def measured(self, name: str, run: int, path: str) -> np.ndarray:
        """A measurement of one parameter, over the updates of the run."""
        values: np.ndarray = getattr(self.probe, name)[
            run, : self.probe.num_within, self.column[path]
        ]
        return values

    def where(self, test: Callable[[Row], bool]) -> tuple[str, ...]:
        return tuple(row.path for row in self.rows if test(row))

    def parts(self, *names: str) -> list[Part]:
        """Parts of these names, also those that no mask lets through."""
        return [part for part in self.chains[ANY].parts if part.name in names]


def _not_finite(v: View) -> Iterator[Finding]:
    paths = v.where(lambda row: not np.isfinite(v.measured("size", PLAIN, row.path)[:10]).all())
    if paths:
        broken = min(int(np.argmin(np.isfinite(v.measured("size", PLAIN, path)))) for path in paths)
        fact = f"update {broken + 1} is not finite for ordinary gradients"
        yield Finding(
            "not-finite",
            fact,
            "Look at the dtypes of hyperparameters, moments and parameters.",
            paths,
        )


def _half_hyperparameters(v: View) -> Iterator[Finding]:
    leaves = named_leaves(v.spec.abstract.opt_state)
    names = sorted(
        path.rpartition("/")[2]
        for path, leaf in leaves.items()
        if "hyperparams/" in path and str(leaf.dtype) in HALF
    )
    if names:
        fact = f"{', '.join(names)} are kept in the dtype of the parameters, where 0.999 is 1"
        yield Finding(
            "half-hyperparameters",
            fact,
            "Keep float32 parameters, or wrap it in shardwise.optim.with_master.",
        )


def _ascends(v: View) -> Iterator[Finding]:
    def up(row: Row) -> bool:
        by_gradient = v.measured("along", PLAIN, row.path) - v.measured("along", STILL, row.path)
        return not _is_raw(v, row) and bool(np.nan_to_num(by_gradient).sum() > 0)

    if paths := v.where(up):
        yield Finding(
            "ascends",
            "updates point along the gradient, so the loss rises",
            "A minus sign is missing, or there are two of them.",
            paths,
        )


def _is_raw(v: View, row: Row) -> bool:
    return bool(v.probe.is_raw[v.column[row.path]])


def _raw_gradient(v: View) -> Iterator[Finding]:
    if paths := v.where(lambda row: _is_raw(v, row)):
        fact = "the update is the raw gradient: these parameters are left out by a mask, and so go up with full force"
        remedy = (
            "To freeze them use optax.partition with set_to_zero(), or Group(..., frozen=True)."
        )
        yield Finding("raw-gradient", fact, remedy, paths)


def _moves_without_gradient(v: View) -> Iterator[Finding]:
    def drifts(row: Row) -> bool:
        same = np.allclose(
            v.measured("along", PLAIN, row.path),
            v.measured("along", STILL, row.path),
            rtol=1e-4,
            atol=1e-12,
        )
        return row.moves and same and bool(v.measured("size", STILL, row.path).any())

    if paths := v.where(drifts):
        fact = "they move though their gradient does not reach them: decay comes after they were frozen"
        yield Finding("frozen-moves", fact, "Freeze last, or with optax.partition.", paths)


def _nothing_moves(v: View) -> Iterator[Finding]:
    if not any(row.moves for row in v.rows):
        remedy = "Look at the masks; selective_transform takes trees of booleans, not functions."
        yield Finding("nothing-moves", "no parameter moves in the whole run", remedy)


def _first_update(v: View) -> Iterator[Finding]:
    moving = [row.path for row in v.rows if row.moves]
    if (
        moving
        and not v.parts("MultiSteps")
        and not any(v.measured("size", PLAIN, path)[0] for path in moving)
    ):
        fact = "the first update changes nothing, since the learning rate begins at 0"
        yield Finding(
            "first-update-idle",
            fact,
            "Begin the warm-up above 0, as shardwise.optim.cosine does; one batch is lost otherwise.",
        )


def _decay(v: View) -> Iterator[Finding]:
    asked = [
        part
        for part in v.parts("add_decayed_weights")
        if _is_nonzero(part.settings.get("weight_decay"))
    ]
    if asked and not any(row.decay for row in v.rows):
        fact = f"weight decay of {asked[0].settings['weight_decay']} reaches no parameter: its mask is False everywhere"
        remedy = "Compare names of the path: jax.tree_util.keystr(path, simple=True, separator='/').split('/')."
        yield Finding("decay-reaches-nothing", fact, remedy)
    if paths := v.where(
        lambda row: row.decay > 0 and (len(row.shape) < 2 or row.path.rpartition("/")[2] in VECTORS)
    ):
        fact = "weight decay pulls norms and biases to zero"
        yield Finding(
            "decay-of-vectors",
            fact,
            "Give a mask: mask=optim.mask_fn(optim.decays_matrices).",
            paths,
        )
    if paths := v.where(lambda row: row.decay < 0):
        fact = "weight decay has the wrong sign: the weights grow"
        yield Finding("decay-grows", fact, "It must come before the factor -learning_rate.", paths)

    def adaptive(row: Row) -> bool:
        once, twice = (
            v.measured("size", run, row.path) * (row.decay != 0) for run in (STILL, STILL_DOUBLE)
        )
        first = np.flatnonzero(once > 1e-12)
        return len(first) > 0 and bool(twice[first[0]] < 1.5 * once[first[0]])

    if paths := v.where(adaptive):
        fact = (
            "weight decay goes through the adaptive step, which turns it into a step of fixed size"
        )
        yield Finding(
            "decay-not-decoupled",
            fact,
            "Put add_decayed_weights after the adaptive part, as AdamW does.",
            paths,
        )
    if paths := v.where(lambda row: bool((v.measured("shrink", STILL, row.path)[:5] > 0.05).any())):
        fact = "weight decay takes more than 5 % of the weights at every update"
        yield Finding(
            "decay-too-strong",
            fact,
            "It is not multiplied by the learning rate; put it before that factor.",
            paths,
        )


def _clipping(v: View) -> Iterator[Finding]:
    def late(row: Row) -> bool:
        names = [part.name for part in v.chains[row.path].parts]
        after = next((i for i, name in enumerate(names) if name in ADAPTIVE), len(names))
        return any(name in CLIPS for name in names[after:])

    if paths := v.where(late):
        fact = "gradients are clipped after the adaptive part, whose updates are never large"
        yield Finding("clip-after-adaptive", fact, "Put the clipping first in the chain.", paths)


def _schedule(v: View) -> Iterator[Finding]:
    seen: set[bytes] = set()
    every = updates_for_one(v.chains)
    groups = {row.group for row in v.rows if row.moves}
    for row in v.rows:
        rate = v.rates[row.path]
        if not row.moves or rate.tobytes() in seen:
            continue
        seen.add(rate.tobytes())
        real = np.arange(len(rate)) % every == every - 1  # in between there are no updates
        num_within = int(real[: v.probe.num_within].sum())
        where = (f"group {row.group}",) if len(groups) > 1 else ()
        yield from _schedule_of(rate[real], v.probe.steps[real], num_within, v.steps, where)


def _schedule_of(
    rate: np.ndarray, numbers: np.ndarray, num_within: int, steps: int, where: tuple[str, ...]
) -> Iterator[Finding]:
    """Where a schedule that falls gradually comes to its floor, compared with where the run ends."""
    every = max(
        1, num_within // 1000
    )  # so that a step from one value to the next is a thousandth of the run
    picked = np.r_[0:num_within:every, num_within - 1, num_within : len(rate)]
    num_within, rate, numbers = (
        len(picked) - (len(rate) - num_within),
        rate[picked],
        numbers[picked],
    )
    within, peak = rate[:num_within], rate.max()
    top = int(np.argmax(rate))
    if top >= num_within and within[-1] > within[0] and np.all(np.diff(within) >= -1e-6 * peak):
        fact = f"the warm-up ends at about update {numbers[top]}, and the run after {steps}: the peak is never reached"
        yield Finding(
            "warmup-too-long",
            fact,
            "Give the warm-up in steps of this run, or as a fraction of it.",
            where,
        )
        return
    drops = -np.diff(rate)
    falls = np.flatnonzero(drops > 1e-4 * rate[:-1])
    if len(falls) < 5 or np.median(drops[falls]) > 0.05 * peak:  # constant, or in a few drops
        return
    last = int(falls[-1])
    if last >= len(rate) - 3:  # it never ends, as an inverse square root does not
        return
    floor = int(numbers[last + 1])
    if floor < 0.98 * steps - 1:
        fact = (
            f"the schedule ends at update {floor}, and the run goes on to {steps} at {rate[-1]:.3g}"
        )
        remedy = "In Optax the decay steps of warmup_cosine_decay_schedule include the warm-up."
        yield Finding("schedule-too-short", fact, remedy, where)
    elif last >= num_within and within[-1] > rate[-1] + 0.02 * (peak - rate[-1]):
        fact = f"the schedule goes on to about update {floor}; the run ends after {steps} at {within[-1]:.3g}, above the floor {rate[-1]:.3g}"
        remedy = "Count updates, not micro-batches or epochs, and give the schedule the steps of this run."
        yield Finding("schedule-too-long", fact, remedy, where)


def _learning_rates_multiply(v: View) -> Iterator[Finding]:
    def product(row: Row) -> bool:
        factors = [part.factor for part in v.chains[row.path].parts if part.factor is not None]
        peaks = [
            float(np.abs(evaluate(factor, v.probe.steps[: v.probe.num_within])).max())
            for factor in factors
        ]
        return row.moves and sum(peak < 0.1 for peak in peaks) > 1

    if paths := v.where(product):
        peak = next(row.peak_lr for row in v.rows if row.path == paths[0])
        fact = f"two learning rates are multiplied, to {peak:.3g}"
        yield Finding(
            "two-learning-rates",
            fact,
            "optax.adamw and its kin contain theirs; chain scale_by_adam instead.",
            paths,
        )


def _average_of_updates(v: View) -> Iterator[Finding]:
    def late(row: Row) -> bool:
        parts = v.chains[row.path].parts
        rate = next((i for i, part in enumerate(parts) if part.factor is not None), len(parts))
        return any(part.name == "ema" for part in parts[rate:])

    if paths := v.where(late):
        fact = "optax.ema averages the updates, not the weights"
        yield Finding(
            "average-of-updates",
            fact,
            "For an average of the weights use shardwise.optim.keep_average or ema=.",
            paths,
        )


def _state_size(v: View) -> Iterator[Finding]:
    if paths := v.where(
        lambda row: not row.moves and row.state_bytes >= num_bytes(row.shape, jnp.dtype(row.dtype))
    ):
        total = sum(row.state_bytes for row in v.rows if row.path in paths)
        fact = f"{show_bytes(total)} of optimizer state are kept for parameters that never move"
        yield Finding(
            "state-for-frozen",
            fact,
            "Freeze with optax.partition or Group(..., frozen=True), which keeps none.",
            paths,
        )
    params, state = (
        v.spec.num_params,
        sum(leaf.size for leaf in jax.tree.leaves(v.spec.abstract.opt_state)),
    )
    if state > 4.5 * params:
        fact = f"the optimizer keeps {state / params:.1f} numbers for each parameter; Adam keeps 2"
        yield Finding(
            "state-too-large",
            fact,
            "Look for histories, stacked wrappers, or averages that are kept twice.",
        )


def _applies_nan(v: View) -> Iterator[Finding]:
    for part in v.parts("apply_if_finite"):
        count = part.settings.get("max_consecutive_errors")
        fact = (
            f"apply_if_finite applies the update that is not finite after {count} of them in a row"
        )
        yield Finding(
            "applies-nan",
            fact,
            "Leave it out: a step of shardwise never applies one, and Run(max_skips=...) stops the run.",
        )


def _lost_updates(v: View) -> Iterator[Finding]:
    def lost(row: Row) -> bool:
        return row.dtype in HALF and float(np.median(v.measured("lost", PLAIN, row.path))) > 0.3

    if not v.parts("with_master") and (paths := v.where(lost)):
        share = max(float(np.median(v.measured("lost", PLAIN, path))) for path in paths)
        fact = (
            f"{share:.0%} of the updates are too small for the dtype of the parameters and are lost"
        )
        yield Finding(
            "updates-lost",
            fact,
            "Keep float32 parameters and compute in bfloat16, or say master=True.",
            paths,
        )


def _is_nonzero(value: Any) -> bool:
    return callable(value) or bool(value is not None and value != 0)


CHECKS: tuple[Callable[[View], Iterator[Finding]], ...] = (
    _not_finite,
    _half_hyperparameters,
    _ascends,
    _raw_gradient,
    _moves_without_gradient,
    _nothing_moves,
    _first_update,
    _decay,
    _clipping,
    _schedule,
    _learning_rates_multiply,
    _average_of_updates,
    _state_size,
    _applies_nan,
    _lost_updates,
)


def updates_for_one(chains: Mapping[str, Chain]) -> int:
    return next(
        (int(part.settings["every_k"]) for part in chains[ANY].parts if part.name == "MultiSteps"),
        1,
    )


def find(view: View) -> tuple[Finding, ...]:
    """Everything that the checks have to say, each of it once."""
    found = [finding for check in CHECKS for finding in check(view)]
    return tuple({(finding.name, finding.paths): finding for finding in found}.values())
