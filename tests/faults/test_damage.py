"""Checkpoints with damaged files."""

import json
import subprocess
import sys

import pytest
from harness import (
    HERE,
    LIMIT,
    PLAIN_SHORT,
    SHORT,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    copy_of,
    experiment,
    files_of,
    flip_bit,
    largest_file,
    pick_bit,
    seeded,
    steps_of,
    truncate,
)

SEED = 3


@pytest.mark.parametrize(
    ("flips", "commands"),
    [
        pytest.param(30, 1, marks=pytest.mark.slow),
        pytest.param(200, 3, marks=pytest.mark.faults),
    ],
)
def test_f03_every_flipped_bit_is_detected(
    bench, straight, straight_plain, flips, commands
):
    """Every flip is checked against the digests, and some with the real command."""
    from shardwise.files.manifest import verify_manifest

    run, rng = straight(*SHORT), seeded(SEED)
    with experiment("F03", "one bit flipped in a checkpoint", f"seed {SEED}") as row:
        out = copy_of(run, bench, "flips")
        newest = out / "checkpoints" / "20"
        assert verify_manifest(newest) == []
        for number in range(flips):
            path, bit = pick_bit(newest, rng)
            with row.ours.trial(
                f"flip {number + 1}: bit {bit} of {path.relative_to(newest)}",
                quiet=True,
            ):
                flip_bit(path, bit)
                problems = verify_manifest(newest)
                flip_bit(path, bit)
                assert problems, "not detected"
                assert str(path) in "\n".join(problems) or path.name == "MANIFEST", (
                    problems
                )
        for number in range(commands):
            path, bit = pick_bit(newest, rng)
            with row.ours.trial(
                f"command {number + 1}: bit {bit} of {path.relative_to(newest)}"
            ):
                out = copy_of(run, bench, f"command{number}")
                damaged = out / "checkpoints" / "20" / path.relative_to(newest)
                flip_bit(damaged, bit)
                ended = bench.train(out.name, *SHORT)
                check_done(ended)
                assert ended.err.count("warning:") == 1, ended.message
                assert str(damaged) in ended.err, ended.message
                check_exact(out, run, 20)
        if flips > 100:
            plain = straight_plain(*PLAIN_SHORT)
            command = [
                sys.executable,
                HERE / "flips.py",
                plain / "checkpoints" / "20",
                str(flips),
                str(SEED),
            ]
            found = subprocess.run(
                command,
                env=bench.environment(),
                capture_output=True,
                text=True,
                check=True,
                timeout=2 * LIMIT,
            )
            counts = json.loads(found.stdout.splitlines()[-1])
            row.plain.trials, row.plain.passed, row.plain.silent = (
                flips,
                counts["raised"] + counts["same"],
                counts["wrong"],
            )
            row.note += (
                f"; plain: {counts['raised']} raised, "
                f"{counts['same']} read the same values"
            )


def zero(path):
    """Overwrite a file with zeros."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE = {
    "flipped": lambda step: flip_bit(
        largest_file(step), 8 * (largest_file(step).stat().st_size // 2)
    ),
    "truncated": lambda step: truncate(largest_file(step)),
    "zeroed": lambda step: zero(largest_file(step)),
    "file missing": lambda step: largest_file(step).unlink(),
    "no manifest": lambda step: (step / "MANIFEST").unlink(missing_ok=True),
    "extra file": lambda step: (step / "state" / "more").write_text("more"),
    "empty": lambda step: [path.unlink() for path in files_of(step)],
}
PLAIN_DAMAGE = ("flipped", "truncated", "zeroed", "file missing", "empty")


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("truncated",), marks=pytest.mark.slow),
        pytest.param(tuple(DAMAGE), marks=pytest.mark.faults),
    ],
    ids=["one", "all"],
)
def test_f05_falls_back_to_the_newest_complete_step(
    bench, straight, straight_plain, kinds
):
    run = straight(*SHORT)
    with experiment("F05", "newest checkpoint damaged, older ones complete") as row:
        for kind in kinds:
            with row.ours.trial(kind):
                out = copy_of(run, bench, kind)
                DAMAGE[kind](out / "checkpoints" / "20")
                ended = bench.train(out.name, *SHORT)
                check_done(ended)
                assert ended.err.count("warning:") == 1, ended.message
                assert "going back to step 16" in ended.err, ended.message
                assert (out / "checkpoints" / "20.bad").is_dir()
                check_exact(out, run, 20)
                check_clean(out)
        with row.ours.trial("all damaged"):
            out = copy_of(run, bench, "all")
            for step in steps_of(out):
                DAMAGE["flipped"](out / "checkpoints" / str(step))
            # A second start refuses too.
            for word in ("12.bad", "*.bad"):
                check_refused(bench.train(out.name, *SHORT), 4, word, "--out")
            assert len(list((out / "checkpoints").glob("*.bad"))) == 3
        if len(kinds) > 1:
            with row.ours.trial("two of three damaged"):
                out = copy_of(run, bench, "two")
                for step in (16, 20):
                    DAMAGE["flipped"](out / "checkpoints" / str(step))
                ended = bench.train(out.name, *SHORT)
                check_done(ended)
                assert "going back to step 12" in ended.err, ended.message
                check_exact(out, run, 20)
            plain = straight_plain(*PLAIN_SHORT)
            for kind in PLAIN_DAMAGE:
                with row.plain.trial(kind):
                    out = copy_of(plain, bench, f"plain {kind}", without=(20,))
                    DAMAGE[kind](out / "checkpoints" / "16")
                    check_done(bench.plain(out.name, *PLAIN_SHORT))
                    check_exact(out, plain, 20, merged=True)
