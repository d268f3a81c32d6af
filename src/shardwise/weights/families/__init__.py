"""The model families whose published weights shardwise reads and writes, one module each.

To add a family: write its model in `shardwise/models`, its `Family` in a module here, and add it to
`FAMILIES`. Loading, exporting and sampling then know it.
"""

from collections.abc import Iterable
from typing import Any

from shardwise.weights.families.base import Family, ModelConfig
from shardwise.weights.families.gpt2 import GPT2
from shardwise.weights.families.llama import LLAMA

# The first family is assumed for a `config.json` that names none.
FAMILIES: tuple[Family[Any], ...] = (GPT2, LLAMA)


def family_of(config: ModelConfig) -> Family[Any]:
    """Return the family that a model configuration belongs to.

    Raises:
        TypeError: if it belongs to none.
    """
    for family in FAMILIES:
        if isinstance(config, family.config_class):
            return family
    known = ", ".join(family.config_class.__name__ for family in FAMILIES)
    raise TypeError(
        f"a {type(config).__name__} belongs to no model family. Known: {known}."
    )


def family_of_tensors(names: Iterable[str]) -> Family[Any] | None:
    """Return the family whose published weights have tensors of these names, or None."""
    given = set(names)
    return next((family for family in FAMILIES if family.owns(given)), None)
