"""The curves of a report as data: thinned series, their description, their table.

The browser draws the curves: `static/curves.js` is the only chart engine, because zooming,
smoothing, logarithmic scales and other x axes all need a new drawing. Readers without JavaScript
get the description, the table and a plain sketch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.report.html import escape
from shardwise.rundir.columns import Column
from shardwise.text import NONE, Json, show_number

# Larger absolute values are reported but not drawn: sums over them could overflow.
LARGEST = 1e100
# Smaller absolute values are drawn as zero, so that a logarithm of them cannot underflow.
SMALLEST = 1e-100
NUM_COLORS = 8
NUM_MARKERS = 4
# Steps without a drawable value that are passed to the script; a few show where they are.
MAX_MISSING = 200
TABLE_ROWS = 16
# The size of a sketch and its margins.
WIDTH, HEIGHT = 620.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 26.0


class ValueAt(NamedTuple):
    """A value of a curve and the step where it has it."""

    value: float
    step: int

    def __str__(self) -> str:
        return f"{show_number(self.value)} (step {self.step:,})"


class LineStyle(NamedTuple):
    """The color, dashes and marker of a curve.

    Attributes:
        color: CSS class s0 to s7.
        dash: CSS class d0 to d7.
        marker: id of the marker, mark0 to mark3.
    """

    color: str
    dash: str
    marker: str

    @classmethod
    def of(cls, index: int) -> "LineStyle":
        """Return the style with this index. The first 64 styles all differ."""
        dash = (index + index // NUM_COLORS) % NUM_COLORS
        return cls(f"s{index % NUM_COLORS}", f"d{dash}", f"mark{index % NUM_MARKERS}")


@dataclass(frozen=True)
class Series:
    """A thinned curve: each point represents some steps, with their mean and their range.

    Attributes:
        label: Name in the legend.
        run: Index of the run among those on the page.
        style: Color, dashes and marker.
        x: Mean step of each point, increasing.
        y: Mean value of each point.
        low: Smallest value of each point, or None if each point is a single step.
        high: Largest value of each point, or None if each point is a single step.
        missing: First steps whose value cannot be drawn: not finite, or beyond `LARGEST`.
        num_missing: Number of all such steps.
        has_markers: Whether the points are few and far apart, so that each gets a marker.
        smallest: The smallest drawable value.
        largest: The largest drawable value.
        first: The first drawable value.
        last: The last drawable value.
        steps_per_point: Mean number of values per point.
    """

    label: str
    run: int
    style: LineStyle
    x: list[float]
    y: list[float]
    low: list[float] | None
    high: list[float] | None
    missing: list[int]
    num_missing: int
    has_markers: bool
    smallest: ValueAt
    largest: ValueAt
    first: ValueAt
    last: ValueAt
    steps_per_point: float

    def as_json(self) -> Json:
        """Return what the script needs to draw the curve."""
        return {
            "label": self.label,
            "run": self.run,
            **self.style._asdict(),
            "hasMarkers": self.has_markers,
            "x": self.x,
            "y": self.y,
            "low": self.low,
            "high": self.high,
            "missing": self.missing,
        }

    def describe(self) -> str:
        """Return one sentence with the ends and the extremes of the curve."""
        if self.first.step == self.last.step:
            return f"{self.label} is {self.first}."
        return (
            f"{self.label} starts at {self.first}, ends at {self.last}, "
            f"minimum {self.smallest}, maximum {self.largest}."
        )


@dataclass(frozen=True)
class Chart:
    """Curves that are drawn in one frame.

    Attributes:
        name: Short name for ids, of letters and digits only.
        title: Heading of the chart.
        series: The curves, at least one.
        from_zero: Whether the linear y axis includes zero.
        can_smooth: Whether smoothing applies to its curves.
        can_log: Whether a logarithmic y axis is offered.
    """

    name: str
    title: str
    series: list[Series]
    from_zero: bool = False
    can_smooth: bool = True
    can_log: bool = False

    def as_json(self) -> Json:
        """Return what the script needs to draw the chart."""
        return {
            "name": self.name,
            "fromZero": self.from_zero,
            "canSmooth": self.can_smooth,
            "series": [series.as_json() for series in self.series],
        }

    def describe(self) -> str:
        """Return the chart in words, for readers who cannot see it."""
        return " ".join(series.describe() for series in self.series)


def make_series(
    column: Column, label: str, run: int, style: LineStyle, max_points: int
) -> Series | None:
    """Thin a metric to at most `max_points` points.

    The range of steps is divided into equal parts. Each part keeps its mean, minimum and maximum,
    so that thinning hides no spike.

    Args:
        column: Steps and values of the metric.
        label: Name in the legend.
        run: Index of the run among those on the page.
        style: Color, dashes and marker.
        max_points: Upper bound of the number of points.

    Returns:
        The thinned curve, or None if no value can be drawn.
    """
    with np.errstate(all="ignore"):
        is_drawable = np.isfinite(column.values) & (np.abs(column.values) <= LARGEST)
    missing = column.steps[~is_drawable]
    steps, values = column.steps[is_drawable], column.values[is_drawable]
    if not len(steps):
        return None
    values = np.where(np.abs(values) < SMALLEST, 0.0, values)
    x, y = steps.astype(np.float64), values
    low = high = None
    if len(steps) > max_points:
        begins = _part_begins(steps, max_points)
        counts = np.diff(np.append(begins, len(steps)))
        x = np.add.reduceat(x, begins) / counts
        y = np.add.reduceat(values, begins) / counts
        low = _round_values(np.minimum.reduceat(values, begins))
        high = _round_values(np.maximum.reduceat(values, begins))

    def at(index: int) -> ValueAt:
        return ValueAt(float(values[index]), int(steps[index]))

    return Series(
        label=label,
        run=run,
        style=style,
        x=[round(step, 1) for step in x.tolist()],
        y=_round_values(y),
        low=low,
        high=high,
        missing=missing[:MAX_MISSING].tolist(),
        num_missing=len(missing),
        has_markers=_are_sparse(x),
        smallest=at(int(np.argmin(values))),
        largest=at(int(np.argmax(values))),
        first=at(0),
        last=at(-1),
        steps_per_point=len(values) / len(x),
    )


def _part_begins(steps: NDArray[np.int64], num_parts: int) -> NDArray[np.int64]:
    """Return the index of the first step in each part of the range, skipping empty parts."""
    edges = np.linspace(float(steps[0]), float(steps[-1]) + 1, num_parts + 1)
    begins: NDArray[np.int64] = np.unique(
        np.searchsorted(steps, edges[:-1], side="left")
    )
    return begins[begins < len(steps)]


def _are_sparse(x: NDArray[np.float64]) -> bool:
    """Return whether points are few, or have steps between them, as those of evaluations."""
    has_gaps = float(x[-1] - x[0]) > 1.5 * (len(x) - 1)
    return len(x) <= 8 or (len(x) <= 60 and has_gaps)


def _round_values(values: NDArray[np.float64]) -> list[float]:
    """Return the values with 6 significant digits, which keeps the page small."""
    return [float(f"{value:.6g}") for value in values.tolist()]


# The shapes of markers, once per page. Charts and legends refer to them by id.
MARKERS = (
    '<svg width="0" height="0" class="marks" aria-hidden="true"><defs>'
    '<circle id="mark0" r="3.6"/><path id="mark1" d="M-3.4-3.4H3.4V3.4H-3.4Z"/>'
    '<path id="mark2" d="M0-4.6L4.2 3.2H-4.2Z"/>'
    '<path id="mark3" d="M0-4.6L4.6 0L0 4.6L-4.6 0Z"/></defs></svg>'
)


def legend_line(style: LineStyle, has_marker: bool) -> str:
    """Return a short piece of a curve for a legend or a table."""
    line = f'<path class="line {style.color} {style.dash}" d="M0 6H32"/>'
    marker = ""
    if has_marker:
        marker = (
            f'<use href="#{style.marker}" class="mark {style.color}" x="16" y="6"/>'
        )
    return f'<svg class="sample" viewBox="0 0 32 12" aria-hidden="true">{line}{marker}</svg>'


def sketch(chart: Chart) -> str:
    """Return a plain SVG drawing of the mean curves over steps, with the ends of both axes labeled.

    It is what readers without JavaScript see; `curves.js` replaces it.
    """
    left = min(series.x[0] for series in chart.series)
    right = max(series.x[-1] for series in chart.series)
    # Points of a thinned curve are means of several steps; the labels name the real ends.
    first_step = min(series.first.step for series in chart.series)
    last_step = max(series.last.step for series in chart.series)
    low = min(min(series.y) for series in chart.series)
    high = max(max(series.y) for series in chart.series)
    if chart.from_zero:
        low = min(low, 0.0)
    x_scale = (WIDTH - LEFT - RIGHT) / (right - left or 1.0)
    y_scale = (HEIGHT - TOP - BOTTOM) / (high - low or 1.0)
    floor = HEIGHT - BOTTOM
    parts = [
        f'<path class="frame" d="M{LEFT:.0f} {floor:.0f}H{WIDTH - RIGHT:.0f}"/>',
        f'<text class="place end" x="{LEFT - 8:.0f}" y="{TOP:.0f}">{show_number(high)}</text>',
        f'<text class="place end" x="{LEFT - 8:.0f}" y="{floor - 6:.0f}">{show_number(low)}</text>',
        f'<text class="place" x="{LEFT:.0f}" y="{HEIGHT - 8:.0f}">{first_step:,}</text>',
        f'<text class="place end" x="{WIDTH - RIGHT:.0f}" y="{HEIGHT - 8:.0f}">'
        f"step {last_step:,}</text>",
    ]
    for series in chart.series:
        points = [
            f"{LEFT + (x - left) * x_scale:.1f} {floor - (y - low) * y_scale:.1f}"
            for x, y in zip(series.x, series.y, strict=True)
        ]
        style = series.style
        parts.append(
            f'<path class="line {style.color} {style.dash}" d="M{"L".join(points)}"/>'
        )
    return "".join(parts)


def table_rows(chart: Chart) -> Iterator[list[str]]:
    """Yield the chart as table rows: a step, and the value of each curve there, all as markup."""
    steps = sorted({x for series in chart.series for x in series.x})
    if len(steps) > TABLE_ROWS:
        picked = np.linspace(0, len(steps) - 1, TABLE_ROWS).round().astype(int)
        steps = [steps[i] for i in picked.tolist()]
    for step in steps:
        yield [f"{step:,.0f}", *(_value_near(series, step) for series in chart.series)]


def _value_near(series: Series, step: float) -> str:
    """Return the value of a curve at a step, or a dash if it has no point there."""
    distances = np.abs(np.asarray(series.x) - step)
    nearest = int(np.argmin(distances))
    # A point of a thinned curve represents the steps around it, any other for its own step only.
    if distances[nearest] > (0.5 if series.low is None else series.steps_per_point):
        return NONE
    text = show_number(series.y[nearest])
    if series.low is not None and series.high is not None:
        text += f" ({show_number(series.low[nearest])} to {show_number(series.high[nearest])})"
    return escape(text)
