"""Runs on Grain pipelines that are killed resume bit for bit, with worker processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cluster.launch import free_port

HERE = Path(__file__).parent
STEPS = 16
# Seconds for a start of the processes.
TIMEOUT = 600
KINDS = ("MapDataset", "IterDataset", "DataLoader")


class Group:
    """Processes of `grain_runs.py` that train together."""

    def __init__(self, folder, count, *runs):
        address = f"127.0.0.1:{free_port()}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
        self.folder = folder
        self.processes = []
        self.logs = []
        for index in range(count):
            log = folder / f"{'.'.join(runs).replace('/', '-')}.{count}.{index}.log"
            command = [sys.executable, HERE / "grain_runs.py", address, count, index]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*map(str, command), str(folder), *runs],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)
            self.logs.append(log)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()

    def wait(self):
        """Wait until all processes have ended well."""
        for process in self.processes:
            process.wait(timeout=TIMEOUT)
        assert [p.returncode for p in self.processes] == [0] * len(self.processes), (
            "\n".join(log.read_text()[-3000:] for log in self.logs)
        )

    def kill_at(self, name, step):
        """Kill all processes as soon as the run has written the record of a step."""
        metrics = self.folder / name / "metrics.jsonl"
        until = time.monotonic() + TIMEOUT
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            ended = [p.poll() for p in self.processes if p.poll() is not None]
            assert not ended, "\n".join(log.read_text()[-3000:] for log in self.logs)
            assert time.monotonic() < until, "no such step"
            time.sleep(0.02)
        workers = [pid for p in self.processes for pid in children(p.pid)]
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            assert process.wait() == -signal.SIGKILL
        return workers


def children(pid):
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def losses(folder):
    """The loss of each step; a resumed run writes some steps again."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def results(folder, name, count):
    files = [folder / f"{name}.{count}.{index}.json" for index in range(count)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grain")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_killed_runs_resume_bit_for_bit(folder, count):
    """Each start finishes the run that was killed before, and is killed in the next."""
    pending = [f"{kind}/straight-{kind}-{count}/{STEPS}" for kind in KINDS]
    for kind in KINDS:
        killed = f"{kind}/killed-{kind}-{count}/{STEPS}"
        with Group(folder, count, *pending, killed) as group:
            workers = group.kill_at(f"killed-{kind}-{count}", 8)
        # A resource tracker, and what the kind of data starts.
        assert (
            len(workers)
            >= {"MapDataset": 0, "IterDataset": 2, "DataLoader": 3}[kind] * count
        )
        until = time.monotonic() + 20
        while any(map(is_running, workers)):
            assert time.monotonic() < until, "workers outlive the process they work for"
            time.sleep(0.1)
        pending = [killed]
    with Group(folder, count, *pending) as group:
        group.wait()
    for kind in KINDS:
        straight, killed = (f"{how}-{kind}-{count}" for how in ("straight", "killed"))
        expected = losses(folder / straight)
        assert len(set(expected.values())) == STEPS
        assert losses(folder / killed) == expected
        assert results(folder, killed, count) == results(folder, straight, count)
        starts = (folder / killed / "starts.jsonl").read_text().splitlines()
        assert json.loads(starts[0])["step"] == 0
        assert 3 <= json.loads(starts[1])["step"] < STEPS


@pytest.mark.slow
def test_the_number_of_processes_may_change_if_all_have_complete_batches(folder):
    runs = ("complete/changed/6", "DataLoader/sharded/6", "MapDataset/map/6")
    with Group(folder, 2, *runs) as group:
        group.wait()
    saved = folder / "changed" / "checkpoints" / "6" / "data"
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["process_0-of-2.json", "process_1-of-2.json"]
    runs = ("complete/changed/12", "DataLoader/sharded/12", "MapDataset/map/12")
    with Group(folder, 1, *runs, "complete/one/12", "MapDataset/one-map/12") as group:
        group.wait()
    for changed, straight in (("changed", "one"), ("map", "one-map")):
        expected = losses(folder / straight)
        found = losses(folder / changed)
        assert found == pytest.approx(expected, rel=1e-5)
        assert len(expected) == 12
    (one,), (two,) = (results(folder, name, 1) for name in ("one", "changed"))
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    (refused,) = results(folder, "sharded", 1)
    assert "saved by 2 processes, each with the position of its own" in refused["error"]
    assert "Start 2 processes." in refused["error"]
    assert not refused["compiled"]
