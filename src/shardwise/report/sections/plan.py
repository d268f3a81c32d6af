"""The plan of a run compared with its measurements, as a section of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.plan import Plan
from shardwise.report.html import Cell, code, escape, number, row, section, table
from shardwise.report.plan_text import mesh_text
from shardwise.rundir.files import RunRecord
from shardwise.rundir.summary import Summary
from shardwise.text import (
    NONE,
    TIMES,
    show_bytes,
    show_count,
    show_share,
    show_short_time,
)

HEADING = "Plan and measurement"


def stored_plan(run: RunRecord) -> Plan | None:
    """Return the plan in a run directory, or None if there is none that can be read."""
    if run.plan is None:
        return None
    try:
        return Plan.from_json(run.plan)
    except ValueError:
        return None


def plan_note(run: RunRecord) -> str:
    """Return a sentence on a plan that cannot be read, or nothing."""
    if run.plan is None or stored_plan(run) is not None:
        return ""
    return "plan.json: ignored, because its plan is damaged or from another version."


@dataclass(frozen=True)
class PlannedQuantity:
    """A planned quantity next to its measurement.

    Attributes:
        name: Name of the quantity.
        planned: Planned value, or None if unknown.
        measured: Measured value, or None if unknown.
        show: Formats a value with its unit.
        is_estimate: Whether the planned value comes from a hardware model.
    """

    name: str
    planned: float | None
    measured: float | None
    show: Callable[[float], str]
    is_estimate: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured divided by planned."""
        if not self.planned or self.measured is None:
            return None
        return self.measured / self.planned

    def cells(self) -> list[Cell]:
        """Return the cells of the planned and of the measured value."""
        prefix = "≈ " if self.is_estimate else ""
        return [
            number(self.planned, lambda value: prefix + self.show(value)),
            number(self.measured, self.show),
        ]


def _compare_step_time(summary: Summary, plan: Plan) -> PlannedQuantity:
    planned = plan.times.total if plan.times else None
    measured = summary.run.measured.get("seconds") or summary.step_seconds
    return PlannedQuantity("step time", planned, measured, show_short_time)


def _compare_memory(
    measurements: Mapping[str, float | None], plan: Plan
) -> PlannedQuantity:
    name = "peak memory per device"
    return PlannedQuantity(
        name, plan.memory.peak, measurements.get("peak"), show_bytes, is_estimate=False
    )


def plan_section(summary: Summary, plan: Plan | None) -> str:
    """Return the section of one run. It is empty without a plan."""
    if plan is None:
        return ""
    step_time = _compare_step_time(summary, plan)
    rate = plan.items / step_time.measured if step_time.measured else None
    compared = [
        step_time,
        PlannedQuantity(f"{plan.unit}/s", plan.items_per_second, rate, show_count),
        PlannedQuantity(
            "MFU", plan.mfu, summary.mfu, lambda value: show_share(value, 1.0)
        ),
        _compare_memory(summary.run.measured, plan),
    ]
    rows = []
    for one in compared:
        ratio = number(one.ratio, lambda value: f"{value:.2f} {TIMES}")
        rows.append(row([escape(one.name), *one.cells(), ratio]))
    head = ["quantity", "planned", "measured", "measured / planned"]
    no_times = ""
    if plan.times is None:
        no_times = " The speed of this hardware is unknown, so no times were planned."
    body = f"""<p class="lead">{_devices(plan)}, mesh {code(mesh_text(plan.mesh))},
{plan.num_params:,} parameters.</p>
{table("Planned and measured quantities", head, rows)}
<p class="note">≈ marks an estimate of a hardware model; planned memory is what the compiler
allocates. Measured are the median step time of the last start and the peak memory that the devices
report ({NONE} if they do not).{no_times}</p>"""
    return section("plan", HEADING, body)


def _devices(plan: Plan) -> str:
    return f"{plan.num_devices:,} {TIMES} {escape(plan.chip)}"


def plans_section(summaries: Sequence[Summary]) -> str:
    """Return the section of several runs. It is empty if no run has a plan."""
    rows = []
    for summary in summaries:
        plan = stored_plan(summary.run)
        if plan is None:
            continue
        cells: list[Cell] = [
            escape(summary.run.name),
            _devices(plan),
            code(mesh_text(plan.mesh)),
            (plan.num_params, show_count(plan.num_params)),
            *_compare_step_time(summary, plan).cells(),
            *_compare_memory(summary.run.measured, plan).cells(),
        ]
        rows.append(row(cells))
    if not rows:
        return ""
    head = ["run", "devices", "mesh", "parameters", "step, planned", "measured"]
    head += ["memory, planned", "measured"]
    note = (
        '<p class="note">For the layout of each parameter, see the report of the single run: '
        "<code>shardwise report RUN</code>.</p>"
    )
    return section(
        "plan", HEADING, table("Plan and measurement of each run", head, rows) + note
    )
