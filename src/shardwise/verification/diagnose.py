"""Explain what a difference between one device and a mesh usually means.

Where an explanation can be tested, it is: the run is changed so that the cause would disappear.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from shardwise.data.layout import map_rows
from shardwise.sharding import MeshAxes, Placement, context_axes, num_batch_shards
from shardwise.state import StateSpec
from shardwise.step import num_rows
from shardwise.tree import Batch, named_leaves
from shardwise.verification.compare import (
    Array,
    Comparison,
    Evaluation,
    Quantity,
    ReferenceStep,
    Side,
    Values,
    changed_choices,
    evaluation_on,
    first_rows,
    gradients_on,
    in_double,
    largest_difference,
    leaf_to_host,
    make_side,
    on_side,
    to_host,
    with_attribute,
)

# Of larger batches, only the first and the last example of each shard are tried.
MAX_EXAMPLES = 128
# Relative deviation from which an example counts for more or less than on one device.
INFLUENCE_TOLERANCE = 0.01

MEANINGS = {
    "initial": "The initial weights depend on the mesh. Draw them from the `rngs` that the model "
    "receives, not from anything that depends on devices, processes or the time.",
    "batch": "The data depend on the mesh, or on how often they are read. The batch of a step must "
    "depend on the step alone: no random state between calls, no number of devices in a seed or a "
    "batch size.",
    "summed": "Every gradient is {factor:.6g} times that of one device, and the batch is in "
    "{shards} shards: something is summed over the shards that should be averaged (psum instead of "
    "pmean), or averaged over them before a sum that JAX takes itself.",
    "divided": "Every gradient is 1/{shards} of that of one device, and the batch is in {shards} "
    "shards: something is averaged over the shards that should be summed, or divided by their "
    "number twice.",
    "scaled": "Every gradient is {factor:.6g} times that of one device: a reduction is wrong by a "
    "factor.",
    "random": "With `deterministic=True` both agree: a random stream depends on the mesh. Draw "
    "masks for the complete batch from the model's `rngs`. Do not fold a device index into a key.",
    "statistics": "With `use_running_average=True` both agree: a statistic is taken over the "
    "examples of one device. Take it over the complete batch (outside of shard_map), or reduce the "
    "sums of x and of x*x over the devices before dividing.",
    "statistic": "Loss and gradients agree, but a variable that is not a parameter differs: a "
    "statistic of one device, or a counter that counts devices.",
    "lost": "{examples} have no effect on the loss there, but have one on one device: examples are "
    "lost, usually where each device pads its shard, splits it into blocks, or shifts it by one.",
    "weights": "Examples do not have equal weight there: when replaced by the next one, {examples} "
    "the effect on one device. This is typical of a mean of means, if the shards hold different "
    "numbers of examples or weights. Return Mean(total, weight), or divide the sum of everything "
    "by the weight of everything.",
    "choices": "{choices}. Rounding decided between these experts, and all that follows in the "
    "forward pass differs by more than rounding. Verify other steps or another seed: if only such "
    "steps differ, the mesh is right.",
    "tokens": "With all tokens of a sequence on one device both agree: something depends on the "
    "place of a token in the shard of a device along {axes}. Examples are positions or a shift by "
    "one that begin again in every shard, and a mean over the tokens of one shard. In shard_map "
    "the first position of a shard is its axis_index times the tokens of a shard.",
    "gradients": "The parameters and the batch are the same, so a reduction is taken over the "
    "examples of one device (a norm, a maximum, a loss over pairs of examples), or a random stream "
    "depends on the mesh.",
    "replicas": "The replicas of an array are no longer the same on all devices: only some of them "
    "apply an update or a sum. `shard_map` with check_vma=False does not notice that.",
    "shards": "The gradients are the same, so the optimizer takes a sum, a norm or a maximum over "
    "the shard of a device instead of the complete parameter or all parameters.",
    "summed update": "The gradients are the same, but every update is {factor:.6g} times that of "
    "one device: the optimizer sums over the devices, although the gradients are already those of "
    "the complete batch.",
    "update": "The gradients are the same, so the optimizer reduces over devices although its "
    "gradients are already those of the complete batch, or depends on the mesh in another way.",
    "padding": "With {rows} examples, which need no padding, both agree: the loss of an example "
    "depends on the size of the batch or on other examples, so the padding changes it. Compute it "
    "from the example alone, or choose a batch size that {parts} divides.",
    "evaluation padding": "With {rows} examples, which need no padding, both agree: a metric of an "
    "example depends on the size of the batch or on other examples, so the padding of the last "
    "batch changes it. Compute it from the example alone.",
    "evaluation": "Training agrees, but the evaluation does not: in evaluation mode, the model or "
    "the loss depends on the mesh.",
    "micro-batches": "The gradients of {parts} micro-batches do not add up to those of the batch: "
    "the loss of an example depends on the size of the batch or on other examples. Compute it from "
    "the example alone, or use accumulate=1.",
    "factor of micro-batches": "Every gradient is {factor:.6g} times that of accumulate=1: the "
    "loss of an example contains the size of the batch, which is smaller in {parts} micro-batches.",
    "compiler": "Loss, gradients and update agree when they are computed separately, but the "
    "complete step does not. This points to the compiler. Please report it with the recipe.",
}


def diagnose(
    one: Side,
    many: Side,
    expected: ReferenceStep | Evaluation | None,
    comparisons: Sequence[Comparison],
) -> str:
    """Return the probable cause of a difference, and what to do about it.

    Args:
        one: the run on one device.
        many: the run on a mesh, or on one device with more micro-batches.
        expected: the first step that differs, or the evaluation, on one device. None if the
            initial state differs.
        comparisons: all comparisons of that step.
    """
    wrong = [comparison for comparison in comparisons if not comparison.ok]
    kinds = {comparison.kind for comparison in wrong}
    if isinstance(expected, Evaluation):
        return _diagnose_evaluation(one, many, expected)
    if Quantity.INITIAL in kinds or expected is None:
        return MEANINGS["initial"]
    if Quantity.BATCH in kinds:
        return MEANINGS["batch"]
    if any(_differs_among_replicas(many, comparison) for comparison in wrong):
        return MEANINGS["replicas"]
    if kinds & {Quantity.LOSS, Quantity.GRADIENT}:
        return _diagnose_gradients(one, many, expected)
    if Quantity.STATISTIC in kinds:
        return MEANINGS["statistic"]
    if kinds & {Quantity.PARAMETER, Quantity.OPTIMIZER}:
        return _diagnose_update(many, expected)
    return MEANINGS["compiler"]


def placements_of(spec: StateSpec, kind: Quantity) -> Mapping[str, Placement]:
    """Return how the leaves of a kind are sharded."""
    placements: dict[Quantity, Mapping[str, Placement]] = {
        Quantity.GRADIENT: spec.params,
        Quantity.PARAMETER: spec.params,
        Quantity.STATISTIC: spec.other,
        Quantity.OPTIMIZER: spec.opt_state,
    }
    return placements.get(kind, {})


def _differs_among_replicas(many: Side, comparison: Comparison) -> bool:
    """Return whether a replicated leaf is wrong on some devices only."""
    if len(comparison.devices) == many.spec.mesh.size:
        return False
    placement = placements_of(many.spec, comparison.kind).get(comparison.leaf)
    is_replicated = placement is not None and not any(placement.spec)
    return is_replicated or comparison.kind == Quantity.LOSS


def _diagnose_gradients(one: Side, many: Side, expected: ReferenceStep) -> str:
    values = gradients_on(many, expected, expected.batch)
    factor = _common_factor(
        values[Quantity.GRADIENT], expected.values[Quantity.GRADIENT]
    )
    choices = changed_choices(many, expected)
    if choices.is_rounding:
        return MEANINGS["choices"].format(choices=choices)
    parts = many.run.accumulate
    if one.run.accumulate != parts:
        name = "micro-batches" if factor is None else "factor of micro-batches"
        return MEANINGS[name].format(parts=parts, factor=factor)
    if padding := _diagnose_padding(one, many, expected):
        return padding
    if factor is not None:
        return _explain_factor(factor, num_batch_shards(many.spec.mesh, many.run.rules))
    if one.spec.definition.rngs and _agree_with("deterministic", one, many, expected):
        return MEANINGS["random"]
    if one.spec.other and _agree_with("use_running_average", one, many, expected):
        return MEANINGS["statistics"]
    context = context_axes(many.spec.mesh, many.run.rules)
    if context and _agree_without(context, many, expected):
        return MEANINGS["tokens"].format(axes=", ".join(map(repr, context)))
    influences = _influences(one, many, expected)
    lost = [
        index for index, value in influences.items() if abs(value) < INFLUENCE_TOLERANCE
    ]
    if lost:
        listed = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        examples = f"{len(lost)} of {len(influences)} examples ({listed})"
        return MEANINGS["lost"].format(examples=examples)
    if influences:
        ordered = sorted(influences.items(), key=lambda item: item[1])
        (least, low), (most, high) = ordered[0], ordered[-1]
        if high > (1 + INFLUENCE_TOLERANCE) * low:
            examples = (
                f"example {least} changes the loss by {low:.2f} times and example {most} by "
                f"{high:.2f} times"
            )
            return MEANINGS["weights"].format(examples=examples)
    return MEANINGS["gradients"]


def _num_parts(many: Side) -> int:
    """Return the number of shards of all micro-batches. It divides a batch without padding."""
    return num_batch_shards(many.spec.mesh, many.run.rules) * many.run.accumulate


def _even_rows(many: Side, batch: Batch) -> int:
    """Return the largest number of examples of a batch that needs no padding on a mesh."""
    rows = num_rows(batch)
    return rows - rows % _num_parts(many)


def _diagnose_padding(one: Side, many: Side, expected: ReferenceStep) -> str | None:
    """Return the meaning if loss and gradients agree for fewer examples, without padding."""
    layout = many.step.layout
    rows = _even_rows(many, expected.batch)
    if layout.padded_rows == layout.rows or not rows:
        return None
    batch = first_rows(expected.batch, rows)
    values = []
    for side in (one, many):
        run = replace(side.run, data=lambda step: batch, eval_data=None)
        values.append(gradients_on(make_side(run, side.spec.mesh), expected, batch))
    reference, on_mesh = values
    if not _agree(reference, on_mesh, expected):
        return None
    return MEANINGS["padding"].format(rows=rows, parts=_num_parts(many))


def _diagnose_evaluation(one: Side, many: Side, expected: Evaluation) -> str:
    rows = _even_rows(many, expected.batches[0])
    if rows:
        batches = [first_rows(expected.batches[0], rows)]
        reference, metrics = (
            # The mesh pads to the size of its first batch.
            evaluation_on(side, replace(expected, batches=batches), batches)
            for side in (one, many)
        )
        if all(
            abs(metrics[name] - value) <= expected.tolerances[name]
            for name, value in reference.items()
        ):
            return MEANINGS["evaluation padding"].format(rows=rows)
    return MEANINGS["evaluation"]


def _explain_factor(factor: float, shards: int) -> str:
    meaning = "scaled"
    if shards > 1 and math.isclose(factor, shards, rel_tol=1e-2):
        meaning = "summed"
    elif shards > 1 and math.isclose(factor, 1 / shards, rel_tol=1e-2):
        meaning = "divided"
    return MEANINGS[meaning].format(factor=factor, shards=shards)


def _diagnose_update(many: Side, expected: ReferenceStep) -> str:
    state, gradients = on_side(many, expected)
    before = to_host(named_leaves(expected.state.params))
    after = to_host(named_leaves(many.step.update(state, *gradients)[0].params))
    reference = expected.values[Quantity.PARAMETER]
    changes = {name: after[name] - before[name] for name in before}
    expected_changes = {name: reference[name] - before[name] for name in before}
    factor = _common_factor(changes, expected_changes)
    if factor is not None:
        return MEANINGS["summed update"].format(factor=factor)
    is_sharded = any(any(placement.spec) for placement in many.spec.params.values())
    return MEANINGS["shards" if is_sharded else "update"]


def _common_factor(
    actual: Mapping[str, Array], expected: Mapping[str, np.ndarray]
) -> float | None:
    """Return the factor between all values, or None if one factor does not explain them."""
    a = np.concatenate(
        [in_double(leaf_to_host(actual[name])).ravel() for name in expected]
    )
    e = np.concatenate([in_double(leaf).ravel() for leaf in expected.values()])
    if not (np.isfinite(a).all() and np.isfinite(e).all() and e.any()):
        return None
    factor = float((np.vdot(e, a) / np.vdot(e, e)).real)
    remainder = np.linalg.norm(a - factor * e)
    return factor if remainder < 0.01 * np.linalg.norm(a - e) else None


def _agree_with(attribute: str, one: Side, many: Side, expected: ReferenceStep) -> bool:
    """Return whether loss and gradients agree once an attribute of all layers is True."""
    reference = _values_with(attribute, one, expected)
    return _agree(reference, _values_with(attribute, many, expected), expected)


def _agree_without(axes: MeshAxes, many: Side, expected: ReferenceStep) -> bool:
    """Return whether loss and gradients agree on a mesh with one device along `axes`."""
    mesh = many.spec.mesh
    kept = tuple(slice(1) if axis in axes else slice(None) for axis in mesh.axis_names)
    smaller = Mesh(mesh.devices[kept], mesh.axis_names, axis_types=mesh.axis_types)
    run = replace(many.run, data=lambda step: expected.batch, eval_data=None)
    values = gradients_on(make_side(run, smaller), expected, expected.batch)
    return _agree({**expected.values}, values, expected)


def _agree(reference: Values, values: Values, expected: ReferenceStep) -> bool:
    """Return whether loss and gradients of two sides agree within the tolerances of a step."""
    for kind in (Quantity.LOSS, Quantity.GRADIENT):
        for name, leaf in values[kind].items():
            other = leaf_to_host(reference[kind][name])
            difference = largest_difference(leaf_to_host(leaf), other)
            if difference > expected.tolerances[kind][name]:
                return False
    return True


def _values_with(attribute: str, side: Side, expected: ReferenceStep) -> Values:
    """Return loss and gradients with an attribute set to True in every layer that has it."""
    run = with_attribute(side.run, attribute)
    run = replace(run, data=lambda step: expected.batch, eval_data=None)
    return gradients_on(make_side(run, side.spec.mesh), expected, expected.batch)


def _influences(one: Side, many: Side, expected: ReferenceStep) -> dict[int, float]:
    """Return the influence of each example on the loss, relative to that on one device.

    An example is replaced by its neighbor on both sides. Examples for which that does not change
    the loss on one device are omitted.
    """
    count = num_rows(expected.batch)
    per_shard = max(count // num_batch_shards(many.spec.mesh, many.run.rules), 1)
    tried: Sequence[int] = range(count)
    if count > MAX_EXAMPLES:
        tried = [index for index in tried if index % per_shard in (0, per_shard - 1)]

    def loss(side: Side, batch: Batch) -> float:
        return float(gradients_on(side, expected, batch)[Quantity.LOSS]["loss"])

    many_before = loss(many, expected.batch)
    one_before = loss(one, expected.batch)
    influences: dict[int, float] = {}
    for index in tried:
        order = np.arange(count)
        order[index] = (index + 1) % count
        batch = _reordered(expected.batch, order)
        many_change = loss(many, batch) - many_before
        one_change = loss(one, batch) - one_before
        if abs(one_change) > expected.tolerances[Quantity.LOSS]["loss"]:
            influences[index] = many_change / one_change
    return influences


def _reordered(batch: Batch, order: np.ndarray) -> Batch:
    return map_rows(lambda x: np.asarray(x)[order], batch)
