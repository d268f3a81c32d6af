"""X axes of curves: units seen, and running time without downtime."""

import json

import numpy as np
import pytest

from shardwise.report.chart_axes import running_seconds, units_seen, x_axes
from shardwise.rundir.files import RunFiles
from shardwise.rundir.time_accounting import account
from tests.helpers.run_dirs import T0, lines, make_run, step


def axes_of(*paths, max_points=600):
    runs = [RunFiles(path).read() for path in paths]
    drawn = {i for i, run in enumerate(runs) if run.columns}
    accounts = [account(run) for run in runs]
    return {axis.key: axis for axis in x_axes(runs, accounts, max_points, drawn)}


def at(column, *steps):
    return np.interp(steps, column.steps, column.values).tolist()


def test_units_count_once_and_time_excludes_downtime(tmp_path):
    """The first start ended after 30 s. The second began 70 s later and resumed from step 20."""
    axes = axes_of(make_run(tmp_path / "a"))
    assert axes["units"].label == "tokens"
    assert at(axes["units"].runs[0], 0, 1, 20, 40) == [0, 256, 20 * 256, 40 * 256]
    assert at(axes["time"].runs[0], 1, 20, 21, 40) == [10.5, 20, 50.5, 60]


def test_an_evaluation_after_a_restart_has_its_own_time(tmp_path):
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "eval_loss": 0.7, "time": T0 + 112}) + "\n")
    assert at(axes_of(path)["time"].runs[0], 19, 20, 21) == [19.5, 42, 50.5]


def test_steps_without_a_record_count_like_the_next_one(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    lines(path / "metrics.jsonl", [step(n) for n in (10, 20, 30)])
    seen = units_seen(RunFiles(path).read(), "tokens")
    assert at(seen, 10, 15, 30) == [2560, 3840, 7680]


def test_a_clock_that_was_set_back_does_not_reverse_the_curve(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    records = [step(n, T0 - 100 * (n == 3)) for n in range(1, 6)]
    lines(path / "metrics.jsonl", [*records, step(6, time=3.0)])
    run = RunFiles(path).read()
    column = running_seconds(run, account(run))
    assert column.steps.tolist() == [1, 2, 3, 4, 5]
    assert np.all(np.diff(column.values) >= 0)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("time", {"time": None}),
        ("time", {"time": 5.0}),
        ("units", {"tokens_per_s": None}),
        ("units", {"images_per_s": 3.0}),
    ],
)
def test_an_axis_must_be_known_for_all_runs(tmp_path, key, change):
    one, two, empty = (
        make_run(tmp_path / "one"),
        make_run(tmp_path / "two"),
        tmp_path / "empty",
    )
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    # A run that has not started yet hides no axis.
    assert set(axes_of(one, two, empty)) == {"units", "time"}
    lines(two / "metrics.jsonl", [{**step(n), **change} for n in range(1, 41)])
    assert set(axes_of(one, two, empty)) == {"units", "time"} - {key}


def test_thinning_keeps_jumps(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    lines(
        path / "metrics.jsonl", [step(n, T0 + 500 * (n > 777)) for n in range(1, 2001)]
    )
    column = axes_of(path, max_points=50)["time"].runs[0]
    assert len(column) < 100
    assert at(column, 777, 778) == pytest.approx([388, 888.5])
