"""The constants that led to a value: factors that are tracked, and a digest of all others.

A loss is traced with two batch sizes. Values whose factors or digests differ between both depend on
the size of the batch.
"""

from dataclasses import replace
from typing import TypeAlias

from jax.extend import core

from shardwise.loss.primitives import ADDS, LINEAR, is_rounding
from shardwise.loss.value import Kind, Value

Factors: TypeAlias = tuple[float, ...]


def with_digests(
    equation: core.JaxprEqn, operands: list[Value], results: list[Value]
) -> list[Value]:
    """Return the results of a rule with their factors and digests, see `Value`."""
    if results[0].kind >= Kind.STATISTIC:
        return results
    factors, digest = _factors_and_digest(equation, operands)
    return [
        replace(result, factors=factors, digest=digest)
        if result.kind != Kind.FREE
        else replace(result, digest=_free_digest(result, digest))
        for result in results
    ]


def _factors_and_digest(
    equation: core.JaxprEqn, operands: list[Value]
) -> tuple[Factors, int]:
    """Return the factors of the results, and a hash of everything else that they come from."""
    name = equation.primitive.name
    dependent = [value for value in operands if value.kind != Kind.FREE]
    free = [value for value in operands if value.kind == Kind.FREE]
    if name in ("mul", "div", "dot_general") and len(dependent) == 1:
        factors = dependent[0].factors
        scale = _scale(name, operands)
        if scale is not None:
            # A constant factor leaves no other trace: 2 * x and x / 0.5 are the same.
            scaled = tuple(factor * scale for factor in factors)
            return scaled, hash(("scaled", dependent[0].digest))
        digests = [dependent[0].digest, *(value.full_digest for value in free)]
        return factors, hash((name, *digests))
    if name in ADDS and dependent:
        # The predicate of `select_n` is not added.
        predicate, added = operands[:0], operands
        if name == "select_n":
            predicate, added = operands[:1], operands[1:]
        terms = [value for value in added if value.kind != Kind.FREE]
        merged = dict.fromkeys(factor for value in terms for factor in value.factors)
        digests = [value.full_digest for value in predicate]
        digests += [value.digest for value in added]
        return tuple(merged) or (1.0,), hash((name, *digests))
    if name in LINEAR and len(dependent) == 1 and not is_rounding(equation):
        digests = [value.digest for value in operands]
        return dependent[0].factors, hash((name, *digests))
    exponent = equation.params.get("y") if name == "integer_pow" else None
    digests = [value.full_digest for value in operands]
    return (1.0,), hash((name, exponent, *digests))


def _free_digest(value: Value, digest: int) -> int:
    # An index depends on the size of the batch only by its length.
    if value.index_role:
        return hash(("index", value.index_role))
    return digest if value.constant is None else hash(("constant", value.constant))


def _scale(name: str, operands: list[Value]) -> float | None:
    """Return the constant by which the only dependent operand is multiplied, if it is known."""
    free = [value for value in operands if value.kind == Kind.FREE]
    if len(free) != 1 or not free[0].constant:
        return None
    if name == "div":
        return 1 / free[0].constant if operands[1] is free[0] else None
    if name == "dot_general":
        return None
    return free[0].constant
