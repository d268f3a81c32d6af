"""Measure how initial weights and updates change from one size of a model to another."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import optax

from shardwise.errors import ConfigError
from shardwise.run import Run
from shardwise.scaling.growth import QUARTER, Growth
from shardwise.scaling.initial import initial_sizes
from shardwise.scaling.probe import (
    GRADIENT,
    SIZE,
    Copy,
    abstract_params,
    masked_paths,
    measure_updates,
    small_shapes,
)
from shardwise.scaling.roles import Roles
from shardwise.scaling.trace import Model, abstract_model

# Initial weights of wider models than twice the base are only drawn up to this many parameters.
MAX_MEASURED = 20_000_000
# A measured exponent of initial weights this close to a multiple of a quarter is taken for it.
# Between the base width and twice this width, measurements are less precise.
SAME_SLOPE = 0.03
# A measured exponent of updates this close to a multiple of a half is taken for it.
HALF = 0.5
CLOSE = 0.2


@dataclass(frozen=True)
class InitialWeights:
    """Measurements of the user's initialization.

    Attributes:
        sizes: the root mean square of each parameter at the base width.
        ratios: its size at the new width, divided by this.
    """

    sizes: Mapping[str, float]
    ratios: Mapping[str, float]


def measure_initial_weights(
    make_run: Callable[[int], Run], base: int, width: int, roles: Roles
) -> InitialWeights:
    """Measure initial weights at the base width, at twice this width, and at a third one.

    Args:
        make_run: returns the run for a width.
        base: the base width.
        width: the new width. If its model is large, the third width is smaller.
        roles: the roles of the parameters.
    """
    widths = [base, 2 * base, _measurable(make_run, base, width)]
    runs = {each: make_run(each) for each in {*widths, width}}
    models = {each: abstract_model(run) for each, run in runs.items()}
    sizes = {each: initial_sizes(runs[each], models[each]) for each in {*widths}}
    ratios: dict[str, float] = {}
    for path, parameter in roles.parameters.items():
        found = [sizes[each][path] for each in widths]
        growth = [
            Growth.of(parameter, models[each].shapes[path]).reference
            for each in (*widths, width)
        ]
        ratios[path] = _ratio(found, growth) if all(found) else 1.0
    return InitialWeights(sizes[base], ratios)


def _measurable(make_run: Callable[[int], Run], base: int, width: int) -> int:
    """Return the new width, or one towards it whose initial weights are quick to draw."""
    if width < base:
        return width
    found = 2 * base
    while found < width:
        wider = min(2 * found, width)
        shapes = abstract_model(make_run(wider)).shapes
        if sum(map(math.prod, shapes.values())) > MAX_MEASURED:
            break
        found = wider
    return found


def _ratio(sizes: Sequence[float], growth: Sequence[float]) -> float:
    """Return the size of initial weights at the new width, divided by that at the base width.

    Usual initializations are powers of the growth. With fixed numbers of inputs, the variance of
    Glorot's is 2 / (inputs + outputs), whose inverse is linear in the growth.

    Args:
        sizes: the sizes at the base width, at twice this width, and at a third one.
        growth: how much the parameter grows from the base width to these, and to the new one.
    """
    _, twice, third, new = growth
    if twice == 1 or third == 1:
        return 1.0
    near, far = (
        math.log(size / sizes[0]) / math.log(ratio)
        for size, ratio in zip(sizes[1:], (twice, third), strict=True)
    )
    power = round(far / QUARTER) * QUARTER
    if abs(far - power) < SAME_SLOPE and abs(near - power) < 2 * SAME_SLOPE:
        return float(new**power)
    if third == new:
        return sizes[2] / sizes[0]
    # The inverse variance, relative to that at the base width.
    inverse = (sizes[0] / sizes[2]) ** 2
    slope = (inverse - 1) / (third - 1)
    if slope < 0:
        # It cannot stay linear, because it would become negative.
        return float(new**far)
    return float((1 + slope * (new - 1)) ** -0.5)


def measure_rates(
    run: Run,
    roles: Roles,
    growth: Mapping[str, Growth],
    sizes: Mapping[str, float],
    model: Model,
) -> tuple[dict[str, float], frozenset[str]]:
    """Return the factor of the updates of each parameter, and the separable parameters.

    Args:
        run: the run at the new size, whose optimizer is measured.
        roles: the roles of the parameters.
        growth: how much each parameter grows.
        sizes: the sizes of initial weights at the base size.
        model: the model of the new size.

    Raises:
        ConfigError: if the optimizer treats small copies of the parameters differently, or its
            updates depend on the size of a gradient in different ways.
    """
    small: dict[str, Copy] = {}
    large: dict[str, Copy] = {}
    for path, parameter in roles.parameters.items():
        ratio = growth[path]
        shapes = small_shapes(parameter.shape, model.shapes[path])
        size = sizes[path] or SIZE
        dims = parameter.inputs, parameter.layers
        small[path] = Copy(shapes[0], *dims, GRADIENT, size)
        gradient = GRADIENT * ratio.gradient / ratio.outputs
        large[path] = Copy(shapes[1], *dims, gradient, size * ratio.init)
    before = measure_updates(run.optimizer, small)
    after = measure_updates(run.optimizer, large)
    _check_masks(run.optimizer, model, small, large)
    rates: dict[str, float] = {}
    for path, ratio in growth.items():
        rates[path] = 1.0
        if before.powers[path] != after.powers[path]:
            raise ConfigError(
                f"updates of '{path}' depend on the size of its gradient in another way than at "
                f"the base size: for gradients of about {GRADIENT:g}, an epsilon of the optimizer "
                "is not small. Use a smaller one, such as 1e-8."
            )
        if before.norms[path] and after.norms[path]:
            obtained = after.norms[path] / before.norms[path]
            rates[path] = _exact(ratio.wanted / obtained, ratio)
    return rates, before.separable & after.separable


def _check_masks(
    optimizer: optax.GradientTransformation,
    model: Model,
    *copies: Mapping[str, Copy],
) -> None:
    """Raise if the optimizer treats the copies of the parameters differently than these.

    Raises:
        ConfigError: if other parameters are masked, because a label depends on their sizes.
    """
    known = masked_paths(optimizer, model.params)
    for found in copies:
        shapes = {path: copy.shape for path, copy in found.items()}
        different = known ^ masked_paths(optimizer, abstract_params(shapes))
        if different:
            raise ConfigError(
                "the optimizer treats parameters by their sizes: it masks others for smaller "
                f"copies of them ({min(different)}). Its updates are measured with such copies. "
                "Choose parameters by their names or their number of dims."
            )


def _exact(factor: float, growth: Growth) -> float:
    """Return the power of the growth that a measured factor is close to, or else the factor."""
    depth = growth.factor * growth.gradient
    ratios = {growth.inputs, growth.outputs, growth.gradient} - {1.0}
    if not ratios:
        return depth
    if len(ratios) > 1:
        return factor
    (ratio,) = ratios
    exponent = math.log(factor / depth) / math.log(ratio)
    nearest = round(exponent / HALF) * HALF
    is_close = abs(exponent - nearest) < CLOSE
    return float(ratio**nearest) * depth if is_close else factor
