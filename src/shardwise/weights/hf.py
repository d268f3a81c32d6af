"""Published weights in and out, with the tensor names and shapes of `transformers`.

Only NumPy arrays pass through here, so any reader of weight files will do, and neither torch nor
transformers is needed. Which tensor is which parameter is up to `shardwise.weights.families`.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from shardwise.tree import DType, Params, named_leaves, nest
from shardwise.weights.families import family_of
from shardwise.weights.families.base import (
    HEAD,
    Family,
    ModelConfig,
    Shape,
    Shapes,
    TensorSpec,
    bullet_list,
)


class HasShape(Protocol):
    """An array, or anything else with a shape that NumPy can convert to one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def params_from_hf(tensors: Mapping[str, HasShape], config: ModelConfig) -> Params:
    """Return the parameters of a model from published tensors.

    A published vocabulary that is smaller than that of `config` is filled up with the mean of its
    embeddings. An added token then gets the mean of all logits, so at most the average probability.
    With zeros it would get the logit 0, which is very likely where published logits are all far
    below 0.

    Args:
        tensors: the published tensors by name, with or without the prefix of the family. They are
            converted one at a time.
        config: the configuration of the model.

    Returns:
        Nested dictionaries, as `shardwise.module.split_module` returns them. The dtype is
        `config.param_dtype`, or float32 if the configuration has none.

    Raises:
        ValueError: with all tensors that are missing, unexpected or of another shape.
    """
    family = family_of(config)
    table = family.tensors(config).expand(config)
    given, problems = _without_prefix(tensors, family)
    # Tied weights may be published twice. The copy must then be equal to the embedding.
    tied_head = None if HEAD in table else given.pop(HEAD, None)
    problems += _mismatches(
        _expected_shapes(table, given, family, config),
        {name: tuple(tensor.shape) for name, tensor in given.items()},
    )
    if tied_head is not None and family.embedding in given:
        embedding = np.asarray(given[family.embedding])
        if not np.array_equal(np.asarray(tied_head), embedding):
            problems.append(
                f"untied: '{HEAD}' is not equal to '{family.embedding}', and {family.name} uses "
                "the embedding as output layer"
            )
    if problems:
        fact = f"these tensors are not those of {family.name} with this configuration"
        raise ValueError(bullet_list(fact, problems))

    dtype = jnp.dtype(getattr(config, "param_dtype", "float32"))
    params: dict[str, np.ndarray] = {}
    for name, spec in table.items():
        value = np.asarray(given[name]).astype(dtype)
        if name in (family.embedding, HEAD):
            value = _fill_vocabulary(value, config.vocab_size)
        value = (value.T if spec.transposed else value).reshape(spec.shape)
        if spec.path not in params:
            params[spec.path] = np.empty(spec.stacked_shape, dtype)
        params[spec.path][spec.index] = value
    return nest({tuple(path.split("/")): value for path, value in params.items()})


def params_to_hf(
    params: Params, config: ModelConfig, vocab_size: int | None = None
) -> dict[str, np.ndarray]:
    """Return published tensors from the parameters of a model: the inverse of `params_from_hf`.

    Args:
        params: nested dictionaries of arrays.
        config: the configuration of the model.
        vocab_size: keep only this many tokens in the embedding and the output layer. None keeps
            all.

    Returns:
        The tensors under the names of the `transformers` class, such as GPT2LMHeadModel.

    Raises:
        ValueError: with all parameters that are missing, unexpected or of another shape.
    """
    if vocab_size is not None and not 0 < vocab_size <= config.vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be from 1 to the {config.vocab_size} tokens "
            "of the model"
        )
    family = family_of(config)
    table = family.tensors(config).expand(config)
    shapes = {spec.path: spec.stacked_shape for spec in table.values()}
    given = {path: np.asarray(leaf) for path, leaf in named_leaves(params).items()}
    problems = _mismatches(shapes, {path: leaf.shape for path, leaf in given.items()})
    if problems:
        fact = (
            f"these parameters are not those of {family.name} with this configuration"
        )
        raise ValueError(bullet_list(fact, problems))
    tensors = {}
    for name, spec in table.items():
        value = given[spec.path][spec.index]
        if spec.transposed:
            value = value.reshape(spec.published[::-1]).T
        else:
            value = value.reshape(spec.published)
        if name in (family.embedding, HEAD):
            value = value[:vocab_size]
        tensors[name if name == HEAD else family.prefix + name] = value
    return tensors


def _without_prefix(
    tensors: Mapping[str, HasShape], family: Family[Any]
) -> tuple[dict[str, HasShape], list[str]]:
    """Return the tensors by name without the prefix of the family, and those that occur twice."""
    given: dict[str, HasShape] = {}
    problems = []
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(family.prefix)
        if re.fullmatch(family.buffers, name):
            continue
        if name in given:
            problems.append(
                f"twice: '{name}', with and without the prefix '{family.prefix}'"
            )
        given[name] = tensor
    return given, problems


def _expected_shapes(
    table: Mapping[str, TensorSpec],
    given: Mapping[str, HasShape],
    family: Family[Any],
    config: ModelConfig,
) -> dict[str, Shape]:
    """Return the shapes that the tensors must have. A smaller published vocabulary is accepted."""
    shapes = {name: spec.published for name, spec in table.items()}
    embedding = given.get(family.embedding)
    if embedding is None or not embedding.shape:
        return shapes
    tokens = embedding.shape[0]
    if 0 < tokens <= config.vocab_size:
        for name in (family.embedding, HEAD):
            if name in shapes:
                shapes[name] = (tokens, config.width)
    return shapes


def _fill_vocabulary(value: np.ndarray, vocab_size: int) -> np.ndarray:
    """Append the mean of all embeddings until there are `vocab_size` of them."""
    missing = vocab_size - len(value)
    if missing <= 0:
        return value
    dtype: DType = value.dtype
    mean = value.astype(np.float32).mean(0).astype(dtype)
    return np.concatenate([value, np.tile(mean, (missing, 1))])


def _mismatches(expected: Shapes, given: Shapes) -> list[str]:
    """Return one line per name that is missing, unexpected, or has another shape."""
    missing = [
        f"missing: '{name}' {expected[name]}" for name in expected if name not in given
    ]
    unexpected = [
        f"unexpected: '{name}' {given[name]}" for name in given if name not in expected
    ]
    wrong = [
        f"wrong shape: '{name}' is {given[name]}, must be {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    return missing + unexpected + wrong
