"""Where the time of runs went, and when they were started and saved, as sections of a report."""

from collections.abc import Mapping, Sequence

from shardwise.report.html import (
    BarSegment,
    Cell,
    escape,
    number,
    plural,
    row,
    section,
    stacked_bar,
    swatch,
    table,
)
from shardwise.rundir.files import show_moment
from shardwise.rundir.summary import Summary
from shardwise.rundir.time_accounting import KINDS, Account, Start, TimeKind
from shardwise.text import NONE, show_number, show_seconds, show_share

MAX_BARS = 20
MAX_STARTS = 200
HEADING = "Time"
# The label of each kind whose name is not plain enough; names are keys of JSON and stay. Then the
# CSS class of the color of each kind.
LABELS = {
    TimeKind.OTHER_STARTING: "other startup",
    TimeKind.STEPS: "useful steps",
    TimeKind.REPEATED_STEPS: "repeated steps",
    TimeKind.DATA: "waiting for data",
    TimeKind.UNKNOWN: "unattributed",
    TimeKind.DOWN: "downtime",
}
COLORS = {
    TimeKind.IMPORTING: "k2",
    TimeKind.PREPARING: "k6",
    TimeKind.VERIFYING: "k0",
    TimeKind.COMPILING: "k3",
    TimeKind.LOADING: "k1",
    TimeKind.OTHER_STARTING: "k2",
    TimeKind.FIRST_STEP: "k7",
    TimeKind.STEPS: "k4",
    TimeKind.REPEATED_STEPS: "k5",
    TimeKind.DATA: "t0",
    TimeKind.EVALUATION: "t1",
    TimeKind.SAVING: "t2",
    TimeKind.AUDITS: "t3",
    TimeKind.UNKNOWN: "rest",
    TimeKind.DOWN: "gone",
}
DEFINITIONS = """<details class="defined"><summary>Definitions</summary><dl>
<dt>goodput</dt><dd>Seconds of useful steps, divided by the time from the beginning of the first
start to the last sign of life. It excludes startup, compilation, evaluation, saving, audits,
waiting for data, repeated steps and downtime.</dd>
<dt>useful steps</dt><dd>The sum of <code>step_s</code> minus <code>data_s</code> in metrics.jsonl,
which has each step once: a resumed run removes the records of the steps that it repeats. The first
step of a start counts as a median step. Skipped updates do not count.</dd>
<dt>start</dt><dd>One process of the run, from the beginning that starting.jsonl implies to the last
<code>time</code> in phases.jsonl or metrics.jsonl, its last sign of life.</dd>
<dt>repeated steps</dt><dd>Steps that a start had reached beyond the step from which the next start
resumed, from phases.jsonl.</dd>
<dt>downtime</dt><dd>From the last sign of life of a start to the beginning of the next start.</dd>
</dl></details>"""
ESTIMATED = """<p class="note">The last sign of life of some starts is unknown (metrics.jsonl has no
times, and there is no phases.jsonl). These starts are assumed to end with their last useful step,
so the downtime is an upper bound and repeated steps are not counted.</p>"""


def _label(kind: TimeKind) -> str:
    return LABELS.get(kind, kind)


def _segments(seconds: Mapping[TimeKind, float]) -> list[BarSegment]:
    return [
        BarSegment(_label(kind), value, show_seconds(value), KINDS[kind], COLORS[kind])
        for kind, value in seconds.items()
    ]


def _definitions(accounts: Sequence[Account]) -> str:
    is_estimated = any(account.is_estimated for account in accounts)
    return DEFINITIONS + (ESTIMATED if is_estimated else "")


# One run


def time_section(summary: Summary) -> str:
    """Return the section of one run: a bar and a table by kind, and a bar for each start."""
    account = summary.account
    if not account.seconds:
        missing = "starting.jsonl, phases.jsonl and metrics.jsonl are missing or empty"
        return section("time", HEADING, f"<p>Unknown: {missing}.</p>")
    total = sum(account.seconds.values())
    segments = _segments(account.seconds)

    def cells(name: str, seconds: float) -> list[Cell]:
        share = show_share(seconds, total)
        return [name, (seconds, show_seconds(seconds)), (seconds, share)]

    rows = [row(cells(swatch(segment), segment.value)) for segment in segments]
    rows.append(row(cells("total", total), 'class="total"'))
    body = f"""<p class="lead">{_lead(account)}</p>
{stacked_bar(segments, total)}
{table("Time by kind", ["kind", "time", "share"], rows)}
{_definitions([account])}
{_start_bars(account.starts)}"""
    return section("time", HEADING, body)


def _lead(account: Account) -> str:
    wall = f" of {show_seconds(account.wall)}" if account.wall is not None else ""
    text = f"{show_seconds(account.useful)}{wall} in useful steps"
    if account.goodput is not None:
        text = f"{show_share(account.goodput, 1.0)} goodput: {text}"
    repeated = ""
    if account.again:
        verb = "was" if account.again == 1 else "were"
        repeated = f" {plural(account.again, 'step')} {verb} repeated after restarts."
    return f"{text}.{repeated}"


def _start_bars(starts: Sequence[Start]) -> str:
    """Return a bar for each of the latest starts, to the same scale, if there are several."""
    if len(starts) < 2:
        return ""
    shown = starts[-MAX_BARS:]
    longest = max(start.total + (start.down or 0.0) for start in shown)
    first = len(starts) - len(shown) + 1
    bars = [_start_bar(first + i, start, longest) for i, start in enumerate(shown)]
    if len(shown) < len(starts):
        bars.append(
            f'<p class="note">The latest {len(shown)} of {len(starts):,} starts.</p>'
        )
    return "<h3>Starts</h3>" + "".join(bars)


def _start_bar(index: int, start: Start, longest: float) -> str:
    title = f"{index}. {show_moment(start.begun)}: from step {start.first:,}"
    if start.last is not None:
        title += f" to {start.last:,}"
    title += f", {show_seconds(start.total)}"
    if start.again:
        title += f"; {start.again:,} of these steps were repeated later"
    seconds = dict(start.seconds)
    if start.down:
        # The downtime comes before the start, and so does its segment.
        seconds = {TimeKind.DOWN: start.down} | seconds
    return f'<p class="bar-title">{title}</p>{stacked_bar(_segments(seconds), longest)}'


def history_section(summary: Summary) -> str:
    """Return the section of one run: tables of its starts and of its checkpoints."""
    body = _starts_table(summary.account.starts)
    if summary.run.checkpoints:
        body += f"<h3>Kept checkpoints</h3>{_checkpoints_table(summary)}"
    return section("history", "Starts and checkpoints", body)


def _starts_table(starts: Sequence[Start]) -> str:
    rows = []
    for i, start in enumerate(starts, 1):
        cells: list[Cell] = [
            (i, f"{i}"),
            escape(show_moment(start.begun)),
            (start.first, f"{start.first:,}"),
            number(start.last, lambda step: f"{step:,}"),
            (start.total, show_seconds(start.total)),
            number(start.down, show_seconds),
            number(start.again, lambda steps: f"{steps:,}"),
        ]
        rows.append(row(cells))
    head = ["start", "began", "from step", "to step", "duration", "downtime before"]
    head.append("steps repeated later")
    return table("Starts", head, rows[-MAX_STARTS:])


def _checkpoints_table(summary: Summary) -> str:
    rows = []
    for checkpoint in summary.run.checkpoints:
        metrics = checkpoint["metrics"]
        names = [name for name in ("loss", "eval_loss") if name in metrics]
        shown = ", ".join(f"{name} {show_number(metrics[name])}" for name in names)
        step = checkpoint["step"]
        saved = escape(show_moment(checkpoint["time"]))
        rows.append(row([(step, f"{step:,}"), saved, escape(shown or NONE)]))
    return table("Checkpoints", ["step", "saved", "metrics"], rows)


# Several runs


def times_section(summaries: Sequence[Summary]) -> str:
    """Return the section of several runs: a bar for each to the same scale, and a table by kind."""
    known = [summary for summary in summaries if summary.account.seconds]
    if not known:
        return section("time", HEADING, "<p>Unknown for these runs.</p>")
    longest = max(sum(summary.account.seconds.values()) for summary in known)
    kinds = [kind for kind in KINDS if any(kind in s.account.seconds for s in known)]
    body, rows = "", []
    for summary in known:
        account, name = summary.account, escape(summary.run.name)
        title = f"{name}: {show_seconds(sum(account.seconds.values()))}"
        title += f", {plural(len(account.starts), 'start')}"
        if account.goodput is not None:
            title += f", goodput {show_share(account.goodput, 1.0)}"
        body += f'<p class="bar-title">{title}</p>'
        body += stacked_bar(_segments(account.seconds), longest)
        rows.append(
            row([name, *(number(account.seconds.get(k), show_seconds) for k in kinds)])
        )
    body += table("Time of each run by kind", ["run", *map(_label, kinds)], rows)
    body += _definitions([summary.account for summary in known])
    return section("time", HEADING, body)
