"""Read models from a checkout of Flax: https://github.com/google/flax."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Top-level statements of an example that define things. Everything else trains, plots or downloads.
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)


def read_example(path: Path, names: tuple[str, ...] = ()) -> ModuleType:
    """Return a module with the unchanged definitions of an example.

    Args:
        path: a Python file, or a page whose code blocks are Python.
        names: constants that the definitions need, which are assigned too.
    """
    text = path.read_text()
    if path.suffix == ".md":
        blocks = re.findall(
            r"^```(?:python|\{code-cell\} ipython3)[^\n]*\n(.*?)^```",
            text,
            re.MULTILINE | re.DOTALL,
        )
        text = "\n".join(map(_without_commands, blocks))
    module = ModuleType(path.stem)
    # Dataclasses look their module up.
    sys.modules[path.stem] = module
    for statement in ast.parse(text).body:
        targets = getattr(statement, "targets", [])
        is_named = any(getattr(target, "id", None) in names for target in targets)
        if isinstance(statement, DEFINITIONS) or is_named:
            code = compile(ast.Module([statement], []), str(path), "exec")
            try:
                exec(code, vars(module))  # noqa: S102
            except ImportError:
                # A library for data or plots, which the model does not use.
                continue
            except NameError:
                # A function whose decorator belongs to the training loop.
                continue
            except AttributeError:
                continue
    return module


def _without_commands(block: str) -> str:
    """Return a code block without shell commands and notebook magics."""
    lines = [line for line in block.splitlines() if not re.match(r"\s*[!%]", line)]
    text = "\n".join(lines)
    try:
        ast.parse(text)
    except SyntaxError:
        return ""
    return text


def import_from(folder: Path, name: str) -> Any:
    """Import a module from a folder of an example, whose modules import each other by name."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return __import__(name)
