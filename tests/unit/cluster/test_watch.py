"""Processes agree on where to stop, and a stuck process is recognized by what it does.

The tests use JAX's real coordinator, with one client per process.
"""

import random
import threading
import time

import pytest
from jax._src.lib import _jax

from shardwise.cluster import stragglers
from shardwise.cluster.agreement import SAVE
from shardwise.cluster.group import ProcessGroup, wait_for
from shardwise.cluster.launch import free_port, group_code
from shardwise.cluster.signals import Stop
from shardwise.cluster.stuck import Beat, ProcessProgress, StuckDetector
from shardwise.cluster.watch import Watch, _exit_code
from shardwise.rundir.phases import Phase

COUNT = 4


@pytest.fixture(scope="module")
def groups():
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(
        address, COUNT, heartbeat_timeout=60, shutdown_timeout=10, recoverable=True
    )
    clients = [
        _jax.get_distributed_runtime_client(
            address, i, init_timeout=30, heartbeat_timeout=60, use_compression=True
        )
        for i in range(COUNT)
    ]
    threads = [threading.Thread(target=client.connect) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hosts = tuple(f"host{i // 2}" for i in range(COUNT))
    machines = tuple(i // 2 for i in range(COUNT))
    yield [
        ProcessGroup(i, COUNT, client, address, hosts, machines)
        for i, client in enumerate(clients)
    ]
    for client in clients:
        client.shutdown()
    service.shutdown()


def run_all(groups, work):
    """Run `work(group)` in one thread per process, and return the results in order."""
    results = {}
    threads = [
        threading.Thread(
            target=lambda group=group: results.update({group.index: work(group)})
        )
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == COUNT, "a process waits forever"
    return [results[index] for index in range(COUNT)]


def test_union_and_share_return_the_same_in_all_processes(groups):
    squares = run_all(groups, lambda group: group.union("numbers", group.index**2))
    assert squares == [[0, 1, 4, 9]] * COUNT
    words = run_all(groups, lambda group: group.share("word", f"from {group.index}"))
    assert words == ["from 0"] * COUNT
    others = [group.within("elsewhere") for group in groups]
    words = run_all(others, lambda group: group.share("word", "another"))
    assert words == ["another"] * COUNT
    groups[0].drop("numbers")
    assert groups[1].read("numbers") == {}


def make_watch(group, name):
    """Return a watch with keys under `name`: here all processes share one counter of watches."""
    watch = Watch(group, Stop())
    watch.group = watch.agreement.group = group.within(name)
    return watch


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_all_processes_stop_and_save_at_the_same_point_at_any_speed(groups, seed):
    """Each process ticks at its own speed; one may be far ahead, and two may ask at once."""
    rng = random.Random(seed)  # noqa: S311
    # The tick at which a process receives a signal.
    signals = {
        rng.randrange(COUNT): rng.randrange(30),
        rng.randrange(COUNT): rng.randrange(30),
    }
    pauses = [rng.choice([0.001, 0.003, 0.01]) for _ in range(COUNT)]

    def work(group):
        watch = make_watch(group, f"seed{seed}")
        watch._start_thread(watch._watch, "watch")
        saved = []
        for tick in range(100_000):
            watch.tick(f"step {tick}")
            if group.is_first and tick == 5:
                watch.ask(SAVE)
            if signals.get(group.index) == tick:
                watch.stop.requested = True
            if watch.takes_save():
                saved.append(tick)
            if watch.is_stopping():
                # The others may still need an answer.
                wait_for(lambda: False, 0.3)
                watch._closing.set()
                return tick, saved
            time.sleep(pauses[group.index])
        return None

    results = run_all(groups, work)
    stop, saved = results[0]
    assert results == [(stop, saved)] * COUNT
    assert stop >= min(signals.values())
    # None, if they stop before the point of the save.
    assert len(saved) <= 1


def beats(*rows):
    """Return a beat for each `(count, idle, limit)`."""
    return {
        index: Beat(count, f"phase {count}", idle, limit)
        for index, (count, idle, limit) in enumerate(rows)
    }


@pytest.mark.parametrize(
    ("rows", "who"),
    [
        (
            [(9, 90, 60), (9, 90, 60), (9, 90, 60), (9, 90, 60)],
            "all processes are stuck: phase 9",
        ),
        (
            [(9, 90, 60), (8, 90, 60), (9, 90, 60), (9, 90, 60)],
            "process 1 on host0 is stuck: phase 8",
        ),
        (
            [(9, 90, 60), (8, 90, 60), (9, 90, 60), (8, 70, 60)],
            "process 1 on host0 and process 3 on host1 are stuck: phase 8",
        ),
        # Process 1 is behind and busy; it may be compiling.
        ([(9, 900, 60), (8, 1, 60), (9, 900, 60), (9, 900, 60)], ""),
        # Process 3 is as far behind, and busy.
        ([(9, 900, 60), (8, 90, 60), (9, 900, 60), (8, 1, 60)], ""),
        # Process 1 has seen longer steps.
        ([(9, 90, 60), (9, 90, 600), (9, 90, 60), (9, 90, 60)], ""),
    ],
)
def test_only_processes_that_are_behind_and_idle_are_stuck(groups, rows, who):
    text = StuckDetector(groups[0], 300).judge(beats(*rows))
    assert text.startswith(who)
    assert bool(text) == bool(who)


def test_nobody_is_stuck_before_all_were_heard_or_without_a_limit(groups):
    stuck = beats((9, 90, 60), (9, 90, 60), (9, 90, 60), (9, 90, 60))
    assert (
        StuckDetector(groups[0], 300).judge({index: stuck[index] for index in range(3)})
        == ""
    )
    assert StuckDetector(groups[0], 0).judge(stuck) == ""


def test_a_silent_process_becomes_idle(groups):
    detector = StuckDetector(groups[0], 300)
    stuck = beats((9, 0, 0.2), (8, 0, 0.2), (9, 0, 0.2), (9, 0, 0.2))
    assert detector.judge(stuck) == ""
    time.sleep(0.3)
    assert "process 1 on host0 is stuck" in detector.judge(stuck)
    assert detector.seconds_since_beat(1) >= 0.3


def test_a_process_that_waited_for_another_is_not_stuck_when_that_one_passes_it(groups):
    detector, rest = StuckDetector(groups[0], 300), [(6, 0.1, 15)] * 2
    # The first process waits for the second, which compiles.
    assert detector.judge(beats((5, 16.0, 15), (4, 0.0, 15), *rest)) == ""
    # Both continue, and the beat of the first is half a second old.
    assert detector.judge(beats((5, 16.4, 15), (6, 0.1, 15), *rest)) == ""


def test_work_counts_as_progress_in_phases_of_unknown_length():
    progress = ProcessProgress(limit=10)
    progress.enter(Phase.COMPILING, is_step=False)
    progress.moved -= 100
    # More than 0.05 s of work.
    sum(i * i for i in range(2_000_000))
    assert progress.beat(1).idle < 1
    # A step is short, or it is stuck.
    progress.enter(Phase.STEP.at(1), is_step=True)
    progress.moved -= 100
    sum(i * i for i in range(2_000_000))
    assert progress.beat(2).idle > 99


def test_the_limit_of_a_step_grows_with_the_longest_step():
    progress = ProcessProgress(limit=10)
    for step in (1, 2, 3):
        progress.enter(Phase.STEP.at(step), is_step=True)
        progress.moved -= 5 if step == 2 else 0
    assert 50 <= progress.beat(3).limit < 60
    progress.enter(Phase.SAVING.at(3), is_step=False)
    assert progress.beat(4).limit == 10


def test_the_phases_of_a_start_end_with_the_first_step():
    watch = Watch(ProcessGroup(), Stop(), began=1.0)
    watch.phase(Phase.PREPARING)
    watch.phase(Phase.STEP.at(7))
    watch.phase(Phase.SAVING.at(7))
    assert [name for name, _ in watch.start] == [
        Phase.IMPORTING,
        Phase.PREPARING,
        Phase.FIRST_STEP,
    ]
    assert watch.start[0] == ("importing", 1.0)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([6, -9], 6),
        ([-9, 0], 6),
        ([3, 6], 3),
        ([1, 6], 1),
        ([2, 2], 2),
        ([134, 6], 6),
        ([-15, 75], 6),
    ],
)
def test_the_exit_code_of_a_group(codes, code):
    assert group_code(codes) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("a message"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_the_exit_code_of_an_exception(error, code):
    assert _exit_code(error) == code


def test_stragglers_are_named_once(groups, monkeypatch):
    monkeypatch.setattr(stragglers, "REPORT_INTERVAL", 0.02)
    monkeypatch.setattr(stragglers, "COMPARE_INTERVAL", 0.1)
    # Two measurements of each process. The second process is slow once, which is chance.
    speeds = iter([1e12, 0.1e12, 1e12, 0.6e12, 1e12, 1e12, 1e12, 0.6e12])
    monkeypatch.setattr(stragglers, "measure_speed", lambda: next(speeds))
    processes = [stragglers.Stragglers(group.within("pace")) for group in groups]
    started, warnings = time.monotonic(), []
    while time.monotonic() - started < 1.0:
        passed = time.monotonic() - started
        for index, process in enumerate(processes):
            warnings += process.look(waited=passed * (0.5 if index == 2 else 0.02))
        time.sleep(0.01)
    assert [text.partition(":")[0] for text in warnings] == [
        "process 3 on host1 computes slowly",
        "process 2 on host1 reads its data too slowly",
    ]
    assert "at 60% of the speed of the others" in warnings[0]
    assert "and all others wait for it" in warnings[1]


def test_a_process_that_starts_slowly_is_not_a_straggler(groups, monkeypatch):
    monkeypatch.setattr(stragglers, "REPORT_INTERVAL", 0.02)
    monkeypatch.setattr(stragglers, "COMPARE_INTERVAL", 0.1)
    state = {"starting": True, "index": 0}

    def measure():
        # Another process on its machine is still compiling.
        return 1e11 if state["starting"] and state["index"] == 0 else 1e12

    monkeypatch.setattr(stragglers, "measure_speed", measure)
    processes = []
    for index, group in enumerate(groups):
        state["index"] = index
        processes.append(stragglers.Stragglers(group.within("starting pace")))
    state["starting"] = False
    warnings, started = [], time.monotonic()
    while time.monotonic() - started < 0.5:
        for process in processes:
            warnings += process.look(waited=0.0)
        time.sleep(0.01)
    assert warnings == []


def test_the_speed_of_a_device_is_measured():
    assert 1e8 < stragglers.measure_speed() < 1e16
