"""Recipes: functions that return a `Run`, and whose keyword arguments are the command line."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.files.regular import error_reason
from shardwise.text import Json, did_you_mean

if TYPE_CHECKING:
    from shardwise.run import Run

DEFAULT_FUNCTION = "recipe"
# A function that should return a `Run`; `make_run` checks that it does.
Recipe: TypeAlias = Callable[..., object]


def find_recipe(target: str) -> tuple[Path, str]:
    """Return file and function name of a recipe, without importing it.

    Args:
        target: "file.py", or "file.py:function".

    Raises:
        ConfigError: if the file does not exist.
    """
    file, _, function = target.partition(":")
    path = Path(file)
    if not path.is_file():
        folders = [
            folder for folder in (path.parent, Path("recipes")) if folder.is_dir()
        ]
        nearby = [str(other) for folder in folders for other in folder.glob("*.py")]
        raise ConfigError(
            f"recipe file '{file}' does not exist.{did_you_mean(file, nearby)}"
        )
    return path, function or DEFAULT_FUNCTION


def read_source(path: Path) -> str:
    """Return the text of a Python file: UTF-8, or as its first lines declare (PEP 263).

    Raises:
        ConfigError: if the file cannot be read, or is not in this encoding.
    """
    try:
        content = path.read_bytes()
        try:
            return importlib.util.decode_source(content)
        except SyntaxError as error:
            # Also raised for a wrong byte in the first two lines, which this finds.
            content.decode()
            raise ConfigError(f"recipe '{path}' cannot be read: {error}.") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"recipe '{path}' is not valid {error.encoding}: byte 0x{content[error.start]:02x} in "
            f"line {line} (offset {error.start}). Save it as UTF-8, or declare its encoding in the "
            "first line, such as `# -*- coding: latin-1 -*-`."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"recipe '{path}' cannot be read: {error_reason(error)}."
        ) from error


def load_recipe(path: Path, function: str) -> Recipe:
    """Import the file and return its function. The file may import others in its directory.

    They come after the standard library on the import path: a file random.py next to the recipe
    does not replace the module of that name.

    Raises:
        ConfigError: if the file cannot be imported, or has no such function.
    """
    # Python's own message names neither the byte nor its place in the file.
    read_source(path)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe '{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(_after_standard_library(), str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"recipe '{path}' cannot be imported: {where(error)}"
        ) from error
    recipe: Recipe | None = getattr(module, function, None)
    if recipe is None or not callable(recipe):
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == path.stem
        ]
        raise ConfigError(
            f"recipe '{path}' has no function '{function}'; "
            f"it has {', '.join(functions) or 'none'}.{did_you_mean(function, functions)}"
        )
    return recipe


def _after_standard_library() -> int:
    """Return the index in `sys.path` after the folders of the standard library."""
    folder = os.path.dirname(os.__file__)
    folders = (folder, os.path.join(folder, "lib-dynload"))
    return max((i + 1 for i, name in enumerate(sys.path) if name in folders), default=0)


def bind_recipe(recipe: Recipe, args: Sequence[str], prog: str) -> Json:
    """Parse a command line into keyword arguments of a recipe.

    For a wrong command line, tyro prints the problem with the closest option, and exits with code
    2.

    Args:
        recipe: the function; types and defaults of its arguments define the options.
        args: the command line without the program.
        prog: the program name in usage messages.
    """
    import tyro

    bound: Json = {}
    signature = inspect.signature(recipe)

    # tyro calls what it parses for. This stand-in has the signature of the recipe, and only stores
    # the arguments: the recipe itself is called later, when its errors can be reported.
    def capture(*positional: object, **named: object) -> None:
        bound.update(signature.bind(*positional, **named).arguments)

    capture.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    capture.__doc__ = recipe.__doc__
    capture.__annotations__ = {
        **inspect.get_annotations(recipe, eval_str=True),
        "return": None,
    }
    tyro.cli(capture, args=list(args), prog=prog)
    return bound


def make_run(recipe: Recipe, arguments: Json) -> "Run":
    """Call a recipe with keyword arguments and return its run.

    Raises:
        ConfigError: if the recipe raises, does not return a `Run`, or sets a number out of range.
    """
    from shardwise.run import Run, check_numbers

    try:
        run = recipe(**arguments)
    except ShardwiseError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the recipe raised {where(error)}") from error
    if not isinstance(run, Run):
        name = getattr(recipe, "__name__", recipe)
        raise ConfigError(
            f"the recipe '{name}' returned a {type(run).__name__}. It must return a shardwise.Run."
        )
    check_numbers(run)
    return run
