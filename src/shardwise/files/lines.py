"""Logs of lines that a full disk delays, but does not stop."""

import os
from collections.abc import Callable
from pathlib import Path

from shardwise.files.failpoints import fail_point
from shardwise.files.regular import error_reason, open_regular

# Bytes of lines that wait to be written. Further lines are lost.
MAX_WAITING = 2**20


class LineFile:
    """A file of a run directory that lines are appended to.

    A run does not stop because its log cannot be written. Lines wait in memory and are tried again
    with the next one. The first failure is reported, and at the end the number of lost lines.

    Args:
        path: the file; it is created with the first line.
        warn: prints a warning.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self._path = path
        self._warn = warn
        self._descriptor: int | None = None
        self._waiting = b""
        self._num_lost = 0
        self._has_failed = False

    def write(self, line: str) -> None:
        """Append a line, given without its line break."""
        content = line.encode() + b"\n"
        if len(self._waiting) + len(content) > MAX_WAITING:
            self._num_lost += 1
        else:
            self._waiting += content
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            fail_point("log.write")
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._descriptor = open_regular(self._path, flags)
            # A disk that is nearly full may take a part of a line. The rest follows later.
            while self._waiting:
                count = os.write(self._descriptor, self._waiting)
                self._waiting = self._waiting[count:]
        except OSError as error:
            if not self._has_failed:
                self._warn(
                    f"{self._path} cannot be written: {error_reason(error)}. Training continues; "
                    "its lines are kept in memory and written when that is possible"
                )
            self._has_failed = True

    def close(self) -> None:
        """Write the lines that wait, report those that are lost, and close the file."""
        if self._waiting:
            self._write_waiting()
        num_lost = self._num_lost + self._waiting.count(b"\n")
        if num_lost:
            self._warn(f"lines that could not be written to {self._path}: {num_lost:,}")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
