"""Where the first weights of a run come from. `shardwise.weights.load` loads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class InitFrom:
    """Where the first weights of a run come from.

    `rename` maps patterns of this model's paths, the first that fits, to the path in the checkpoint, where each `*` stands
    for what it stood for in the pattern, or to None: such a variable is begun afresh. What no pattern fits has the same path.
    """

    path: (
        Path | str
    )  # a run, one step of it, a safetensors file, a directory as published on the Hub, or "hf:owner/name"
    rename: Mapping[str, str | None] = field(default_factory=dict)
    step: int | Literal["best"] | None = None  # of a run; None: the newest
    average: bool = False  # the averaged weights of a run whose optimizer keeps them
    cast: bool = False  # whether another dtype is converted rather than refused

    def __post_init__(self) -> None:
        for pattern, target in self.rename.items():
            if target is not None and target.count("*") > pattern.count("*"):
                raise ConfigError(
                    f"init_from: '{target}' has more * than the pattern '{pattern}' that it shall be filled from."
                )
