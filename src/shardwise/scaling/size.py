"""The size of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.run import Run


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
