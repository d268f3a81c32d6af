"""Draws step time against peak memory of several layouts as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.report.html import escape
from shardwise.report.mesh_drawing import svg_text
from shardwise.text import show_bytes

WIDTH, HEIGHT = 560.0, 260.0
GIB = 2.0**30
LEGEND = {
    "chosen": "◆ chosen",
    "compiled": "● compiled",
    "grey": "○ estimated or too large",
}


@dataclass(frozen=True)
class ScatterPoint:
    """One layout in the drawing.

    Attributes:
        peak: Peak memory per device, in bytes.
        seconds: Step time.
        kind: CSS class: chosen, compiled or grey.
        status: Status that the filter below the drawing selects by.
        label: Tooltip, as plain text.
    """

    peak: float
    seconds: float
    kind: str
    status: str
    label: str


def draw_scatter(points: Sequence[ScatterPoint], limit: float) -> str:
    """Return the drawing, or nothing if there are fewer than two points to compare.

    Args:
        points: The layouts.
        limit: Memory limit per device in bytes; 0 or infinity if unknown.
    """
    if len(points) < 2:
        return ""
    has_limit = 0 < limit < math.inf
    largest = max(point.peak for point in points)
    if has_limit:
        largest = max(largest, limit)
    memory_ticks = _ticks_from_zero(largest / GIB)
    time_ticks = _ticks_from_zero(max(point.seconds for point in points) * 1e3)
    x_scale = WIDTH / memory_ticks[-1]
    y_scale = HEIGHT / time_ticks[-1]
    parts = _axes(memory_ticks, time_ticks)
    if has_limit:
        x = limit / GIB * x_scale
        parts.append(f'<path class="limit" d="M{x:.1f} -2V{HEIGHT:.0f}"/>')
        parts.append(svg_text(x, -11, f"limit {show_bytes(limit)}", "limit"))
    # The chosen layout comes last, on top of the others.
    for point in sorted(points, key=lambda point: point.kind == "chosen"):
        x = point.peak / GIB * x_scale
        y = HEIGHT - point.seconds * 1e3 * y_scale
        is_chosen = point.kind == "chosen"
        shape = '<path d="M0-8L8 0L0 8L-8 0Z"/>' if is_chosen else '<circle r="5"/>'
        parts.append(
            f'<g class="point {point.kind}" data-status="{escape(point.status)}"'
            f' transform="translate({x:.1f} {y:.1f})">'
            f"<title>{escape(point.label)}</title>{shape}</g>"
        )
    label = f"Step time against peak memory of {len(points)} layouts; the table below lists them"
    legend = "".join(
        f'<span><span class="point {kind}">{text[0]}</span>{text[1:]}</span>'
        for kind, text in LEGEND.items()
    )
    return (
        f'<figure class="scatter"><svg viewBox="-70 -26 {WIDTH + 88:.0f} {HEIGHT + 76:.0f}"'
        f' role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f'<p class="legend">{legend}</p></figure>'
    )


def _axes(memory_ticks: Sequence[float], time_ticks: Sequence[float]) -> list[str]:
    """Return the grid lines, tick labels and titles of both axes."""
    parts = []
    for tick in memory_ticks:
        x = WIDTH * tick / memory_ticks[-1]
        if tick:
            parts.append(f'<path class="rule" d="M{x:.1f} 0V{HEIGHT:.0f}"/>')
        parts.append(svg_text(x, HEIGHT + 15, f"{tick:g}", "place"))
    for tick in time_ticks:
        y = HEIGHT * (1 - tick / time_ticks[-1])
        if tick:
            parts.append(f'<path class="rule" d="M0 {y:.1f}H{WIDTH:.0f}"/>')
        parts.append(svg_text(-8, y, f"{tick:g}", "place end"))
    parts.append(f'<path class="frame" d="M0 0V{HEIGHT:.0f}H{WIDTH:.0f}"/>')
    parts.append(
        svg_text(WIDTH / 2, HEIGHT + 38, "peak memory per device (GiB)", "axis")
    )
    parts.append(svg_text(-58, HEIGHT / 2, "≈ step time (ms)", "axis", rotated=True))
    return parts


def _ticks_from_zero(largest: float) -> list[float]:
    """Return about six round numbers from zero to slightly above `largest`."""
    rough_step = max(largest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough_step))
    factors = (1, 2, 2.5, 5, 10)
    step = next(
        power * factor for factor in factors if power * factor >= rough_step * 0.999
    )
    return [step * i for i in range(math.ceil(largest * 1.02 / step) + 1)]
