"""Find a saved step by any of its names, and read its description with care."""

import pytest

from shardwise.checkpoint.reader import (
    find_checkpoints,
    find_step,
    in_groups,
    read_json,
)
from shardwise.errors import CheckpointError


@pytest.fixture
def run(tmp_path):
    for step in ("9", "100", "20.bad", "200.tmp"):
        (tmp_path / "checkpoints" / step / "state").mkdir(parents=True)
    return tmp_path


def test_a_step_is_found_by_its_run_its_number_or_its_path(run):
    checkpoints = run / "checkpoints"
    newest = checkpoints / "100"
    assert find_checkpoints(run) == checkpoints
    assert find_checkpoints(checkpoints) == checkpoints
    for found in (find_step(run), find_step(checkpoints), find_step(newest)):
        assert found == newest
    assert find_step(newest, 100) == newest
    assert find_step(run, 9) == checkpoints / "9"


def test_a_damaged_step_is_found_when_its_directory_is_passed(run):
    assert find_step(run / "checkpoints" / "20.bad").name == "20.bad"


@pytest.mark.parametrize(
    ("place", "step", "message"),
    [
        (".", 10, "has no step 10. Saved steps: 9, 100"),
        ("checkpoints/9", 100, "is a single step, and not step 100"),
        ("nowhere", None, "does not exist"),
        ("file", None, "is not a directory"),
        ("empty", None, "has no checkpoints"),
        ("fresh", None, "has no checkpoint yet"),
    ],
)
def test_a_missing_step_is_an_error_that_says_what_exists(run, place, step, message):
    (run / "empty").mkdir()
    (run / "file").touch()
    (run / "fresh" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=message):
        find_step(run / place, step)


def test_groups_stay_below_the_budget():
    sizes = {"a": 3, "b": 4, "c": 100, "d": 0, "e": 10}
    assert list(in_groups(sizes, budget=10)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(in_groups({})) == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"a": ' * 10**5]
)
def test_json_that_is_not_an_object_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"meta\.json cannot be read"):
        read_json(tmp_path / "meta.json")


def test_a_huge_json_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "meta.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="1,099,511,627,776 bytes"):
        read_json(tmp_path / "meta.json")
