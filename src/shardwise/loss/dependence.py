"""Which examples of a batch each output of a traced function depends on.

Padding, accumulation and evaluation in batches are exact only if examples do not influence each
other, or if they influence each other through plain sums. This module finds out before anything is
compiled, by abstract interpretation of the jaxpr: every value gets a `Value` that says how it
depends on the examples, and each primitive has a rule that says how the dependence of its inputs
becomes that of its outputs.

The kinds form a chain. A value that depends on no example (parameters, constants) is FREE. The
inputs of the loss are ROWS: one dim has one entry per example, or several. A sum over that dim is a
SUM, and it stays one as long as it is only scaled and added. Any other function of SUMs is a
STATISTIC, for example the ratio of two sums, or a standard deviation. Where a statistic or a sum
meets single examples again, or where examples meet directly, values are COUPLED. Primitives without
a rule give UNKNOWN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from jax.extend import core

from shardwise.errors import is_library
from shardwise.loss.constants import (
    constant_value,
    fold,
    index,
    index_columns,
    long_dims,
    positions,
)
from shardwise.loss.digests import with_digests
from shardwise.loss.primitives import PLACEMENT
from shardwise.loss.rules import (
    RULES,
    coupled,
    elementwise,
    kernel,
    same,
    sum_rule,
    unknown,
)
from shardwise.loss.value import Cause, Kind, Value, cause_of
from shardwise.tracing.jaxpr import (
    inner_jaxprs,
    is_defined_in_jax,
    scan_parts,
    shape_of,
)


@dataclass(frozen=True)
class Dependence:
    """The result of `analyze`.

    Attributes:
        outputs: how each output of the jaxpr depends on the examples.
        fixed_keys: operations that draw random numbers from a key that never changes.
        broadcasts: element-wise operations that combine every example with every other one,
            because of their shapes.
        draws: the shape of every draw of random numbers, without its first dim. The numbers of an
            example depend on it.
        has_custom_gradient: whether the user's code defines a backward pass (`jax.custom_vjp`).
    """

    outputs: tuple[Value, ...]
    fixed_keys: tuple[Cause, ...]
    broadcasts: tuple[Cause, ...]
    draws: tuple[tuple[int, ...], ...]
    has_custom_gradient: bool


def analyze(closed: core.ClosedJaxpr, is_batch: Sequence[bool]) -> Dependence:
    """Find how the outputs of a jaxpr depend on the examples of a batch.

    Args:
        closed: the traced function.
        is_batch: for each flat input, whether it is an array of the batch, with the examples along
            its first dim.
    """
    inputs = [
        Value(Kind.ROWS, digest=number)
        if batch
        else Value(
            Kind.FREE,
            digest=number,
            origin=number,
            positions=long_dims(shape_of(variable)),
        )
        for number, (batch, variable) in enumerate(
            zip(is_batch, closed.jaxpr.invars, strict=True)
        )
    ]
    analysis = _Analysis()
    outputs = analysis.closed(closed, inputs)
    return Dependence(
        tuple(outputs),
        tuple(dict.fromkeys(analysis.fixed_keys)),
        tuple(dict.fromkeys(analysis.broadcasts)),
        tuple(analysis.draws),
        analysis.has_custom_gradient,
    )


# From the values of the operands of a loop or a branch to those of its outputs.
NestedRule: TypeAlias = Callable[["_Analysis", core.JaxprEqn, list[Value]], list[Value]]
# Primitives that return their first operand.
UNCHANGED = (
    *("copy", "copy_p", "stop_gradient"),
    *PLACEMENT,
)
# Kernels whose body is not looked at. They are taken to treat examples alike, if inputs and outputs
# have their examples along the same dim.
KERNELS = ("pallas_call", "mpmd_map", "shard_map", "dot_product_attention_fwd")
# Jitted functions of shardwise that are such kernels, by name.
KERNEL_FUNCTIONS = ("_apply_experts", "_apply_experts_with_capacity")


class _Analysis:
    """One pass over a jaxpr.

    Attributes:
        fixed_keys: see `Dependence`.
        broadcasts: see `Dependence`.
        draws: see `Dependence`.
        has_custom_gradient: see `Dependence`.
    """

    def __init__(self) -> None:
        self.fixed_keys: list[Cause] = []
        self.broadcasts: list[Cause] = []
        self.draws: list[tuple[int, ...]] = []
        self.has_custom_gradient = False

    def closed(self, closed: core.ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Return the values of the outputs of a closed jaxpr."""
        constants = [constant_value(constant) for constant in closed.consts]
        return self.jaxpr(closed.jaxpr, constants, inputs)

    def jaxpr(
        self, jaxpr: core.Jaxpr, constants: Sequence[Value], inputs: Sequence[Value]
    ) -> list[Value]:
        """Return the values of the outputs of a jaxpr."""
        values: dict[core.Var, Value] = {}
        values.update(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(variable: core.Var | core.Literal) -> Value:
            if isinstance(variable, core.Literal):
                return constant_value(variable.val)
            return values[variable]

        for equation in jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            results = self.equation(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def equation(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        """Return the values of the outputs of one equation."""
        name = equation.primitive.name
        if name in CONTROL_FLOW or _called_jaxpr(equation) is not None:
            return self.nested(equation, operands)
        kinds = {value.kind for value in operands}
        worst = max(kinds, default=Kind.FREE)
        if worst < Kind.STATISTIC and worst != Kind.SUM:
            rule = self.free if worst == Kind.FREE else self.rows_rule
            return with_digests(equation, operands, rule(equation, operands))
        if worst >= Kind.UNKNOWN:
            value = next(value for value in operands if value.kind == worst)
            return [value] * len(equation.outvars)
        if Kind.ROWS in kinds:
            # Single examples meet a value that depends on all of them.
            return same(equation, Value(Kind.COUPLED, cause=cause_of(equation)))
        if worst == Kind.STATISTIC:
            value = next(value for value in operands if value.kind == worst)
            return [value] * len(equation.outvars)
        results = same(equation, sum_rule(equation, operands))
        return with_digests(equation, operands, results)

    def nested(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        """Return the values of an equation that contains a jaxpr.

        JAX traces its own functions once for all callers, so equations in them have the place of
        the first caller, or none. They get the place of this call.
        """
        name, place = equation.primitive.name, cause_of(equation).place
        called = _called_jaxpr(equation)
        is_shared = called is not None and is_defined_in_jax(_open(called))
        if name.startswith("custom_vjp") and _is_users(called):
            self.has_custom_gradient = True
        found = (self.fixed_keys, self.broadcasts)
        before = [len(causes) for causes in found]
        if name in CONTROL_FLOW:
            results = CONTROL_FLOW[name](self, equation, operands)
        else:
            assert called is not None
            results = (
                self.closed(called, operands)
                if isinstance(called, core.ClosedJaxpr)
                else self.jaxpr(called, [], operands)
            )
        for causes, start in zip(found, before, strict=True):
            causes[start:] = [
                _placed(cause, place, is_shared) for cause in causes[start:]
            ]
        before_call = {value.cause for value in operands}
        return [
            replace(value, cause=_placed(value.cause, place, is_shared))
            if value.cause and value.cause not in before_call
            else value
            for value in results
        ]

    def free(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        """Return the values of an equation that depends on no example."""
        name = equation.primitive.name
        is_fixed = all(value.is_fixed for value in operands)
        # The first operand of `random_bits` is the key.
        if name == "random_bits":
            self.draws.append(equation.params["shape"][1:])
            if operands[0].is_fixed:
                self.fixed_keys.append(cause_of(equation))
        dim, role = index(equation, operands)
        value = Value(
            Kind.FREE,
            origin=operands[0].origin if name in UNCHANGED else None,
            constant=fold(equation, operands),
            is_fixed=is_fixed,
            positions=positions(equation, operands),
            index_dim=dim,
            index_role=role,
            index_columns=index_columns(equation, operands),
        )
        return same(equation, value)

    def rows_rule(self, equation: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        """Return the values of an equation of ROWS and FREE operands."""
        name = equation.primitive.name
        rule = RULES.get(name)
        if rule is not None:
            return rule(equation, operands)
        if _is_kernel(equation):
            return kernel(equation, operands)
        if name == "ffi_call" or any(inner_jaxprs(equation.params)):
            return unknown(equation)
        results = elementwise(equation, operands)
        cause = results[0].cause
        if results[0].kind == Kind.COUPLED and cause and not cause.is_positional:
            self.broadcasts.append(cause_of(equation))
        return results


def _is_kernel(equation: core.JaxprEqn) -> bool:
    """Return whether an equation is taken to treat examples alike."""
    if equation.primitive.name.startswith(KERNELS):
        return True
    called = equation.params.get("jaxpr")
    return (
        equation.params.get("name") in KERNEL_FUNCTIONS
        and isinstance(called, core.ClosedJaxpr)
        and not _is_users(called)
    )


def _called_jaxpr(equation: core.JaxprEqn) -> core.Jaxpr | core.ClosedJaxpr | None:
    """Return the jaxpr of a call, such as `jit`, `remat` or a custom gradient."""
    if equation.primitive.name in RULES or _is_kernel(equation):
        return None
    jaxprs = [
        value
        for value in equation.params.values()
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr)
    ]
    if len(jaxprs) != 1 or len(_open(jaxprs[0]).invars) != len(equation.invars):
        return None
    return jaxprs[0]


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _is_users(called: core.Jaxpr | core.ClosedJaxpr | None) -> bool:
    """Return whether the function of a call is defined in the user's code."""
    if not isinstance(called, core.ClosedJaxpr):
        return False
    # "name at file.py:3"
    source = str(called.jaxpr.debug_info.func_src_info)
    return not is_library(source.partition(" at ")[2])


def _placed(cause: Cause, place: str, is_shared: bool) -> Cause:
    return replace(cause, place=place) if is_shared or not cause.place else cause


def _join(first: Value, second: Value) -> Value:
    """Return a value that covers both, for branches and for the carry of a loop.

    Its digest is 0: the caller sets it.
    """
    first, second = replace(first, digest=0), replace(second, digest=0)
    if first == second:
        return first
    low, high = sorted((first, second), key=lambda value: value.kind)
    if high.kind >= Kind.STATISTIC:
        return high
    if high.kind == Kind.FREE:
        return Value(Kind.FREE, positions=first.positions | second.positions)
    if low.kind == Kind.FREE:
        if high.kind == Kind.SUM and low.constant != 0:
            return replace(high, has_offset=True)
        return high
    if low.kind == high.kind == Kind.SUM:
        factors = tuple(dict.fromkeys((*first.factors, *second.factors)))
        has_offset = first.has_offset or second.has_offset
        return Value(Kind.SUM, factors=factors, has_offset=has_offset)
    if low.kind == high.kind and (low.dim, low.entries) == (high.dim, high.entries):
        return Value(Kind.ROWS, dim=low.dim, entries=low.entries)
    return Value(Kind.UNKNOWN, cause=Cause("a loop or branch"))


# A carry can only get worse, and there are six kinds; sums may also collect factors.
MAX_PASSES = 12


def _fixed_point(
    carry: list[Value], body: Callable[[list[Value]], list[Value]]
) -> tuple[list[Value], list[Value]]:
    """Return values of a carry that hold before and after every pass of a loop.

    Args:
        carry: the values before the loop.
        body: from the carry to all outputs of one pass, the carry first.

    Returns:
        The values after the loop, and all outputs of one pass.
    """
    count = len(carry)
    # Factors of examples are part of the digest inside of a loop.
    stable = [
        replace(value, digest=0, factors=(1.0,))
        if value.kind == Kind.ROWS
        else replace(value, digest=0)
        for value in carry
    ]
    for _ in range(MAX_PASSES):
        results = [
            replace(value, factors=(1.0,)) if value.kind == Kind.ROWS else value
            for value in body(stable)[:count]
        ]
        new = [_join(*pair) for pair in zip(stable, results, strict=True)]
        if new == stable:
            break
        stable = new
    else:
        stable = [
            value
            if value.kind <= Kind.ROWS
            else Value(Kind.UNKNOWN, cause=Cause("a loop"))
            for value in stable
        ]
    entering = [
        replace(value, digest=before.full_digest)
        for value, before in zip(stable, carry, strict=True)
    ]
    outputs = body(entering)
    leaving = [
        replace(value, digest=hash(("loop", _digest(after))))
        for value, after in zip(stable, outputs[:count], strict=True)
    ]
    return leaving, outputs


def _digest(value: Value) -> int:
    """The digest of a value where factors of sums are tracked, and those of examples are not."""
    return value.digest if value.kind == Kind.SUM else value.full_digest


def _scan(
    analysis: _Analysis, equation: core.JaxprEqn, operands: list[Value]
) -> list[Value]:
    num_consts, num_carry = scan_parts(equation)
    consts = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    scanned = operands[num_consts + num_carry :]

    def body(values: list[Value]) -> list[Value]:
        return analysis.closed(equation.params["jaxpr"], [*consts, *values])

    if any(value.kind == Kind.ROWS and value.dim == 0 for value in scanned):
        return _scan_over_examples(equation, body, consts, carry, scanned)
    slices = [_shifted(value, -1) for value in scanned]
    carry, outputs = _fixed_point(carry, lambda carry: body([*carry, *slices]))
    return carry + [_shifted(value, 1) for value in outputs[num_carry:]]


def _shifted(value: Value, by: int) -> Value:
    """Return the value of a slice along the first dim, or of a stack of such slices."""
    if value.kind == Kind.ROWS:
        return replace(value, dim=value.dim + by)
    if value.kind != Kind.FREE:
        return value
    positions = frozenset(dim + by for dim in value.positions if dim + by >= 0)
    return replace(value, positions=positions, index_dim=None, index_role="")


def _scan_over_examples(
    equation: core.JaxprEqn,
    body: Callable[[list[Value]], list[Value]],
    consts: list[Value],
    carry: list[Value],
    scanned: list[Value],
) -> list[Value]:
    """A loop over the examples themselves: `jax.lax.map` keeps them apart."""
    is_map = not carry and all(value.kind == Kind.FREE for value in consts)
    entries = {value.entries for value in scanned if value.kind == Kind.ROWS}
    positional_inputs = [
        value for value in scanned if value.kind == Kind.FREE and 0 in value.positions
    ]
    if not is_map or len(entries) != 1 or positional_inputs:
        return unknown(equation)
    # One example is like a value that depends on no example.
    slices = [Value(Kind.FREE, digest=value.full_digest) for value in scanned]
    return [
        Value(Kind.ROWS, entries=next(iter(entries)), digest=output.full_digest)
        for output in body(slices)
    ]


def _while(
    analysis: _Analysis, equation: core.JaxprEqn, operands: list[Value]
) -> list[Value]:
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    conditions, consts, carry = (
        operands[:first],
        operands[first:second],
        operands[second:],
    )

    def body(carry: list[Value]) -> list[Value]:
        return analysis.closed(params["body_jaxpr"], [*consts, *carry])

    carry, _ = _fixed_point(carry, body)
    (predicate,) = analysis.closed(params["cond_jaxpr"], [*conditions, *carry])
    if predicate.kind != Kind.FREE:
        return coupled(equation)
    return carry


def _cond(
    analysis: _Analysis, equation: core.JaxprEqn, operands: list[Value]
) -> list[Value]:
    index, arguments = operands[0], operands[1:]
    branches = [
        analysis.closed(branch, arguments) for branch in equation.params["branches"]
    ]
    if index.kind != Kind.FREE:
        return coupled(equation)
    joined = branches[0]
    for branch in branches[1:]:
        joined = [_join(*pair) for pair in zip(joined, branch, strict=True)]
    return [
        replace(
            value,
            digest=hash(("cond", index.digest, *(_digest(value) for value in values))),
        )
        for value, *values in zip(joined, *branches, strict=True)
    ]


CONTROL_FLOW: dict[str, NestedRule] = {"scan": _scan, "while": _while, "cond": _cond}
