"""How a value of a jaxpr depends on the examples of a batch, see `loss.dependence`."""

import enum
from dataclasses import dataclass
from typing import TypeAlias, cast

from jax.extend import core

from shardwise.errors import is_library

Shape: TypeAlias = tuple[int, ...]


class Kind(enum.IntEnum):
    """How a value depends on the examples of a batch; larger values are worse."""

    FREE = 0
    ROWS = 1
    SUM = 2
    STATISTIC = 3
    UNKNOWN = 4
    COUPLED = 5


@dataclass(frozen=True)
class Cause:
    """The operation that made a value what it is.

    Attributes:
        operation: the name of the JAX primitive.
        shapes: the shapes of its array inputs.
        place: file and line in the user's code, if known.
    """

    operation: str
    shapes: tuple[tuple[int, ...], ...] = ()
    place: str = ""

    def __str__(self) -> str:
        shapes = " and ".join(map(str, self.shapes))
        text = f"{self.operation} of {shapes}" if shapes else self.operation
        return f"{text} ({self.place})" if self.place else text


@dataclass(frozen=True)
class Value:
    """How one value of a jaxpr depends on the examples.

    Attributes:
        kind: the kind of dependence.
        dim: for ROWS, the dim that runs over the examples.
        entries: for ROWS, the number of consecutive entries of one example along `dim`. More than
            1 after `(B, T, D)` was reshaped to `(B * T, D)`.
        factors: for SUM, the constants that its terms are multiplied by. `mean` has `1 / B`.
        has_offset: for SUM, whether a FREE value was added, such as a regularizer.
        constant: for FREE, the value of all entries, if it is known.
        is_fixed: for FREE, whether the value depends on no input at all.
        index_dim: for FREE, the dim along which each entry is its own index (`jnp.arange`).
        index_columns: the entries of the last dim that are such an index. Indexing like
            `x[jnp.arange(B), labels]` creates it.
        origin: for FREE, the number of the input that this value is, unchanged.
        cause: for STATISTIC, COUPLED and UNKNOWN, where it happened.
    """

    kind: Kind
    dim: int = 0
    entries: int = 1
    factors: tuple[float, ...] = ()
    has_offset: bool = False
    constant: float | None = None
    is_fixed: bool = False
    index_dim: int | None = None
    index_columns: frozenset[int] = frozenset()
    origin: int | None = None
    cause: Cause | None = None


FREE = Value(Kind.FREE)


def cause_of(equation: core.JaxprEqn) -> Cause:
    """Return what a message says about an equation."""
    shapes = tuple(
        shape_of(variable) for variable in equation.invars if shape_of(variable)
    )
    frames = getattr(equation.source_info.traceback, "frames", [])
    own = [frame for frame in frames if not is_library(frame.file_name)]
    place = f"{own[0].file_name}, line {own[0].line_num}" if own else ""
    return Cause(equation.primitive.name, shapes[:2], place)


def shape_of(variable: core.Var | core.Literal) -> Shape:
    """Return the shape of a variable of a jaxpr."""
    return cast(Shape, getattr(variable.aval, "shape", ()))
