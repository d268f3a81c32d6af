"""The page on plans: its local command prints what it shows, its code runs, its links exist."""

import contextlib
import re

import pytest

from tests.helpers.pages import DOCS, ROOT, blocks_of, run_command, run_page
from tests.helpers.runs import make_run

PAGE = DOCS / "plan.md"
COMMANDS = [block for block in blocks_of(PAGE) if block.language == "console"]


def test_the_page_shows_a_plan_here_one_that_is_too_large_and_a_search():
    here, too_large, search = (block.text.strip() for block in COMMANDS)
    assert "--on cpu:8" in here
    assert re.search(r"--on v5e:4x4 +# exit code 2$", too_large)
    assert "--search" in search


def test_the_command_for_this_machine_prints_what_is_shown(tmp_path):
    assert len(run_page(PAGE, tmp_path, languages=("console",)).commands) == 1


@pytest.mark.slow
def test_too_large_is_answered_as_shown():
    with contextlib.chdir(ROOT):
        done = run_command(COMMANDS[1].text.strip())
    for line in (
        "too large",
        "largest buffers among the temporaries",
        "--mesh fsdp=16 --remat block",
    ):
        assert line in done.printed
        assert line in COMMANDS[1].shown


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path):
    (said,) = run_page(
        PAGE, tmp_path, {"run": make_run("data=8")}, languages=("python",)
    ).printed
    assert "fsdp=8 " in said
    assert said.count("per device") == 3


def test_the_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link
