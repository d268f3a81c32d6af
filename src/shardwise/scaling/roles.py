"""The role of each parameter: which of its dims grow with the width, and what sums over them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, get_args

from shardwise.errors import ConfigError
from shardwise.run import Run
from shardwise.scaling.trace import Model, abstract_model, follow_run
from shardwise.scaling.uses import Flow, Use
from shardwise.scaling.values import NONE, Paths
from shardwise.text import did_you_mean
from shardwise.tracing.jaxpr import Shape
from shardwise.tree import matches

Role: TypeAlias = Literal["input", "hidden", "output", "vector", "tied", "finite"]
ROLES: tuple[Role, ...] = get_args(Role)
# A tied table needs a norm that carries its output multiplier, which only the trace can find.
SETTABLE = tuple(role for role in ROLES if role != "tied")
# Path patterns and the roles of the parameters that they match.
Overrides: TypeAlias = Mapping[str, Role]


@dataclass(frozen=True)
class Parameter:
    """A parameter and its role.

    Attributes:
        path: its path.
        shape: its shape at the base width.
        role: "input" (only its outputs grow with the width), "hidden" (inputs and outputs grow),
            "output" (only its inputs grow), "vector" (a gain, a bias or another parameter that is
            not contracted), "tied" (an input and an output), or "finite" (nothing grows).
        why: the operation that decides the role.
        inputs: the dims that grow and that a matmul sums over.
        outputs: the other dims that grow.
        layers: the dims that count layers.
        folds: parameters that carry the output multiplier of a tied parameter.
    """

    path: str
    shape: Shape
    role: Role
    why: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    folds: Paths = frozenset()


@dataclass(frozen=True)
class Roles:
    """The roles of all parameters of a model.

    Attributes:
        parameters: the parameters, by path.
        growing: the dims of each parameter that grow with the width.
        branches: the parameters whose common factor scales a residual branch, for each branch.
        inside: the other parameters of these branches.
        multipliers: numbers that the model multiplies with, by file and line.
        warnings: what the factors of the parameters do not take into account.
        unscaled: file and line of sums with a branch that no parameter scales.
    """

    parameters: Mapping[str, Parameter]
    growing: Mapping[str, tuple[int, ...]]
    branches: tuple[Paths, ...]
    inside: Paths = NONE
    multipliers: Mapping[str, set[float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unscaled: tuple[str, ...] = ()


def find_roles(
    make_run: Callable[[int], Run], base: int, overrides: Overrides | None = None
) -> Roles:
    """Find the roles of the parameters of a model, from traces at two widths.

    Args:
        make_run: returns the run for a width.
        base: the base width. The model is also traced at twice this width.
        overrides: roles by path pattern. The first pattern that matches decides.

    Returns:
        The roles.

    Raises:
        ConfigError: if a role cannot be decided. The message says what to do.
    """
    small_run, large_run = make_run(base), make_run(2 * base)
    small, large = abstract_model(small_run), abstract_model(large_run)
    growing = growing_dims(small, large, (base, 2 * base))
    flow = follow_run(small_run, small, growing)
    wider = follow_run(large_run, large, growing)
    _check_contractions(flow, wider, base)
    overrides = {} if overrides is None else overrides
    _check_overrides(overrides, small.shapes)
    parameters: dict[str, Parameter] = {}
    problems: list[str] = []
    for path, shape in small.shapes.items():
        try:
            role = _role(path, shape, growing[path], flow, overrides)
            parameters[path] = role
        except ConfigError as error:
            problems.append(str(error))
    problems += _shared_folds(parameters, flow)
    if problems:
        raise ConfigError("\n".join(problems))
    return Roles(
        parameters=parameters,
        growing=growing,
        branches=tuple(flow.branches),
        inside=flow.inside,
        multipliers=flow.multipliers,
        warnings=changed_multipliers(
            flow.multipliers, wider.multipliers, ("width", base, 2 * base)
        ),
        unscaled=tuple(dict.fromkeys(flow.unscaled)),
    )


def changed_multipliers(
    before: Mapping[str, set[float]],
    after: Mapping[str, set[float]],
    sizes: tuple[str, int, int],
) -> tuple[str, ...]:
    """Return a warning for each number that the model multiplies with and that is not constant.

    Args:
        before: the numbers of the first model, by file and line.
        after: those of the second.
        sizes: what differs between the models, and its two values.
    """
    name, first, second = sizes
    return tuple(
        f"{place}: the model multiplies by a number that depends on the {name}: "
        f"{_show_numbers(before[place])} at {name} {first}, {_show_numbers(after[place])} at "
        f"{second}. The factors do not take it into account. Multiply by a constant."
        for place in before
        if place in after and before[place] != after[place]
    )


def _show_numbers(values: set[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in sorted(values))


def growing_dims(
    small: Model, large: Model, widths: tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return the dims of each parameter that differ between the models of two widths.

    Raises:
        ConfigError: if the models have different parameters, or nothing grows.
    """
    before, after = small.shapes, large.shapes
    different = sorted(before.keys() ^ after.keys())
    ranks = [path for path in before if len(before[path]) != len(after.get(path, ()))]
    if different or ranks:
        names = ", ".join([*different, *ranks][:4])
        raise ConfigError(
            f"the models of widths {widths[0]} and {widths[1]} have different parameters: {names}. "
            "The width may change the sizes of parameters, not their number."
        )
    growing = {
        path: tuple(i for i, dim in enumerate(shape) if dim != after[path][i])
        for path, shape in before.items()
    }
    if not any(growing.values()):
        raise ConfigError(
            f"no parameter grows from width {widths[0]} to {widths[1]}. Name the argument of the "
            "recipe that sets the width of the model."
        )
    return growing


@dataclass(frozen=True)
class _Evidence:
    """What the trace shows about one parameter.

    Attributes:
        growing: the dims that grow with the width.
        uses: all uses.
        summing: the matmuls that sum over a growing dim.
        others: the matmuls that do not.
        lookups: the lookups of entries.
    """

    growing: tuple[int, ...]
    uses: list[Use]
    summing: list[Use]
    others: list[Use]
    lookups: list[Use]

    @classmethod
    def of(cls, uses: list[Use], growing: tuple[int, ...]) -> "_Evidence":
        """Sort the uses of a parameter."""
        matmuls = [use for use in uses if use.kind in ("matmul", "selected")]
        # Matmuls with a single vector decide nothing where there are others.
        matmuls = [use for use in matmuls if use.has_rows] or matmuls
        summing = [use for use in matmuls if use.contracted & set(growing)]
        others = [use for use in matmuls if use not in summing]
        lookups = [use for use in uses if use.kind == "lookup"]
        if any(use.kind == "selected" for use in matmuls):
            # The data select an expert, not a token.
            lookups = []
        return cls(growing, uses, summing, others, lookups)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The growing dims that a matmul sums over.

        A square kernel that is used as it is and transposed has the inputs of its first use.
        """
        found = [use.contracted & set(self.growing) for use in self.summing]
        summed = frozenset[int]().union(*found)
        if summed == set(self.growing) and summed not in found:
            summed = found[0] if found else summed
        return tuple(dim for dim in self.growing if dim in summed)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The other growing dims."""
        return tuple(dim for dim in self.growing if dim not in self.inputs)

    @property
    def unknown(self) -> Use | None:
        """A use whose meaning is unknown, if no matmul decides the role."""
        if self.summing or self.others:
            return None
        found = (use for use in self.uses if use.kind == "unknown")
        return next(found, None)


def _role(
    path: str,
    shape: Shape,
    growing: tuple[int, ...],
    flow: Flow,
    overrides: Overrides,
) -> Parameter:
    """Return the parameter with its role, or raise if it cannot be decided."""
    seen = _Evidence.of(flow.of(path), growing)
    layers = tuple(sorted(flow.layers.get(path, ())))
    known = partial(Parameter, path=path, shape=shape, layers=layers)
    override = _override(path, overrides)
    if override is not None:
        pattern, role = override
        dims = _override_dims(path, shape, role, growing, seen.inputs)
        why = f"override '{pattern}'"
        return known(role=role, why=why, inputs=dims[0], outputs=dims[1])
    if not growing:
        return known(role="finite", why="no dim grows with the width")
    if not seen.uses:
        why = "the loss does not use it"
        return known(role="vector", why=why, outputs=growing)
    if seen.unknown is not None:
        raise _unknown(path, shape, seen.unknown)
    as_input = seen.lookups + seen.others
    if seen.summing and as_input:
        why = f"{_show(as_input[0], shape)}, and {_show(seen.summing[0], shape)}"
        folds = _folds(path, shape, seen.summing)
        return known(role="tied", why=why, outputs=growing, folds=folds)
    found: Role = "vector"
    if seen.summing:
        found = "hidden" if seen.outputs else "output"
    elif as_input:
        found = "input"
    decisive = (seen.summing or seen.others or seen.lookups or seen.uses)[0]
    return known(
        role=found,
        why=_show(decisive, shape),
        inputs=seen.inputs,
        outputs=seen.outputs,
    )


def _override(path: str, overrides: Overrides) -> tuple[str, Role] | None:
    for pattern, role in overrides.items():
        if matches(pattern, path):
            return pattern, role
    return None


def _override_dims(
    path: str,
    shape: Shape,
    role: Role,
    growing: tuple[int, ...],
    inputs: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the input dims and the output dims of a parameter whose role is given."""
    match role:
        case "finite":
            return (), ()
        case "output":
            return growing, ()
        case "hidden":
            # Without a use in the trace, all dims but the last are inputs, as in Flax.
            found = inputs or growing[:-1]
            if not found or len(found) == len(growing):
                raise ConfigError(
                    f"'{path}' {list(shape)} cannot be hidden: {len(growing)} of its dims grow "
                    "with the width. Use input, output or vector."
                )
            return found, tuple(dim for dim in growing if dim not in found)
    return (), growing


def _folds(path: str, shape: Shape, summing: list[Use]) -> Paths:
    """Return the parameters that the output multiplier of a tied parameter is folded into."""
    for use in summing:
        if not use.scales or path in use.scales:
            raise ConfigError(
                f"'{path}' {list(shape)} is both an input and an output ({_show(use, shape)}), so "
                "its output needs the multiplier base width / width, and no norm with a gain "
                "precedes it that could carry this factor. Untie it, or multiply the output in the "
                f"model, and set the role of '{path}' to input."
            )
    scales = {use.scales for use in summing}
    return frozenset(name for found in scales for name in found)


def _shared_folds(parameters: Mapping[str, Parameter], flow: Flow) -> list[str]:
    """Return a message for each norm that would scale the input of another parameter as well."""
    problems = []
    for path, parameter in parameters.items():
        for use in flow.uses:
            shared = use.scales & parameter.folds
            if shared and use.path != path:
                problems.append(
                    f"'{path}' is tied, so '{min(shared)}' should carry its output multiplier, and "
                    f"'{use.path}' reads the same activations. Untie '{path}', or use another norm."
                )
    return problems


def _show(use: Use, shape: Shape) -> str:
    """Return what a use does, in a few words."""
    place = f" ({use.place})" if use.place else ""
    if use.kind in ("matmul", "selected"):
        dims = ", ".join(str(dim) for dim in sorted(use.contracted))
        sizes = math.prod(shape[dim] for dim in use.contracted)
        name = "convolution" if use.operation.startswith("conv") else "matmul"
        return f"{name} over dim {dims} of size {sizes}{place}"
    if use.kind == "lookup":
        return f"lookup{place}"
    if use.kind == "rows":
        return f"rows that pass through a kernel{place}"
    return f"{use.operation}{place}"


def _unknown(path: str, shape: Shape, use: Use) -> ConfigError:
    return ConfigError(
        f"the role of '{path}' {list(shape)} is unknown: {use.operation} uses it "
        f"({use.place or 'in a library'}), and shardwise cannot tell which dims it sums over. "
        f"Set its role: --role '{path}=hidden', or scaled(..., roles={{'{path}': 'hidden'}})."
    )


def _check_overrides(overrides: Overrides, shapes: Mapping[str, Shape]) -> None:
    for pattern, role in overrides.items():
        if role == "tied":
            raise ConfigError(
                f"role 'tied' of '{pattern}' cannot be set: its output multiplier needs a norm "
                "that carries it, which only the trace can find. Use input or output."
            )
        if role not in SETTABLE:
            raise ConfigError(
                f"role '{role}' of '{pattern}' is unknown.{did_you_mean(role, SETTABLE)} "
                f"The roles are {', '.join(SETTABLE)}."
            )
        if not any(matches(pattern, path) for path in shapes):
            raise ConfigError(
                f"role pattern '{pattern}' matches no parameter.{did_you_mean(pattern, shapes)}"
            )


def _check_contractions(small: Flow, large: Flow, base: int) -> None:
    """Raise if products of two activations are summed over a dim that grows."""
    pairs = zip(small.contractions, large.contractions, strict=False)
    for before, after in pairs:
        if before.size != after.size:
            place = f" ({before.place})" if before.place else ""
            raise ConfigError(
                f"a matmul of two activations{place} sums over {before.size} entries at width "
                f"{base} and {after.size} at width {2 * base}, as attention does whose heads grow. "
                "Its result would grow with the width. Keep the width of a head constant, and let "
                "the number of heads grow: heads = width // 32. Keep the size of embeddings that "
                "are compared with each other constant, too."
            )
