"""The beginning of a report: one run in a few numbers, or several beside each other with the best of each number marked."""

from collections.abc import Sequence
from typing import Any

from shardwise.report.charts import run_mark
from shardwise.report.html import Cell, escape, row, section, table, tile
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


def summary_section(s: Summary) -> str:
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
        which = {1: "greatest", -1: "least", 0: "least"}[better(name)]
        tiles.append(
            tile(
                f"Held-out {escape(name)}",
                show_number(best),
                f"{which}, at step {at:,}; {show_number(last)} at the end",
            )
        )
    for name, rate in list(s.rates.items())[:2]:
        step = (
            f"median; {show_short_time(s.step_seconds)} a step"
            if s.step_seconds is not None
            else "median"
        )
        tiles.append(tile("Throughput", f"{show_count(rate)} <small>{escape(name)}</small>", step))
    if s.mfu is not None:
        tiles.append(tile("MFU", show_share(s.mfu, 1.0), "median; of the devices' peak"))
    if s.account.goodput is not None:
        tiles.append(
            tile(
                "Goodput",
                show_share(s.account.goodput, 1.0),
                "steps that count, of the time since the first start",
            )
        )
    if s.account.wall is not None:
        tiles.append(
            tile(
                "Time",
                show_seconds(s.account.wall),
                f"{show_seconds(s.account.useful)} in steps that count",
            )
        )
    body = f"""<p class="lead">{"; ".join(lead)}.</p>
<div class="tiles">{"".join(tiles)}</div>
{_notes([run])}"""
    return section(
        "summary",
        f'<span class="sign" aria-hidden="true">{sign}</span>{heading}',
        body,
        f"verdict {state}",
    )


def _notes(runs: Sequence[RunRecord]) -> str:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<div class="note warning"><p>Not all of the run directory can be read:</p><ul>{items}</ul></div>'
        if items
        else ""
    )


def comparison_section(summaries: Sequence[Summary]) -> str:
    held_out = list(dict.fromkeys(name for s in summaries for name in s.held_out))[:4]
    rates = list(dict.fromkeys(name for s in summaries for name in s.rates))[:2]
    columns: list[tuple[str, list[float | None], int, Any]] = [
        ("training loss", [s.loss for s in summaries], -1, show_number)
    ]
    for name in held_out:
        columns.append(
            (
                f"held-out {name}",
                [s.held_out[name][0] if name in s.held_out else None for s in summaries],
                better(name),
                show_number,
            )
        )
    for name in rates:
        columns.append((name, [s.rates.get(name) for s in summaries], 1, show_count))
    columns.append(("MFU", [s.mfu for s in summaries], 1, lambda v: show_share(v, 1.0)))
    columns.append(
        ("goodput", [s.account.goodput for s in summaries], 1, lambda v: show_share(v, 1.0))
    )
    columns.append(("time", [s.account.wall for s in summaries], 0, show_seconds))
    columns = [column for column in columns if any(value is not None for value in column[1])]
    body = []
    for i, s in enumerate(summaries):
        of = f" of {s.run.num_steps:,}" if s.run.num_steps else ""
        cells: list[Cell] = [
            f"{run_mark(i)}{escape(s.run.name)}",
            f"{escape(s.status)}<small>step {s.step:,}{of}</small>",
        ]
        for name, values, direction, show in columns:
            value = values[i]
            known = [v for v in values if v is not None]
            is_best = (
                bool(direction)
                and len({*known}) > 1
                and value == (max if direction > 0 else min)(known)
            )
            note = (
                f"<small>at step {s.held_out[name.removeprefix('held-out ')][1]:,}</small>"
                if name.removeprefix("held-out ") in s.held_out and name.startswith("held-out ")
                else ""
            )
            cells.append(
                (
                    value,
                    f"{show(value)}{f' {BEST}' if is_best else ''}{note}"
                    if value is not None
                    else NONE,
                )
            )
        body.append(row(cells))
    text = f"""<p class="note">Training loss is the mean of the last {SMOOTH:.0%} of the steps, held-out metrics are the best of
each run, throughput and MFU are medians. {BEST} marks the best of a column.</p>
{table("Final numbers of the runs", ["run", "status", *(name for name, *_ in columns)], body, name="finals")}
{_notes([s.run for s in summaries])}"""
    return section("comparison", "The runs", text)
