"""What was planned beside what was measured, as a section of a report."""

from collections.abc import Sequence
from typing import Any

from shardwise.report.html import Cell, code, escape, row, section, table
from shardwise.rundir.summary import Summary
from shardwise.text import NONE, TIMES, show_bytes, show_count, show_share, show_short_time


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


def plan_section(s: Summary) -> str:
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
                        f"≈ {show(planned)}"
                        if planned is not None and name != "peak memory per device"
                        else _or_none(planned, show),
                    ),
                    (measured, _or_none(measured, show)),
                    (ratio, f"{ratio:.2f} {TIMES}" if ratio is not None else NONE),
                ]
            )
        )
    mesh = ",".join(f"{name}={size}" for name, size in plan["mesh"].items())
    about = f"{plan['num_devices']:,} {TIMES} {escape(plan['chip'])}, mesh {code(mesh)}, {plan['num_params']:,} parameters"
    unknown = (
        " The speed of this hardware is not known, so no times were planned."
        if plan["times"] is None
        else ""
    )
    text = f"""<p class="lead">{about}.</p>
{table("Each quantity, planned and measured", ["what", "planned", "measured", "measured / planned"], body)}
<p class="note">≈ marks an estimate by a model of the hardware; memory is what the compiler has laid out. Measured is the median step
of the last start, and the peak as the devices tell it; a {NONE} where they do not.{unknown}</p>"""
    return section("plan", "Plan and measurement", text)


def _or_none(value: float | None, show: Any) -> str:
    return NONE if value is None else str(show(value))


def plans_section(summaries: Sequence[Summary]) -> str:
    body = []
    for s in summaries:
        if s.run.plan is None:
            continue
        compared = {
            name: (planned, measured, show) for name, planned, measured, show in _compared(s)
        }
        mesh = ",".join(f"{name}={size}" for name, size in s.run.plan["mesh"].items())
        step, memory = compared["step time"], compared["peak memory per device"]
        cells: list[Cell] = [
            escape(s.run.name),
            f"{s.run.plan['num_devices']:,} {TIMES} {escape(s.run.plan['chip'])}",
            code(mesh),
        ]
        cells.append((s.run.plan["num_params"], show_count(s.run.plan["num_params"])))
        cells += [(step[0], _or_none(step[0], step[2])), (step[1], _or_none(step[1], step[2]))]
        cells += [
            (memory[0], _or_none(memory[0], memory[2])),
            (memory[1], _or_none(memory[1], memory[2])),
        ]
        body.append(row(cells))
    if not body:
        return ""
    head = [
        "run",
        "devices",
        "mesh",
        "parameters",
        "step, planned",
        "measured",
        "memory, planned",
        "measured",
    ]
    note = '<p class="note">How each parameter is cut is on the page of the single run: <code>shardwise report RUN</code>.</p>'
    return section(
        "plan", "Plan and measurement", table("Plan and measurement of each run", head, body) + note
    )
