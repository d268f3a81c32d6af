"""What a difference between one device and many usually means. Each guess is tried out where it can be."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardwise.sharding import num_batch_shards
from shardwise.step import Batch, num_rows
from shardwise.tree import named_leaves
from shardwise.verification.compare import (
    BATCH,
    GRADIENT,
    INITIAL,
    LOSS,
    OPTIMIZER,
    PARAMETER,
    STATISTIC,
    Comparison,
    Moment,
    Seen,
    Side,
    gradients_on,
    make_side,
    measure_gap,
    on_host,
    on_side,
    to_host,
)

MAX_ROWS = 128  # of larger batches, the first and the last row of each shard are tried

MEANINGS = {
    "initial": "The first weights depend on the mesh. Draw them from the `rngs` that the model is given, and from nothing that knows "
    "devices, processes or the time.",
    "batch": "The data depend on the mesh, or on how often they are asked for. The batch of a step must follow from the step alone: no "
    "random state that is kept between calls, no number of devices in a seed or a batch size.",
    "summed": "Every gradient is {factor:.6g} times that of one device, and the batch is in {shards} shards: something is summed over the "
    "shards that should be averaged (psum for pmean), or averaged over them before a sum that JAX takes itself.",
    "divided": "Every gradient is 1/{shards} of that of one device, and the batch is in {shards} shards: something is averaged over the "
    "shards that should be summed, or divided by their number twice.",
    "scaled": "Every gradient is {factor:.6g} times that of one device: a reduction that is wrong by a factor.",
    "random": "With `deterministic=True` the two agree: a random stream depends on the mesh. Draw masks for the whole batch from the "
    "model's `rngs`; no key may be folded with a device's index.",
    "statistics": "With `use_running_average=True` the two agree: a statistic is taken over the rows of one device. Take it over the whole "
    "batch (outside of shard_map), or reduce the sums of x and of x*x over the devices before dividing.",
    "statistic": "Loss and gradients agree, and a variable that is no parameter does not: a per-device statistic, or a counter that "
    "counts devices.",
    "lost": "{rows} of the batch make no difference to the loss there, and do on one device: rows are lost, usually where each device pads "
    "its part, cuts it into blocks, or shifts it by one.",
    "weights": "Rows do not count alike there: replaced by the next one, {rows} what it does on one device. That is what a mean of "
    "means gives when the shards hold unequal rows or weights: return Mean(total, weight), or divide the sum of all by the weight of all.",
    "gradients": "From the same parameters and the same batch: a reduction over the rows of one device (a norm, a maximum, a loss over "
    "pairs of rows), or a random stream that depends on the mesh.",
    "copies": "The copies of one array are no longer the same on all devices: an update or a sum that only some of them make, which "
    "`shard_map` with check_vma=False does not notice.",
    "pieces": "From the same gradients: the optimizer takes a sum, a norm or a maximum over the piece that a device holds, where it means "
    "the whole parameter or all of them.",
    "summed update": "From the same gradients, every update is {factor:.6g} times that of one device: the optimizer sums over the devices "
    "what is whole already. The gradients it is given are those of the whole batch.",
    "update": "From the same gradients: an optimizer that reduces over devices what is whole already, or that knows the mesh otherwise.",
    "whole": "Loss, gradients and update agree when they are computed alone, and the whole step does not: this points to the compiler. "
    "Please report it with the recipe.",
}


def diagnose(one: Side, many: Side, moment: Moment | None, found: Sequence[Comparison]) -> str:
    """`found` are the comparisons of the first step at which something differs, `moment` that step on one device."""
    wrong = [c for c in found if not c.ok]
    kinds = {c.kind for c in wrong}
    if INITIAL in kinds or moment is None:
        return MEANINGS["initial"]
    if BATCH in kinds:
        return MEANINGS["batch"]
    if any(_is_copied(many, c) and len(c.devices) < many.spec.mesh.size for c in wrong):
        return MEANINGS["copies"]
    if kinds & {LOSS, GRADIENT}:
        return _of_gradients(one, many, moment)
    if STATISTIC in kinds:
        return MEANINGS["statistic"]
    if kinds & {PARAMETER, OPTIMIZER}:
        return _of_update(many, moment)
    return MEANINGS["whole"]


def _is_copied(many: Side, c: Comparison) -> bool:
    """Whether each device has the whole array."""
    spec = many.spec
    places = {
        GRADIENT: spec.params,
        STATISTIC: spec.other,
        PARAMETER: spec.params,
        OPTIMIZER: spec.opt_state,
    }
    return c.kind == LOSS or (c.kind in places and not any(places[c.kind][c.leaf].spec))


def _of_gradients(one: Side, many: Side, moment: Moment) -> str:
    seen = gradients_on(many, moment, moment.rows)
    factor = _common_factor(seen[GRADIENT], moment.seen[GRADIENT])
    shards = num_batch_shards(many.spec.mesh, many.run.rules)
    if factor is not None:
        near = lambda value: shards > 1 and math.isclose(factor, value, rel_tol=1e-2)  # noqa: E731
        return MEANINGS[
            "summed" if near(shards) else "divided" if near(1 / shards) else "scaled"
        ].format(factor=factor, shards=shards)
    if one.spec.definition.rngs and _agree_with("deterministic", one, many, moment):
        return MEANINGS["random"]
    if one.spec.other and _agree_with("use_running_average", one, many, moment):
        return MEANINGS["statistics"]
    counts = _row_counts(one, many, moment)
    if lost := [row for row, count in counts.items() if abs(count) < 0.01]:
        return MEANINGS["lost"].format(rows=f"{len(lost)} of {len(counts)} rows ({_some(lost)})")
    if counts and max(counts.values()) > 1.01 * min(counts.values()):
        (least, low), *_, (most, high) = sorted(counts.items(), key=lambda item: item[1])
        return MEANINGS["weights"].format(
            rows=f"row {least} changes the loss by {low:.2f}, row {most} by {high:.2f} times"
        )
    return MEANINGS["gradients"]


def _of_update(many: Side, moment: Moment) -> str:
    state, halves = on_side(many, moment)
    before = on_host(named_leaves(moment.state.params))
    after = on_host(named_leaves(many.step.update(state, *halves)[0].params))
    changes = {name: after[name] - before[name] for name in before}
    factor = _common_factor(
        changes, {name: moment.seen[PARAMETER][name] - before[name] for name in before}
    )
    if factor is not None:
        return MEANINGS["summed update"].format(factor=factor)
    if any(any(placement.spec) for placement in many.spec.params.values()):
        return MEANINGS["pieces"]
    return MEANINGS["update"]


def _common_factor(actual: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> float | None:
    """The one number by which everything is multiplied, if that explains the difference."""
    a, e = (
        np.concatenate([to_host(leaves[name]).astype(np.float64).ravel() for name in expected])
        for leaves in (actual, expected)
    )
    if not (np.isfinite(a).all() and np.isfinite(e).all() and e.any()):
        return None
    factor = float(a @ e / (e @ e))
    return factor if np.linalg.norm(a - factor * e) < 0.01 * np.linalg.norm(a - e) else None


def _agree_with(attribute: str, one: Side, many: Side, moment: Moment) -> bool:
    """Whether loss and gradients agree once this attribute is True in every layer that has it."""

    def seen(side: Side) -> Seen:
        def loss(model: Any, batch: Batch) -> Any:
            model.set_attributes(raise_if_not_found=False, **{attribute: True})
            return side.run.loss(model, batch)

        run = replace(side.run, loss=loss, data=lambda step: moment.rows)
        return gradients_on(make_side(run, side.spec.mesh), moment, moment.rows)

    theirs, mine = seen(one), seen(many)
    return all(
        measure_gap(to_host(leaf), to_host(theirs[kind][name])) <= moment.tolerances[kind][name]
        for kind in (LOSS, GRADIENT)
        for name, leaf in mine[kind].items()
    )


def _row_counts(one: Side, many: Side, moment: Moment) -> dict[int, float]:
    """How much each row counts for the loss on many devices, beside what it does on one: it is replaced by its neighbour on both.

    A row whose neighbour makes the same loss tells nothing, and is left out.
    """
    rows = num_rows(moment.rows)
    shards = num_batch_shards(many.spec.mesh, many.run.rules)
    each = max(rows // shards, 1)
    tried = [row for row in range(rows) if rows <= MAX_ROWS or row % each in (0, each - 1)]

    def loss(side: Side, batch: Batch) -> float:
        return float(gradients_on(side, moment, batch)[LOSS]["loss"])

    mine_before, theirs_before = loss(many, moment.rows), loss(one, moment.rows)
    counts = {}
    for row in tried:
        order = np.arange(rows)
        order[row] = (row + 1) % rows
        batch = jax.tree.map(lambda x: np.asarray(x)[order], moment.rows)  # noqa: B023
        mine, theirs = loss(many, batch) - mine_before, loss(one, batch) - theirs_before
        if abs(theirs) > moment.tolerances[LOSS]["loss"]:
            counts[row] = mine / theirs
    return counts


def _some(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
