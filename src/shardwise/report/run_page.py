"""What runs were and did, as one HTML page: curves, where the time went, the plan beside the measurement, samples, versions, source.

The page can be read without JavaScript; `report_page.js` adds reading off values, zooming, smoothing and other axes.
"""

import time
from collections.abc import Sequence
from typing import Any

from shardwise.report.html import page
from shardwise.report.plan_page import layout_section, memory_section
from shardwise.report.sections.about import (
    about_section,
    differences_section,
    samples_section,
    sources_section,
)
from shardwise.report.sections.curves import curves_section
from shardwise.report.sections.plan import plan_section, plans_section
from shardwise.report.sections.summary import comparison_section, summary_section
from shardwise.report.sections.time import history_section, time_section, times_section
from shardwise.rundir.files import RunRecord, show_moment
from shardwise.rundir.summary import summarize


def report_page(runs: Sequence[RunRecord], watch: float | None = None) -> str:
    """The page of one run, or of several side by side. With `watch`, it asks for itself again every so many seconds."""
    summaries = [summarize(run) for run in runs]
    body = f'data-watch="{watch:g}"' if watch else ""
    if len(runs) == 1:
        summary = summaries[0]
        title, kind = summary.run.name, "Report of a run"
        sections = {
            "Summary": summary_section(summary),
            "Curves": curves_section(summaries),
            "Time": time_section(summary),
            "Plan": plan_section(summary),
            "Memory": _guarded(memory_section, summary.run.plan),
            "Layout": _guarded(layout_section, summary.run.plan),
            "Samples": samples_section(runs),
            "History": history_section(summary),
            "Run": about_section(summary.run),
        }
    else:
        title, kind = f"{len(runs)} runs side by side", "Report of runs"
        sections = {
            "Comparison": comparison_section(summaries),
            "Differences": differences_section(runs),
            "Curves": curves_section(summaries),
            "Time": times_section(summaries),
            "Plan": plans_section(summaries),
            "Samples": samples_section(runs),
            "Sources": sources_section(runs),
        }
    live = (
        '<p class="live" id="live" role="status">Refreshed while the run goes on.</p>'
        if watch
        else ""
    )
    made = f"Made {show_moment(time.time())}." if not watch else "Served from this machine alone."
    footer = f"{made} One file; it asks nothing of any network."
    return page(
        title,
        kind,
        live,
        sections,
        footer,
        ["page", "plan_page", "curves", "report_page"],
        body,
        "'self'" if watch else "",
    )


def _guarded(make: Any, plan: dict[str, Any] | None) -> str:
    """A section of the page of plans; none where the plan, though each field is of its kind, makes no sense."""
    try:
        return str(make(plan)) if plan is not None else ""
    except (ArithmeticError, ValueError, TypeError, LookupError):
        return ""
