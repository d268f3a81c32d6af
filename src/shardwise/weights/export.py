"""Weights of a checkpoint as safetensors: under our own names, or as a directory that `transformers` loads as GPT-2 or Llama."""

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
    SavedStep,
    average_of,
    averages,
    in_groups,
    leaf_bytes,
    show_leaf,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.durable import sync, write_atomically
from shardwise.tree import nest
from shardwise.weights.hf import params_to_hf
from shardwise.weights.hf_config import Config, config_from_shapes, config_to_hf
from shardwise.weights.hub import tokenizer_files, tokenizer_of

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


def export_plain(saved: SavedStep, out: Path, *, average: bool = False) -> list[str]:
    """All variables of the model in one file, "head/kernel" under the name "head.kernel"; one after the other, so any size."""
    leaves = {path: saved.leaves[name] for path, name in saved.variables.items()}
    if unknown := [
        f"'{path}' ({show_leaf(leaf)})"
        for path, leaf in leaves.items()
        if str(leaf.dtype) not in DTYPES
    ]:
        raise CheckpointError(f"safetensors has no such dtype: {', '.join(unknown)}.")
    tensors = {path.replace("/", "."): leaf for path, leaf in leaves.items()}
    _refuse_existing(out)
    values = (value for _, value in read_variables(saved, average=average))
    write_safetensors(out, tensors, values, {"format": "np", **_origin(saved, average)})
    return list(tensors)


def export_hf(
    saved: SavedStep, out: Path, *, average: bool = False, vocab_size: int | None = None
) -> list[str]:
    """A directory with model.safetensors and config.json for `transformers`, and with the run's tokenizer if it can be found.

    `vocab_size` leaves the rows from there on out.
    """
    _refuse_existing(out)
    try:
        config = config_of(saved)
        params = nest(
            {
                tuple(path.split("/")): value
                for path, value in read_variables(saved, average=average)
            }
        )
        tensors = params_to_hf(params, config, vocab_size)
    except ValueError as error:
        raise CheckpointError(
            f"{saved.directory} cannot be written for transformers: {error}"
        ) from error
    tokenizer = tokenizer_of(saved)
    described = {
        "config.json": (json.dumps(config_to_hf(config, vocab_size), indent=2) + "\n").encode()
    }
    temporary = out.with_name(out.name + ".tmp")
    temporary.mkdir(parents=True)
    try:
        for name, content in (
            described | (tokenizer_files(tokenizer, config.max_length) if tokenizer else {})
        ).items():
            write_atomically(temporary / name, content.decode())
        write_safetensors(
            temporary / "model.safetensors",
            tensors,
            tensors.values(),
            {"format": "pt", **_origin(saved, average)},
        )
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return list(tensors)


def config_of(saved: SavedStep) -> Config:
    """The configuration of the GPT or Llama in a checkpoint: from the shapes of its arrays, and what its run said where they are silent."""
    shapes = {path: tuple(saved.leaves[name].shape) for path, name in saved.variables.items()}
    return config_from_shapes(shapes, saved.metadata.get("model"))


def read_variables(saved: SavedStep, *, average: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Every variable of the model by path, some at a time; `average`: parameters as the optimizer averages them."""
    found = averages(saved) if average else {}
    if average and not found:
        raise CheckpointError(
            f"the optimizer of {saved.directory} keeps no average of the weights (ema=..., or schedule-free)."
        )
    sources = {path: found.get(path, (name,)) for path, name in saved.variables.items()}
    sizes = {
        path: sum(leaf_bytes(saved.leaves[name]) for name in names)
        for path, names in sources.items()
    }
    for group in in_groups(sizes):
        arrays = saved.read({name for path in group for name in sources[path]})
        for path in group:
            yield (
                path,
                average_of(
                    [arrays[name] for name in sources[path]],
                    saved.leaves[saved.variables[path]].dtype,
                ),
            )


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Any],
    values: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """A safetensors file, whole or not there. `tensors` tells shape and dtype of every one of the `values`, which come one by one."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + leaf_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at a multiple of eight
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for value in values:
                file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            if file.tell() != 8 + len(text) + end:
                raise ValueError(
                    f"{file.tell()} bytes written to {path}, {8 + len(text) + end} announced"
                )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _origin(saved: SavedStep, average: bool) -> dict[str, str]:
    """Which checkpoint the weights are from; safetensors keeps text only."""
    step, averaged = (
        str(saved.metadata.get("step")),
        {"average": "true"} if average or saved.averaged else {},
    )
    return {
        "step": step,
        "checkpoint_digest": saved.digest,
        "shardwise": version("shardwise"),
        **averaged,
    }


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} is there already; nothing is overwritten. Choose another --out.")
