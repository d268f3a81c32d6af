"""The top of a report: the key numbers of one run, or of several runs with the best ones marked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.report.charts import LineStyle, legend_line
from shardwise.report.html import (
    Cell,
    escape,
    number,
    plural,
    row,
    section,
    table,
    tile,
)
from shardwise.report.sections.plan import plan_note
from shardwise.rundir.files import RunRecord, show_moment
from shardwise.rundir.summary import Summary, better
from shardwise.text import (
    NONE,
    SMOOTH,
    show_count,
    show_number,
    show_seconds,
    show_share,
    show_short_time,
)

BEST = '<b class="best">\N{BLACK STAR} best</b>'
MAX_METRIC_TILES, MAX_RATE_TILES = 3, 2
MAX_METRIC_COLUMNS, MAX_RATE_COLUMNS = 4, 2


def _percent(share: float) -> str:
    return show_share(share, 1.0)


# One run


def summary_section(summary: Summary) -> str:
    """Return the section of one run: its status, and tiles with its key numbers."""
    state, sign, heading = _status(summary)
    body = f"""<p class="lead">{"; ".join(_lead(summary))}.</p>
<div class="tiles">{"".join(_tiles(summary))}</div>
{_warnings([summary.run])}"""
    heading = f'<span class="sign" aria-hidden="true">{sign}</span>{heading}'
    return section("summary", heading, body, f"verdict {state}")


def _status(summary: Summary) -> tuple[str, str, str]:
    """Return the CSS class of the status, its symbol, and its text."""
    done = _progress(summary)
    if summary.status == "finished":
        return "good", "\N{CHECK MARK}", f"Finished: {plural(summary.step, 'step')}"
    if summary.status == "running":
        return "unknown", "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}", f"Running: {done}"
    return "unknown", "\N{BLACK SQUARE}", f"Stopped at {done}"


def _progress(summary: Summary) -> str:
    total = f" of {summary.run.num_steps:,}" if summary.run.num_steps else ""
    return f"step {summary.step:,}{total}"


def _lead(summary: Summary) -> list[str]:
    starts = summary.account.starts
    parts = [plural(len(starts), "start")]
    if starts[0].begun is not None:
        parts.append(f"first start {show_moment(starts[0].begun)}")
    if summary.skipped:
        parts.append(f"{plural(summary.skipped, 'update')} skipped")
    if summary.left is not None:
        parts.append(f"about {show_seconds(summary.left)} left")
    return parts


def _tiles(summary: Summary) -> list[str]:
    loss = NONE if summary.loss is None else show_number(summary.loss)
    over = "of the last step"
    if summary.loss_over > 1:
        over = f"mean of the last {summary.loss_over:,} steps"
    tiles = [tile("Training loss", loss, over)]
    for name, (best, step, last) in list(summary.held_out.items())[:MAX_METRIC_TILES]:
        which = "maximum" if better(name) > 0 else "minimum"
        note = f"{which}, at step {step:,}; {show_number(last)} at the end"
        tiles.append(tile(f"Validation {escape(name)}", show_number(best), note))
    rate_note = "median"
    if summary.step_seconds is not None:
        rate_note = f"median; {show_short_time(summary.step_seconds)} per step"
    for name, rate in list(summary.rates.items())[:MAX_RATE_TILES]:
        value = f"{show_count(rate)} <small>{escape(name)}</small>"
        tiles.append(tile("Throughput", value, rate_note))
    if summary.mfu is not None:
        tiles.append(
            tile("MFU", _percent(summary.mfu), "median; share of the devices' peak")
        )
    account = summary.account
    if account.goodput is not None:
        note = "share of the time since the first start spent in useful steps"
        tiles.append(tile("Goodput", _percent(account.goodput), note))
    if account.wall is not None:
        note = f"{show_seconds(account.useful)} in useful steps"
        tiles.append(tile("Time", show_seconds(account.wall), note))
    return tiles


def _warnings(runs: Sequence[RunRecord]) -> str:
    """Return what could not be read from the run directories."""
    items = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        notes = [*run.notes, plan_note(run)]
        items += [f"<li>{escape(prefix + note)}</li>" for note in notes if note]
    if not items:
        return ""
    heading = "<p>Some files in the run directory could not be read:</p>"
    return f'<div class="note warning">{heading}<ul>{"".join(items)}</ul></div>'


# Several runs


@dataclass(frozen=True)
class Metric:
    """A column of the comparison.

    Attributes:
        name: Heading of the column.
        values: Value of each run, or None if unknown.
        direction: 1 if larger is better, -1 if smaller is better, 0 if neither.
        show: Formats a value.
        steps: Step of each value, if it belongs to one.
    """

    name: str
    values: list[float | None]
    direction: int
    show: Callable[[float], str]
    steps: list[int | None] | None = None

    @property
    def best(self) -> float | None:
        """The best value, or None if no run is better than another."""
        known = [value for value in self.values if value is not None]
        if not self.direction or len(set(known)) < 2:
            return None
        return max(known) if self.direction > 0 else min(known)

    def cell(self, run: int) -> Cell:
        """Return the table cell of a run."""

        def show(value: float) -> str:
            text = self.show(value)
            if value == self.best:
                text += f" {BEST}"
            if self.steps is not None:
                text += f"<small>at step {self.steps[run]:,}</small>"
            return text

        return number(self.values[run], show)


def comparison_section(summaries: Sequence[Summary]) -> str:
    """Return the section of several runs: a table of their final numbers."""
    metrics = [
        metric
        for metric in _metrics(summaries)
        if any(value is not None for value in metric.values)
    ]
    rows = []
    for i, summary in enumerate(summaries):
        name = f"{legend_line(LineStyle.of(i), has_marker=True)} {escape(summary.run.name)}"
        cells: list[Cell] = [
            name,
            f"{escape(summary.status)}<small>{_progress(summary)}</small>",
        ]
        cells += [metric.cell(i) for metric in metrics]
        rows.append(row(cells))
    head = ["run", "status", *(metric.name for metric in metrics)]
    body = f"""<p class="note">Training loss is the mean of the last {SMOOTH:.0%} of the steps.
Validation metrics are the best of each run. Throughput and MFU are medians. {BEST} marks the best
value of a column.</p>
{table("Final numbers of the runs", head, rows, name="finals")}
{_warnings([summary.run for summary in summaries])}"""
    return section("comparison", "Comparison", body)


def _metrics(summaries: Sequence[Summary]) -> list[Metric]:
    metrics = [Metric("training loss", [s.loss for s in summaries], -1, show_number)]
    evaluated = dict.fromkeys(name for s in summaries for name in s.held_out)
    for name in list(evaluated)[:MAX_METRIC_COLUMNS]:
        found = [s.held_out.get(name) for s in summaries]
        best = [None if one is None else one[0] for one in found]
        steps = [None if one is None else one[1] for one in found]
        metrics.append(
            Metric(
                name=f"validation {name}",
                values=best,
                direction=better(name),
                show=show_number,
                steps=steps,
            )
        )
    rates = dict.fromkeys(name for s in summaries for name in s.rates)
    for name in list(rates)[:MAX_RATE_COLUMNS]:
        metrics.append(
            Metric(name, [s.rates.get(name) for s in summaries], 1, show_count)
        )
    metrics.append(Metric("MFU", [s.mfu for s in summaries], 1, _percent))
    metrics.append(
        Metric("goodput", [s.account.goodput for s in summaries], 1, _percent)
    )
    metrics.append(Metric("time", [s.account.wall for s in summaries], 0, show_seconds))
    return metrics
