"""`shardwise data prepare` and `shardwise data show`, as processes on real files."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shardwise.data import Packed, open_tokens
from tests.helpers.command import run, start

ROOT = Path(__file__).parents[2]
FILES = ("tokens.bin", "documents.bin", "tokens.json")
MAIN = """
import sys
from shardwise.cli import main

def run(args):
    try:
        return main(["data", *args])
    finally:
        assert args[0] != "prepare" or "jax" not in sys.modules
"""
ONE = MAIN + "sys.exit(run(sys.argv[1:]))"
MANY = (
    MAIN
    + "import json\nfor args in json.loads(sys.argv[1]): print('exit', run(args), file=sys.stderr)"
)


def data(folder, *args):
    done = run("data", *args, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def digests(out):
    return {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES
    }


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A small byte-level BPE tokenizer, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 100, trainer
    )
    tokenizer.enable_truncation(4)  # which prepare must not do
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_inputs(folder):
    """The texts that are in them, in order."""
    texts = [
        "a text file\nof two lines\n",
        "the quick brown fox",
        "jumps over",
        "ü and 語",
        "",
        "the lazy dog",
    ]
    (folder / "texts" / "deep").mkdir(parents=True)
    (folder / "texts" / "deep" / "a.txt").write_text(texts[0])
    (folder / "texts" / ".hidden").write_text("not this")
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts[1:4])]
    (folder / "texts" / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts[4:], "id": [1, 2]}),
        folder / "table.parquet",
        row_group_size=1,
    )
    return texts


def test_bytes_of_all_kinds_of_inputs(tmp_path):
    texts = write_inputs(tmp_path)
    code, _, err = data(
        tmp_path,
        "prepare",
        "texts",
        "table.parquet",
        "--out",
        "out",
        "--json",
        "answer.json",
    )
    assert code == 0, err
    assert "prepared 76 tokens (uint8) in 6 documents: out" in err
    file = open_tokens(tmp_path / "out")
    assert (file.dtype, file.info["vocab_size"], file.info["end_token"]) == (
        np.uint8,
        256,
        None,
    )
    found = [
        file[a:b].tobytes().decode()
        for a, b in zip(file.documents, file.documents[1:], strict=False)
    ]
    assert found == texts
    assert json.loads((tmp_path / "answer.json").read_text())["documents"] == 6
    assert [entry["path"] for entry in file.info["inputs"]] == [
        "texts/deep/a.txt",
        "texts/lines.jsonl",
        "table.parquet",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)


def test_a_tokenizer_with_its_end_token(tmp_path, tokenizer_json):
    texts = write_inputs(tmp_path)
    args = [
        "prepare",
        "texts",
        "table.parquet",
        "--tokenizer",
        tokenizer_json,
        "--out",
        "out",
    ]
    code, _, err = data(tmp_path, *args)
    assert code == 0, err
    file = open_tokens(tmp_path / "out")
    assert file.dtype == np.uint16
    assert file.info["tokenizer"] == {
        "name": "tokenizer.json",
        "sha256": hashlib.sha256(tokenizer_json.read_bytes()).hexdigest(),
    }
    assert (
        tmp_path / "out" / "tokenizer.json"
    ).read_bytes() == tokenizer_json.read_bytes()
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_truncation()
    expected = [
        [
            *tokenizer.encode(text, add_special_tokens=False).ids,
            tokenizer.token_to_id("<|endoftext|>"),
        ]
        for text in texts
    ]
    assert [
        file[a:b].tolist()
        for a, b in zip(file.documents, file.documents[1:], strict=False)
    ] == expected
    assert Packed(file, 8).rows(np.array([0]))["inputs"].shape == (1, 8)

    before = digests(tmp_path / "out")
    code, _, err = data(tmp_path, *args)
    assert (code, "nothing to do, already prepared" in err) == (0, True)
    assert digests(tmp_path / "out") == before

    code, _, err = data(
        tmp_path, "prepare", "texts", "--out", "out", "--end-token", "\n"
    )
    assert code == 2
    assert "'out' was started with other arguments" in err
    assert "inputs: 3 files of " in err
    assert 'tokenizer: {"name": "tokenizer.json"' in err
    assert "end_token: 0 there, 10 now" in err
    code, _, err = data(tmp_path, *args[:-1], "other", "--end-token", "")
    assert open_tokens(tmp_path / "other").info["end_token"] is None


def test_pieces_of_a_long_text_are_whole_lines_or_characters(tmp_path, tokenizer_json):
    """Encode two texts longer than one piece; one is a single line of 3-byte characters."""
    lines = "".join(
        f"the quick brown fox jumps over the lazy dog {n}\n" for n in range(30_000)
    )
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.txt").write_text("語" * 400_000 + "x")
    code, _, err = data(
        tmp_path,
        "prepare",
        "a.txt",
        "b.txt",
        "--tokenizer",
        tokenizer_json,
        "--out",
        "out",
        "--end-token",
        "",
    )
    assert code == 0, err
    file = open_tokens(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_truncation()
    assert file.info["documents"] == 2
    expected = [
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (lines, "語" * 400_000 + "x")
    ]
    assert file[:].tolist() == expected[0] + expected[1]


def test_mistakes_and_bad_data_are_named(tmp_path, tokenizer_json):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": "bad\n')
    (tmp_path / "field.jsonl").write_text('{"body": "x", "id": 1}\n')
    (tmp_path / "latin.txt").write_bytes(b"good \xe4 bad")
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "corpus.txt.gz").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken.json").write_text("{}")
    write_inputs(tmp_path)
    damaged = bytearray((tmp_path / "table.parquet").read_bytes())
    (tmp_path / "short.parquet").write_bytes(damaged[:-20])
    cases = [
        (
            ["prepare", "corpus.text", "--out", "o1"],
            3,
            "data file 'corpus.text' does not exist",
        ),
        (
            ["prepare", "bad.jsonl", "--out", "o2"],
            3,
            "'bad.jsonl', record 1 is not JSON",
        ),
        (
            ["prepare", "field.jsonl", "--out", "o3"],
            3,
            "'field.jsonl', record 0 has no text in field 'text'; it has body, id",
        ),
        (
            ["prepare", "latin.txt", "--tokenizer", tokenizer_json, "--out", "o4"],
            3,
            "'latin.txt' is not UTF-8 at byte 5",
        ),
        (
            ["prepare", "half.jsonl", "--out", "o5"],
            3,
            "'half.jsonl', record 0 has half of a character",
        ),
        (
            ["prepare", "empty.txt", "--out", "o6"],
            3,
            "there is no text in the 1 inputs (0 bytes); the first is 'empty.txt'",
        ),
        (
            ["prepare", "corpus.txt.gz", "--out", "o7"],
            3,
            "'corpus.txt.gz' is compressed",
        ),
        (["prepare", "nothing", "--out", "o8"], 3, "no files below 'nothing'"),
        (
            ["prepare", "table.parquet", "--field", "body", "--out", "o9"],
            3,
            "'table.parquet' has no column 'body'; it has text, id",
        ),
        (
            ["prepare", "table.parquet", "--field", "id", "--out", "o10"],
            3,
            "'table.parquet', record 0 has no text in field 'id'",
        ),
        (["prepare", "short.parquet", "--out", "o11"], 3, "'short.parquet' ("),
        (
            ["prepare", "latin.txt", "--tokenizer", "broken.json", "--out", "o12"],
            3,
            "'broken.json' is not a tokenizer.json",
        ),
        (
            ["prepare", "latin.txt", "--end-token", "ab", "--out", "o13"],
            2,
            "--end-token 'ab' has 2 bytes",
        ),
        (
            [
                "prepare",
                "latin.txt",
                "--tokenizer",
                tokenizer_json,
                "--end-token",
                "<|endoftxt|>",
                "--out",
                "o",
            ],
            2,
            "mean '<|endoftext|>'",
        ),
        (["prepare", "latin.txt"], 2, "--out"),
        (
            ["prepair", "latin.txt"],
            2,
            "Did you mean 'prepare'?",
        ),
        (["show", "nothing"], 3, "data file 'nothing/tokens.bin' does not exist"),
        (["show", "latin.txt", "--stepp", "3"], 2, "unknown argument --stepp 3"),
        (["show", "latin.txt", "--step", "0"], 2, "steps count from 1"),
    ]
    command = [
        sys.executable,
        "-c",
        MANY,
        json.dumps([list(map(str, args)) for args, _, _ in cases]),
    ]  # one process for all of them
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    parts = found.stderr.split("shardwise: ")[1:]
    assert len(parts) == len(cases), found.stderr
    for (args, exit_code, words), part in zip(cases, parts, strict=True):
        assert words in part, args
        assert part.split()[-2:] == ["exit", str(exit_code)], args


@pytest.mark.slow
def test_a_killed_prepare_goes_on_to_the_same_bytes(tmp_path, tokenizer_json):
    """Killed at random moments of its work, eight times, and once right after its start."""
    rng = np.random.default_rng(0)
    words = np.array(
        ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "of", "old\n"]
    )
    texts = [
        " ".join(rng.choice(words, int(rng.integers(1, 2000)))) for _ in range(600)
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[:300])
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts[300:]}), tmp_path / "b.parquet", row_group_size=100
    )
    (tmp_path / "c.txt").write_text("\n".join(texts))
    args = [
        "prepare",
        "a.jsonl",
        "b.parquet",
        "c.txt",
        "--tokenizer",
        str(tokenizer_json),
        "--out",
    ]
    command = [
        sys.executable,
        "-c",
        "import shardwise.data.prepare as p\np.SAVE_SECONDS, p.CHUNK = 0.0, 2**15\n"
        + ONE,
        *args,
    ]
    subprocess.run(
        [*command, "straight"], cwd=tmp_path, check=True, capture_output=True
    )
    progress, seen, states = tmp_path / "killed" / "progress.json", b"", []
    for kill in range(9):
        process = subprocess.Popen(
            [*command, "killed"], cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        while kill and (not progress.exists() or progress.read_bytes() == seen):
            assert process.poll() is None, "it was not killed before it ended"
            time.sleep(0.002)
        time.sleep(float(rng.random()) * 0.1)
        process.kill()
        process.wait()
        seen = progress.read_bytes() if progress.exists() else b""
        states.append(json.loads(seen)["state"]["read"] if seen else 0)
    assert sorted(states) == states
    assert len(set(states)) > 5, states
    subprocess.run([*command, "killed"], cwd=tmp_path, check=True, capture_output=True)
    assert digests(tmp_path / "killed") == digests(tmp_path / "straight")
    assert not progress.exists()


def test_a_prepare_begun_with_other_arguments_is_refused_and_two_at_once_too(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "slow.jsonl").write_text('{"text": "a"}\n' * 400_000)
    process = start("data", "prepare", "slow.jsonl", "--out", "out", cwd=tmp_path)
    while not (tmp_path / "out" / "progress.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    code, _, err = data(tmp_path, "prepare", "slow.jsonl", "--out", "out")
    assert (code, "another process is preparing 'out'" in err) == (7, True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = data(tmp_path, "prepare", "a.txt", "--out", "out")
    assert (code, "'out' was started with other arguments" in err) == (2, True)
    with (tmp_path / "slow.jsonl").open("a") as file:
        file.write('{"text": "b"}\n')
    code, _, err = data(tmp_path, "prepare", "slow.jsonl", "--out", "out")
    assert (
        code,
        "1 files of 5600000 bytes" in err,
        "1 files of 5600014 bytes" in err,
    ) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    line = (
        json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20}) + "\n"
    )
    peaks = []
    for megabytes in (10, 100):
        with (tmp_path / f"{megabytes}.{kind}").open("w") as file:
            for _ in range(megabytes):
                file.write(line * (2**20 // len(line)))
        process = start(
            "data", "prepare", f"{megabytes}.{kind}", "--out", megabytes, cwd=tmp_path
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        process.communicate()
        assert status == 0
        peaks.append(usage.ru_maxrss / 1024)
    assert peaks[1] - peaks[0] < 20, peaks


def test_show_tells_of_prepared_data(tmp_path, tokenizer_json):
    write_inputs(tmp_path)
    assert (
        data(
            tmp_path,
            "prepare",
            "texts",
            "table.parquet",
            "--tokenizer",
            tokenizer_json,
            "--out",
            "out",
        )[0]
        == 0
    )
    code, out, err = data(
        tmp_path, "show", "out", "--rows", "6", "--json", "answer.json"
    )
    assert code == 0, err
    assert "the quick brown fox<|endoftext|>" in out
    assert "ü and 語<|endoftext|>" in out
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["documents"] == 6
    assert answer["document_tokens"]["0%"] == 1
    assert len(answer["examples"]) == 6
    assert sum(entry["share"] for entry in answer["most_frequent"]) < 1

    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    code, out, err = data(tmp_path, "show", "raw.bin", "--dtype", "uint16")
    assert (
        code,
        "1,000 tokens (uint16), 1,000 distinct, the largest is 999" in out,
    ) == (
        0,
        True,
    )
    (tmp_path / "out" / "tokenizer.json").write_bytes(
        tokenizer_json.read_bytes() + b"\n"
    )
    code, _, err = data(tmp_path, "show", "out")
    assert (code, "is not the tokenizer that" in err) == (3, True)


def test_show_tells_of_the_batch_of_a_step(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "code.txt").write_text("def f(x):\n    return x\n" * 200)
    assert data(tmp_path, "prepare", "code.txt", "texts", "--out", "out")[0] == 0
    recipe = ROOT / "recipes" / "tokens_gpt.py"
    args = [
        "show",
        recipe,
        "--data",
        "out",
        "--batch-size",
        "4",
        "--length",
        "16",
        "--pack",
    ]
    code, out, err = data(
        tmp_path, *args, "--step", "3", "--rows", "2", "--json", "answer.json"
    )
    assert code == 0, err
    assert "the batch of step 3 of 200: batches(2)" in out
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["step"] == 3
    assert answer["arrays"]["inputs"]["shape"] == [4, 16]
    assert len(answer["rows"]) == 2
    assert all(
        sum(segment["tokens"] for segment in row["segments"]) == 16
        for row in answer["rows"]
    )
    assert "document at 0, " in out
    assert "def f(x)" in out


@pytest.mark.slow
def test_the_recipe_for_token_files_trains(tmp_path):
    """Train on packed documents with validation data on 2 devices, also with more workers.

    Both runs start the real command.
    """
    (tmp_path / "code.txt").write_text(
        Path(ROOT / "src" / "shardwise" / "step" / "train.py").read_text() * 3
    )
    write_inputs(tmp_path)
    assert data(tmp_path, "prepare", "code.txt", "texts", "--out", "out")[0] == 0
    recipe = ROOT / "recipes" / "tokens_gpt.py"
    found = run(
        "train",
        recipe,
        "--cpu-devices",
        2,
        "--data",
        "out",
        "--steps",
        20,
        "--pack",
        "--scan-layers",
        "--out",
        "run",
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    records = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3
    assert any("eval_loss" in record for record in records)
