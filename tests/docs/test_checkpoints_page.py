"""The code and commands of docs/checkpoints.md run in order and do what the page shows."""

import re

import pytest
from blake3 import blake3

from shardwise.checkpoint.store import Keep
from tests.helpers.pages import DOCS, run_page

PAGE = DOCS / "checkpoints.md"


@pytest.mark.slow
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path):
    run_page(PAGE, tmp_path)
    assert (tmp_path / "a.safetensors").stat().st_size > 1000
    saved = tmp_path / "runs/a/checkpoints/50"
    for line in (
        (saved / "MANIFEST").read_text().splitlines()
    ):  # as `b3sum --check` does
        digest, name = re.fullmatch(r"([0-9a-f]{64})  (.+)", line).groups()
        assert blake3((saved / name).read_bytes()).hexdigest() == digest


def test_the_page_shows_what_is_kept_by_default():
    shown = re.search(r"`(Keep\(.*?\))`", PAGE.read_text())[1]
    assert eval(shown, {"Keep": Keep}) == Keep()  # noqa: S307
    assert all(f"{name}=" in shown for name in Keep.__dataclass_fields__)


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 7, 75])
def test_the_page_has_every_exit_code(kind):
    assert f"| {kind} |" in PAGE.read_text()
