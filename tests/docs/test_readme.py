"""The documents tell the truth: code blocks run, commands parse, links lead somewhere, the map matches the tree."""

import re
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import HELP, TOOLS, VERBS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme_runs_and_learns():
    code = blocks(ROOT / "README.md", "python")
    assert len(code) == 2
    names = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    assert names["result"].eval_metrics["loss"] < 0.5
    assert names["result"].metrics["step"] == 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for command in "".join(blocks(page, "console")).splitlines():
        words = command.removeprefix("$ ").split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        else:
            assert words[0] == "shardwise", command
            if words[1] == "launch":
                words = ["shardwise", *words[words.index("--") + 1 :]]
            if words[1] in ("--completion", "--version", "--help"):
                continue
            assert words[1] in {**VERBS, **TOOLS}, command
            if words[1] in ("sample", "report", "doctor"):  # of a run that another command of the page made
                continue
            if f"<!-- file: {words[2]} -->" in page.read_text():  # written on the page itself
                continue
            assert words[2] in HELP.split() if words[1] in ("data", "checkpoint") else (ROOT / words[2].partition(":")[0]).exists(), command


def test_the_map_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = Path(shardwise.__file__).parent
    modules = [str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in modules if f"`{name}`" not in text] == []
