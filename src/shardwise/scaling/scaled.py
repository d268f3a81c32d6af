"""`scaled`: a recipe whose hyperparameters transfer from a base width to others."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec

from shardwise.errors import ConfigError
from shardwise.run import Run
from shardwise.scaling.initial import initial_sizes
from shardwise.scaling.probe import (
    SIZE,
    GRADIENT,
    Copy,
    check_state,
    measure_updates,
    small_shapes,
)
from shardwise.scaling.roles import Overrides, Parameter, Roles, find_roles
from shardwise.scaling.trace import Model, abstract_model
from shardwise.scaling.transform import scale_init, scale_updates
from shardwise.text import Json, did_you_mean
from shardwise.tracing.jaxpr import Shape

Parameters = ParamSpec("Parameters")
# Exponents of the user's initialization are multiples of this, those of updates of twice this.
QUARTER = 0.25
HALF = 0.5
# A measured exponent this close to a multiple of a half is taken for it.
CLOSE = 0.2
# The wanted size of initial weights is the number of inputs to this power.
INIT_EXPONENTS = {"hidden": -0.5, "output": -1.0}


@dataclass(frozen=True)
class Scaled:
    """How one parameter is scaled.

    Attributes:
        parameter: the parameter and its role.
        shape: its shape at the new width.
        init: the factor of its initial value.
        rate: the factor of its updates.
    """

    parameter: Parameter
    shape: Shape
    init: float
    rate: float


@dataclass(frozen=True)
class Scaling:
    """How all parameters of a model are scaled from a base width to another one.

    Attributes:
        base: the base width.
        width: the new width.
        parameters: the parameters, by path.
        separable: the parameters whose weight decay keeps its size.
    """

    base: int
    width: int
    parameters: Mapping[str, Scaled]
    separable: frozenset[str]

    def apply(self, run: Run) -> Run:
        """Return the run with scaled initial weights and updates."""
        factors = {path: found.init for path, found in self.parameters.items()}
        rates = {path: found.rate for path, found in self.parameters.items()}
        return replace(
            run,
            model=scale_init(run.model, factors),
            optimizer=scale_updates(run.optimizer, rates, self.separable),
        )

    def as_json(self) -> Json:
        """Return the scaling as JSON."""
        return {
            "base": self.base,
            "width": self.width,
            "parameters": [
                {
                    "path": path,
                    "base_shape": list(found.parameter.shape),
                    "shape": list(found.shape),
                    "role": found.parameter.role,
                    "why": found.parameter.why,
                    "init": found.init,
                    "rate": found.rate,
                }
                for path, found in self.parameters.items()
            ],
        }


def find_scaling(
    make_run: Callable[[int], Run],
    width: int,
    base: int,
    roles: Overrides | None = None,
) -> Scaling:
    """Find out how a run has to be scaled from a base width to another one.

    The model is traced at the base width and at twice this width. Its initial weights are drawn at
    both, and the optimizer is called with small copies of the parameters.

    Args:
        make_run: returns the run for a width.
        width: the new width.
        base: the base width, whose hyperparameters are known.
        roles: roles by path pattern, for parameters whose role cannot be found.

    Returns:
        The scaling. At the base width, all factors are 1.

    Raises:
        ConfigError: if the role of a parameter cannot be decided, or if the optimizer cannot be
            scaled.

    Example:
        >>> scaling = find_scaling(lambda width: recipe(width=width), 1024, base=64)
        >>> run = scaling.apply(recipe(width=1024))
    """
    found = find_roles(make_run, base, roles)
    run = make_run(width)
    model = abstract_model(run)
    check_state(run.optimizer, model.params)
    exponents = _init_exponents(make_run, base, found)
    growth = {
        path: _Growth.of(parameter, model.shapes[path])
        for path, parameter in found.parameters.items()
    }
    growth = _with_folds(growth, found)
    inits = {
        path: ratio.init / ratio.reference ** exponents.slopes[path]
        if exponents.sizes[path]
        else 1.0
        for path, ratio in growth.items()
    }
    rates, separable = _rates(run, found, growth, exponents.sizes, model)
    parameters = {
        path: Scaled(parameter, model.shapes[path], inits[path], rates[path])
        for path, parameter in found.parameters.items()
    }
    return Scaling(base, width, parameters, separable)


@dataclass(frozen=True)
class _Growth:
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
    def of(cls, parameter: Parameter, shape: Shape) -> "_Growth":
        """Return the growth of a parameter to another shape."""

        def ratio(dims: tuple[int, ...]) -> float:
            ratios = [shape[dim] / parameter.shape[dim] for dim in dims]
            return math.prod(ratios)

        inputs, outputs = ratio(parameter.inputs), ratio(parameter.outputs)
        exponent = INIT_EXPONENTS.get(parameter.role, 0.0)
        return cls(inputs, outputs, inputs**exponent)


def _with_folds(
    growth: Mapping[str, _Growth], roles: Roles
) -> dict[str, _Growth]:
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


@dataclass(frozen=True)
class _InitialWeights:
    """Measurements of the user's initialization.

    Attributes:
        sizes: the root mean square of each parameter at the base width.
        slopes: the exponent with which it changes.
    """

    sizes: Mapping[str, float]
    slopes: Mapping[str, float]


def _init_exponents(
    make_run: Callable[[int], Run], base: int, roles: Roles
) -> _InitialWeights:
    small, large = make_run(base), make_run(2 * base)
    large_model = abstract_model(large)
    before = initial_sizes(small, abstract_model(small))
    after = initial_sizes(large, large_model)
    slopes: dict[str, float] = {}
    for path, parameter in roles.parameters.items():
        growth = _Growth.of(parameter, large_model.shapes[path]).reference
        slopes[path] = 0.0
        if before[path] and after[path] and growth != 1:
            exponent = math.log(after[path] / before[path]) / math.log(growth)
            slopes[path] = round(exponent / QUARTER) * QUARTER
    return _InitialWeights(before, slopes)


def _rates(
    run: Run,
    roles: Roles,
    growth: Mapping[str, _Growth],
    sizes: Mapping[str, float],
    model: Model,
) -> tuple[dict[str, float], frozenset[str]]:
    """Return the factor of the updates of each parameter, and the separable parameters."""
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
    rates: dict[str, float] = {}
    for path, ratio in growth.items():
        rates[path] = 1.0
        if before.norms[path] and after.norms[path]:
            obtained = after.norms[path] / before.norms[path]
            rates[path] = _exact(ratio.wanted / obtained, ratio)
    return rates, before.separable & after.separable


def _exact(factor: float, growth: _Growth) -> float:
    """Return the power of the growth that a measured factor is close to, or else the factor."""
    ratios = {growth.inputs, growth.outputs, growth.gradient} - {1.0}
    if not ratios:
        return 1.0
    if len(ratios) > 1:
        return factor
    (ratio,) = ratios
    exponent = math.log(factor) / math.log(ratio)
    nearest = round(exponent / HALF) * HALF
    is_close = abs(exponent - nearest) < CLOSE
    return float(ratio**nearest) if is_close else factor


def scaled(
    *,
    width: int,
    name: str = "width",
    roles: Overrides | None = None,
) -> Callable[[Callable[Parameters, Run]], Callable[Parameters, Run]]:
    """Let the hyperparameters of a recipe transfer from one width of its model to others.

    At the base width, the recipe does not change. At any other width, initial weights and updates
    are multiplied by numbers that keep activations and their changes at the same size, so that the
    learning rate that is best at the base width is best there, too. The numbers follow from the
    shapes, a trace of the loss, and measurements of the initialization and the optimizer.

    Args:
        width: the base width.
        name: the argument of the recipe that sets the width.
        roles: roles by path pattern, for parameters whose role cannot be found.

    Returns:
        A decorator of recipes.

    Example:
        >>> @scaled(width=64)
        ... def recipe(width: int = 256, lr: float = 4e-3) -> Run: ...
    """

    def decorate(recipe: Callable[Parameters, Run]) -> Callable[Parameters, Run]:
        signature = inspect.signature(recipe)
        if name not in signature.parameters:
            hint = did_you_mean(name, signature.parameters)
            raise ConfigError(
                f"the recipe '{recipe.__name__}' has no argument '{name}' for its width.{hint}"
            )

        @functools.wraps(recipe)
        def scaled_recipe(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Run:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            chosen = bound.arguments[name]
            run = recipe(*args, **kwargs)
            if chosen == width or not isinstance(run, Run):
                return run

            def make_run(other: int) -> Run:
                return recipe(**{**bound.arguments, name: other})

            return find_scaling(make_run, chosen, width, roles).apply(run)

        scaled_recipe.base_width = width  # type: ignore[attr-defined]
        return scaled_recipe

    return decorate
