"""A recipe is the configuration: a Python function whose keyword arguments are the command line, and that returns a Run."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.text import did_you_mean

DEFAULT_FUNCTION = "recipe"


def find_recipe(target: str) -> tuple[Path, str]:
    """(file, function) of "file.py" or "file.py:function"; looks at the disk only."""
    file, _, function = target.partition(":")
    path = Path(file)
    if not path.is_file():
        nearby = [
            str(other)
            for folder in (path.parent, Path("recipes"))
            if folder.is_dir()
            for other in folder.glob("*.py")
        ]
        raise ConfigError(f"there is no recipe file '{file}'.{did_you_mean(file, nearby)}")
    return path, function or DEFAULT_FUNCTION


def load_recipe(path: Path, function: str) -> Callable[..., Any]:
    """Imports the file, as `python file.py` would, and takes the function from it."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe '{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"recipe '{path}' cannot be imported: {where(error)}") from error
    recipe = getattr(module, function, None)
    if not callable(recipe):
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == path.stem
        ]
        raise ConfigError(
            f"recipe '{path}' has no function '{function}'; it has {', '.join(functions) or 'none'}.{did_you_mean(function, functions)}"
        )
    return recipe


def bind_recipe(recipe: Callable[..., Any], args: Sequence[str], prog: str) -> dict[str, Any]:
    """The keyword arguments for the recipe from a command line. tyro prints what is wrong, with the closest flag, and exits with 2."""
    import tyro

    bound: dict[str, Any] = {}
    signature = inspect.signature(recipe)

    def capture(*positional: Any, **named: Any) -> None:
        bound.update(signature.bind(*positional, **named).arguments)

    capture.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    capture.__doc__ = recipe.__doc__
    capture.__annotations__ = {**inspect.get_annotations(recipe, eval_str=True), "return": None}
    tyro.cli(capture, args=list(args), prog=prog)
    return bound


def make_run(recipe: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls the recipe; what it raises is its user's mistake until proven otherwise."""
    from shardwise.run import Run

    try:
        run = recipe(**arguments)
    except ShardwiseError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the recipe raised {where(error)}") from error
    if not isinstance(run, Run):
        raise ConfigError(
            f"the recipe '{recipe.__name__}' returned a {type(run).__name__}; it must return a shardwise.Run."
        )
    return run
