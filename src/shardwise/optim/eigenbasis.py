"""The direction of SOAP: Adam in the eigenbasis of Shampoo's covariances."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardwise.optim.groups import map_with_path
from shardwise.optim.matrices import is_stack, map_matrices, matrix_shape, named_params
from shardwise.tree import Params, PyTree

# Some directions of a matrix have no gradient beyond rounding: a small batch, or more outputs than
# inputs. Their basis is arbitrary, and Adam would scale their rounding to full updates, which
# differ between meshes. Both constants prevent that. Updates from gradients of rank 1 to 16 that
# differ by rounding then differ by about 1e-4. With a shift of 1e-5 they differ by 1e-2.
#
# Part of the norm of a covariance that is added to its diagonal when the basis is updated.
# Directions with smaller eigenvalues keep their basis, apart from what the larger ones take.
SHIFT = 1e-3
# Part of the largest second moment of a matrix. Directions fade out below it: their gradients are
# less than 1e-3 of the largest.
FADE = 1e-6


class Soap(NamedTuple):
    """State of `scale_by_soap`.

    Attributes:
        count: the number of updates made so far, an int32 scalar.
        mu: the first moment of each parameter.
        nu: the second moment of each parameter, in its basis.
        left: the covariance of the rows of each matrix; none if it has too many.
        left_basis: an orthogonal matrix, approximately the eigenvectors of `left`.
        right: the covariance of the columns.
        right_basis: an orthogonal matrix, approximately the eigenvectors of `right`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree
    left: PyTree
    left_basis: PyTree
    right: PyTree
    right_basis: PyTree


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    every: int = 10,
    largest: int = 8192,
    stacked: tuple[str, ...] = (),
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Return the direction of SOAP: Adam in a basis that decorrelates rows and columns.

    A parameter with more than two dims is reshaped to a matrix, as by `orthogonalize`.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment and of the covariances.
        every: the number of updates after which the bases are updated.
        largest: a side of a matrix that is longer keeps its own basis.
        stacked: patterns of parameters whose first dim counts layers. Each layer is a matrix.
        mu_dtype: the dtype of the first moment. By default that of the parameters.

    Example:
        >>> import optax
        >>> tx = optax.chain(scale_by_soap(), optax.scale(-3e-3))
    """

    def side(
        index: int, create: Callable[[int], jax.Array]
    ) -> Callable[[str, jax.Array], jax.Array | optax.MaskedNode]:
        def of_param(path: str, x: jax.Array) -> jax.Array | optax.MaskedNode:
            first = int(is_stack(path, stacked))
            size = matrix_shape(x.shape[first:])[index]
            if size > largest:
                return optax.MaskedNode()
            return jnp.broadcast_to(create(size), (*x.shape[:first], size, size))

        return of_param

    def zeros(size: int) -> jax.Array:
        return jnp.zeros((size, size), jnp.float32)

    def init(params: Params) -> Soap:
        return Soap(
            jnp.zeros([], jnp.int32),
            jax.tree.map(lambda x: jnp.zeros_like(x, mu_dtype), params),
            jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params),
            map_with_path(side(0, zeros), params),
            map_with_path(side(0, jnp.eye), params),
            map_with_path(side(1, zeros), params),
            map_with_path(side(1, jnp.eye), params),
        )

    def direction(count: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        gradient, mu, nu, *sides = arrays
        rows, columns = gradient.shape[-2:]
        mu = b1 * mu + (1 - b1) * gradient
        results: list[jax.Array] = []
        bases: list[jax.Array | None] = [None, None]
        for index, size in enumerate((rows, columns)):
            if size <= largest:
                outer = _matmul(gradient, _transpose(gradient))
                if index:
                    outer = _matmul(_transpose(gradient), gradient)
                covariance = b2 * sides[len(results)] + (1 - b2) * outer
                basis = sides[len(results) + 1]
                is_due = count % every == 0
                basis = jax.lax.cond(is_due, _turned, _kept, covariance, basis)
                results += [covariance, basis]
                bases[index] = basis
        nu = b2 * nu + (1 - b2) * jnp.square(_rotated(gradient, *bases))
        num_updates = (count + 1).astype(jnp.float32)
        mean = _rotated(mu, *bases) / (1 - b1**num_updates)
        square = nu / (1 - b2**num_updates)
        faint = FADE * jnp.max(square, (-2, -1), keepdims=True) + 1e-30
        scaled = mean * jnp.sqrt(square) / (square + faint)
        back = [None if basis is None else _transpose(basis) for basis in bases]
        return (_rotated(scaled, *back), mu, nu, *results)

    # `shardwise.optim.read` reads the settings from the variables that this function uses.
    def update(
        updates: PyTree, state: Soap, params: Params = None
    ) -> tuple[PyTree, Soap]:
        fields = [named_params(tree) for tree in (updates, *state[1:])]
        arrays = {
            path: tuple(
                field[path].astype(jnp.float32) for field in fields if path in field
            )
            for path in fields[0]
        }

        def of_matrices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return direction(state.count, *arrays)

        results = map_matrices(of_matrices, arrays, stacked, num_matrices=3)
        trees = []
        position = dict.fromkeys(results, 0)
        for tree in (updates, *state[1:]):

            def taken(path: str, x: jax.Array) -> jax.Array:
                position[path] += 1
                return results[path][position[path] - 1].astype(x.dtype)

            trees.append(map_with_path(taken, tree))
        count = optax.safe_increment(state.count)
        return trees[0], Soap(count, *trees[1:])

    return optax.GradientTransformation(init, update)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a product in full float32: less would not leave small directions of a basis."""
    return jnp.matmul(x, y, precision="highest")


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -2, -1)


def _rotated(
    x: jax.Array, left: jax.Array | None, right: jax.Array | None
) -> jax.Array:
    """Return `x` in the basis of the columns of `left` and `right`."""
    x = x if left is None else _matmul(_transpose(left), x)
    return x if right is None else _matmul(x, right)


def _turned(covariance: jax.Array, basis: jax.Array) -> jax.Array:
    """Return the basis after one orthogonal iteration towards the eigenvectors."""
    size = jnp.linalg.norm(covariance, axis=(-2, -1), keepdims=True)
    image = _matmul(covariance / (size + 1e-30), basis) + SHIFT * basis
    return jnp.linalg.qr(image).Q


def _kept(covariance: jax.Array, basis: jax.Array) -> jax.Array:
    return basis
