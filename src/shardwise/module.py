"""An NNX module as a static definition and pure arrays, and back.

NNX objects appear in two places only: where the user's factory builds the model, and inside the step, where the loss
uses it. Between them everything is nested dictionaries of arrays with string keys, which JAX, Optax and Orbax all
understand without knowing Flax.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.sharding import ModelLeaf, annotation_of
from shardwise.tree import lookup, nest

ModelFactory = Callable[[nnx.Rngs], nnx.Module]
Pure = dict[str, Any]
AccessHook = Callable[[nnx.Variable[Any], Any], Any]
BASE = "lora_base"  # where NNX keeps a weight that has adapters beside it (finetune.py); names leave it out: the weight keeps its own


@dataclass(frozen=True)
class RngLeaf:
    """A random key or counter that the model carries. Its value comes from (seed, path, step): nothing to save."""

    path: tuple[Any, ...]
    name: str
    is_key: bool
    shape: tuple[int, ...]

    def value(self, key: jax.Array) -> jax.Array:
        if not self.is_key:
            return jnp.zeros(self.shape, jnp.uint32)
        own = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        return jax.random.split(own, self.shape) if self.shape else own


@dataclass(frozen=True)
class ModuleDef:
    """What is left of a module when its arrays are taken out. Paths are NNX's own, names are ours."""

    graphdef: nnx.GraphDef[Any]
    params: Mapping[tuple[Any, ...], ModelLeaf]
    other: Mapping[tuple[Any, ...], ModelLeaf]
    rngs: tuple[RngLeaf, ...]
    frozen: Mapping[tuple[Any, ...], ModelLeaf] = field(
        default_factory=dict
    )  # parameters that are not trained
    adapters: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # what `lora` notes of each weight that has adapters

    def merge(
        self,
        params: Pure,
        other: Pure,
        key: jax.Array,
        hooks: Mapping[str, AccessHook] | None = None,
        frozen: Pure | None = None,
    ) -> nnx.Module:
        """The module with these arrays, its random streams drawn from `key`.

        `hooks` maps names of variables to functions that every access passes through, also inside `nnx.scan` and
        `nnx.remat`; this is how a parameter is gathered and cast where the model uses it, and only there.
        """
        flat = [(path, lookup(params, _parts(path))) for path in self.params]
        flat += [(path, lookup(other, _parts(path))) for path in self.other]
        flat += [(path, lookup(frozen, _parts(path))) for path in self.frozen]
        flat += [(rng.path, rng.value(key)) for rng in self.rngs]
        module: nnx.Module = nnx.merge(self.graphdef, nnx.from_flat_state(flat))
        if hooks:
            for path, variable in nnx.to_flat_state(nnx.state(module)):
                if (hook := hooks.get(path_name(path))) is not None:
                    variable.set_metadata(on_get_value=hook)
        return module

    def read_other(self, module: nnx.Module) -> Pure:
        """The variables that are not parameters, after a forward pass; what the pass newly made is left behind."""
        return self._read(module, self.other)

    def read_frozen(self, module: nnx.Module) -> Pure:
        return self._read(module, self.frozen)

    def _read(self, module: nnx.Module, paths: Iterable[tuple[Any, ...]]) -> Pure:
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        return nest({_parts(path): variables[path].get_value() for path in paths})


def split_module(module: nnx.Module) -> tuple[ModuleDef, Pure, Pure]:
    """(definition, parameters, other variables) of a module; parameters are what `nnx.Param` selects.

    A parameter whose metadata say `frozen` is neither: the definition reads it with `read_frozen`.
    """
    graphdef, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    if len({_parts(path) for path in flat}) < len(flat):
        raise ConfigError(
            "two variables of the model have the same path once indices are written as text; rename one."
        )
    rngs: list[RngLeaf] = []
    params: dict[tuple[Any, ...], ModelLeaf] = {}
    other: dict[tuple[Any, ...], ModelLeaf] = {}
    frozen: dict[tuple[Any, ...], ModelLeaf] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for path, variable in flat.items():
        value = variable.get_value()
        if not hasattr(value, "shape"):
            raise ConfigError(
                f"variable '{path_name(path)}' of the model holds a {type(value).__name__}; it must hold one array."
            )
        if isinstance(variable, nnx.RngState):
            rngs.append(
                RngLeaf(path, path_name(path), isinstance(variable, nnx.RngKey), value.shape)
            )
        else:
            metadata = variable.get_metadata()
            part = (
                frozen
                if metadata.get("frozen")
                else params
                if isinstance(variable, nnx.Param)
                else other
            )
            part[path] = ModelLeaf(value.shape, value.dtype, annotation_of(metadata))
            if "lora" in metadata:
                adapters[path_name(path)] = dict(metadata["lora"])
    if not params:
        what = "no nnx.Param that is not frozen" if frozen else "no nnx.Param"
        raise ConfigError(
            f"the model {type(module).__name__} has {what}, so there is nothing to train."
        )
    definition = ModuleDef(graphdef, params, other, tuple(rngs), frozen, adapters)
    arrays = lambda leaves: nest({_parts(path): flat[path].get_value() for path in leaves})  # noqa: E731
    return definition, arrays(params), arrays(other)


def build_module(factory: ModelFactory, key: Any) -> nnx.Module:
    """Calls the user's factory so that annotations stay metadata; meant to run while tracing. What was built for no mode is to train."""
    with nnx.use_eager_sharding(False):
        module = factory(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise ConfigError(
            f"the model factory returned a {type(module).__name__}; it must return an nnx.Module."
        )
    for _, part in nnx.iter_modules(module):
        for mode in ("deterministic", "use_running_average"):
            if getattr(part, mode, False) is None:  # it was not told; NNX would refuse to compute
                setattr(part, mode, False)
    return module


def path_name(path: tuple[Any, ...]) -> str:
    return "/".join(_parts(path))


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in path if part != BASE)


def describe_model(module: Any) -> dict[str, Any]:
    """The class of a model and, if it has a `config` that is a dataclass, its values: for `meta.json`."""
    config = getattr(module, "config", None)
    known = is_dataclass(config) and not isinstance(config, type)
    return {"class": type(module).__name__, **({"config": asdict(config)} if known else {})}  # type: ignore[arg-type]
