"""The lock of a run directory, atomic writes, and checks before the first write."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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


def start_holder(directory):
    """Start a process that holds the lock for a minute."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_held_lock_names_its_owner_and_a_killed_owner_holds_nothing(tmp_path):
    process = start_holder(tmp_path)
    for attempt in (
        lambda: lock_directory(tmp_path).__enter__(),
        lambda: check_unlocked(tmp_path),
    ):
        with pytest.raises(
            DirectoryInUseError,
            match=rf"is in use by process {process.pid} on .*, started \d+ s ago",
        ):
            attempt()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    check_unlocked(tmp_path)
    with lock_directory(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="Linux only")
@pytest.mark.parametrize("content", ["", '{"pid": 1, "host": "far"}', "\x00{"])
def test_a_held_lock_names_its_owner_whatever_the_file_says(tmp_path, content):
    process = start_holder(tmp_path)
    (tmp_path / "lock").write_text(content)
    message = f"in use by process {process.pid} on {socket.gethostname()}"
    with pytest.raises(DirectoryInUseError, match=message):
        check_unlocked(tmp_path)
    process.kill()
    process.communicate()


def test_the_lock_of_another_machine_needs_force(tmp_path):
    owner = {"pid": 1, "host": "far", "boot_id": "another", "started": time.time() - 60}
    (tmp_path / "lock").write_text(json.dumps(owner))
    message = r"locked and not released by process 1 on far, started 60 s ago\. .*--force-unlock"
    with pytest.raises(DirectoryInUseError, match=message), lock_directory(tmp_path):
        pass
    with lock_directory(tmp_path, force=True):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_job_takes_over_its_own_lock_from_another_machine(tmp_path, monkeypatch):
    owner = {"pid": 1, "host": "far", "boot_id": "another", "started": time.time() - 60}
    (tmp_path / "lock").write_text(json.dumps({**owner, "job": "slurm-7"}))
    monkeypatch.setenv("SHARDWISE_JOB", "slurm-8")
    with pytest.raises(DirectoryInUseError), lock_directory(tmp_path):
        pass
    monkeypatch.setenv("SHARDWISE_JOB", "slurm-7")
    with lock_directory(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["job"] == "slurm-7"


def test_a_lock_file_that_is_not_json_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("[" * 5000)
    with lock_directory(tmp_path):
        pass


def test_one_of_several_processes_that_start_together_gets_the_lock(tmp_path):
    code = HOLD.replace("time.sleep(60)", "sys.stdin.read()")
    processes = [
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
    while (
        sum(process.poll() is None for process in processes) > 1
        and time.time() < deadline
    ):
        time.sleep(0.05)
    alive = [process for process in processes if process.poll() is None]
    assert len(alive) == 1
    errors = [process.communicate("")[1] for process in processes]
    assert sum("DirectoryInUseError" in text for text in errors) == 5


def test_writes_replace_the_content_and_leave_no_temporary_file(tmp_path):
    write_atomically(tmp_path / "a", "one")
    write_atomically(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(
        CheckpointError, match=r"a/b/c cannot be written: Not a directory"
    ):
        check_writable(tmp_path / "a" / "b" / "c")
    check_writable(tmp_path / "new" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
