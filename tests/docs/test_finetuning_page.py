"""The code and commands of the page on fine-tuning run in order and print what it shows."""

import re

import pytest

from tests.helpers.pages import DOCS, run_page

PAGE = DOCS / "finetuning.md"


@pytest.mark.slow
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path):
    names = run_page(PAGE, tmp_path).names
    before, after = (names[name].eval_metrics["loss"] for name in ("base", "tuned"))
    said = re.search(r"from about ([\d.]+) to ([\d.]+) nats per byte", PAGE.read_text())
    assert abs(before - float(said[1])) < 0.15, before
    assert abs(after - float(said[2])) < 0.15, after
