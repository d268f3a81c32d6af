"""Columns of `metrics.jsonl` hold exactly the floats that Python reads."""

import json
import math
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.rundir.columns import (
    MAX_COLUMNS,
    MAX_LINE_BYTES,
    MAX_NAME_LENGTH,
    MetricsFile,
)


def read_columns(path, content, metrics=None):
    """Write `content` to a file; return the reader after it has read the file."""
    metrics = metrics or MetricsFile()
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    metrics.read(descriptor)
    os.close(descriptor)
    return metrics


def read_losses(path, texts):
    """Return the values of lines whose losses are given as JSON text."""
    lines = [f'{{"step": {n}, "loss": {text}}}\n' for n, text in enumerate(texts)]
    return read_columns(path, "".join(lines).encode()).columns()["loss"].values.tolist()


def bits(values):
    return [struct.pack("d", value) for value in values]


plain = st.from_regex(r"(0|[1-9][0-9]{0,16})(\.[0-9]{1,17})?", fullmatch=True)
usual = st.floats(allow_nan=False, allow_infinity=False).map(repr)
narrow = st.floats(width=32, min_value=0, max_value=1e5).map(repr)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(plain, usual, narrow), min_size=1, max_size=40))
def test_every_number_is_the_nearest_float(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "numbers.jsonl"
    assert bits(read_losses(path, texts)) == bits(map(float, texts))


def test_random_numbers_of_all_sizes(tmp_path):
    rng = np.random.default_rng(0)
    for power in range(-6, 16, 3):
        texts = [repr(float(value)) for value in rng.random(2000) * 10.0**power]
        assert bits(read_losses(tmp_path / "a", texts)) == bits(map(float, texts)), (
            power
        )


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
        "0x10",
        "1_0",
        ".",
    ],
)
def test_lines_with_an_invalid_number_are_skipped(tmp_path, word):
    lines = [
        f'{{"step": {n}, "loss": {text}}}\n'
        for n, text in enumerate(["1.5", word, "2.5"])
    ]
    metrics = read_columns(tmp_path / "a", "".join(lines).encode())
    assert metrics.columns()["loss"].values.tolist() == [1.5, 2.5]
    assert metrics.bad_lines == 1


def test_numbers_that_json_lacks(tmp_path):
    values = read_losses(
        tmp_path / "a", ["NaN", "Infinity", "-Infinity", "1.5", "7", "-0.0"]
    )
    assert math.isnan(values[0])
    assert bits(values[1:]) == bits([math.inf, -math.inf, 1.5, 7.0, -0.0])
    values = read_losses(
        tmp_path / "a", ['"nan"', '"inf"', '"-inf"', "true", '"x"', "1" * 400]
    )
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.0, math.inf]


def test_floats_are_read_exactly(tmp_path):
    rng = np.random.default_rng(0)
    records = [
        {
            "step": n,
            "loss": float(rng.normal() * 10.0 ** rng.integers(-300, 300)),
            "lr": n,
        }
        for n in range(1, 500)
    ]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    columns = read_columns(tmp_path / "a", content).columns()
    assert columns["loss"].values.tolist() == [record["loss"] for record in records]
    assert columns["lr"].values.tolist() == list(range(1, 500))


def test_invalid_lines_among_valid_ones_are_skipped(tmp_path):
    usual_lines = [f'{{"step": {n}, "loss": 1.5}}'.encode() for n in range(20)]
    odd = [
        b'{"step": 20, "lost": 1.5}',
        b'{"loss": 20, "step": 1.5}',
        b'{"step": 20, "loss": 1,5}',
        b'{"step": 20, "loss": true}',
        b'{"step": 20.5, "loss": 1.5}',
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
    content = b"\n".join([*usual_lines, *odd, b'{"step": 21, "loss": "inf"}\n'])
    metrics = read_columns(tmp_path / "a", content)
    loss = metrics.columns()["loss"]
    assert loss.steps.tolist() == [*range(21), 21]
    assert loss.values.tolist() == [1.5] * 21 + [math.inf]
    assert metrics.bad_lines == 12


def test_lines_that_are_joined_or_split_are_not_records(tmp_path):
    content = (
        b'{"step": 1\n"loss": 2}\n{"step": 3}, {"step": 4}\n{"step": 5, "loss": 6.0}\n'
    )
    metrics = read_columns(tmp_path / "a", content)
    assert metrics.columns()["loss"].steps.tolist() == [5]
    assert (metrics.num_records, metrics.bad_lines) == (1, 3)


def test_a_growing_file_is_read_from_where_the_last_read_ended(tmp_path):
    path = tmp_path / "a"
    lines = [json.dumps({"step": n, "loss": n / 7}) + "\n" for n in range(1, 101)]
    content = "".join(lines).encode()
    metrics = MetricsFile()
    for end in [0, 5, 30, 31, 1000, len(content) - 1, len(content)]:
        with path.open("ab") as file:
            file.write(content[path.stat().st_size : end])
        descriptor = os.open(path, os.O_RDONLY)
        metrics.read(descriptor)
        os.close(descriptor)
    assert metrics.columns()["loss"].values.tolist() == [n / 7 for n in range(1, 101)]
    assert (metrics.num_records, metrics.bad_lines) == (100, 0)


def test_limits_on_hostile_files(tmp_path):
    many = {f"m{n}": 1.0 for n in range(MAX_COLUMNS + 3)}
    long = {"step": 2, "x" * (MAX_NAME_LENGTH + 1): 1.0}
    huge = b'{"step": 3, "text": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    content = json.dumps({"step": 1, **many}) + "\n" + json.dumps(long) + "\n"
    metrics = read_columns(tmp_path / "a", content.encode() + huge)
    assert len(metrics.columns()) == MAX_COLUMNS
    assert metrics.num_dropped == 4
    assert metrics.bad_lines >= 1
