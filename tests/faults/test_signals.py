"""SIGTERM, SIGINT and SIGHUP in every phase: the last step is saved, exit code 75, nothing lost."""

import signal
import time
from pathlib import Path

import pytest
from harness import (
    PLAIN_SHORT,
    SHORT,
    check_clean,
    check_done,
    check_exact,
    check_stopped,
    copy_of,
    experiment,
    is_complete,
    last_step,
    steps_of,
)

# Seconds until the exit. The tests allow twice as long, for a busy machine.
GRACE = 10


def has_loaded(process, library):
    """Return whether the process has loaded a library."""
    try:
        return library in Path(f"/proc/{process.process.pid}/maps").read_text()
    except OSError:
        return False


def during_import(bench, _):
    process = bench.start("run", *SHORT)
    process.wait_for(lambda: has_loaded(process, "jaxlib"), "the import of JAX")
    return process


def during_compilation(bench, _):
    empty = bench.folder / "empty-cache"
    empty.mkdir(mode=0o700)
    process = bench.start("run", *SHORT, JAX_COMPILATION_CACHE_DIR=str(empty))
    process.wait_for_line("compiling the step")
    return process


def during_steps(bench, _):
    process = bench.start("run", *SHORT, "--pause", "0.2")
    process.wait_for_step(6)
    return process


def during_save(bench, _):
    process = bench.start("run", *SHORT, "--pause", "0.2")
    process.wait_for_file(process.out / "checkpoints" / "8.tmp")
    return process


def during_evaluation(bench, _):
    process = bench.start("run", *SHORT, "--eval-pause", "0.5")
    process.wait_for_step(10)
    time.sleep(0.5)
    return process


def during_data(bench, _):
    stall = bench.folder / "stall"
    stall.touch()
    process = bench.start("run", *SHORT, "--stall-at", "13", STALL=str(stall))
    process.wait_for_file(Path(f"{stall}.reached"))
    process.wait_for_step(12)
    time.sleep(0.5)
    return process


def during_restore(bench, straight):
    copy_of(straight, bench, "run", without=(20,))
    process = bench.start("run", *SHORT, SHARDWISE_FAILPOINT="restore:1:hang")
    process.wait_for_line("at step 16")
    time.sleep(0.5)
    return process


PHASES = {
    "import": during_import,
    "compilation": during_compilation,
    "steps": during_steps,
    "save": during_save,
    "evaluation": during_evaluation,
    "data": during_data,
    "restore": during_restore,
}


@pytest.mark.faults
def test_f07_signal_in_every_phase(bench, straight, straight_plain, tmp_path_factory):
    expected = straight(*SHORT)
    with experiment(
        "F07", "SIGTERM, SIGINT, SIGHUP and a second signal, in every phase"
    ) as row:
        slowest = 0.0
        cases = [(phase, signal.SIGTERM) for phase in PHASES] + [
            ("steps", signal.SIGINT),
            ("compilation", signal.SIGINT),
            ("steps", signal.SIGHUP),
            ("compilation", signal.SIGHUP),
        ]
        for phase, number in cases:
            with row.ours.trial(f"{number.name} during {phase}"):
                own = type(bench)(tmp_path_factory.mktemp("signal"), bench.cache)
                process = PHASES[phase](own, expected)
                began = time.monotonic()
                process.signal(number)
                ended = process.end(2 * GRACE)
                slowest = max(slowest, time.monotonic() - began)
                check_stopped(ended)
                out = process.out
                finished = last_step(out)
                # During a restore the log is still that of the previous run.
                if finished and phase != "restore":
                    assert steps_of(out)[-1:] == [finished], (
                        f"finished {finished}, saved {steps_of(out)}: {ended.message}"
                    )
                    assert is_complete(out / "checkpoints" / str(finished))
                (own.folder / "stall").unlink(missing_ok=True)
                check_done(own.train("run", *SHORT))
                check_exact(out, expected, 20)
                check_clean(out)
        with row.ours.trial("a second SIGTERM in an evaluation that hangs"):
            process = bench.start("run", *SHORT, SHARDWISE_FAILPOINT="evaluate:1:hang")
            process.wait_for_step(10)
            process.signal(signal.SIGTERM)
            time.sleep(1)
            assert process.process.poll() is None
            process.signal(signal.SIGTERM)
            began = time.monotonic()
            ended = process.end(2 * GRACE)
            assert time.monotonic() - began < 3
            assert ended.code != 0
            assert "second signal" in ended.err, ended.message
            check_done(bench.train("run", *SHORT))
            check_exact(process.out, expected, 20)
            check_clean(process.out)
        row.note = f"slowest exit {slowest:.1f} s after the signal"

        plain = straight_plain(*PLAIN_SHORT)
        for number in (signal.SIGTERM, signal.SIGINT):
            with row.plain.trial(f"{number.name} during steps"):
                process = bench.start_plain(
                    f"plain{number}", *PLAIN_SHORT, "--pause", "0.2"
                )
                process.wait_for_step(6)
                process.signal(number)
                ended = process.end()
                finished = last_step(process.out)
                saved = steps_of(process.out)[-1:]
                check_done(bench.plain(process.out.name, *PLAIN_SHORT))
                check_exact(process.out, plain, 20, merged=True)
                assert saved == [finished], (
                    f"rc {ended.code}; finished {finished}, saved {saved}"
                )
