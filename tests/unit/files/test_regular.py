"""Files of a run directory are opened only if they are regular files, and never waited for."""

import errno
import os
import socket
import stat

import pytest

from shardwise.errors import CheckpointError
from shardwise.files.durable import write_atomically
from shardwise.files.lock import check_unlocked, lock_directory
from shardwise.files.regular import (
    RUN_FILES,
    check_run_files,
    open_regular,
    read_regular,
)
from shardwise.metrics import MetricsLog, read_metrics


def make_pipe(path):
    os.mkfifo(path)


def make_directory(path):
    path.mkdir()


def make_socket(path):
    server = socket.socket(socket.AF_UNIX)
    # The path of a socket is at most 107 characters long.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        server.bind(path.name)
    finally:
        os.chdir(before)
        server.close()


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("creating a device needs root")


def make_link(path):
    (path.parent / "target").write_text("precious")
    path.symlink_to("target")


KINDS = {
    make_pipe: "a named pipe",
    make_directory: "a directory",
    make_socket: "a socket",
    make_device: "a device",
    make_link: "a link",
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json.tmp", "lock", "loss.png"])
def test_a_run_refuses_anything_but_regular_files_in_their_place(tmp_path, make, name):
    make(tmp_path / name)
    with pytest.raises(
        CheckpointError, match=f"{name} cannot be used: it is"
    ) as raised:
        check_run_files(tmp_path)
    assert KINDS[make] in str(raised.value)
    assert "--out" in str(raised.value)


@pytest.mark.parametrize("make", KINDS)
def test_each_way_to_open_refuses_anything_but_regular_files(tmp_path, make):
    path = tmp_path / "lock"
    make(path)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match=KINDS[make]):
            open_regular(path, flags)
    with pytest.raises(CheckpointError, match=KINDS[make]), lock_directory(tmp_path):
        pass
    check_unlocked(tmp_path)
    for function in (read_metrics, MetricsLog):
        with pytest.raises(CheckpointError, match=KINDS[make]):
            function(path)
    path.rename(tmp_path / "run.json.tmp")
    with pytest.raises(OSError, match=KINDS[make]):
        write_atomically(tmp_path / "run.json", "{}")
    if make is make_link:
        assert (tmp_path / "target").read_text() == "precious"


def test_files_that_a_run_wrote_and_missing_files_are_accepted(tmp_path):
    check_run_files(tmp_path)
    for name in RUN_FILES:
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoints").mkdir()
    check_run_files(tmp_path)
    (tmp_path / "checkpoints").rmdir()
    os.mkfifo(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints is not a directory"):
        check_run_files(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch(mode=0o000)
    with pytest.raises(CheckpointError, match="Permission denied"):
        check_run_files(tmp_path)


def test_large_files_are_not_read_and_links_only_on_request(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    assert read_regular(tmp_path / "a", 100) == bytes(100)
    with pytest.raises(OSError, match="100 bytes, more than the limit of 99"):
        read_regular(tmp_path / "a", 99)
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", follow_links=True) == bytes(100)
    with pytest.raises(OSError, match="link") as raised:
        read_regular(tmp_path / "link")
    assert raised.value.errno == errno.ELOOP
    # A link to a named pipe would wait too.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(OSError, match="a named pipe"):
        read_regular(tmp_path / "link", follow_links=True)
