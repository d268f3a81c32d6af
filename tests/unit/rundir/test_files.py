"""Reading run directories that are complete, growing, damaged or hostile."""

import math
import os

import pytest

from shardwise.plan.plan import Plan
from shardwise.rundir.columns import as_number
from shardwise.rundir.files import RunFiles
from tests.helpers.run_dirs import LEAF, damage_run, lines, make_run, plan, step


def test_numbers_in_json_values():
    numbers = [as_number(v) for v in ("nan", "-inf", True, None, "1", [], 10**400)]
    assert math.isnan(numbers[0])
    assert numbers[1:] == [-math.inf, 1, None, None, None, math.inf]


def test_damaged_files_are_read_as_far_as_possible(tmp_path):
    path = make_run(tmp_path / "a")
    damage_run(path)
    run = RunFiles(path).read()
    assert run.last_step == 40
    assert any("skipped 7 lines that are not records" in note for note in run.notes), (
        run.notes
    )
    assert len(run.notes) == 7


def test_links_pipes_and_directories_are_not_followed(tmp_path):
    outside = make_run(tmp_path / "outside")
    path = tmp_path / "a"
    path.mkdir()
    for name in ("run.json", "metrics.jsonl", "checkpoints", "plan.json"):
        (path / name).symlink_to(outside / name)
    os.mkfifo(path / "samples.jsonl")
    (path / "phases.jsonl").mkdir()
    run = RunFiles(path).read()
    assert run.columns == {}
    assert run.about == {}
    assert run.checkpoints == []
    assert run.plan is None
    assert run.samples == []
    assert sum("links are not followed" in note for note in run.notes) == 3, run.notes
    assert "checkpoints cannot be read: Not a directory." in run.notes


def test_added_records_are_read_and_truncated_files_are_read_again(tmp_path):
    path = make_run(tmp_path / "a")
    files = RunFiles(path)
    before = files.stamp()
    assert files.read().last_step == 40
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": 3.0}\n{"step": 42, "lo')
    assert files.stamp() != before
    assert files.read().last_step == 41
    with (path / "metrics.jsonl").open("a") as file:
        file.write('ss": 2.0}')
    assert files.read().column("loss").values[-1] == 2.0
    lines(path / "other", [step(n) for n in range(1, 6)])
    (path / "other").replace(path / "metrics.jsonl")
    run = files.read()
    assert (run.last_step, len(run.column("loss"))) == (5, 5)


def test_the_last_record_of_a_step_counts(tmp_path):
    (tmp_path / "a").mkdir()
    lines(
        tmp_path / "a" / "metrics.jsonl",
        [
            {"step": 1, "loss": 1.0},
            {"step": 3, "loss": 3.0},
            {"step": 1, "loss": 7.0, "lr": {"muon": 0.5}},
        ],
    )
    run = RunFiles(tmp_path / "a").read()
    assert run.column("loss").values.tolist() == [7.0, 3.0]
    assert run.column("lr/muon").values.tolist() == [0.5]


@pytest.mark.parametrize(
    "change",
    [
        {"num_devices": "</script><script>window.hacked=1</script>"},
        {"peak": "1"},
        {"mesh": {"a": 10**9}},
        {"leaves": [{**LEAF, "bytes": "<img src=x onerror=window.hacked=1>"}]},
        {"items": 1.5},
    ],
)
def test_a_plan_with_a_field_of_another_type_is_invalid(change):
    good = plan({"fsdp": 2}, [LEAF])
    Plan.from_json(good)
    with pytest.raises(ValueError, match="plan"):
        Plan.from_json(good | change)
