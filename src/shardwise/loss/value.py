"""How a value of a jaxpr depends on the examples of a batch, see `loss.dependence`."""

import enum
from dataclasses import dataclass

from jax.extend import core

from shardwise.tracing.jaxpr import shape_of, user_frame


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
        is_positional: whether the result depends on the positions of examples in the batch, rather
            than on other examples.
    """

    operation: str
    shapes: tuple[tuple[int, ...], ...] = ()
    place: str = ""
    is_positional: bool = False

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
        factors: for ROWS and SUM, the constants that its terms are multiplied by. `mean` has
            `1 / B`.
        has_offset: for SUM, whether a FREE value was added, such as a regularizer.
        constant: for FREE, the value of all entries, if it is known.
        is_fixed: for FREE, whether the value depends on no input at all.
        positions: for FREE, the dims along which entries differ by their position, as in
            `jnp.linspace(0, 1, B)`. Random numbers and parameters do not.
        index_dim: for FREE, the dim along which each entry is its own index (`jnp.arange`).
        index_role: what an index is used for while JAX makes negative ones positive:
            "index", "shifted" (`i + n`) or "negative" (`i < 0`).
        index_columns: the entries of the last dim that are such an index. Indexing like
            `x[jnp.arange(B), labels]` creates it.
        digest: a hash of the operations and constants that led to the value, without `factors`. If
            it differs between two batch sizes, the value depends on the batch size.
        origin: for FREE, the number of the input that this value is, unchanged.
        cause: for STATISTIC, COUPLED and UNKNOWN, where it happened.
    """

    kind: Kind
    dim: int = 0
    entries: int = 1
    factors: tuple[float, ...] = (1.0,)
    has_offset: bool = False
    constant: float | None = None
    is_fixed: bool = False
    positions: frozenset[int] = frozenset()
    index_dim: int | None = None
    index_role: str = ""
    index_columns: frozenset[int] = frozenset()
    digest: int = 0
    origin: int | None = None
    cause: Cause | None = None

    @property
    def full_digest(self) -> int:
        """The digest including `factors`, for operations that are not linear."""
        is_plain = self.factors == (1.0,) or self.kind == Kind.FREE
        return self.digest if is_plain else hash((self.digest, self.factors))


FREE = Value(Kind.FREE)


def cause_of(equation: core.JaxprEqn) -> Cause:
    """Return what a message says about an equation."""
    shapes = tuple(
        shape_of(variable) for variable in equation.invars if shape_of(variable)
    )
    own = user_frame(equation)
    place = f"{own.file_name}, line {own.line_num}" if own else ""
    return Cause(equation.primitive.name, shapes[:2], place)
