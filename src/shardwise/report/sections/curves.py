"""The curves of a report: which stand together, and each as a drawing, in words and as a table."""

import json
from collections.abc import Sequence
from typing import Any

from shardwise.report.chart_axes import axes_of
from shardwise.report.charts import (
    HEIGHT,
    MARKS,
    WIDTH,
    Chart,
    draw,
    rows,
    run_mark,
    sample,
    thin,
    told,
)
from shardwise.report.html import escape, row, section, table
from shardwise.rundir.files import RunRecord
from shardwise.rundir.summary import Summary
from shardwise.text import SMOOTH, show_number

MOST_POINTS = 600  # of a curve, about as many as a chart has pixels
MOST_OTHERS = 12
KNOWN = {
    "loss",
    "lr",
    "grad_norm",
    "clipped_norm",
    "update_norm",
    "param_norm",
    "mfu",
    "step_s",
    "data_s",
    "time",
    "skipped",
}


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Which curves stand together."""
    names = list(
        dict.fromkeys(name for run in runs for name, column in run.columns.items() if len(column))
    )

    def some(*prefixes: str) -> dict[str, str]:
        """Metrics and what their curves are called: the first name is the whole, behind a slash stand groups."""
        return {
            n: n.partition("/")[2] or "all"
            for n in names
            if n in prefixes or ("/" in n and n.partition("/")[0] in prefixes)
        }

    plans: list[tuple[str, str, str, dict[str, str], dict[str, Any]]] = [
        (
            "loss",
            "Loss",
            "",
            {
                n: label
                for n, label in (("loss", "training"), ("eval_loss", "held out"))
                if n in names
            },
            {"can_log": True},
        ),
    ]
    for i, name in enumerate(n for n in names if n.startswith("eval_") and n != "eval_loss"):
        plans.append(
            (
                f"eval{i}",
                f"Held-out {name.removeprefix('eval_')}",
                "",
                {name: "held out"},
                {"can_log": True},
            )
        )
    lr = {n: ("learning rate" if n == "lr" else n.partition("/")[2]) for n in some("lr")}
    plans.append(("lr", "Learning rate", "", lr, {"zero": True, "smooth": False, "can_log": True}))
    grad = {
        n: {"grad_norm": "all", "clipped_norm": "after clipping"}.get(n, label)
        for n, label in some("grad_norm", "clipped_norm").items()
    }
    plans.append(
        (
            "grad",
            "Gradient norm",
            "",
            dict(sorted(grad.items(), key=lambda item: item[0] != "grad_norm")),
            {"can_log": True},
        )
    )
    plans.append(("update", "Update norm", "", some("update_norm"), {"can_log": True}))
    plans.append(("param", "Parameter norm", "", some("param_norm"), {"can_log": True}))
    for i, name in enumerate(n for n in names if n.endswith("_per_s")):
        unit = name.removesuffix("_per_s")
        plans.append(
            (f"rate{i}", f"Throughput, {unit}/s", f"{unit}/s", {name: f"{unit}/s"}, {"zero": True})
        )
    plans.append(("mfu", "MFU", "", {"mfu": "MFU"} if "mfu" in names else {}, {"zero": True}))
    seconds = {
        n: label
        for n, label in (("step_s", "step"), ("data_s", "of it waiting for data"))
        if n in names
    }
    plans.append(("seconds", "Seconds a step", "s", seconds, {"zero": True, "can_log": True}))
    taken = {name for _, _, _, metrics, _ in plans for name in metrics} | KNOWN
    others = [n for n in names if n not in taken][:MOST_OTHERS]
    plans += [
        (f"other{i}", name, "", {name: name}, {"can_log": True}) for i, name in enumerate(others)
    ]
    most = _most_points(runs)
    charts = []
    for key, title, unit, metrics, options in plans:
        series = []
        for k, (name, label) in enumerate(list(metrics.items())[:8]):
            for i, run in enumerate(runs):
                full = (
                    label
                    if len(runs) == 1
                    else f"{run.name}, {label}"
                    if len(metrics) > 1
                    else run.name
                )
                found = (
                    thin(run.column(name), full, i, k if len(runs) == 1 else i + 8 * k, most)
                    if name in run.columns
                    else None
                )
                series += [found] if found is not None else []
        if series:
            charts.append(Chart(key, title, unit, series, **options))
    return charts


def _most_points(runs: Sequence[RunRecord]) -> int:
    return max(120, MOST_POINTS * 4 // (len(runs) + 3))


def curves_section(summaries: Sequence[Summary]) -> str:
    records = [s.run for s in summaries]
    charts = charts_of(records)
    if not charts:
        return section("curves", "Curves", "<p>No step has been written down yet.</p>")
    drawn = {
        series.run for chart in charts for series in chart.series
    }  # a run that has no step yet shall not take an axis away
    axes = axes_of(records, [s.account for s in summaries], _most_points(records), drawn)
    known = {
        "charts": [chart.as_json() for chart in charts],
        "smooth": SMOOTH,
        "axes": [axis.as_json() for axis in axes],
    }
    data = json.dumps(known, allow_nan=False)
    safe = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    runs = ""
    if len(summaries) > 1:
        boxes = "".join(
            f'<label><input type="checkbox" class="run" value="{i}" checked>{run_mark(i)}{escape(s.run.name)}</label>'
            for i, s in enumerate(summaries)
        )
        runs = f'<fieldset class="runs"><legend>Runs</legend>{boxes}</fieldset>'
    across = explained = ""
    if axes:
        names = [("step", "steps"), *((axis.key, axis.label) for axis in axes)]
        choices = "".join(
            f'<label><input type="radio" name="x" value="{key}"{" checked" if key == "step" else ""}> {escape(name)}</label>'
            for key, name in names
        )
        explained = (
            " Time is that since the beginning of the first start, without the time between starts; what was done again is in it."
            if axes[-1].key == "time"
            else ""
        )
        across = f'<fieldset class="runs axes"><legend>Over</legend>{choices}</fieldset>'
    body = f"""{MARKS}
<div class="tools curves-tools" hidden>
{across}
<label for="smooth">Smoothing</label><input type="range" id="smooth" min="0" max="20" step="0.5" value="{100 * SMOOTH:g}"
aria-describedby="how"><output id="smoothed" for="smooth">{100 * SMOOTH:g} %</output>
<button type="button" id="whole" disabled>Show all steps</button>
{runs}
</div>
<p class="note keys" id="how" hidden>Smoothing is an exponential mean over that share of a curve's points;
pale behind it is what was measured. Point at a chart, or move to it and press the arrow keys, to read values; drag across it, or
press + and &minus;, to look closer, 0 or Escape for all.{explained}</p>
<div class="charts">{"".join(_chart(chart) for chart in charts)}</div>
<script type="application/json" id="data">{safe}</script>"""
    return section("curves", "Curves", body)


def _chart(chart: Chart) -> str:
    drawing, outside = draw(chart)
    words = told(chart)
    legend = "".join(
        f'<li data-run="{s.run}">{sample(s)}<span>{escape(s.label)}</span> <b data-series="{i}">{show_number(s.last[0])}</b></li>'
        for i, s in enumerate(chart.series)
    )
    notes = []
    thinned = max(s.per_point for s in chart.series)
    if thinned > 1:
        notes.append(
            f"A point is the mean of about {thinned:,.0f} steps, the band reaches from their least to their greatest value."
        )
    for s in chart.series:
        if s.num_missing:
            at = ", ".join(f"{step:,}" for step in s.missing[:5]) + (
                " …" if s.num_missing > 5 else ""
            )
            notes.append(
                f"{escape(s.label)}: {s.num_missing:,} values cannot be drawn (not finite, or beyond 1e100), ▾ at step {at}."
            )
    more = f'<span class="outside"{"" if outside else " hidden"}><span class="count">{outside:,}</span> values lie outside the drawing.</span>'
    log = '<label><input type="checkbox" class="log"> log</label>' if chart.can_log else ""
    head = ["step", *(s.label for s in chart.series)]
    body = [row([cells[0], *cells[1:]]) for cells in rows(chart)]
    title = escape(chart.title)
    return f"""<figure class="chart" id="chart-{chart.name}" data-chart="{chart.name}">
<figcaption><h3>{title}</h3><span class="at"></span><span class="switches" hidden>{log}
<label class="every"{"" if outside else " hidden"}><input type="checkbox" class="everything"> all values</label></span></figcaption>
<div class="plot" role="img" aria-label="{title}. {escape(words)}">
<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" aria-hidden="true">{drawing}</svg></div>
<ul class="readout">{legend}</ul>
<p class="note">{" ".join(notes)} {more}</p>
<details><summary>{title} in words and as a table</summary><p class="note">{escape(words)}</p>
{table(chart.title, head, body)}</details>
</figure>
"""
