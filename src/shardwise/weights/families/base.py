"""What a model family is: one object that knows its configuration and its published weights.

`shardwise.weights.hf`, `hf_config`, `load` and `export` work for any `Family`. To add one, write
its model in `shardwise/models`, a module like `gpt2.py` here, and add it to `FAMILIES` in
`__init__.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from shardwise.text import Json

Shape: TypeAlias = tuple[int, ...]
# Shapes of the parameters of a model, by path such as `blocks/0/attn/qkv/kernel`.
Shapes: TypeAlias = Mapping[str, Shape]

# The output layer of a language model in `transformers`.
HEAD = "lm_head.weight"


class ModelConfig(Protocol):
    """The fields that every model configuration has. It is a frozen dataclass.

    Attributes:
        vocab_size: the number of tokens in the embedding.
        max_length: the largest number of tokens in a sequence.
        num_layers: the number of blocks.
        num_heads: the number of attention heads.
        width: the size of the residual stream.
        scan_layers: whether the parameters of all layers are stacked.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def scan_layers(self) -> bool: ...


C = TypeVar("C", bound=ModelConfig)


@dataclass(frozen=True)
class TensorSpec:
    """A published tensor and the parameter that holds the same values.

    Apart from a transposition, one is a reshape of the other.

    Attributes:
        path: the path of the parameter. For a tensor of a block, the path within the block.
        published: the shape of the published tensor.
        shape: the shape of the parameter, for one layer and one expert.
        transposed: whether the published tensor has its outputs first.
        index: where the values are in a stacked parameter: the numbers of the layer and the expert.
        sizes: the sizes of the dims that `index` counts in.
    """

    path: str
    published: Shape
    shape: Shape
    transposed: bool = False
    index: Shape = ()
    sizes: Shape = ()

    @property
    def stacked_shape(self) -> Shape:
        """The shape of the parameter, with the dims of layers and experts."""
        return (*self.sizes, *self.shape)

    def of_layer(self, layer: int, config: ModelConfig) -> "TensorSpec":
        """Return this tensor of a block for one layer."""
        if not config.scan_layers:
            return replace(self, path=f"blocks/{layer}/{self.path}")
        return replace(
            self,
            path=f"blocks/{self.path}",
            index=(layer, *self.index),
            sizes=(config.num_layers, *self.sizes),
        )


@dataclass(frozen=True)
class TensorLayout:
    """All published tensors of a model, by name without the prefix of the family.

    Attributes:
        first: the tensors before the blocks.
        layers: what precedes the number of a layer in the name of a tensor, such as `h` in
            `h.0.ln_1.weight`.
        block: the tensors of one block, by the name after the number of the layer.
        last: the tensors after the blocks.
    """

    first: dict[str, TensorSpec]
    layers: str
    block: dict[str, TensorSpec]
    last: dict[str, TensorSpec]

    def expand(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """Return the tensors of all layers in the order of the published file."""
        table = dict(self.first)
        for layer in range(config.num_layers):
            for name, spec in self.block.items():
                full_name = f"{self.layers}.{layer}.{name}"
                table[full_name] = spec.of_layer(layer, config)
        return table | self.last


@dataclass(frozen=True)
class Family(Generic[C]):
    """A family of models that `transformers` publishes, and how it maps to a model of shardwise.

    Attributes:
        title: the name of the family in messages, such as `GPT-2`.
        model_types: `model_type` in `config.json`, in all variants.
        config_key: a key that only the `config.json` of this family has. It identifies files
            without `model_type`.
        config_class: the configuration of the model, a frozen dataclass.
        model_class: the model, an `nnx.Module` with the attribute `config`. It is built with
            `model_class(config, rngs)`.
        prefix: precedes most tensor names. GPT2LMHeadModel writes it; GPT2Model and the original
            files of OpenAI do not. Both are read.
        embedding: the name of the token embedding, without the prefix.
        marker: the name of another tensor that only this family has, without the prefix.
        buffers: a pattern of tensors that older versions of `transformers` saved and that are not
            parameters, without the prefix.
        shape_hint: the parameters by which `config_from_shapes` recognizes the model.
        compared: the fields of the configuration that change the results but not the shapes of the
            published tensors. They must agree when weights are loaded.
        described: the fields that shapes do not reveal, each with a function that checks a value
            from `meta.json` and converts it. It returns None for an invalid value.
        config_from_hf: returns the configuration for the content of `config.json`. Raises
            ValueError with everything that the model does not implement.
        config_to_hf: returns the content of `config.json`, given the configuration and the size of
            the vocabulary.
        config_from_shapes: returns the configuration for shapes of parameters, or None if they do
            not belong to this family.
        tensors: returns all published tensors of a model.
    """

    title: str
    model_types: tuple[str, ...]
    config_key: str
    config_class: type[C]
    model_class: type[Any]
    prefix: str
    embedding: str
    marker: str
    buffers: str
    shape_hint: str
    compared: tuple[str, ...]
    described: Mapping[str, Callable[[object], object]]
    config_from_hf: Callable[[Json], C]
    config_to_hf: Callable[[C, int], Json]
    config_from_shapes: Callable[[Shapes], C | None]
    tensors: Callable[[C], TensorLayout]

    @property
    def name(self) -> str:
        """The name of the model class, such as `GPT`. `meta.json` has it under `model/class`."""
        return self.model_class.__name__

    def owns(self, names: Iterable[str]) -> bool:
        """Return whether tensors with these names are a model of this family."""
        given = set(names)
        required = (self.embedding, self.marker)
        return all({self.prefix + name, name} & given for name in required)


def check_config(
    config: Json,
    sizes: Iterable[str],
    supported: Mapping[str, tuple[object, ...]],
    model: str,
    problems: Iterable[str] = (),
) -> None:
    """Check that a model implements everything in a `config.json`.

    Args:
        config: the content of `config.json`.
        sizes: the keys that must be positive integers.
        supported: the values that are implemented, by key. The first one is the default of
            `transformers` for a missing key.
        model: the name of the model, for the message.
        problems: further problems that the caller found.

    Raises:
        ValueError: with all problems, one per line.
    """
    found = []
    for name in sizes:
        value = config.get(name)
        if value is None:
            found.append(f"{name} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{name} is {value!r}; it must be a positive integer")
    for name, values in supported.items():
        value = config.get(name, values[0])
        if value not in values:
            choices = " or ".join(map(repr, dict.fromkeys(values)))
            found.append(f"{name} is {value!r}; only {choices} is implemented")
    found += problems
    if found:
        fact = f"this config.json does not describe a model that {model} computes"
        raise ValueError(bullet_list(fact, found))


def count_layers(shapes: Shapes, stacked: Shape | None) -> int:
    """Return the number of layers.

    Args:
        shapes: the shapes of all parameters.
        stacked: the shape of a stacked parameter, or None if every layer has its own parameters.
    """
    if stacked is not None:
        return stacked[0]
    return len({path.split("/")[1] for path in shapes if path.startswith("blocks/")})


def parse_float(value: object) -> float | None:
    """Return a finite number that is not negative as a float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def parse_int(value: object) -> int | None:
    """Return a finite number that is not negative as an int, or None."""
    number = parse_float(value)
    return None if number is None else int(number)


def bullet_list(fact: str, problems: Iterable[str]) -> str:
    """Return a fact and its details, one per line."""
    return "\n  ".join([f"{fact}:", *problems])
