"""Memory of one device, as a section of a plan and of a report."""

import math

from shardwise.plan.plan import Buffer, Memory, Plan
from shardwise.report.html import (
    BarSegment,
    Cell,
    bar,
    code,
    row,
    section,
    stacked_bar,
    swatch,
    table,
)
from shardwise.text import show_bytes, show_share

# Below this share of the limit, a bar of the limit is too short to read its segments.
SMALL_SHARE = 0.6


def memory_section(plan: Plan) -> str:
    """Return the section: a bar against the limit, a table by kind, and the largest buffers."""
    peak, limit = plan.memory.peak, plan.limit
    segments = _segments(plan.memory)
    has_limit = 0 < limit < math.inf
    body = ""
    if has_limit:
        body += f'<p class="bar-title">Limit: {show_bytes(limit)}</p>'
        body += stacked_bar(segments, max(peak, limit), limit)
    if not has_limit or peak < SMALL_SHARE * limit:
        body += f'<p class="bar-title">Peak: {show_bytes(peak)}, enlarged</p>'
        body += stacked_bar(segments, peak)
    body += _kinds_table(segments, peak, limit if has_limit else None)
    if plan.buffers:
        body += f"<h3>Largest temporary buffers</h3>{_buffers_table(plan.buffers)}"
    return section("memory", "Memory per device", body)


def _segments(memory: Memory) -> list[BarSegment]:
    kinds = [
        ("parameters", memory.parameters, "model weights, as stored"),
        ("optimizer", memory.optimizer, "optimizer state"),
        ("other", memory.other, "other model state, and the program itself"),
        ("batch", memory.batch, "the batch of one step"),
        (
            "temporaries",
            memory.temporaries,
            "activations kept for the backward pass, gradients, scratch memory",
        ),
    ]
    return [
        BarSegment(kind, value, show_bytes(value), note, f"k{i}")
        for i, (kind, value, note) in enumerate(kinds)
    ]


def _kinds_table(segments: list[BarSegment], peak: float, limit: float | None) -> str:
    head = ["kind", "per device", "of peak"]
    if limit is not None:
        head.append("of limit")

    def cells(name: str, value: float) -> list[Cell]:
        found: list[Cell] = [
            name,
            (value, show_bytes(value)),
            (value, show_share(value, peak)),
        ]
        if limit is not None:
            found.append((value, show_share(value, limit)))
        return found

    rows = [row(cells(swatch(segment), segment.value)) for segment in segments]
    rows.append(row(cells("peak", peak), 'class="total"'))
    return table("Memory by kind", head, rows)


def _buffers_table(buffers: list[Buffer]) -> str:
    largest = max(buffer.bytes for buffer in buffers)
    rows = []
    for buffer in buffers:
        size = buffer.bytes
        shown = bar(size, largest, show_bytes(size))
        rows.append(row([code(buffer.name), code(buffer.shape), (size, shown)]))
    return table("Largest temporary buffers", ["operation", "shape", "bytes"], rows)
