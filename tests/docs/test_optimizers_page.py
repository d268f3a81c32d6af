"""The page on optimizers tells the truth: its code runs, and it knows every finding that explain can make."""

import inspect
import re
from pathlib import Path

import shardwise

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_python_of_the_page_runs():
    text = PAGE.read_text()
    names = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        before = text.count("\n", 0, block.start(1))  # so that an error shows the line of the page
        exec(compile("\n" * before + block[1], PAGE, "exec"), names)  # noqa: S102


def test_the_page_has_the_output_of_its_own_code():
    code, output = re.search(
        r"^```python\n(for line in explanation.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ).groups()
    assert code
    assert output


def test_every_finding_is_on_the_page_and_no_other():
    source = inspect.getsource(inspect.getmodule(shardwise.explain))
    known = re.findall(r"\bFinding\(\s*\"([a-z-]+)\"", source)
    table = PAGE.read_text().partition("All findings:")[2]
    assert len(known) > 20
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(known)
