"""What the commands that take a recipe have in common."""

import argparse
import io
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from shardwise.cli.options import command_parser
from shardwise.errors import ConfigError
from shardwise.text import Json

if TYPE_CHECKING:
    from shardwise.run import Run


def split_recipe(
    name: str, args: list[str]
) -> tuple[str, argparse.Namespace, list[str]]:
    """Parse the words after the name of a command that takes a recipe.

    Prints the options of the command if `--help` is among the words. If there is a recipe too, its
    own help follows when its arguments are bound.

    Args:
        name: the command.
        args: the words after it.

    Returns:
        The recipe (`file.py` or `file.py:function`), the options of the command, and the words that
        are left for the recipe.

    Raises:
        ConfigError: if the recipe is missing.
        SystemExit: after printing the help without a recipe.
    """
    parser = command_parser(name)
    wants_help = bool({"-h", "--help"} & set(args))
    if wants_help:
        print(parser.format_help())
    if not args or args[0].startswith("-"):
        if wants_help:
            raise SystemExit(0)
        raise ConfigError(
            f"'shardwise {name}' needs a recipe: shardwise {name} file.py"
        )
    options, rest = parser.parse_known_args(args[1:])
    return args[0], options, rest


def recorded_recipe(about: Json) -> str:
    """Return the recipe that a run recorded, for a message. It is not opened."""
    recipe = about.get("recipe")
    is_safe = isinstance(recipe, str) and recipe.isprintable() and len(recipe) < 200
    return str(recipe) if is_safe else "FILE.py"


def load_run(
    name: str,
    target: str,
    args: list[str],
    shared: argparse.Namespace,
    quiet: bool = False,
) -> tuple["Run", Json]:
    """Return the run that a recipe builds for these arguments.

    Args:
        name: the command, for error messages.
        target: `file.py` or `file.py:function`.
        args: the arguments of the recipe.
        shared: the shared options; `--cpu-devices` takes effect here.
        quiet: print nothing about wrong arguments, because another process does.

    Returns:
        The run, and what `run.json` records about its recipe.
    """
    from shardwise.mesh import use_cpu_devices
    from shardwise.recipe import (
        bind_recipe,
        find_recipe,
        load_recipe,
        make_run,
        read_source,
    )

    path, function = find_recipe(target)
    protect_workers()
    if shared.cpu_devices is not None:
        use_cpu_devices(shared.cpu_devices)
    recipe = load_recipe(path, function)
    with ExitStack() as stack:
        if quiet:
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        arguments = bind_recipe(recipe, args, prog=f"shardwise {name} {target}")
    description = {
        "recipe": f"{path}:{function}",
        "arguments": {key: str(value) for key, value in arguments.items()},
        "source": read_source(path),
    }
    return make_run(recipe, arguments), description


def protect_workers() -> None:
    """Have data processes import nothing from the current directory.

    `multiprocessing` starts them with `python -c`, which looks there first. It passes on the option
    -P of this process, and has no public way to add it.
    """
    from multiprocessing import util

    options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if "-P" not in options:
        util._args_from_interpreter_flags = lambda: [*options, "-P"]  # type: ignore[attr-defined]
