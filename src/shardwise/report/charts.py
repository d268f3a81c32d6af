"""Curves as SVG, drawn by plain functions. `curves.js` draws the same from the same numbers when something is changed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.report.html import escape
from shardwise.rundir.columns import Column
from shardwise.text import NONE, SMOOTH, show_number, smoothed

WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 26.0
LARGEST, SMALLEST = 1e100, 1e-100  # beyond these a value is told of, not drawn
NUM_STYLES = 8


@dataclass(frozen=True)
class Series:
    """A curve, thinned: each point stands for some steps, with their mean and their extremes."""

    label: str
    run: int
    style: int  # its colour and its dashes
    x: list[float]
    y: list[float]
    low: list[float] | None  # None where every point is one step
    high: list[float] | None
    count: int  # of values
    missing: list[int]  # steps whose value cannot be drawn: not finite, or beyond all measure
    num_missing: int
    marked: bool  # a few values, each with a mark
    best: tuple[float, int]  # smallest value and its step
    most: tuple[float, int]
    first: tuple[float, int]
    last: tuple[float, int]
    per_point: float  # steps


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    unit: str
    series: list[Series]
    zero: bool = False  # the axis begins there
    smooth: bool = True
    can_log: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "zero": self.zero,
            "smooth": self.smooth,
            "series": [
                {
                    "label": s.label,
                    "run": s.run,
                    "style": s.style,
                    "marked": s.marked,
                    "x": s.x,
                    "y": s.y,
                    "low": s.low,
                    "high": s.high,
                    "missing": s.missing,
                }
                for s in self.series
            ],
        }


def thin(column: Column, label: str, run: int, style: int, most: int) -> Series | None:
    """At most `most` points: the range of steps in equal parts, of each the mean, the least and the greatest value."""
    with np.errstate(all="ignore"):
        drawable = np.isfinite(column.values) & (np.abs(column.values) <= LARGEST)
    missing = column.steps[~drawable]
    steps, values = column.steps[drawable], column.values[drawable]
    values = np.where(np.abs(values) < SMALLEST, 0.0, values)
    if not len(steps):
        return None
    low = high = None
    x, y = steps.astype(float), values
    if len(steps) > most:
        edges = np.linspace(float(steps[0]), float(steps[-1]) + 1, most + 1)
        begins = np.unique(np.searchsorted(steps, edges[:-1], side="left"))
        begins = begins[begins < len(steps)]
        counts = np.diff(np.append(begins, len(steps)))
        x, y = np.add.reduceat(x, begins) / counts, np.add.reduceat(values, begins) / counts
        low, high = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    least, greatest = int(np.argmin(values)), int(np.argmax(values))
    return Series(
        label=label,
        run=run,
        style=style,
        x=[round(v, 1) for v in x.tolist()],
        y=_short(y),
        low=None if low is None else _short(low),
        high=None if high is None else _short(high),
        count=len(column),
        missing=missing[:200].tolist(),
        num_missing=len(missing),
        marked=len(x) <= 60 and (len(x) <= 8 or float(x[-1] - x[0]) > 1.5 * (len(x) - 1)),
        best=(float(values[least]), int(steps[least])),
        most=(float(values[greatest]), int(steps[greatest])),
        first=(float(values[0]), int(steps[0])),
        last=(float(values[-1]), int(steps[-1])),
        per_point=len(values) / len(x),
    )


def _short(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    is_log: bool
    begin: float  # in the drawing
    end: float

    def at(self, value: float) -> float:
        low, high = (
            (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        )
        place = (math.log10(max(value, SMALLEST)) if self.is_log else value) - low
        return self.begin + (self.end - self.begin) * place / (high - low)


def ticks(low: float, high: float, is_log: bool, count: float) -> list[float]:
    """Round numbers within a range."""
    if is_log and math.log10(high / low) > 0.8:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 3 else (1,)
        every = max(1, math.ceil(len(decades) / count))
        found = [f * 10.0**d for d in decades if d % every == 0 for f in factors]
        return [t for t in found if low <= t * 1.0000001 and t <= high * 1.0000001]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    first = math.ceil(low / step - 1e-6)
    return [step * i for i in range(first, math.floor(high / step + 1e-6) + 1)]


def tick_labels(found: Sequence[float]) -> list[str]:
    """Short where that tells them apart, else with as many digits as are needed."""
    shown = [show_number(tick) for tick in found]
    if len(set(shown)) == len(shown):
        return shown
    digits = max(0, -math.floor(math.log10(found[1] - found[0]) + 1e-6))
    if digits > 6 or abs(found[-1]) >= 1e9:
        return shown
    return [f"{tick:,.{digits}f}".replace("-", "\N{MINUS SIGN}") for tick in found]


def ranges(chart: Chart, is_log: bool, everything: bool) -> tuple[float, float, int]:
    """The vertical range, and how many values lie outside. A few that would flatten all others are left outside, unless asked for."""
    transform = math.log10 if is_log else float
    extremes = (v for s in chart.series for v in (*(s.low or s.y), *(s.high or s.y)))
    edges = sorted(transform(v) for v in extremes if not is_log or v > 0)
    if not edges:
        return (1.0, 10.0, 0) if is_log else (0.0, 1.0, 0)
    low, high = edges[0], edges[-1]
    if not everything and len(edges) >= 40:
        near, far = edges[int(0.01 * (len(edges) - 1))], edges[math.ceil(0.99 * (len(edges) - 1))]
        room = 0.6 * (far - near)
        if far > near and high - low > 3 * (far - near):
            low, high = max(low, near - room), min(high, far + room)
    if chart.zero and not is_log:
        low = min(low, 0.0)
    outside = sum(not low <= v <= high for v in edges)
    pad = 0.05 * (high - low) or (abs(high) * 0.1 or 1.0)
    bottom = low if chart.zero and not is_log and low == 0 else low - pad
    high += pad
    return (10.0**bottom, 10.0**high, outside) if is_log else (bottom, high, outside)


def draw(
    chart: Chart, smooth: float = SMOOTH, is_log: bool = False, width: float = WIDTH
) -> tuple[str, int]:
    """The drawing of a chart, and how many values lie outside of it."""
    share = smooth if chart.smooth else 0.0
    lines = [smoothed(s.y, share) if not s.marked else s.y for s in chart.series]
    low, high, outside = ranges(chart, is_log, False)
    xs = [x for s in chart.series for x in (s.x[0], s.x[-1])]
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    across = Scale(left, right, False, LEFT, width - RIGHT)
    up = Scale(low, high, is_log, HEIGHT - BOTTOM, TOP)
    marks = []
    places = ticks(low, high, is_log, 5)
    for tick, text in zip(places, tick_labels(places), strict=True):
        y = f"{up.at(tick):.1f}"
        marks.append(f'<path class="rule" d="M{LEFT:.0f} {y}H{width - RIGHT:.0f}"/>')
        marks.append(f'<text class="place end" x="{LEFT - 8:.0f}" y="{y}">{text}</text>')
    places = ticks(left, right, False, max(2.0, width / 110))
    for tick, text in zip(places, tick_labels(places), strict=True):
        marks.append(
            f'<text class="place" x="{across.at(tick):.1f}" y="{HEIGHT - 10:.0f}">{text}</text>'
        )
    marks.append(
        f'<text class="place end across" x="{LEFT - 14:.0f}" y="{HEIGHT - 10:.0f}">step</text>'
    )
    marks.append(f'<path class="frame" d="M{LEFT:.0f} {HEIGHT - BOTTOM:.1f}H{width - RIGHT:.0f}"/>')
    curves = []
    for s, line in zip(chart.series, lines, strict=True):
        colour, dash = (
            f"s{s.style % NUM_STYLES}",
            f"d{(s.style + s.style // NUM_STYLES) % NUM_STYLES}",
        )
        xs = [across.at(x) for x in s.x]
        if s.low is not None and s.high is not None:
            there = [f"{x:.1f} {_clamp(up.at(v)):.1f}" for x, v in zip(xs, s.high, strict=True)]
            back = [
                f"{x:.1f} {_clamp(up.at(v)):.1f}"
                for x, v in zip(reversed(xs), reversed(s.low), strict=True)
            ]
            curves.append(f'<path class="band {colour}" d="M{"L".join([*there, *back])}Z"/>')
        if share and not s.marked:
            curves.append(f'<path class="raw {colour}" d="{_path(xs, s.y, up)}"/>')
        curves.append(f'<path class="line {colour} {dash}" d="{_path(xs, line, up)}"/>')
        if s.marked:
            curves += [
                f'<use href="#mark{s.style % 4}" class="mark {colour}" x="{x:.1f}" y="{_clamp(up.at(v)):.1f}"/>'
                for x, v in zip(xs, s.y, strict=True)
            ]
        curves += [
            f'<path class="missing {colour}" d="M{across.at(x) - 3:.1f} {TOP:.0f}l3 6l3 -6z"/>'
            for x in s.missing
            if left <= x <= right
        ]
    frame = f'<clipPath id="clip-{chart.name}"><rect x="{LEFT - 4:.0f}" y="{TOP - 6:.0f}" width="{width - LEFT - RIGHT + 8:.0f}" '
    frame += f'height="{HEIGHT - TOP - BOTTOM + 12:.0f}"/></clipPath>'
    return (
        f'{frame}{"".join(marks)}<g clip-path="url(#clip-{chart.name})">{"".join(curves)}</g>',
        outside,
    )


def _clamp(y: float) -> float:
    return min(max(y, -2000.0), 2000.0)


def _path(xs: Sequence[float], values: Sequence[float], up: Scale) -> str:
    return "M" + "L".join(
        f"{x:.1f} {_clamp(up.at(v)):.1f}" for x, v in zip(xs, values, strict=True)
    )


MARKS = (
    '<svg width="0" height="0" class="marks" aria-hidden="true"><defs>'
    '<circle id="mark0" r="3.6"/><path id="mark1" d="M-3.4-3.4H3.4V3.4H-3.4Z"/>'
    '<path id="mark2" d="M0-4.6L4.2 3.2H-4.2Z"/><path id="mark3" d="M0-4.6L4.6 0L0 4.6L-4.6 0Z"/></defs></svg>'
)


def sample(series: Series) -> str:
    """A bit of the line, for a legend."""
    colour, dash = (
        f"s{series.style % NUM_STYLES}",
        f"d{(series.style + series.style // NUM_STYLES) % NUM_STYLES}",
    )
    mark = (
        f'<use href="#mark{series.style % 4}" class="mark {colour}" x="16" y="6"/>'
        if series.marked
        else ""
    )
    return f'<svg class="sample" viewBox="0 0 32 12" aria-hidden="true"><path class="line {colour} {dash}" d="M0 6H32"/>{mark}</svg>'


def run_mark(i: int) -> str:
    """Of the run with this number among several: its line, with a mark."""
    return (
        f'<svg class="sample" viewBox="0 0 32 12" aria-hidden="true"><path class="line s{i % 8} d{(i + i // 8) % 8}" d="M0 6H32"/>'
        f'<use href="#mark{i % 4}" class="mark s{i % 8}" x="16" y="6"/></svg> '
    )


def told(chart: Chart) -> str:
    """The chart in words."""
    parts = []
    for s in chart.series:
        (first, at), (last, end) = s.first, s.last
        text = f"{s.label}: {show_number(first)} at step {at:,}"
        if end != at:
            text += f", {show_number(last)} at step {end:,}, least {show_number(s.best[0])} at step {s.best[1]:,}"
            text += f", greatest {show_number(s.most[0])} at step {s.most[1]:,}"
        parts.append(text)
    return "; ".join(parts) + "."


def rows(chart: Chart, count: int = 16) -> list[list[str]]:
    """The chart as a table: at some steps, the values of all curves there. Each cell is text."""
    xs = sorted({x for s in chart.series for x in s.x})
    chosen = [xs[round(i * (len(xs) - 1) / max(1, count - 1))] for i in range(min(count, len(xs)))]
    if len(xs) <= count:
        chosen = xs
    found = []
    for x in dict.fromkeys(chosen):
        cells = [f"{x:,.0f}"]
        for s in chart.series:
            near = min(range(len(s.x)), key=lambda i, s=s: abs(s.x[i] - x))  # type: ignore[misc]
            is_here = abs(s.x[near] - x) <= max(0.5, s.per_point)
            text = show_number(s.y[near]) if is_here else NONE
            if is_here and s.low is not None and s.high is not None:
                text += f" ({show_number(s.low[near])} to {show_number(s.high[near])})"
            cells.append(escape(text))
        found.append(cells)
    return found
