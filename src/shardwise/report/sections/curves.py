"""The curves of a report: which metrics share a chart, and the markup around each chart."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.report.chart_axes import XAxis, x_axes
from shardwise.report.charts import (
    HEIGHT,
    MARKERS,
    NUM_COLORS,
    WIDTH,
    Chart,
    LineStyle,
    Series,
    legend_line,
    make_series,
    sketch,
    table_rows,
)
from shardwise.report.html import escape, plural, row, section, table
from shardwise.rundir.files import RunRecord
from shardwise.rundir.summary import Summary
from shardwise.text import SMOOTH, show_number

# Points per curve, about as many as a chart is pixels wide. Several runs share the budget.
MAX_POINTS = 600
MIN_POINTS = 120
# Charts of metrics that a recipe logs itself, and curves per chart and run.
MAX_CUSTOM_CHARTS = 12
MAX_METRICS_PER_CHART = 8
# Logged with every step, but no curve on their own.
NOT_DRAWN = {"time", "skipped"}


# Which metrics share a chart


@dataclass(frozen=True)
class ChartSpec:
    """A chart before its curves are known.

    Attributes:
        name: Short name for ids.
        title: Heading of the chart.
        metrics: Label of each metric in the chart, by the name of the metric.
        options: Options of `Chart`: from_zero, can_smooth, can_log.
    """

    name: str
    title: str
    metrics: dict[str, str]
    options: dict[str, bool] = field(default_factory=dict)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of all metrics that the runs have logged."""
    names = dict.fromkeys(
        name for run in runs for name, column in run.columns.items() if len(column)
    )
    charts = []
    for spec in _chart_specs(list(names)):
        series = _spec_series(spec, runs)
        if series:
            charts.append(Chart(spec.name, spec.title, series, **spec.options))
    return charts


def _chart_specs(names: list[str]) -> list[ChartSpec]:
    log, log_from_zero = {"can_log": True}, {"can_log": True, "from_zero": True}
    norms = {"grad_norm": "all", "clipped_norm": "after clipping"}
    grad = _by_group(names, norms)
    # The norm of the unclipped gradient comes first, whatever was logged first.
    grad = dict(sorted(grad.items(), key=lambda item: item[0] != "grad_norm"))
    specs = [
        ChartSpec(
            "loss", "Loss", _logged(names, loss="training", eval_loss="validation"), log
        ),
        *_validation_specs(names),
        ChartSpec(
            "lr",
            "Learning rate",
            _by_group(names, {"lr": "learning rate"}),
            log_from_zero | {"can_smooth": False},
        ),
        ChartSpec("grad", "Gradient norm", grad, log),
        ChartSpec(
            "update", "Update norm", _by_group(names, {"update_norm": "all"}), log
        ),
        ChartSpec(
            "param", "Parameter norm", _by_group(names, {"param_norm": "all"}), log
        ),
        *_throughput_specs(names),
        ChartSpec("mfu", "MFU", _logged(names, mfu="MFU"), {"from_zero": True}),
        ChartSpec(
            "seconds",
            "Seconds per step",
            _logged(names, step_s="step", data_s="waiting for data"),
            log_from_zero,
        ),
    ]
    drawn = {name for spec in specs for name in spec.metrics}
    others = [name for name in names if name not in drawn | NOT_DRAWN]
    for i, name in enumerate(others[:MAX_CUSTOM_CHARTS]):
        specs.append(ChartSpec(f"other{i}", name, {name: name}, log))
    return specs


def _logged(names: Iterable[str], **labels: str) -> dict[str, str]:
    """Return the labels of the metrics that were logged."""
    return {name: label for name, label in labels.items() if name in names}


def _by_group(names: Iterable[str], labels: dict[str, str]) -> dict[str, str]:
    """Return labels of metrics and of their parts: lr, and lr/muon for a group of parameters."""
    found = {}
    for name in names:
        base, _, group = name.partition("/")
        if base in labels and (group or name == base):
            found[name] = group or labels[base]
    return found


def _validation_specs(names: Sequence[str]) -> list[ChartSpec]:
    """Return a chart for each validation metric, next to the same metric of the training data."""
    specs: list[ChartSpec] = []
    for name in names:
        if not name.startswith("eval_") or name == "eval_loss":
            continue
        metric = name.removeprefix("eval_")
        title = f"{metric[:1].upper()}{metric[1:]}"
        labels = {metric: "training", name: "validation"}
        if metric not in names:
            title, labels = f"Validation {metric}", {name: "validation"}
        specs.append(ChartSpec(f"eval{len(specs)}", title, labels, {"can_log": True}))
    return specs


def _throughput_specs(names: Iterable[str]) -> list[ChartSpec]:
    specs = []
    for i, name in enumerate(name for name in names if name.endswith("_per_s")):
        unit = f"{name.removesuffix('_per_s')}/s"
        specs.append(
            ChartSpec(
                f"rate{i}", f"Throughput, {unit}", {name: unit}, {"from_zero": True}
            )
        )
    return specs


def _spec_series(spec: ChartSpec, runs: Sequence[RunRecord]) -> list[Series]:
    """Return the curves of a chart: of each metric, one per run that has it."""
    found = []
    metrics = list(spec.metrics.items())[:MAX_METRICS_PER_CHART]
    for k, (metric, label) in enumerate(metrics):
        for i, run in enumerate(runs):
            full_label, style = label, LineStyle.of(k)
            if len(runs) > 1:
                full_label = f"{run.name}, {label}" if len(metrics) > 1 else run.name
                # The color tells runs apart, and the dashes the metrics of a run.
                style = LineStyle.of(i + NUM_COLORS * k)
            series = make_series(
                run.column(metric), full_label, i, style, _max_points(runs)
            )
            if series is not None:
                found.append(series)
    return found


def _max_points(runs: Sequence[RunRecord]) -> int:
    return max(MIN_POINTS, MAX_POINTS * 4 // (len(runs) + 3))


# The markup around the charts


def curves_section(summaries: Sequence[Summary]) -> str:
    """Return the section: the controls, all charts, and the data that the script draws."""
    runs = [summary.run for summary in summaries]
    charts = make_charts(runs)
    if not charts:
        return section("curves", "Curves", "<p>No steps have been logged yet.</p>")
    drawn = {series.run for chart in charts for series in chart.series}
    accounts = [summary.account for summary in summaries]
    axes = x_axes(runs, accounts, _max_points(runs), drawn)
    body = f"""{MARKERS}
{_controls(runs, axes)}
<div class="charts">{"".join(_figure(chart) for chart in charts)}</div>
<script type="application/json" id="data">{_script_data(charts, axes)}</script>"""
    return section("curves", "Curves", body)


def _script_data(charts: Sequence[Chart], axes: Sequence[XAxis]) -> str:
    """Return the data as JSON that cannot end the script element it is in."""
    data = {
        "charts": [chart.as_json() for chart in charts],
        "smoothing": SMOOTH,
        "axes": [axis.as_json() for axis in axes],
    }
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _controls(runs: Sequence[RunRecord], axes: Sequence[XAxis]) -> str:
    """Return the controls above the charts. They are hidden until the script runs."""
    percent = f"{100 * SMOOTH:g}"
    about_time = ""
    if any(axis.key == "time" for axis in axes):
        about_time = (
            " Time counts from the beginning of the first start, without the downtime between"
            " starts; steps that were repeated after a restart are included."
        )
    return f"""<div class="tools curves-tools" hidden>
{_axis_choice(axes)}
<label for="smoothing">Smoothing</label><input type="range" id="smoothing" min="0" max="20"
step="0.5" value="{percent}" aria-describedby="curves-help">
<output id="smoothing-value" for="smoothing">{percent} %</output>
<button type="button" id="show-all" disabled>Show all steps</button>
{_run_choice(runs)}
</div>
<p class="note keys" id="curves-help" hidden>Smoothing is an exponential moving average over that
share of a curve's points; the pale line behind it shows the raw values. Point at a chart, or focus
it and press the arrow keys, to read values. Drag across it, or press + and &minus;, to zoom; press
0 or Escape to show everything.{about_time}</p>"""


def _axis_choice(axes: Sequence[XAxis]) -> str:
    if not axes:
        return ""
    choices = [
        '<label><input type="radio" name="x" value="step" checked> steps</label>'
    ]
    for axis in axes:
        button = f'<input type="radio" name="x" value="{axis.key}">'
        choices.append(f"<label>{button} {escape(axis.label)}</label>")
    return f'<fieldset class="runs axes"><legend>X axis</legend>{"".join(choices)}</fieldset>'


def _run_choice(runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" class="run" value="{i}" checked>'
        f"{legend_line(LineStyle.of(i), has_marker=True)} {escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    return f'<fieldset class="runs"><legend>Runs</legend>{boxes}</fieldset>'


def _figure(chart: Chart) -> str:
    """Return a chart with its switches, legend, notes and table."""
    title, description = escape(chart.title), escape(chart.describe())
    log = ""
    if chart.can_log:
        log = '<label><input type="checkbox" class="log"> log</label>'
    head = ["step", *(series.label for series in chart.series)]
    rows = [row(cells) for cells in table_rows(chart)]
    return f"""<figure class="chart" id="chart-{chart.name}" data-chart="{chart.name}">
<figcaption><h3>{title}</h3><span class="at"></span><span class="switches" hidden>{log}
<label class="outliers" hidden><input type="checkbox"> outliers</label></span></figcaption>
<div class="plot" role="img" aria-label="{title}. {description}">
<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" aria-hidden="true">{sketch(chart)}</svg></div>
<ul class="readout">{_legend(chart)}</ul>
<p class="note">{" ".join(_notes(chart))} <span class="outside" hidden></span></p>
<details><summary>{title}: description and table</summary><p class="note">{description}</p>
{table(chart.title, head, rows)}</details>
</figure>
"""


def _legend(chart: Chart) -> str:
    entries = []
    for i, series in enumerate(chart.series):
        sample = legend_line(series.style, series.has_markers)
        value = f'<b data-series="{i}">{show_number(series.last.value)}</b>'
        entries.append(
            f'<li data-run="{series.run}">{sample}<span>{escape(series.label)}</span> {value}</li>'
        )
    return "".join(entries)


def _notes(chart: Chart) -> list[str]:
    """Return what a reader must know about the curves: thinned points, missing values."""
    notes = []
    steps_per_point = max(series.steps_per_point for series in chart.series)
    if steps_per_point > 1:
        notes.append(
            f"Each point is the mean of about {steps_per_point:,.0f} steps; "
            "the band spans their minimum and maximum."
        )
    for series in chart.series:
        if series.num_missing:
            steps = ", ".join(f"{step:,}" for step in series.missing[:5])
            more = " …" if series.num_missing > 5 else ""
            notes.append(
                f"{escape(series.label)}: {plural(series.num_missing, 'value')} not drawn "
                f"(not finite, or beyond 1e100), marked ▾ at step {steps}{more}."
            )
    return notes
