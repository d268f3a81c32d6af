"""What an optimizer does, measured: the whole run, carried out on small copies of the parameters with made-up gradients.

Four runs at once, all from the same parameters: with a constant gradient, with twice that gradient, with no gradient, and
with no gradient on parameters twice as large. What differs between them tells gradient from decay, adaptive steps from plain
ones, and decay that is decoupled from decay that is not.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise.optim.groups import param_path

PLAIN, DOUBLE, STILL, STILL_DOUBLE = range(4)  # the four runs
DENSE = 5000  # updates that are carried out one by one; of a longer run, this many and then samples
BEYOND = 16  # times the length of the run, to see whether a schedule would have gone on


@dataclass(frozen=True)
class Probe:
    """Arrays are (run, update, parameter); `steps` holds the number of each update, some of them beyond the end of the run."""

    paths: tuple[str, ...]
    steps: np.ndarray
    num_within: int  # updates within the run
    gradient_rms: np.ndarray  # (parameter)
    size: np.ndarray  # RMS of the update
    along: (
        np.ndarray
    )  # (update . gradient) / (gradient . gradient), of the plain gradient in all four runs
    shrink: np.ndarray  # -(update . parameter) / (parameter . parameter)
    is_raw: np.ndarray  # (parameter): the update is the gradient itself
    lost: np.ndarray  # share of the elements whose update was lost in the parameter's dtype


def probe(tx: Any, params: Any, steps: int, every: int = 1, seed: int = 0) -> Probe:
    """Carries out a run of `steps` updates on small copies of `params`, which may be abstract.

    `every`: how many updates make a real one, for `optax.MultiSteps`.
    """
    tx = optax.with_extra_args_support(tx)
    small = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(_shrunk(leaf.shape), leaf.dtype), params)
    leaves = jax.tree_util.tree_leaves_with_path(small)
    rng = np.random.default_rng(seed)
    draw = lambda scale: jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype), small
    )  # noqa: E731
    weights, gradient = draw(0.1), draw(1.0)
    total = np.sqrt(
        sum(float(jnp.sum(jnp.square(g.astype(jnp.float32)))) for g in jax.tree.leaves(gradient))
    )
    gradient = jax.tree.map(
        lambda g: (g * (0.1 / total)).astype(g.dtype), gradient
    )  # too small for any clipping to act on
    numbers, num_within = _numbers(steps)
    owner = np.repeat(
        np.eye(len(leaves), dtype="f4"), [math.prod(leaf.shape) for _, leaf in leaves], axis=0
    )

    def one_run(gradient_scale: Any, weight_scale: Any) -> Any:
        start = jax.tree.map(lambda p: p * weight_scale.astype(p.dtype), weights)

        def step(carry: Any, jump: Any) -> Any:
            params, state = carry
            grads = jax.tree.map(lambda g: g * gradient_scale.astype(g.dtype), gradient)
            updates, state = tx.update(
                grads, _ahead(state, jump // every), params, value=jnp.float32(1), grad=grads
            )
            moved = optax.apply_updates(params, updates)
            lost = jax.tree.map(lambda u, p, q: (u != 0) & (p == q), updates, params, moved)
            return (moved, state), _measure(
                _flat(updates), _flat(gradient), _flat(params), _flat(lost), owner
            )

        return jax.lax.scan(step, (start, tx.init(start)), jnp.diff(numbers, prepend=-1) - 1)[1]

    compiler = (
        {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    )  # compiled for one use
    runs = jax.jit(jax.vmap(one_run), compiler_options=compiler)
    size, along, shrink, off, lost = map(
        np.asarray, runs(jnp.array([1.0, 2.0, 0.0, 0.0]), jnp.array([1.0, 1.0, 1.0, 2.0]))
    )
    return Probe(
        paths=tuple(param_path(path) for path, _ in leaves),
        steps=np.asarray(numbers),
        num_within=num_within,
        gradient_rms=np.array(
            [
                float(jnp.sqrt(jnp.mean(jnp.square(g.astype(jnp.float32)))))
                for g in jax.tree.leaves(gradient)
            ]
        ),
        size=size,
        along=along,
        shrink=shrink,
        is_raw=np.max(off[PLAIN, :num_within], axis=0) < 1e-6,
        lost=lost,
    )


def _measure(u: Any, g: Any, p: Any, lost: Any, owner: Any) -> tuple[Any, ...]:
    """For each parameter, from all of them in one vector; `owner` has a row for each element, and a 1 in its parameter's column."""
    sums = jnp.stack([u * u, u * g, g * g, u * p, p * p, lost, jnp.ones_like(u)]) @ owner
    uu, ug, gg, up, pp, losses, count = sums
    off = jnp.max(jnp.abs(u - g)[:, None] * owner, axis=0) / jnp.max(
        jnp.abs(g)[:, None] * owner, axis=0
    )
    return jnp.sqrt(uu / count), ug / gg, -up / jnp.maximum(pp, 1e-30), off, losses / count


def _flat(tree: Any) -> Any:
    return jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves(tree)])


def _ahead(state: Any, jump: Any) -> Any:
    """`state` with its counts this much further, where a run is sampled."""

    def one(path: Any, leaf: Any) -> Any:
        name = str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
        is_count = (
            name in ("count", "step_count")
            and jnp.issubdtype(leaf.dtype, jnp.integer)
            and not leaf.shape
        )
        return leaf + jump.astype(leaf.dtype) if is_count else leaf

    return jax.tree_util.tree_map_with_path(one, state)


def _numbers(steps: int) -> tuple[jax.Array, int]:
    within = np.arange(min(steps, DENSE))
    if steps > DENSE:
        within = np.concatenate([within, np.linspace(DENSE, steps - 1, 1000).astype(int)])
    beyond = np.unique(np.geomspace(steps, BEYOND * steps, 128).astype(int))
    return jnp.asarray(np.concatenate([within, beyond]), jnp.int32), len(within)


def _shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same number of dims, each of 4 at most, of 2 where there are many."""
    return tuple(min(dim, 4 if len(shape) < 3 else 2) for dim in shape)
