"""Data that are missing, damaged, empty or changed, and resumes with other settings."""

import json
import shutil

import numpy as np
import pytest
from harness import (
    PLAIN_SHORT,
    SHORT,
    Silent,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    copy_of,
    experiment,
    is_complete,
    last_step,
    seeded,
    steps_of,
)
from model import corpus

# Arguments -> (words of the refusal, keys that accept it).
DRIFTS = {
    ("--seed", "1"): (("seed", "--accept seed", "--accept data"), ("seed", "data")),
    ("--batch-size", "16"): (
        ("data/batch_size", "8", "16", "--accept data"),
        ("data",),
    ),
    ("--records", "101"): (("data/rows", "100", "101"), ("data",)),
    ("--length", "8"): (("data/source/length", "16", "8"), ("data",)),
    ("--no-shuffle",): (("data/shuffle", "True", "False"), ("data",)),
    ("--lr", "0.004"): (("lr", "--accept lr"), ("lr",)),
}
PLAIN_DRIFTS = (
    ("--seed", "1"),
    ("--batch-size", "16"),
    ("--records", "101"),
    ("--length", "8"),
    ("--no-shuffle",),
    ("--lr", "0.004"),
)


@pytest.mark.parametrize(
    "count", [2, pytest.param(99, marks=pytest.mark.faults)], ids=["quick", "all"]
)
def test_f12_resume_with_other_settings(bench, straight, straight_plain, count):
    run = straight(*SHORT)
    with experiment(
        "F12",
        "resumed with another seed, batch size, length, order, data or learning rate",
    ) as row:
        out = copy_of(run, bench, "run", without=(20,))
        for args, (words, _) in list(DRIFTS.items())[:count]:
            with row.ours.trial(" ".join(args)):
                ended = bench.train("run", *SHORT, *args)
                check_refused(ended, 2, "saved", *words)
                assert "compiling" not in ended.err
                assert steps_of(out) == [12, 16]
        if count > 10:
            for args, (_, keys) in DRIFTS.items():
                with row.ours.trial(f"{' '.join(args)}, accepted"):
                    copy_of(run, bench, "accepted", without=(20,))
                    check_done(
                        bench.train(
                            "accepted",
                            *SHORT,
                            *args,
                            *(word for key in keys for word in ("--accept", key)),
                        )
                    )
                    shutil.rmtree(bench.folder / "accepted")
            plain = straight_plain(*PLAIN_SHORT)
            for args in PLAIN_DRIFTS:
                with row.plain.trial(" ".join(args)):
                    copy_of(plain, bench, "plain " + "".join(args), without=(20,))
                    ended = bench.plain("plain-" + "".join(args), *PLAIN_SHORT, *args)
                    if ended.code == 0:
                        raise Silent("accepted without a message")


EMPTY = {
    ("--records", "0"): ("0",),
    ("--records", "5"): ("5", "8"),
    ("--filtered",): ("0 of 100",),
    ("--eval-records", "0"): ("0",),
}


@pytest.mark.parametrize(
    "count", [2, pytest.param(99, marks=pytest.mark.faults)], ids=["quick", "all"]
)
def test_f13_too_little_data(bench, count):
    with experiment(
        "F13", "no data, less than one batch, or all of it filtered out"
    ) as row:
        for args, words in list(EMPTY.items())[:count]:
            with row.ours.trial(" ".join(args)):
                ended = bench.train("run", *SHORT, *args)
                check_refused(ended, 3, *words)
                assert "compiling" not in ended.err
        if count > 10:
            for args in (("--records", "0"), ("--records", "5")):
                with row.plain.trial(" ".join(args)):
                    ended = bench.plain("plain", *PLAIN_SHORT, *args)
                    if ended.code == 0:
                        raise Silent("trained on the remaining data")
                    assert args[1] in ended.err.splitlines()[-1], ended.message[-200:]


# The low byte of a token in the file. Only its lowest bit is flipped, so that the token stays in
# the vocabulary.
LOW_BYTE = 1664


def tokens_file(folder, records=100):
    """Write a token file."""
    path = folder / "tokens.npy"
    np.save(path, corpus(records, 16, 128))
    return path


def rows_of(records=100):
    """Return the tokens of each example."""
    tokens = corpus(records, 16, 128)
    return [tokens[16 * i : 16 * i + 17].tolist() for i in range(records)]


def lines_file(folder, bad=()):
    """Write JSON lines, with truncated ones at the numbers in `bad`."""
    path = folder / "rows.jsonl"
    lines = [json.dumps({"tokens": row}) for row in rows_of()]
    for number in bad:
        lines[number] = lines[number][:20]
    path.write_text("\n".join(lines) + "\n")
    return path


def array_record_file(folder):
    """Write an ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    path = folder / "rows.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows_of():
        writer.write(json.dumps({"tokens": row}).encode())
    writer.close()
    return path


FLIPS = 6


@pytest.mark.faults
def test_f11_broken_data(bench, straight):
    rng = seeded(11)
    with experiment(
        "F11", "data missing, deleted, truncated, undecodable or changed"
    ) as row:
        data = tokens_file(bench.folder)
        args = (*SHORT, "--data", data)
        with row.ours.trial("missing at the start"):
            ended = bench.train("missing", *SHORT, "--data", bench.folder / "tokns.npy")
            check_refused(ended, 3, "tokns.npy", "Did you mean 'tokens.npy'")
            assert "compiling" not in ended.err
        with row.ours.trial("truncated at the start"):
            half = bench.folder / "half.npy"
            half.write_bytes(data.read_bytes()[:1000])
            ended = bench.train("half", *SHORT, "--data", half)
            check_refused(ended, 3, "half.npy")
            assert "compiling" not in ended.err
        with row.ours.trial("truncated during the run"):
            process = bench.start("truncated", *args, "--pause", "0.2")
            process.wait_for_step(6)
            content = data.read_bytes()
            with data.open("r+b") as file:
                file.truncate(300)
            ended = process.end()
            check_refused(ended, 3, "tokens.npy", "truncated")
            finished = last_step(process.out)
            assert steps_of(process.out)[-1] == finished
            check_clean(process.out)
            data.write_bytes(content)
            check_done(bench.train("truncated", *args))
            check_exact(process.out, straight(*map(str, args)), 20)
        with row.ours.trial("deleted during the run: mapped data stay readable"):
            process = bench.start("deleted", *args, "--pause", "0.1")
            process.wait_for_step(6)
            content = data.read_bytes()
            data.unlink()
            check_done(process.end())
            data.write_bytes(content)
            check_exact(process.out, straight(*map(str, args)), 20)
        with row.ours.trial("changed since the last run"):
            process = bench.start("changed", *args, "--pause", "0.2")
            process.wait_for(lambda: 8 in steps_of(process.out), "step 8")
            process.kill()
            content = bytearray(data.read_bytes())
            content[LOW_BYTE] ^= 1
            data.write_bytes(content)
            check_refused(
                bench.train("changed", *args), 2, "data/source/files", "--accept data"
            )
            check_done(bench.train("changed", *args, "--accept", "data"))
        with row.ours.trial("a record that cannot be decoded"):
            lines = lines_file(bench.folder, bad=[31])
            ended = bench.train("bad", *SHORT, "--data", lines)
            check_refused(ended, 3, "rows.jsonl", "record 31")
            assert all(
                is_complete(bench.folder / "bad" / "checkpoints" / str(step))
                for step in steps_of(bench.folder / "bad")
            )
        with row.ours.trial("... skipped within its budget"):
            ended = bench.train("skipped", *SHORT, "--data", lines, "--skip-bad", "1")
            check_done(ended)
            assert "record 31" in ended.err, (
                f"the skipped record is not reported: {ended.message}"
            )
        with row.ours.trial("... three bad records, a budget of two"):
            lines_file(bench.folder, bad=[3, 31, 77])
            check_refused(
                bench.train("budget", *SHORT, "--data", lines, "--skip-bad", "2"),
                3,
                "rows.jsonl",
                "skip_bad=2",
            )
        records = array_record_file(bench.folder)
        good = records.read_bytes()
        with row.ours.trial("ArrayRecord truncated"):
            records.write_bytes(good[: len(good) // 2])
            ended = bench.train("record", *SHORT, "--data", records)
            check_refused(ended, 3, "rows.array_record")
            assert "compiling" not in ended.err
        records.write_bytes(good)
        expected = straight(*SHORT, "--data", str(records))
        for number in range(FLIPS):
            place = rng.choice([place for place, byte in enumerate(good) if byte])
            with row.ours.trial(
                f"ArrayRecord, bit {number % 8} of byte {place} flipped"
            ):
                content = bytearray(good)
                content[place] ^= 1 << number % 8
                records.write_bytes(content)
                ended = bench.train(f"flip{number}", *SHORT, "--data", records)
                # The command may only miss a flip in bytes that it does not read.
                if ended.code == 0:
                    check_exact(bench.folder / f"flip{number}", expected, 20)
                else:
                    check_refused(ended, 3, "rows.array_record")

        plain_args = (*PLAIN_SHORT, "--data", data)
        data = tokens_file(bench.folder)
        with row.plain.trial("truncated during the run"):
            process = bench.start_plain("plain", *plain_args, "--pause", "0.2")
            process.wait_for_step(6)
            content = data.read_bytes()
            with data.open("r+b") as file:
                file.truncate(300)
            ended = process.end()
            data.write_bytes(content)
            if ended.code == 0:
                raise Silent("trained on the remaining data")
            assert "tokens.npy" in ended.err, f"rc {ended.code}: {ended.message[-200:]}"
        with row.plain.trial("changed since the last run"):
            process = bench.start_plain("plain2", *plain_args, "--pause", "0.2")
            process.wait_for(lambda: 8 in steps_of(process.out), "step 8")
            process.kill()
            content = bytearray(data.read_bytes())
            content[LOW_BYTE] ^= 1
            data.write_bytes(content)
            if bench.plain("plain2", *plain_args).code == 0:
                raise Silent("accepted without a message")
