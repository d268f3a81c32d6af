"""Parameter groups by path: ordered, the first pattern that matches wins, and every parameter belongs to one.

Labels and masks are functions of the path and the array, so they are the same at creation and at every update, for
plain dictionaries and for NNX states.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from shardwise.errors import ConfigError
from shardwise.optim.schedules import Schedule
from shardwise.text import did_you_mean
from shardwise.tree import leaf_name, matches

Decays = Callable[[str, Any], bool]  # (path, array) -> whether weight decay applies
VECTORS = (
    "bias",
    "scale",
    "beta",
    "gamma",
)  # names of biases and norms, also where layers are stacked to matrices


@dataclass(frozen=True)
class Group:
    """What the parameters get whose path fits `pattern`; what is None is as for the others."""

    pattern: str | tuple[str, ...]  # "blocks/*/kernel"; `*` also spans slashes
    lr: float | Schedule | None = None
    lr_scale: float = 1.0  # times the learning rate
    weight_decay: float | None = None
    clip: float | None = None  # by the norm of this group alone
    tx: optax.GradientTransformation | None = None  # instead of the recipe's own
    frozen: bool = False  # never moves, and has no optimizer state
    name: str = ""  # in metrics and tables; by default the pattern

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)

    @property
    def label(self) -> str:
        return self.name or "+".join(self.patterns)


def label_fn(groups: Sequence[Group]) -> Callable[[Any], Any]:
    """For `optax.partition`: each parameter's group. Patterns without parameters and parameters without a group are errors."""
    labels = [group.label for group in groups]
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"two parameter groups have the same name: {', '.join(labels)}. Give one of them name=..."
        )

    def label(params: Any) -> Any:
        paths = [param_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        problems = [
            f"pattern '{pattern}' of group '{group.label}' matches no parameter.{did_you_mean(pattern, paths)}"
            for group in groups
            for pattern in group.patterns
            if not any(matches(pattern, path) for path in paths)
        ]
        if orphans := [path for path in paths if _group_of(path, groups) is None]:
            patterns = [pattern for group in groups for pattern in group.patterns]
            hints = [f"  {path}{did_you_mean(path, patterns)}" for path in orphans]
            problems.append(
                "no group claims these parameters; add Group('*') for the rest:\n"
                + "\n".join(hints)
            )
        if problems:
            raise ConfigError("\n".join(problems))
        return map_with_path(lambda path, _: _group_of(path, groups), params)

    return label


def _group_of(path: str, groups: Iterable[Group]) -> str | None:
    return next(
        (
            group.label
            for group in groups
            if any(matches(pattern, path) for pattern in group.patterns)
        ),
        None,
    )


def layerwise_decay(
    factor: float, layers: Sequence[str], *, below: str | tuple[str, ...] = ()
) -> tuple[Group, ...]:
    """Groups for fine-tuning: the last of `layers` learns at `factor` of the rate, each one before it at `factor` of the next.

    What lies `below` the layers, such as the embedding, comes after the first; all that is left learns at the full rate.
    For a GPT with 12 blocks: `layerwise_decay(0.9, [f"blocks/{i}/*" for i in range(12)], below=("tokens", "positions"))`.
    """
    groups = [
        Group(pattern, lr_scale=factor ** (len(layers) - i)) for i, pattern in enumerate(layers)
    ]
    if below:
        groups.insert(0, Group(below, lr_scale=factor ** (len(layers) + 1)))
    return (*groups, Group("*", name="rest"))


def decays_matrices(path: str, leaf: Any) -> bool:
    """Kernels and tables, but neither biases nor norms."""
    return leaf.ndim >= 2 and path.rpartition("/")[2] not in VECTORS


def mask_fn(decays: Decays) -> Callable[[Any], Any]:
    """For Optax's masks: where `decays(path, array)` says yes."""
    return lambda params: map_with_path(decays, params)


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(param_path(path), leaf), tree
    )


def param_path(path: tuple[Any, ...]) -> str:
    return leaf_name(without_value(path))


def without_value(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """NNX variables hold their array as an attribute `value`, which is no part of the name."""
    is_value = path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return path[:-1] if is_value else path
