"""Transformations that Optax lacks, each a few lines in Optax's own terms, and what can be read from their states."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardwise.optim.groups import map_with_path, param_path, without_value
from shardwise.optim.schedules import Schedule
from shardwise.tree import any_layer, matches, named_leaves


class LearningRate(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    learning_rate: jax.Array  # of the latest update


def scale_by_lr(schedule: Schedule) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate` that keeps the value it used in its state, always in float32.

    The schedule belongs to the recipe, not to the state: a resumed run uses what the recipe says.
    """

    def value(count: Any) -> jax.Array:
        return jnp.asarray(schedule(count), jnp.float32)

    def init(params: Any) -> LearningRate:
        return LearningRate(jnp.zeros([], jnp.int32), value(0))

    def update(updates: Any, state: LearningRate, params: Any = None) -> tuple[Any, LearningRate]:
        lr = value(state.count)
        return jax.tree.map(lambda u: -lr * u, updates), LearningRate(
            optax.safe_increment(state.count), lr
        )

    return optax.GradientTransformation(init, update)


class Recorded(NamedTuple):
    recorded: dict[str, jax.Array]


def record(**measures: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """Changes nothing; keeps `measure(updates, params)` of the latest update in its state, for `live_values`."""

    def init(params: Any) -> Recorded:
        return Recorded({name: jnp.zeros([], jnp.float32) for name in measures})

    def update(updates: Any, state: Recorded, params: Any = None) -> tuple[Any, Recorded]:
        return updates, Recorded(
            {
                name: jnp.asarray(measure(updates, params), jnp.float32)
                for name, measure in measures.items()
            }
        )

    return optax.GradientTransformation(init, update)


def norm(tree: Any) -> jax.Array:
    """Of all leaves together, summed in float32 whatever their dtype.

    Leaves that are the same parameter of different layers are added before they are summed: one pass over memory for all
    of them, where a sum for each would be hundreds of small programs on a GPU.
    """
    alike: dict[Any, jax.Array] = {}
    for path, leaf in named_leaves(tree).items():
        squares = jnp.square(leaf.astype(jnp.float32))
        kind = (any_layer(path), leaf.shape)
        alike[kind] = alike[kind] + squares if kind in alike else squares
    return jnp.sqrt(
        sum((jnp.sum(squares) for squares in alike.values()), jnp.zeros([], jnp.float32))
    )


def clip_by_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` that keeps the norm it leaves, which takes no second pass over the gradients."""

    def init(params: Any) -> Recorded:
        return Recorded({"clipped_norm": jnp.zeros([], jnp.float32)})

    def update(updates: Any, state: Recorded, params: Any = None) -> tuple[Any, Recorded]:
        size = norm(updates)
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(size, 1e-30))
        return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), Recorded(
            {"clipped_norm": size * scale}
        )

    return optax.GradientTransformation(init, update)


def state_changes(tx: optax.GradientTransformation, params: Any) -> list[str]:
    """Leaves of the state that an update gives another shape or dtype, which no compiled step and no checkpoint can follow.

    Optax has such: Adam with `inject_hyperparams(..., hyperparam_dtype=float32)` turns bfloat16 moments into float32.
    """
    update = optax.with_extra_args_support(tx).update
    before = jax.eval_shape(tx.init, params)
    once = lambda params, state: update(params, state, params, value=jnp.float32(1), grad=params)[1]  # noqa: E731
    return leaf_changes(before, jax.eval_shape(once, params, before))


def leaf_changes(before: Any, after: Any) -> list[str]:
    """Leaves whose shape or dtype is another, or that are there in one of the trees only."""
    old, new = named_leaves(before), named_leaves(after)
    changed = [
        path
        for path in old
        if path not in new
        or (old[path].shape, old[path].dtype) != (new[path].shape, new[path].dtype)
    ]
    return [
        f"{path}: {old[path].dtype} becomes {new[path].dtype if path in new else 'nothing'}"
        for path in changed
    ] + [f"{path}: is new" for path in new if path not in old]


def live_values(opt_state: Any) -> dict[str, jax.Array]:
    """Learning rates and recorded values of the latest update, by name, and by group where there are groups: "lr/head".

    Also reads the learning rate that `optax.inject_hyperparams` keeps.
    """
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in without_value(path)]
        groups = [keys[i + 1] for i, key in enumerate(keys[:-1]) if key == "inner_states"]
        if keys[-1] == "learning_rate":
            found["/".join(["lr", *groups])] = leaf
        elif len(keys) > 1 and keys[-2] == "recorded":
            found["/".join([keys[-1], *groups])] = leaf
    return found


Mask = Callable[[Any], Any]  # parameters -> a tree of booleans


def _copies(params: Any, moves: Mask | None) -> Any:
    """Float32 copies of the parameters that move."""
    mask = jax.tree.map(lambda _: True, params) if moves is None else moves(params)
    return jax.tree.map(
        lambda keep, p: jnp.array(p, jnp.float32) if keep else optax.MaskedNode(), mask, params
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


class Averaged(NamedTuple):
    inner: Any
    average: Any  # of the parameters, float32
    count: jax.Array  # type: ignore[assignment]


def keep_average(
    inner: optax.GradientTransformation, decay: float, moves: Mask | None = None
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with an exponential moving average of the weights beside it; `evaluation_params` finds it.

    Update n averages over about the last n / 9 updates until 1 / (1 - decay) is reached, so the start is forgotten soon.
    `moves(params)` says which parameters are not frozen; of the others no average is kept.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), _copies(params, moves), jnp.zeros([], jnp.int32))

    def update(
        updates: Any, state: Averaged, params: Any = None, **extra: Any
    ) -> tuple[Any, Averaged]:
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        keep = jnp.minimum(decay, (1 + state.count) / (10 + state.count)).astype(jnp.float32)

        def one(a: Any, p: Any, u: Any) -> Any:
            return (
                a
                if _is_masked(a)
                else keep * a + (1 - keep) * (p.astype(jnp.float32) + u.astype(jnp.float32))
            )

        average = jax.tree.map(one, state.average, params, updates, is_leaf=_is_masked)
        return updates, Averaged(inner_state, average, optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def evaluation_params(opt_state: Any, params: Any) -> Any:
    """The weights to evaluate: the average if the optimizer keeps one (`keep_average`, schedule-free), else `params`."""
    schedule_free = optax.contrib.ScheduleFreeState
    nodes = [
        node
        for node in jax.tree.leaves(
            opt_state, is_leaf=lambda x: isinstance(x, Averaged | schedule_free)
        )
        if isinstance(node, Averaged | schedule_free)
    ]
    found: dict[str, Any] = {}
    for node in nodes:
        tree = node.average if isinstance(node, Averaged) else node.z
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found[param_path(path)] = (node, leaf)

    def one(path: str, p: Any) -> Any:
        node, leaf = found.get(path, (None, None))
        if node is None:
            return p
        return (
            leaf if isinstance(node, Averaged) else (p - (1 - node.b1) * leaf) / node.b1
        ).astype(p.dtype)

    return map_with_path(one, params) if found else params


class Master(NamedTuple):
    inner: Any
    master: Any  # the parameters in float32


def with_master(
    inner: optax.GradientTransformation, moves: Mask | None = None
) -> optax.GradientTransformationExtraArgs:
    """For parameters in half precision: `inner` works on float32 copies of them, which it keeps, so that no update is lost.

    `moves(params)` says which parameters are not frozen; of the others no copy is kept.
    """
    inner = optax.with_extra_args_support(inner)

    def full(master: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda m, p: p.astype(jnp.float32) if _is_masked(m) else m,
            master,
            params,
            is_leaf=_is_masked,
        )

    def init(params: Any) -> Master:
        master = _copies(params, moves)
        return Master(inner.init(full(master, params)), master)

    def update(updates: Any, state: Master, params: Any = None, **extra: Any) -> tuple[Any, Master]:
        updates = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        old = full(state.master, params)
        updates, inner_state = inner.update(updates, state.inner, old, **extra)
        new = optax.apply_updates(old, updates)
        master = jax.tree.map(
            lambda m, n: m if _is_masked(m) else n, state.master, new, is_leaf=_is_masked
        )
        return jax.tree.map(lambda n, p: n - p.astype(jnp.float32), new, params), Master(
            inner_state, master
        )

    return optax.GradientTransformationExtraArgs(init, update)


class Spikes(NamedTuple):
    inner: Any
    mean: jax.Array  # of the gradient norm, over the updates that were applied
    count: jax.Array  # type: ignore[assignment]  # of these
    recorded: dict[str, jax.Array]


def skip_spikes(
    inner: optax.GradientTransformation, factor: float, window: int = 20
) -> optax.GradientTransformationExtraArgs:
    """`inner`, but an update whose gradient norm is over `factor` times its recent mean, or not finite, changes nothing.

    Nothing means: no parameter, no moment, no count of a schedule. The first `window` updates only take the mean.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Spikes:
        zero = jnp.zeros([], jnp.float32)
        return Spikes(inner.init(params), zero, jnp.zeros([], jnp.int32), {"skipped": zero})

    def update(updates: Any, state: Spikes, params: Any = None, **extra: Any) -> tuple[Any, Spikes]:
        size = norm(updates)
        good = jnp.isfinite(size) & ((state.count < window) | (size <= factor * state.mean))
        new_updates, inner_state = inner.update(updates, state.inner, params, **extra)
        weight = 1 / jnp.minimum(state.count + 1, window).astype(jnp.float32)
        mean = jnp.where(good, state.mean + weight * (size - state.mean), state.mean)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)  # noqa: E731
        new_updates = jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), new_updates)
        recorded = {"skipped": 1 - good.astype(jnp.float32)}
        return new_updates, Spikes(
            keep(inner_state, state.inner), mean, state.count + good, recorded
        )

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalize(
    steps: int = 5,
    rms: float | None = None,
    stacked: tuple[str, ...] = (),
    dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Muon's direction: each matrix replaced by about the nearest orthogonal one, by Newton-Schulz iterations.

    A leaf of more than two dims is taken as a matrix by the split of its dims nearest to a square, after the first dim if its
    path fits `stacked`, where layers are stacked. Scaled by sqrt(max(1, outputs / inputs)), or to this `rms` if it is
    given: 0.2 makes the learning rates of AdamW fit. `dtype` is that of the iterations: bfloat16 is faster, and its rounding
    differs from mesh to mesh.
    """

    def update(updates: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        done: list[jax.Array] = []
        for path, x in leaves:
            # Each begins when the one before the last is done. Matrices that are cut over devices are gathered for their
            # products; begun all at once, all of them would be whole at once.
            if len(done) > 1:
                x, done[-2] = jax.lax.optimization_barrier((x, done[-2]))
            done.append(one(param_path(path), x))
        return jax.tree.unflatten(structure, done)

    def one(path: str, x: jax.Array) -> jax.Array:
        batch = x.shape[:1] if any(matches(pattern, path) for pattern in stacked) else ()
        inputs, outputs = matrix_shape(x.shape[len(batch) :])
        orthogonal = _newton_schulz(x.reshape(*batch, inputs, outputs).astype(dtype), steps)
        scale = (
            math.sqrt(max(1, outputs / inputs))
            if rms is None
            else rms * math.sqrt(max(inputs, outputs))
        )
        return (scale * orthogonal.astype(jnp.float32)).reshape(x.shape).astype(x.dtype)

    return optax.stateless(update)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(inputs, outputs) by the split of the dims nearest to a square; of two, the one with fewer inputs."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(splits, key=lambda pair: max(pair) / max(1, min(pair)))


def _newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Pushes every singular value of x towards 1; these coefficients reach about 0.7 to 1.2 in five steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True) + 1e-7).astype(
        x.dtype
    )
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -2, -1) if tall else x

    def iterate(_: Any, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -2, -1)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, steps, iterate, x, unroll=True)
    return jnp.swapaxes(x, -2, -1) if tall else x
