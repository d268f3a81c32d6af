"""The page on optimizers prints what it shows and lists every finding of `explain`."""

import inspect
import re

import pytest

from shardwise.explanation import explain as explanation
from shardwise.explanation import findings
from tests.helpers.pages import DOCS, run_page

PAGE = DOCS / "optimizers.md"


@pytest.mark.slow
def test_the_code_and_the_command_of_the_page_print_what_is_shown(tmp_path):
    run_page(PAGE, tmp_path)
    assert (tmp_path / "lr.png").exists()


def test_the_page_has_every_finding_and_no_other():
    source = inspect.getsource(explanation) + inspect.getsource(findings)
    known = re.findall(r"\bFinding\(\s*\"([a-z-]+)\"", source)
    table = PAGE.read_text().partition("All findings:")[2]
    assert len(known) > 20
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(
        known
    )
