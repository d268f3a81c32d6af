"""Write the weights of a checkpoint as safetensors: under our own names, or for `transformers`."""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.reader import (
    ArrayLike,
    SavedStep,
    average_of,
    in_groups,
    leaf_bytes,
    show_leaf,
    variable_parts,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.durable import sync, write_atomically
from shardwise.files.paths import AnyPath, local_path
from shardwise.text import Json
from shardwise.tree import is_key, key_bits, nest
from shardwise.weights.hf import params_to_hf
from shardwise.weights.hf_config import config_from_shapes, config_to_hf
from shardwise.weights.hub import tokenizer_files, tokenizer_of

# The names of dtypes in safetensors files.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


def export_plain(saved: SavedStep, out: AnyPath, *, average: bool = False) -> list[str]:
    """Write all variables of a model to one safetensors file.

    The arrays are read and written in small groups, so the model may be larger than the memory.

    Args:
        saved: the saved step.
        out: the file to write. It must not exist.
        average: write the averaged weights that the optimizer keeps.

    Returns:
        The names of the tensors. The variable `head/kernel` is the tensor `head.kernel`.

    Raises:
        ConfigError: if `out` exists.
        CheckpointError: if safetensors has no name for a dtype, or there are no averages.
    """
    leaves = {
        path: _without_keys(saved.leaves[name])
        for path, name in saved.variables.items()
    }
    unknown = [
        f"'{path}' ({show_leaf(leaf)})"
        for path, leaf in leaves.items()
        if str(leaf.dtype) not in DTYPES
    ]
    if unknown:
        raise CheckpointError(
            f"safetensors does not support these dtypes: {', '.join(unknown)}."
        )
    tensors = {path.replace("/", "."): leaf for path, leaf in leaves.items()}
    file = local_path(out)
    _check_absent(file)
    values = (value for _, value in read_variables(saved, average=average))
    write_safetensors(
        file, tensors, values, {"format": "np", **_origin(saved, average)}
    )
    return list(tensors)


def export_hf(
    saved: SavedStep,
    out: AnyPath,
    *,
    average: bool = False,
    vocab_size: int | None = None,
) -> list[str]:
    """Write a directory that `transformers` can load.

    It contains `model.safetensors`, `config.json`, and the tokenizer of the run if it can be found.

    Args:
        saved: the saved step of a model of a known family.
        out: the directory to write. It must not exist.
        average: write the averaged weights that the optimizer keeps.
        vocab_size: write only this many tokens of the vocabulary, for example without those that
            only round it up. None writes all.

    Returns:
        The names of the tensors.

    Raises:
        ConfigError: if `out` exists.
        CheckpointError: if the model belongs to no known family.
    """
    directory = local_path(out)
    _check_absent(directory)
    try:
        config = config_of(saved)
        variables = read_variables(saved, average=average)
        params = nest({tuple(path.split("/")): value for path, value in variables})
        tensors = params_to_hf(params, config, vocab_size)
    except ValueError as error:
        raise CheckpointError(
            f"{saved.directory} cannot be written for transformers: {error}"
        ) from error
    config_json = json.dumps(config_to_hf(config, vocab_size), indent=2) + "\n"
    files = {"config.json": config_json.encode()}
    tokenizer = tokenizer_of(saved)
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, config.max_length)
    metadata = {"format": "pt", **_origin(saved, average)}
    # The directory gets its name when it is complete.
    temporary = directory.with_name(directory.name + ".tmp")
    temporary.mkdir(parents=True)
    try:
        for name, content in files.items():
            write_atomically(temporary / name, content.decode())
        weights = temporary / "model.safetensors"
        write_safetensors(weights, tensors, tensors.values(), metadata)
        os.rename(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return list(tensors)


def config_of(saved: SavedStep) -> Any:
    """Return the configuration of the model in a saved step.

    It follows from the shapes of the arrays. For fields that shapes do not reveal, the description
    in `meta.json` is used.

    Returns:
        A configuration such as `GPTConfig` or `LlamaConfig`.

    Raises:
        ValueError: if the model belongs to no known family.
    """
    shapes = {
        path: tuple(saved.leaves[name].shape) for path, name in saved.variables.items()
    }
    return config_from_shapes(shapes, saved.metadata.get("model"))


def read_variables(
    saved: SavedStep, *, average: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and the value of every model variable, reading a few at a time.

    Args:
        saved: the saved step.
        average: yield the averaged weights that the optimizer keeps.

    Raises:
        CheckpointError: if `average` is True and the optimizer keeps no averages.
    """
    parts = variable_parts(saved, average=average)
    sizes = {
        path: sum(leaf_bytes(saved.leaves[name]) for name in names)
        for path, names in parts.items()
    }
    for group in in_groups(sizes):
        arrays = saved.read({name for path in group for name in parts[path]})
        for path in group:
            dtype = saved.leaves[saved.variables[path]].dtype
            yield path, average_of([arrays[name] for name in parts[path]], dtype)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, ArrayLike],
    values: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, complete or not at all.

    The package `safetensors` needs all arrays in memory at once. This function takes them one by
    one.

    Args:
        path: the file to write.
        tensors: shape and dtype of every tensor, by name.
        values: the values of the tensors in the same order.
        metadata: texts for the header of the file.

    Raises:
        ValueError: if the values do not have the size that the header announces.
    """
    header, size = _safetensors_header(tensors, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for value in values:
                file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            if file.tell() != len(header) + size:
                raise ValueError(
                    f"{file.tell()} bytes written to {path}, {len(header) + size} announced"
                )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _safetensors_header(
    tensors: Mapping[str, ArrayLike], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the size of the data after it in bytes."""
    header: Json = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += leaf_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data is aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end


def _without_keys(leaf: ArrayLike) -> ArrayLike:
    """Describe random keys by their bits, for which safetensors has a dtype."""
    return key_bits(leaf.shape, leaf.dtype) if is_key(leaf.dtype) else leaf


def _origin(saved: SavedStep, average: bool) -> dict[str, str]:
    """Return which checkpoint the weights are from. safetensors stores only texts."""
    origin = {
        "step": str(saved.metadata.get("step")),
        "checkpoint_digest": saved.digest,
        "shardwise": version("shardwise"),
    }
    if average or saved.averaged:
        origin["average"] = "true"
    return origin


def _check_absent(out: Path) -> None:
    if out.exists():
        raise ConfigError(
            f"{out} already exists. Nothing is overwritten. Choose another --out."
        )
