"""The page on reports tells the truth: its commands and its code run, in order, and print what is shown."""

import re
from pathlib import Path

import pytest

from shardwise.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "report.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # it trains twice
def test_the_page_runs_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    text = PAGE.read_text()
    for block in BLOCK.finditer(text):
        language, content, shown = block.groups()
        capsys.readouterr()
        if language == "python":
            exec(compile(content, PAGE, "exec"), {})  # noqa: S102
        else:
            for command in content.splitlines():
                assert main(command.removeprefix("$ shardwise ").split()) == 0, command
        assert capsys.readouterr().out.split() == (shown or "").split()
    page = (tmp_path / "runs" / "a" / "report.html").read_text()
    for chart in ("loss", "lr", "grad", "update", "param", "rate0", "seconds"):
        assert f'id="chart-{chart}"' in page
    for section in re.findall(r"\*\*(\w+)\*\*", text.partition("## What is drawn")[0]):
        assert f'id="{section.lower()}"' in page or section in ("Plan", "Samples"), section
    assert (PAGE.parent / "report.png").exists()
