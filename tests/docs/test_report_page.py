"""The commands and code of docs/report.md run in order and print what the page shows."""

import re

import pytest

from tests.helpers.pages import DOCS, run_page

PAGE = DOCS / "report.md"


@pytest.mark.slow  # it trains twice
def test_the_page_runs_and_prints_what_is_shown(tmp_path):
    run_page(PAGE, tmp_path)
    page = (tmp_path / "runs" / "a" / "report.html").read_text()
    for chart in ("loss", "lr", "grad", "update", "param", "rate0", "seconds"):
        assert f'id="chart-{chart}"' in page
    for section in re.findall(
        r"\*\*(\w+)\*\*", PAGE.read_text().partition("## How curves are drawn")[0]
    ):
        assert f'id="{section.lower()}"' in page or section in ("Plan", "Samples"), (
            section
        )
    assert (DOCS / "report.png").exists()
