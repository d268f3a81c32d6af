"""The API reference lists every public name, and every public name documents its parameters."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import shardwise
from tests.helpers.pages import DOCS

SOURCE = Path(shardwise.__file__).parent
# Names that another module re-exports are public there; names that these modules define are too.
PACKAGES = {
    "shardwise": SOURCE / "__init__.pyi",
    "shardwise.optim": SOURCE / "optim" / "__init__.py",
    "shardwise.data": SOURCE / "data" / "__init__.py",
    **{
        f"shardwise.models.{name}": SOURCE / "models" / f"{name}.py"
        for name in ("gpt", "llama", "loss", "sampling")
    },
}


def public_names(module: str, file: Path) -> dict[str, str]:
    """Return the path of the definition of each public name of a module.

    Public are the names that it re-exports (`import x as x`) and the classes, functions and
    constants that it defines, unless they begin with an underscore.
    """
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            origin = (
                f"{package}.{node.module or ''}".rstrip(".")
                if node.level
                else node.module
            )
            found |= {
                n.asname: f"{origin}.{n.name}" for n in node.names if n.asname == n.name
            }
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = f"{module}.{node.name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants = (
                t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper()
            )
            found |= {name: f"{module}.{name}" for name in constants}
    return {name: path for name, path in found.items() if not name.startswith("_")}


def resolve(path: str) -> str:
    """Follow re-exports of our packages to the module that defines a name."""
    module, _, name = path.rpartition(".")
    names = public_names(module, PACKAGES[module]) if module in PACKAGES else {}
    return path if names.get(name, path) == path else resolve(names[name])


PUBLIC = sorted(
    {
        resolve(path)
        for module, file in PACKAGES.items()
        for name, path in public_names(module, file).items()
        if f"{module}.{name}"
        not in ("shardwise.data", "shardwise.models", "shardwise.optim")
    }
)


def load(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# Constants and type aliases have no docstring at run time.
WITH_DOCSTRING = [
    path
    for path in PUBLIC
    if inspect.isclass(load(path))
    or hasattr(load(path), "__wrapped__")
    or inspect.isfunction(load(path))
]


def entries(text: str, *sections: str) -> set[str]:
    """Return the names that Google-style sections of a docstring document."""
    found: set[str] = set()
    for section in sections:
        for body in re.findall(
            rf"^( *){section}:\n((?:\1 +.*\n|\s*\n)+)", text + "\n", re.MULTILINE
        ):
            indent = len(re.match(r" *", body[1].lstrip("\n"))[0])
            for line in body[1].splitlines():
                if match := re.match(
                    rf" {{{indent}}}(\S.*?)(?: \([^)]*\))?: ", line + " "
                ):
                    found |= {name.strip().lstrip("*") for name in match[1].split(",")}
    return found


def parameters(thing: object) -> set[str]:
    """Return the public parameters of a function, or of the constructor of a class."""
    if inspect.isclass(thing):
        if getattr(thing, "_is_protocol", False) or not inspect.isfunction(
            thing.__init__
        ):
            return set()
        # The signature of an NNX module itself is that of its metaclass.
        thing = thing.__init__
    names = inspect.signature(thing).parameters
    return {name for name in names if name != "self" and not name.startswith("_")}


def test_the_public_names_are_found():
    assert "shardwise.training.fit.fit" in PUBLIC
    assert "shardwise.optim.optimizers.adamw" in PUBLIC
    assert "shardwise.kernels.cross_entropy.linear_cross_entropy" in PUBLIC
    listed = {path.rpartition(".")[2] for path in PUBLIC} | {"data", "models", "optim"}
    assert set(shardwise.__all__) <= listed


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(set(PUBLIC) - set(listed)) == []
    assert sorted(path for path in listed if listed.count(path) > 1) == []


@pytest.mark.parametrize("path", WITH_DOCSTRING)
def test_a_public_name_documents_its_parameters(path):
    thing = load(path)
    name = path.rpartition(".")[2]
    text = inspect.getdoc(thing) or ""
    assert text, "no docstring"
    assert not text.startswith(f"{name}("), (
        "the docstring that a dataclass gets by default"
    )
    sections = ("Args",)
    if inspect.isclass(thing):
        text += "\n\n" + (inspect.getdoc(thing.__init__) or "")
        sections = ("Args", "Attributes")
    assert sorted(parameters(thing) - entries(text, *sections)) == []


def test_the_parser_of_docstrings_can_fail():
    text = (
        "Summary.\n\nArgs:\n    a: one: two\n        continued: here.\n    b, c: both.\n\n"
        "Returns:\n    d: x.\n"
    )
    assert entries(text, "Args") == {"a", "b", "c"}
    assert entries(text, "Attributes") == set()
