"""The report of one run, or the comparison of several, as one HTML page.

`static/curves.js` draws the curves, `curve_controls.js` operates them, and `live.js` refreshes the
page of a running run.
"""

import time
from collections.abc import Callable, Sequence

from shardwise.plan.plan import Plan
from shardwise.report.html import page
from shardwise.report.sections.about import (
    about_section,
    differences_section,
    samples_section,
    sources_section,
)
from shardwise.report.sections.curves import curves_section
from shardwise.report.sections.layout import layout_section
from shardwise.report.sections.memory import memory_section
from shardwise.report.sections.plan import plan_section, plans_section, stored_plan
from shardwise.report.sections.summary import comparison_section, summary_section
from shardwise.report.sections.time import history_section, time_section, times_section
from shardwise.rundir.files import RunRecord, show_moment
from shardwise.rundir.summary import Summary, summarize

ASSETS = ("page", "plan_page", "report_page", "curves", "curve_controls", "live")


def report_page(runs: Sequence[RunRecord], watch: float | None = None) -> str:
    """Return the page of one run, or a page that compares several.

    Args:
        runs: The runs, as read from their directories.
        watch: Seconds between two refreshes of a served page, or None for a file.
    """
    summaries = [summarize(run) for run in runs]
    if len(runs) == 1:
        title, kind = runs[0].name, "Run report"
        sections = _run_sections(summaries[0])
    else:
        title, kind = f"Comparison of {len(runs)} runs", "Run report"
        sections = _comparison_sections(summaries)
    if watch is None:
        footer = (
            f"Made {show_moment(time.time())}. This file makes no network requests."
        )
        return page(title, kind, sections, footer=footer, assets=ASSETS)
    return page(
        title,
        kind,
        sections,
        header='<p class="live" id="live" role="status">Refreshes while the run continues.</p>',
        footer="Served to this machine only.",
        assets=ASSETS,
        body_attributes=f'data-watch="{watch:g}"',
        connect_to="'self'",
    )


def _run_sections(summary: Summary) -> dict[str, str]:
    run = summary.run
    plan = stored_plan(run)
    return {
        "Summary": summary_section(summary),
        "Curves": curves_section([summary]),
        "Time": time_section(summary),
        "Plan": plan_section(summary, plan),
        "Memory": _guarded(memory_section, plan),
        "Layout": _guarded(layout_section, plan),
        "Samples": samples_section([run]),
        "History": history_section(summary),
        "Run": about_section(run),
    }


def _comparison_sections(summaries: Sequence[Summary]) -> dict[str, str]:
    runs = [summary.run for summary in summaries]
    return {
        "Comparison": comparison_section(summaries),
        "Differences": differences_section(runs),
        "Curves": curves_section(summaries),
        "Time": times_section(summaries),
        "Plan": plans_section(summaries),
        "Samples": samples_section(runs),
        "Sources": sources_section(runs),
    }


def _guarded(make_section: Callable[[Plan], str], plan: Plan | None) -> str:
    """Return a section of the stored plan, or nothing without a usable plan.

    `Plan.from_json` checks the types of all fields, but a damaged plan can still make no sense.
    """
    if plan is None:
        return ""
    try:
        return make_section(plan)
    except (ArithmeticError, ValueError, TypeError, LookupError):
        return ""
