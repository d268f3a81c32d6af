"""What a trace does with the parameters: their uses, and the residual branches that they scale."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jax.extend import core

from shardwise.scaling.values import NONE, Paths, Value
from shardwise.tracing.jaxpr import frames_of

Kind: TypeAlias = Literal[
    "matmul", "selected", "lookup", "rows", "elementwise", "unknown"
]
# Files of these packages are not the place where a user's model does something.
HIDDEN = ("/jax/", "/flax/", "/optax/", "/shardwise/kernels/", "/shardwise/scaling/")


@dataclass(frozen=True)
class Use:
    """An operation in which a parameter meets activations.

    Attributes:
        path: the parameter.
        kind: what the operation does with it. "selected" is a matmul of a part of the parameter
            that the data select, such as the kernel of an expert. "rows" is a matmul in which the
            parameter takes the place of activations, such as learned queries.
        operation: the name of the primitive.
        contracted: the dims of the parameter that a matmul or a convolution sums over.
        place: file and line of the operation.
        scales: the parameters that scale the activations: the result is multiplied by a factor if
            all of them are. Empty if there are none.
        has_rows: whether activations take part, or what takes their place. Otherwise it is the
            matmul with a single vector, such as those that find the largest singular value.
    """

    path: str
    kind: Kind
    operation: str
    contracted: frozenset[int] = frozenset()
    place: str = ""
    scales: Paths = NONE
    has_rows: bool = True


@dataclass(frozen=True)
class Contraction:
    """A matmul of two activations, such as queries and keys, or a sum over their product.

    Attributes:
        size: the number of entries that it sums over.
        place: file and line of the operation.
    """

    size: int
    place: str


@dataclass
class Flow:
    """What a trace does with the parameters.

    Attributes:
        growing: the dims of each parameter that grow with the width, where this is known.
        uses: the uses of all parameters, in the order of the trace.
        layers: for each parameter, the dims that a scan iterates over.
        contractions: the matmuls of two activations.
        branches: the parameters that scale a residual branch, for each sum of a stream `x` and a
            branch that is computed from `x`, and for each bias that is added to a stream.
        inside: the parameters of residual branches, except those that scale them.
        multipliers: numbers that the model multiplies with or divides by, by file and line, except
            the sizes that a mean divides by.
        unscaled: file and line of sums with a branch that has parameters, none of which scales it.
    """

    growing: Mapping[str, Collection[int]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    layers: dict[str, set[int]] = field(default_factory=dict)
    contractions: list[Contraction] = field(default_factory=list)
    branches: list[Paths] = field(default_factory=list)
    inside: Paths = NONE
    multipliers: dict[str, set[float]] = field(default_factory=dict)
    unscaled: list[str] = field(default_factory=list)

    def of(self, path: str) -> list[Use]:
        """Return the uses of one parameter."""
        return [use for use in self.uses if use.path == path]

    def grows(self, value: Value, numbers: Iterable[int]) -> bool:
        """Return whether one of some dims of a value grows with the width."""
        numbers = tuple(numbers)
        return any(
            dims[number] & set(self.growing.get(path, ()))
            for path, dims in value.dims.items()
            for number in numbers
        )


def is_of_user(equation: core.JaxprEqn) -> bool:
    """Return whether the model or the loss of the user computes something, and not a library."""
    outside = (f.file_name for f in frames_of(equation) if "/jax/" not in f.file_name)
    return not any(part in next(outside, "") for part in HIDDEN)


def place_of(equation: core.JaxprEqn) -> str:
    """Return file and line of the model that an equation was traced from."""
    for frame in frames_of(equation):
        if not any(part in frame.file_name for part in HIDDEN):
            name = frame.file_name.rpartition("/")[2]
            return f"{name}:{frame.line_num}"
    return ""
