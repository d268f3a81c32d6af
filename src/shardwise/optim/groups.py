"""Parameter groups by path, and the labels and masks that Optax needs for them.

Groups are ordered: the first pattern that matches a parameter wins, and every parameter belongs to
exactly one group. Labels and masks are functions of the path and the array. They are therefore the
same at creation and at every update, for plain dictionaries and for NNX states.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import optax

from shardwise.errors import ConfigError
from shardwise.optim.schedules import Schedule
from shardwise.text import did_you_mean
from shardwise.tree import KeyPath, Leaf, Params, PyTree, leaf_name, matches

# (path, array) -> whether weight decay applies to this parameter.
Decays: TypeAlias = Callable[[str, Leaf], bool]
# Names of biases and norm parameters. They are matrices where layers are stacked.
VECTORS = ("bias", "scale", "beta", "gamma")


@dataclass(frozen=True)
class Group:
    """Settings for the parameters whose path matches a pattern.

    Settings that are None are those of the optimizer that the group is passed to.

    Attributes:
        pattern: one or several patterns of paths, such as `blocks/*/kernel`. `*` also matches
            slashes.
        lr: the learning rate or schedule of the group.
        lr_scale: a factor for the learning rate.
        weight_decay: the weight decay of the group.
        clip: the largest norm of the gradients of this group alone.
        tx: an Optax transformation to use instead of the optimizer's own.
        frozen: whether the parameters never change. They have no optimizer state then.
        name: the name of the group in metrics and tables. By default the pattern.

    Example:
        >>> from shardwise import optim
        >>> groups = [Group("backbone/*", lr_scale=0.1), Group("*", name="rest")]
        >>> optimizer = optim.adamw(1e-3, groups=groups)
    """

    pattern: str | tuple[str, ...]
    lr: float | Schedule | None = None
    lr_scale: float = 1.0
    weight_decay: float | None = None
    clip: float | None = None
    tx: optax.GradientTransformation | None = None
    frozen: bool = False
    name: str = ""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the group as a tuple."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)

    @property
    def label(self) -> str:
        """The name of the group, or its patterns joined by `+`."""
        return self.name or "+".join(self.patterns)

    def matches(self, path: str) -> bool:
        """Return whether any pattern of the group matches a path."""
        return any(matches(pattern, path) for pattern in self.patterns)


def label_fn(groups: Sequence[Group]) -> Callable[[Params], PyTree]:
    """Return a function that labels each parameter with its group, for `optax.partition`.

    Args:
        groups: the groups. The first one that matches a parameter claims it.

    Returns:
        A function from parameters to a tree of labels of the same structure. It raises a
        `ConfigError` if a pattern matches no parameter, if no group claims a parameter, or if a
        group claims none because of the groups before it. `Group("*")` at the end may be empty.

    Raises:
        ConfigError: if two groups have the same name.

    Example:
        >>> import jax.numpy as jnp
        >>> label = label_fn([Group("head/*", name="head"), Group("*", name="rest")])
        >>> label({"body": jnp.ones(2), "head": {"bias": jnp.ones(2)}})
        {'body': 'rest', 'head': {'bias': 'head'}}
    """
    labels = [group.label for group in groups]
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"two parameter groups have the same name: {', '.join(labels)}. "
            "Set Group(..., name=...) for one of them."
        )

    def label(params: Params) -> PyTree:
        paths = [
            param_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
        ]
        if problems := [
            *_unused_patterns(groups, paths),
            *_shadowed_groups(groups, paths),
            *_unclaimed_parameters(groups, paths),
        ]:
            raise ConfigError("\n".join(problems))
        return map_with_path(lambda path, _: _group_of(path, groups), params)

    return label


def _unused_patterns(groups: Sequence[Group], paths: Sequence[str]) -> Iterable[str]:
    for group in groups:
        for pattern in group.patterns:
            if not any(matches(pattern, path) for path in paths):
                yield (
                    f"pattern '{pattern}' of group '{group.label}' matches no parameter."
                    f"{did_you_mean(pattern, paths)}"
                )


def _shadowed_groups(groups: Sequence[Group], paths: Sequence[str]) -> Iterable[str]:
    claimed = {_group_of(path, groups) for path in paths}
    for group in groups:
        matched = [path for path in paths if group.matches(path)]
        if matched and group.label not in claimed and "*" not in group.patterns:
            first = _group_of(matched[0], groups)
            yield (
                f"group '{group.label}' claims no parameter: the group '{first}' before it matches "
                f"'{matched[0]}' too. Put '{group.label}' first."
            )


def _unclaimed_parameters(
    groups: Sequence[Group], paths: Sequence[str]
) -> Iterable[str]:
    unclaimed = [path for path in paths if _group_of(path, groups) is None]
    if unclaimed:
        patterns = [pattern for group in groups for pattern in group.patterns]
        hints = [f"  {path}{did_you_mean(path, patterns)}" for path in unclaimed]
        lines = "\n".join(hints)
        yield f"no group claims these parameters; add Group('*') for the rest:\n{lines}"


def _group_of(path: str, groups: Iterable[Group]) -> str | None:
    return next((group.label for group in groups if group.matches(path)), None)


def layerwise_decay(
    factor: float, layers: Sequence[str], *, below: str | tuple[str, ...] = ()
) -> tuple[Group, ...]:
    """Return groups for fine-tuning in which earlier layers learn at lower rates.

    The last of `layers` learns at `factor` times the learning rate, and each layer before it at
    `factor` times the rate of the next. All other parameters learn at the full rate.

    Args:
        factor: the ratio of the learning rates of neighboring layers.
        layers: a pattern for each layer, from the first to the last.
        below: patterns of the parameters before the first layer, such as the embedding. They
            learn at `factor` times the rate of the first layer.

    Returns:
        The groups, to be passed as `groups=` to any optimizer of `shardwise.optim`.

    Example:
        A GPT with 12 blocks:

        >>> layers = [f"blocks/{i}/*" for i in range(12)]
        >>> groups = layerwise_decay(0.9, layers, below=("tokens", "positions"))
        >>> groups[-1]
        Group(pattern='*', lr=None, lr_scale=1.0, ..., name='rest')
    """
    groups = []
    if below:
        groups.append(Group(below, lr_scale=factor ** (len(layers) + 1)))
    for i, pattern in enumerate(layers):
        groups.append(Group(pattern, lr_scale=factor ** (len(layers) - i)))
    return (*groups, Group("*", name="rest"))


def decays_matrices(path: str, leaf: Leaf) -> bool:
    """Return whether a parameter is a kernel or an embedding table, not a bias or a norm.

    This is the default for `decay=` of every optimizer: weight decay applies to these only.

    Args:
        path: the path of the parameter. Its last name must not be one of `VECTORS`, since
            stacked biases are matrices too.
        leaf: the array, or its shape and dtype.
    """
    return leaf.ndim >= 2 and path.rpartition("/")[2] not in VECTORS


def mask_fn(decays: Decays) -> Callable[[Params], PyTree]:
    """Return a mask function for Optax from a function of path and array.

    Args:
        decays: a function `(path, array) -> bool`, such as `decays_matrices`.

    Returns:
        A function from parameters to a tree of booleans of the same structure.

    Example:
        >>> import optax
        >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=mask_fn(decays_matrices))
    """
    return lambda params: map_with_path(decays, params)


def map_with_path(
    function: Callable[..., object], tree: PyTree, *others: PyTree
) -> PyTree:
    """Return `tree` with each leaf replaced by `function(path, leaf, *leaves of others)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(param_path(path), *leaves), tree, *others
    )


def param_path(path: KeyPath) -> str:
    """Return the path of a parameter as text, such as `blocks/0/attn/qkv/kernel`."""
    return leaf_name(without_value(path))


def without_value(path: KeyPath) -> KeyPath:
    """Return a key path without the attribute `value`, which holds the array of an NNX variable."""
    is_value = (
        path
        and isinstance(path[-1], jax.tree_util.GetAttrKey)
        and path[-1].name == "value"
    )
    return path[:-1] if is_value else path
