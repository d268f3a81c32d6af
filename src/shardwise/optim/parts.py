"""Optax transformations that Optax lacks, and functions that read values from their states."""

import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.optim.groups import map_with_path, param_path, without_value
from shardwise.optim.schedules import Schedule
from shardwise.tree import (
    OptState,
    Params,
    PyTree,
    any_layer,
    named_leaves,
)

# Parameters -> a tree of booleans of the same structure.
Mask: TypeAlias = Callable[[Params], PyTree]
# (updates, parameters) -> a scalar.
Measure: TypeAlias = Callable[[PyTree, Params], ArrayLike]


class LearningRate(NamedTuple):
    """State of `scale_by_lr`.

    Attributes:
        count: the number of updates made so far, an int32 scalar.
        learning_rate: the learning rate of the latest update, a float32 scalar.
    """

    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array


def scale_by_lr(schedule: Schedule) -> optax.GradientTransformation:
    """Return `optax.scale_by_learning_rate` that keeps the value it used in its state.

    The value is float32, whatever the dtype of the parameters. The schedule is part of the recipe,
    not of the state: a resumed run uses the schedule of the recipe.

    Args:
        schedule: a function from the number of updates to the learning rate.

    Example:
        >>> import optax
        >>> from shardwise.optim import cosine, scale_by_lr
        >>> tx = optax.chain(optax.scale_by_adam(), scale_by_lr(cosine(1e-3, 1000)))
    """

    def value(count: int | jax.Array) -> jax.Array:
        return jnp.asarray(schedule(count), jnp.float32)

    def init(params: Params) -> LearningRate:
        return LearningRate(jnp.zeros([], jnp.int32), value(0))

    def update(
        updates: PyTree, state: LearningRate, params: Params = None
    ) -> tuple[PyTree, LearningRate]:
        # `shardwise.optim.read` finds the schedule by the name of this variable.
        lr = value(state.count)
        updates = jax.tree.map(lambda u: -lr * u, updates)
        return updates, LearningRate(optax.safe_increment(state.count), lr)

    return optax.GradientTransformation(init, update)


class Recorded(NamedTuple):
    """State of `record` and `clip_by_norm`.

    Attributes:
        recorded: values of the latest update by name, float32 scalars.
    """

    recorded: dict[str, jax.Array]


def record(**measures: Measure) -> optax.GradientTransformation:
    """Return a transformation that changes nothing and keeps values of the latest update.

    `live_values` reads them, and a run writes them to its metrics.

    Args:
        **measures: functions `(updates, params) -> scalar` by the name of the value.

    Example:
        >>> import optax
        >>> watch = record(head_norm=lambda updates, params: optax.tree.norm(updates["head"]))
        >>> tx = optax.chain(watch, optax.adam(1e-3))
    """

    def init(params: Params) -> Recorded:
        return Recorded({name: jnp.zeros([], jnp.float32) for name in measures})

    def update(
        updates: PyTree, state: Recorded, params: Params = None
    ) -> tuple[PyTree, Recorded]:
        values = {
            name: jnp.asarray(measure(updates, params), jnp.float32)
            for name, measure in measures.items()
        }
        return updates, Recorded(values)

    return optax.GradientTransformation(init, update)


def norm(tree: PyTree) -> jax.Array:
    """Return the global norm of all leaves, summed in float32 whatever their dtype.

    The squares of the same parameter in different layers are added before they are summed. On a GPU
    this is one pass over memory, where a sum for each leaf would be hundreds of small kernels.
    """
    squares: dict[tuple[str, tuple[int, ...]], jax.Array] = {}
    for path, leaf in named_leaves(tree).items():
        size = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf
        square = jnp.square(size.astype(jnp.float32))
        kind = (any_layer(path), leaf.shape)
        squares[kind] = squares[kind] + square if kind in squares else square
    sums = [jnp.sum(square) for square in squares.values()]
    return jnp.sqrt(sum(sums, jnp.zeros([], jnp.float32)))


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` that keeps the norm after clipping in its state.

    The norm after clipping follows from the norm before it, so it needs no second pass.

    Args:
        max_norm: the largest global norm.
    """

    def init(params: Params) -> Recorded:
        return Recorded({"clipped_norm": jnp.zeros([], jnp.float32)})

    def update(
        updates: PyTree, state: Recorded, params: Params = None
    ) -> tuple[PyTree, Recorded]:
        size = norm(updates)
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(size, 1e-30))
        updates = jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates)
        return updates, Recorded({"clipped_norm": size * scale})

    return optax.GradientTransformation(init, update)


def compute_updates(
    tx: optax.GradientTransformation,
    grads: Params,
    state: OptState,
    params: Params,
    value: jax.Array,
) -> tuple[Params, OptState]:
    """Return the updates and the new state of an optimizer.

    Optimizers such as `optax.polyak_sgd` also read the value of the loss. Some, such as
    `optax.contrib.sam`, do not accept arguments that they do not read.

    Args:
        tx: the optimizer.
        grads: the gradients.
        state: the state of the optimizer.
        params: the parameters.
        value: the loss.

    Raises:
        ConfigError: if the optimizer needs anything else.
    """
    update = optax.with_extra_args_support(tx).update
    extra = {"value": value, "grad": grads}
    parameters = inspect.signature(update).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        extra = {name: each for name, each in extra.items() if name in parameters}
    try:
        updates, state = update(grads, state, params, **extra)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer fails in a step: {where(error)}. It gets the gradients, the "
            "parameters, and the loss as `value`. Line searches also need `value_fn`, so use "
            "optax.lbfgs(linesearch=None). Pairs of parameters, as those of optax.lookahead, are "
            "not supported."
        ) from error
    return updates, state


def state_changes(tx: optax.GradientTransformation, params: Params) -> list[str]:
    """Return the leaves of the optimizer state whose shape or dtype an update changes.

    A compiled step and a checkpoint need a state that keeps its types. Some Optax transformations
    do not: Adam with `inject_hyperparams(..., hyperparam_dtype=float32)` turns bfloat16 moments
    into float32.

    Args:
        tx: the optimizer.
        params: the parameters; may be abstract.

    Returns:
        A description of each change, empty if there is none.
    """

    def state_after_update(params: Params, state: OptState) -> OptState:
        return compute_updates(tx, params, state, params, jnp.float32(1))[1]

    before = jax.eval_shape(tx.init, params)
    return leaf_changes(before, jax.eval_shape(state_after_update, params, before))


def leaf_changes(before: PyTree, after: PyTree) -> list[str]:
    """Return a description of each leaf whose shape or dtype differs between two trees.

    Args:
        before: a tree of arrays or of their shapes and dtypes.
        after: the tree to compare with. Leaves in only one of the trees are changes too.
    """
    old = named_leaves(before)
    new = named_leaves(after)
    changes = []
    for path, leaf in old.items():
        if path not in new:
            changes.append(f"{path}: {leaf.dtype} becomes nothing")
        elif (leaf.shape, leaf.dtype) != (new[path].shape, new[path].dtype):
            changes.append(f"{path}: {leaf.dtype} becomes {new[path].dtype}")
    return changes + [f"{path}: is new" for path in new if path not in old]


def live_values(opt_state: OptState) -> dict[str, jax.Array]:
    """Return the learning rates and recorded values of the latest update.

    Also reads the learning rate that `optax.inject_hyperparams` keeps.

    Args:
        opt_state: the state of any Optax transformation.

    Returns:
        Scalars by name, such as `lr` and `clipped_norm`. With parameter groups the name of the
        group is added: `lr/head`.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import optim
        >>> state = optim.adamw(1e-3, clip=1.0).init({"kernel": jnp.ones((2, 2))})
        >>> sorted(live_values(state))
        ['clipped_norm', 'lr']
    """
    values: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        keys = [
            str(getattr(key, "key", getattr(key, "name", key)))
            for key in without_value(path)
        ]
        # `optax.partition` keeps the state of each group in `inner_states`, by label.
        groups = [
            keys[i + 1] for i, key in enumerate(keys[:-1]) if key == "inner_states"
        ]
        if keys[-1:] == ["learning_rate"]:
            values["/".join(["lr", *groups])] = leaf
        elif keys[-2:-1] == ["recorded"]:
            values["/".join([keys[-1], *groups])] = leaf
    return values


def _wide(leaf: jax.Array) -> DTypeLike:
    """Return float32, or complex64 for complex arrays."""
    dtype: DTypeLike = jnp.complex64 if jnp.iscomplexobj(leaf) else jnp.float32
    return dtype


def _copies(params: Params, moves: Mask | None) -> PyTree:
    """Return float32 copies of the parameters that move, and `MaskedNode` for the others."""

    def copy(is_kept: bool, p: jax.Array) -> jax.Array | optax.MaskedNode:
        return jnp.array(p, _wide(p)) if is_kept else optax.MaskedNode()

    mask = jax.tree.map(lambda _: True, params) if moves is None else moves(params)
    return jax.tree.map(copy, mask, params)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


class Averaged(NamedTuple):
    """State of `keep_average`.

    Attributes:
        inner: the state of the wrapped transformation.
        average: the average of the parameters, in float32.
        count: the number of updates made so far, an int32 scalar.
    """

    inner: OptState
    average: PyTree
    count: jax.Array  # type: ignore[assignment]


def keep_average(
    inner: optax.GradientTransformation, decay: float, moves: Mask | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` that also keeps an exponential moving average of the weights.

    `evaluation_params` returns the average, and runs evaluate on it. The average starts with a
    short memory, so that the initial weights are soon forgotten: update n averages over about the
    last n / 9 updates, until that reaches 1 / (1 - decay).

    Args:
        inner: the optimizer.
        decay: the decay of the average, such as 0.999.
        moves: a mask function that selects the parameters that are not frozen. No average is kept
            of frozen ones. By default all parameters move.

    Example:
        >>> import optax
        >>> tx = keep_average(optax.adam(1e-3), 0.999)
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> Averaged:
        return Averaged(
            inner.init(params), _copies(params, moves), jnp.zeros([], jnp.int32)
        )

    def update(
        updates: PyTree, state: Averaged, params: Params = None, **extra: object
    ) -> tuple[PyTree, Averaged]:
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        keep = jnp.minimum(decay, (1 + state.count) / (10 + state.count)).astype(
            jnp.float32
        )

        def mean(a: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            if _is_masked(a):
                return a
            return keep * a + (1 - keep) * (p.astype(a.dtype) + u.astype(a.dtype))

        average = jax.tree.map(mean, state.average, params, updates, is_leaf=_is_masked)
        return updates, Averaged(
            inner_state, average, optax.safe_increment(state.count)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def evaluation_params(opt_state: OptState, params: Params) -> Params:
    """Return the weights to evaluate.

    Args:
        opt_state: the state of any Optax transformation.
        params: the parameters that are trained.

    Returns:
        The average of the weights if the optimizer keeps one (`keep_average`, `schedule_free`),
        in the dtype of the parameters. Otherwise `params`.

    Example:
        >>> import jax.numpy as jnp
        >>> from shardwise import optim
        >>> params = {"kernel": jnp.ones((2, 2))}
        >>> state = optim.adamw(1e-3, ema=0.999).init(params)
        >>> average = optim.evaluation_params(state, params)
    """
    averages: dict[str, tuple[jax.Array, jax.Array | None]] = {}
    for node in jax.tree.leaves(opt_state, is_leaf=_keeps_average):
        if not _keeps_average(node):
            continue
        tree, b1 = (
            (node.average, None) if isinstance(node, Averaged) else (node.z, node.b1)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            averages[param_path(path)] = (leaf, b1)

    def average_of(path: str, p: jax.Array) -> jax.Array:
        if path not in averages:
            return p
        leaf, b1 = averages[path]
        # With `b1`, as in `optax.contrib.schedule_free_eval_params`.
        average = leaf if b1 is None else (p - (1 - b1) * leaf) / b1
        return average.astype(p.dtype)

    return map_with_path(average_of, params) if averages else params


def _keeps_average(node: object) -> bool:
    return isinstance(node, Averaged | optax.contrib.ScheduleFreeState)


class Master(NamedTuple):
    """State of `with_master`.

    Attributes:
        inner: the state of the wrapped transformation.
        master: the parameters in float32.
    """

    inner: OptState
    master: PyTree


def with_master(
    inner: optax.GradientTransformation, moves: Mask | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` that keeps and updates float32 copies of half-precision parameters.

    In half precision, an update that is smaller than the spacing of the numbers is lost.

    Args:
        inner: the optimizer. It sees the float32 copies.
        moves: a mask function that selects the parameters that are not frozen. No copies are kept
            of frozen ones. By default all parameters move.

    Example:
        >>> import optax
        >>> tx = with_master(optax.adam(1e-4))
    """
    inner = optax.with_extra_args_support(inner)

    def full(master: PyTree, params: Params) -> Params:
        def choose(m: jax.Array, p: jax.Array) -> jax.Array:
            return p.astype(_wide(p)) if _is_masked(m) else m

        return jax.tree.map(choose, master, params, is_leaf=_is_masked)

    def init(params: Params) -> Master:
        master = _copies(params, moves)
        return Master(inner.init(full(master, params)), master)

    def update(
        updates: PyTree, state: Master, params: Params = None, **extra: object
    ) -> tuple[PyTree, Master]:
        updates = jax.tree.map(lambda u: u.astype(_wide(u)), updates)
        old = full(state.master, params)
        updates, inner_state = inner.update(updates, state.inner, old, **extra)
        new = optax.apply_updates(old, updates)
        master = jax.tree.map(
            lambda m, n: m if _is_masked(m) else n,
            state.master,
            new,
            is_leaf=_is_masked,
        )
        updates = jax.tree.map(lambda n, p: n - p.astype(n.dtype), new, params)
        return updates, Master(inner_state, master)

    return optax.GradientTransformationExtraArgs(init, update)


class Spikes(NamedTuple):
    """State of `skip_spikes`.

    Attributes:
        inner: the state of the wrapped transformation.
        mean: the mean of the gradient norm over the updates that were applied, a float32 scalar.
        count: the number of updates that were applied, an int32 scalar.
        recorded: `skipped` is 1 if the latest update was skipped, otherwise 0.
    """

    inner: OptState
    mean: jax.Array
    count: jax.Array  # type: ignore[assignment]
    recorded: dict[str, jax.Array]


def skip_spikes(
    inner: optax.GradientTransformation, factor: float, window: int = 20
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` that skips updates with an unusually large gradient.

    A skipped update changes nothing: no parameter, no moment, no count of a schedule.

    Args:
        inner: the optimizer.
        factor: skip an update if its gradient norm exceeds this multiple of the recent mean, or is
            not finite.
        window: the mean covers about this many updates. During the first `window` updates, only
            gradients that are not finite are skipped.

    Example:
        >>> import optax
        >>> tx = skip_spikes(optax.adam(1e-3), factor=10.0)
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Params) -> Spikes:
        zero = jnp.zeros([], jnp.float32)
        return Spikes(
            inner.init(params), zero, jnp.zeros([], jnp.int32), {"skipped": zero}
        )

    def update(
        updates: PyTree, state: Spikes, params: Params = None, **extra: object
    ) -> tuple[PyTree, Spikes]:
        size = norm(updates)
        is_usual = (state.count < window) | (size <= factor * state.mean)
        good = jnp.isfinite(size) & is_usual

        def if_good(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        new_updates, inner_state = inner.update(updates, state.inner, params, **extra)
        new_updates = if_good(new_updates, jax.tree.map(jnp.zeros_like, new_updates))
        weight = 1 / jnp.minimum(state.count + 1, window).astype(jnp.float32)
        mean = jnp.where(good, state.mean + weight * (size - state.mean), state.mean)
        recorded = {"skipped": 1 - good.astype(jnp.float32)}
        inner_state = if_good(inner_state, state.inner)
        return new_updates, Spikes(inner_state, mean, state.count + good, recorded)

    return optax.GradientTransformationExtraArgs(init, update)
