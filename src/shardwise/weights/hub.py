"""Models in the layout of the Hugging Face Hub, and the tokenizer of a run.

A published model is a directory with `config.json`, weights in one or several safetensors files,
and `tokenizer.json`.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.checkpoint.init_from import HUB
from shardwise.checkpoint.reader import MAX_JSON, SavedStep, read_json
from shardwise.data.tokenizers import END_TOKENS, Bytes, FromFile, Tokenizer
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.paths import AnyPath, local_path
from shardwise.text import Json

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from safetensors import safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The only files that are downloaded: JSON and safetensors, nothing that could run code.
WANTED = [
    "config.json",
    WEIGHTS,
    "model-*.safetensors",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]


def locate(path: AnyPath) -> Path:
    """Return a local path, after downloading a model from the Hub if necessary.

    Args:
        path: a local path, or `"hf:owner/name"`.

    Returns:
        For a model on the Hub, the directory in the cache of `huggingface_hub`.

    Raises:
        ConfigError: if the path is a URL, or if the package `huggingface_hub` is not installed.
        CheckpointError: if the model cannot be downloaded, or has no safetensors.
    """
    name = os.fspath(path)
    if not name.startswith(HUB):
        return local_path(path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm
    except ImportError:
        raise ConfigError(
            f"'{name}' needs the huggingface_hub package: pip install 'shardwise[hf]'."
        ) from None

    class TerminalBar(tqdm):  # type: ignore[misc]
        """A progress bar that shows only on a terminal."""

        def __init__(self, *args: object, **options: object):
            super().__init__(*args, **{"disable": None, **options})

    repository = name.removeprefix(HUB)
    try:
        place = Path(
            snapshot_download(repository, allow_patterns=WANTED, tqdm_class=TerminalBar)
        )
    # Anything can be wrong: the network, the name, the permissions. The package has no common base
    # class for these errors.
    except Exception as error:
        raise CheckpointError(
            f"'{name}' cannot be downloaded from the Hub: {_download_error(error, repository)}"
        ) from None
    if not weights_in(place):
        raise CheckpointError(
            f"'{name}' has no {WEIGHTS} on the Hub. Weights in other formats, such as pickles, are "
            "not read. Convert them with `save_pretrained` of transformers, and pass the directory."
        )
    return place


def _download_error(error: Exception, repository: str) -> str:
    """Return what went wrong and what to do about it, in one line."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return f"'{repository}' is not a valid name. Use owner/name."
    if isinstance(error, RepositoryNotFoundError):
        return (
            "no such model, or no access to it. Check the name; for a private or gated model run "
            "`hf auth login`."
        )
    fact = "the download failed"
    cause: BaseException = error
    if isinstance(error, LocalEntryNotFoundError):
        fact = "the Hub cannot be reached, and there is no complete copy in the cache"
        cause = error.__cause__ or error
    details = type(cause).__name__
    text = str(cause).strip().split("\n")[0][:200].rstrip(".")
    if text:
        details += f": {text}"
    return (
        f"{fact} ({details}). On a machine with network access, run "
        f"`hf download {repository} --local-dir DIR`; then pass DIR."
    )


@dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file. Converting it to NumPy reads it.

    Attributes:
        file: the open file.
        name: the name of the tensor.
        shape: the shape of the tensor.
        dtype: the dtype as safetensors names it, such as `BF16`.
    """

    file: "safe_open"
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __array__(
        self, dtype: "DTypeLike | None" = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(self.file.get_tensor(self.name), dtype)


def weights_in(path: Path) -> list[Path]:
    """Return the safetensors files of a published model.

    Args:
        path: a directory, or one file.

    Returns:
        The files. Empty if the path does not exist, or is a directory without published weights.

    Raises:
        CheckpointError: if the index is invalid, or a file that it names is missing.
    """
    if path.is_file():
        return [path]
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        return []
    weight_map = read_json(path / INDEX).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    # A hostile index could name any file on this machine.
    if not names or not all(_is_safetensors_name(name) for name in names):
        raise CheckpointError(
            f"{path / INDEX} does not name safetensors files in its directory."
        )
    missing = sorted(name for name in names if not (path / name).is_file())
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}, which {INDEX} names. Download the missing files."
        )
    return [path / name for name in sorted(names)]


def _is_safetensors_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name == Path(name).name
        and name.endswith(".safetensors")
    )


def open_weights(files: list[Path]) -> Mapping[str, Tensor]:
    """Open safetensors files and return all tensors by name. No tensor is read.

    Raises:
        CheckpointError: if a file cannot be read, or if two files have the same tensor.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            file = safe_open(path, framework="np")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {error}"
            ) from error
        repeated = sorted(slices.keys() & tensors.keys())
        if repeated:
            raise CheckpointError(
                f"{path} has '{repeated[0]}', and so has another file."
            )
        for name, part in slices.items():
            tensors[name] = Tensor(
                file, name, tuple(part.get_shape()), part.get_dtype()
            )
    return tensors


# Tokenizers


def tokenizer_of(saved: SavedStep) -> Tokenizer | None:
    """Return the tokenizer of the run that wrote a step, if it is known and can be found.

    The run records either that its tokens are bytes, or the digest of its `tokenizer.json`. The
    file is searched in the run directory and at the paths in the arguments of the run. Only a file
    with the recorded digest is accepted.
    """
    recorded = next(_recorded_tokenizers(saved.metadata.get("data")), None)
    if recorded is None:
        return None
    if recorded == "bytes":
        return Bytes()
    for path in _tokenizer_candidates(saved):
        if hashlib.sha256(path.read_bytes()).hexdigest() == recorded:
            return FromFile(path)
    return None


def _recorded_tokenizers(data: object) -> Iterator[str]:
    """Yield the tokenizer of every token source in the description of a run's data.

    That is `bytes`, or the SHA-256 digest of a `tokenizer.json`.
    """
    if isinstance(data, list):
        for part in data:
            yield from _recorded_tokenizers(part)
    if not isinstance(data, dict):
        return
    tokenizer = data.get("tokenizer")
    if isinstance(tokenizer, dict):
        yield str(tokenizer.get("sha256") or "bytes")
    elif _dtype_of_tokens(data) == "uint8":
        yield "bytes"
    for part in data.values():
        yield from _recorded_tokenizers(part)


def _dtype_of_tokens(data: Json) -> object:
    """Return the dtype of the tokens that a description is about: of files, or of an array."""
    if "files" in data:
        return data.get("dtype")
    tokens = data.get("tokens")
    return tokens.get("dtype") if isinstance(tokens, dict) else None


def _tokenizer_candidates(saved: SavedStep) -> Iterator[Path]:
    """Yield each `tokenizer.json` in the run directory, or in or next to a path it was given."""
    arguments = saved.metadata.get("arguments")
    values = arguments.values() if isinstance(arguments, dict) else ()
    paths = [Path(value) for value in values if isinstance(value, str)]
    run_directory = saved.directory.parent.parent
    for folder in [run_directory, *paths, *(path.parent for path in paths)]:
        file = folder / "tokenizer.json"
        try:
            if file.is_file() and file.stat().st_size <= MAX_JSON:
                yield file
        except (OSError, ValueError):
            # The argument is not a path.
            continue


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` of `transformers` needs, by name.

    Args:
        tokenizer: the tokenizer.
        max_length: the largest number of tokens in a sequence.
    """
    settings: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    content = _byte_tokenizer_json()
    if isinstance(tokenizer, FromFile):
        content = tokenizer.content
        end = tokenizer.end_token(None)
        if end is not None:
            names = [name for name in END_TOKENS if tokenizer.id_of(name) == end]
            settings["eos_token"] = names[0]
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def _byte_tokenizer_json() -> bytes:
    """Return a `tokenizer.json` in which byte n is token n.

    The `ByteLevel` format of the `tokenizers` package writes a byte that is not a visible character
    as a character from 256 on.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    model: Json = {
        "type": "BPE",
        "unk_token": None,
        "fuse_unk": False,
        "vocab": {characters[byte]: byte for byte in range(256)},
        "merges": [],
    }
    content: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(content).encode()
