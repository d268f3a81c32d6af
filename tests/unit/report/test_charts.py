"""The data of charts: thinned curves, descriptions, tables and sketches.

The drawing itself is tested in a browser, by tests/browser/test_curves.py.
"""

import math
import re

import numpy as np
import pytest

from shardwise.report.charts import Chart, LineStyle, make_series, sketch, table_rows
from shardwise.report.sections.curves import make_charts
from shardwise.rundir.columns import Column
from shardwise.rundir.files import RunFiles
from shardwise.text import NONE, show_number, smoothed
from tests.helpers.run_dirs import lines, make_run, step


def series_of(steps, values, max_points=600):
    column = Column(np.asarray(steps), np.asarray(values, np.float64))
    return make_series(column, "loss", 0, LineStyle.of(0), max_points)


def test_a_thinned_curve_keeps_its_extremes():
    values = np.sin(np.arange(100_000) / 1000.0)
    values[77_777], values[5], values[6], values[9] = 50.0, math.nan, math.inf, 1e200
    series = series_of(np.arange(1, 100_001), values)
    assert len(series.x) <= 600
    assert max(series.high) == 50.0
    assert series.largest == (50.0, 77_778)
    assert series.num_missing == 3
    assert series.missing == [6, 7, 10]
    points = zip(series.low, series.y, series.high, strict=True)
    assert all(low <= y <= high for low, y, high in points)
    chart = Chart("loss", "Loss", [series])
    assert "nan" not in sketch(chart)
    assert "maximum 50 (step 77,778)" in chart.describe()
    assert len(list(table_rows(chart))) == 16


def test_a_curve_without_drawable_values_is_not_drawn():
    assert series_of([1, 2, 3], [math.nan, -math.inf, 1e101]) is None
    assert series_of([], []) is None


def test_a_few_values_get_markers_and_values_at_every_step_do_not():
    assert series_of([100, 200, 300], [1, 2, 3]).has_markers
    assert series_of(range(0, 500, 10), range(50)).has_markers
    assert not series_of(range(1, 51), range(50)).has_markers


def test_the_sketch_spans_its_frame():
    """The smallest value is at the bottom, the largest at the top, steps from left to right."""
    series = series_of([10, 20, 30], [1.0, 5.0, 3.0])
    drawn = sketch(Chart("loss", "Loss", [series]))
    (path,) = re.findall(r'class="line s0 d0" d="M(.*?)"', drawn)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert points == [(58, 224), (332, 12), (606, 118)]
    assert re.findall(r">([^<>]+)</text>", drawn) == ["5", "1", "10", "step 30"]


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [1e100, -1e100]])
def test_the_sketch_of_unusual_values_has_finite_coordinates(values):
    series = series_of(range(len(values)), values)
    drawn = sketch(Chart("loss", "Loss", [series], from_zero=True))
    assert not re.search(r"nan|inf", drawn)


def test_the_table_has_a_dash_where_a_curve_has_no_value():
    chart = Chart(
        "loss", "Loss", [series_of([1, 2], [5, 6]), series_of([2, 3], [7, 8])]
    )
    assert list(table_rows(chart)) == [
        ["1", "5", NONE],
        ["2", "6", "7"],
        ["3", NONE, "8"],
    ]


def test_the_first_64_line_styles_differ():
    assert len({LineStyle.of(i)[:2] for i in range(64)}) == 64


def test_metrics_share_charts(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    custom = {
        "lr/muon": 0.1,
        "clipped_norm": 0.5,
        "accuracy": 0.9,
        "eval_accuracy": 0.8,
        "perplexity": 2.0,
        "eval_bits": 1.0,
        "mfu": 0.4,
    }
    lines(
        path / "metrics.jsonl", [step(n, eval_loss=1.0, **custom) for n in range(1, 5)]
    )
    charts = {
        c.title: [s.label for s in c.series]
        for c in make_charts([RunFiles(path).read()])
    }
    assert charts == {
        "Loss": ["training", "validation"],
        "Accuracy": ["training", "validation"],
        "Validation bits": ["validation"],
        "Learning rate": ["learning rate", "muon"],
        "Gradient norm": ["all", "after clipping"],
        "Throughput, tokens/s": ["tokens/s"],
        "MFU": ["MFU"],
        "Seconds per step": ["step", "waiting for data"],
        "perplexity": ["perplexity"],
    }


def test_the_color_of_a_curve_tells_its_run(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    lines(two / "metrics.jsonl", [step(n, loss=9 / n) for n in range(1, 30)])
    loss = make_charts([RunFiles(path).read() for path in (one, two)])[0]
    labels = [series.label for series in loss.series]
    assert labels == ["one, training", "two, training", "one, validation"]
    assert len({series.style[:2] for series in loss.series}) == 3
    assert loss.series[0].style.color == loss.series[2].style.color


def test_numbers_for_people():
    values = (0, 0.0125, 12345, 1e-4, -2.5, 9.9999e5, 1.5e20, math.inf, math.nan, 1234)
    shown = ["0", "0.0125", "12.35k", "1e-4", "\u22122.5", "1M", "1.5e20", "∞"]
    assert [show_number(value) for value in values] == [*shown, "not a number", "1234"]
    assert smoothed([1.0, 3.0], 0.0) == [1, 3]
