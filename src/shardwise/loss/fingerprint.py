"""A digest of a traced function, to see whether two runs compute the same.

A checkpoint carries the digest of the forward pass of its run. A resumed run compares it with its
own, so that another loss, dropout rate or activation function is not taken for the same run.
"""

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Parameters of equations that do not change what is computed: names, places in the source, and how
# arrays are sharded, compiled and saved for the backward pass.
IGNORED = frozenset(
    {
        "compiler_options_kvs",
        "cost_estimate",
        "ctx_mesh",
        "debug",
        "debug_info",
        "donated_invars",
        "effects",
        "in_layouts",
        "in_shardings",
        "inline",
        "keep_unused",
        "layout",
        "mesh",
        "metadata",
        "name",
        "name_and_src_info",
        "out_layouts",
        "out_sharding",
        "out_shardings",
        "out_trees",
        "policy",
        "prevent_cse",
        "sharding",
        "src_info",
        "unconstrained_dims",
    }
)
# Primitives that return their operand.
IDENTITIES = frozenset(
    {"mesh_cast", "name", "optimization_barrier", "reshard", "sharding_constraint"}
)
# Values that have the same text in every process.
PLAIN = (type(None), bool, int, float, complex, str, bytes)
# Primitives whose body depends on the number of devices.
OPAQUE = frozenset({"shard_map"})


def jaxpr_fingerprint(closed: core.ClosedJaxpr) -> str:
    """Return a digest of what a traced function computes.

    It covers primitives and their parameters, shapes and dtypes, nested functions, literals, and
    the values of constants that the function closes over. It does not cover names, places in the
    source and shardings. Two processes that trace the same code with the same versions of JAX and
    Flax get the same digest, on any mesh.

    Args:
        closed: what `jax.make_jaxpr` returns.

    Returns:
        32 hexadecimal digits.

    Example:
        >>> import jax
        >>> once = jax.make_jaxpr(lambda x: 2 * x)(1.0)
        >>> again = jax.make_jaxpr(lambda y: 2 * y)(1.0)
        >>> jaxpr_fingerprint(once) == jaxpr_fingerprint(again)
        True
    """
    return _Digests().of_closed(closed).hex()


def _digest(parts: object) -> bytes:
    """Return the digest of nested tuples of text, numbers and bytes."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


class _Digests:
    """Digests of jaxprs and of the values in them.

    The layers of a model often share one traced function, so digests of jaxprs are kept.
    """

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}

    def of_closed(self, closed: core.ClosedJaxpr) -> bytes:
        consts = tuple(map(self._describe, closed.consts))
        return _digest((self.of_jaxpr(closed.jaxpr), consts))

    def of_jaxpr(self, jaxpr: core.Jaxpr) -> bytes:
        # The jaxpr that is being read holds all nested ones, so no id is used twice.
        digest = self._known.get(id(jaxpr))
        if digest is None:
            digest = self._known[id(jaxpr)] = _digest(self._describe_jaxpr(jaxpr))
        return digest

    def _describe_jaxpr(self, jaxpr: core.Jaxpr) -> tuple[object, ...]:
        """Return the equations, with variables numbered in the order in which they appear."""
        numbers: dict[core.Var, int] = {}
        fresh = itertools.count()

        def define(var: core.Var) -> tuple[object, ...]:
            numbers[var] = next(fresh)
            return _describe_aval(var.aval)

        def use(atom: core.Var | core.Literal) -> object:
            if isinstance(atom, core.Literal):
                return self._describe(atom.val), _describe_aval(atom.aval)
            return numbers[atom]

        inputs = [define(var) for var in (*jaxpr.constvars, *jaxpr.invars)]
        equations: list[object] = []
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            operands = equation.invars
            if name in IDENTITIES:
                named = [x for x in operands if isinstance(x, core.Var)]
                if len(named) == len(operands) == len(equation.outvars):
                    for result, operand in zip(equation.outvars, named, strict=True):
                        numbers[result] = numbers[operand]
                    continue
            used = tuple(map(use, operands))
            params = None if name in OPAQUE else self._describe_params(equation.params)
            equations.append((name, used, params, *map(define, equation.outvars)))
        return tuple(inputs), tuple(equations), tuple(map(use, jaxpr.outvars))

    def _describe_params(self, params: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(
            (key, self._describe(params[key]))
            for key in sorted(params)
            if key not in IGNORED
        )

    def _describe(self, value: object) -> object:
        """Return a value as nested tuples without anything that differs between processes."""
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, tuple | list):
            return tuple(map(self._describe, value))
        if isinstance(value, core.ClosedJaxpr):
            return self.of_closed(value)
        if isinstance(value, core.Jaxpr):
            return self.of_jaxpr(value)
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return _describe_array(value)
        if isinstance(value, Enum):
            return type(value).__name__, value.name
        if isinstance(value, np.dtype):
            return value.name
        if isinstance(value, type):
            return value.__qualname__
        if isinstance(value, Mapping):
            return self._describe_params({str(key): value[key] for key in value})
        if isinstance(value, set | frozenset):
            return tuple(sorted(repr(self._describe(item)) for item in value))
        if is_dataclass(value):
            items = {field.name: getattr(value, field.name) for field in fields(value)}
            return type(value).__qualname__, self._describe_params(items)
        # The text of functions and other objects may contain their address.
        return type(value).__qualname__


def _describe_aval(aval: object) -> tuple[object, ...]:
    """Return shape and dtype. Shardings and weak types are omitted."""
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", None)
    return (*shape, _dtype_name(dtype))


@cache
def _dtype_name(dtype: object) -> str:
    return str(dtype)


def _describe_array(value: jax.Array | np.ndarray | np.generic) -> tuple[object, ...]:
    """Return shape and dtype of an array, and the digest of its values if they can be read."""
    described = _describe_aval(value)
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return described
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    # The bytes of bfloat16 and similar arrays can be read as integers only.
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return (*described, hashlib.blake2b(content, digest_size=16).digest())
