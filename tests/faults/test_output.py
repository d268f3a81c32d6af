"""Output that cannot be written, and a terminal that is gone: no step is lost."""

import signal
import sys

import pytest
from harness import (
    HERE,
    SHORT,
    check_clean,
    check_exact,
    check_stopped,
    experiment,
    fresh,
    last_step,
    redirected,
    steps_of,
)

REDIRECTIONS = {
    "a pipe whose reader has ended": "2>&1 | head -1",
    "stderr to a pipe whose reader has ended": "2>&1 >/dev/null | true",
    "a full disk": ">/dev/full 2>&1",
    "closed stdout": ">&-",
    "closed stderr": "2>&-",
    "all closed": "<&- >&- 2>&-",
}


def check_same(ended, out, expected):
    """Check that a run whose output was lost is finished and exact."""
    assert ended.code == 0, f"exit code {ended.code}: {ended.message}"
    check_exact(out, expected, 20)
    check_clean(out)


@pytest.mark.faults
def test_f31_output_that_cannot_be_written(bench, straight, straight_pair):
    expected = straight(*SHORT)
    with experiment("F31", "output closed, or to a full disk or a dead pipe") as row:
        for number, (what, redirection) in enumerate(REDIRECTIONS.items()):
            with row.ours.trial(f"train, {what}"):
                own = fresh(bench, number)
                process = own.start("run", *SHORT, wrap=redirected(redirection))
                check_same(process.end(), process.out, expected)
        for what in ("a pipe whose reader has ended", "all closed"):
            with row.ours.trial(f"launch, {what}"):
                own = fresh(bench, f"launch {what}")
                wrap = redirected(REDIRECTIONS[what])
                launcher = own.launch("run", *SHORT, wrap=wrap)
                check_same(launcher.end(), launcher.out, straight_pair)


@pytest.mark.slow
def test_a_run_without_output_trains_to_its_end(bench, straight):
    process = bench.start("run", *SHORT, wrap=redirected("<&- 2>&1 | head -1"))
    check_same(process.end(), process.out, straight(*SHORT))


# Steps that are saved only at the end.
UNSAVED = ("--steps", "200", "--save-every", "0", "--pause", "0.1")


def check_saved(ended, out):
    """Check that a run was stopped and has saved its last step."""
    check_stopped(ended)
    assert steps_of(out) == [last_step(out)], (steps_of(out), last_step(out))
    check_clean(out)


@pytest.mark.faults
def test_f32_hangup(bench):
    with experiment("F32", "terminal gone, SIGHUP, and SIGHUP with nohup") as row:
        for command in ("start", "launch"):
            verb = "train" if command == "start" else "launch"
            own = fresh(bench, verb)
            with row.ours.trial(f"{verb}, terminal gone"):
                gone = own.folder / "gone"
                wrap = (sys.executable, str(HERE / "terminal.py"), str(gone))
                process = getattr(own, command)("terminal", *UNSAVED, wrap=wrap)
                process.wait_for_step(5)
                gone.touch()
                check_saved(process.end(30), process.out)
            with row.ours.trial(f"{verb}, SIGHUP repeatedly"):
                process = getattr(own, command)("signal", *UNSAVED)
                process.wait_for_step(5)
                for _ in range(3):
                    process.signal(signal.SIGHUP)
                check_saved(process.end(30), process.out)
            with row.ours.trial(f"{verb}, SIGHUP with nohup, then SIGTERM"):
                process = getattr(own, command)("nohup", *UNSAVED, wrap=("nohup",))
                process.wait_for_step(5)
                process.signal(signal.SIGHUP)
                process.wait_for_step(last_step(process.out) + 5)
                process.signal(signal.SIGTERM)
                check_saved(process.end(30), process.out)
