"""A saved step is found by any of its names, and what it says of itself is read with care."""

import pytest

from shardwise.checkpoint.reader import find_checkpoints, find_step, in_groups, read_json
from shardwise.errors import CheckpointError


@pytest.fixture
def run(tmp_path):
    for step in ("9", "100", "20.bad", "200.tmp"):
        (tmp_path / "checkpoints" / step / "state").mkdir(parents=True)
    return tmp_path


def test_a_step_is_found_by_its_run_its_number_or_its_path(run):
    newest = run / "checkpoints" / "100"
    assert find_checkpoints(run) == find_checkpoints(run / "checkpoints") == newest.parent
    assert (
        find_step(run)
        == find_step(run / "checkpoints")
        == find_step(newest)
        == find_step(newest, 100)
        == newest
    )
    assert find_step(run, 9) == run / "checkpoints" / "9"
    assert (
        find_step(run / "checkpoints" / "20.bad").name == "20.bad"
    )  # when it is asked for by name


@pytest.mark.parametrize(
    ("place", "step", "words"),
    [
        (".", 10, "has no step 10; there are 9, 100"),
        ("checkpoints/9", 100, "is one step already"),
        ("nowhere", None, "is not there"),
        ("file", None, "is no directory"),
        ("empty", None, "has no checkpoints"),
        ("fresh", None, "has no checkpoint; there are none yet"),
    ],
)
def test_what_is_not_there_is_told(run, place, step, words):
    (run / "empty").mkdir()
    (run / "file").touch()
    (run / "fresh" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=words):
        find_step(run / place, step)


def test_leaves_are_taken_together_up_to_a_size():
    sizes = {"a": 3, "b": 4, "c": 100, "d": 0, "e": 10}
    assert list(in_groups(sizes, budget=10)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(in_groups({})) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"a": ' * 10**5])
def test_json_that_is_no_description_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"meta\.json cannot be read"):
        read_json(tmp_path / "meta.json")


def test_json_without_end_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "meta.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="1,099,511,627,776 bytes"):
        read_json(tmp_path / "meta.json")
