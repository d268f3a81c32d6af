"""`scaled`: a recipe whose hyperparameters transfer from a base size to others."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ParamSpec, cast

from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.run import Run
from shardwise.scaling.growth import find_growth
from shardwise.scaling.measure import measure_initial_weights, measure_rates
from shardwise.scaling.probe import check_state
from shardwise.scaling.roles import (
    Overrides,
    Parameter,
    Roles,
    changed_multipliers,
    find_roles,
)
from shardwise.scaling.size import MakeRun, Size
from shardwise.scaling.trace import Model, abstract_model
from shardwise.scaling.transform import scale_init, scale_updates
from shardwise.text import Json, any_layer, did_you_mean
from shardwise.tracing.jaxpr import Shape

Parameters = ParamSpec("Parameters")


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
    weights = measure_initial_weights(at_width, base.width, size.width, found)
    growth = find_growth(found, model, make_run, size, base)
    inits = {
        path: ratio.init / weights.ratios[path] if weights.sizes[path] else 1.0
        for path, ratio in growth.items()
    }
    rates, separable = measure_rates(run, found, growth, weights.sizes, model)
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
