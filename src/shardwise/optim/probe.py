"""Measure what an optimizer does: carry out the whole run on small copies of the parameters.

Four runs are carried out at once, all from the same parameters: with a constant gradient, with
twice that gradient, with no gradient, and with no gradient on weights twice as large. Comparing
them separates gradient from decay, adaptive steps from plain ones, and decoupled decay from decay
that passes through the adaptive step. The measurement works for any transformation, including
those that `shardwise.optim.read` cannot read.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise.optim.groups import param_path
from shardwise.tree import KeyPath, OptState, Params, PyTree

# The four runs: index of the first dimension of the measurements.
PLAIN, DOUBLE, STILL, STILL_DOUBLE = range(4)
GRADIENT_SCALES = (1.0, 2.0, 0.0, 0.0)
WEIGHT_SCALES = (1.0, 1.0, 1.0, 2.0)
# This number of updates is carried out one by one. The rest of a longer run is sampled.
DENSE = 5000
# The measurement continues to this multiple of the run, to see whether a schedule ends later.
BEYOND = 16
# Small enough that no clipping takes effect.
GRADIENT_NORM = 0.1


@dataclass(frozen=True)
class Probe:
    """Measurements of an optimizer.

    Arrays have the shape (run, update, parameter) unless stated otherwise.

    Attributes:
        paths: the paths of the parameters.
        steps: the number of each measured update, shape (update,). Some are after the end of
            the run.
        num_within: the number of measured updates within the run.
        gradient_rms: the root mean square of the plain gradient, shape (parameter,).
        size: the root mean square of the update.
        along: (update . gradient) / (gradient . gradient), with the plain gradient in all runs.
        shrink: -(update . parameter) / (parameter . parameter).
        is_raw: whether the update is the gradient itself, shape (parameter,).
        lost: the fraction of elements whose update is lost in the parameter's dtype.
    """

    paths: tuple[str, ...]
    steps: np.ndarray
    num_within: int
    gradient_rms: np.ndarray
    size: np.ndarray
    along: np.ndarray
    shrink: np.ndarray
    is_raw: np.ndarray
    lost: np.ndarray

    def learning_rate(self, parameter: int) -> np.ndarray:
        """Return the measured learning rate of one parameter at each of `steps`.

        If the update is proportional to the gradient, the learning rate is the ratio of both.
        Otherwise the optimizer is adaptive, and it is the size of the update. Updates that are
        not finite count as zero.

        Args:
            parameter: an index into `paths`.
        """
        size = np.nan_to_num(self.size[PLAIN, :, parameter], posinf=0.0)
        size_of_double = np.nan_to_num(self.size[DOUBLE, :, parameter], posinf=0.0)
        is_proportional = size.any() and np.allclose(size_of_double, 2 * size, rtol=0.1)
        rate: np.ndarray = (
            size / self.gradient_rms[parameter] if is_proportional else size
        )
        return rate


def probe(
    tx: optax.GradientTransformation,
    params: Params,
    steps: int,
    every: int = 1,
    seed: int = 0,
) -> Probe:
    """Measure an optimizer in a run of `steps` updates on small copies of the parameters.

    Args:
        tx: the optimizer.
        params: the parameters; may be abstract.
        steps: the length of the run.
        every: how many calls of `tx.update` make one update, for `optax.MultiSteps`.
        seed: the seed of the random weights and gradients.

    Returns:
        The measurements.
    """
    tx = optax.with_extra_args_support(tx)
    small = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(_shrunk(leaf.shape), leaf.dtype), params
    )
    leaves = jax.tree_util.tree_leaves_with_path(small)
    rng = np.random.default_rng(seed)

    def draw(scale: float) -> PyTree:
        def draw_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype)

        return jax.tree.map(draw_leaf, small)

    weights = draw(0.1)
    gradient = _with_norm(draw(1.0), GRADIENT_NORM)
    numbers, num_within = _update_numbers(steps)
    # Row i has a 1 in the column of the parameter that element i belongs to.
    owner = np.repeat(
        np.eye(len(leaves), dtype="f4"),
        [math.prod(leaf.shape) for _, leaf in leaves],
        axis=0,
    )

    def one_run(
        gradient_scale: jax.Array, weight_scale: jax.Array
    ) -> tuple[jax.Array, ...]:
        start = jax.tree.map(lambda p: p * weight_scale.astype(p.dtype), weights)

        def step(
            carry: tuple[Params, OptState], jump: jax.Array
        ) -> tuple[tuple[Params, OptState], tuple[jax.Array, ...]]:
            params, state = carry
            grads = jax.tree.map(lambda g: g * gradient_scale.astype(g.dtype), gradient)
            state = _advance_counts(state, jump // every)
            updates, state = tx.update(
                grads, state, params, value=jnp.float32(1), grad=grads
            )
            moved = optax.apply_updates(params, updates)
            lost = jax.tree.map(
                lambda u, p, q: (u != 0) & (p == q), updates, params, moved
            )
            measured = _measure(
                _as_vector(updates),
                _as_vector(gradient),
                _as_vector(params),
                _as_vector(lost),
                owner,
            )
            return (moved, state), measured

        jumps = jnp.diff(numbers, prepend=-1) - 1
        _, measurements = jax.lax.scan(step, (start, tx.init(start)), jumps)
        return measurements

    # The program runs once, so compiling it fast matters more than running it fast.
    on_cpu = jax.default_backend() == "cpu"
    compiler_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    all_runs = jax.jit(jax.vmap(one_run), compiler_options=compiler_options)
    measurements = all_runs(jnp.array(GRADIENT_SCALES), jnp.array(WEIGHT_SCALES))
    size, along, shrink, distance, lost = map(np.asarray, measurements)
    return Probe(
        paths=tuple(param_path(path) for path, _ in leaves),
        steps=np.asarray(numbers),
        num_within=num_within,
        gradient_rms=np.array([_rms(leaf) for leaf in jax.tree.leaves(gradient)]),
        size=size,
        along=along,
        shrink=shrink,
        is_raw=np.max(distance[PLAIN, :num_within], axis=0) < 1e-6,
        lost=lost,
    )


def _measure(
    u: jax.Array, g: jax.Array, p: jax.Array, lost: jax.Array, owner: np.ndarray
) -> tuple[jax.Array, ...]:
    """Return the measurements of one update for each parameter.

    Args:
        u: the update of all parameters as one vector, shape (element,).
        g: the plain gradient, shape (element,).
        p: the weights, shape (element,).
        lost: whether the update of an element is lost, shape (element,).
        owner: one-hot matrix, shape (element, parameter).
    """
    sums = (
        jnp.stack([u * u, u * g, g * g, u * p, p * p, lost, jnp.ones_like(u)]) @ owner
    )
    uu, ug, gg, up, pp, num_lost, count = sums
    distance = jnp.max(jnp.abs(u - g)[:, None] * owner, axis=0)
    largest_gradient = jnp.max(jnp.abs(g)[:, None] * owner, axis=0)
    return (
        jnp.sqrt(uu / count),
        ug / gg,
        -up / jnp.maximum(pp, 1e-30),
        distance / largest_gradient,
        num_lost / count,
    )


def _with_norm(tree: PyTree, norm: float) -> PyTree:
    """Return `tree` scaled to a global norm."""
    squares = [jnp.sum(jnp.square(_real(leaf))) for leaf in jax.tree.leaves(tree)]
    scale = norm / np.sqrt(sum(map(float, squares)))
    return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), tree)


def _rms(leaf: jax.Array) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(_real(leaf)))))


def _as_vector(tree: PyTree) -> jax.Array:
    return jnp.concatenate([_real(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def _real(leaf: jax.Array) -> jax.Array:
    """Return an array in float32. Complex arrays are drawn without an imaginary part."""
    return jnp.real(leaf).astype(jnp.float32)


def _advance_counts(state: OptState, jump: jax.Array) -> OptState:
    """Return `state` with its step counts increased by `jump`, where a run is sampled."""

    def advance(path: KeyPath, leaf: jax.Array) -> jax.Array:
        name = (
            str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
        )
        is_scalar_integer = jnp.issubdtype(leaf.dtype, jnp.integer) and not leaf.shape
        is_count = name in ("count", "step_count") and is_scalar_integer
        return leaf + jump.astype(leaf.dtype) if is_count else leaf

    return jax.tree_util.tree_map_with_path(advance, state)


def _update_numbers(steps: int) -> tuple[jax.Array, int]:
    """Return the numbers of the updates to measure, and how many of them are within the run."""
    within = np.arange(min(steps, DENSE))
    if steps > DENSE:
        within = np.concatenate(
            [within, np.linspace(DENSE, steps - 1, 1000).astype(int)]
        )
    beyond = np.unique(np.geomspace(steps, BEYOND * steps, 128).astype(int))
    return jnp.asarray(np.concatenate([within, beyond]), jnp.int32), len(within)


def _shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of the same rank with dims of at most 4, or 2 from rank 3 on."""
    largest = 4 if len(shape) < 3 else 2
    return tuple(min(dim, largest) for dim in shape)
