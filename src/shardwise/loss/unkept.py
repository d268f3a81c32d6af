"""Changes of a forward pass that are not kept, and modules that it reads from outside."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flax import nnx

from shardwise.findings import Finding
from shardwise.module import path_name

# Attributes with values of these types are constants of a compiled step.
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Snapshot:
    """What a model consists of at one moment.

    Attributes:
        constants: the Python numbers and texts among its attributes, by path.
        variables: the types of its variables, by path.
    """

    constants: Mapping[str, object]
    variables: Mapping[str, type]


def take_snapshot(model: nnx.Module) -> Snapshot:
    """Return what a model consists of now."""
    constants = {
        path_name((*path, name)): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if isinstance(value, CONSTANTS)
    }
    variables = {
        path_name(path): type(variable)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    return Snapshot(constants, variables)


def find_unkept(before: Snapshot, after: Snapshot) -> Iterator[Finding]:
    """Yield a finding for each kind of change in a forward pass that the next step does not see.

    `nnx.sow` creates variables of type `nnx.Intermediate`, which are meant to be dropped.

    Args:
        before: the model before the forward pass.
        after: the model after it.
    """
    # `is not` comes first, because NaN differs from itself.
    changed = [
        path
        for path, value in after.constants.items()
        if before.constants.get(path) is not value
        and before.constants.get(path) != value
    ]
    if changed:
        old = before.constants.get(changed[0])
        new = after.constants[changed[0]]
        yield Finding(
            "attribute-not-kept",
            f"the forward pass changes an attribute from {old!r} to {new!r}. It is a constant of "
            "the compiled step, which begins with the first value each time",
            "Make it an nnx.Variable that holds an array.",
            tuple(changed),
        )
    created = [
        path
        for path, kind in after.variables.items()
        if path not in before.variables and not issubclass(kind, nnx.Intermediate)
    ]
    if created:
        yield Finding(
            "variable-not-kept",
            "the forward pass creates a variable, which is dropped after the step",
            "Create it in __init__.",
            tuple(created),
        )


def find_outside_modules(loss: object) -> Iterator[Finding]:
    """Yield a finding if a loss uses a module that is not part of the model.

    Args:
        loss: the loss, a function or another callable.
    """
    names = tuple(
        name for name, value in _outside(loss) if isinstance(value, nnx.Module)
    )
    if names:
        yield Finding(
            "module-outside",
            "the loss uses a module that is not part of the model. Its arrays are constants of the "
            "compiled step: they are stored in the program, and later changes have no effect",
            "Make it an attribute of the model. If it must not train, use shardwise.freeze.",
            names,
        )


def _outside(function: object) -> Iterator[tuple[str, object]]:
    """Yield name and value of what a function uses and does not get from its caller."""
    # A decorator such as `accelerate` keeps the function here.
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        yield from _outside(inner)
    if isinstance(function, functools.partial):
        yield from ((f"argument {n}", value) for n, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    if inspect.ismethod(function):
        yield "self", function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        try:
            used = inspect.getclosurevars(function)
        except ValueError:
            # A variable of the closure has no value yet.
            return
        yield from {**used.nonlocals, **used.globals}.items()
