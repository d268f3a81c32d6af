"""Shapes of a model without its arrays, for tests of several models."""

from collections.abc import Callable

import jax
from flax import nnx

from shardwise.module import ModuleDef, build_module, split_module
from shardwise.tree import PyTree


def definition_and_shapes(
    factory: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[ModuleDef, PyTree]:
    """Return the definition of a model and the shapes of its parameters. Nothing is computed."""
    definitions = []

    def build() -> PyTree:
        definition, params, _ = split_module(build_module(factory, jax.random.key(0)))
        definitions.append(definition)
        return params

    params = jax.eval_shape(build)
    return definitions[0], params
