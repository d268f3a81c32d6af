"""Several processes: stop, kill or block one, then resume, also with another process count."""

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from harness import (
    PLAIN_SHORT,
    SHORT,
    batches,
    check_clean,
    check_done,
    check_exact,
    check_refused,
    child_of,
    experiment,
    fresh,
    last_step,
    listening,
    read_log,
    seeded,
    steps_of,
)

SLOW = (*SHORT, "--pause", "0.2")
PLAIN_SLOW = (*PLAIN_SHORT, "--pause", "0.2")
WATCHDOG = 20
SEED = 20261115


def check_resumes(bench, expected):
    """Check that the same command finishes the run and matches the undisturbed one."""
    for ended in bench.start_group("run", *SHORT).end():
        check_done(ended)
    check_exact(bench.folder / "run", expected, 20)
    check_clean(bench.folder / "run")


def check_lost(processes, ended, survivor, words, began, limit):
    """Check that the survivor ends in time, with one line that names the lost process."""
    seconds = time.monotonic() - began
    check_refused(ended[survivor], 6, *words)
    # No C++ stack trace.
    assert "@" not in ended[survivor].err, ended[survivor].message
    assert seconds < limit, f"after {seconds:.1f} s"
    return seconds


def f08(bench, expected, victim, step):
    """Send SIGTERM to one process, and return the seconds until both have ended."""
    processes = bench.start_group("run", *SLOW)
    processes.wait_for_step(step)
    began = time.monotonic()
    processes.signal(victim, signal.SIGTERM)
    ended = processes.end(30)
    seconds = time.monotonic() - began
    assert [one.code for one in ended] == [75, 75], [one.message for one in ended]
    assert sum(one.err.count("shardwise: ") for one in ended) == 1, [
        one.message for one in ended
    ]
    stopped = int(re.search(r"after step (\d+)", ended[0].err)[1])
    assert steps_of(bench.folder / "run")[-1] == stopped
    check_resumes(bench, expected)
    return seconds


@pytest.mark.faults
def test_f08_sigterm_to_one_of_two(bench, straight_pair):
    times = []
    with experiment("F08", "SIGTERM to one of two processes") as row:
        for number, (victim, step) in enumerate(
            [(1, 5), (0, 5), (1, 10), (0, 11), (1, 16), (0, 14)]
        ):
            with row.ours.trial(f"process {victim} after step {step}"):
                times.append(f08(fresh(bench, number), straight_pair, victim, step))
        with row.plain.trial("process 1 after step 5"):
            processes = bench.start_plain_group("plain", *PLAIN_SLOW)
            processes.wait_for_step(5)
            processes.signal(1, signal.SIGTERM)
            ended = processes.end(30)
            assert [one.code for one in ended] == [75, 75], [
                (one.code, one.message[-150:]) for one in ended
            ]
        row.note = (
            f"both saved the same step and ended after at most {max(times):.1f} s"
        )


CHAIN = (
    "--batch-size",
    "8",
    "--accumulate",
    "1",
    "--save-every",
    "5",
    "--eval-every",
    "20",
)


def check_chain(bench, row, chain, *more):
    """Run (processes, devices each, mesh) one after the other, each killed after 10 steps or more.

    Compare the result with an undisturbed run. `more` are arguments of the recipe.
    """

    args = (*CHAIN, "--steps", 10 * len(chain), *more)

    def layout(devices, mesh):
        return ("--cpu-devices", str(devices), "--mesh", mesh)

    with row.ours.trial("undisturbed run"):
        check_done(
            bench.launch("straight", *args, count=1, layout=layout(8, "data=8")).end()
        )
    for number, (count, devices, mesh) in enumerate(chain):
        with row.ours.trial(f"{count} x {devices} devices as {mesh}"):
            processes = bench.start_group(
                "run",
                *args,
                "--pause",
                "0.1",
                count=count,
                layout=layout(devices, mesh),
            )
            if number == len(chain) - 1:
                for ended in processes.end():
                    check_done(ended)
                continue
            processes.wait_for_step(10 * (number + 1) + 1)
            processes.kill()
    with row.ours.trial("matches the undisturbed run"):
        ours, theirs = (logged(bench.folder / name) for name in ("run", "straight"))
        assert ours.keys() == theirs.keys()
        # Losses differ by 1e-6 to 4e-6, depending on the processor. Evaluations differ more,
        # also on one process: the gradient of a bias before BatchNorm is only rounding
        # error, which Adam scales to full steps.
        bounds = {"loss": 1e-5, "eval_loss": 1e-4}
        worst = {
            kind: max(
                abs(ours[key] - theirs[key]) / abs(theirs[key])
                for key in theirs
                if key[1] == kind
            )
            for kind in bounds
        }
        assert all(worst[kind] < bound for kind, bound in bounds.items()), worst
        assert batches(bench.folder / "run") == batches(bench.folder / "straight")
        row.note = (
            f"batches bit-identical, losses within {worst['loss']:.1e}, "
            f"evaluations within {worst['eval_loss']:.1e}"
        )


@pytest.mark.faults
def test_f17_topology_chain(bench):
    """Processes x devices: 1 x 8, 1 x 4, 1 x 1, 2 x 4, 4 x 2, 1 x 8; killed at each change."""
    chain = [
        (1, 8, "data=8"),
        (1, 4, "fsdp=4"),
        (1, 1, "data=1"),
        (2, 4, "data=4,fsdp=2"),
        (4, 2, "fsdp=8"),
        (1, 8, "data=2,fsdp=4"),
    ]
    with experiment(
        "F17", "another number of processes and devices, killed at each change"
    ) as row:
        check_chain(bench, row, chain)


@pytest.mark.faults
def test_f42_axes_chain(bench):
    """Tokens, experts and layers are sharded in turn, also across processes."""
    chain = [
        (1, 8, "data=8"),
        (1, 8, "data=2,context=4"),
        (1, 8, "fsdp=2,expert=4"),
        (2, 4, "stage=4,data=2"),
        (2, 4, "data=2,expert=2,context=2"),
        (4, 2, "context=8"),
        (2, 4, "fsdp=2,expert=4"),
        (1, 8, "data=8"),
    ]
    more = ("--experts", "4", "--depth", "4", "--width", "64")
    with experiment(
        "F42", "context, expert and stage axes in turn, killed at each change"
    ) as row:
        check_chain(bench, row, chain, *more)


def logged(out):
    """Return every logged loss, by step and name."""
    return {
        (record["step"], name): value
        for record in read_log(out)
        for name, value in record.items()
        if "loss" in name
    }


@pytest.mark.faults
def test_f18_killed_process(bench, straight_pair):
    times = {0: [], 1: []}
    with experiment("F18", "SIGKILL of one of two processes") as row:
        number = 0
        for victim, point in [
            (1, None),
            (0, None),
            (1, "checkpoint.arrays:2:kill"),
            (0, "checkpoint.rename:2:kill"),
            (1, "evaluate:2:kill"),
        ]:
            number += 1
            own = fresh(bench, number)
            with row.ours.trial(
                f"process {victim} {'at ' + point if point else 'in a step'}"
            ):
                processes = own.start_group(
                    "run",
                    *SLOW,
                    each={victim: {"SHARDWISE_FAILPOINT": point}} if point else None,
                )
                if point is None:
                    processes.wait_for_step(7)
                    processes.signal(victim, signal.SIGKILL)
                processes.started[victim].process.wait(120)
                began = time.monotonic()
                ended = processes.end(40)
                times[victim].append(
                    check_lost(
                        processes,
                        ended,
                        1 - victim,
                        [f"process {victim}", "lost"],
                        began,
                        15,
                    )
                )
                check_resumes(own, straight_pair)
        for victim in (1, 0):
            number += 1
            own = fresh(bench, number)
            with row.ours.trial(f"process {victim} of a launcher with restarts"):
                launcher = own.launch("run", *SLOW, restarts=3)
                launcher.wait_for_step(7)
                os.kill(child_of(launcher.process.pid, victim), signal.SIGKILL)
                ended = launcher.end()
                check_done(ended)
                assert f"process {victim} was ended by SIGKILL" in ended.err
                check_exact(own.folder / "run", straight_pair, 20)
        for victim in (1, 0):
            with row.plain.trial(f"process {victim} in a step"):
                processes = bench.start_plain_group(f"plain{victim}", *PLAIN_SLOW)
                processes.wait_for_step(7)
                processes.signal(victim, signal.SIGKILL)
                ended = processes.end(60)
                assert ended[1 - victim].code == 6, (
                    ended[1 - victim].code,
                    ended[1 - victim].message[-150:],
                )
        row.note = (
            f"the other one names it and ends after at most {max(times[1]):.1f} s "
            f"(process 0: {max(times[0]):.1f} s)"
        )


def kill_launcher(bench, step):
    """Kill a launcher, and return the seconds until its processes have ended, saved."""
    launcher = bench.launch("run", *SLOW, "--save-every", "0")
    launcher.wait_for_step(step)
    children = [child_of(launcher.process.pid, index) for index in range(2)]
    began = time.monotonic()
    launcher.signal(signal.SIGKILL)
    try:
        launcher.process.wait()
        while any(map(is_running, children)):
            assert time.monotonic() - began < 20, "the processes still run"
            time.sleep(0.05)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    seconds = time.monotonic() - began
    assert steps_of(launcher.out) == [last_step(launcher.out)]
    check_clean(launcher.out)
    return seconds


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.faults
def test_f34_failed_save(bench, straight_pair):
    with experiment("F34", "Orbax fails to save in one of two processes") as row:
        for victim in (1, 0):
            with row.ours.trial(f"process {victim}"):
                own = fresh(bench, victim)
                each = {victim: {"BREAK_SAVE": "2"}}
                ended = own.start_group("run", *SHORT, each=each).end(60)
                for one in ended:
                    check_done(one)
                message = f"could not be saved: process {victim}: [Errno 5]"
                assert message in ended[0].err, ended[0].message
                assert steps_of(own.folder / "run")[-1] == 20
                # The next start removes what Orbax may have left of the failed save.
                check_resumes(own, straight_pair)


@pytest.mark.faults
def test_f33_killed_launcher(bench, straight_pair):
    times = []
    with experiment("F33", "SIGKILL of the launcher of two processes") as row:
        for number in range(20):
            with row.ours.trial(f"trial {number + 1}", quiet=True):
                own = fresh(bench, number)
                times.append(kill_launcher(own, 3 + number % 7))
        with row.ours.trial("the same command resumes"):
            check_resumes(own, straight_pair)
        row.note = (
            f"both saved the same step and ended after at most {max(times):.1f} s"
        )


@pytest.mark.slow
def test_the_processes_of_a_killed_launcher_save_and_end(bench):
    kill_launcher(bench, 3)


@pytest.mark.faults
def test_f19_stuck_process(bench, straight_pair):
    times = []
    with experiment("F19", f"one of two processes stuck, watchdog {WATCHDOG} s") as row:
        stall = bench.folder / "stall"
        stall.touch()
        places = {
            "in a read of data": (
                {"STALL": str(stall)},
                ("--stall-at", "7"),
                "process 1 is stuck",
            ),
            "in an evaluation": (
                {"SHARDWISE_FAILPOINT": "evaluate:2:hang"},
                (),
                "process 1 is stuck",
            ),
            "at the end": (
                {"SHARDWISE_FAILPOINT": "end:1:hang"},
                (),
                "process 1 is stuck",
            ),
            # All wait for each other in one phase, and the first to be late is named, or all are.
            # Only the stacks show the cause.
            "while it saves": (
                {"SHARDWISE_FAILPOINT": "checkpoint.written:2:hang"},
                (),
                "stuck: saving",
            ),
            "while it loads": (
                {"SHARDWISE_FAILPOINT": "restore:1:hang"},
                (),
                "stuck: loading",
            ),
        }
        for number, (place, (environment, args, words)) in enumerate(places.items()):
            own = fresh(bench, number)
            with row.ours.trial(place):
                if place == "while it loads":
                    processes = own.start_group("run", *SLOW)
                    processes.wait_for_step(9)
                    processes.kill()
                processes = own.start_group(
                    "run", *SHORT, *args, "--watchdog", WATCHDOG, each={1: environment}
                )
                ended = processes.end(150)
                assert [one.code for one in ended] == [6, 6], [
                    one.message for one in ended
                ]
                for index, one in enumerate(ended):
                    assert words in one.err, one.message
                    assert "Traceback" not in one.err, one.message
                    stacks = (
                        own.folder / "run" / "stacks" / f"process-{index}.txt"
                    ).read_text()
                    assert "most recent call first" in stacks
                    assert "Thread" in stacks
                idle = float(re.search(r"for (\d+) s", ended[0].err)[1])
                times.append(idle)
                assert idle < WATCHDOG + 10
                if place != "at the end":
                    check_resumes(own, straight_pair)
        with row.plain.trial("in a read of data"):
            each = {1: {"STALL": str(stall)}}
            processes = bench.start_plain_group(
                "plain", *PLAIN_SLOW, "--stall-at", "7", each=each
            )
            processes.wait_for_step(7)
            assert [one.code for one in processes.end(60)] == [6, 6]
        own = fresh(bench, "stopped")
        with row.ours.trial("SIGSTOP"):
            processes = own.start_group("run", *SLOW)
            processes.wait_for_step(7)
            processes.signal(1, signal.SIGSTOP)
            began = time.monotonic()
            ended = processes.started[0].end(40)
            check_refused(ended, 6, "process 1", "lost")
            row.note = (
                f"detected after {max(times):.0f} s, "
                f"a suspended one after {time.monotonic() - began:.1f} s"
            )
            processes.kill()
            check_resumes(own, straight_pair)


@pytest.mark.faults
def test_no_false_alarm_for_long_phases(bench):
    """An evaluation may take longer than the watchdog limit while it makes progress."""
    with (
        experiment(
            "F19b",
            "long compilation, save and evaluation with a watchdog of 5 s: no false alarm",
        ) as row,
        row.ours.trial("to the end"),
    ):
        args = (
            "--steps",
            "6",
            "--save-every",
            "3",
            "--eval-every",
            "3",
            "--eval-pause",
            "2.0",
        )
        for ended in bench.start_group("run", *args, "--watchdog", "5").end():
            check_done(ended)


@pytest.mark.slow
def test_a_launcher_listens_on_loopback_only_and_a_signal_to_one_process_stops_both(
    bench,
):
    launcher = bench.launch("run", *SLOW)
    launcher.wait_for_step(2)
    children = [child_of(launcher.process.pid, index) for index in range(2)]
    assert set().union(*map(listening, children)) == set()
    os.kill(children[1], signal.SIGTERM)
    ended = launcher.end(60)
    check_refused(ended, 75, "after step")
    assert "[0] " in ended.err
    assert "[1] " not in ended.err
    assert steps_of(bench.folder / "run")[-1] == int(
        re.search(r"after step (\d+)", ended.err)[1]
    )
    check_clean(bench.folder / "run")


def test_a_mistake_is_reported_once(bench):
    check_refused(bench.launch("wrong", "--steps", "0").end(), 2, "steps=0")


@pytest.mark.faults
def test_f18_restarts_are_limited(bench):
    with (
        experiment(
            "F18b", "launcher whose runs are killed before they save: it gives up"
        ) as row,
        row.ours.trial("gives up"),
    ):
        launcher = bench.launch(
            "run",
            "--steps",
            "100000",
            "--save-every",
            "50000",
            "--pause",
            "0.05",
            restarts=50,
        )
        for _ in range(3):
            out = bench.folder / "run"
            before = len(read_starts(out))
            launcher.wait_for(
                lambda out=out, before=before: len(read_starts(out)) > before,
                "another start",
            )
            time.sleep(0.5)
            os.kill(child_of(launcher.process.pid, 1), signal.SIGKILL)
        ended = launcher.end(60)
        assert ended.code == 6
        assert "giving up" in ended.err


def read_starts(out):
    """Return the lines of starts.jsonl."""
    path = out / "starts.jsonl"
    return path.read_text().splitlines() if path.exists() else []


# A step takes at least as long as its pause.
ENDLESS = ("--steps", "1000000", "--save-every", "10", "--pause", "0.05")
GOODPUT_SECONDS, KILL_EVERY = 300, 20


def kills(began):
    """Wait for each time of a kill, counted from the first start, and yield whether to kill.

    The times are the same for all loops. The last one is the end, without a kill.
    """
    for seconds in range(KILL_EVERY, GOODPUT_SECONDS + 1, KILL_EVERY):
        time.sleep(max(began + seconds - time.monotonic(), 0))
        yield seconds < GOODPUT_SECONDS


def wait_for_child(launcher, index):
    """Return the pid of a process of a launcher, which may be restarting at the moment."""
    found = []

    def look():
        with suppress(AssertionError):
            found.append(child_of(launcher.process.pid, index))
        return found

    launcher.wait_for(look, f"process {index}")
    return found[0]


def goodput(launcher, out, random):
    """Kill one of two processes repeatedly.

    Returns:
        Useful steps, all steps, seconds, and the seconds of each recovery by the launcher.
    """
    began, executed, recoveries, lives, killed = time.monotonic(), 0, [], 0, None
    for kill in kills(began):
        starts = read_starts(out)
        # This start reached its training loop.
        if len(starts) > lives:
            begun = json.loads(starts[-1])
            executed += max(last_step(out) - begun["step"], 0)
            if killed is not None:
                recoveries.append(begun["time"] - killed)
        lives, killed = len(starts), time.time()
        if kill:
            os.kill(wait_for_child(launcher, random.randrange(2)), signal.SIGKILL)
    return max(steps_of(out), default=0), executed, time.monotonic() - began, recoveries


def plain_goodput(bench, out, random):
    """Do the same for the plain loop, with a supervisor.

    The supervisor ends the other process at once and restarts both.
    """
    began, processes = time.monotonic(), bench.start_plain_group(out.name, *ENDLESS)
    for kill in kills(began):
        processes.signal(random.randrange(2), signal.SIGKILL)
        processes.kill()
        if kill:
            processes = bench.start_plain_group(out.name, *ENDLESS)
    # The log has a line for each step of all starts.
    executed = (out / "metrics.jsonl").read_text().count("\n")
    return max(steps_of(out), default=0), executed, time.monotonic() - began


@pytest.mark.faults
def test_f26_goodput_of_two_processes(bench):
    random, notes = seeded(SEED), []
    with experiment(
        "F26d",
        f"SIGKILL of one of two processes every {KILL_EVERY} s "
        f"for {GOODPUT_SECONDS // 60} minutes",
    ) as row:

        def note(name, useful, executed, seconds, more=""):
            share = f"{useful * 0.05 / seconds:.0%} of the time at 50 ms per step"
            notes.append(
                f"{name}: {useful} of {executed} steps useful "
                f"({useful / executed:.0%}), {share}{more}"
            )
            assert useful > 0

        with row.ours.trial("shardwise launch"):
            launcher = bench.launch(
                "run", *ENDLESS, "--eval-every", "1000000", restarts=100
            )
            *found, recoveries = goodput(launcher, bench.folder / "run", random)
            note(
                "shardwise",
                *found,
                f", resuming {np.median(recoveries):.0f} s after a kill (median)",
            )
            launcher.signal(signal.SIGTERM)
            assert launcher.end(60).code == 75
            check_clean(bench.folder / "run")
        with row.plain.trial("the plain loop"):
            note("plain", *plain_goodput(bench, bench.folder / "plain", random))
        row.note = "; ".join(notes)
