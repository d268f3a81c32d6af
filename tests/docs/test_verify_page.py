"""The code of docs/verify.md runs; its commands print what it shows, except rounding figures."""

import importlib.util

import pytest

from tests.helpers.pages import DOCS, ROOT, blocks_of, run_page

PAGE = DOCS / "verify.md"


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_is_shown(tmp_path):
    commands = run_page(PAGE, tmp_path, languages=("console",)).commands
    assert [command.line.partition("# ")[2] for command in commands] == [
        "",
        "exit code 5",
    ]


def test_the_mistake_of_the_page_is_the_one_that_is_planted():
    mistake, _ = (block.text for block in blocks_of(PAGE) if block.language == "python")
    assert mistake in (ROOT / "tests" / "verify" / "planted.py").read_text()


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path):
    path = ROOT / "examples" / "data_parallel_by_hand.py"
    spec = importlib.util.spec_from_file_location("by_hand", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run_page(
        PAGE,
        tmp_path,
        {"run": example.recipe(), "recipe": example.recipe},
        languages=("python",),
    )
