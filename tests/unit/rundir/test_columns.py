"""Numbers that are read many at once are the floats that Python reads, to the last bit."""

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.rundir.columns import WIDEST, _numbers_at, _same_fields
from shardwise.rundir.files import RunFiles
from tests.helpers.run_dirs import lines


def read(texts):
    signs = np.frombuffer(" ".join(texts).encode() + b" " * WIDEST, np.uint8)
    lengths = np.array([len(text) for text in texts])
    return _numbers_at(signs, np.cumsum(lengths + 1) - lengths - 1, lengths)


def bits(values):
    return [struct.pack("d", value) for value in values]


plain = st.from_regex(r"[0-9]{1,17}(\.[0-9]{1,17})?", fullmatch=True)
usual = st.floats(allow_nan=False).map(repr)
narrow = st.floats(width=32, min_value=0, max_value=1e5).map(repr)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(plain, usual, narrow).filter(lambda text: len(text) <= WIDEST),
        min_size=1,
        max_size=40,
    )
)
def test_every_number_is_the_nearest_float(texts):
    assert bits(read(texts)) == bits(map(float, texts))


def test_random_numbers_of_all_sizes():
    rng = np.random.default_rng(0)
    for power in range(-6, 16, 3):
        texts = [repr(float(value)) for value in rng.random(2000) * 10.0**power]
        assert bits(read(texts)) == bits(map(float, texts)), power


@pytest.mark.parametrize(
    "word",
    [
        "1-5",
        "1.5.3",
        "1e5e3",
        "1x",
        "x",
        "1e",
        "-",
        "",
        "1 5",
        "1\t5",
        "[1",
        "true",
        "0x10",
        "1_0",
        "1" * 25,
        ".",
    ],
)
def test_what_is_no_number_is_refused(word):
    assert read(["1.5", word, "2.5"]) is None


def test_words_for_numbers_that_json_has_not():
    found = read(["NaN", "Infinity", "-Infinity", "1.5", "7", "-0.0"])
    assert math.isnan(found[0])
    assert bits(found[1:]) == bits([math.inf, -math.inf, 1.5, 7.0, -0.0])


def test_lines_that_are_alike_are_read_at_once_and_exactly(tmp_path):
    (tmp_path / "a").mkdir()
    rng = np.random.default_rng(0)
    alike = [
        {"step": n, "loss": float(rng.normal() * 10.0 ** rng.integers(-300, 300)), "lr": n}
        for n in range(1, 500)
    ]
    lines(tmp_path / "a" / "metrics.jsonl", alike)
    assert _same_fields("\n".join(map(json.dumps, alike)).encode()) is not None
    assert RunFiles(tmp_path / "a").read().column("loss").values.tolist() == [
        record["loss"] for record in alike
    ]
    usual = [f'{{"step": {n}, "loss": 1.5}}'.encode() for n in range(20)]
    odd = [
        b'{"step": 20, "lost": 1.5}',
        b'{"loss": 20, "step": 1.5}',
        b'{"step": 20, "loss": 1,5}',
        b'{"step": 20, "loss": true}',
        b'{"step": 20.5, "loss": 1.5}',
    ]
    odd += [
        b'{"step": 20, "loss": [1.5}',
        b'{"step": 20, "loss": }',
        b'["step": 20, "loss": 1.5]',
        b'{"step": 20  "loss": 1.5}',
        b'{"step": -20, "loss": 1.5}',
        b'{"step": 20, "loss": 1 5}\n{"step": 20, "loss": }',
        b'{"step": 20, "loss": 1\t5}\n{"step": 20, "loss": \t}',
        b'{"step": 20, "loss":1.5}',
        b'{"step": 20, "loss": 1.5} ',
        b"",
    ]
    for line in odd:
        assert _same_fields(b"\n".join([*usual, line])) is None, line
    (tmp_path / "a" / "metrics.jsonl").write_bytes(
        b"\n".join([*usual, *odd, b'{"step": 21, "loss": "inf"}\n'])
    )
    run = RunFiles(tmp_path / "a").read()
    assert run.column("loss").steps.tolist() == [*range(21), 21]
    assert run.column("loss").values[-1] == math.inf
