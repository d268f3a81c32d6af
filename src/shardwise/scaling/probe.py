"""Measure how the update of an optimizer changes with the sizes of a parameter.

The optimizer is called with the gradient that a model in the maximal update parametrization has: a
matrix that is dominated by one direction, and whose spectral norm is sqrt(inputs / outputs). The
norm of the update is measured for the sizes of two models. No table of optimizers is
needed: an update that is proportional to the gradient (SGD), one with entries of fixed size (Adam)
and an orthogonal one (Muon) show different ratios.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise.errors import ConfigError
from shardwise.optim.groups import param_path
from shardwise.scaling.initial import compiled_fast, on_cpu
from shardwise.tracing.jaxpr import Shape
from shardwise.tree import Params, PyTree, named_leaves, nest, owner_of

# A copy of a parameter has at most this many entries.
MAX_ENTRIES = 2**14
# Small enough that no clipping takes effect, and large compared with the epsilon of Adam.
GRADIENT = 1e-4
# Gradients have this much noise, so that an optimizer that orthogonalizes sees a full rank.
NOISE = 0.1
# Larger gradients are tried where an epsilon is not small compared with smaller ones.
SCALES = (1.0, 1e2, 1e4)
# The logarithm of the change of an update by a gradient that is 10 times larger is this close to an
# integer.
POWER_TOLERANCE = 0.02
# Updates to carry out. The second number is for optimizers that skip most of them.
STEPS = (8, 512)
# A parameter that starts at zero is measured with this size.
SIZE = 0.02
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Copy:
    """A small copy of a parameter.

    Attributes:
        shape: its shape.
        inputs: the dims that a matmul sums over.
        layers: the dims that count layers.
        gradient: the size of an entry of the gradient.
        size: the size of an entry of the weights.
    """

    shape: Shape
    inputs: tuple[int, ...]
    layers: tuple[int, ...]
    gradient: float
    size: float


@dataclass(frozen=True)
class Updates:
    """Updates of an optimizer.

    Attributes:
        norms: the mean singular value of the update of each parameter, without weight decay.
        powers: 1 if an update is proportional to the gradient, 0 if it does not depend on its
            size, None if neither was found.
        separable: the parameters whose update is the sum of a function of the gradient and a
            function of the weights, such as decoupled weight decay.
    """

    norms: Mapping[str, float]
    powers: Mapping[str, int | None]
    separable: frozenset[str]


def small_shapes(base: Shape, shape: Shape) -> tuple[Shape, Shape]:
    """Return small copies of two shapes, with the same ratios between them.

    Example:
        >>> small_shapes((64, 256), (1024, 4096))
        ((4, 16), (64, 256))
    """
    divisor = 1
    while True:
        small = tuple(max(1, dim // divisor) for dim in base)
        ratios = [after / before for before, after in zip(base, shape, strict=True)]
        large = tuple(
            round(dim * ratio) for dim, ratio in zip(small, ratios, strict=True)
        )
        if math.prod(large) <= MAX_ENTRIES or max(small, default=1) == 1:
            return small, large
        divisor *= 2


def measure_updates(
    optimizer: optax.GradientTransformation, copies: Mapping[str, Copy]
) -> Updates:
    """Carry out updates of small copies of the parameters.

    Args:
        optimizer: the optimizer.
        copies: the parameters.

    Returns:
        What was measured.

    Raises:
        ConfigError: if the optimizer fails.
    """
    tx = optax.with_extra_args_support(optimizer)
    random = np.random.default_rng(0)
    gradients = {path: _gradient(copy, random) for path, copy in copies.items()}
    weights = {
        path: copy.size * random.choice([-1.0, 1.0], copy.shape)
        for path, copy in copies.items()
    }

    def total(scales: jax.Array, steps: int) -> PyTree:
        gradient_scale, weight_scale = scales
        params = _as_params(weights, weight_scale)
        grads = _as_params(gradients, gradient_scale)

        def step(state: PyTree, _: None) -> tuple[PyTree, PyTree]:
            value = jnp.float32(1)
            updates, state = tx.update(grads, state, params, value=value, grad=grads)
            return state, updates

        _, updates = jax.lax.scan(step, tx.init(params), length=steps)
        return jax.tree.map(lambda update: update.sum(axis=0), updates)

    for steps in STEPS:
        run = compiled_fast(lambda scales, steps=steps: total(scales, steps))
        with on_cpu():
            both = _named(run(jnp.array([1.0, 1.0])))
            decay = _named(run(jnp.array([0.0, 1.0])))
            alone = _named(run(jnp.array([1.0, 0.0])))
        moved = {path: both[path] - decay[path] for path in both}
        if any(np.any(update) for update in moved.values()):
            break

    def norms_at(scale: float) -> dict[str, float]:
        with on_cpu():
            updates = _named(run(jnp.array([scale, 1.0])))
        return {
            path: _norm(updates[path] - decay[path], copies[path]) for path in copies
        }

    norms, powers = _norms_without_eps(norms_at)
    separable = frozenset(
        path
        for path in copies
        if np.allclose(moved[path], alone[path], rtol=TOLERANCE, atol=1e-12)
    )
    return Updates(norms, powers, separable)


def _norms_without_eps(
    norms_at: Callable[[float], dict[str, float]],
) -> tuple[dict[str, float], dict[str, int | None]]:
    """Return norms of updates for gradients of scale 1, as if Adam's epsilon was 0, and powers.

    Updates are proportional to the gradient, or do not depend on its scale. If neither is true for
    a parameter, the epsilon is not small compared with its gradient. Then a larger gradient shows
    what the update would be without it.

    Args:
        norms_at: returns the norms of all updates for a scale of the gradients.
    """
    first = norms_at(SCALES[0])
    norms = dict(first)
    powers: dict[str, int | None] = dict.fromkeys(norms)
    unknown = set(norms)
    for scale in SCALES:
        here = first if scale == SCALES[0] else norms_at(scale)
        below = norms_at(scale / 10)
        for path in sorted(unknown):
            if not (here[path] and below[path]):
                unknown.discard(path)
                continue
            power = math.log10(here[path] / below[path])
            nearest = round(power)
            if abs(power - nearest) < POWER_TOLERANCE:
                norms[path] = here[path] / scale**nearest
                powers[path] = nearest
                unknown.discard(path)
        if not unknown:
            break
    return norms, powers


def masked_paths(
    optimizer: optax.GradientTransformation, params: Params
) -> frozenset[str]:
    """Return where the state of an optimizer has no leaf because a parameter is masked.

    Args:
        optimizer: the optimizer.
        params: the parameters, as shapes.
    """

    def is_masked(leaf: object) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    state = jax.eval_shape(optimizer.init, params)
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_masked)
    return frozenset(
        jax.tree_util.keystr(path) for path, leaf in leaves if is_masked(leaf)
    )


def abstract_params(shapes: Mapping[str, Shape]) -> Params:
    """Return parameters of these shapes, by path, as a tree of `jax.ShapeDtypeStruct`."""
    flat = {
        tuple(path.split("/")): jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in shapes.items()
    }
    return nest(flat)


def _gradient(copy: Copy, random: np.random.Generator) -> np.ndarray:
    """Return a gradient with one dominant direction."""
    gradient = np.ones(copy.shape)
    for dim, size in enumerate(copy.shape):
        signs = random.choice([-1.0, 1.0], size)
        place = [1] * len(copy.shape)
        place[dim] = size
        gradient = gradient * signs.reshape(place)
    noise = 1 + NOISE * random.uniform(-1, 1, copy.shape)
    return copy.gradient * gradient * noise


def _as_params(arrays: Mapping[str, np.ndarray], scale: jax.Array) -> Params:
    flat = {
        tuple(path.split("/")): scale * jnp.asarray(array, jnp.float32)
        for path, array in arrays.items()
    }
    return nest(flat)


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {param_path(path): np.asarray(leaf) for path, leaf in leaves}


def _norm(update: np.ndarray, copy: Copy) -> float:
    """Return the mean singular value of an update, weighted by the singular values.

    It is the spectral norm of a matrix with one direction, and of an orthogonal one. Muon computes
    the latter approximately, and then the mean is more precise than the largest value.
    """
    dims = range(update.ndim)
    outputs = [dim for dim in dims if dim not in (*copy.inputs, *copy.layers)]
    order = [*copy.layers, *outputs, *copy.inputs]
    num_layers = math.prod(copy.shape[dim] for dim in copy.layers)
    num_outputs = math.prod(copy.shape[dim] for dim in outputs)
    matrices = np.transpose(update, order).reshape(num_layers, num_outputs, -1)
    # A vector is a matrix with one input.
    singular = np.linalg.svd(matrices, compute_uv=False)
    total = singular.sum()
    return float(np.square(singular).sum() / total) if total else 0.0


def check_state(optimizer: optax.GradientTransformation, params: Params) -> None:
    """Raise if the optimizer keeps copies of the weights.

    Its updates cannot be scaled from outside: the copies would not move with the weights.

    Args:
        optimizer: the optimizer.
        params: the parameters, as shapes.

    Raises:
        ConfigError: if the initial state depends on the weights.
    """

    def state_of(scale: jax.Array) -> PyTree:
        def small(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            shape = tuple(min(dim, 2) for dim in leaf.shape)
            return jnp.full(shape, scale, leaf.dtype)

        return optimizer.init(jax.tree.map(small, params))

    run = compiled_fast(state_of)
    with on_cpu():
        before = named_leaves(run(jnp.float32(1)))
        after = named_leaves(run(jnp.float32(2)))
    paths = set(named_leaves(params))
    for name, value in before.items():
        is_same = np.array_equal(value, after[name])
        if not is_same and owner_of(name, paths) is not None:
            raise ConfigError(
                f"the optimizer keeps a copy of the weights in its state ('{name}'), which would "
                "not move with the scaled updates. Use it without averages (`ema`), float32 "
                "copies (`master`) and schedule-free averaging, or add them around the scaled "
                "optimizer: optim.keep_average(scale_updates(...), decay)."
            )
