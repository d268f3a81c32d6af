"""README and other documents: code runs, commands parse, links exist, the map matches the tree."""

import ast
import re
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.options import BY_NAME
from tests.helpers.pages import ROOT, commands_of, run_page

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_python_of_the_readme_runs_and_learns(tmp_path):
    ran = run_page(ROOT / "README.md", tmp_path, languages=("python",))
    assert len(ran.printed) == 1
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
            assert re.search(
                rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE
            ), command
        else:
            assert words[0] == "shardwise", command
            if words[1] == "launch":
                words = ["shardwise", *words[words.index("--") + 1 :]]
            if words[1] in ("--completion", "--version", "--help"):
                continue
            assert words[1] in BY_NAME, command
            # These read a run that another command of the page wrote.
            if words[1] in ("sample", "report", "doctor", "replay"):
                continue
            # The recipe is written on the page itself.
            if f"<!-- file: {words[2]} -->" in page.read_text():
                continue
            if words[1] in ("data", "checkpoint"):
                assert words[2] in BY_NAME[words[1]].usage, command
            else:
                assert (ROOT / words[2].partition(":")[0]).exists(), command


def test_the_map_shows_every_package_and_top_level_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    source = Path(shardwise.__file__).parent
    names = {
        f"{path.name}/" if path.is_dir() else path.name for path in source.iterdir()
    }
    names -= {"__pycache__/", "py.typed", "__init__.pyi"}
    assert [name for name in sorted(names) if name not in text] == []


def test_the_path_of_one_step_is_short():
    """A newcomer can follow one training step by reading at most 1,000 lines."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## The path of one training step") :]
    total = 0
    for file, names in re.findall(
        r"^\| `([\w/]+\.py)` \| ([^|]+) \|", section, re.MULTILINE
    ):
        tree = ast.parse((Path(shardwise.__file__).parent / file).read_text())
        lines = {
            node.name: node.end_lineno - node.lineno + 1
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        total += sum(lines[name] for name in re.findall(r"`(\w+)`", names))
    assert 400 < total <= 1000
