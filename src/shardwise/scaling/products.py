"""Sums over elementwise products, such as `(a * b).sum(-1)`: matmuls that are written by hand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from jax.extend import core

from shardwise.scaling.branches import KEEPING
from shardwise.tracing.jaxpr import Atom, definitions, original, shape_of

# Operations between a product and its sum, which keep the dims where they are.
CASTS = ("convert_element_type", "copy", "name", "reduce_precision", "stop_gradient")


@dataclass(frozen=True)
class SummedProduct:
    """A sum over an elementwise product.

    Attributes:
        factors: the two arrays, which have the same shape.
        axes: the dims that are summed over.
        size: the number of products in each sum.
    """

    factors: tuple[Atom, Atom]
    axes: tuple[int, ...]
    size: int


def summed_products(jaxpr: core.Jaxpr) -> Mapping[core.Var, SummedProduct]:
    """Return the sums over elementwise products of two arrays, by their results.

    Squares are not among them, because norms need them. Means are not either: they do not grow with
    the number of their terms.
    """
    defined = definitions(jaxpr)
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name != "reduce_sum":
            continue
        summed = original(equation.invars[0], defined, CASTS)
        product = defined.get(cast(core.Var, summed))
        if product is None or product.primitive.name != "mul":
            continue
        left, right = product.invars
        if not shape_of(left) or not shape_of(right):
            continue
        sources = [original(factor, defined, KEEPING) for factor in (left, right)]
        if sources[0] is sources[1]:
            continue
        axes = tuple(equation.params["axes"])
        shape = shape_of(equation.invars[0])
        size = math.prod(shape[axis] for axis in axes)
        result = equation.outvars[0]
        found[result] = SummedProduct((left, right), axes, size)
    for equation in jaxpr.eqns:
        divided = _divided(equation)
        if divided is not None:
            atom, size = divided
            total = cast(core.Var, original(atom, defined, KEEPING))
            # In 16 bits, the inverse of a size is not exact.
            if total in found and math.isclose(found[total].size, size, rel_tol=1e-2):
                del found[total]
    return found


def _divided(equation: core.JaxprEqn) -> tuple[Atom, float] | None:
    """Return what an equation divides by a constant, and the constant."""
    if equation.primitive.name not in ("mul", "div"):
        return None
    atom, divisor = equation.invars
    is_product = equation.primitive.name == "mul"
    if is_product and isinstance(atom, core.Literal):
        atom, divisor = divisor, atom
    if not isinstance(divisor, core.Literal) or shape_of(divisor) or not divisor.val:
        return None
    value = float(divisor.val)
    return atom, 1 / value if is_product else value
