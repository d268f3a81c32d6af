"""The commands of the pages on doctor and sweeps run in order and leave the files shown."""

import re

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
def test_the_page_on_the_doctor(tmp_path):
    commands = run_page(DOCS / "doctor.md", tmp_path).commands
    assert len(commands) == 4
    out = "".join(command.printed for command in commands)
    assert "no problems, " in out
    assert "finished: shardwise report runs/a" in out
    assert "_python_argcomplete shardwise" in out


@pytest.mark.slow
def test_the_page_on_sweeps(tmp_path):
    page = DOCS / "sweeps.md"
    commands = run_page(page, tmp_path).commands
    shown = re.search(
        r"^```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )[1].split()
    assert all((tmp_path / name).exists() for name in shown)
    assert (tmp_path / "sweeps/a/lr=0.008/metrics.jsonl").exists()
    assert "[1 of 3] lr=0.001 is done" in commands[-1].said
