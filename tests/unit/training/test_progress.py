"""The first lines of a run."""

import pytest
from rich.console import Console

from shardwise.run import prepare
from shardwise.training.progress import headline
from tests.helpers.runs import make_run


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (16, ""),
        (
            15,
            "each batch of 15 examples is padded to 16, so that it divides evenly over the mesh",
        ),
    ],
)
def test_padding_of_the_batch_is_reported(rows, expected):
    console = Console(record=True, width=200)
    headline(console, prepare(make_run(rows=rows)))
    first, *others = console.export_text().strip().split("\n")
    assert "parameters on mesh" in first
    assert others == ([expected] if expected else [])
