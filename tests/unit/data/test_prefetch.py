"""Prefetch gives the same batches, ahead of need, whoever works."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import Batches, Prefetch, Stream, Tokens, json_lines, open_tokens
from shardwise.errors import ConfigError, DataError


def vector(record):
    return {"x": np.array(record["x"])}


def pid_of(step):
    return {"pid": os.getpid(), "thread": threading.get_ident()}


def fails_at_3(step):
    if step == 3:
        raise KeyError("no such row")
    return step


def dies_at_3(step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step


def sleeps(step):
    time.sleep(3600)


@pytest.mark.parametrize(
    "workers",
    [{"threads": 1}, {"threads": 5}, {"processes": 2}, {"threads": 3, "depth": 9}],
)
def test_workers_do_not_change_batches(tmp_path, workers):
    np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16).tofile(
        tmp_path / "tokens.bin"
    )
    batches = Batches(
        Tokens(open_tokens(tmp_path / "tokens.bin", "uint16"), 16), 8, seed=3
    )
    with Prefetch(batches, 10, 60, **workers) as prefetch:
        for step in range(10, 60):
            found, expected = prefetch(step), batches(step)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_batches_are_placed_ahead_of_need_but_no_further_than_depth():
    placed = []
    with Prefetch(
        lambda step: step,
        0,
        100,
        place=lambda batch: placed.append(batch) or -batch,
        depth=3,
    ) as prefetch:
        time.sleep(0.2)
        assert placed == [0, 1, 2]
        assert prefetch(0) == 0
        assert prefetch(1) == -1
        time.sleep(0.2)
        assert placed == [0, 1, 2, 3, 4]


def test_waiting_is_measured():
    with Prefetch(lambda step: time.sleep(0.1), 0, 3) as prefetch:
        time.sleep(0.5)
        prefetch(0)
        assert prefetch.waited < 0.05
        prefetch(1)
        prefetch(2)
    with Prefetch(lambda step: time.sleep(0.2), 0, 3) as prefetch:
        prefetch(0)
        prefetch(1)
        assert 0.3 < prefetch.waited < 0.9


@pytest.mark.parametrize("workers", [{"threads": 4}, {"processes": 1}])
def test_an_error_comes_at_its_step_and_unchanged(workers):
    with Prefetch(fails_at_3, 0, 10, **workers) as prefetch:
        assert [prefetch(step) for step in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="no such row"):
            prefetch(3)


def test_a_timeout_of_the_data_is_not_taken_for_one_of_the_wait():
    def times_out(step):
        raise TimeoutError("the bucket did not answer")

    with (
        Prefetch(times_out, 0, 1) as prefetch,
        pytest.raises(TimeoutError, match="bucket"),
    ):
        prefetch(0)


def test_processes_are_spawned_and_end_with_the_prefetch():
    with Prefetch(pid_of, 0, 10, processes=2) as prefetch:
        pids = {prefetch(step)["pid"] for step in range(10)}
    assert os.getpid() not in pids
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_dies_is_an_error():
    words = r"a data process \(pid \d+\) ended with exit code -9 in batch 3"
    with (
        Prefetch(dies_at_3, 0, 10, processes=1) as prefetch,
        pytest.raises(DataError, match=words),
    ):
        [prefetch(step) for step in range(10)]


def test_what_cannot_be_sent_to_a_process_is_refused():
    with (
        Prefetch(lambda step: step, 0, 10, processes=1) as prefetch,
        pytest.raises(ConfigError, match=r"cannot be sent to another process.*lambda"),
    ):
        prefetch(0)


@pytest.mark.parametrize("workers", [{"threads": 2}, {"processes": 1}])
def test_a_signal_handler_runs_while_waiting_and_a_stuck_worker_is_left_behind(workers):
    def stop(*_):
        raise InterruptedError

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        start = time.monotonic()
        with Prefetch(sleeps, 0, 10, **workers) as prefetch:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(InterruptedError):
                prefetch(0)
        assert time.monotonic() - start < 3
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_stream_is_called_in_order_by_one_thread():
    threads = []

    def numbers():
        for number in range(20):
            threads.append(threading.get_ident())
            yield number

    with Prefetch(Stream(numbers()), 0, 21, threads=4, processes=2) as prefetch:
        assert [prefetch(step) for step in range(20)] == list(range(20))
        with pytest.raises(DataError, match="the data ended after 20 batches"):
            prefetch(20)
    assert len(set(threads)) == 1


def test_steps_are_asked_for_in_order():
    with Prefetch(lambda step: step, 5, 8) as prefetch:
        for step in (4, 6, 8):
            with pytest.raises(
                DataError,
                match=f"batch {step} is needed, but 5 is next, and 7 is the last",
            ):
                prefetch(step)
        assert prefetch(5) == 5
    with pytest.raises(DataError, match="the prefetch is closed"):
        prefetch(6)


@pytest.mark.parametrize("workers", [{"threads": 3}, {"processes": 2}])
def test_skipped_records_are_counted_over_all_workers(tmp_path, workers):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            "broken\n" if n in (7, 23) else json.dumps({"x": n}) + "\n"
            for n in range(40)
        )
    )
    source = json_lines(path, vector)
    alone, together = Batches(source, 4, skip_bad=2), Batches(source, 4, skip_bad=2)
    with Prefetch(together, 0, 10, **workers) as prefetch:
        for step in range(10):
            assert np.array_equal(prefetch(step)["x"], alone(step)["x"])
    assert (
        set(together.skipped)
        == set(alone.skipped)
        == {f"'{path}', record {n}" for n in (7, 23)}
    )
    with (
        Prefetch(Batches(source, 4, skip_bad=1), 0, 10, **workers) as prefetch,
        pytest.raises(DataError, match="exceed skip_bad=1"),
    ):
        [prefetch(step) for step in range(10)]
