"""A log that cannot be written delays its lines, and reports those that are lost."""

import errno
import os
import resource
import signal

import pytest

from shardwise.files import lines
from shardwise.files.lines import LineFile


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes `disk.free` more bytes of the lines."""

    class Disk:
        free = 10**9

    real_write = os.write

    def write(descriptor, content):
        if not Disk.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real_write(descriptor, content[: Disk.free])
        Disk.free -= count
        return count

    monkeypatch.setattr(lines.os, "write", write)
    return Disk


def test_lines_wait_for_a_full_disk_and_none_is_lost_or_cut(tmp_path, disk):
    warnings = []
    log = LineFile(tmp_path / "log", warnings.append)
    log.write("first")
    # Room for half a line.
    disk.free = 3
    for number in range(5):
        log.write(f"line {number}")
    assert (tmp_path / "log").read_text() == "first\nlin"
    assert len(warnings) == 1
    assert "No space left on device. Training continues" in warnings[0]
    disk.free = 10**9
    log.write("last")
    log.close()
    expected = ["first", *(f"line {number}" for number in range(5)), "last"]
    assert (tmp_path / "log").read_text().splitlines() == expected
    assert len(warnings) == 1


def test_lines_that_stay_unwritten_are_counted(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(lines, "MAX_WAITING", 20)
    warnings = []
    log = LineFile(tmp_path / "log", warnings.append)
    disk.free = 0
    for number in range(5):
        log.write(f"line {number}")
    # Two lines wait.
    log.close()
    assert warnings[1:] == [f"lines that could not be written to {tmp_path / 'log'}: 5"]
    disk.free = 10**9
    log = LineFile(tmp_path / "log", warnings.append)
    log.write("line 5")
    log.close()
    assert (tmp_path / "log").read_text() == "line 5\n"


def test_the_file_is_created_with_the_first_line_and_never_a_reason_to_stop(tmp_path):
    warnings = []
    log = LineFile(tmp_path / "log", warnings.append)
    log.close()
    assert not (tmp_path / "log").exists()
    os.mkfifo(tmp_path / "log")
    log.write("line")
    log.close()
    assert "it is a named pipe" in warnings[0]
    assert "lines that could not be written" in warnings[1]


def test_the_largest_file_size_of_the_system_is_survived(tmp_path):
    warnings = []
    log = LineFile(tmp_path / "log", warnings.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        log.write("0123456789")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "log").read_text() == "01234567"
    log.close()
    assert (tmp_path / "log").read_text() == "0123456789\n"
    assert len(warnings) == 1
