"""An NNX module as a static definition and pure arrays, and back.

NNX objects appear in two places only: where the user's factory builds the model, and inside the
step, where the loss uses it. Between these places everything is nested dictionaries of arrays with
string keys, which JAX, Optax and Orbax handle without knowledge of Flax.
"""

import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from shardwise.errors import ConfigError
from shardwise.metrics import BatchMean
from shardwise.precision import AccessHook as AccessHook
from shardwise.precision import cast_hook, compute_in
from shardwise.sharding import ModelLeaf, model_leaf, recorded_axis_rules
from shardwise.text import Json
from shardwise.tree import DType, KeyPath, PyTree, lookup, nest

# An NNX filter: a type of variable, a predicate of path and variable, or a combination of these.
Filter: TypeAlias = nnx.filterlib.Filter
# `model(rngs)` or `model(rngs=rngs)` returns the model.
ModelFactory: TypeAlias = Callable[..., nnx.Module]
# Nested dictionaries of arrays with string keys.
Pure: TypeAlias = dict[str, PyTree]
# The attribute under which NNX keeps a weight that has LoRA adapters (`weights/adapters.py`). Names
# omit it, so that the weight has the same name with and without adapters.
BASE = "lora_base"
# Flags that NNX modules of several kinds need before they compute.
MODES = ("deterministic", "use_running_average")


@dataclass(frozen=True)
class RngLeaf:
    """A random key or counter that the model carries.

    Its value in step n is a function of (seed, name, n). It has no state: nothing is saved, and a
    restart, another mesh or accumulation cannot shift it.

    Attributes:
        path: the path of the variable in the NNX state.
        name: the path as text.
        is_key: whether it is a key; otherwise it is a counter, which starts at 0 in every step.
        shape: the shape of the variable; `()` except under `nnx.vmap` and `nnx.scan`.
    """

    path: KeyPath
    name: str
    is_key: bool
    shape: tuple[int, ...]

    def value(self, key: jax.Array) -> jax.Array:
        """Return the value for a step with this root key."""
        if not self.is_key:
            return jnp.zeros(self.shape, jnp.uint32)
        own_key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        return jax.random.split(own_key, self.shape) if self.shape else own_key


@dataclass(frozen=True)
class ModuleDef:
    """The static part of a module: everything but its arrays.

    All mappings have paths of the NNX state as keys; `path_name` turns a path into a name.

    Attributes:
        graphdef: the structure of the module.
        params: trainable parameters.
        other: variables that are neither parameters nor random streams, for example batch
            statistics.
        rngs: random keys and counters.
        frozen: parameters that are not trained.
        adapters: for each weight with adapters, by name, the description that `lora` stores with
            it.
        fixed: the part of `other` that keeps its values, because it belongs to frozen modules.
        averaged: the part of `other` that is averaged over micro-batches, see `BatchMean`.
        arrays: leaves that are arrays outside of a variable, such as `self.table = np.arange(8.0)`.
        compute_dtype: the dtype in which the module computes, see `precision.compute_in`. None
            leaves it to the layers and to the dtypes of parameters and inputs.
    """

    graphdef: nnx.GraphDef[nnx.Module]
    params: Mapping[KeyPath, ModelLeaf]
    other: Mapping[KeyPath, ModelLeaf]
    rngs: tuple[RngLeaf, ...]
    frozen: Mapping[KeyPath, ModelLeaf] = field(default_factory=dict)
    adapters: Mapping[str, Json] = field(default_factory=dict)
    fixed: frozenset[KeyPath] = frozenset()
    averaged: frozenset[KeyPath] = frozenset()
    arrays: frozenset[KeyPath] = frozenset()
    compute_dtype: DType | None = None

    @property
    def moving(self) -> tuple[str, ...]:
        """The names of the variables in `other` that a forward pass can change."""
        return tuple(path_name(path) for path in self.other if path not in self.fixed)

    def merge(
        self,
        params: Pure,
        other: Pure,
        key: jax.Array,
        hooks: Mapping[str, AccessHook] | None = None,
        frozen: Pure | None = None,
    ) -> nnx.Module:
        """Return the module with these arrays.

        Args:
            params: values of the trainable parameters.
            other: values of the variables in `self.other`.
            key: the root key of the random streams.
            hooks: functions by variable name. The value of a variable passes through its hook at
                every access, also inside `nnx.scan` and `nnx.remat`. This is how a parameter is
                gathered and cast where the model uses it, and only there. Without hooks, parameters
                are cast to `self.compute_dtype`. An array outside of a variable passes through its
                hook here, because NNX does not see where the model reads it.
            frozen: values of the frozen parameters, if there are any.
        """
        values: list[tuple[KeyPath, PyTree]] = []
        for leaves, arrays in (
            (self.params, params),
            (self.other, other),
            (self.frozen, frozen),
        ):
            values += [
                (path, self._hooked(path, lookup(arrays, _parts(path)), hooks))
                for path in leaves
            ]
        values += [(rng.path, rng.value(key)) for rng in self.rngs]
        module: nnx.Module = nnx.merge(self.graphdef, nnx.from_flat_state(values))
        if self.compute_dtype is not None:
            compute_in(module, self.compute_dtype)
        if hooks or self.compute_dtype is not None:
            for path, variable in nnx.to_flat_state(nnx.state(module)):
                if path in self.arrays:
                    continue
                if hooks is None:
                    hook = self._cast(path, variable)
                else:
                    hook = hooks.get(path_name(path))
                if hook is not None:
                    variable.set_metadata(on_get_value=hook)
        return module

    def _hooked(
        self,
        path: KeyPath,
        value: jax.Array,
        hooks: Mapping[str, AccessHook] | None,
    ) -> jax.Array:
        """Return the value that the module is merged with."""
        hook = (hooks or {}).get(path_name(path))
        if path not in self.arrays or hook is None:
            return value
        return hook(nnx.Variable(value), value)

    def _cast(
        self, path: KeyPath, variable: nnx.Variable[jax.Array]
    ) -> AccessHook | None:
        """Return the hook that casts a parameter; other variables have none."""
        known = {*self.params, *self.frozen}
        is_parameter = path in known or isinstance(variable, nnx.Param)
        if self.compute_dtype is None or not is_parameter:
            return None
        return cast_hook(self.compute_dtype)

    def computing_in(self, dtype: DTypeLike | None) -> "ModuleDef":
        """Return the definition of the module that computes in `dtype`; None for its own."""
        return replace(self, compute_dtype=None if dtype is None else jnp.dtype(dtype))

    def read_other(self, module: nnx.Module, before: Pure) -> Pure:
        """Return the values of `self.other` after a forward pass.

        Variables that the pass created, for example those of `nnx.sow`, are dropped.

        Args:
            module: the module after the pass.
            before: the values that it was merged with. Variables in `self.fixed` keep them.
        """
        _mark_arrays(module)
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        return nest(
            {
                _parts(path): lookup(before, _parts(path))
                if path in self.fixed
                else _raw_value(variables[path])
                for path in self.other
            }
        )

    def read_fixed(self, module: nnx.Module) -> dict[str, jax.Array]:
        """Return the values that a forward pass must not change, by name in `TrainState`."""
        _mark_arrays(module)
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        return {
            f"{part}/{path_name(path)}": _raw_value(variables[path])
            for part, leaves in (("params", self.params), ("frozen", self.frozen))
            for path in leaves
        }

    def read_frozen(self, module: nnx.Module) -> Pure:
        """Return the values of the frozen parameters of a module."""
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        return nest({_parts(path): _value(variables[path]) for path in self.frozen})


def num_layers(definition: ModuleDef) -> int:
    """Return the number of layers that a stage axis must divide; 0 without a `Stack`."""
    leaves = [*definition.params.values(), *definition.frozen.values()]
    return math.gcd(*(leaf.shape[0] for leaf in leaves if leaf.is_stacked))


def num_experts(definition: ModuleDef) -> int:
    """Return the number of experts that an expert axis must divide; 0 without experts.

    These are the dims whose annotation is "experts".
    """
    leaves = [*definition.params.values(), *definition.frozen.values()]
    return math.gcd(
        *(
            size
            for leaf in leaves
            for size, name in zip(leaf.shape, leaf.annotation or (), strict=False)
            if name == "experts"
        )
    )


def _value(leaf: nnx.Variable[jax.Array] | jax.Array) -> jax.Array:
    """Return the array of a leaf of an NNX state."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _raw_value(leaf: nnx.Variable[jax.Array] | jax.Array) -> jax.Array:
    """Return the array of a leaf without its hook, which would cast it."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def other_paths(module: nnx.Module) -> dict[KeyPath, tuple[KeyPath, ...]]:
    """Return the other paths of each variable that the module holds in several places.

    NNX names a shared variable by the first of its paths, such as "embed/embedding" for weights
    that the output layer uses too.
    """
    places = nnx.find_duplicates(module)
    if not places:
        return {}
    first_paths = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
    others = {}
    for path in first_paths:
        paths = {path}
        # Shared modules may contain shared modules.
        for _ in places:
            paths |= {
                (*other, *found[len(prefix) :])
                for prefixes in places
                for prefix in prefixes
                for found in paths
                if found[: len(prefix)] == prefix
                for other in prefixes
            }
        if rest := paths - first_paths:
            others[path] = tuple(sorted(rest, key=path_name))
    return others


def split_module(
    module: nnx.Module, wrt: Filter = nnx.Param
) -> tuple[ModuleDef, Pure, Pure]:
    """Split a module into its definition, its trainable parameters and its other variables.

    Args:
        module: the module.
        wrt: the variables that are trained, unless their metadata say `frozen`. To get the frozen
            ones, call `read_frozen` of the definition.

    Raises:
        ConfigError: if a variable does not hold one array, or if there is nothing to train.
    """
    graphdef, state = nnx.split(module)
    variables = dict(nnx.to_flat_state(state))
    if len({_parts(path) for path in variables}) < len(variables):
        raise ConfigError(
            "two variables of the model have the same path once indices are written as text. "
            "Rename one of them."
        )
    is_trained = nnx.filterlib.to_predicate(wrt)
    others = other_paths(module)
    rngs: list[RngLeaf] = []
    params: dict[KeyPath, ModelLeaf] = {}
    other: dict[KeyPath, ModelLeaf] = {}
    frozen: dict[KeyPath, ModelLeaf] = {}
    adapters: dict[str, Json] = {}
    for path, variable in variables.items():
        name = path_name(path)
        value = _value(variable)
        if not hasattr(value, "shape"):
            raise ConfigError(
                f"variable '{name}' of the model holds a {type(value).__name__}. "
                "Each variable must hold one array."
            )
        if isinstance(variable, nnx.RngState):
            rngs.append(
                RngLeaf(path, name, isinstance(variable, nnx.RngKey), value.shape)
            )
            continue
        metadata = _metadata(variable)
        # NumPy arrays may be float64, which JAX stores as float32.
        dtype = jax.eval_shape(lambda x=value: x).dtype
        leaf = model_leaf(name, value.shape, dtype, metadata)
        paths = (path, *others.get(path, ()))
        leaf = replace(leaf, other_paths=tuple(map(path_name, paths[1:])))
        if metadata.get("frozen"):
            frozen[path] = leaf
        elif any(is_trained(path, variable) for path in paths):
            _check_differentiable(name, value)
            params[path] = leaf
        else:
            other[path] = leaf
        if "lora" in metadata:
            adapters[name] = dict(metadata["lora"])
    if not params:
        missing = (
            "no nnx.Param" if wrt is nnx.Param else f"no variable that fits wrt={wrt}"
        )
        missing += " that is not frozen" if frozen else ""
        raise ConfigError(
            f"the model {type(module).__name__} has {missing}, so there is nothing to train."
        )
    fixed = frozenset(path for path in other if _metadata(variables[path]).get("fixed"))
    averaged = frozenset(
        path for path in other if isinstance(variables[path], BatchMean)
    )
    arrays = frozenset(
        path
        for path, variable in variables.items()
        if not isinstance(variable, nnx.Variable)
    )
    definition = ModuleDef(
        graphdef, params, other, tuple(rngs), frozen, adapters, fixed, averaged, arrays
    )

    def values(leaves: Iterable[KeyPath]) -> Pure:
        return nest({_parts(path): _value(variables[path]) for path in leaves})

    return definition, values(params), values(other)


def _metadata(leaf: nnx.Variable[jax.Array] | jax.Array) -> Mapping[str, Json]:
    """Return the metadata of a leaf; an array outside of a variable has none."""
    return leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}


def _mark_arrays(module: nnx.Module) -> None:
    """Make arrays outside of variables a part of the NNX state while tracing.

    NNX recognizes `self.table = jnp.arange(8)` as data by its type. A tracer has another type, so
    NNX takes it for a static attribute, and it would escape from the trace.
    """
    for _, part in nnx.iter_modules(module):
        for name, value in tuple(vars(part).items()):
            if isinstance(value, jax.core.Tracer):
                setattr(part, name, nnx.data(value))


def _check_differentiable(name: str, value: jax.Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise ConfigError(
            f"variable '{name}' of the model is trained, but its dtype is {value.dtype}, which has "
            "no gradient. Make it an nnx.Variable of another type than nnx.Param, or exclude it "
            "with Run(wrt=...)."
        )


def build_module(factory: ModelFactory, key: jax.Array) -> nnx.Module:
    """Call the user's factory, usually while tracing.

    Sharding annotations stay metadata: NNX does not apply them. Modules with `deterministic=None`
    or `use_running_average=None` run in training mode; NNX would refuse to run them. Modules whose
    parameters are all frozen run in evaluation mode.

    Raises:
        ConfigError: if the factory returns something else than a module.
    """
    with nnx.use_eager_sharding(False), recorded_axis_rules():
        module = call_factory(factory, nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise ConfigError(
            f"the model factory returned a {type(module).__name__}. It must return an nnx.Module."
        )
    _mark_arrays(module)
    for _, part in nnx.iter_modules(module):
        for mode in MODES:
            if getattr(part, mode, False) is None:
                setattr(part, mode, False)
    _settle_frozen_modules(module)
    return module


def call_factory(factory: ModelFactory, rngs: nnx.Rngs) -> nnx.Module:
    """Return what a factory builds; `rngs` is passed by name if that is an argument of it."""
    return factory(rngs=rngs) if _has_rngs(factory) else factory(rngs)


def _has_rngs(function: Callable[..., object]) -> bool:
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, type):
        # The signature of the class itself is that of Flax's metaclass.
        function = inspect.getattr_static(function, "__init__")
    try:
        return "rngs" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _settle_frozen_modules(module: nnx.Module) -> None:
    """Put modules whose parameters are all frozen into evaluation mode, and fix their variables.

    A frozen module is to compute the same in every step. Gradients do not reach its parameters, but
    dropout and batch statistics would still change its output. A part that a trained module shares,
    such as one `nnx.Dropout` for several blocks, stays as it is.
    """

    def marks(part: nnx.Module) -> set[bool]:
        nodes = (node for _, node in nnx.iter_graph(part))
        params = (node for node in nodes if isinstance(node, nnx.Param))
        return {bool(param.get_metadata().get("frozen")) for param in params}

    if True not in marks(module):
        return
    modules = [part for _, part in nnx.iter_modules(module)]
    frozen = [part for part in modules if marks(part) == {True}]
    below = {id(node): node for part in frozen for _, node in nnx.iter_graph(part)}
    roots = {id(part) for part in frozen}
    for part in modules:
        if id(part) in below:
            continue
        for _, child in nnx.iter_children(part):
            if id(child) in below and id(child) not in roots:
                is_leaf = isinstance(child, nnx.Variable)
                shared = [child] if is_leaf else [n for _, n in nnx.iter_graph(child)]
                for node in shared:
                    below.pop(id(node), None)
    for node in below.values():
        if isinstance(node, nnx.Module):
            for mode in MODES:
                if hasattr(node, mode):
                    setattr(node, mode, True)
        elif isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param):
            node.set_metadata(fixed=True)


def path_name(path: KeyPath) -> str:
    """Return the name of a variable from its path in the NNX state: `blocks/0/kernel`."""
    return "/".join(_parts(path))


def _parts(path: KeyPath) -> tuple[str, ...]:
    return tuple(str(part) for part in path if part != BASE)


def describe_model(module: nnx.Module) -> Json:
    """Return the class of a model and, if its `config` is a dataclass, the values of the latter.

    Checkpoints store this in `meta.json`.
    """
    description: Json = {"class": type(module).__name__}
    config = getattr(module, "config", None)
    if is_dataclass(config) and not isinstance(config, type):
        description["config"] = asdict(config)
    return description
