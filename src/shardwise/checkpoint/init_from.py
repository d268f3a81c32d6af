"""Initial weights of a run: where they come from, and what was loaded.

`shardwise.weights.load` reads them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.files.paths import AnyPath, local_path

# Precedes the name of a model on the Hugging Face Hub, as in `hf:owner/name`.
HUB = "hf:"
# How many variables of one kind `Loaded.table` names.
MAX_NAMED = 3


@dataclass(frozen=True)
class InitFrom:
    """The source of a run's initial weights.

    Attributes:
        path: a run directory, one of its steps, a checkpoint that Orbax wrote without shardwise, a
            safetensors file, a directory in the layout of the Hugging Face Hub, or
            `"hf:owner/name"`.
        rename: maps patterns of variable paths in this model to paths in the source. The first
            pattern that matches decides. Each `*` in the target is replaced by the text that the
            `*` in the pattern matched. The target None initializes the variable from the seed.
            A variable that matches no pattern has the same path in the source.
        step: the step of a run to read: a number, `"best"`, or None for the newest.
        average: read the averaged weights that the optimizer of the run keeps.
        cast: convert arrays of another dtype. By default they are an error.
        item: the tree with the weights in a checkpoint of plain Orbax: the name of an item, the
            path of a subtree such as `"model"`, or both, as in `"state/params"`. By default it is
            the only item or subtree whose names match this model.

    Example:
        >>> init = InitFrom("runs/pretrained", rename={"head/*": None, "body/*": "encoder/*"})
    """

    path: AnyPath
    rename: Mapping[str, str | None] = field(default_factory=dict)
    step: int | Literal["best"] | None = None
    average: bool = False
    cast: bool = False
    item: str | None = None

    def __post_init__(self) -> None:
        if not os.fspath(self.path).startswith(HUB):
            local_path(self.path)
        for pattern, target in self.rename.items():
            if target is not None and target.count("*") > pattern.count("*"):
                raise ConfigError(
                    f"init_from: the target '{target}' has more * than its pattern '{pattern}'. "
                    "Each * of a target needs a * in the pattern."
                )


@dataclass(frozen=True)
class Loaded:
    """What became of every variable when initial weights were loaded.

    Attributes:
        source: where the weights came from.
        taken: the variables that were loaded: path in the model to path in the source.
        fresh: the variables that were initialized from the seed.
        left_out: the paths in the source that were not used.
        average: whether the weights are the averages that the source keeps.
        item: the tree in the source, if it is a checkpoint of plain Orbax with several.
    """

    source: str
    taken: Mapping[str, str]
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]
    average: bool = False
    item: str | None = None

    def table(self) -> Table:
        """Return a table with the number of variables of each kind and a few of their names."""
        kinds = {
            "loaded": [path for path, name in self.taken.items() if path == name],
            "renamed": [
                f"{path} from {name}"
                for path, name in self.taken.items()
                if path != name
            ],
            "initialized from the seed": self.fresh,
            "in the source, not used": self.left_out,
        }
        table = Table(
            "",
            "variables",
            "",
            title=f"weights from {self.source}{f', {self.item}' if self.item else ''}",
            title_justify="left",
        )
        for kind, names in kinds.items():
            if names:
                listed = ", ".join(names[:MAX_NAMED])
                if len(names) > MAX_NAMED:
                    listed += ", ..."
                table.add_row(kind, str(len(names)), listed)
        return table
