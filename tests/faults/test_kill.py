"""SIGKILL at random moments, at every point of a save, and repeatedly."""

import shutil
import signal
import subprocess
import time

import pytest
from harness import (
    SHORT,
    batch_log,
    check_clean,
    check_done,
    check_exact,
    copy_of,
    experiment,
    is_complete,
    last_step,
    seeded,
    steps_of,
)

LONG = ("--steps", "100", "--save-every", "2", "--eval-every", "20")
PLAIN_LONG = ("--steps", "100", "--save-every", "2")
SEED = 20261115
KILLS = 50
PLAIN_KILLS = 12


def kill_at_random(tally, start, out, delays, check_after, check_end):
    """Start a run and kill it, once for each delay.

    A run that reaches its end is checked and started from scratch.

    Returns:
        The number of repeated steps after each kill, and the number of finished runs.
    """
    redone, ended = [0], 0
    for number, delay in enumerate(delays):
        with tally.trial(f"kill {number + 1} of {len(delays)} after {delay:.2f} s"):
            process = start()
            try:
                process.process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
                check_after()
                redone.append(last_step(out) - max(steps_of(out), default=0))
                continue
            check_done(process.end())
            check_end()
            ended += 1
            shutil.rmtree(out)
            batch_log(out).unlink()
    with tally.trial("to the end"):
        check_done(start().end())
        check_end()
    return redone, ended + 1


@pytest.mark.faults
def test_f01_fifty_kills_at_random_moments(bench, straight, straight_plain):
    """Kills are uniform from the start of the process to 3 s after its first step.

    They hit imports, compilation, steps and saves.
    """
    expected, plain = straight(*LONG), straight_plain(*PLAIN_LONG)
    began = time.monotonic()
    probe = bench.start("probe", *LONG)
    probe.wait_for_step(1)
    start_up = time.monotonic() - began
    probe.kill()
    out, plain_out = bench.folder / "run", bench.folder / "plain"
    with experiment("F01", "SIGKILL at random moments") as row:

        def check_after():
            broken = [
                step
                for step in steps_of(out)
                if not is_complete(out / "checkpoints" / str(step))
            ]
            assert broken == [], f"{broken} are listed but not complete"

        def check_end():
            check_exact(out, expected, 100)
            check_clean(out)

        rng = seeded(SEED)
        delays = [rng.uniform(0, start_up + 3) for _ in range(KILLS)]
        redone, ended = kill_at_random(
            row.ours,
            lambda: bench.start("run", *LONG),
            out,
            delays,
            check_after,
            check_end,
        )
        row.note = (
            f"seed {SEED}; complete runs of 100 steps: {ended}; "
            f"at most {max(redone)} steps repeated after a kill, save_every=2"
        )
        kill_at_random(
            row.plain,
            lambda: bench.start_plain("plain", *PLAIN_LONG),
            plain_out,
            [rng.uniform(0, start_up + 6) for _ in range(PLAIN_KILLS)],
            lambda: None,
            lambda: check_exact(plain_out, plain, 100, merged=True),
        )
        assert max(redone) <= 5, (
            f"{max(redone)} steps repeated, but saves are 2 steps apart"
        )


# (fail point, visit, expected checkpoints). At "evaluate" the last save may not have finished.
POINTS = [
    ("checkpoint.temporary", 2, [4]),
    ("checkpoint.arrays", 2, [4]),
    ("checkpoint.written", 2, [4]),
    ("checkpoint.manifest", 2, [4]),
    ("checkpoint.rename", 1, []),
    ("checkpoint.rename", 5, [8, 12, 16]),
    ("checkpoint.renamed", 2, [4, 8]),
    ("checkpoint.delete", 1, [8, 12, 16]),
    ("restore", 1, [8, 12, 16]),
    ("evaluate", 2, [4, 8]),
]


@pytest.mark.faults
def test_f02_killed_at_every_point_of_a_save(bench, straight):
    expected = straight(*SHORT)
    with experiment(
        "F02", "SIGKILL at fail points of a save, a restore and an evaluation"
    ) as row:
        for point, count, kept in POINTS:
            with row.ours.trial(f"{point}:{count}"):
                out = bench.folder / f"{point}{count}"
                if point == "restore":
                    shutil.copytree(bench.folder / "checkpoint.rename5.killed", out)
                    shutil.copy(
                        bench.folder / "checkpoint.rename5.killed.batches",
                        batch_log(out),
                    )
                ended = bench.train(
                    out.name, *SHORT, SHARDWISE_FAILPOINT=f"{point}:{count}:kill"
                )
                assert ended.code == -signal.SIGKILL, ended.message
                there = steps_of(out)
                assert there == kept or (point == "evaluate" and there == kept[:-1]), (
                    f"found checkpoints {there}, expected {kept}"
                )
                assert all(
                    is_complete(out / "checkpoints" / str(step)) for step in there
                )
                if (point, count) == ("checkpoint.rename", 5):
                    copy_of(out, bench, f"{out.name}.killed")
                ended = bench.train(out.name, *SHORT)
                check_done(ended)
                assert not there or f"at step {there[-1]}" in ended.err, ended.message
                check_exact(out, expected, 20)
                check_clean(out)


GOODPUT_SECONDS = 300
KILL_EVERY = 20
# A step takes as long as its pause.
ENDLESS = ("--steps", "1000000", "--save-every", "20", "--pause", "0.05")


def goodput(start, out):
    """Return (useful steps, all steps, seconds) of a run that is killed every KILL_EVERY s."""
    began, executed = time.monotonic(), 0
    while time.monotonic() - began < GOODPUT_SECONDS:
        first = max(steps_of(out), default=0)
        process = start()
        time.sleep(KILL_EVERY)
        process.kill()
        executed += max(last_step(out) - first, 0)
    return max(steps_of(out), default=0), executed, time.monotonic() - began


@pytest.mark.faults
def test_f26_goodput_under_kills(bench):
    with experiment(
        "F26b", f"SIGKILL every {KILL_EVERY} s for {GOODPUT_SECONDS // 60} minutes"
    ) as row:
        notes = []
        for name, tally, start in (
            (
                "shardwise",
                row.ours,
                lambda: bench.start("run", *ENDLESS, "--eval-every", "100000"),
            ),
            ("plain", row.plain, lambda: bench.start_plain("plain", *ENDLESS)),
        ):
            with tally.trial(name):
                useful, executed, seconds = goodput(
                    start, bench.folder / ("run" if name == "shardwise" else name)
                )
                notes.append(
                    f"{name}: {useful} of {executed} steps useful, "
                    f"{useful * 0.05 / seconds:.0%} of the time at 50 ms per step"
                )
                assert useful > 0
        row.note = "; ".join(notes)


@pytest.mark.faults
def test_f26_kills_before_the_first_save(bench):
    """Every start is killed before step `save_every`: without help, each would begin at step 0."""
    args = ("--steps", "1000000", "--save-every", "100000", "--pause", "0.05")

    def start_and_kill(start, out):
        messages = ""
        for _ in range(5):
            (out / "metrics.jsonl").unlink(missing_ok=True)
            first = max(steps_of(out), default=0)
            process = start()
            process.wait_for_step(first + 20)
            messages += process.kill().err
        return messages

    with experiment(
        "F26c", "killed 20 steps after each start, save_every=100,000"
    ) as row:
        with row.ours.trial("five starts"):
            out = bench.folder / "run"
            messages = start_and_kill(
                lambda: bench.start("run", *args, "--eval-every", "100000"), out
            )
            assert steps_of(out), "no progress in five starts"
            assert "save_every" in messages, "no message about save_every"
        with row.plain.trial("five starts"):
            out = bench.folder / "plain"
            start_and_kill(lambda: bench.start_plain("plain", *args), out)
            assert max(steps_of(out), default=0) > 1, "no progress in five starts"
