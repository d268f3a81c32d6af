"""Trace the model and the loss of a run, without a mesh and without an optimizer."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike

from shardwise.data.layout import batch_shapes
from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.flops import count_jaxpr_flops
from shardwise.loss.contract import call_loss, named_metrics
from shardwise.metrics import Mean
from shardwise.module import ModuleDef, Pure, build_module, split_module
from shardwise.run import Run, example_batch
from shardwise.scaling.flow import follow
from shardwise.scaling.uses import Flow
from shardwise.tracing.jaxpr import Shape
from shardwise.tree import Batch, abstract_key, named_leaves


@dataclass(frozen=True)
class Model:
    """The model of a run as a definition and shapes.

    Attributes:
        definition: its static part.
        params: its parameters, as `jax.ShapeDtypeStruct`.
        other: its other variables.
        frozen: its frozen parameters.
    """

    definition: ModuleDef
    params: Pure
    other: Pure
    frozen: Pure

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each parameter, by path."""
        return {path: leaf.shape for path, leaf in named_leaves(self.params).items()}


def abstract_model(run: Run) -> Model:
    """Build the model of a run as shapes; nothing is allocated.

    Raises:
        ConfigError: if the model cannot be built.
    """
    definitions: list[ModuleDef] = []

    def create(key: jax.Array) -> tuple[Pure, Pure, Pure]:
        module = build_module(run.model, key)
        definition, params, other = split_module(module, run.wrt)
        definitions.append(definition)
        return params, other, definition.read_frozen(module)

    try:
        parts = jax.eval_shape(create, abstract_key())
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the model cannot be built: {where(error)}") from error
    definition = definitions[-1].computing_in(run.compute_dtype)
    return Model(definition, *parts)


def trace_loss_of(
    run: Run, model: Model, batch: Batch
) -> tuple[core.ClosedJaxpr, tuple[object, ...]]:
    """Trace the loss of a run.

    Args:
        run: the run.
        model: its model.
        batch: a batch, as arrays or shapes.

    Returns:
        The traced loss, and its arguments as shapes: params, other, frozen, batch, key.

    Raises:
        ConfigError: if the loss fails.
    """

    def forward(
        params: Pure, other: Pure, frozen: Pure, batch: Batch, key: jax.Array
    ) -> dict[str, ArrayLike]:
        module = model.definition.merge(params, other, key, frozen=frozen)
        step = jnp.zeros((), jnp.int32)
        named = named_metrics(call_loss(run.loss, module, batch, key, step))
        return {
            name: value.total if isinstance(value, Mean) else value
            for name, value in named.items()
        }

    shapes = batch_shapes(batch)
    arguments = (model.params, model.other, model.frozen, shapes, abstract_key())
    try:
        with _traced_for_cpu():
            return jax.make_jaxpr(forward)(*arguments), arguments
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(f"the loss failed: {where(error)}") from error


def cpu_device() -> jax.Device:
    """Return the CPU of this process, on which models are traced and measured.

    Raises:
        ConfigError: if JAX was told to use accelerators only.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            "scaling measures small models on the CPU, and JAX_PLATFORMS excludes it. Add cpu, for "
            "example JAX_PLATFORMS=cuda,cpu."
        ) from error


def _traced_for_cpu() -> AbstractContextManager[object]:
    """Return a context in which kernels of GPUs are not used: they hide what they compute."""
    devices = np.array([cpu_device()])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def follow_run(run: Run, model: Model, growing: Mapping[str, Collection[int]]) -> Flow:
    """Trace the loss of a run, and follow its parameters.

    Args:
        run: the run.
        model: its model.
        growing: the dims of each parameter that grow with the width.

    Returns:
        What the loss does with each parameter.

    Raises:
        ConfigError: if the model cannot be built, or the loss fails.
        DataError: if the data cannot be read.
    """
    closed, arguments = trace_loss_of(run, model, example_batch(run))
    params, data = input_numbers(arguments)
    return follow(closed, params, data, growing)


def input_numbers(arguments: tuple[object, ...]) -> tuple[Mapping[int, str], set[int]]:
    """Return the inputs of a traced loss that are parameters, by path, and those that are data.

    Data are the batch, and the random key: a loss may draw noise or times from it.
    """
    params: dict[int, str] = {}
    data: set[int] = set()
    number = 0
    for position, part in enumerate(arguments):
        for path in named_leaves(part):
            if position == 0:
                params[number] = path
            if position >= 3:
                data.add(number)
            number += 1
    return params, data


def training_flops(run: Run) -> float:
    """Return the arithmetic of a run: all steps, forward and backward, in FLOP."""
    closed, _ = trace_loss_of(run, abstract_model(run), example_batch(run))
    return 3 * count_jaxpr_flops(closed.jaxpr) * run.steps
