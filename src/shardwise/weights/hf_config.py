"""Model configurations: `config.json` of `transformers` in and out, and from shapes alone.

Everything here works for any `Family`; see `shardwise.weights.families`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flax import nnx

from shardwise.text import Json
from shardwise.weights.families import FAMILIES, family_of
from shardwise.weights.families.base import Family, ModelConfig, Shapes


def model_of(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Build the model of a configuration, with random parameters.

    Example:
        >>> model = model_of(GPTConfig(num_layers=2), nnx.Rngs(0))  # doctest: +SKIP
    """
    model: nnx.Module = family_of(config).model_class(config, rngs)
    return model


def config_from_hf(config: Json) -> Any:
    """Return the configuration for the content of a published `config.json`.

    The vocabulary has the published size, not a rounded one. Dropout is 0: it belongs to a run and
    not to the weights.

    Args:
        config: the content of `config.json`.

    Returns:
        A configuration such as `GPTConfig` or `LlamaConfig`.

    Raises:
        ValueError: with everything that the model does not implement.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types or (
            model_type is None and family.config_key in config
        ):
            return family.config_from_hf(config)
    if model_type is None:
        return FAMILIES[0].config_from_hf(config)
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"this config.json describes a model of type {model_type!r}; {known} are implemented"
    )


def config_to_hf(config: ModelConfig, vocab_size: int | None = None) -> Json:
    """Return the content of `config.json` with which `transformers` computes what our model does.

    This is the inverse of `config_from_hf`. No token is declared as the beginning or the end of a
    text: that belongs to the tokenizer.

    Args:
        config: the configuration of the model.
        vocab_size: the size of the exported vocabulary. None for all of it.
    """
    return family_of(config).config_to_hf(config, vocab_size or config.vocab_size)


def config_from_shapes(shapes: Shapes, described: object = None) -> Any:
    """Return the configuration of a model from the shapes of its parameters.

    Args:
        shapes: the shapes of all parameters, by path.
        described: the description of the model in `meta.json` (see
            `shardwise.module.describe_model`). It is used only for fields that shapes do not
            reveal, such as the epsilon of norms or dropout, and only if it is valid.

    Returns:
        A configuration such as `GPTConfig` or `LlamaConfig`.

    Raises:
        ValueError: if the shapes belong to no model family.
    """
    for family in FAMILIES:
        config = family.config_from_shapes(shapes)
        if config is not None:
            break
    else:
        hints = "; ".join(
            f"{family.name} has {family.shape_hint}" for family in FAMILIES
        )
        raise ValueError(
            f"these {len(shapes)} parameters belong to no known model family. {hints}"
        )
    config = _with_described(family, config, described)
    if config.width % config.num_heads:
        raise ValueError(
            f"the width {config.width} is not divisible by {config.num_heads} heads"
        )
    return config


def _with_described(
    family: Family[Any], config: ModelConfig, described: object
) -> ModelConfig:
    """Fill in the fields that shapes do not reveal from the description in `meta.json`."""
    if not isinstance(described, Mapping) or described.get("class") != family.name:
        return config
    values = described.get("config")
    if not isinstance(values, Mapping):
        return config
    parsed = {name: parse(values.get(name)) for name, parse in family.described.items()}
    return replace(
        config, **{name: value for name, value in parsed.items() if value is not None}
    )


def differences(ours: ModelConfig, published: ModelConfig) -> list[str]:
    """Return what two models compute differently although their tensors may have equal shapes."""
    family = family_of(ours)
    other = family_of(published)
    if family is not other:
        return [f"it is a {other.name}, this model is a {family.name}"]
    lines = []
    for name in family.compared:
        theirs, own = getattr(published, name), getattr(ours, name)
        if theirs != own:
            lines.append(f"it has {name}={theirs}, this model has {name}={own}")
    return lines
