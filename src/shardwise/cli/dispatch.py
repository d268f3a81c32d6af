"""Find the command, run it, and turn its result into an exit code.

A command is a module with `main(args, shared) -> (answer, exit code)`. `args` are the words after
its name, `shared` the options that may stand anywhere on the command line. `--json` writes the
answer of any command. JAX is imported only by commands that need it.
"""

import argparse
import importlib
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardwise.cli.options import BY_NAME, COMMANDS, help_text, shared_parser
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.runtime import protect_output, quiet_without_gpu, quiet_without_tpu
from shardwise.text import did_you_mean, printable

# Commands below another one, which users tend to ask for directly.
NESTED = {
    "ls": "checkpoint ls",
    "show": "checkpoint show",
    "diff": "checkpoint diff",
    "export": "checkpoint export",
    "prepare": "data prepare",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words of the command line, `sys.argv` without its first by default.

    Returns:
        The exit code. A user's mistake is printed in one line, without a traceback.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ShardwiseError as error:
        # A message may quote a file that a stranger wrote.
        print("shardwise:", printable(str(error), keep="\n\t"), file=sys.stderr)
        return error.exit_code


def entry() -> None:
    """Run the `shardwise` command and exit the process."""
    protect_output()
    quiet_without_tpu()
    quiet_without_gpu()
    try:
        code = main()
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
    except Exception:
        # A defect of shardwise or of a recipe: the traceback is what its author needs.
        traceback.print_exc()
        code = 1
    # A thread that still waits for data or for other processes would make the interpreter abort
    # while it shuts down.
    if any(thread.name.startswith("shardwise-") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(argv: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        from shardwise.cli.completion import complete

        complete()
    if argv[:1] == ["--completion"]:
        from shardwise.cli.completion import script

        print(script(argv[1] if len(argv) > 1 else ""), end="")
        return 0
    if argv[:1] == ["launch"]:
        # The options after `--` belong to the command that is launched.
        return _run_command("launch", argv[1:], shared_parser().parse_args([]))
    shared, words = shared_parser().parse_known_args(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if words else 2
    name, *args = words
    if name == "--version":
        from importlib.metadata import version

        print(f"shardwise {version('shardwise')}")
        return 0
    if name not in BY_NAME:
        names = [command.name for command in COMMANDS]
        nested = NESTED.get(name)
        hint = f" Did you mean '{nested}'?" if nested else did_you_mean(name, names)
        raise ConfigError(
            f"'{name}' is not a command. The commands are {', '.join(names)}.{hint}"
        )
    return _run_command(name, args, shared)


def _run_command(name: str, args: list[str], shared: argparse.Namespace) -> int:
    writes_json = shared.json is not None and is_first_process(shared)
    if writes_json:
        _check_json(shared.json)
    answer, code = importlib.import_module(BY_NAME[name].module).main(args, shared)
    if writes_json:
        text = json.dumps(_finite(answer), indent=2, default=str) + "\n"
        try:
            shared.json.write_text(text)
        except OSError as error:
            # The command itself has ended well.
            print(f"shardwise: --json {printable(str(error))}", file=sys.stderr)
    return int(code)


def _check_json(path: Path) -> None:
    """Refuse a file for `--json` that cannot be written, before the command runs."""
    folder = path.resolve().parent
    if path.is_dir():
        problem = "it is a directory"
    elif not folder.is_dir():
        problem = f"the directory {folder} does not exist"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "permission denied"
    else:
        return
    raise ConfigError(f"--json {path} cannot be written: {problem}.")


def is_first_process(shared: argparse.Namespace) -> bool:
    """Return whether this is the first or only process of its run, as far as known without JAX."""
    if shared.process_id is not None:
        return bool(shared.process_id == 0)
    variables = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
    ranks = {os.environ[name] for name in variables if name in os.environ}
    return ranks <= {"0"}


def _finite(value: object) -> object:
    """Replace NaN and infinities, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
