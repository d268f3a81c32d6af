"""What tests of several models share."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from shardwise.module import ModuleDef, build_module, split_module


def definition_and_shapes(factory: Callable[[nnx.Rngs], nnx.Module]) -> tuple[ModuleDef, Any]:
    """(definition, shapes of the parameters); nothing is allocated or computed."""
    definitions = []

    def build():
        definition, params, _ = split_module(build_module(factory, 0))
        definitions.append(definition)
        return params

    params = jax.eval_shape(build)
    return definitions[0], params
