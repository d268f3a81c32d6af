"""Exit codes, and the one-line description of an exception."""

import json
import subprocess
import sys

import pytest

from shardwise import errors
from shardwise.errors import ExitCode, ShardwiseError, where


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ShardwiseError, 1),
        (errors.ConfigError, 2),
        (errors.DataError, 3),
        (errors.CheckpointError, 4),
        (errors.NumericsError, 5),
        (errors.LostError, 6),
        (errors.DirectoryInUseError, 7),
        (errors.Stopped, 75),
    ],
)
def test_every_exception_has_its_exit_code(error, code):
    assert error.exit_code == code
    # Codes are written to JSON, to messages and to job files as plain numbers.
    assert (json.dumps(error.exit_code), f"{error.exit_code}") == (str(code), str(code))


def test_no_two_exceptions_share_an_exit_code():
    kinds = [*ShardwiseError.__subclasses__(), ShardwiseError]
    codes = [kind.exit_code for kind in kinds if kind.__module__ == "shardwise.errors"]
    assert len(set(codes)) == len(codes)
    assert set(codes) | {ExitCode.DONE} == set(ExitCode)


def test_a_process_exits_with_the_number():
    code = (
        "import sys; from shardwise.errors import Stopped; sys.exit(Stopped.exit_code)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 75


def test_place_of_an_exception_is_in_user_code():
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    # The last frames are in the standard library.
    assert where(raised.value).startswith("JSONDecodeError: ")
    assert "test_errors.py, line" in where(raised.value)


@pytest.mark.parametrize("module", ["errors", "text", "console", "runtime"])
def test_basic_modules_do_not_import_jax(module):
    code = f"import sys, shardwise.{module}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
