"""Draws a mesh or an array as SVG: nested blocks of cells, colored by shard."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.report.html import escape

# All lengths are in SVG units, which are pixels at the natural size of the drawing.
# Space for the ellipsis that replaces the middle of a long axis.
ELLIPSIS = 22.0
LINE_HEIGHT = 18.0
MAX_COLUMNS, MAX_ROWS = 16, 12
# Cells drawn per axis, from generous to few; the first that fits both limits above is used.
CELLS_PER_AXIS = (16, 12, 8, 6, 5, 4, 3, 2)
MAX_NAME = 12


@dataclass(frozen=True)
class DrawnAxis:
    """An axis and the coordinates on it that are drawn.

    Attributes:
        index: Position of the axis in the mesh or array.
        name: Name next to the drawing.
        coordinates: Drawn coordinates, increasing. A long axis keeps its first few and its last.
    """

    index: int
    name: str
    coordinates: list[int]


@dataclass(frozen=True)
class Direction:
    """Nested axes along one direction of the drawing, outermost first.

    Attributes:
        axes: The axes.
        cells: Coordinates on all axes, and the offset of their cell.
        labels: For each axis, the center and text of its coordinates and ellipses.
        length: Total length.
    """

    axes: list[DrawnAxis]
    cells: list[tuple[tuple[int, ...], float]]
    labels: list[list[tuple[float, str]]]
    length: float


def _arrange(
    axes: list[DrawnAxis], cell_size: float, gaps: Sequence[float]
) -> Direction:
    """Arrange nested axes along one direction.

    Args:
        axes: The axes, outermost first.
        cell_size: Length of a cell.
        gaps: Space between neighbors on the innermost axis, the next one, and all others.
    """
    cells: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    labels: list[list[tuple[float, str]]] = []
    length = cell_size
    # From the innermost axis outwards: each axis repeats the block that is arranged so far.
    for depth, axis in enumerate(reversed(axes)):
        gap = gaps[min(depth, len(gaps) - 1)]
        blocks = []
        own_labels = []
        for i, coordinate in enumerate(axis.coordinates):
            offset = i * (length + gap)
            if coordinate > i:
                # Coordinates before this one are not drawn.
                offset += ELLIPSIS
                own_labels.append((offset - (ELLIPSIS + gap) / 2, "…"))
            own_labels.append((offset + length / 2, str(coordinate)))
            blocks.append((coordinate, offset))
        inner_labels = [
            [(offset + center, text) for _, offset in blocks for center, text in inner]
            for inner in labels
        ]
        labels = [own_labels, *inner_labels]
        cells = [
            ((coordinate, *inner), offset + inner_offset)
            for coordinate, offset in blocks
            for inner, inner_offset in cells
        ]
        length += blocks[-1][1]
    return Direction(axes, cells, labels, length)


@dataclass(frozen=True)
class Grid:
    """A drawn mesh or array.

    Attributes:
        across: The axes from left to right.
        down: The axes from top to bottom.
        cells: Markup of all cells.
        num_cells: How many cells are drawn.
    """

    across: Direction
    down: Direction
    cells: str
    num_cells: int

    def svg(self, attributes: str, label: str) -> str:
        """Return the drawing, with the names and coordinates of the axes along its edges.

        Args:
            attributes: Attributes of the `svg` element.
            label: Accessible name, as plain text.
        """
        texts = [*self._column_labels(), *self._row_labels()]
        across_names = [axis.name for axis in self.across.axes]
        down_names = [axis.name for axis in self.down.axes]
        left = max(7.5 * _longest(across_names) + 12, 38.0 * len(down_names), 2.0)
        # The rotated name of a short vertical axis extends beyond its rows.
        overhang = max(0.0, 3.8 * _longest(down_names) - self.down.length / 2)
        top = max(LINE_HEIGHT * len(across_names) + 4, overhang)
        width = left + self.across.length + 2
        height = top + self.down.length + overhang + 2
        return (
            f'<svg {attributes} viewBox="{-left:.0f} {-top:.0f} {width:.0f} {height:.0f}"'
            f' style="max-width:{width:.0f}px" role="img" aria-label="{escape(label)}">'
            f"{''.join(texts)}{self.cells}</svg>"
        )

    def _column_labels(self) -> Iterable[str]:
        """Yield one line per horizontal axis above the cells, the innermost axis next to them."""
        pairs = zip(
            reversed(self.across.axes), reversed(self.across.labels), strict=True
        )
        for i, (axis, labels) in enumerate(pairs):
            y = -LINE_HEIGHT * (i + 0.5) - 3
            yield svg_text(-8, y, _shorten(axis.name), "axis end")
            for x, label in labels:
                yield svg_text(x, y, label, "place")

    def _row_labels(self) -> Iterable[str]:
        """Yield one column per vertical axis left of the cells, the innermost axis next to them."""
        pairs = zip(reversed(self.down.axes), reversed(self.down.labels), strict=True)
        for i, (axis, labels) in enumerate(pairs):
            x = -12 - 36.0 * i
            middle = self.down.length / 2
            yield svg_text(x - 17, middle, _shorten(axis.name), "axis", rotated=True)
            for y, label in labels:
                yield svg_text(x, y, label, "place", rotated=label == "…")


def draw_grid(
    sizes: Mapping[str, int], sharding_axes: Iterable[int], gaps: Sequence[float]
) -> Grid:
    """Draw one cell per coordinate, colored and numbered by shard.

    The last axis runs across and the one before it down. Other axes go where there is room.

    Args:
        sizes: Size of each axis by name.
        sharding_axes: Indices of the axes that tell shards apart, most significant first.
        gaps: Space between neighbors on the innermost axis, the next one, and all others.
    """
    sharding_axes = list(sharding_axes)
    across, down = _split_axes(sizes)
    width, height = 96.0, 56.0
    if sizes:
        num_columns = math.prod(len(axis.coordinates) for axis in across)
        width = min(48.0, max(24.0, 380 / num_columns))
        height = min(width, 32.0)
    columns = _arrange(across, width, gaps)
    rows = _arrange(down, height, gaps)
    axis_sizes = list(sizes.values())
    is_sharded = math.prod(axis_sizes[axis] for axis in sharding_axes) > 1
    order = [axis.index for axis in (*down, *across)]
    cells = []
    for (row, y), (column, x) in itertools.product(rows.cells, columns.cells):
        in_order = sorted(zip(order, (*row, *column), strict=True))
        coordinates = [coordinate for _, coordinate in in_order]
        shard = 0
        # plan_page.js numbers shards in the same way when another parameter is chosen.
        for axis in sharding_axes:
            shard = shard * axis_sizes[axis] + coordinates[axis]
        # Multiples of the golden angle give neighboring shards clearly different hues.
        hue = (210 + 137.5 * shard) % 360
        cells.append(
            f'<g class="cell" data-at="{",".join(map(str, coordinates))}" data-shard="{shard}"'
            f' style="--hue:{hue:.1f}" transform="translate({x:.1f} {y:.1f})">'
            f'<rect width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f'<text x="{width / 2:.1f}" y="{height / 2:.1f}">{shard if is_sharded else "●"}</text>'
            "</g>"
        )
    return Grid(columns, rows, "".join(cells), len(cells))


def _split_axes(sizes: Mapping[str, int]) -> tuple[list[DrawnAxis], list[DrawnAxis]]:
    """Return the axes that run across and those that run down.

    The more axes there are, the fewer coordinates of each are drawn, so that cells stay legible.
    """
    across: list[DrawnAxis] = []
    down: list[DrawnAxis] = []
    for max_cells in CELLS_PER_AXIS:
        across, down = [], []
        num_columns = num_rows = 1
        for index, (name, size) in reversed(list(enumerate(sizes.items()))):
            coordinates = list(range(size))
            if size > max_cells:
                coordinates = [*range(max_cells - 1), size - 1]
            axis = DrawnAxis(index, name, coordinates)
            is_last, is_second_to_last = (
                index == len(sizes) - 1,
                index == len(sizes) - 2,
            )
            fits_across = num_columns * len(coordinates) <= MAX_COLUMNS
            if is_last or (fits_across and not is_second_to_last):
                across.insert(0, axis)
                num_columns *= len(coordinates)
            else:
                down.insert(0, axis)
                num_rows *= len(coordinates)
        if num_columns <= MAX_COLUMNS and num_rows <= MAX_ROWS:
            break
    return across, down


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _longest(names: list[str]) -> int:
    return max((len(_shorten(name)) for name in names), default=0)


def svg_text(x: float, y: float, text: str, classes: str, rotated: bool = False) -> str:
    """Return a text element centered at (x, y), or reading upwards if `rotated`."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotated else ""
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}"{rotation}>{escape(text)}</text>'
