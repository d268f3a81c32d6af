"""FSDP on TPUs and GPUs: explicit all-gathers of parameters, reduce-scatters of gradients.

XLA for TPUs turns the sum of a gradient over the devices and the slice that each of them stores
into a reduce-scatter only if the slice is along the major dim of the gradient in memory. Otherwise
it all-reduces, which moves twice as much. On 64 chips or more it gathers parameters by all-reduces,
too. XLA for GPUs all-reduces gradients, and gathers many parameters before it converts them to 16
bits.

Both keep `lax.all_gather` and `lax.psum_scatter` inside of `shard_map`, over most groups of
devices. So parameters are gathered there, and the matmuls of gradients are replaced in the traced
step: each device multiplies its own tokens, and the sum is scattered.

The operands of a `shard_map` are resharded if necessary. So the result is right however XLA shards
the activations.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from shardwise.axes import TENSOR
from shardwise.sharding import (
    axes_of_dims,
    axes_of_entry,
    batch_axes,
    reshard,
    spec_of_dims,
)
from shardwise.state import StateSpec
from shardwise.tracing.jaxpr import replace_equation, shape_of, with_inner_jaxprs
from shardwise.tree import PyTree

# Where XLA does not choose these collectives itself, and the axes that a mesh may have there, apart
# from those of the batch. With tensor axes, XLA for TPUs scatters most gradients itself.
PLATFORMS: dict[str, tuple[str, ...]] = {"tpu": (), "gpu": TENSOR}

# Over a complete torus of three dims, XLA gathers by an all-reduce if no side is shorter than this.
GATHER_SIDE = 4
# The same for scatters.
SCATTER_SIDE = 2

# The mesh axes of each dim of an array.
Dims: TypeAlias = tuple[tuple[str, ...], ...]
# Devices that communicate with each other, by their position along a mesh axis.
Groups: TypeAlias = list[list[int]]
# The position of an equation in its jaxpr, and the sharding that its result should have.
Summand: TypeAlias = tuple[int, Dims]


def gather_parameter(
    x: jax.Array, spec: StateSpec, stored: NamedSharding, used: NamedSharding
) -> jax.Array:
    """Return a parameter in the sharding in which the model uses it.

    Args:
        x: a parameter, while tracing.
        spec: the abstract state.
        stored: the sharding in which it is stored.
        used: the sharding in which it is used.
    """
    stays = {axis for names in axes_of_dims(used, x.ndim) for axis in names}
    # Experts stay where they are, and XLA gathers the rest of them.
    if _is_explicit(spec) and not stays & set(batch_axes(spec.mesh, spec.rules)):
        return all_gather(x, stored, used)
    return reshard(x, used)


def all_gather(x: jax.Array, stored: NamedSharding, used: NamedSharding) -> jax.Array:
    """Return an array in the sharding in which the model uses it.

    Args:
        x: a parameter, while tracing.
        stored: the sharding in which it is stored.
        used: the sharding in which it is used.
    """
    mesh = cast(Mesh, stored.mesh)
    before, after = (axes_of_dims(sharding, x.ndim) for sharding in (stored, used))
    missing = _missing(before, after)
    if missing is None:
        return reshard(x, used)

    def gathered(part: jax.Array) -> jax.Array:
        for dim, names in enumerate(missing):
            for groups in _stages(mesh, names, GATHER_SIDE):
                part = lax.all_gather(
                    part, names, axis=dim, tiled=True, axis_index_groups=groups
                )
        return part

    whole: jax.Array = jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=spec_of_dims(before),
        out_specs=spec_of_dims(after),
        check_vma=False,
    )(x)
    return whole


def scatter_gradients(
    function: Callable[..., PyTree], spec: StateSpec
) -> Callable[..., PyTree]:
    """Return a function that reduces gradients by reduce-scatter where it should.

    Args:
        function: the gradient of a loss whose parameters pass through `access_hooks`.
        spec: the abstract state.
    """
    if not _is_explicit(spec):
        return function
    axes = batch_axes(spec.mesh, spec.rules)

    def scattered(*args: PyTree) -> PyTree:
        closed, output = jax.make_jaxpr(function, return_shape=True)(*args)
        visited: dict[Jaxpr, Jaxpr] = {}

        def visit(jaxpr: Jaxpr) -> Jaxpr:
            if jaxpr not in visited:
                equations = _Gradients(jaxpr, spec.mesh, axes).scattered()
                equations = [with_inner_jaxprs(eqn, visit) for eqn in equations]
                visited[jaxpr] = jaxpr.replace(eqns=equations)
            return visited[jaxpr]

        closed = closed.replace(jaxpr=visit(closed.jaxpr))
        leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(output), leaves)

    return scattered


def _is_explicit(spec: StateSpec) -> bool:
    """Return whether a step uses the collectives of this module."""
    mesh = spec.mesh
    used = {axis for axis, size in mesh.shape.items() if size > 1}
    sharded = {
        axis
        for placement in spec.params.values()
        for entry in placement.spec
        for axis in axes_of_entry(entry)
    }
    others = PLATFORMS.get(mesh.devices.flat[0].platform)
    batch = set(batch_axes(mesh, spec.rules))
    return others is not None and bool(sharded & batch) and used <= {*batch, *others}


def _missing(stored: Dims, used: Dims) -> Dims | None:
    """Return the axes over which each dim is gathered; None if something else changes, or nothing.

    Args:
        stored: the sharding of a parameter in storage.
        used: its sharding where the model uses it.
    """
    pairs = list(zip(stored, used, strict=True))
    missing = tuple(names[len(kept) :] for names, kept in pairs)
    is_gather = all(names[: len(kept)] == kept for names, kept in pairs)
    return missing if is_gather and any(missing) else None


class _Gradients:
    """The gradients of parameters in one jaxpr.

    `step.access` marks them: a gradient gets first the sharding in which its parameter is used,
    and then the one in which it is stored.

    Args:
        jaxpr: the traced function, or the body of a loop in it.
        mesh: the device mesh.
        axes: the mesh axes that shard the batch, with more than one device.
    """

    def __init__(self, jaxpr: Jaxpr, mesh: Mesh, axes: tuple[str, ...]):
        self.equations = list(jaxpr.eqns)
        self.mesh = mesh
        self.axes = axes
        self._producers = {
            var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars
        }
        inputs = [var for eqn in jaxpr.eqns for var in eqn.invars]
        self._num_uses = Counter(
            var for var in (*inputs, *jaxpr.outvars) if not isinstance(var, Literal)
        )

    def scattered(self) -> list[JaxprEqn]:
        """Return the equations of the jaxpr, with gradients reduced by reduce-scatter."""
        equations = list(self.equations)
        for stored in self.equations:
            at_use = self._only_producer(stored, "sharding_constraint")
            if at_use is None:
                continue
            used = self.equations[at_use]
            rank = len(shape_of(used.invars[0]))
            dims, of_use = (
                axes_of_dims(equation.params["sharding"], rank)
                for equation in (stored, used)
            )
            if self._kept(dims) != of_use or _missing(dims, of_use) is None:
                continue
            summands = self._summands(used.invars[0], dims)
            matmuls = {i: self._matmuls(i) for i, _ in summands}
            if not any(matmuls.values()):
                continue
            for i, wanted in summands:
                if matmuls[i]:
                    equations[i] = self._scattered(i, matmuls[i], wanted)
                elif len(equations[i].outvars) == 1:
                    equations[i] = self._gathered(equations[i], wanted)
            # The gradient has the sharding of storage already.
            equations[at_use] = used.replace(params=stored.params)
        return equations

    def _kept(self, dims: Dims) -> Dims:
        """Return the axes of each dim that do not shard the batch, such as tensor axes."""
        return tuple(
            tuple(axis for axis in names if axis not in self.axes) for names in dims
        )

    def _only_producer(self, equation: JaxprEqn, name: str) -> int | None:
        """Return the position of the primitive that computes the input of the same primitive.

        None if that is another one, or if its result has other uses.
        """
        if equation.primitive.name != name:
            return None
        i = self._producer(equation.invars[0])
        if i is None or self.equations[i].primitive.name != name:
            return None
        return None if self._has_other_uses(self.equations[i]) else i

    def _producer(self, var: Var | Literal) -> int | None:
        """Return the position of the equation that computes a variable of this jaxpr."""
        return None if isinstance(var, Literal) else self._producers.get(var)

    def _has_other_uses(self, equation: JaxprEqn) -> bool:
        """Return whether a result of an equation is used more than once."""
        return any(self._num_uses[var] > 1 for var in equation.outvars)

    def _summands(self, var: Var | Literal, dims: Dims) -> list[Summand]:
        """Return the equations whose results add up to a gradient, in any order of dims.

        Args:
            var: the gradient.
            dims: its sharding in storage.
        """
        i = self._producer(var)
        if i is None:
            return []
        equation = self.equations[i]
        before = _dims_before(equation, dims)
        if before is None or self._has_other_uses(equation) or self._matmuls(i):
            return [(i, dims)]
        # Further inputs, such as the value of `pad`, are not gradients.
        is_sum = equation.primitive.name in ("add", "add_any")
        operands = equation.invars if is_sum else equation.invars[:1]
        return [
            summand
            for operand in operands
            for summand in self._summands(operand, before)
        ]

    def _matmuls(self, i: int | None) -> list[JaxprEqn]:
        """Return the matmuls over tokens that an equation computes or adds; none if it has others.

        The batch axes must divide the first dim that is contracted.

        Args:
            i: the position of the equation, or None for an input of the jaxpr.
        """
        if i is None or self._has_other_uses(self.equations[i]):
            return []
        equation = self.equations[i]
        name, params = equation.primitive.name, equation.params
        if name in ("add", "add_any"):
            first, second = (self._matmuls(self._producer(x)) for x in equation.invars)
            return [*first, *second] if first and second else []
        if name != "dot_general":
            return []
        ((contracted, _), (batch, _)) = params["dimension_numbers"]
        if batch or not contracted:
            return []
        count = math.prod(self.mesh.shape[axis] for axis in self.axes)
        size = shape_of(equation.invars[0])[contracted[0]]
        return [equation] if size % count == 0 else []

    def _scattered(self, i: int, matmuls: list[JaxprEqn], dims: Dims) -> JaxprEqn:
        """Return a sum of matmuls, of the tokens of each device, with the sharding `dims`.

        Args:
            i: the position of the equation that it replaces.
            matmuls: the matmuls that this equation computes or adds.
            dims: the sharding of the result.
        """
        kept = self._kept(dims)
        in_specs = [
            spec_of_dims(operand)
            for matmul in matmuls
            for operand in self._operands(matmul, kept)
        ]
        scattered = {axis for names in dims for axis in names}
        others = tuple(axis for axis in self.axes if axis not in scattered)

        @partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=spec_of_dims(dims),
            check_vma=False,
        )
        def multiply(*operands: jax.Array) -> jax.Array:
            x: jax.Array = sum(
                matmul.primitive.bind(a, b, **matmul.params)
                for matmul, a, b in zip(
                    matmuls, operands[::2], operands[1::2], strict=True
                )
            )
            for dim, (names, own) in enumerate(zip(dims, kept, strict=True)):
                if names != own:
                    x = _scatter(x, dim, names[len(own) :], self.mesh)
            # After the scatter, so that each device sends only its part.
            if others:
                x = lax.psum(x, others)
            return x

        def call(operands: Sequence[jax.Array]) -> jax.Array:
            result: jax.Array = multiply(*operands)
            return result

        invars = [var for matmul in matmuls for var in matmul.invars]
        return replace_equation(self.equations[i].replace(invars=invars), call)

    def _operands(self, matmul: JaxprEqn, kept: Dims) -> list[Dims]:
        """Return the shardings of both operands of a matmul over tokens.

        Args:
            matmul: the matmul.
            kept: the axes of each dim of its result that do not shard the batch.
        """
        result = []
        (contracted, _) = matmul.params["dimension_numbers"]
        remaining = iter(kept)
        for operand, summed in zip(matmul.invars, contracted, strict=True):
            dims = [
                () if dim in summed else next(remaining)
                for dim in range(len(shape_of(operand)))
            ]
            dims[summed[0]] = self.axes
            result.append(tuple(dims))
        return result

    def _gathered(self, equation: JaxprEqn, dims: Dims) -> JaxprEqn:
        """Return an equation whose result is gathered over the batch, as its parameter was.

        Args:
            equation: the equation.
            dims: the sharding of its result in storage.
        """
        sharding = NamedSharding(self.mesh, spec_of_dims(self._kept(dims)))

        def call(operands: Sequence[jax.Array]) -> jax.Array:
            x: jax.Array = equation.primitive.bind(*operands, **equation.params)
            return reshard(x, sharding)

        return replace_equation(equation, call)


def _scatter(x: jax.Array, dim: int, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Return the sum of `x` over devices, of which each keeps a part along a dim.

    XLA makes that an all-reduce, unless the dim is the first of a matrix, in memory too. Over more
    than one dim of a torus, it also does so for some large numbers of columns, such as 50,304.
    Padding them would cost as much time as it saves.
    """
    first = jnp.moveaxis(x, dim, 0)
    part = first.reshape(len(first), -1)
    part = with_layout_constraint(part, Layout(major_to_minor=(0, 1)))
    for groups in reversed(_stages(mesh, axes, SCATTER_SIDE)):
        part = lax.psum_scatter(
            part, axes, scatter_dimension=0, tiled=True, axis_index_groups=groups
        )
    result: jax.Array = jnp.moveaxis(part.reshape(-1, *first.shape[1:]), 0, dim)
    return result


def _stages(mesh: Mesh, axes: tuple[str, ...], side: int) -> list[Groups | None]:
    """Return the groups of devices that gather an array, stage by stage; None for all at once.

    XLA replaces collectives over a complete torus by all-reduces, which move twice as much. So
    neighbors gather first, along one dim of the torus, and then every plane of it. To scatter, the
    stages are reversed.

    The result is `[None]` for a torus of two dims. If it is a square, XLA all-reduces gradients
    there too, but two stages would save no time: each uses half of the links.

    Args:
        mesh: the device mesh.
        axes: the mesh axes.
        side: the shortest side of a torus where this is necessary.
    """
    if not axes:
        return []
    if len(axes) > 1 or mesh.shape[axes[0]] < mesh.size:
        return [None]
    line = mesh.devices.flatten()
    coords = np.array([getattr(device, "coords", (0,)) for device in line])
    if coords.shape[1] < 3 or min(len(set(x)) for x in coords.T) < side:
        return [None]
    # Neighbors are devices for which only the coordinate changes that changes first.
    is_other = coords[1] == coords[0]
    size = int((coords != coords[0])[:, is_other].any(1).argmax())
    table = np.arange(len(line)).reshape(-1, size)
    return [table.tolist(), table.T.tolist()]


def _dims_before(equation: JaxprEqn, dims: Dims) -> Dims | None:
    """Return the sharding of the input of an equation that gives its result the sharding `dims`.

    None if the equation is none that moves, converts or adds the values of a gradient.
    """
    name, params = equation.primitive.name, equation.params
    if name in ("convert_element_type", "add", "add_any"):
        return dims
    if name == "transpose":
        order = params["permutation"]
        return tuple(dims[order.index(dim)] for dim in range(len(order)))
    if name == "pad":
        is_padded = [config != (0, 0, 0) for config in params["padding_config"]]
        moves = any(
            names and padded for names, padded in zip(dims, is_padded, strict=True)
        )
        return None if moves else dims
    if name == "broadcast_in_dim":
        return tuple(dims[dim] for dim in params["broadcast_dimensions"])
    if name == "reshape" and params["dimensions"] is None:
        before = shape_of(equation.invars[0])
        after = shape_of(equation.outvars[0])
        return _dims_before_reshape(dims, before, after)
    return None


def _dims_before_reshape(
    dims: Dims, before: tuple[int, ...], after: tuple[int, ...]
) -> Dims | None:
    """Return the sharding before a reshape; None if it splits or joins a dim that is sharded.

    The first part of a dim is not split from it: its shards are the same.
    """
    result: list[tuple[str, ...]] = [()] * len(before)
    for dim, names in enumerate(dims):
        if not names:
            continue
        # The same dim before, or the one that it is the first part of: with as many elements in the
        # dims in front of it.
        same = [
            i
            for i, size in enumerate(before)
            if size % after[dim] == 0
            and math.prod(before[:i]) == math.prod(after[:dim])
        ]
        if not same:
            return None
        result[same[0]] = names
    return tuple(result)
