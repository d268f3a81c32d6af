"""Fine-tuning: a model of which only a part is trained, low-rank adapters (LoRA) or parameters chosen by path.

A factory goes in, another comes out; the module's own code is not touched. A frozen parameter is marked in its metadata, and from
there on gets neither a gradient nor a state of the optimizer, and is in no checkpoint. A weight with adapters is replaced by
`Adapted`, which stands for base + scale * A @ B wherever the module reads it, also inside `nnx.scan` and `nnx.remat`.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.module import BASE, ModelFactory, path_name
from shardwise.sharding import annotation_of
from shardwise.text import did_you_mean
from shardwise.tree import matches, named_leaves

A, B = "lora_a", "lora_b"


def freeze(model: ModelFactory, *patterns: str, dtype: Any = None) -> ModelFactory:
    """The same model, of which the parameters whose paths fit a pattern are not trained.

    dtype: what they are stored in, such as "bfloat16"; None leaves them alone.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        module = model(rngs)
        params = _params(module)
        chosen = _chosen(patterns, params, "freeze")
        _freeze([params[name] for name in chosen], dtype)
        return module

    return make


def lora(
    model: ModelFactory,
    patterns: str | Sequence[str] | Mapping[str, str | None],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    train: Sequence[str] = (),
    dtype: Any = None,
) -> ModelFactory:
    """The same model with adapters beside the weights whose paths fit a pattern; nothing but adapters is trained.

    patterns: "blocks/*/mlp/*/kernel", or several. A weight of more than two dims is taken for a matrix by its bias, which has the
        output dims, or by what its metadata say, such as `nnx.Param(value, dims="ioo")`: "i" for inputs, "o" for outputs, and a stack
        of layers before them. Where there is neither, map the pattern to a letter for each dim, "s" for the stack, such as
        {"blocks/query": "sioo"}.
    alpha: the product of the adapters is multiplied with alpha / rank.
    train: patterns of parameters that are trained as they are, such as a new head.
    dtype: what the frozen parameters are stored in, such as "bfloat16"; None leaves them alone.
    """
    layouts = (
        {patterns: None}
        if isinstance(patterns, str)
        else dict.fromkeys(patterns) | dict(getattr(patterns, "items", dict)())
    )
    if rank < 1:
        raise ConfigError(f"lora: rank={rank}; it must be at least 1.")

    def make(rngs: nnx.Rngs) -> nnx.Module:
        module = model(rngs)
        params = _params(module)
        trained = _chosen(train, params, "lora: train")
        chosen = {
            name: pattern
            for name, pattern in _chosen(layouts, params, "lora").items()
            if name not in trained
        }
        shapes = {name: variable.get_value().shape for name, variable in params.items()}
        said = {
            name: _said(params[name].get_metadata().get("dims"), len(shapes[name]))
            for name in chosen
        }
        dims = {
            name: _dims(name, shapes, layouts[pattern] or said[name])
            for name, pattern in chosen.items()
        }
        _freeze([variable for name, variable in params.items() if name not in trained], dtype)
        key = rngs.params()
        adapted = {
            id(params[name]): Adapted(
                params[name],
                *dims[name],
                rank,
                alpha / rank,
                jax.random.fold_in(key, zlib.crc32(name.encode())),
            )
            for name in chosen
        }
        changed: nnx.Module = nnx.recursive_map(lambda _, node: adapted.get(id(node), node), module)
        return changed

    return make


class Adapted(nnx.Module):
    """A frozen weight and its adapters, which reads like a variable that holds base + scale * A @ B."""

    def __init__(
        self,
        base: nnx.Param[Any],
        stacked: int,
        inputs: int,
        rank: int,
        scale: float,
        key: jax.Array,
    ):
        shape, split = base.get_value().shape, stacked + inputs
        names = annotation_of(base.get_metadata())
        axes = None if names is None else (*names, *(None,) * (len(shape) - len(names)))
        at_a: dict[str, Any] = {} if axes is None else {"out_sharding": (*axes[:split], None)}
        at_b: dict[str, Any] = (
            {} if axes is None else {"out_sharding": (*axes[:stacked], None, *axes[split:])}
        )
        bound = 1 / math.sqrt(math.prod(shape[stacked:split]))
        a = jax.random.uniform(key, (*shape[:split], rank), jnp.float32, -bound, bound)
        b = jnp.zeros((*shape[:stacked], rank, *shape[split:]), jnp.float32)
        base.set_metadata(
            lora=(("inputs", inputs), ("outputs", len(shape) - split), ("scale", scale))
        )
        self.inputs, self.scale = inputs, scale
        setattr(self, BASE, base)
        # In float32 whatever the model computes in: of a small product and a large weight only the sum is rounded.
        setattr(self, A, nnx.Param(a, keep_dtype=True, **at_a))
        setattr(self, B, nnx.Param(b, keep_dtype=True, **at_b))

    def get_value(self) -> jax.Array:
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
        """Whatever else an array has: shape, dtype, T, reshape ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.get_value(), name)


def _operator(name: str) -> Any:
    def method(self: Adapted, *others: Any) -> Any:
        return getattr(self.get_value(), name)(
            *(jnp.asarray(other) if isinstance(other, Adapted) else other for other in others)
        )

    return method


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow"):
    setattr(Adapted, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Adapted, f"__r{_name}__", _operator(f"__r{_name}__"))
setattr(Adapted, "__neg__", _operator("__neg__"))  # noqa: B010


def adapted_value(
    base: jax.Array, a: jax.Array, b: jax.Array, inputs: int, scale: float
) -> jax.Array:
    """base + scale * A @ B, as the base is cut into inputs and outputs; dims before that are layers."""
    stacked = a.ndim - 1 - inputs
    batch = tuple(range(stacked))
    delta = jax.lax.dot_general(
        a, b, (((a.ndim - 1,), (stacked,)), (batch, batch)), preferred_element_type=jnp.float32
    )
    return (base + scale * delta).astype(base.dtype)


def checksums(frozen: Any) -> dict[str, str]:
    """For each array a number of 64 bits that depends on every bit of it and its place, and on no layout over devices."""
    found = _checksums(named_leaves(frozen))
    return {
        name: f"{int(pair[0]):08x}{int(pair[1]):08x}"
        for name, pair in jax.device_get(found).items()
    }


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def one(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.uint8)
        words = jax.lax.bitcast_convert_type(
            leaf, jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        ).astype(jnp.uint32)
        place = jnp.zeros(words.shape, jnp.uint32)
        for dim, size in enumerate(words.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(
                jnp.uint32, words.shape, dim
            )
        seeds = [jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)]
        return jnp.stack(
            [jnp.sum(_mixed(words ^ _mixed(place + seed)), dtype=jnp.uint32) for seed in seeds]
        )

    return {name: one(leaf) for name, leaf in leaves.items()}


def _mixed(x: jax.Array) -> jax.Array:
    """Every bit of a number spread over all of them (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _params(module: nnx.Module) -> dict[str, Any]:
    return {
        path_name(path): variable
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


def _freeze(variables: list[Any], dtype: Any) -> None:
    for variable in variables:
        value = variable.get_value()
        if dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
            variable.set_value(value.astype(dtype))
        variable.set_metadata(frozen=True)


def _chosen(
    patterns: Sequence[str] | Mapping[str, Any], params: Mapping[str, Any], who: str
) -> dict[str, str]:
    """By the path of a parameter the first pattern that it fits; a pattern that fits none is refused."""
    found = {
        name: next(p for p in patterns if matches(p, name))
        for name in params
        if any(matches(p, name) for p in patterns)
    }
    if idle := [
        pattern for pattern in patterns if not any(matches(pattern, name) for name in params)
    ]:
        hints = [f"  '{pattern}'{did_you_mean(pattern, params)}" for pattern in idle]
        raise ConfigError(
            "\n".join([f"{who}: these patterns fit no parameter of the model:", *hints])
        )
    return found


def _said(dims: Any, count: int) -> str | None:
    """The layout of a weight of `count` dims that says what its own are; those that a stack has put before them are "s"."""
    return dims.rjust(count, "s") if isinstance(dims, str) else None


def _dims(name: str, shapes: Mapping[str, tuple[int, ...]], layout: str | None) -> tuple[int, int]:
    """(dims of a stack, dims of inputs) of a weight; the others are outputs."""
    shape = shapes[name]
    if layout is not None:
        if not re.fullmatch("s*i+o+", layout) or len(layout) != len(shape):
            raise ConfigError(
                f"lora: '{name}' has shape {shape}, for which '{layout}' is no layout; give s, i or o for each dim, such as 'siio'."
            )
        return layout.count("s"), layout.count("i")
    if len(shape) < 2:
        raise ConfigError(
            f"lora: '{name}' has shape {shape}, and is no matrix. Take it out of the patterns, or add it to train=(...)."
        )
    bias = shapes.get("/".join([*name.split("/")[:-1], "bias"]), ())
    inputs = len(shape) - len(bias)  # a bias has all dims but these
    found = [
        s
        for s in range(len(bias))
        if inputs > 0 and shape == (*bias[:s], *shape[s : s + inputs], *bias[s:])
    ]
    if len(found) == 1:
        return found[0], inputs
    if len(shape) == 2:
        return 0, 1
    why = "its bias fits in more ways than one" if found else "no bias tells which dims are inputs"
    raise ConfigError(
        f"lora: '{name}' has shape {shape}, and {why}. Give a letter for each dim, such as {{'{name}': '{'i' * (len(shape) - 1)}o'}}: "
        "s for a stack of layers, i for inputs, o for outputs."
    )
