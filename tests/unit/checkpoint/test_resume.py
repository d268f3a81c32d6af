"""A setting that differs on resume is harmless, or refused with the flag that accepts it."""

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


def test_rounding_is_ignored_and_differences_are_found_at_any_depth():
    assert compare(SAVED, {**SAVED, "lr": {"at update 9": 0.1 + 1e-9}}) == []
    now = {
        **SAVED,
        "mesh": "data=4",
        "data": {
            "seed": 0,
            "batch_size": 32,
            "source": {"files": ["a.bin"], "bytes": 101},
        },
    }
    changes = compare(SAVED, now)
    assert [(change.name, change.saved, change.now) for change in changes] == [
        ("data/batch_size", 16, 32),
        ("data/source/bytes", 100, 101),
        ("mesh", "data=8", "data=4"),
    ]
    verdicts = [change.verdict(()) for change in changes]
    assert verdicts == ["refused: --accept data", "refused: --accept data", "resharded"]


def test_a_tuple_equals_the_list_that_json_makes_of_it():
    now = {
        **SAVED,
        "data": {**SAVED["data"], "source": {"files": ("a.bin",), "bytes": 100}},
    }
    assert compare(SAVED, now) == []


def test_all_refused_changes_are_listed_with_their_flags():
    now = {**SAVED, "seed": 1, "optimizer": {"*": "adam(b1=0.8)"}, "mesh": "data=1"}
    changes = compare(SAVED, now)
    with pytest.raises(ConfigError) as error:
        check_accepted(changes, (), "checkpoint x/10")
    text = str(error.value)
    assert "--accept optimizer --accept seed" in text
    assert "adam(b1=0.9)  adam(b1=0.8)" in text
    assert "data=1" not in text
    with pytest.raises(ConfigError, match=r"pass --accept seed \("):
        check_accepted(changes, ("optimizer",), "checkpoint x/10")
    check_accepted(changes, ("optimizer", "seed"), "checkpoint x/10")


def test_the_report_fits_on_one_screen():
    now = {**SAVED, "mesh": "data=4", "versions": dict.fromkeys("abcdefgh", "1")}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report(compare(SAVED, now), (), "resuming runs/a at step 10"))
    text = console.export_text()
    assert "resharded" in text
    assert "5 more" in text
    assert len(text.splitlines()) < 20
    unchanged = report([], (), "resuming a at step 3")
    assert (
        unchanged == "resuming a at step 3: nothing differs from the run that saved it"
    )
