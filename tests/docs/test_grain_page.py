"""The code and commands of docs/grain.md run in order and print what the page shows."""

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
def test_the_page_runs_and_prints_what_is_shown(tmp_path):
    _, resumed = run_page(DOCS / "grain.md", tmp_path).commands
    assert "resuming workers at step" in resumed.said
