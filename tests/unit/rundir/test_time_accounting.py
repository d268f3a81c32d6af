"""Where the time of a run went, from the files in its directory."""

import json
import os

import pytest

from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize
from shardwise.rundir.time_accounting import account
from tests.helpers.run_dirs import T0, lines, make_run, step


def test_the_time_of_two_starts(tmp_path):
    accounted = account(RunFiles(make_run(tmp_path / "a")).read())
    first, second = accounted.starts
    assert (first.first, first.last, first.again, second.first, second.last) == (
        0,
        25,
        5,
        20,
        40,
    )
    assert (first.begun, first.end, second.begun) == (T0, T0 + 30, T0 + 100)
    assert second.down == 70
    # The time of the last record is T0 + 130.
    assert accounted.wall == 130
    # 40 steps of 0.5 s, each with 0.1 s waiting for data
    assert accounted.useful == pytest.approx(40 * 0.4)
    assert accounted.goodput == pytest.approx(16 / 130)
    assert accounted.again == 5
    kinds = first.seconds
    assert kinds["compiling"] == 4
    assert (kinds["evaluation"], kinds["saving"]) == (3, 1)
    assert kinds["steps that count"] == pytest.approx(19 * 0.5 - 20 * 0.1)
    assert kinds["steps done again"] == pytest.approx(
        13 - 0.5 - kinds["steps that count"] - 2.5
    )
    assert first.total == pytest.approx(30)
    assert sum(accounted.seconds.values()) == pytest.approx(130)


def test_time_without_phases_is_marked_as_estimated(tmp_path):
    path = make_run(tmp_path / "a", again=False)
    records = [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
    ]
    lines(
        path / "metrics.jsonl",
        [{k: v for k, v in record.items() if k != "time"} for record in records],
    )
    os.utime(path / "metrics.jsonl", (T0 + 130, T0 + 130))
    accounted = account(RunFiles(path).read())
    assert accounted.is_estimated
    assert accounted.again is None
    assert accounted.wall == pytest.approx(130)


def test_skipped_updates_are_not_useful_time(tmp_path):
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(41, T0 + 100, skipped=True, loss="nan")) + "\n")
    run = RunFiles(path).read()
    assert account(run).useful == pytest.approx(40 * 0.4)
    assert summarize(run).skipped == 1
