"""The source of a run's initial weights. `shardwise.weights.load` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class InitFrom:
    """The source of a run's initial weights.

    Attributes:
        path: a run directory, one of its steps, a safetensors file, a directory in the layout of
            the Hugging Face Hub, or `"hf:owner/name"`.
        rename: maps patterns of variable paths in this model to paths in the source. The first
            pattern that matches decides. Each `*` in the target is replaced by the text that the
            `*` in the pattern matched. The target None initializes the variable from the seed.
            A variable that matches no pattern has the same path in the source.
        step: the step of a run to read: a number, `"best"`, or None for the newest.
        average: read the averaged weights that the optimizer of the run keeps.
        cast: convert arrays of another dtype. By default they are an error.

    Example:
        >>> init = InitFrom("runs/pretrained", rename={"head/*": None, "body/*": "encoder/*"})
    """

    path: Path | str
    rename: Mapping[str, str | None] = field(default_factory=dict)
    step: int | Literal["best"] | None = None
    average: bool = False
    cast: bool = False

    def __post_init__(self) -> None:
        for pattern, target in self.rename.items():
            if target is not None and target.count("*") > pattern.count("*"):
                raise ConfigError(
                    f"init_from: the target '{target}' has more * than its pattern '{pattern}'. "
                    "Each * of a target needs a * in the pattern."
                )
