"""How much each parameter grows from one size to another, and what its factors should be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError
from shardwise.scaling.initial import initial_sizes
from shardwise.scaling.roles import Parameter, Roles
from shardwise.scaling.size import MakeRun, Size
from shardwise.scaling.trace import Model, abstract_model
from shardwise.text import any_layer
from shardwise.tracing.jaxpr import Shape

# The wanted size of initial weights is the number of inputs to this power.
INIT_EXPONENTS = {"hidden": -0.5, "output": -1.0}
# Measured exponents of initial weights are multiples of this.
QUARTER = 0.25


@dataclass(frozen=True)
class Growth:
    """How much a parameter grows.

    Attributes:
        inputs: the ratio of the numbers of inputs that a matmul sums over.
        outputs: the ratio of the numbers of all other entries.
        init: the wanted ratio of the sizes of initial weights.
        factor: a multiplier that is folded into the parameter.
        gradient: the ratio of the sizes of gradients that the multiplier causes.
    """

    inputs: float
    outputs: float
    init: float
    factor: float = 1.0
    gradient: float = 1.0

    @property
    def reference(self) -> float:
        """The ratio that the user's initialization is measured against."""
        return self.inputs if self.inputs != 1 else self.outputs

    @property
    def wanted(self) -> float:
        """The wanted ratio of the spectral norms of updates."""
        return self.factor * math.sqrt(self.outputs / self.inputs)

    @classmethod
    def of(cls, parameter: Parameter, shape: Shape) -> "Growth":
        """Return the growth of a parameter to another shape."""

        def ratio(dims: tuple[int, ...]) -> float:
            ratios = [shape[dim] / parameter.shape[dim] for dim in dims]
            return math.prod(ratios)

        inputs, outputs = ratio(parameter.inputs), ratio(parameter.outputs)
        exponent = INIT_EXPONENTS.get(parameter.role, 0.0)
        return cls(inputs, outputs, inputs**exponent)


def find_growth(
    roles: Roles, model: Model, make_run: MakeRun, size: Size, base: Size
) -> dict[str, Growth]:
    """Return how much each parameter grows, with the factors of tied tables and of the depth.

    Args:
        roles: the roles of the parameters.
        model: the model of the new size.
        make_run: returns the run for a size.
        size: the new size.
        base: the base size.

    Raises:
        ConfigError: if the depth changes and the model has no residual branches, or one without a
            last matrix.
    """
    growth = {
        path: Growth.of(parameter, model.shapes[path])
        for path, parameter in roles.parameters.items()
    }
    growth = _with_folds(growth, roles)
    return _with_branches(growth, roles, make_run, size, base)


def _with_folds(growth: Mapping[str, Growth], roles: Roles) -> dict[str, Growth]:
    """Return the growth with the output multipliers of tied parameters."""
    result = dict(growth)
    for path, parameter in roles.parameters.items():
        for name in parameter.folds:
            factor = 1 / growth[path].outputs
            before = growth[name]
            result[name] = replace(
                before,
                init=before.init * factor,
                factor=factor,
                gradient=1 / factor,
            )
    return result


def _with_branches(
    growth: Mapping[str, Growth],
    roles: Roles,
    make_run: MakeRun,
    size: Size,
    base: Size,
) -> dict[str, Growth]:
    """Return the growth with the factor base depth / depth of residual branches.

    Raises:
        ConfigError: if the depth changes and the model has no residual branches, or one without a
            last matrix.
    """
    result = dict(growth)
    if size.depth == base.depth:
        return result
    if roles.unscaled:
        raise ConfigError(
            f"the residual branch `x + f(x)` at {', '.join(roles.unscaled)} does not end with a "
            f"parameter that scales all of it, so it cannot be scaled from depth {base.depth} to "
            f"{size.depth}. Multiply its result by a matrix or a gain, or keep the depth."
        )
    members = {path for branch in roles.branches for path in branch}
    if not members:
        raise ConfigError(
            f"the model has no residual branches `x + f(x)`, so it cannot be scaled from depth "
            f"{base.depth} to {size.depth}. Keep its depth."
        )
    slopes = _depth_slopes(make_run, base)
    factor = base.depth / size.depth
    for path in roles.inside - members:
        # Gradients pass through the last matrix, which is smaller.
        before = growth[path]
        result[path] = replace(before, gradient=before.gradient * factor)
    for path in members:
        before = growth[path]
        # What the user's initialization does already, such as 1 / sqrt(depth).
        given = factor ** -slopes.get(any_layer(path), 0.0)
        init = before.init * factor / given
        result[path] = replace(before, init=init, factor=before.factor * factor)
    return result


def _depth_slopes(make_run: MakeRun, base: Size) -> dict[str, float]:
    """Return the exponent of the depth in the initial size of each kind of parameter."""
    sizes: list[dict[str, float]] = []
    for depth in (base.depth, 2 * base.depth):
        run = make_run(replace(base, depth=depth))
        found = initial_sizes(run, abstract_model(run))
        sizes.append({any_layer(path): value for path, value in found.items()})
    before, after = sizes
    slopes: dict[str, float] = {}
    for path, value in before.items():
        if value and after.get(path):
            exponent = math.log2(after[path] / value)
            slopes[path] = round(exponent / QUARTER) * QUARTER
    return slopes
