"""The code and commands of docs/data.md run in order and print what the page shows."""

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
def test_the_page_runs_and_prints_what_is_shown(tmp_path):
    run_page(DOCS / "data.md", tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").exists()
