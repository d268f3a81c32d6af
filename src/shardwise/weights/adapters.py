"""Fine-tuning: train only some parameters, or low-rank adapters (LoRA).

`freeze` and `lora` turn a model factory into another one; the code of the model does not change. A
frozen parameter is marked in its metadata. It gets no gradient and no optimizer state, and no
checkpoint contains it. `build_module` puts modules with frozen parameters only into evaluation
mode. A weight with adapters is replaced by `Adapted`, which behaves like a
variable with the value base + scale * A @ B wherever the model reads it, also inside `nnx.scan` and
`nnx.remat`.
"""

import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from shardwise.errors import ConfigError
from shardwise.module import BASE, ModelFactory, call_factory, other_paths, path_name
from shardwise.sharding import CONTEXT_RULES, STACKED, annotation_of
from shardwise.text import did_you_mean
from shardwise.tree import PyTree, matches, named_leaves

# The names of the two adapters of a weight.
A, B = "lora_a", "lora_b"

Param: TypeAlias = nnx.Param[Any]
Shape: TypeAlias = tuple[int, ...]


def freeze(
    model: ModelFactory, *patterns: str, dtype: DTypeLike | None = None
) -> ModelFactory:
    """Return a model factory whose parameters are partly frozen.

    A module whose parameters are all frozen runs in evaluation mode: its dropout is off, and its
    batch statistics keep their values. A module with a trained parameter trains as before.

    Args:
        model: the model factory.
        *patterns: the paths of the parameters to freeze, such as `"encoder/*"`.
        dtype: the dtype to store frozen parameters in, such as `"bfloat16"`. None keeps theirs.

    Raises:
        ConfigError: when the model is built, if a pattern matches no parameter.

    Example:
        >>> model = freeze(lambda rngs: Net(rngs), "encoder/*")  # doctest: +SKIP
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        module = call_factory(model, rngs)
        params = _params(module)
        selected = _select(patterns, _paths(module), "freeze")
        _freeze([params[path] for path in selected], dtype)
        return module

    return make


def lora(
    model: ModelFactory,
    patterns: str | Sequence[str] | Mapping[str, str | None],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    train: Sequence[str] = (),
    dtype: DTypeLike | None = None,
) -> ModelFactory:
    """Return a model factory that trains low-rank adapters and nothing else.

    Layers with adapters are trained layers, and modules that contain them keep their dropout. A
    module whose parameters are all frozen runs in evaluation mode, as with `freeze`.

    A weight with more than two dims is treated as a matrix from its input dims to its output dims.
    Its bias, which has the output dims, shows which is which. So does its metadata, as in
    `nnx.Param(value, dims="ioo")`: `i` for an input dim, `o` for an output dim; the dims of a stack
    of layers come before. Without either, map the pattern to one letter per dim, with `s` for the
    stack, as in `{"blocks/query": "sioo"}`.

    Args:
        model: the model factory.
        patterns: the paths of the weights that get adapters, such as `"blocks/*/mlp/*/kernel"`; one
            pattern, several, or a mapping from patterns to layouts.
        rank: the size of the dim between both adapters.
        alpha: the product of the adapters is multiplied by `alpha / rank`.
        train: patterns of further parameters to train, such as a new head.
        dtype: the dtype to store frozen parameters in, such as `"bfloat16"`. None keeps theirs.

    Raises:
        ConfigError: if `rank` is less than 1; or when the model is built, if a pattern matches no
            parameter or the layout of a weight is unknown.

    Example:
        >>> model = lora(lambda rngs: GPT(config, rngs), "*/kernel", rank=4)  # doctest: +SKIP
    """
    if rank < 1:
        raise ConfigError(f"lora: rank={rank}; it must be at least 1.")
    layouts: dict[str, str | None]
    if isinstance(patterns, str):
        layouts = {patterns: None}
    elif isinstance(patterns, Mapping):
        layouts = dict(patterns)
    else:
        layouts = dict.fromkeys(patterns)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        module = call_factory(model, rngs)
        params = _params(module)
        paths = _paths(module)
        trained = _select(train, paths, "lora: train")
        selected = _select(layouts, paths, "lora")
        shapes = {path: param.get_value().shape for path, param in params.items()}
        splits = {
            path: _split_dims(
                path, shapes, layouts[pattern] or _own_layout(params[path])
            )
            for path, pattern in selected.items()
            if path not in trained
        }
        _freeze([param for path, param in params.items() if path not in trained], dtype)
        key = rngs.params()
        adapted = {}
        for path, (stacked, inputs) in splits.items():
            # The key depends on the path alone, so other patterns do not change these adapters.
            own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
            base = params[path]
            adapted[id(base)] = Adapted(
                base, stacked, inputs, rank, alpha / rank, own_key
            )
        changed: nnx.Module = nnx.recursive_map(
            lambda _, node: adapted.get(id(node), node), module
        )
        return changed

    return make


class Adapted(nnx.Module):
    """A frozen weight with adapters. It behaves like a variable with base + scale * A @ B.

    Attributes:
        inputs: the number of input dims of the weight.
        scale: the factor of the product of both adapters.
        value: the value of the weight with its adapters.
    """

    def __init__(
        self,
        base: Param,
        stacked: int,
        inputs: int,
        rank: int,
        scale: float,
        key: jax.Array,
    ):
        """Create the adapters of a weight.

        Args:
            base: the weight, with the dims (*stack, *inputs, *outputs).
            stacked: the number of dims of a stack of layers.
            inputs: the number of input dims.
            rank: the size of the dim between both adapters.
            scale: the factor of their product.
            key: initializes A, with the dims (*stack, *inputs, rank). B, with the dims (*stack,
                rank, *outputs), starts at 0.
        """
        shape = base.get_value().shape
        split = stacked + inputs
        a_sharding, b_sharding = _adapter_shardings(base, stacked, split)
        bound = 1 / math.sqrt(math.prod(shape[stacked:split]))
        a = jax.random.uniform(key, (*shape[:split], rank), jnp.float32, -bound, bound)
        b = jnp.zeros((*shape[:stacked], rank, *shape[split:]), jnp.float32)
        base.set_metadata(
            lora=(("inputs", inputs), ("outputs", len(shape) - split), ("scale", scale))
        )
        self.inputs = inputs
        self.scale = scale
        setattr(self, BASE, base)
        # The adapters stay in float32 whatever the model computes in. Only the sum of a small
        # product and a large weight is rounded then.
        setattr(self, A, nnx.Param(a, keep_dtype=True, **a_sharding))
        setattr(self, B, nnx.Param(b, keep_dtype=True, **b_sharding))

    def get_value(self) -> jax.Array:
        """Return the weight with its adapters."""
        base, a, b = (getattr(self, name)[...] for name in (BASE, A, B))
        return adapted_value(base, a, b, self.inputs, self.scale)

    value = property(get_value)

    def __getitem__(self, index: Any) -> jax.Array:
        value = self.get_value()
        return value if index is ... else value[index]

    def __jax_array__(self) -> jax.Array:
        return self.get_value()

    def __len__(self) -> int:
        return len(getattr(self, BASE))

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of an array: shape, dtype, T, reshape and so on."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.get_value(), name)


def _adapter_shardings(
    base: Param, stacked: int, split: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sharding annotations of A and B, those of the dims they share with the base."""
    metadata = base.get_metadata()
    names = annotation_of(metadata)
    kept = {STACKED: True} if metadata.get(STACKED) else {}
    if names is None:
        return kept, kept
    missing = len(base.get_value().shape) - len(names)
    axes = (*names, *(None,) * missing)
    a_axes = (*axes[:split], None)
    b_axes = (*axes[:stacked], None, *axes[split:])
    # The rules of Flax that apply to the base map the same names in the adapters.
    rules = {
        key: metadata[key]
        for key in ("sharding_rules", CONTEXT_RULES)
        if metadata.get(key)
    }
    rules |= kept
    return {"out_sharding": a_axes, **rules}, {"out_sharding": b_axes, **rules}


def _forward_operator(name: str) -> Callable[..., jax.Array]:
    """Return a method that applies an operator to the value of an `Adapted`."""

    def method(self: Adapted, *operands: object) -> jax.Array:
        arrays = [
            operand.get_value() if isinstance(operand, Adapted) else operand
            for operand in operands
        ]
        result: jax.Array = getattr(self.get_value(), name)(*arrays)
        return result

    return method


# Python looks up operators on the class, so `__getattr__` does not see them.
for _name in ("add", "sub", "mul", "matmul", "truediv", "pow"):
    setattr(Adapted, f"__{_name}__", _forward_operator(f"__{_name}__"))
    setattr(Adapted, f"__r{_name}__", _forward_operator(f"__r{_name}__"))
setattr(Adapted, "__neg__", _forward_operator("__neg__"))  # noqa: B010


def adapted_value(
    base: jax.Array, a: jax.Array, b: jax.Array, inputs: int, scale: float
) -> jax.Array:
    """Return base + scale * A @ B, in the dtype of the base.

    Args:
        base: the weight, (*stack, *inputs, *outputs).
        a: the first adapter, (*stack, *inputs, rank).
        b: the second adapter, (*stack, rank, *outputs).
        inputs: the number of input dims.
        scale: the factor of the product.
    """
    stacked = a.ndim - 1 - inputs
    stack = tuple(range(stacked))
    contracted = ((a.ndim - 1,), (stacked,))
    delta = jax.lax.dot_general(
        a, b, (contracted, (stack, stack)), preferred_element_type=jnp.float32
    )
    return (base + scale * delta).astype(base.dtype)


def checksums(frozen: PyTree) -> dict[str, str]:
    """Return a 64-bit checksum of each array, as 16 hexadecimal digits.

    It depends on every bit and its position, and not on the sharding, so that it is the same on
    every mesh. It is computed on the devices: nothing is gathered on the host.

    Args:
        frozen: a tree of arrays.

    Returns:
        The checksums by path.
    """
    pairs = jax.device_get(_checksums(named_leaves(frozen)))
    return {
        name: f"{int(pair[0]):08x}{int(pair[1]):08x}" for name, pair in pairs.items()
    }


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return two 32-bit sums per array. Sums of hashes do not depend on the order of terms."""

    def checksum(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.uint8)
        bits = jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        words = jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32)
        position = jnp.zeros(words.shape, jnp.uint32)
        for dim, size in enumerate(words.shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
            position = position * jnp.uint32(size) + index
        sums = []
        for seed in (jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)):
            hashes = _mix(words ^ _mix(position + seed))
            sums.append(jnp.sum(hashes, dtype=jnp.uint32))
        return jnp.stack(sums)

    return {name: checksum(leaf) for name, leaf in leaves.items()}


def _mix(x: jax.Array) -> jax.Array:
    """Spread every bit of a number over all of its bits (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _params(module: nnx.Module) -> dict[str, Param]:
    variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path_name(path): variable for path, variable in variables}


def _paths(module: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Return all paths of each parameter, by the first of them, see `other_paths`."""
    others = other_paths(module)
    variables = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {
        path_name(path): tuple(map(path_name, (path, *others.get(path, ()))))
        for path, _ in variables
    }


def _freeze(params: list[Param], dtype: DTypeLike | None) -> None:
    for param in params:
        value = param.get_value()
        if dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
            param.set_value(value.astype(dtype))
        param.set_metadata(frozen=True)


def _select(
    patterns: Collection[str], paths: Mapping[str, Collection[str]], caller: str
) -> dict[str, str]:
    """Return the parameters that match a pattern, each with the first pattern that matches it.

    Args:
        patterns: the patterns.
        paths: all paths of each parameter, by the first of them.
        caller: the function that messages name.

    Raises:
        ConfigError: if a pattern matches no parameter.
    """
    names = {name for group in paths.values() for name in group}
    unused = [
        pattern
        for pattern in patterns
        if not any(matches(pattern, name) for name in names)
    ]
    if unused:
        hints = [f"  '{pattern}'{did_you_mean(pattern, names)}" for pattern in unused]
        raise ConfigError(
            "\n".join(
                [f"{caller}: these patterns match no parameter of the model:", *hints]
            )
        )
    selected = {}
    for first, group in paths.items():
        fitting = (p for p in patterns if any(matches(p, name) for name in group))
        pattern = next(fitting, None)
        if pattern is not None:
            selected[first] = pattern
    return selected


def _own_layout(param: Param) -> str | None:
    """Return the layout in the metadata of a weight. Dims that a stack has added are `s`."""
    dims = param.get_metadata().get("dims")
    return dims.rjust(param.get_value().ndim, "s") if isinstance(dims, str) else None


def _split_dims(
    path: str, shapes: Mapping[str, Shape], layout: str | None
) -> tuple[int, int]:
    """Return the number of stack dims and of input dims of a weight. The others are outputs.

    Args:
        path: the path of the weight.
        shapes: the shapes of all parameters, among them its bias.
        layout: one letter per dim, or None to infer the layout.
    """
    shape = shapes[path]
    if layout is not None:
        if not re.fullmatch("s*i+o+", layout) or len(layout) != len(shape):
            raise ConfigError(
                f"lora: '{path}' has shape {shape}, and '{layout}' is not a layout for it. "
                "Give one letter per dim, s before i before o, such as 'siio'."
            )
        return layout.count("s"), layout.count("i")
    if len(shape) < 2:
        raise ConfigError(
            f"lora: '{path}' has shape {shape} and is not a matrix. "
            "Exclude it from the patterns, or add it to train=(...)."
        )
    bias = shapes.get("/".join([*path.split("/")[:-1], "bias"]), ())
    # A bias has the dims of the stack and of the outputs.
    inputs = len(shape) - len(bias)
    candidates = [
        stacked
        for stacked in range(len(bias))
        if inputs > 0 and shape[:stacked] + shape[stacked + inputs :] == bias
    ]
    if len(candidates) == 1:
        return candidates[0], inputs
    if len(shape) == 2:
        return 0, 1
    if candidates:
        fact = "its bias allows more than one layout"
    else:
        fact = "there is no bias that shows which dims are inputs"
    example = {path: "i" * (len(shape) - 1) + "o"}
    raise ConfigError(
        f"lora: '{path}' has shape {shape}, and {fact}. Give one letter per dim, such as "
        f"{example}: s for a stack of layers, i for inputs, o for outputs."
    )
