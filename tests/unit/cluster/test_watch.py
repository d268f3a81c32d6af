"""Processes agree on where to stop, and who is stuck is judged by what is done. JAX's real coordinator, with a client for each process."""

import random
import threading
import time

import pytest
from jax._src.lib import _jax

from shardwise.cluster import stragglers as pace
from shardwise.cluster.group import ProcessGroup, wait_for
from shardwise.cluster.launch import free_port, group_code
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch

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
    names = tuple(f"host{i // 2}" for i in range(COUNT))
    yield [
        ProcessGroup(i, COUNT, client, address, names, tuple(j // 2 for j in range(COUNT)))
        for i, client in enumerate(clients)
    ]
    for client in clients:
        client.shutdown()
    service.shutdown()


def together(groups, work):
    """`work(group)` in a thread for each process; what they return."""
    results = {}
    threads = [
        threading.Thread(target=lambda group=group: results.update({group.index: work(group)}))
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == COUNT, "one of them waits for ever"
    return [results[index] for index in range(COUNT)]


def test_union_and_share_give_all_the_same(groups):
    assert (
        together(groups, lambda group: group.union("numbers", group.index**2))
        == [[0, 1, 4, 9]] * COUNT
    )
    assert (
        together(groups, lambda group: group.share("word", f"from {group.index}"))
        == ["from 0"] * COUNT
    )
    other = [group.within("elsewhere") for group in groups]
    assert together(other, lambda group: group.share("word", "another")) == ["another"] * COUNT
    groups[0].drop("numbers")
    assert groups[1].read("numbers") == {}


@pytest.mark.parametrize("seed", range(4))
def test_all_stop_and_save_at_the_same_point_whatever_their_speed(groups, seed):
    """Each ticks at a speed of its own, one far ahead of the others perhaps; any of them asks, perhaps two at once."""
    chance = random.Random(seed)  # noqa: S311
    askers = {
        chance.randrange(COUNT): chance.randrange(30),
        chance.randrange(COUNT): chance.randrange(30),
    }
    pauses = [chance.choice([0.001, 0.003, 0.01]) for _ in range(COUNT)]

    def work(group):
        watch = Watch(group, Stop())
        watch.group = group.within(f"seed{seed}")
        watch._start(watch._watch, "watch")
        saved = []
        for tick in range(100_000):
            watch.tick(f"step {tick}")
            if group.is_first and tick == 5:
                watch.ask("save")
            if askers.get(group.index) == tick:
                watch.stop.requested = True
            if watch.takes_save():
                saved.append(tick)
            if watch.is_stopping():
                wait_for(lambda: False, 0.3)  # the others may still need an answer
                watch._closing.set()
                return tick, saved
            time.sleep(pauses[group.index])
        return None

    found = together(groups, work)
    stop, saved = found[0]
    assert found == [(stop, saved)] * COUNT
    assert stop >= min(askers.values())
    assert len(saved) <= 1  # none, if they stop before


def beats(*rows):
    named = [
        {"count": count, "phase": f"phase {count}", "idle": idle, "limit": limit}
        for count, idle, limit in rows
    ]
    return dict(enumerate(named))


@pytest.mark.parametrize(
    ("rows", "who"),
    [
        ([(9, 90, 60), (9, 90, 60), (9, 90, 60), (9, 90, 60)], "all processes are stuck: phase 9"),
        (
            [(9, 90, 60), (8, 90, 60), (9, 90, 60), (9, 90, 60)],
            "process 1 on host0 is stuck: phase 8",
        ),
        (
            [(9, 90, 60), (8, 90, 60), (9, 90, 60), (8, 70, 60)],
            "process 1 on host0 and process 3 on host1 are stuck: phase 8",
        ),
        (
            [(9, 900, 60), (8, 1, 60), (9, 900, 60), (9, 900, 60)],
            "",
        ),  # 1 is behind and busy: compiling, perhaps
        ([(9, 900, 60), (8, 90, 60), (9, 900, 60), (8, 1, 60)], ""),  # 3 is as far behind, and busy
        ([(9, 90, 60), (9, 90, 600), (9, 90, 60), (9, 90, 60)], ""),  # it has seen longer steps
    ],
)
def test_only_those_who_are_behind_and_idle_are_stuck(groups, rows, who):
    text = Watch(groups[0], Stop())._judge(beats(*rows))
    assert text.startswith(who)
    assert bool(text) == bool(who)


def test_nobody_is_judged_before_all_have_been_heard_or_without_a_limit(groups):
    stuck = beats((9, 90, 60), (9, 90, 60), (9, 90, 60), (9, 90, 60))
    assert Watch(groups[0], Stop())._judge({index: stuck[index] for index in range(3)}) == ""
    assert Watch(groups[0], Stop(), limit=0)._judge(stuck) == ""


def test_a_process_that_says_nothing_more_grows_idle(groups):
    watch = Watch(groups[0], Stop())
    stuck = beats((9, 0, 0.2), (8, 0, 0.2), (9, 0, 0.2), (9, 0, 0.2))
    assert watch._judge(stuck) == ""
    time.sleep(0.3)
    assert "process 1 on host0 is stuck" in watch._judge(stuck)


def test_who_has_waited_for_another_is_not_stuck_when_that_one_passes_it(groups):
    watch, rest = Watch(groups[0], Stop()), [(6, 0.1, 15)] * 2
    assert (
        watch._judge(beats((5, 16.0, 15), (4, 0.0, 15), *rest)) == ""
    )  # the first waits for the second, which compiles
    assert (
        watch._judge(beats((5, 16.4, 15), (6, 0.1, 15), *rest)) == ""
    )  # they go on, and the beat of the first is half a second old


def test_work_counts_as_progress_where_nobody_knows_how_long_it_takes():
    watch = Watch(ProcessGroup(), Stop(), limit=10)
    watch.phase("compiling")
    watch._moved -= 100
    sum(i * i for i in range(2_000_000))  # more than a twentieth of a second of work
    assert watch._beat()["idle"] < 1
    watch.tick("step 1")
    watch._moved -= 100
    sum(i * i for i in range(2_000_000))
    assert watch._beat()["idle"] > 99  # a step is short, or it is stuck


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


def test_slow_processes_are_named_once(groups, monkeypatch):
    monkeypatch.setattr(pace, "TELL", 0.02)
    monkeypatch.setattr(pace, "JUDGE", 0.1)
    speeds = iter([1e12, 1e12, 1e12, 0.6e12])
    monkeypatch.setattr(pace, "measure_speed", lambda: next(speeds))
    paces = [pace.Stragglers(group.within("pace")) for group in groups]
    began, said = time.monotonic(), []
    while time.monotonic() - began < 1.0:
        passed = time.monotonic() - began
        for index, one in enumerate(paces):
            said += one.look(waited=passed * (0.5 if index == 2 else 0.02))
        time.sleep(0.01)
    assert [text.partition(":")[0] for text in said] == [
        "process 3 on host1 computes slowly",
        "process 2 on host1 reads its data too slowly",
    ]
    assert "at 60% of the speed of the others" in said[0]
    assert "and all others wait for it" in said[1]


def test_the_speed_of_a_device_is_measured():
    assert 1e8 < pace.measure_speed() < 1e16
