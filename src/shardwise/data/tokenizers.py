"""Text to tokens and back: a `tokenizer.json` as the `tokenizers` package writes it, or plain bytes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.files import find_file
from shardwise.errors import ConfigError, DataError
from shardwise.text import did_you_mean

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Bytes:
    """Every byte is a token."""

    name, sha256, vocab_size = "bytes", None, 256

    def encode(self, texts: Sequence[bytes], special_tokens: bool = False) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")

    def end_token(self, text: str | None) -> int | None:
        if text and len(text.encode()) != 1:
            raise ConfigError(
                f"--end-token {text!r} has {len(text.encode())} bytes; with bytes for tokens it must be one."
            )
        return text.encode()[0] if text else None


class FromFile:
    """A tokenizer.json. Truncation and padding that it may ask for are switched off, and special tokens added only on request."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                "a tokenizer.json needs the tokenizers package: pip install 'shardwise[tokenizers]'."
            ) from None
        content = find_file(path).read_bytes()
        try:
            self._tokenizer: Any = Tokenizer.from_str(content.decode())
        except Exception as error:  # whatever the package may raise
            raise DataError(f"'{path}' is no tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name, self.sha256, self.content = (
            path.name,
            hashlib.sha256(content).hexdigest(),
            content,
        )
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values()) + 1

    def encode(self, texts: Sequence[bytes], special_tokens: bool = False) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=special_tokens
        )
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False))

    def id_of(self, name: str) -> int | None:
        return self._vocabulary.get(name)

    def end_token(self, text: str | None) -> int | None:
        """That of the name, none for an empty name; when nothing is said, the first usual one that there is."""
        if text and text not in self._vocabulary:
            raise ConfigError(
                f"--end-token '{text}' is not in '{self.name}'.{did_you_mean(text, self._vocabulary)}"
            )
        names = END_TOKENS if text is None else [text]
        return next(
            (int(self._vocabulary[name]) for name in names if name in self._vocabulary), None
        )


Tokenizer = Bytes | FromFile


def open_tokenizer(path: Path | None) -> Tokenizer:
    return Bytes() if path is None else FromFile(path)
