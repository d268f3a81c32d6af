"""Mistakes that a user can mend. The command line prints the message, without a traceback, and exits with the code."""

import argparse
import os
import sysconfig
import traceback
from typing import Any

PACKAGE = os.path.dirname(__file__)
LIBRARIES = (PACKAGE, sysconfig.get_path("stdlib"), "<frozen ")


class ShardwiseError(Exception):
    """The fact with its values, the place, the remedy."""

    exit_code = 1


class ConfigError(ShardwiseError):
    """Usage or configuration; always raised before anything is compiled."""

    exit_code = 2


class DataError(ShardwiseError):
    """Data that is missing, too short or unreadable."""

    exit_code = 3


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written, read or used for this run."""

    exit_code = 4


class NumericsError(ShardwiseError):
    """A loss or gradient that is not finite."""

    exit_code = 5


class LostError(ShardwiseError):
    """Another process of the run cannot be reached, or is stuck. A new start may help."""

    exit_code = 6


class DirectoryInUseError(ShardwiseError):
    """Another run writes to the same directory."""

    exit_code = 7


class Stopped(ShardwiseError):
    """Ended early by a signal, after saving; the same command goes on from there."""

    exit_code = 75


class Parser(argparse.ArgumentParser):
    """Reads a command line; what is wrong with it is raised, with its help."""

    def __init__(self, *args: Any, help_text: str = "", **options: Any):
        super().__init__(*args, **options)
        self.help_text = help_text

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}\n\n{self.help_text}" if self.help_text else message)


def where(error: BaseException) -> str:
    """An exception in a line: what it is, and the last place in code that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not frame.filename.startswith(LIBRARIES)
    ] or frames
    return f"{type(error).__name__}: {error} ({own[-1].filename}, line {own[-1].lineno})"
