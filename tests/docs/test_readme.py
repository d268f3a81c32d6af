"""The documents tell the truth: code blocks run, commands parse, links lead somewhere, the map matches the tree."""

import re
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.dispatch import HELP, TOOLS, VERBS
from tests.helpers.pages import ROOT, commands_of, run_page

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_python_of_the_readme_runs_and_learns(tmp_path):
    ran = run_page(ROOT / "README.md", tmp_path, languages=("python",))
    assert len(ran.printed) == 2
    names = ran.names
    assert names["result"].eval_metrics["loss"] < 0.5
    assert names["result"].metrics["step"] == 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for command in commands_of(page):
        words = command.removeprefix("$ ").split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                command
            )
        else:
            assert words[0] == "shardwise", command
            if words[1] == "launch":
                words = ["shardwise", *words[words.index("--") + 1 :]]
            if words[1] in ("--completion", "--version", "--help"):
                continue
            assert words[1] in {**VERBS, **TOOLS}, command
            if words[1] in (
                "sample",
                "report",
                "doctor",
            ):  # of a run that another command of the page made
                continue
            if f"<!-- file: {words[2]} -->" in page.read_text():  # written on the page itself
                continue
            assert (
                words[2] in HELP.split()
                if words[1] in ("data", "checkpoint")
                else (ROOT / words[2].partition(":")[0]).exists()
            ), command


def test_the_map_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = Path(shardwise.__file__).parent
    modules = [
        str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "__init__.py"
    ]
    assert [name for name in modules if f"`{name}`" not in text] == []
