"""Shell completion of commands, options, files, and the arguments of a recipe.

argcomplete asks the real parsers of `cli.options`, so options are listed once. A recipe
is parsed for its arguments, never executed.
"""

import ast
import os
from pathlib import Path

from shardwise.cli.options import (
    COMMANDS,
    Parser,
    add_shared_options,
)
from shardwise.errors import ConfigError

SHELLS = ("bash", "zsh", "fish", "tcsh")


def script(shell: str) -> str:
    """Return the completion script for a shell.

    Raises:
        ConfigError: if the shell is not supported.
    """
    import argcomplete

    if shell not in SHELLS:
        raise ConfigError(
            f"--completion '{shell}': the shells are {', '.join(SHELLS)}."
        )
    code: str = argcomplete.shellcode(["shardwise"], shell=shell)
    return code + "\n"


def complete() -> None:
    """Answer the shell's request for completions and exit."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(full_parser(words), always_complete_options="long")


def full_parser(words: list[str]) -> Parser:
    """Return one parser for the whole command line.

    Args:
        words: the command line so far; if it names a recipe, the parser has its arguments too.
    """
    parser = Parser(prog="shardwise", allow_abbrev=False)
    add_shared_options(parser)
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--completion", choices=SHELLS)
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND")
    for command in COMMANDS:
        inner = commands.add_parser(command.name, allow_abbrev=False)
        if command.takes_recipe:
            inner.add_argument("recipe", metavar="RECIPE")
        command.add_options(inner)
        add_shared_options(inner)
        if command.takes_recipe:
            _add_recipe_arguments(inner, words)
    return parser


def _add_recipe_arguments(parser: Parser, words: list[str]) -> None:
    recipe = next(
        (word for word in words if word.partition(":")[0].endswith(".py")), ""
    )
    # Options of the command come first, and an option can be defined only once.
    known = {name for action in parser._actions for name in action.option_strings}
    for name in recipe_arguments(recipe):
        if name not in known:
            # Several values are allowed, as `sweep` takes them.
            parser.add_argument(name, nargs="+")


def recipe_arguments(target: str) -> list[str]:
    """Return the options that a recipe adds to the command line.

    Args:
        target: `file.py` or `file.py:function`. The file is parsed and not executed.

    Returns:
        For example `["--steps", "--batch-size"]`; nothing if the file is not a recipe.
    """
    file, _, function = target.partition(":")
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == (function or "recipe"):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            return [f"--{argument.arg.replace('_', '-')}" for argument in arguments]
    return []
