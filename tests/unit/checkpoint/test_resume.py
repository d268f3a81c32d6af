"""What differs on resume is the same, resharded, or refused with the flag that allows it."""

import io

import pytest
from rich.console import Console

from shardwise.checkpoint.resume import check_accepted, compare, report
from shardwise.errors import ConfigError

SAVED = {
    "data": {"seed": 0, "batch_size": 16, "source": {"files": ["a.bin"], "bytes": 100}},
    "lr": {"at update 9": 0.1},
    "optimizer": {"*": "adam(b1=0.9)"},
    "seed": 0,
    "mesh": "data=8",
    "versions": {"jax": "0.10.2"},
}


def test_rounding_is_no_difference_and_the_rest_is_found_at_any_depth():
    assert compare(SAVED, {**SAVED, "lr": {"at update 9": 0.1 + 1e-9}}) == []
    now = {
        **SAVED,
        "mesh": "data=4",
        "data": {"seed": 0, "batch_size": 32, "source": {"files": ["a.bin"], "bytes": 101}},
    }
    found = compare(SAVED, now)
    assert [(d.name, d.saved, d.now) for d in found] == [
        ("data/batch_size", 16, 32),
        ("data/source/bytes", 100, 101),
        ("mesh", "data=8", "data=4"),
    ]
    assert [d.verdict(()) for d in found] == ["refused: --accept data"] * 2 + ["resharded"]


def test_all_that_is_refused_is_told_at_once_with_its_flags():
    differences = compare(
        SAVED, {**SAVED, "seed": 1, "optimizer": {"*": "adam(b1=0.8)"}, "mesh": "data=1"}
    )
    with pytest.raises(ConfigError) as error:
        check_accepted(differences, (), "checkpoint x/10")
    text = str(error.value)
    assert "--accept optimizer --accept seed" in text
    assert "adam(b1=0.9)  adam(b1=0.8)" in text
    assert "data=1" not in text
    with pytest.raises(ConfigError, match=r"say --accept seed \("):
        check_accepted(differences, ("optimizer",), "checkpoint x/10")
    check_accepted(differences, ("optimizer", "seed"), "checkpoint x/10")


def test_the_report_is_one_screen():
    now = {**SAVED, "mesh": "data=4", "versions": dict.fromkeys("abcdefgh", "1")}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report(compare(SAVED, now), (), "resuming runs/a at step 10"))
    text = console.export_text()
    assert "resharded" in text
    assert "5 more" in text
    assert len(text.splitlines()) < 20
    assert (
        report([], (), "resuming a at step 3")
        == "resuming a at step 3: nothing differs from the run that saved it"
    )
