"""The page that lists what tutorials teach: every link and every test that it names exists."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.helpers.pages import DOCS, ROOT, blocks_of

PAGE = DOCS / "coverage.md"
COUNTS = {"A": 15, "B": 36, "C": 11, "D": 29, "E": 33}


@dataclass(frozen=True)
class Row:
    """A row of the page.

    Attributes:
        links: the targets in the third cell.
        tests: pairs of a file and a function in the fourth cell.
        by_page: whether the fourth cell says that the linked page is run.
    """

    links: list[str]
    tests: list[tuple[str, str]]
    by_page: bool


def read_rows(text: str) -> dict[str, Row]:
    rows = {}
    for line in text.splitlines():
        if re.match(r"\| [A-E]\d\d \|", line):
            number, _, shown, tested = (
                cell.strip() for cell in line.strip("|").split(" | ")
            )
            rows[number.strip("| ")] = Row(
                re.findall(r"\]\(([^)]+)\)", shown),
                re.findall(r"`([\w/]+\.py)::(\w+)`", tested),
                tested.strip("| ") == "page",
            )
    return rows


ROWS = read_rows(PAGE.read_text())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def functions(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def problems(row: Row) -> list[str]:
    """Return what a row names and does not exist."""
    found = [] if row.links else ["no link"]
    if not row.tests and not row.by_page:
        found.append("no test")
    for link in row.links:
        name, _, anchor = link.partition("#")
        target = (DOCS / name).resolve()
        if not target.is_file():
            found.append(f"no file {name}")
        elif anchor and anchor not in anchors(target):
            found.append(f"no heading {link}")
    for file, function in row.tests:
        if not (ROOT / file).is_file() or function not in functions(ROOT / file):
            found.append(f"no test {file}::{function}")
    pages = [DOCS / link.partition("#")[0] for link in row.links]
    if row.by_page and not any(blocks_of(page) for page in pages if page.is_file()):
        found.append("the page has no code")
    return found


def test_every_topic_has_a_row():
    numbers = [
        f"{part}{n:02}" for part, count in COUNTS.items() for n in range(1, count + 1)
    ]
    assert list(ROWS) == numbers


@pytest.mark.parametrize("number", ROWS)
def test_what_a_row_names_exists(number):
    assert problems(ROWS[number]) == []


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ("`grain.md` | |", "no link"),
        ("[a](nowhere.md) | page |", "no file nowhere.md"),
        ("[a](sharding.md#nowhere) | page |", "no heading sharding.md#nowhere"),
        ("[a](api/index.md) | page |", "the page has no code"),
        ("[a](sharding.md) | |", "no test"),
        (
            "[a](sharding.md) | `tests/unit/test_mesh.py::test_nothing` |",
            "no test tests/unit/test_mesh.py::test_nothing",
        ),
    ],
)
def test_a_row_with_a_mistake_is_found(cells, problem):
    rows = read_rows(f"| A01 | topic | {cells}")
    assert problem in problems(rows["A01"])
