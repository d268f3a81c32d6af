"""Several matmuls of the same tokens, whose gradients are added in the matmuls."""

import jax

from shardwise.kernels.float8 import Narrowed, matmul8, narrow_exactly

Array = jax.Array


def matmuls(x: Array | Narrowed, kernels: list[Array]) -> list[Array]:
    """Return `x` times each of the kernels.

    Args:
        x: of shape (N, D). If it is `Narrowed`, the forward pass uses 8 bits.
        kernels: each of shape (D, F).
    """
    if isinstance(x, Narrowed):
        return _float8_matmuls(x.wide, x.narrow, kernels)
    return _matmuls(x, kernels)


@jax.custom_vjp
def _matmuls(x: Array, kernels: list[Array]) -> list[Array]:
    return [x @ kernel for kernel in kernels]


def _forward(
    x: Array, kernels: list[Array]
) -> tuple[list[Array], tuple[Array, list[Array]]]:
    # Not a call of `_matmuls`, which would hide them from the policies of `jax.checkpoint`.
    return [x @ kernel for kernel in kernels], (x, kernels)


def _backward(
    residuals: tuple[Array, list[Array]], grads: list[Array]
) -> tuple[Array, list[Array]]:
    x, kernels = residuals
    dx = grads[0] @ kernels[0].T
    for g, kernel in zip(grads[1:], kernels[1:], strict=True):
        # In this order, XLA lets the matmul add `dx` in its epilogue.
        dx = g @ kernel.T + dx
    return dx, [x.T @ g for g in grads]


_matmuls.defvjp(_forward, _backward)


@jax.custom_vjp
def _float8_matmuls(x: Array, x8: Array, kernels: list[Array]) -> list[Array]:
    """Return the matmuls of `x8`, which is `x` in 8 bits; gradients are those of `x`."""
    products = []
    for kernel in kernels:
        kernel8, scale = narrow_exactly(kernel.T)
        products.append(matmul8(x8, kernel8, ((1,), (1,)), 1 / scale, x.dtype))
    return products


def _float8_forward(
    x: Array, x8: Array, kernels: list[Array]
) -> tuple[list[Array], tuple[Array, list[Array]]]:
    return _float8_matmuls(x, x8, kernels), (x, kernels)


def _float8_backward(
    residuals: tuple[Array, list[Array]], grads: list[Array]
) -> tuple[Array, None, list[Array]]:
    dx, dkernels = _backward(residuals, grads)
    return dx, None, dkernels


_float8_matmuls.defvjp(_float8_forward, _float8_backward)
