"""The page on optimizers tells the truth: its code runs and prints what it shows, and it has every finding that explain can make."""

import inspect
import re
from pathlib import Path

import pytest

from shardwise import explanation, findings

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


@pytest.mark.slow
def test_the_python_of_the_page_runs_and_prints_what_is_shown(capsys):
    text = PAGE.read_text()
    names = {}
    for block in re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE):
        before = text.count("\n", 0, block.start(1))  # so that an error shows the line of the page
        exec(compile("\n" * before + block[1], PAGE, "exec"), names)  # noqa: S102
        printed, shown = capsys.readouterr().out, block[2] or ""
        assert printed.split() == shown.split(), f"line {before}"  # lines are wrapped on the page


def test_the_page_has_every_finding_and_no_other():
    source = inspect.getsource(explanation) + inspect.getsource(findings)
    known = re.findall(r"\bFinding\(\s*\"([a-z-]+)\"", source)
    table = PAGE.read_text().partition("All findings:")[2]
    assert len(known) > 20
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(known)
