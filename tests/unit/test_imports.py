"""Imports go one way: down the bands of ARCHITECTURE.md, and never in a circle."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent
# From the bottom up. A module belongs to the band of its file or package in `src/shardwise`.
BANDS = {
    "base": "errors findings text console runtime files tree metrics hardware tracing "
    "flops precision",
    "parts": "axes sharding kernels acceleration models data optim cluster trackers rundir",
    "step": "mesh module state loss step loop",
    "run": "checkpoint weights run recipe",
    "tools": "plan verification explanation report doctor sweep scaling",
    "training": "training",
    "cli": "cli",
}
BAND_OF = {
    name: band for band, names in enumerate(BANDS.values()) for name in names.split()
}


def module_name(path, root=ROOT):
    return (
        ".".join(path.relative_to(root).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


def imports_of(text, name, modules):
    """Yield the modules of shardwise that the text of a module imports, at any level."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("shardwise."):
                    yield alias.name.removeprefix("shardwise.")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import; write it out"
            if node.module == "shardwise" or (node.module or "").startswith(
                "shardwise."
            ):
                source = node.module.removeprefix("shardwise").lstrip(".")
                # `from shardwise.models import gpt` imports a module,
                # `from shardwise.text import columns` a name.
                inner = [f"{source}.{alias.name}".lstrip(".") for alias in node.names]
                yield from (found if found in modules else source for found in inner)


@pytest.fixture(scope="module")
def graph():
    texts = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}
    modules = set(texts)
    return {
        name: set(imports_of(text, name, modules)) - {name}
        for name, text in texts.items()
    }


def test_every_module_has_a_band(graph):
    tops = {name.partition(".")[0] for name in graph if name}
    assert tops == set(BAND_OF), "add it to BANDS and to ARCHITECTURE.md"


def test_imports_go_down_the_bands(graph):
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name and BAND_OF[other.partition(".")[0]] > BAND_OF[name.partition(".")[0]]
    ]
    assert wrong == []


def test_packages_do_not_import_each_other_in_a_circle(graph):
    tops = {name.partition(".")[0]: set() for name in graph if name}
    for name, others in graph.items():
        if name:
            top = name.partition(".")[0]
            tops[top] |= {other.partition(".")[0] for other in others} - {top}
    graphlib.TopologicalSorter(tops).prepare()
    # Inside a package `__init__` imports its modules, which import each other but not the package.
    inner = {
        name: {o for o in others if o not in name.rpartition(".")[0]}
        for name, others in graph.items()
        if name
    }
    graphlib.TopologicalSorter(inner).prepare()


@pytest.mark.parametrize(
    "text",
    [
        "import shardwise.cli.plan",
        "import jax, shardwise.cli.plan as p",
        "from shardwise.cli import plan",
        "def f():\n  from shardwise.cli.plan import x",
    ],
)
def test_every_way_to_write_an_import_is_seen(text):
    assert list(imports_of(text, "x", {"cli", "cli.plan"})) == ["cli.plan"]


def test_models_and_kernels_work_without_the_rest(graph):
    allowed = {"kernels", "models", "sharding", "axes"} | set(BANDS["base"].split())
    for name, others in graph.items():
        if name.partition(".")[0] in ("kernels", "models"):
            assert {other.partition(".")[0] for other in others} <= allowed, name


def test_help_does_not_import_jax():
    code = """if True:
        import sys
        from shardwise.cli import main
        main(["--help"])
        sys.exit("jax" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "name", ["optim.adamw", "data.Batches", "models.gpt.GPT", *shardwise.__all__]
)
def test_public_names_are_found_after_a_plain_import(name):
    value = shardwise
    for part in name.split("."):
        value = getattr(value, part)
    assert value is not None


def test_submodules_are_found_after_a_plain_import():
    """A new process, because `shardwise.optim` was missing only if nothing else was imported."""
    code = """if True:
        import shardwise
        shardwise.optim.adamw, shardwise.data.Batches, shardwise.models.gpt.GPT
        shardwise.explain, shardwise.verify
        import shardwise.explanation.explain, shardwise.verification.verify
        assert callable(shardwise.explain) and callable(shardwise.verify)
    """
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
