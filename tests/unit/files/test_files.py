"""The lock of a run directory, and files that are whole or not there."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from shardwise.errors import CheckpointError, DirectoryInUseError
from shardwise.files.durable import check_writable, write_atomically
from shardwise.files.lock import check_unlocked, lock_directory

HOLD = """
import sys, time
from pathlib import Path
from shardwise.files.lock import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def holder(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_told_who_holds_the_lock_and_a_killed_one_holds_nothing(tmp_path):
    process = holder(tmp_path)
    for attempt in (lambda: lock_directory(tmp_path).__enter__(), lambda: check_unlocked(tmp_path)):
        with pytest.raises(
            DirectoryInUseError, match=rf"is used by process {process.pid} on .* since \d+ s"
        ):
            attempt()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    check_unlocked(tmp_path)
    with lock_directory(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == ""


def test_the_lock_of_another_machine_needs_force(tmp_path):
    (tmp_path / "lock").write_text(
        json.dumps({"pid": 1, "host": "far", "boot_id": "another", "started": time.time() - 60})
    )
    with (
        pytest.raises(
            DirectoryInUseError,
            match=r"not left in order, by process 1 on far since 60 s\. .*--force-unlock",
        ),
        lock_directory(tmp_path),
    ):
        pass
    with lock_directory(tmp_path, force=True):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_job_takes_over_its_own_lock_from_another_machine(tmp_path, monkeypatch):
    left = json.dumps(
        {
            "pid": 1,
            "host": "far",
            "boot_id": "another",
            "started": time.time() - 60,
            "job": "slurm-7",
        }
    )
    (tmp_path / "lock").write_text(left)
    monkeypatch.setenv("SHARDWISE_JOB", "slurm-8")
    with pytest.raises(DirectoryInUseError), lock_directory(tmp_path):
        pass
    monkeypatch.setenv("SHARDWISE_JOB", "slurm-7")
    with lock_directory(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["job"] == "slurm-7"


def test_a_lock_that_is_not_json_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("[" * 5000)
    with lock_directory(tmp_path):
        pass


def test_of_processes_that_start_together_one_gets_in(tmp_path):
    code = HOLD.replace("time.sleep(60)", "sys.stdin.read()")
    many = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    time.sleep(0.1)
    deadline = time.time() + 30
    while sum(process.poll() is None for process in many) > 1 and time.time() < deadline:
        time.sleep(0.05)
    alive = [process for process in many if process.poll() is None]
    assert len(alive) == 1
    outputs = [process.communicate("")[1] for process in many]
    assert sum("DirectoryInUseError" in text for text in outputs) == 5


def test_writing_is_whole_and_a_bad_directory_is_named(tmp_path):
    write_atomically(tmp_path / "a", "one")
    write_atomically(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(CheckpointError, match=r"a/b/c cannot be written: Not a directory"):
        check_writable(tmp_path / "a" / "b" / "c")
    check_writable(tmp_path / "new" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
