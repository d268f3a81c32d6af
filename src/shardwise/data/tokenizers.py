"""Text to tokens and back: a `tokenizer.json` of the `tokenizers` package, bytes, or characters."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardwise.data.files import find_file
from shardwise.errors import ConfigError, DataError
from shardwise.files.paths import AnyPath
from shardwise.text import did_you_mean

if TYPE_CHECKING:
    import tokenizers

# Names of the end token in published tokenizers; the first that exists is the default.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

# Unknown characters that an error message lists.
MAX_SHOWN = 8


class Bytes:
    """The tokenizer for which every byte is a token."""

    name = "bytes"
    sha256 = None
    vocab_size = 256

    def encode(
        self, texts: Sequence[bytes], special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """Return tokens as text; invalid UTF-8 becomes the replacement character."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")

    def end_token(self, text: str | None) -> int | None:
        """Return the byte that ends a document; None if `text` is empty or None.

        Raises:
            ConfigError: if `text` has several bytes.
        """
        if not text:
            return None
        encoded = text.encode()
        if len(encoded) != 1:
            raise ConfigError(
                f"--end-token {text!r} has {len(encoded)} bytes; without a tokenizer it must be"
                " one byte."
            )
        return encoded[0]


class Characters:
    """The tokenizer for which every character of a text is a token, in sorted order.

    Example:
        >>> characters = Characters("abba")
        >>> characters.encode([b"ba"])[0].tolist()
        [1, 0]

    Args:
        text: the text whose characters become the alphabet.

    Attributes:
        name: "characters".
        sha256: None: it needs no file.
        alphabet: the different characters, sorted.
        vocab_size: their number.
    """

    name = "characters"
    sha256 = None

    def __init__(self, text: str):
        self._codes = np.unique(_code_points(text))
        self.alphabet = "".join(map(chr, self._codes))
        self.vocab_size = len(self.alphabet)

    def encode(
        self, texts: Sequence[bytes], special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return the tokens of each UTF-8 text, int32.

        Raises:
            ConfigError: if a text has a character that is not in the alphabet.
        """
        encoded = []
        for text in texts:
            decoded = text.decode()
            codes = _code_points(decoded)
            known = np.isin(codes, self._codes)
            if not known.all():
                unknown = np.unique(codes[~known])[:MAX_SHOWN]
                shown = ", ".join(repr(chr(code)) for code in unknown)
                raise ConfigError(
                    f"not in the alphabet of {self.vocab_size} characters: {shown}."
                )
            encoded.append(np.searchsorted(self._codes, codes).astype(np.int32))
        return encoded

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """Return tokens as text."""
        return "".join(self.alphabet[token] for token in np.asarray(tokens).tolist())

    def end_token(self, text: str | None) -> int | None:
        """Return None: no character ends a document."""
        return None


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


class FromFile:
    """A tokenizer.json.

    Truncation and padding that the file may ask for are switched off. Special tokens are added only
    on request.

    Attributes:
        name: the name of the file.
        sha256: hash of its content.
        content: its content.
        vocab_size: one more than the largest token.
    """

    def __init__(self, path: AnyPath):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                "a tokenizer.json needs the tokenizers package: pip install 'shardwise[tokenizers]'"
            ) from None
        file = find_file(path)
        content = file.read_bytes()
        try:
            self._tokenizer: tokenizers.Tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:
            # The package raises plain Exception.
            raise DataError(f"'{path}' is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(
            with_added_tokens=True
        )
        self.name = file.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.content = content
        self.vocab_size = max(self._vocabulary.values()) + 1

    def encode(
        self, texts: Sequence[bytes], special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return the tokens of each UTF-8 text, uint32."""
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=special_tokens
        )
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """Return tokens as text, special tokens included."""
        return str(
            self._tokenizer.decode(
                np.asarray(tokens).tolist(), skip_special_tokens=False
            )
        )

    def id_of(self, name: str) -> int | None:
        """Return the number of a token, or None."""
        return self._vocabulary.get(name)

    def end_token(self, text: str | None) -> int | None:
        """Return the token that ends a document.

        Args:
            text: its name; empty for none; None for the first of `END_TOKENS` that exists.

        Raises:
            ConfigError: if no token has that name.
        """
        if text and text not in self._vocabulary:
            hint = did_you_mean(text, self._vocabulary)
            raise ConfigError(f"--end-token '{text}' is not in '{self.name}'.{hint}")
        names = END_TOKENS if text is None else [text]
        known = [self._vocabulary[name] for name in names if name in self._vocabulary]
        return known[0] if known else None


Tokenizer: TypeAlias = Bytes | Characters | FromFile


def open_tokenizer(path: AnyPath | None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or bytes if there is none."""
    return Bytes() if path is None else FromFile(path)


def named_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that an option names.

    Args:
        name: "bytes", "characters:FILE" for the characters of a text file, or the path of a
            tokenizer.json.

    Raises:
        ConfigError: if the text is not UTF-8.
        DataError: if the file does not exist, or is not a tokenizer.json.
    """
    kind, _, text_file = name.partition(":")
    if name == "bytes":
        return Bytes()
    if kind != "characters":
        return FromFile(name)
    try:
        return Characters(find_file(text_file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{text_file}' is not valid UTF-8: {error}.") from None
