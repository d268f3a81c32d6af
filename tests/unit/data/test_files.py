"""Sources on disk: their records, their errors when damaged, and their fingerprints."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import (
    BadRecord,
    Batches,
    Mix,
    Packed,
    Tokens,
    array_records,
    json_lines,
    open_tokens,
    parquet,
    split,
    text_lines,
)
from shardwise.errors import DataError


def vector(record):
    return {"x": np.array(record["x"], np.float32)}


def number(record):
    return {"x": np.int32(record)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Tokens


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_token_files_hold_what_was_written(folder, dtype):
    tokens = np.arange(100).astype(dtype)
    tokens.tofile("raw.bin")
    np.save("array.npy", tokens)
    tokens.tofile("described.bin")
    (folder / "described.json").write_text(json.dumps({"dtype": dtype, "tokens": 100}))
    expected = Tokens(tokens, 8).rows(np.array([0, 3]))
    for file in (
        open_tokens("raw.bin", dtype),
        open_tokens(folder / "array.npy"),
        open_tokens("described.bin"),
    ):
        assert (len(file), file.dtype) == (100, np.dtype(dtype))
        assert np.array_equal(file[10:20], tokens[10:20])
        found = Tokens(file, 8).rows(np.array([0, 3]))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_files_that_are_no_tokens_are_refused_by_name(folder):
    np.arange(10, dtype=np.uint16).tofile("tokens.bin")
    np.save("table.npy", np.zeros((3, 4)))
    np.save("objects.npy", np.array([{}], object), allow_pickle=True)
    (folder / "short.npy").write_bytes((folder / "table.npy").read_bytes()[:-5])
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "empty.bin").write_bytes(b"")
    cases = {
        "tokens.bim": (
            None,
            "data file 'tokens.bim' does not exist. Did you mean 'tokens.bin'",
        ),
        "nowhere/tokens.bin": (None, "directory 'nowhere' is missing"),
        "tokens.bin": (None, "no 'tokens.json' next to it that gives its dtype"),
        "odd.bin": (
            "uint16",
            "'odd.bin' has 3 bytes, but tokens of uint16 have 2 bytes each",
        ),
        "empty.bin": ("uint16", "'empty.bin' is empty"),
        "table.npy": (None, r"float64 of shape \(3, 4\)"),
        "objects.npy": (None, "'objects.npy' .* cannot be read as an array"),
        "short.npy": (None, r"'short.npy' \(219 bytes\) cannot be read"),
    }
    for name, (dtype, words) in cases.items():
        with pytest.raises(DataError, match=words):
            open_tokens(name, dtype)
    for text in ("", "[]", '{"dtype": "object", "tokens": 10}', '{"dtype": "uint16"}'):
        (folder / "tokens.json").write_text(text)
        with pytest.raises(DataError, match="does not describe a token file"):
            open_tokens("tokens.bin")
    (folder / "tokens.json").write_text('{"dtype": "uint16", "tokens": 12}')
    with pytest.raises(
        DataError, match="has 20 bytes, but its description says 12 tokens of uint16"
    ):
        open_tokens("tokens.bin")


def test_a_token_file_truncated_during_the_run_is_an_error_and_no_crash(folder):
    """In a process of its own: without the check, SIGBUS ends it."""
    np.zeros(2**20, np.uint16).tofile("tokens.bin")
    code = """
import os
from shardwise.data import Batches, Tokens, open_tokens
from shardwise.errors import DataError
batches = Batches(Tokens(open_tokens("tokens.bin", "uint16"), 128), 64)
batches(0)
os.truncate("tokens.bin", 2**16)
for step in range(1, 20):
    try:
        batches(step)
    except DataError as error:
        print(error, error.exit_code)
        break
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found
    assert (
        "'tokens.bin' was truncated: it has 65536 bytes, but its 1048576 tokens need 2097152"
        in found.stdout
    )
    assert "number 32768" in found.stdout
    assert found.stdout.split()[-1] == "3"


def test_a_token_file_deleted_during_the_run_can_still_be_read(folder):
    np.arange(1000, dtype=np.uint16).tofile("tokens.bin")
    batches = Batches(Tokens(open_tokens("tokens.bin", "uint16"), 9), 4)
    before = batches(3)["inputs"]
    os.remove("tokens.bin")
    assert np.array_equal(batches(3)["inputs"], before)


# Records


def write_json_lines(path, count):
    path.write_text(
        "".join(
            json.dumps({"x": [n, 2 * n], "name": f"no. {n}"}) + "\n"
            for n in range(count)
        )
    )


def write_array_record(path, count):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for n in range(count):
        writer.write(json.dumps({"x": [n, 2 * n]}).encode() + b" " * 1000)
    writer.close()


def write_parquet(path, count):
    table = pyarrow.table(
        {
            "x": [[n, 2 * n] for n in range(count)],
            "name": [f"no. {n}" for n in range(count)],
        }
    )
    pyarrow.parquet.write_table(
        table, path, row_group_size=7, compression="none", write_page_checksum=True
    )


def decode_bytes(record):
    return vector(json.loads(record))


KINDS = {
    "jsonl": (write_json_lines, lambda paths: json_lines(paths, vector)),
    "array_record": (
        write_array_record,
        lambda paths: array_records(paths, decode_bytes),
    ),
    "parquet": (write_parquet, lambda paths: parquet(paths, vector, columns=["x"])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_several_files_are_read_at_random(folder, kind):
    write, source_of = KINDS[kind]
    write(folder / f"a.{kind}", 10)
    write(folder / f"b.{kind}", 23)
    source = source_of(f"*.{kind}")
    assert len(source) == 33
    values = np.concatenate([np.arange(10), np.arange(23)])
    indices = np.random.default_rng(0).permutation(33)
    found = source.rows(indices)["x"]
    assert np.array_equal(found, np.stack([values, 2 * values], axis=1)[indices])
    assert found.dtype == np.float32
    with pytest.raises(
        DataError, match=f"data file 'c.{kind}' does not exist. Did you mean"
    ):
        source_of([f"a.{kind}", f"c.{kind}"])
    with pytest.raises(DataError, match="no data file matches"):
        source_of(f"no*.{kind}")
    (folder / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="'empty'"):
        source_of("empty")


def damage(folder, kind, record):
    """Makes one record of the file unreadable: a byte of it is changed."""
    path = folder / f"a.{kind}"
    data = bytearray(path.read_bytes())
    marks = {
        "jsonl": f"[{record},",
        "array_record": f"[{record},",
        "parquet": f"no. {record}",
    }
    at = data.find(marks[kind].encode())
    assert at > 0
    data[at] ^= 0x15
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_a_damaged_record_is_named_or_skipped_within_a_budget(folder, kind):
    write, source_of = KINDS[kind]
    write(folder / f"a.{kind}", 40)
    for record in (5, 31):
        damage(folder, kind, record)
    whole = Batches(source_of(f"a.{kind}"), 8)
    with pytest.raises(BadRecord, match=rf"'a.{kind}', record (5|31): ") as caught:
        [whole(step) for step in range(5)]
    assert caught.value.exit_code == 3

    make = lambda: Batches(source_of(f"a.{kind}"), 8, skip_bad=2)  # noqa: E731
    batches = make()
    found = np.stack([batches(step)["x"] for step in range(20)])
    assert set(batches.skipped) == {f"'a.{kind}', record 5", f"'a.{kind}', record 31"}
    backward = make()
    assert np.array_equal(
        found, np.stack([backward(step)["x"] for step in reversed(range(20))])[::-1]
    )
    seen = np.bincount(found[:5, :, 0].astype(int).ravel(), minlength=40)
    assert np.array_equal(np.flatnonzero(seen != 1), [5, 6, 31, 32])
    assert seen[[5, 6, 31, 32]].tolist() == [0, 2, 0, 2]
    assert np.array_equal(make().rows(3, 2, 5)["x"], batches(3)["x"][2:5])
    assert sum(len(batch["x"]) for batch in make().once()) == 40

    strict = Batches(source_of(f"a.{kind}"), 8, skip_bad=1)
    with pytest.raises(BadRecord, match=r"; 2 bad records exceed skip_bad=1"):
        [strict(step) for step in range(5)]


def test_a_damaged_page_of_parquet_is_named(folder):
    write_parquet(folder / "a.parquet", 40)
    damage(folder, "parquet", 31)
    batches = Batches(parquet("a.parquet", columns=["name"]), 8)
    with pytest.raises(
        BadRecord,
        match=r"'a.parquet', record (28|29|30|31|32|33|34): row group 4 cannot be read: .*CRC",
    ):
        [batches(step) for step in range(5)]
    batches = Batches(
        parquet("a.parquet", columns=["name"]), 8, skip_bad=7
    )  # all rows of that group
    assert all(len(batches(step)["name"]) == 8 for step in range(20))
    assert len(batches.skipped) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_named(folder, kind):
    write, source_of = KINDS[kind]
    write(folder / f"a.{kind}", 40)
    opened = source_of(f"a.{kind}") if kind == "jsonl" else None
    os.truncate(
        f"a.{kind}", os.path.getsize(f"a.{kind}") - 45
    )  # within the last record but one of the lines
    if kind != "jsonl":
        with pytest.raises(DataError, match=rf"'a.{kind}' \(\d+ bytes\)"):
            source_of(f"a.{kind}")
        return
    with pytest.raises(
        BadRecord,
        match=r"'a.jsonl', record 39: the file was truncated: 0 of 34 bytes from byte \d+ are left",
    ):
        opened.rows(np.array([0, 39]))
    fresh = source_of("a.jsonl")
    with pytest.raises(
        BadRecord, match=rf"'a.jsonl', record {len(fresh) - 1}: .* starts at byte"
    ):
        fresh.rows(np.arange(len(fresh)))


def test_what_decode_raises_is_told_with_the_record(folder):
    write_json_lines(folder / "a.jsonl", 3)
    with pytest.raises(
        BadRecord,
        match=r"'a.jsonl', record 2: it cannot be decoded: "
        r"KeyError: 'there is no y; there are x, name'",
    ):
        json_lines("a.jsonl", columns=["y"]).rows(np.array([2]))
    (folder / "ragged.jsonl").write_text('{"x": [1]}\n\n   \n{"x": [1, 2]}\n')
    with pytest.raises(
        DataError,
        match=r"'ragged.jsonl', record 0 has x \(1,\), and 'ragged.jsonl', record 2 has x \(2,\)",
    ):
        json_lines("ragged.jsonl").rows(np.array([0, 2]))
    write_parquet(folder / "a.parquet", 3)
    with pytest.raises(DataError, match=r"'a.parquet' has no column y; it has x, name"):
        parquet("a.parquet", columns=["y"])


@given(
    st.lists(
        st.text(
            st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]),
            min_size=1,
        ),
        min_size=1,
    ),
    st.booleans(),
)
def test_lines_of_text_are_those_of_the_file(tmp_path_factory, lines, ends):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes("\n".join(lines).encode() + (b"\n" if ends else b""))
    source = text_lines(path, lambda line: {"line": line})
    assert (
        source.rows(np.arange(len(source)))["line"].tolist() == np.array(lines).tolist()
    )


def test_bad_utf8_is_named(folder):
    (folder / "a.txt").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(
        BadRecord,
        match=r"'a.txt', record 1: 'utf-8' codec can't decode byte 0xff .*starts at byte 5",
    ):
        text_lines("a.txt", lambda line: {"length": len(line)}).rows(np.array([1]))


# Fingerprints


def fingerprint(
    *,
    size=2**23,
    at=None,
    name="tokens.bin",
    length=64,
    rows=8,
    seed=0,
    shuffle=True,
    tokenizer="a",
    kind="Tokens",
):
    """Of a run on a file of `size` bytes, of which the one at `at` is another."""
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    if at is not None:
        data[at] ^= 1
    data.tofile(name)
    file = open_tokens(name, "uint16")
    file.info["tokenizer"] = {"sha256": tokenizer}
    source = (
        Packed(file, length, np.array([0, 1000, len(file)]))
        if kind == "Packed"
        else Tokens(file, length)
    )
    if kind == "Mix":
        source = Mix({"a": (source, 0.5), "b": (Tokens(np.arange(1000), length), 0.5)})
    if kind == "split":
        source = split(source, 0.1)[0]
    return json.dumps(
        Batches(source, rows, seed=seed, shuffle=shuffle).fingerprint(), sort_keys=True
    )


def test_a_fingerprint_changes_with_all_that_batches_depend_on(folder):
    same = fingerprint()
    assert same == fingerprint()
    changes = [
        {"size": 2**23 + 2},
        {"at": 0},
        {"at": 2**23 - 1},
        {"name": "other.bin"},
        {"length": 65},
        {"rows": 9},
        {"seed": 1},
    ]
    changes += [
        {"shuffle": False},
        {"tokenizer": "b"},
        {"kind": "Packed"},
        {"kind": "Mix"},
        {"kind": "split"},
    ]
    others = [fingerprint(**change) for change in changes]
    assert len({same, *others}) == 1 + len(changes)
    for kind in ("Packed", "Mix", "split"):  # changes show through whatever is around
        inner = [fingerprint(kind=kind, **change) for change in changes[:9]]
        assert len(set(inner)) == 9
    small = fingerprint(size=2**21)
    assert all(
        fingerprint(size=2**21, at=at) != small for at in (1, 2**20 + 17, 2**21 - 3)
    )  # of a small file, every byte counts


def test_a_fingerprint_does_not_depend_on_times_or_places(folder):
    before = fingerprint()
    os.utime("tokens.bin", (1, 1))
    (folder / "elsewhere").mkdir()
    os.chdir("elsewhere")
    assert fingerprint() == before


@given(st.integers(1, 30), st.integers(0, 29), st.integers(0, 2))
def test_a_fingerprint_of_arrays_changes_with_every_element(rows, row, column):
    array = np.zeros((rows, 3), np.float32)
    changed = array.copy()
    changed[row % rows, column] = 1e-30
    assert (
        Batches({"x": array}, 1).fingerprint()
        != Batches({"x": changed}, 1).fingerprint()
    )
    assert (
        Batches({"x": array}, 1).fingerprint()
        == Batches({"x": np.asfortranarray(array)}, 1).fingerprint()
    )


def test_the_fingerprint_of_a_large_file_is_quick(folder):
    with open("large.bin", "wb") as file:
        file.truncate(10 * 2**30)  # a sparse file
    batches = Batches(Tokens(open_tokens("large.bin", "uint16"), 1024), 64)
    start = time.perf_counter()
    batches.fingerprint()
    assert time.perf_counter() - start < 0.2
