"""Models as published on the Hugging Face Hub: a directory with config.json, safetensors in one file or several, and tokenizer.json.

And the tokenizer of a run, which belongs beside its weights when they are published.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.reader import MAX_JSON, SavedStep, read_json
from shardwise.data.tokenizers import END_TOKENS, Bytes, FromFile, Tokenizer
from shardwise.errors import CheckpointError, ConfigError

HUB = "hf:"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WANTED = [
    "config.json",
    WEIGHTS,
    "model-*.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]


def locate(path: str | Path) -> Path:
    """The path itself; for "hf:owner/name" the directory where `huggingface_hub` keeps it, brought from the Hub if need be.

    Only JSON and safetensors are asked for, never files that could run code.
    """
    name = str(path)
    if not name.startswith(HUB):
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    except ImportError:
        raise ConfigError(
            f"'{name}' needs the huggingface_hub package: pip install 'shardwise[hf]'."
        ) from None

    class Bar(tqdm):  # type: ignore[misc]
        """For people at a terminal alone."""

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **{"disable": None, **options})

    known = name.removeprefix(HUB)
    try:
        place = Path(snapshot_download(known, allow_patterns=WANTED, tqdm_class=Bar))
    except Exception as error:  # of the network, the name or the rights; the package has a class of its own for each
        raise CheckpointError(
            f"'{name}' cannot be had from the Hub: {_why(error, known)}"
        ) from None
    if not weights_in(place):
        raise CheckpointError(
            f"'{name}' has no {WEIGHTS} at the Hub; weights in other formats, such as pickles, are not read. "
            "Convert them with `save_pretrained` of transformers, and give the directory."
        )
    return place


def _why(error: Exception, known: str) -> str:
    """What is the matter and what to do, in a line."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return f"'{known}' is no name there. A name is owner/name."
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or not for you. Look at the name; for a private or gated model, `hf auth login`."
    about = (
        error.__cause__
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None
        else error
    )
    said = str(about).strip().split("\n")[0][:200].rstrip(".")
    fact = (
        "it cannot be reached, and there is no whole copy of it here"
        if isinstance(error, LocalEntryNotFoundError)
        else "it failed"
    )
    remedy = f"Where there is a network, `hf download {known} --local-dir DIR`; then give DIR."
    return f"{fact} ({type(about).__name__}{f': {said}' if said else ''}). {remedy}"


@dataclass(frozen=True)
class Tensor:
    """One tensor in a file; NumPy reads it when it is converted."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it, such as "BF16"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.file.get_tensor(self.name), dtype)


def weights_in(path: Path) -> list[Path]:
    """The safetensors files of a directory, or the file itself; none if it is something else."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    if (path / WEIGHTS).is_file() or not (path / INDEX).is_file():
        return [path / WEIGHTS] if (path / WEIGHTS).is_file() else []
    named = read_json(path / INDEX).get("weight_map")
    files = set(named.values()) if isinstance(named, dict) else set()
    if not files or not all(
        isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
        for file in files
    ):
        raise CheckpointError(f"{path / INDEX} does not name the safetensors files beside it.")
    if missing := sorted(file for file in files if not (path / file).is_file()):
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}, which {INDEX} names. Download them too."
        )
    return [path / file for file in sorted(files)]


def open_weights(files: list[Path]) -> Mapping[str, Tensor]:
    """All tensors of these files by name; none is read yet."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            file = safe_open(path, framework="np")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        if twice := sorted(slices.keys() & tensors.keys()):
            raise CheckpointError(f"{path} has '{twice[0]}', which another file beside it has too.")
        tensors |= {
            name: Tensor(file, name, tuple(piece.get_shape()), piece.get_dtype())
            for name, piece in slices.items()
        }
    return tensors


# Tokenizers


def tokenizer_of(saved: SavedStep) -> Tokenizer | None:
    """What made the tokens of the run that wrote a step, if it can be told and found: bytes, or the tokenizer.json with the digest
    that the run noted, in its own directory or at a path that it was given. Nothing else is taken for it."""
    said = next(_tokens_in(saved.metadata.get("data")), None)
    if said is None or said == "bytes":
        return Bytes() if said else None
    return next(
        (
            FromFile(path)
            for path in _near(saved)
            if hashlib.sha256(path.read_bytes()).hexdigest() == said
        ),
        None,
    )


def _tokens_in(data: Any) -> Iterator[str]:
    """From the description of a run's data: "bytes", or the SHA-256 of a tokenizer.json, for every source of tokens in it."""
    if isinstance(data, list):
        for part in data:
            yield from _tokens_in(part)
    if not isinstance(data, dict):
        return
    tokenizer, tokens = data.get("tokenizer"), data.get("tokens")
    if isinstance(tokenizer, dict):
        yield str(tokenizer.get("sha256") or "bytes")
    elif (data if "files" in data else tokens if isinstance(tokens, dict) else {}).get(
        "dtype"
    ) == "uint8":
        yield "bytes"
    for part in data.values():
        yield from _tokens_in(part)


def _near(saved: SavedStep) -> Iterator[Path]:
    """Every tokenizer.json in the directory of the run, or in or beside what its arguments name."""
    arguments = saved.metadata.get("arguments")
    texts = (
        [text for text in arguments.values() if isinstance(text, str)]
        if isinstance(arguments, dict)
        else []
    )
    places = [
        saved.directory.parent.parent,
        *map(Path, texts),
        *(Path(text).parent for text in texts),
    ]
    for place in places:
        path = place / "tokenizer.json"
        try:
            if path.is_file() and path.stat().st_size <= MAX_JSON:
                yield path
        except (OSError, ValueError):  # a text that is no path
            continue


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """By name, what `AutoTokenizer` of `transformers` needs."""
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
    }
    about["clean_up_tokenization_spaces"] = False
    if isinstance(tokenizer, FromFile):
        content = tokenizer.content
        if (end := tokenizer.end_token(None)) is not None:
            about["eos_token"] = next(name for name in END_TOKENS if tokenizer.id_of(name) == end)
    else:
        content = _bytes_as_json()
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(about, indent=2) + "\n").encode(),
    }


def _bytes_as_json() -> bytes:
    """A tokenizer.json that makes each byte the token of its number. Bytes that are no visible character stand for others there."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model: dict[str, Any] = {
        "type": "BPE",
        "unk_token": None,
        "fuse_unk": False,
        "vocab": {names[byte]: byte for byte in range(256)},
        "merges": [],
    }
    parts: dict[str, Any] = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **parts}).encode()
