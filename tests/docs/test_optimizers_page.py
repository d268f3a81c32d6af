"""The page on optimizers prints what it shows and lists every finding."""

import re

import pytest

from tests.helpers.pages import DOCS, run_page

PAGE = DOCS / "optimizers.md"
SOURCE = DOCS.parent / "src" / "shardwise"


@pytest.mark.slow
def test_the_code_and_the_command_of_the_page_print_what_is_shown(tmp_path):
    run_page(PAGE, tmp_path)
    assert (tmp_path / "lr.png").exists()


def test_the_page_has_every_finding_and_no_other():
    known = set()
    for path in SOURCE.rglob("*.py"):
        known |= set(re.findall(r"\bFinding\(\s*\"([a-z-]+)\"", path.read_text()))
    table = PAGE.read_text().partition("All findings:")[2]
    assert len(known) > 20
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == known
