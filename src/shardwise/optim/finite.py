"""Which parts of an update must be checked for non-finite values.

A step whose loss and gradients are finite may still produce a non-finite update, for example by a
custom transformation that takes a logarithm. Checking every entry of the update and of the new
optimizer state means to compute them once more before they are stored. For the usual optimizers
that is not necessary: with finite gradients, their updates are finite unless the learning rate is
not, and a learning rate shows in any single entry. So a small parameter of each kind is checked.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardwise.optim.read import ChainPart, Optimizer, read_chains
from shardwise.tree import OptState, Params, PyTree, named_leaves

# Dtypes with the range of float32. The squares of float16 gradients overflow.
WIDE = ("float32", "bfloat16", "float64")


def _has_epsilon(part: ChainPart) -> bool:
    """Adam divides by `sqrt(nu) + eps`, and by `1 - b ** count`."""
    settings = part.settings
    decays = [settings.get("b1"), settings.get("b2")]
    if not all(isinstance(b, float | int) and 0 <= b < 1 for b in decays):
        return False
    epsilon = settings.get("eps")
    return isinstance(epsilon, float) and epsilon > 1e-20


def _is_number(name: str) -> Callable[[ChainPart], bool]:
    def check(part: ChainPart) -> bool:
        value = part.settings.get(name)
        return isinstance(value, float | int) and math.isfinite(value)

    return check


def _iterates_in_wide(part: ChainPart) -> bool:
    """Newton-Schulz starts from a matrix divided by its norm, plus a small number."""
    dtype = part.settings.get("dtype")
    return dtype is not None and str(jnp.dtype(dtype)) in WIDE


def _always(part: ChainPart) -> bool:
    return True


# Parts whose output is finite if their input and state are, and when.
SAFE: dict[str, Callable[[ChainPart], bool]] = {
    "scale_by_adam": _has_epsilon,
    "scale_by_lr": _always,
    "scale_by_schedule": _always,
    "scale": _is_number("step_size"),
    "add_decayed_weights": _is_number("weight_decay"),
    "scale_by_lion": _always,
    "trace": _is_number("decay"),
    "orthogonalize": _iterates_in_wide,
    "clip_by_norm": _always,
    "clip_by_global_norm": _always,
    "clip": _always,
    "record": _always,
    "identity": _always,
    "set_to_zero": _always,
}


def representative_leaves(
    optimizer: Optimizer, params: Params, opt_state: OptState
) -> tuple[str, ...] | None:
    """Return parameters whose updates tell whether all updates are finite.

    Args:
        optimizer: the optimizer.
        params: the parameters, which may be abstract.
        opt_state: the state of the optimizer, which may be abstract.

    Returns:
        The names of a few small parameters: if their updates are finite, and so are the gradients,
        the whole update is. None if every parameter must be checked.
    """
    named = named_leaves(params)
    if any(str(leaf.dtype) not in WIDE for leaf in named.values()):
        return None
    # `optax.inject_hyperparams` rounds the settings of a part to the dtype of the parameters: in
    # bfloat16, `b2=0.999` is 1.
    if _has_injected(opt_state):
        return None
    chains = read_chains(optimizer, params)
    chosen: dict[tuple[int, ...], str] = {}
    sizes = {path: leaf.size for path, leaf in named.items() if leaf.size}
    # The smallest parameter of a group comes first.
    for path in sorted(sizes, key=sizes.__getitem__):
        parts = chains[path].parts
        for part in parts:
            is_safe = SAFE.get(part.name)
            known = part.is_known and not part.is_unread
            if is_safe is None or not known or not is_safe(part):
                return None
        # Parameters with the same parts have the same learning rate.
        chosen.setdefault(tuple(map(id, parts)), path)
    return tuple(chosen.values())


def _has_injected(opt_state: OptState) -> bool:
    def is_injected(node: object) -> bool:
        return hasattr(node, "hyperparams")

    leaves = jax.tree.leaves(opt_state, is_leaf=is_injected)
    return any(is_injected(leaf) for leaf in leaves)


def all_finite(updates: Params, leaves: tuple[str, ...] | None) -> jax.Array:
    """Return whether an update is finite.

    Args:
        updates: the update of each parameter.
        leaves: the result of `representative_leaves`.
    """
    arrays = jax.tree.leaves(updates)
    if leaves is not None:
        named = named_leaves(updates)
        # Complete arrays: XLA would gather a sharded array to find its first entry.
        arrays = [named[name] for name in leaves]
    return _all([jnp.isfinite(x).all() for x in arrays])


def stays_finite(before: PyTree, after: PyTree) -> jax.Array:
    """Return whether nothing in a tree has become NaN or infinite.

    Entries that were infinite before may stay so, for example a mask of minus infinity.

    Args:
        before: the tree before a step.
        after: the tree after it.
    """

    def is_sound(old: jax.Array, new: jax.Array) -> jax.Array:
        is_kept_infinity = jnp.isinf(old) & ~jnp.isnan(new)
        return (jnp.isfinite(new) | jnp.isnan(old) | is_kept_infinity).all()

    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return _all(
        [
            is_sound(old, new)
            for old, new in pairs
            if jnp.issubdtype(new.dtype, jnp.inexact)
        ]
    )


def _all(checks: list[jax.Array]) -> jax.Array:
    return jnp.stack(checks).all() if checks else jnp.bool_(True)
