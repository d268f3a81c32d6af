"""The chart engine in a real browser: ticks, ranges, smoothing, and where values are drawn."""

import math
import re

import numpy as np
import pytest

from shardwise.report.charts import Chart, LineStyle, make_series
from shardwise.report.run_page import report_page
from shardwise.report.sections.curves import make_charts
from shardwise.rundir.columns import Column
from shardwise.rundir.files import RunFiles
from shardwise.text import show_number, smoothed
from tests.helpers.browser import set_screen
from tests.helpers.run_dirs import lines, make_run, step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run that is long enough to be thinned, with an outlier and a missing value."""
    path = make_run(tmp_path_factory.mktemp("runs") / "long")
    records = [
        step(
            n,
            loss=3 + 40 / n + 0.1 * (n % 7),
            grad_norm=1 + 0.1 * (n % 5) + 99 * (n == 900),
        )
        for n in range(1, 2001)
    ]
    records[500]["loss"] = "nan"
    evaluations = [
        {"step": n, "eval_loss": 3.1 + 30 / n} for n in range(100, 2001, 100)
    ]
    lines(path / "metrics.jsonl", [*records, *evaluations])
    return RunFiles(path).read()


@pytest.fixture(scope="module")
def call(browser, run, tmp_path_factory):
    """Return a function that evaluates an expression on the page, with arguments `a`."""
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(report_page([run]), encoding="utf-8")
    set_screen(browser)
    browser.get(page.as_uri())
    yield lambda code, *args: browser.execute_script(
        f"const a = [...arguments]; {code}", *args
    )
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1e-9, 3e-9), (-5, 1e90), (3, 3.001), (1e5, 9e12)]
)
def test_ticks_are_round_and_within_the_range(call, low, high):
    ticks = call("return ticks(a[0], a[1], false, 5)", low, high)
    assert 2 <= len(ticks) <= 11
    tolerance = 1e-6 * (high - low)
    assert all(low - tolerance <= tick <= high + tolerance for tick in ticks)
    distance = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert float(f"{distance:.6g}") == pytest.approx(float(f"{distance:.2g}"))


def test_ticks_of_a_logarithmic_axis(call):
    assert call("return ticks(0.9, 110, true, 5)") == [1, 10, 100]
    assert call("return ticks(0.9, 9, true, 5)") == [1, 2, 5]
    assert len(call("return ticks(1e-90, 1e90, true, 5)")) <= 7


def test_tick_labels_differ(call):
    assert call("return tickLabels([10000, 20000])") == ["10k", "20k"]
    assert call("return tickLabels([123450, 123451])") == ["123,450", "123,451"]
    assert call("return tickLabels([-1.0002, -1.0001])")[0] == "\u22121.0002"


def test_numbers_are_written_as_python_writes_them(call):
    generator = np.random.default_rng(0)
    values = [
        0,
        0.0125,
        12345,
        1e-4,
        -2.5,
        9.9999e5,
        1.5e20,
        1234,
        999.95,
        1e4,
        9999.5,
        0.001,
    ]
    values += (
        generator.uniform(-10, 10, 2000) * 10.0 ** generator.integers(-99, 99, 2000)
    ).tolist()
    shown = call("return a[0].map(showNumber)", values)
    expected = [show_number(value) for value in values]
    pairs = zip(values, shown, expected, strict=True)
    assert [(value, one, other) for value, one, other in pairs if one != other] == []


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_curves_are_smoothed_as_python_smooths_them(call, share):
    values = [math.sin(i) for i in range(300)]
    assert call("return smooth(a[0], a[1])", values, share) == pytest.approx(
        smoothed(values, share)
    )


def test_outliers_are_outside_the_range_unless_asked_for(call):
    values = np.sin(np.arange(100_000) / 1000.0)
    values[77_777] = 50.0
    column = Column(np.arange(1, 100_001), values)
    series = make_series(column, "loss", 0, LineStyle.of(0), 600)
    chart = Chart("loss", "Loss", [series]).as_json()
    code = """const visible = [{series: a[0].series[0], from: 0, to: a[0].series[0].x.length}];
        return yRange(a[0], visible, false, a[1])"""
    _, everything, none_outside = call(code, chart, True)
    _, most, outside = call(code, chart, False)
    assert everything > 50 > most > 1
    assert (none_outside, outside) == (0, 1)


@pytest.mark.parametrize("is_log", [False, True])
def test_curves_are_drawn_at_their_values(call, run, is_log):
    """Two ticks of an axis give its scale, which turns drawn points back into values."""
    for chart in make_charts([run]):
        # With outliers, so that no value is moved to the edge of the drawing.
        call("view.smoothing = 0; view.showOutliers[a[0]] = true", chart.name)
        call("view.isLog[a[0]] = a[1]", chart.name, is_log)
        markup = call("return draw(charts[a[0]], 620).markup", chart.name)
        assert "NaN" not in markup
        ticks = call(
            """const chart = charts[a[0]];
            const [low, high] = yRange(chart, draw(chart, 620).visible, a[1], true);
            return ticks(low, high, a[1], 5)""",
            chart.name,
            is_log,
        )
        ys = [
            float(y)
            for y in re.findall(r'class="place end" x="50" y="([-\d.]+)"', markup)
        ]
        transform = math.log10 if is_log else float
        scale = (transform(ticks[-1]) - transform(ticks[0])) / (ys[-1] - ys[0])
        paths = re.findall(r'class="line (s\d d\d)" d="M([^"]*)"', markup)
        assert [style for style, _ in paths] == [
            f"{series.style.color} {series.style.dash}" for series in chart.series
        ]
        for (_, path), series in zip(paths, chart.series, strict=True):
            points = [
                [float(number) for number in point.split()] for point in path.split("L")
            ]
            assert len(points) == len(series.x)
            assert points[0][0] == pytest.approx(
                58 + 548 * _share(chart, series.x[0]), abs=0.1
            )
            assert points[-1][0] == pytest.approx(
                58 + 548 * _share(chart, series.x[-1]), abs=0.1
            )
            for (_, y), value in zip(points, series.y, strict=True):
                if value > 0:
                    drawn = transform(ticks[0]) + scale * (y - ys[0])
                    assert drawn == pytest.approx(
                        transform(value), abs=abs(0.5 * scale)
                    )
    call("view.isLog = {}; view.showOutliers = {}")


def _share(chart, step):
    """Return where a step is on the x axis of a chart, from 0 to 1."""
    left = min(series.x[0] for series in chart.series)
    right = max(series.x[-1] for series in chart.series)
    return (step - left) / (right - left)


def test_a_spike_outside_the_drawing_is_drawn_outside(call, run):
    grad = next(chart for chart in make_charts([run]) if chart.name == "grad")
    assert max(grad.series[0].high) == 100
    call("view.showOutliers = {}")
    drawn = call("const d = draw(charts.grad, 620); return [d.markup, d.numOutside]")
    assert drawn[1] == 1
    band = re.search(r'class="band s0" d="M([^"]*)Z"', drawn[0])[1]
    # Above the top of the frame, where the clip path cuts it off.
    assert min(float(point.split()[1]) for point in band.split("L")) < 0


def test_missing_values_are_marked_at_their_step(call, run):
    markup = call("return draw(charts.loss, 620).markup")
    (x,) = re.findall(r'class="missing s0" d="M([-\d.]+) 12l3 6l3 -6z"', markup)
    loss = make_charts([run])[0]
    assert float(x) + 3 == pytest.approx(58 + 548 * _share(loss, 501), abs=0.1)
