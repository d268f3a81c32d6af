"""Tokenizers that need no file of the `tokenizers` package."""

import numpy as np
import pytest

from shardwise.data import Characters
from shardwise.data.tokenizers import Bytes, named_tokenizer
from shardwise.errors import ConfigError, DataError


def test_characters():
    text = "zebra €\n𝄞"
    characters = Characters(text * 3)
    assert characters.alphabet == "".join(sorted(set(text)))
    assert characters.vocab_size == 9
    (tokens,) = characters.encode([text.encode()])
    assert tokens.dtype == np.int32
    assert characters.decode(tokens) == text
    assert characters.end_token(None) is None
    with pytest.raises(ConfigError, match="alphabet of 9 characters: 'q', 'x'"):
        characters.encode([b"rex q"])


def test_names(tmp_path):
    text = tmp_path / "a:b.txt"
    text.write_text("hello\r\n", encoding="utf-8")
    assert isinstance(named_tokenizer("bytes"), Bytes)
    found = named_tokenizer(f"characters:{text}")
    assert isinstance(found, Characters)
    # Line ends are read as Python reads them.
    assert found.alphabet == "\nehlo"
    with pytest.raises(DataError, match="does not exist"):
        named_tokenizer("characters:missing.txt")
    text.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        named_tokenizer(f"characters:{text}")
