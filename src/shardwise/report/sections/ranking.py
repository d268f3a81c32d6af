"""The layouts that a search compared, as a section of a plan."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

from shardwise.plan.plan import Plan
from shardwise.report.html import Cell, bar, code, escape, number, row, section, table
from shardwise.report.plan_text import bound_text, options_text
from shardwise.report.scatter import ScatterPoint, draw_scatter
from shardwise.text import show_bytes, show_count, show_share, show_short_time

MAX_CANDIDATES = 400
STATUSES = ("compiled", "not compiled", "too large", "pruned", "refused")
CHOSEN = '<b class="chosen-mark">chosen</b> '


class CandidateJson(TypedDict):
    """A layout in the ranking of a search, as JSON. Numbers are None where they are unknown."""

    mesh: str
    options: Mapping[str, object]
    status: str
    why: str
    chosen: bool
    seconds: float | None
    peak: float | None
    items_per_second: float | None
    mfu: float | None
    bound: str | None


def ranking_section(plan: Plan, candidates: Sequence[CandidateJson]) -> str:
    """Return the section: a scatter plot and a table. It is empty without candidates.

    Args:
        plan: The chosen plan.
        candidates: The layouts, best first.
    """
    if not candidates:
        return ""
    listed = candidates[:MAX_CANDIDATES]
    known_times = [c["seconds"] for c in listed if c["seconds"] is not None]
    slowest = max(known_times, default=1.0)
    head = ["rank", "mesh and options", "status", "step time", "peak memory"]
    head += [f"{plan.unit}/s", "MFU"]
    rows = [
        _candidate_row(rank, candidate, slowest, plan.limit)
        for rank, candidate in enumerate(listed, 1)
    ]
    omitted = ""
    if len(candidates) > len(listed):
        omitted = f'<p class="note">{len(candidates) - len(listed):,} more are not listed.</p>'
    body = f"""{draw_scatter(_scatter_points(listed), plan.limit)}
<fieldset class="tools" id="statuses" hidden><legend>Show</legend>{_status_filter(listed)}
<output id="ranking-count"></output></fieldset>
{table("Compared layouts, best first", head, rows, name="candidates")}
{omitted}"""
    return section("ranking", "Compared layouts", body)


def _status_filter(candidates: Sequence[CandidateJson]) -> str:
    counts = Counter(candidate["status"] for candidate in candidates)
    # The known statuses first, in their own order; then whatever else was found.
    statuses = [
        status for status in dict.fromkeys([*STATUSES, *counts]) if counts[status]
    ]
    return "".join(
        f'<label><input type="checkbox" value="{escape(status)}" checked> {escape(status)} '
        f"<small>{counts[status]}</small></label>"
        for status in statuses
    )


def _kind(candidate: CandidateJson) -> str:
    """Return the CSS class of a candidate; only compiled ones have exact memory."""
    if candidate["chosen"]:
        return "chosen"
    return "compiled" if candidate["status"] == "compiled" else "grey"


def _scatter_points(candidates: Sequence[CandidateJson]) -> list[ScatterPoint]:
    points = []
    for candidate in candidates:
        seconds, peak, status = (
            candidate["seconds"],
            candidate["peak"],
            candidate["status"],
        )
        if seconds is None or peak is None:
            continue
        label = (
            f"{candidate['mesh']}, {options_text(candidate['options'])}: "
            f"{show_short_time(seconds)}, {show_bytes(peak)}, {status}"
        )
        points.append(ScatterPoint(peak, seconds, _kind(candidate), status, label))
    return points


def _candidate_row(
    rank: int, candidate: CandidateJson, slowest: float, limit: float
) -> str:
    def show_time(seconds: float) -> str:
        bound = candidate["bound"]
        note = f"<small>bound by {escape(bound_text(bound))}</small>" if bound else ""
        return bar(seconds, slowest, f"≈ {show_short_time(seconds)}") + note

    def show_peak(peak: float) -> str:
        has_limit = 0 < limit < math.inf
        return bar(peak, limit, show_bytes(peak)) if has_limit else show_bytes(peak)

    options = escape(options_text(candidate["options"]))
    chosen = CHOSEN if candidate["chosen"] else ""
    cells: list[Cell] = [
        (rank, f"{rank}"),
        f"{code(candidate['mesh'])}<small>{options}</small>",
        f"{chosen}{escape(candidate['status'])}<small>{escape(candidate['why'])}</small>",
        number(candidate["seconds"], show_time),
        number(candidate["peak"], show_peak),
        number(candidate["items_per_second"], lambda rate: f"≈ {show_count(rate)}"),
        number(candidate["mfu"], lambda mfu: f"≈ {show_share(mfu, 1.0)}"),
    ]
    attributes = (
        f'class="{_kind(candidate)}" data-status="{escape(candidate["status"])}"'
    )
    if candidate["chosen"]:
        attributes += ' aria-current="true"'
    return row(cells, attributes)
