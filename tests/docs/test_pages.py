"""Every page runs: in a test that names it (`test_..._page.py`), or here (see pages.py)."""

import re
from pathlib import Path

import pytest

from tests.helpers.pages import DOCS, MARK, blocks_of, run_page, same_lines, same_words

# More than 10 s each.
SLOW = {
    "start.md",
    "coming_from_pytorch.md",
    "exercises.md",
    "losses.md",
    "scale.md",
    "parallelism.md",
    "results.md",
}
OTHERS = "".join(
    path.read_text()
    for path in Path(__file__).parent.glob("test_*_page*.py")
    if path != Path(__file__)
)
PAGES = sorted(DOCS.rglob("*.md"))
HERE = [
    page
    for page in PAGES
    if f'"{page.name}"' not in OTHERS and f'"{page.stem}"' not in OTHERS
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW))
        for page in HERE
        if blocks_of(page)
    ],
)
def test_the_page_runs_and_prints_what_is_shown(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_what_is_not_run_has_a_reason(page):
    for block in blocks_of(page):
        for mark in (block.mark, block.shown_mark):
            assert MARK.fullmatch(mark), f"{page.name}, line {block.line}: {mark}"
    assert not re.search(
        r"^ *```(bash|sh|py|pycon|shell)\b", page.read_text(), re.MULTILINE
    ), "write python or console, so that it is run"


def test_the_comparison_of_output_can_fail():
    assert same_words("step 3 of 10\n", "step 3\nof 10", False)
    assert not same_words("step 3 of 10", "step 4 of 10", False)
    assert same_words("loss 1.5e-3, 2", "loss 7, 3", True)
    assert same_words("655 tokens/s", "1.03k tokens/s", True)
    assert same_words("a b c d", "a ... d", False)
    assert not same_words("a b c", "a ... d", False)
    assert not same_words("printed", "", False)
    assert same_words("┏━━━━┓\n┃ 1.5 KiB ┃", "┏━━━━━┓\n┃ 21 MiB ┃", True)
    assert not same_words("┃ 1.5 KiB ┃", "┃ 1.5 rows ┃", True)
    assert same_lines("one\nstep 3\nstep 4", "step 7", True)
    assert not same_lines("one\nstep 3", "one\nstep 4", False)


def test_a_page_that_lies_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 2 printed:\s+2"):
        run_page(page, tmp_path)
    page.write_text("```console\n$ shardwise train nothing.py\n```\n")
    with pytest.raises(AssertionError, match="exit code 2"):
        run_page(page, tmp_path)
