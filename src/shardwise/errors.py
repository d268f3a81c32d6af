"""Exceptions for mistakes that users can fix, and the exit codes of the command line.

The command line prints the message of these exceptions without a traceback, and exits with their
code. This is the only module that knows the exit codes.
"""

import enum
import os
import sysconfig
import traceback
from collections.abc import Mapping

PACKAGE = os.path.dirname(__file__)
# Prefixes of files that `where` skips.
LIBRARIES = (PACKAGE, sysconfig.get_path("stdlib"), "<frozen ")


class ExitCode(enum.IntEnum):
    """Exit codes of `shardwise`.

    Attributes:
        DONE: the run is complete, and its last checkpoint is verified.
        FAILURE: an unexpected error, or a comparison that found a difference.
        CONFIG: wrong usage or configuration, found before anything is compiled.
        DATA: data is missing, too short or unreadable.
        CHECKPOINT: a checkpoint cannot be written, read or used.
        NUMERICS: non-finite values, a failed check, divergence, or a failed verification.
        LOST: a process is lost or hangs. Starting again may help.
        IN_USE: another run uses the run directory.
        STOPPED: stopped by a signal before the end, resumable. This is `EX_TEMPFAIL` of sysexits.h,
            so that schedulers do not take an unfinished run for a finished one.
    """

    DONE = 0
    FAILURE = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    NUMERICS = 5
    LOST = 6
    IN_USE = 7
    STOPPED = 75

    @property
    def meaning(self) -> str:
        """What the code means, in a few words."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.DONE: "done, and the last checkpoint is verified",
    ExitCode.FAILURE: "an error in the recipe or in shardwise",
    ExitCode.CONFIG: "wrong usage or configuration",
    ExitCode.DATA: "missing or unreadable data",
    ExitCode.CHECKPOINT: "unusable checkpoint",
    ExitCode.NUMERICS: "non-finite numbers, a failed check, or diverged",
    ExitCode.LOST: "a process was lost or hung",
    ExitCode.IN_USE: "run directory in use",
    ExitCode.STOPPED: "stopped by a signal, resumable",
}


class ShardwiseError(Exception):
    """The base class. A message states the fact with its values, the place, and the remedy.

    Attributes:
        exit_code: the code with which the command line exits.
    """

    exit_code = ExitCode.FAILURE


class ConfigError(ShardwiseError):
    """Wrong usage or configuration. It is always raised before anything is compiled."""

    exit_code = ExitCode.CONFIG


class DataError(ShardwiseError):
    """Data is missing, too short or unreadable."""

    exit_code = ExitCode.DATA


class CheckpointError(ShardwiseError):
    """A checkpoint cannot be written, read or used for this run."""

    exit_code = ExitCode.CHECKPOINT


class NumericsError(ShardwiseError):
    """A loss or a gradient is non-finite, or the run has diverged."""

    exit_code = ExitCode.NUMERICS


class CheckError(NumericsError):
    """A check inside the model or the loss failed: `checkify.check`, or an assertion of chex.

    Attributes:
        state: the `TrainState` after the step. Only its step counter has changed. None if the check
            failed in an evaluation.
        metrics: the metrics of the step, by name.
    """

    def __init__(
        self,
        message: str,
        state: object = None,
        metrics: Mapping[str, object] | None = None,
    ):
        super().__init__(message)
        self.state = state
        self.metrics = metrics or {}


class CorruptionError(NumericsError):
    """Two computations that must be equal have different bits: a device is faulty."""


class LostError(ShardwiseError):
    """Another process of the run cannot be reached, or hangs. Starting again may help."""

    exit_code = ExitCode.LOST


class DirectoryInUseError(ShardwiseError):
    """Another run writes to the same run directory."""

    exit_code = ExitCode.IN_USE


class Stopped(ShardwiseError):
    """A signal stopped the run after it saved. The same command resumes it."""

    exit_code = ExitCode.STOPPED


def where(error: BaseException) -> str:
    """Return type, message and place of an exception on one line, see `place_of`."""
    return f"{type(error).__name__}: {error} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """Return file and line of an exception.

    It is the last line in the user's code: files of shardwise, of the standard library and of
    installed packages are skipped.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def is_library(filename: str) -> bool:
    """Return whether a file is part of shardwise, the standard library or an installed package."""
    return "site-packages" in filename or filename.startswith(LIBRARIES)
