"""Drawings as SVG: a mesh or an array as nested blocks, and points against a limit. Knows nothing of plans."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.report.html import escape
from shardwise.text import show_bytes

DOTS = 22.0  # the room of what is left out
LINE = 18.0
WIDE, TALL = 16, 12  # cells that are drawn at most


@dataclass(frozen=True)
class Line:
    """Nested axes along one direction, outermost first. A long axis is drawn as its first few places, dots, and its last."""

    names: list[str]
    spots: list[
        tuple[tuple[int, ...], float]
    ]  # places along every axis, and where their cell begins
    marks: list[list[tuple[float, str]]]  # of every axis: where its numbers and dots stand
    length: float

    @classmethod
    def of(cls, axes: list[tuple[str, list[int]]], unit: float, gaps: tuple[float, ...]) -> "Line":
        spots: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        marks: list[list[tuple[float, str]]] = []
        length = unit
        for depth, (_, places) in enumerate(reversed(axes)):
            gap = gaps[min(depth, len(gaps) - 1)]
            starts = [
                (place, i * (length + gap) + (DOTS if place > i else 0.0))
                for i, place in enumerate(places)
            ]
            own = [(start + length / 2, str(place)) for place, start in starts]
            own += [
                (start - (DOTS + gap) / 2, "…")
                for i, (place, start) in enumerate(starts)
                if place > i
            ]
            marks = [
                own,
                *(
                    [(start + x, mark) for _, start in starts for x, mark in inner]
                    for inner in marks
                ),
            ]
            spots = [((place, *at), start + x) for place, start in starts for at, x in spots]
            length += starts[-1][1]
        return cls([name for name, _ in axes], spots, marks, length)


@dataclass(frozen=True)
class Grid:
    along: Line
    down: Line
    cells: str
    count: int  # of cells drawn

    def svg(self, attributes: str, label: str) -> str:
        """The cells, with the names and places of their axes along the edges."""
        words = []
        for i, name in enumerate(reversed(self.along.names)):
            y = -LINE * (i + 0.5) - 3
            words.append(_svg_text(-8, y, _short(name), "axis end"))
            words += [_svg_text(x, y, mark, "place") for x, mark in self.along.marks[-1 - i]]
        for i, name in enumerate(reversed(self.down.names)):
            x = -12 - 36.0 * i
            words.append(_svg_text(x - 17, self.down.length / 2, _short(name), "axis", turned=True))
            words += [
                _svg_text(x, y, mark, "place", turned=mark == "…")
                for y, mark in self.down.marks[-1 - i]
            ]
        left = max(7.5 * _longest(self.along.names) + 12, 38.0 * len(self.down.names), 2.0)
        beyond = max(
            0.0, 3.8 * _longest(self.down.names) - self.down.length / 2
        )  # of a long name beside few rows
        top, low = max(LINE * len(self.along.names) + 4, beyond), self.down.length + beyond
        width = left + self.along.length + 2
        return (
            f'<svg {attributes} viewBox="{-left:.0f} {-top:.0f} {width:.0f} {top + low + 2:.0f}" style="max-width:{width:.0f}px" '
            f'role="img" aria-label="{escape(label)}">{"".join(words)}{self.cells}</svg>'
        )


def grid(axes: dict[str, int], cutting: Iterable[int], gaps: tuple[float, ...]) -> Grid:
    """A cell for all coordinates on `axes`, coloured by the piece that the `cutting` axes make of them.

    The last axis runs along, the one before down, those before wherever there is room.
    """
    sizes, cutting = list(axes.values()), list(cutting)
    along, down = _directions(axes)
    width = (
        min(48.0, max(24.0, 380 / math.prod(len(places) for _, _, places in along)))
        if axes
        else 96.0
    )
    height = min(width, 32.0) if axes else 56.0
    lines = [
        Line.of([(name, places) for _, name, places in part], unit, gaps)
        for part, unit in ((along, width), (down, height))
    ]
    order = [number for number, _, _ in [*down, *along]]
    pieces = math.prod(sizes[axis] for axis in cutting)
    cells = []
    for (row, y), (column, x) in itertools.product(lines[1].spots, lines[0].spots):
        at = [place for _, place in sorted(zip(order, [*row, *column], strict=True))]
        piece = 0
        for axis in cutting:  # plan_page.js counts the same way
            piece = piece * sizes[axis] + at[axis]
        cells.append(
            f'<g class="cell" data-at="{",".join(map(str, at))}" data-piece="{piece}" style="--hue:{(210 + 137.5 * piece) % 360:.1f}" '
            f'transform="translate({x:.1f} {y:.1f})"><rect width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f'<text x="{width / 2:.1f}" y="{height / 2:.1f}">{piece if pieces > 1 else "●"}</text></g>'
        )
    return Grid(lines[0], lines[1], "".join(cells), len(cells))


def _directions(
    axes: dict[str, int],
) -> tuple[list[tuple[int, str, list[int]]], list[tuple[int, str, list[int]]]]:
    """The axes along and those down: number, name and the places drawn of each; the fewer places, the more axes there are."""
    for most in (16, 12, 8, 6, 5, 4, 3, 2):
        along: list[tuple[int, str, list[int]]] = []
        down: list[tuple[int, str, list[int]]] = []
        wide = tall = 1
        for number, (name, size) in reversed(list(enumerate(axes.items()))):
            places = list(range(size)) if size <= most else [*range(most - 1), size - 1]
            last, before = number == len(axes) - 1, number == len(axes) - 2
            if last or (not before and wide * len(places) <= WIDE):
                along.insert(0, (number, name, places))
                wide *= len(places)
            else:
                down.insert(0, (number, name, places))
                tall *= len(places)
        if wide <= WIDE and tall <= TALL:
            break
    return along, down


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"


def _longest(names: list[str]) -> int:
    return max((len(_short(name)) for name in names), default=0)


def _svg_text(x: float, y: float, text: str, kind: str, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{turn}>{escape(text)}</text>'


@dataclass(frozen=True)
class Point:
    peak: float  # bytes
    seconds: float
    kind: str  # a class of plan_page.css: chosen, compiled, grey
    status: str
    label: str


def scatter(points: list[Point], limit: float) -> str:
    """Peak memory against step time, the limit as a line."""
    if len(points) < 2:
        return ""
    limited = 0 < limit < math.inf
    width, height, gib = 560.0, 260.0, 2.0**30
    peaks = _ticks(max(*(p.peak for p in points), limit if limited else 0.0) / gib)
    times = _ticks(max(p.seconds for p in points) * 1e3)
    marks = [
        f'<path class="rule" d="M{width * t / peaks[-1]:.1f} 0V{height:.0f}"/>' for t in peaks[1:]
    ]
    marks += [
        f'<path class="rule" d="M0 {height * (1 - t / times[-1]):.1f}H{width:.0f}"/>'
        for t in times[1:]
    ]
    marks += [_svg_text(width * t / peaks[-1], height + 15, f"{t:g}", "place") for t in peaks]
    marks += [_svg_text(-8, height * (1 - t / times[-1]), f"{t:g}", "place end") for t in times]
    marks += [
        f'<path class="frame" d="M0 0V{height:.0f}H{width:.0f}"/>',
        _svg_text(width / 2, height + 38, "peak memory per device, GiB", "axis"),
        _svg_text(-58, height / 2, "≈ step time, ms", "axis", turned=True),
    ]
    if limited:
        x = width * limit / gib / peaks[-1]
        marks.append(
            f'<path class="limit" d="M{x:.1f} -2V{height:.0f}"/>'
            + _svg_text(x, -11, f"limit {show_bytes(limit)}", "limit")
        )
    for p in sorted(points, key=lambda p: p.kind == "chosen"):
        x, y = width * p.peak / gib / peaks[-1], height * (1 - p.seconds * 1e3 / times[-1])
        shape = '<path d="M0-8L8 0L0 8L-8 0Z"/>' if p.kind == "chosen" else '<circle r="5"/>'
        marks.append(
            f'<g class="point {p.kind}" data-status="{escape(p.status)}" transform="translate({x:.1f} {y:.1f})">'
            f"<title>{escape(p.label)}</title>{shape}</g>"
        )
    label = (
        f"Step time against peak memory of {len(points)} layouts; the table below has the numbers"
    )
    signs = {"chosen": "◆ chosen", "compiled": "● compiled", "grey": "○ estimated, or too large"}
    legend = "".join(
        f'<span><span class="point {kind}">{sign[0]}</span>{sign[1:]}</span>'
        for kind, sign in signs.items()
    )
    return (
        f'<figure class="scatter"><svg viewBox="-70 -26 {width + 88:.0f} {height + 76:.0f}" role="img" aria-label="{label}">'
        f'{"".join(marks)}</svg><p class="legend">{legend}</p></figure>'
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from zero to above `most`."""
    rough = max(most, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * i for i in range(math.ceil(most * 1.02 / step) + 1)]
