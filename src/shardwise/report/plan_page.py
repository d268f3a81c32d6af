"""A plan as one HTML page: whether it fits, what bounds the step, the layout, other layouts.

`static/plan_page.js` adds choosing a parameter, sorting and filtering.
"""

import math
from typing import cast

from shardwise.plan.plan import SOURCES, Plan, Times
from shardwise.report.html import (
    BarSegment,
    Cell,
    code,
    command_box,
    escape,
    facts,
    page,
    row,
    section,
    stacked_bar,
    swatch,
    table,
    tile,
)
from shardwise.report.plan_text import bound_text, mesh_text, options_text, shape_text
from shardwise.report.sections.layout import layout_section
from shardwise.report.sections.memory import memory_section
from shardwise.report.sections.ranking import CandidateJson, ranking_section
from shardwise.text import (
    NONE,
    TIMES,
    Json,
    show_bytes,
    show_count,
    show_matmuls,
    show_share,
    show_short_time,
)

SOURCE_NAMES = {
    "compiler": "Read from the compiled program",
    "model of the hardware": "Estimated with a hardware model, marked\N{NO-BREAK SPACE}≈",
    "trace": "Counted in the traced model",
}
FIELD_NAMES = {
    "memory": "memory by kind",
    "buffers": "the largest buffers",
    "flops": "FLOPs per device",
    "bytes": "memory traffic per device",
    "traffic.kind": "the collectives: kinds",
    "traffic.axes": "mesh axes",
    "traffic.count": "counts",
    "traffic.bytes": "bytes",
    "times": "step time and its parts",
    "traffic.seconds": "time of collectives",
    "traffic.waited": "time waiting for collectives",
    "items_per_second": "throughput",
    "mfu": "MFU",
    "limit": "the memory limit",
    "model_flops": "FLOPs of the model",
    "step_flops": "FLOPs of the traced step",
    "matmul_flops": "FLOPs by dtype",
    "matmul_lines": "lines by dtype",
    "matmul_choices": "matmuls with 8 bits",
    "leaves": "the parameter layout",
    "items": "items per step",
    "inactive_params": "parameters that a token does not use",
    "microbatches": "microbatches",
    "bubble": "the idle share of a pipeline",
}
# Above this share of the memory limit, small changes may no longer fit.
TIGHT_SHARE = 0.95
NO_TIMES = "the speed of this hardware is unknown"


def plan_page(plan: Plan, candidates: list[Json], title: str, command: str) -> str:
    """Return the page of a plan.

    Args:
        plan: The plan.
        candidates: The ranking of a search as JSON, best first; empty if nothing was compared.
        title: Heading of the page.
        command: Command line that trains with this plan.
    """
    ranking = cast(list[CandidateJson], candidates)
    sections = {
        "Answer": _answer_section(plan),
        "Memory": memory_section(plan),
        "Layout": layout_section(plan),
        "Time": _time_section(plan),
        "Ranking": ranking_section(plan, ranking),
    }
    footer = (
        f"Compiled in {show_short_time(plan.compile_seconds)}, using "
        f"{show_bytes(plan.compile_memory)} of host memory. "
        "No device memory was allocated."
    )
    return page(
        title,
        "Training plan",
        sections,
        header=command_box(command),
        footer=footer,
        assets=["page", "plan_page"],
    )


# Whether it fits


def _answer_section(plan: Plan) -> str:
    state, verdict, detail = _verdict(plan)
    sign = {"good": "✓", "bad": "✗", "unknown": "?"}[state]
    chips = f"{plan.num_devices} {TIMES} {escape(plan.chip)}"
    sources = {}
    for source, fields in SOURCES.items():
        sources[SOURCE_NAMES[source]] = ", ".join(FIELD_NAMES[name] for name in fields)
    body = f"""<p class="lead">{detail}.</p>
<div class="tiles">{"".join(_tiles(plan, chips))}</div>
<p class="note">≈ marks an estimate of a hardware model. Memory is what the compiler allocates.</p>
{_unknown_kernels(plan)}
<div class="columns"><div><h3>Run</h3>{facts(_run_facts(plan))}</div>
<div><h3>Sources of the figures</h3>{facts(sources)}</div></div>"""
    heading = f'<span class="sign" aria-hidden="true">{sign}</span>{verdict} on {chips}'
    return section("answer", heading, body, f"verdict {state}")


def _verdict(plan: Plan) -> tuple[str, str, str]:
    """Return the CSS class of the verdict, the verdict, and one line with the numbers."""
    peak, limit = plan.memory.peak, plan.limit
    if not 0 < limit < math.inf:
        return "unknown", "Memory limit unknown", f"{show_bytes(peak)} per device"
    used = f"{show_bytes(peak)} of {show_bytes(limit)} per device ({show_share(peak, limit)})"
    if not plan.fits:
        return "bad", "Does not fit", f"{used}; {show_bytes(peak - limit)} too much"
    verdict = "Fits tightly" if peak > TIGHT_SHARE * limit else "Fits"
    return "good", verdict, f"{used}; {show_bytes(limit - peak)} free"


def _tiles(plan: Plan, chips: str) -> list[str]:
    peak, limit, times = plan.memory.peak, plan.limit, plan.times
    unit = escape(plan.unit)
    of_limit = "limit unknown"
    if 0 < limit < math.inf:
        of_limit = f"{show_share(peak, limit)} of {show_bytes(limit)}"
    step_time, step_note = NONE, NO_TIMES
    if times is not None:
        step_time = f"≈ {show_short_time(times.total)}"
        step_note = f"bound by {escape(bound_text(times.bound))}"
    throughput = mfu = NONE
    if plan.items_per_second is not None:
        throughput = f"≈ {show_count(plan.items_per_second)} <small>{unit}/s</small>"
    if plan.mfu is not None:
        mfu = f"≈ {show_share(plan.mfu, 1.0)}"
    return [
        tile("Peak memory per device", show_bytes(peak), of_limit),
        tile("Step time", step_time, step_note),
        tile("Throughput", throughput, f"{plan.items:,} {unit} per step"),
        tile("MFU", mfu, "of peak FLOP/s, without recomputation"),
        tile("Chips", chips, f"target {escape(plan.target)}"),
    ]


def _run_facts(plan: Plan) -> dict[str, str]:
    batch = ", ".join(
        f"{name} {shape_text(shape)}" for name, shape in plan.batch.items()
    )
    return {
        "mesh": escape(mesh_text(plan.mesh)),
        "options": escape(options_text(plan.options)),
        "batch": escape(batch),
        "parameters": _parameters(plan),
        "FLOPs per device": f"{show_count(plan.flops, ' ')}FLOP per step, as compiled",
        "FLOPs of the model": f"{show_count(plan.model_flops, ' ')}FLOP per step, all devices",
        "precision": escape(show_matmuls(plan.matmul_flops, plan.matmul_lines)),
        "memory traffic per device": f"{show_bytes(plan.bytes)} per step",
    }


def _parameters(plan: Plan) -> str:
    if not plan.inactive_params:
        return f"{plan.num_params:,}"
    active = plan.num_params - plan.inactive_params
    return f"{plan.num_params:,}, of which a token uses {active:,}"


def _unknown_kernels(plan: Plan) -> str:
    kernels = [
        f"<li><code>{escape(name)}</code>, {calls} calls</li>"
        for name, calls in plan.unknown_kernels.items()
    ]
    if not kernels:
        return ""
    warning = "The FLOPs of these kernels are unknown, so the step takes longer than estimated:"
    return f'<div class="note"><p>{warning}</p><ul>{"".join(kernels)}</ul></div>'


# The step time


def _time_section(plan: Plan) -> str:
    times = plan.times
    if times is None:
        body = f"<p>The FLOPs are counted, but {NO_TIMES}, so times cannot be estimated.</p>"
    else:
        body = _times(times)
    body += f"""<h3>Collectives per step</h3>
<p class="note">Counts and bytes are those of the compiler; bytes count complete arrays, as one
device holds them before or after the collective. Time that overlaps computation is not waited
for.</p>
{_collectives(plan)}"""
    return section("time", "Step time", body)


def _times(times: Times) -> str:
    total = times.total
    parts = [
        ("arithmetic", times.arithmetic, "instructions bound by arithmetic"),
        ("memory", times.memory, "instructions bound by memory bandwidth"),
    ]
    for axes, seconds in times.network.items():
        parts.append(
            (f"network on {axes}", seconds, f"waiting for collectives over {axes}")
        )
    segments = [
        # Colors that the memory section has not used for something else.
        BarSegment(
            name, seconds, f"≈ {show_short_time(seconds)}", note, f"k{(i + 5) % 8}"
        )
        for i, (name, seconds, note) in enumerate(parts)
    ]

    def cells(name: str, seconds: float) -> list[Cell]:
        shown = f"≈ {show_short_time(seconds)}"
        return [name, (seconds, shown), (seconds, show_share(seconds, total))]

    rows = [row(cells(swatch(segment), segment.value)) for segment in segments]
    rows.append(row(cells("step", total), 'class="total"'))
    bound = escape(bound_text(times.bound))
    return f"""<p class="bar-title">≈ {show_short_time(total)}, bound by {bound}</p>
{stacked_bar(segments, total)}
{table("Step time by part", ["part", "time", "share"], rows)}"""


def _collectives(plan: Plan) -> str:
    if not plan.traffic:
        return "<p>The step has no collectives.</p>"

    def show(seconds: float) -> str:
        return f"≈ {show_short_time(seconds)}" if plan.times is not None else NONE

    rows = []
    for traffic in plan.traffic:
        cells: list[Cell] = [
            escape(traffic.kind),
            code(traffic.axes),
            escape(traffic.link),
            (traffic.count, f"{traffic.count:,}"),
            (traffic.bytes, show_bytes(traffic.bytes)),
            (traffic.seconds, show(traffic.seconds)),
            (traffic.waited, show(traffic.waited)),
        ]
        rows.append(row(cells))
    head = ["collective", "mesh axes", "link", "count", "bytes", "time", "waited for"]
    return table("Collectives per step", head, rows)
