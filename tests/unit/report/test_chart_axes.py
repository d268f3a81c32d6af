"""What curves are drawn over beside steps: units seen, and time without the pauses between starts."""

import json

import numpy as np
import pytest

from shardwise.report.chart_axes import axes_of, seconds_until, units_until
from shardwise.rundir.files import RunFiles
from shardwise.rundir.time_accounting import account
from tests.helpers.run_dirs import T0, lines, make_run, step


def found(*paths, most=600):
    runs = [RunFiles(path).read() for path in paths]
    drawn = {i for i, run in enumerate(runs) if run.columns}
    return {axis.key: axis for axis in axes_of(runs, [account(run) for run in runs], most, drawn)}


def at(column, *steps):
    return np.interp(steps, column.steps, column.values).tolist()


def test_units_are_counted_once_and_time_is_without_the_pauses(tmp_path):
    """The first start ended after 30 s; 70 s later the second began, and went on from step 20."""
    axes = found(make_run(tmp_path / "a"))
    assert axes["units"].label == "tokens"
    assert at(axes["units"].runs[0], 0, 1, 20, 40) == [0, 256, 20 * 256, 40 * 256]
    assert at(axes["time"].runs[0], 1, 20, 21, 40) == [10.5, 20, 50.5, 60]


def test_an_evaluation_that_was_made_after_a_restart_is_at_its_own_time(tmp_path):
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "eval_loss": 0.7, "time": T0 + 112}) + "\n")
    assert at(found(path)["time"].runs[0], 19, 20, 21) == [19.5, 42, 50.5]


def test_steps_that_were_not_written_down_are_like_the_next(tmp_path):
    (tmp_path / "a").mkdir()
    lines(tmp_path / "a" / "metrics.jsonl", [step(n) for n in (10, 20, 30)])
    assert at(units_until(RunFiles(tmp_path / "a").read(), "tokens"), 10, 15, 30) == [
        2560,
        3840,
        7680,
    ]


def test_a_clock_that_was_set_back_does_not_turn_the_curve_around(tmp_path):
    (tmp_path / "a").mkdir()
    lines(
        tmp_path / "a" / "metrics.jsonl",
        [step(n, T0 - 100 * (n == 3)) for n in range(1, 6)] + [step(6, time=3.0)],
    )
    run = RunFiles(tmp_path / "a").read()
    column = seconds_until(run, account(run))
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
def test_an_axis_has_to_be_known_of_all_runs(tmp_path, key, change):
    one, two, empty = make_run(tmp_path / "one"), make_run(tmp_path / "two"), tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    assert set(found(one, two, empty)) == {
        "units",
        "time",
    }  # one that has not begun takes none away
    lines(two / "metrics.jsonl", [{**step(n), **change} for n in range(1, 41)])
    assert set(found(one, two, empty)) == {"units", "time"} - {key}


def test_few_points_keep_the_leaps(tmp_path):
    (tmp_path / "a").mkdir()
    lines(tmp_path / "a" / "metrics.jsonl", [step(n, T0 + 500 * (n > 777)) for n in range(1, 2001)])
    column = found(tmp_path / "a", most=50)["time"].runs[0]
    assert len(column) < 100
    assert at(column, 777, 778) == pytest.approx([388, 888.5])
