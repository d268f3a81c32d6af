"""A setting that differs on resume is harmless, or refused with the flag that accepts it."""

import io

import pytest
from rich.console import Console

from shardwise.checkpoint.resume import (
    check_accepted,
    compare,
    not_comparable,
    report,
)
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
    parts = report(compare(SAVED, now), (), "resuming runs/a at step 10", SAVED, {})
    console.print(*parts)
    text = console.export_text()
    assert "resharded" in text
    assert "5 more" in text
    assert len(text.splitlines()) < 20


def test_the_report_names_what_was_compared_and_what_was_not():
    parts = report([], (), "resuming a", ["data", "lr"], {"loss": "it is not known"})
    assert list(parts) == [
        "resuming a: no differences in data, lr",
        "not compared: loss, because it is not known",
    ]


def described(fingerprint, **changes):
    return {
        **SAVED,
        "compute_dtype": None,
        "devices": {"kind": "cpu", "count": 8},
        "loss": {"fingerprint": fingerprint, "batch": {"x": "float32[8, 4]"}},
        **changes,
    }


def test_another_loss_is_refused_by_name():
    before, now = described("a"), described("b", mesh="data=1")
    assert not_comparable(before, now) == {}
    changes = compare(before, now)
    with pytest.raises(ConfigError, match="pass --accept loss "):
        check_accepted(changes, (), "checkpoint x/10")
    check_accepted(changes, ("loss",), "checkpoint x/10")


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("the version of jax", {"versions": {"jax": "0.11.2"}}),
        ("the device", {"devices": {"kind": "H200", "count": 1}}),
        ("compute_dtype", {"compute_dtype": "bfloat16"}),
        (
            "the shapes of the batch",
            {"loss": {"fingerprint": "b", "batch": {"x": "float32[16, 4]"}}},
        ),
    ],
)
def test_a_fingerprint_says_nothing_if_what_it_depends_on_has_changed(cause, changes):
    reasons = not_comparable(described("a"), described("b", **changes))
    assert reasons == {"loss": f"it depends on {cause}, which changed"}
    if "loss" not in changes:
        # The same fingerprint is the same loss in any case.
        assert not_comparable(described("a"), described("a", **changes)) == {}


def test_what_an_older_checkpoint_does_not_describe_is_not_compared():
    text = "a function or an iterator, whose content is not known"
    reasons = not_comparable({**SAVED, "data": text}, described("a"))
    assert sorted(reasons) == ["data", "loss"]
    # A run whose data was known, and now is not, is another run.
    assert not_comparable(described("a"), described("a", data=text)) == {}
