"""`scaled`: a recipe whose hyperparameters transfer from a base size to others."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ParamSpec, TypeAlias, cast

import optax
from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.run import Run
from shardwise.scaling.initial import initial_sizes
from shardwise.scaling.probe import (
    GRADIENT,
    SIZE,
    Copy,
    abstract_params,
    check_state,
    masked_paths,
    measure_updates,
    small_shapes,
)
from shardwise.scaling.roles import (
    Overrides,
    Parameter,
    Roles,
    changed_multipliers,
    find_roles,
)
from shardwise.scaling.trace import Model, abstract_model
from shardwise.scaling.transform import scale_init, scale_updates
from shardwise.text import Json, any_layer, did_you_mean
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
class Size:
    """The size of a model.

    Attributes:
        width: its width.
        depth: the number of its layers; 1 if the depth does not change.
    """

    width: int
    depth: int = 1


# Returns the run for a size.
MakeRun: TypeAlias = Callable[[Size], Run]


@dataclass(frozen=True)
class Scaling:
    """How all parameters of a model are scaled from a base size to another one.

    Attributes:
        base: the base size.
        size: the new size.
        parameters: the parameters, by path.
        separable: the parameters whose weight decay keeps its size.
        warnings: what the factors do not take into account.
    """

    base: Size
    size: Size
    parameters: Mapping[str, Scaled]
    separable: frozenset[str]
    warnings: tuple[str, ...] = ()

    def apply(self, run: Run) -> Run:
        """Return the run with scaled initial weights and updates."""
        factors = {path: found.init for path, found in self.parameters.items()}
        rates = {path: found.rate for path, found in self.parameters.items()}
        model = scale_init(run.model, factors)
        # `shardwise explain` shows it.
        model.scaling = self  # type: ignore[attr-defined]
        optimizer = scale_updates(run.optimizer, rates, self.separable)
        return replace(run, model=model, optimizer=optimizer)

    def table(self) -> Table:
        """Return a table with one line for each kind of parameter. Equal layers share a line."""
        rows: dict[tuple[str, ...], list[str]] = {}
        why: dict[tuple[str, ...], str] = {}
        for path, found in self.parameters.items():
            parameter = found.parameter
            shapes = f"{list(parameter.shape)}", f"{list(found.shape)}"
            factors = f"{found.init:.4g}", f"{found.rate:.4g}"
            names = any_layer(path), *shapes
            row: tuple[str, ...] = (*names, parameter.role, *factors)
            rows.setdefault(row, []).append(path)
            why.setdefault(row, parameter.why)
        num_kinds = Counter(pattern for pattern, *_ in rows)
        title = f"from width {self.base.width} to {self.size.width}"
        if self.size.depth != self.base.depth:
            title += f", from depth {self.base.depth} to {self.size.depth}"
        columns = ("parameter", "base shape", "shape", "role", "init", "rate", "why")
        table = Table(*columns, title=title, title_justify="left")
        for row, paths in rows.items():
            pattern, *rest = row
            name = pattern if num_kinds[pattern] == 1 else paths[0]
            if name == paths[0] and len(paths) > 1:
                name += f" and {len(paths) - 1} more"
            table.add_row(name, *rest, why[row])
        return table

    def as_json(self) -> Json:
        """Return the scaling as JSON."""
        return {
            "base": asdict(self.base),
            "size": asdict(self.size),
            "parameters": [
                {
                    "path": path,
                    "base_shape": list(found.parameter.shape),
                    "shape": list(found.shape),
                    "role": found.parameter.role,
                    "why": found.parameter.why,
                    "init": found.init,
                    "rate": found.rate,
                    "keeps_decay": path in self.separable,
                }
                for path, found in self.parameters.items()
            ],
            "warnings": list(self.warnings),
        }


def find_scaling(
    make_run: MakeRun, size: Size, base: Size, roles: Overrides | None = None
) -> Scaling:
    """Find out how a run has to be scaled from a base size to another one.

    The model is traced at the base width and at twice this width. Its initial weights are drawn at
    both, and the optimizer is called with small copies of the parameters.

    Args:
        make_run: returns the run for a size.
        size: the new size.
        base: the base size, whose hyperparameters are known.
        roles: roles by path pattern, for parameters whose role cannot be found.

    Returns:
        The scaling. At the base size, all factors are 1.

    Raises:
        ConfigError: if the role of a parameter cannot be decided, or if the optimizer cannot be
            scaled.

    Example:
        >>> make_run = lambda size: recipe(width=size.width)  # doctest: +SKIP
        >>> scaling = find_scaling(make_run, Size(1024), Size(64))  # doctest: +SKIP
        >>> run = scaling.apply(recipe(width=1024))  # doctest: +SKIP
    """

    def at_width(width: int) -> Run:
        return make_run(replace(size, width=width))

    found = find_roles(at_width, base.width, roles)
    run = make_run(size)
    model = abstract_model(run)
    _check_shapes(found, model, size.width)
    check_state(run.optimizer, model.params)
    weights = _initial_weights(at_width, base.width, size.width, found)
    growth = {
        path: _Growth.of(parameter, model.shapes[path])
        for path, parameter in found.parameters.items()
    }
    growth = _with_folds(growth, found)
    growth = _with_branches(growth, found, make_run, size, base)
    inits = {
        path: ratio.init / weights.ratios[path] if weights.sizes[path] else 1.0
        for path, ratio in growth.items()
    }
    rates, separable = _rates(run, found, growth, weights.sizes, model)
    parameters = {
        path: Scaled(
            parameter=parameter,
            shape=model.shapes[path],
            init=inits[path],
            rate=rates[path],
        )
        for path, parameter in found.parameters.items()
    }
    warnings = found.warnings
    if size.depth != base.depth:
        shallow = find_roles(
            lambda width: make_run(Size(width, base.depth)), base.width, roles
        )
        depths = "depth", base.depth, size.depth
        warnings += changed_multipliers(shallow.multipliers, found.multipliers, depths)
    return Scaling(
        base=base,
        size=size,
        parameters=parameters,
        separable=separable,
        warnings=warnings,
    )


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


def _with_folds(growth: Mapping[str, _Growth], roles: Roles) -> dict[str, _Growth]:
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
    growth: Mapping[str, _Growth],
    roles: Roles,
    make_run: MakeRun,
    size: Size,
    base: Size,
) -> dict[str, _Growth]:
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


def _check_shapes(roles: Roles, model: Model, width: int) -> None:
    """Raise if the model of the new width differs in more than the dims that grow.

    Raises:
        ConfigError: if parameters were added or removed, or other dims grow too.
    """
    parameters = roles.parameters
    different = sorted(parameters.keys() ^ model.shapes.keys())
    for path in parameters.keys() & model.shapes.keys():
        parameter, shape = parameters[path], model.shapes[path]
        growing = roles.growing[path]
        dims = enumerate(zip(parameter.shape, shape, strict=False))
        others = [dim for dim, (before, after) in dims if before != after]
        if len(shape) != len(parameter.shape) or set(others) - {*growing}:
            different.append(path)
    if different:
        raise ConfigError(
            f"the model of width {width} differs from that of twice the base width in more than "
            f"the sizes that grow there: {', '.join(different[:4])}. Roles are found at the base "
            "width and at twice this width. Let the same sizes grow at all widths, in proportion."
        )


# Sizes that are measured at a larger width than twice the base belong to a model with at most this
# many parameters.
MAX_MEASURED = 20_000_000
# A measured exponent this close to a multiple of a quarter is taken for it. That between the base
# width and twice this width is less precise.
SAME_SLOPE = 0.03


@dataclass(frozen=True)
class _InitialWeights:
    """Measurements of the user's initialization.

    Attributes:
        sizes: the root mean square of each parameter at the base width.
        ratios: its size at the new width, divided by this.
    """

    sizes: Mapping[str, float]
    ratios: Mapping[str, float]


def _initial_weights(
    make_run: Callable[[int], Run], base: int, width: int, roles: Roles
) -> _InitialWeights:
    """Measure initial weights at the base width, at twice this width, and at a larger one."""
    widths = [base, 2 * base, _measurable(make_run, base, width)]
    runs = {each: make_run(each) for each in {*widths, width}}
    models = {each: abstract_model(run) for each, run in runs.items()}
    sizes = {each: initial_sizes(runs[each], models[each]) for each in {*widths}}
    ratios: dict[str, float] = {}
    for path, parameter in roles.parameters.items():
        found = [sizes[each][path] for each in widths]
        growth = [
            _Growth.of(parameter, models[each].shapes[path]).reference
            for each in (*widths, width)
        ]
        ratios[path] = _ratio(found, growth) if all(found) else 1.0
    return _InitialWeights(sizes[base], ratios)


def _measurable(make_run: Callable[[int], Run], base: int, width: int) -> int:
    """Return the largest width up to the new one whose initial weights are quick to draw."""
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
        sizes: the sizes at the base width, at twice this width, and at a larger one.
        growth: how much the parameter grows from the base width to these, and to the new one.
    """
    _, twice, larger, new = growth
    if twice == 1 or larger == 1:
        return 1.0
    near, far = (
        math.log(size / sizes[0]) / math.log(ratio)
        for size, ratio in zip(sizes[1:], (twice, larger), strict=True)
    )
    power = round(far / QUARTER) * QUARTER
    if abs(far - power) < SAME_SLOPE and abs(near - power) < 2 * SAME_SLOPE:
        return float(new**power)
    if larger == new:
        return sizes[2] / sizes[0]
    # The inverse variance, relative to that at the base width.
    inverse = (sizes[0] / sizes[2]) ** 2
    slope = (inverse - 1) / (larger - 1)
    return float((1 + slope * (new - 1)) ** -0.5)


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


def _exact(factor: float, growth: _Growth) -> float:
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


@dataclass(frozen=True)
class Settings:
    """How a recipe is scaled.

    Attributes:
        base: the base size.
        width_name: the argument of the recipe that sets the width.
        depth_name: the argument that sets the depth; None if the depth does not change.
        roles: roles by path pattern.
    """

    base: Size
    width_name: str = "width"
    depth_name: str | None = None
    roles: Overrides = field(default_factory=dict)

    def size_of(self, arguments: Mapping[str, object]) -> Size:
        """Return the size that some arguments of the recipe set."""
        width = _whole_number(self.width_name, arguments[self.width_name])
        if self.depth_name is None:
            return Size(width, self.base.depth)
        return Size(width, _whole_number(self.depth_name, arguments[self.depth_name]))

    def arguments_of(self, size: Size) -> dict[str, int]:
        """Return the arguments of the recipe that set a size."""
        arguments = {self.width_name: size.width}
        if self.depth_name is not None:
            arguments[self.depth_name] = size.depth
        return arguments


def _whole_number(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"argument '{name}' of the recipe is {value!r}. A size must be an integer from 1 on."
        )
    return value


def settings_of(recipe: Callable[..., object]) -> Settings | None:
    """Return how a recipe is scaled, or None if it is not."""
    settings: Settings | None = getattr(recipe, "settings", None)
    return settings


def scaled(
    *,
    width: int,
    depth: int | None = None,
    width_name: str = "width",
    depth_name: str = "depth",
    roles: Overrides | None = None,
) -> Callable[[Callable[Parameters, Run]], Callable[Parameters, Run]]:
    """Let the hyperparameters of a recipe transfer from one size of its model to others.

    At the base size, the recipe does not change. At any other size, initial weights and updates
    are multiplied by numbers that keep activations and their changes at the same size, so that the
    learning rate that is best at the base size is best there, too. The numbers follow from the
    shapes, a trace of the loss, and measurements of the initialization and the optimizer.

    Args:
        width: the base width.
        depth: the base depth. None does not scale the depth.
        width_name: the argument of the recipe that sets the width.
        depth_name: the argument of the recipe that sets the number of layers.
        roles: roles by path pattern, for parameters whose role cannot be found.

    Returns:
        A decorator of recipes.

    Raises:
        ConfigError: if the recipe has no such argument.

    Example:
        >>> @scaled(width=64)  # doctest: +SKIP
        ... def recipe(width: int = 256, lr: float = 4e-3) -> Run: ...
    """
    settings = Settings(
        base=Size(width, 1 if depth is None else depth),
        width_name=width_name,
        depth_name=None if depth is None else depth_name,
        roles={} if roles is None else roles,
    )

    def decorate(recipe: Callable[Parameters, Run]) -> Callable[Parameters, Run]:
        return scale_recipe(recipe, settings)

    return decorate


def scale_recipe(
    recipe: Callable[Parameters, Run], settings: Settings
) -> Callable[Parameters, Run]:
    """Return a recipe whose runs are scaled, see `scaled`."""
    signature = inspect.signature(recipe)
    for name in settings.arguments_of(settings.base):
        if name not in signature.parameters:
            is_width = name == settings.width_name
            option, argument = (
                ("--vary", "width_name") if is_width else ("--vary-depth", "depth_name")
            )
            raise ConfigError(
                f"the recipe '{recipe.__name__}' has no argument '{name}' that sets the size of "
                f"its model.{did_you_mean(name, signature.parameters)} Its arguments are "
                f"{', '.join(signature.parameters)}. Name the one that does: {option} NAME, or "
                f"scaled(..., {argument}='NAME')."
            )

    @functools.wraps(recipe)
    def scaled_recipe(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Run:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        size = settings.size_of(bound.arguments)
        run = recipe(*args, **kwargs)
        if size == settings.base:
            return run

        def make_run(other: Size) -> Run:
            changed = {**bound.arguments, **settings.arguments_of(other)}
            return cast(Callable[..., Run], recipe)(**changed)

        scaling = find_scaling(make_run, size, settings.base, settings.roles)
        return scaling.apply(run)

    scaled_recipe.settings = settings  # type: ignore[attr-defined]
    return scaled_recipe
