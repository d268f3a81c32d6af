"""Where the time of runs went, and when they were started and saved, as sections of a report."""

from collections.abc import Mapping, Sequence

from shardwise.report.html import Cell, Part, escape, row, section, stacked, swatch, table
from shardwise.rundir.files import show_moment
from shardwise.rundir.summary import Summary
from shardwise.rundir.time_accounting import KINDS, Account, Start
from shardwise.text import NONE, show_number, show_seconds, show_share

MOST_STARTS = 20
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


def _parts(seconds: Mapping[str, float]) -> list[Part]:
    return [
        Part(kind, value, show_seconds(value), KINDS[kind], COLOURS[kind])
        for kind, value in seconds.items()
    ]


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


def time_section(s: Summary) -> str:
    seconds = s.account.seconds
    if not seconds:
        return section(
            "time",
            "Where the time went",
            "<p>Nothing is known of it: starting.jsonl, phases.jsonl and metrics.jsonl lack.</p>",
        )
    whole = sum(seconds.values())
    parts = _parts(seconds)
    values: list[str] = [
        row([swatch(p), (p.value, p.shown), (p.value, show_share(p.value, whole))]) for p in parts
    ]
    values.append(
        row(
            ["all", (whole, show_seconds(whole)), (whole, show_share(whole, whole))],
            'class="total"',
        )
    )
    goodput = (
        f"{show_share(s.account.goodput, 1.0)} goodput: " if s.account.goodput is not None else ""
    )
    wall = f" of {show_seconds(s.account.wall)}" if s.account.wall is not None else ""
    again = s.account.again
    told_again = "" if not again else f" {again:,} steps were done twice after restarts."
    bars = ""
    if len(s.account.starts) > 1:
        shown = s.account.starts[-MOST_STARTS:]
        longest = max(start.total + (start.down or 0.0) for start in shown)
        bars = "<h3>Each start</h3>" + "".join(
            _start_bar(len(s.account.starts) - len(shown) + i, start, longest)
            for i, start in enumerate(shown, 1)
        )
        if len(shown) < len(s.account.starts):
            bars += (
                f'<p class="note">The latest {len(shown)} of {len(s.account.starts):,} starts.</p>'
            )
    body = f"""<p class="lead">{goodput}{show_seconds(s.account.useful)} in steps that count{wall}.{told_again}</p>
{stacked(parts, whole)}
{table("Time by what it was spent on", ["what", "time", "share"], values)}
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


def times_section(summaries: Sequence[Summary]) -> str:
    known = [s for s in summaries if s.account.seconds]
    if not known:
        return section("time", "Where the time went", "<p>Nothing is known of it.</p>")
    longest = max(sum(s.account.seconds.values()) for s in known)
    bars, body = "", []
    kinds = [kind for kind in KINDS if any(kind in s.account.seconds for s in known)]
    for s in known:
        seconds = s.account.seconds
        starts = f"{len(s.account.starts)} start{'s' if len(s.account.starts) > 1 else ''}"
        goodput = (
            f", goodput {show_share(s.account.goodput, 1.0)}"
            if s.account.goodput is not None
            else ""
        )
        bars += f'<p class="bar-title">{escape(s.run.name)}: {show_seconds(sum(seconds.values()))}, {starts}{goodput}</p>'
        bars += stacked(_parts(seconds), longest)
        body.append(
            row(
                [
                    escape(s.run.name),
                    *(
                        (seconds.get(k), show_seconds(seconds[k]) if k in seconds else NONE)
                        for k in kinds
                    ),
                ]
            )
        )
    text = (
        bars
        + table("Where the time of each run went", ["run", *kinds], body)
        + _definitions([s.account for s in known])
    )
    return section("time", "Where the time went", text)


def history_section(s: Summary) -> str:
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
    head = [
        "start",
        "begun",
        "from step",
        "reached",
        "lasted",
        "down before",
        "steps done again later",
    ]
    body = table("Starts", head, starts[-200:])
    if s.run.checkpoints:
        kept = []
        for saved in s.run.checkpoints:
            metrics = ", ".join(
                f"{name} {show_number(saved['metrics'][name])}"
                for name in ("loss", "eval_loss")
                if name in saved["metrics"]
            )
            kept.append(
                row(
                    [
                        (saved["step"], f"{saved['step']:,}"),
                        escape(show_moment(saved["time"])),
                        escape(metrics or NONE),
                    ]
                )
            )
        body += "<h3>Checkpoints that are kept</h3>" + table(
            "Checkpoints", ["step", "saved", "metrics"], kept
        )
    return section("history", "Starts and checkpoints", body)
