"""What runs were and did, as one HTML page: curves, where the time went, the plan beside the measurement, samples, versions, source.

The page can be read without JavaScript; `report_page.js` adds reading off values, zooming, smoothing and logarithmic axes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.accounting import KINDS, Account, Start, account
from shardwise.curves import HEIGHT, MARKS, SMOOTH, WIDTH, Chart, draw, rows, sample, thin, told
from shardwise.page import Cell, Part, code, escape, facts, page, row, section, stacked, swatch, table, tile
from shardwise.plan_page import layout_section, memory_section
from shardwise.run_files import Column, RunRecord, show_moment
from shardwise.shown import NONE, TIMES, show_bytes, show_count, show_number, show_seconds, show_share, show_short_time

MOST_POINTS = 600  # of a curve, about as many as a chart has pixels
MOST_STARTS, MOST_SAMPLES, MOST_OTHERS = 20, 12, 12
MOST_TEXT = 4000  # characters of a sample
LOWER, HIGHER = ("loss", "error", "perplexity", "nats", "bits"), ("acc", "f1", "auc", "bleu", "precision", "recall")
KNOWN = {"loss", "lr", "grad_norm", "clipped_norm", "update_norm", "param_norm", "mfu", "step_s", "data_s", "time", "skipped"}
COLOURS = {
    "importing": "k2",
    "preparing": "k6",
    "verifying": "k0",
    "compiling": "k3",
    "loading": "k1",
    "other starting": "k2",
    "first step": "k7",
    "steps that count": "k4",
    "steps done again": "k5",
    "data": "t0",
    "evaluation": "t1",
    "saving": "t2",
    "not told apart": "rest",
    "down": "gone",
}
BEST = '<b class="best">\N{BLACK STAR} best</b>'


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers."""

    run: RunRecord
    account: Account
    status: str
    step: int
    loss: float | None  # mean of the last steps
    loss_over: int  # how many of them
    held_out: dict[str, tuple[float, int, float]]  # the best value, its step, the last value
    rates: dict[str, float]  # median throughput: "tokens/s"
    mfu: float | None
    step_seconds: float | None
    skipped: int
    left: float | None  # seconds to the end, if it goes on

    def as_json(self) -> dict[str, Any]:
        starts = [
            {"from": s.first, "to": s.last, "begun": s.begun, "end": s.end, "down": s.down, "again": s.again, "seconds": s.seconds}
            for s in self.account.starts
        ]
        return {
            "run": str(self.run.path),
            "status": self.status,
            "step": self.step,
            "steps": self.run.num_steps,
            "loss": self.loss,
            "held_out": {name: {"best": best, "step": at, "last": last} for name, (best, at, last) in self.held_out.items()},
            **{f"{name.removesuffix('/s')}_per_s": rate for name, rate in self.rates.items()},
            "mfu": self.mfu,
            "step_s": self.step_seconds,
            "skipped": self.skipped,
            "wall_s": self.account.wall,
            "useful_s": self.account.useful,
            "goodput": self.account.goodput,
            "steps_done_again": self.account.again,
            "seconds": self.account.seconds,
            "starts": starts,
            "notes": self.run.notes,
        }


def summarize(run: RunRecord) -> Summary:
    found = account(run)
    loss = _finite(run.column("loss"))
    over = max(1, round(SMOOTH * len(loss)))
    held_out = {}
    for name, column in run.columns.items():
        values = _finite(column)
        if name.startswith("eval_") and len(values):
            at = int(np.argmax(values.values) if _better(name) > 0 else np.argmin(values.values))
            held_out[name.removeprefix("eval_")] = (float(values.values[at]), int(values.steps[at]), float(values.values[-1]))
    firsts = {start.first + 1 for start in found.starts}
    rates = {
        f"{name.removesuffix('_per_s')}/s": median
        for name, column in run.columns.items()
        if name.endswith("_per_s") and (median := _median(column, firsts)) is not None
    }
    skipped = run.column("skipped")
    status = _status(run)
    seconds = _median(run.column("step_s"), firsts)
    left = (run.num_steps - run.last_step) * seconds if status == "going on" and run.num_steps and seconds is not None else None
    return Summary(
        run=run,
        account=found,
        status=status,
        step=run.last_step,
        loss=float(np.mean(loss.values[-over:])) if len(loss) else None,
        loss_over=over,
        held_out=held_out,
        rates=rates,
        mfu=_median(run.column("mfu"), firsts),
        step_seconds=seconds,
        skipped=int(np.count_nonzero(skipped.values)),
        left=left,
    )


def _finite(column: Column) -> Column:
    with np.errstate(all="ignore"):
        keep = np.abs(column.values) < 1e100
    return Column(column.steps[keep], column.values[keep])


def _median(column: Column, without: set[int]) -> float | None:
    """Of the latest ten thousand values, the first steps of the starts left out if there are others."""
    values = _finite(column)
    values = Column(values.steps[-10_000:], values.values[-10_000:])
    others = values.values[~np.isin(values.steps, list(without))]
    found = others if len(others) else values.values
    return float(np.median(found)) if len(found) else None


def _status(run: RunRecord) -> str:
    if run.num_steps is not None and run.last_step >= run.num_steps:
        return "finished"
    return "going on" if run.owner else "stopped"


def _better(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where that cannot be told from the name."""
    lower = name.lower()
    return -1 if any(word in lower for word in LOWER) else 1 if any(word in lower for word in HIGHER) else 0


def report_page(runs: Sequence[RunRecord], watch: float | None = None) -> str:
    """The page of one run, or of several side by side. With `watch`, it asks for itself again every so many seconds."""
    summaries = [summarize(run) for run in runs]
    body = f'data-watch="{watch:g}"' if watch else ""
    if len(runs) == 1:
        summary = summaries[0]
        title, kind = summary.run.name, "Report of a run"
        sections = {
            "Summary": _summary(summary),
            "Curves": _curves(summaries),
            "Time": _time(summary),
            "Plan": _plan(summary),
            "Memory": _guarded(memory_section, summary.run.plan),
            "Layout": _guarded(layout_section, summary.run.plan),
            "Samples": _samples(runs),
            "History": _history(summary),
            "Run": _about(summary.run),
        }
    else:
        title, kind = f"{len(runs)} runs side by side", "Report of runs"
        sections = {
            "Comparison": _comparison(summaries),
            "Differences": _differences(runs),
            "Curves": _curves(summaries),
            "Time": _times(summaries),
            "Plan": _plans(summaries),
            "Samples": _samples(runs),
            "Sources": _sources(runs),
        }
    live = '<p class="live" id="live" role="status">Refreshed while the run goes on.</p>' if watch else ""
    made = f"Made {show_moment(time.time())}." if not watch else "Served from this machine alone."
    footer = f"{made} One file; it asks nothing of any network."
    return page(title, kind, live, sections, footer, ["page", "plan_page", "report_page"], body, "'self'" if watch else "")


def _guarded(make: Any, plan: dict[str, Any] | None) -> str:
    """A section of the page of plans; none where the plan, though each field is of its kind, makes no sense."""
    try:
        return str(make(plan)) if plan is not None else ""
    except (ArithmeticError, ValueError, TypeError, LookupError):
        return ""


# In a few numbers


def _summary(s: Summary) -> str:
    run, steps = s.run, s.run.num_steps
    done = f"step {s.step:,}" + (f" of {steps:,}" if steps else "")
    state, sign, heading = {
        "finished": ("good", "\N{CHECK MARK}", f"Finished: {s.step:,} steps"),
        "going on": ("unknown", "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}", f"Going on: {done}"),
        "stopped": ("unknown", "\N{BLACK SQUARE}", f"Stopped after {done}"),
    }[s.status]
    lead = [f"{len(s.account.starts):,} start{'s' if len(s.account.starts) != 1 else ''}"]
    if s.account.starts[0].begun is not None:
        lead.append(f"the first on {show_moment(s.account.starts[0].begun)}")
    if s.skipped:
        lead.append(f"{s.skipped:,} updates skipped")
    if s.left is not None:
        lead.append(f"about {show_seconds(s.left)} left")
    tiles = [
        tile(
            "Training loss",
            show_number(s.loss) if s.loss is not None else NONE,
            f"mean of the last {s.loss_over:,} steps" if s.loss_over > 1 else "of the last step",
        )
    ]
    for name, (best, at, last) in list(s.held_out.items())[:3]:
        which = {1: "greatest", -1: "least", 0: "least"}[_better(name)]
        tiles.append(tile(f"Held-out {escape(name)}", show_number(best), f"{which}, at step {at:,}; {show_number(last)} at the end"))
    for name, rate in list(s.rates.items())[:2]:
        step = f"median; {show_short_time(s.step_seconds)} a step" if s.step_seconds is not None else "median"
        tiles.append(tile("Throughput", f"{show_count(rate)} <small>{escape(name)}</small>", step))
    if s.mfu is not None:
        tiles.append(tile("MFU", show_share(s.mfu, 1.0), "median; of the devices' peak"))
    if s.account.goodput is not None:
        tiles.append(tile("Goodput", show_share(s.account.goodput, 1.0), "steps that count, of the time since the first start"))
    if s.account.wall is not None:
        tiles.append(tile("Time", show_seconds(s.account.wall), f"{show_seconds(s.account.useful)} in steps that count"))
    body = f"""<p class="lead">{"; ".join(lead)}.</p>
<div class="tiles">{"".join(tiles)}</div>
{_notes([run])}"""
    return section("summary", f'<span class="sign" aria-hidden="true">{sign}</span>{heading}', body, f"verdict {state}")


def _notes(runs: Sequence[RunRecord]) -> str:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="note warning"><p>Not all of the run directory can be read:</p><ul>{items}</ul></div>' if items else ""


def _comparison(summaries: Sequence[Summary]) -> str:
    held_out = list(dict.fromkeys(name for s in summaries for name in s.held_out))[:4]
    rates = list(dict.fromkeys(name for s in summaries for name in s.rates))[:2]
    columns: list[tuple[str, list[float | None], int, Any]] = [("training loss", [s.loss for s in summaries], -1, show_number)]
    for name in held_out:
        columns.append(
            (f"held-out {name}", [s.held_out[name][0] if name in s.held_out else None for s in summaries], _better(name), show_number)
        )
    for name in rates:
        columns.append((name, [s.rates.get(name) for s in summaries], 1, show_count))
    columns.append(("MFU", [s.mfu for s in summaries], 1, lambda v: show_share(v, 1.0)))
    columns.append(("goodput", [s.account.goodput for s in summaries], 1, lambda v: show_share(v, 1.0)))
    columns.append(("time", [s.account.wall for s in summaries], 0, show_seconds))
    columns = [column for column in columns if any(value is not None for value in column[1])]
    body = []
    for i, s in enumerate(summaries):
        of = f" of {s.run.num_steps:,}" if s.run.num_steps else ""
        cells: list[Cell] = [f"{_run_mark(i)}{escape(s.run.name)}", f"{escape(s.status)}<small>step {s.step:,}{of}</small>"]
        for name, values, better, show in columns:
            value = values[i]
            known = [v for v in values if v is not None]
            is_best = (
                better and value is not None and len(known) > 1 and value == (max if better > 0 else min)(known) and min(known) < max(known)
            )
            note = (
                f"<small>at step {s.held_out[name.removeprefix('held-out ')][1]:,}</small>"
                if name.removeprefix("held-out ") in s.held_out and name.startswith("held-out ")
                else ""
            )
            cells.append((value, f"{show(value)}{f' {BEST}' if is_best else ''}{note}" if value is not None else NONE))
        body.append(row(cells))
    text = f"""<p class="note">Training loss is the mean of the last {SMOOTH:.0%} of the steps, held-out metrics are the best of
each run, throughput and MFU are medians. {BEST} marks the best of a column.</p>
{table("Final numbers of the runs", ["run", "status", *(name for name, *_ in columns)], body, name="finals")}
{_notes([s.run for s in summaries])}"""
    return section("comparison", "The runs", text)


def _run_mark(i: int) -> str:
    return (
        f'<svg class="sample" viewBox="0 0 32 12" aria-hidden="true"><path class="line s{i % 8} d{(i + i // 8) % 8}" d="M0 6H32"/>'
        f'<use href="#mark{i % 4}" class="mark s{i % 8}" x="16" y="6"/></svg> '
    )


def _differences(runs: Sequence[RunRecord]) -> str:
    """Arguments, and what else run.json says, where the runs are not alike."""
    described = [_described(run) for run in runs]
    names = list(dict.fromkeys(name for one in described for name in one))
    rows_ = []
    for name in names:
        values = [one.get(name) for one in described]
        if len(set(values)) > 1:
            rows_.append(row([code(name), *(code(value[:200]) if value is not None else NONE for value in values)]))
    if not rows_:
        text = "<p>Their arguments, versions and devices are the same.</p>"
    else:
        text = table("What differs between the runs", ["what", *(run.name for run in runs)], rows_)
        text += f'<p class="note">{len(names) - len(rows_):,} more arguments and versions are the same in all.</p>'
    return section("differences", "What differs", text)


def _described(run: RunRecord) -> dict[str, str]:
    found = {"recipe": str(run.about.get("recipe", ""))} if "recipe" in run.about else {}
    for part in ("arguments", "versions", "devices", "git"):
        value = run.about.get(part)
        if isinstance(value, dict):
            found |= {(name if part == "arguments" else f"{part}: {name}"): _text(inner) for name, inner in value.items() if name != "out"}
    for name in ("mesh", "seed", "compute_dtype", "accumulate", "steps"):
        if name in run.about and name not in found:
            found[name] = _text(run.about[name])
    if isinstance(digest := run.about.get("source_digest"), str):
        found["source of the recipe"] = digest[:12]
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return str(type(value))


# Curves


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Which curves stand together."""
    names = list(dict.fromkeys(name for run in runs for name, column in run.columns.items() if len(column)))

    def some(*prefixes: str) -> dict[str, str]:
        """Metrics and what their curves are called: the first name is the whole, behind a slash stand groups."""
        return {n: n.partition("/")[2] or "all" for n in names if n in prefixes or ("/" in n and n.partition("/")[0] in prefixes)}

    plans: list[tuple[str, str, str, dict[str, str], dict[str, Any]]] = [
        ("loss", "Loss", "", {n: label for n, label in (("loss", "training"), ("eval_loss", "held out")) if n in names}, {"can_log": True}),
    ]
    for i, name in enumerate(n for n in names if n.startswith("eval_") and n != "eval_loss"):
        plans.append((f"eval{i}", f"Held-out {name.removeprefix('eval_')}", "", {name: "held out"}, {"can_log": True}))
    lr = {n: ("learning rate" if n == "lr" else n.partition("/")[2]) for n in some("lr")}
    plans.append(("lr", "Learning rate", "", lr, {"zero": True, "smooth": False, "can_log": True}))
    grad = {
        n: {"grad_norm": "all", "clipped_norm": "after clipping"}.get(n, label) for n, label in some("grad_norm", "clipped_norm").items()
    }
    plans.append(("grad", "Gradient norm", "", dict(sorted(grad.items(), key=lambda item: item[0] != "grad_norm")), {"can_log": True}))
    plans.append(("update", "Update norm", "", some("update_norm"), {"can_log": True}))
    plans.append(("param", "Parameter norm", "", some("param_norm"), {"can_log": True}))
    for i, name in enumerate(n for n in names if n.endswith("_per_s")):
        unit = name.removesuffix("_per_s")
        plans.append((f"rate{i}", f"Throughput, {unit}/s", f"{unit}/s", {name: f"{unit}/s"}, {"zero": True}))
    plans.append(("mfu", "MFU", "", {"mfu": "MFU"} if "mfu" in names else {}, {"zero": True}))
    seconds = {n: label for n, label in (("step_s", "step"), ("data_s", "of it waiting for data")) if n in names}
    plans.append(("seconds", "Seconds a step", "s", seconds, {"zero": True, "can_log": True}))
    taken = {name for _, _, _, metrics, _ in plans for name in metrics} | KNOWN
    others = [n for n in names if n not in taken][:MOST_OTHERS]
    plans += [(f"other{i}", name, "", {name: name}, {"can_log": True}) for i, name in enumerate(others)]
    most = max(120, MOST_POINTS * 4 // (len(runs) + 3))
    charts = []
    for key, title, unit, metrics, options in plans:
        series = []
        for k, (name, label) in enumerate(list(metrics.items())[:8]):
            for i, run in enumerate(runs):
                full = label if len(runs) == 1 else f"{run.name}, {label}" if len(metrics) > 1 else run.name
                found = thin(run.column(name), full, i, k if len(runs) == 1 else i + 8 * k, most) if name in run.columns else None
                series += [found] if found is not None else []
        if series:
            charts.append(Chart(key, title, unit, series, **options))
    return charts


def _curves(summaries: Sequence[Summary]) -> str:
    charts = charts_of([s.run for s in summaries])
    if not charts:
        return section("curves", "Curves", "<p>No step has been written down yet.</p>")
    data = json.dumps({"charts": [chart.as_json() for chart in charts], "smooth": SMOOTH}, allow_nan=False)
    safe = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    runs = ""
    if len(summaries) > 1:
        boxes = "".join(
            f'<label><input type="checkbox" class="run" value="{i}" checked>{_run_mark(i)}{escape(s.run.name)}</label>'
            for i, s in enumerate(summaries)
        )
        runs = f'<fieldset class="runs"><legend>Runs</legend>{boxes}</fieldset>'
    body = f"""{MARKS}
<div class="tools curves-tools" hidden>
<label for="smooth">Smoothing</label><input type="range" id="smooth" min="0" max="20" step="0.5" value="{100 * SMOOTH:g}"
aria-describedby="how"><output id="smoothed" for="smooth">{100 * SMOOTH:g} %</output>
<button type="button" id="whole" disabled>Show all steps</button>
{runs}
</div>
<p class="note keys" id="how" hidden>Smoothing is an exponential mean over that share of a curve's points;
pale behind it is what was measured. Point at a chart, or move to it and press the arrow keys, to read values; drag across it, or
press + and &minus;, to look closer, 0 or Escape for all.</p>
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
            f"A point is the mean of about {thinned:,.0f} steps; the band behind it reaches from their least to their greatest value."
        )
    for s in chart.series:
        if s.num_missing:
            at = ", ".join(f"{step:,}" for step in s.missing[:5]) + (" …" if s.num_missing > 5 else "")
            notes.append(f"{escape(s.label)}: {s.num_missing:,} values cannot be drawn (not finite, or beyond 1e100), ▾ at step {at}.")
    more = (
        f'<span class="outside"{"" if outside else " hidden"}><span class="count">{outside:,}</span> values lie outside the drawing.</span>'
    )
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


# Where the time went


def _parts(seconds: Mapping[str, float]) -> list[Part]:
    return [Part(kind, value, show_seconds(value), KINDS[kind], COLOURS[kind]) for kind, value in seconds.items()]


def _definitions(accounts: Sequence[Account]) -> str:
    text = """<details class="defined"><summary>How these numbers are defined</summary><dl>
<dt>goodput</dt><dd>Seconds of steps that count, divided by the time from the beginning of the first start to the last sign of life. What is
not in it: starting, compiling, evaluating, saving, waiting for data, steps done again, and the time between starts.</dd>
<dt>steps that count</dt><dd>The sum of <code>step_s</code> less <code>data_s</code> in metrics.jsonl, where each step stands
once: a resumed run cuts away what it does again. The first
step of a start counts as a usual one, the median; updates that were skipped do not count.</dd>
<dt>a start</dt><dd>Begins as many seconds before its first step as starting.jsonl tells. Its last sign of life is the last
<code>time</code> in phases.jsonl or metrics.jsonl.</dd>
<dt>steps done again</dt><dd>Steps that a start had reached, beyond the step from which the next one went on, from phases.jsonl.</dd>
<dt>down</dt><dd>From the last sign of life of a start to the beginning of the next.</dd>
</dl></details>"""
    if any(a.is_estimated for a in accounts):
        text += (
            '<p class="note">Of some starts the last sign of life is not known (no times in metrics.jsonl, no phases.jsonl). They are '
            "taken to end with the last step that counts, so the time down is at most what is said, and steps done again are not seen.</p>"
        )
    return text


def _time(s: Summary) -> str:
    seconds = s.account.seconds
    if not seconds:
        return section("time", "Where the time went", "<p>Nothing is known of it: starting.jsonl, phases.jsonl and metrics.jsonl lack.</p>")
    whole = sum(seconds.values())
    parts = _parts(seconds)
    values: list[str] = [row([swatch(p), (p.value, p.shown), (p.value, show_share(p.value, whole))]) for p in parts]
    values.append(row(["all", (whole, show_seconds(whole)), (whole, show_share(whole, whole))], 'class="total"'))
    goodput = f"{show_share(s.account.goodput, 1.0)} goodput: " if s.account.goodput is not None else ""
    wall = f" of {show_seconds(s.account.wall)}" if s.account.wall is not None else ""
    again = s.account.again
    told_again = "" if not again else f" {again:,} steps were done twice after restarts."
    bars = ""
    if len(s.account.starts) > 1:
        shown = s.account.starts[-MOST_STARTS:]
        longest = max(start.total + (start.down or 0.0) for start in shown)
        bars = "<h3>Each start</h3>" + "".join(
            _start_bar(len(s.account.starts) - len(shown) + i, start, longest) for i, start in enumerate(shown, 1)
        )
        if len(shown) < len(s.account.starts):
            bars += f'<p class="note">The latest {len(shown)} of {len(s.account.starts):,} starts.</p>'
    body = f"""<p class="lead">{goodput}{show_seconds(s.account.useful)} in steps that count{wall}.{told_again}</p>
{stacked(parts, whole)}
{table("Where the time went", ["what", "time", "share"], values)}
{_definitions([s.account])}
{bars}"""
    return section("time", "Where the time went", body)


def _start_bar(number: int, start: Start, longest: float) -> str:
    reached = f" to {start.last:,}" if start.last is not None else ""
    again = f"; {start.again:,} of them done again" if start.again else ""
    down = {"down": start.down} if start.down else {}
    return (
        f'<p class="bar-title">{number}. {show_moment(start.begun)}: from step {start.first:,}{reached}, '
        f"{show_seconds(start.total)}{again}</p>{stacked(_parts(down | start.seconds), longest)}"
    )


def _times(summaries: Sequence[Summary]) -> str:
    known = [s for s in summaries if s.account.seconds]
    if not known:
        return section("time", "Where the time went", "<p>Nothing is known of it.</p>")
    longest = max(sum(s.account.seconds.values()) for s in known)
    bars, body = "", []
    kinds = [kind for kind in KINDS if any(kind in s.account.seconds for s in known)]
    for s in known:
        seconds = s.account.seconds
        starts = f"{len(s.account.starts)} start{'s' if len(s.account.starts) > 1 else ''}"
        goodput = f", goodput {show_share(s.account.goodput, 1.0)}" if s.account.goodput is not None else ""
        bars += f'<p class="bar-title">{escape(s.run.name)}: {show_seconds(sum(seconds.values()))}, {starts}{goodput}</p>'
        bars += stacked(_parts(seconds), longest)
        body.append(row([escape(s.run.name), *((seconds.get(k), show_seconds(seconds[k]) if k in seconds else NONE) for k in kinds)]))
    text = bars + table("Where the time of each run went", ["run", *kinds], body) + _definitions([s.account for s in known])
    return section("time", "Where the time went", text)


# The plan beside the measurement


def _compared(s: Summary) -> list[tuple[str, float | None, float | None, Any]]:
    """Quantity, planned, measured, how to show it."""
    plan = s.run.plan
    if plan is None:
        return []
    seconds = s.run.measured.get("seconds") or s.step_seconds
    unit = plan["unit"]
    rate = plan["items"] / seconds if seconds else None
    return [
        ("step time", plan["times"]["total"] if plan["times"] else None, seconds, show_short_time),
        (f"{unit}/s", plan["items_per_second"], rate, show_count),
        ("MFU", plan["mfu"], s.mfu, lambda v: show_share(v, 1.0)),
        ("peak memory per device", plan["peak"], s.run.measured.get("peak"), show_bytes),
    ]


def _plan(s: Summary) -> str:
    plan = s.run.plan
    if plan is None:
        return ""
    body = []
    for name, planned, measured, show in _compared(s):
        ratio = measured / planned if planned and measured is not None else None
        body.append(
            row(
                [
                    escape(name),
                    (
                        planned,
                        f"≈ {show(planned)}" if planned is not None and name != "peak memory per device" else _or_none(planned, show),
                    ),
                    (measured, _or_none(measured, show)),
                    (ratio, f"{ratio:.2f} {TIMES}" if ratio is not None else NONE),
                ]
            )
        )
    mesh = ",".join(f"{name}={size}" for name, size in plan["mesh"].items())
    about = f"{plan['num_devices']:,} {TIMES} {escape(plan['chip'])}, mesh {code(mesh)}, {plan['num_params']:,} parameters"
    unknown = " The speed of this hardware is not known, so no times were planned." if plan["times"] is None else ""
    text = f"""<p class="lead">{about}.</p>
{table("Plan and measurement", ["what", "planned", "measured", "measured / planned"], body)}
<p class="note">≈ marks an estimate by a model of the hardware; memory is what the compiler has laid out. Measured is the median step
of the last start, and the peak as the devices tell it; a {NONE} where they do not.{unknown}</p>"""
    return section("plan", "Plan and measurement", text)


def _or_none(value: float | None, show: Any) -> str:
    return NONE if value is None else str(show(value))


def _plans(summaries: Sequence[Summary]) -> str:
    body = []
    for s in summaries:
        if s.run.plan is None:
            continue
        compared = {name: (planned, measured, show) for name, planned, measured, show in _compared(s)}
        mesh = ",".join(f"{name}={size}" for name, size in s.run.plan["mesh"].items())
        step, memory = compared["step time"], compared["peak memory per device"]
        cells: list[Cell] = [escape(s.run.name), f"{s.run.plan['num_devices']:,} {TIMES} {escape(s.run.plan['chip'])}", code(mesh)]
        cells.append((s.run.plan["num_params"], show_count(s.run.plan["num_params"])))
        cells += [(step[0], _or_none(step[0], step[2])), (step[1], _or_none(step[1], step[2]))]
        cells += [(memory[0], _or_none(memory[0], memory[2])), (memory[1], _or_none(memory[1], memory[2]))]
        body.append(row(cells))
    if not body:
        return ""
    head = ["run", "devices", "mesh", "parameters", "step, planned", "measured", "memory, planned", "measured"]
    note = '<p class="note">How each parameter is cut is on the page of the single run: <code>shardwise report RUN</code>.</p>'
    return section("plan", "Plan and measurement", table("Plan and measurement of each run", head, body) + note)


# What was said, when it was started, what it was


def _samples(runs: Sequence[RunRecord]) -> str:
    body = ""
    for run in runs:
        texts = [s for s in run.samples if isinstance(s.get("text"), str)]
        if not texts:
            continue
        body += f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        shown = texts[-MOST_SAMPLES:] if len(runs) == 1 else texts[-1:]
        for i, one in enumerate(reversed(shown)):
            text = one["text"]
            cut = f'<p class="note">{len(text) - MOST_TEXT:,} more characters.</p>' if len(text) > MOST_TEXT else ""
            is_open = " open" if i == 0 else ""
            body += (
                f"<details{is_open}><summary>After step {int(one['step']):,}</summary>"
                f'<pre tabindex="0">{escape(text[:MOST_TEXT])}</pre>{cut}</details>'
            )
        if len(shown) < len(texts):
            body += f'<p class="note">{len(texts) - len(shown):,} earlier ones are in samples.jsonl.</p>'
    return section("samples", "Samples", body) if body else ""


def _history(s: Summary) -> str:
    starts = []
    for i, start in enumerate(s.account.starts, 1):
        cells: list[Cell] = [
            (i, f"{i}"),
            escape(show_moment(start.begun)),
            (start.first, f"{start.first:,}"),
            (start.last, f"{start.last:,}" if start.last is not None else NONE),
            (start.total, show_seconds(start.total)),
            (start.down, show_seconds(start.down) if start.down is not None else NONE),
            (start.again, f"{start.again:,}" if start.again is not None else NONE),
        ]
        starts.append(row(cells))
    head = ["start", "begun", "from step", "reached", "lasted", "down before", "steps done again later"]
    body = table("Starts", head, starts[-200:])
    if s.run.checkpoints:
        kept = []
        for saved in s.run.checkpoints:
            metrics = ", ".join(
                f"{name} {show_number(saved['metrics'][name])}" for name in ("loss", "eval_loss") if name in saved["metrics"]
            )
            kept.append(row([(saved["step"], f"{saved['step']:,}"), escape(show_moment(saved["time"])), escape(metrics or NONE)]))
        body += "<h3>Checkpoints that are kept</h3>" + table("Checkpoints", ["step", "saved", "metrics"], kept)
    return section("history", "Starts and checkpoints", body)


def _about(run: RunRecord) -> str:
    about = run.about
    known = {}
    for name in ("recipe", "mesh", "seed", "compute_dtype", "accumulate", "steps", "source_digest"):
        if name in about:
            known[escape(name.replace("_", " "))] = code(_text(about[name])[:300])
    for name in ("devices", "git"):
        if isinstance(value := about.get(name), dict):
            known[name] = escape(", ".join(f"{k} {_text(v)[:200]}" for k, v in list(value.items())[:20]))
        elif value is not None:
            known[name] = escape(_text(value)[:300])
    known["directory"] = code(run.name)
    parts = [f"<div><h3>The run</h3>{facts(known)}</div>"]
    for name, heading in (("arguments", "Arguments"), ("versions", "Versions")):
        if isinstance(value := about.get(name), dict) and value:
            parts.append(
                f"<div><h3>{heading}</h3>{facts({escape(k[:200]): code(_text(v)[:300]) for k, v in list(value.items())[:200]})}</div>"
            )
    body = f'<div class="columns">{"".join(parts)}</div>'
    for name, heading in (("model", "Model"), ("data", "Data"), ("optimizer", "Optimizer, by parameter")):
        if name in about:
            body += f'<details><summary>{heading}</summary><pre tabindex="0">{escape(_pretty(about[name]))}</pre></details>'
    return section("run", "What the run was", body + _source(run))


def _pretty(value: Any) -> str:
    try:
        text = json.dumps(value, indent=2)
    except (ValueError, RecursionError):
        return "nested too deeply to be shown"
    return text[:50_000] + ("\n…" if len(text) > 50_000 else "")


def _source(run: RunRecord) -> str:
    source = run.about.get("source")
    if not isinstance(source, str):
        return ""
    more = "\n…" if len(source) > 200_000 else ""
    heading = f"Source of the recipe, {source.count(chr(10)):,} lines"
    return f'<details class="source"><summary>{heading}</summary><pre tabindex="0">{escape(source[:200_000])}{more}</pre></details>'


def _sources(runs: Sequence[RunRecord]) -> str:
    body = "".join(f"<h3>{escape(run.name)}</h3>{_source(run) or '<p>The source is not in run.json.</p>'}" for run in runs)
    return section("sources", "Sources", body)
