"""Text for people: numbers, sizes, durations, tables.

This module imports no JAX, so that commands which only display something start fast.
"""

import datetime
import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

# A JSON object as `json.loads` returns it.
Json: TypeAlias = dict[str, Any]

# Shown in place of a value that does not exist.
NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
# The share of the points of a curve that `smoothed` averages over in reports.
SMOOTH = 0.02
# The heights of `sparkline`.
SPARKS = "▁▂▃▄▅▆▇█"


def show_bytes(count: float) -> str:
    """Return a size in binary units: `512 B`, `1.5 KiB`, `15.8 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_count(value: float, gap: str = "") -> str:
    """Return three significant digits and a decimal prefix: `844k`, `13.2M`, `1.56G`.

    Args:
        value: a number that is not negative.
        gap: the text between digits and prefix.
    """
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{gap}{prefix}"
        value /= 1000
    return f"{value:.3g}{gap}P"


def show_seconds(seconds: float) -> str:
    """Return a duration: `12.3 s`, or `h:mm:ss` from one minute on."""
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else str(datetime.timedelta(seconds=round(seconds)))
    )


def show_short_time(seconds: float) -> str:
    """Return a duration with three significant digits, also below a second: `119 ms`, `1.25 s`."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * scale < 999.5:
            digits = f"{seconds * scale:#.3g}".rstrip(".")
            return f"{digits} {unit}"
    return f"{seconds:.2f} s" if seconds < 60 else show_seconds(seconds)


def show_share(part: float, whole: float) -> str:
    """Return `part` as a percentage of `whole`; a dash if `whole` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else NONE


def show_matmuls(flops: Mapping[str, float], lines: Mapping[str, str]) -> str:
    """Return the dtypes of matmuls: "matmuls: 93.0 % bfloat16, 7.0 % float32 (model.py:41)".

    Args:
        flops: operations by dtype, most operations first.
        lines: a place in the code by dtype. It is shown for all dtypes but the first.
    """
    if len(flops) < 2:
        return f"matmuls in {next(iter(flops))}" if flops else "no matmuls"
    total = sum(flops.values())
    parts = [f"{show_share(part, total)} {dtype}" for dtype, part in flops.items()]
    places = [f" ({lines[dtype]})" if dtype in lines else "" for dtype in flops]
    texts = [parts[0], *map(operator.add, parts[1:], places[1:])]
    return f"matmuls: {', '.join(texts)}"


def show_number(value: float) -> str:
    """Return a number as on the axes of charts: `0.0125`, `12.5k`, `1e-4`.

    `report/static/curves.js` formats numbers in the same way; a test compares both.
    """
    size = abs(value)
    sign = "\N{MINUS SIGN}" if value < 0 else ""
    if math.isnan(value):
        return "not a number"
    if size == math.inf:
        return f"{sign}∞"
    if size == 0:
        return "0"
    # From 9999.5 on, four digits would round to 1e+04.
    if 1e-3 <= size < 9999.5:
        return f"{sign}{size:.4g}"
    for power, prefix in ((3, "k"), (6, "M"), (9, "G"), (12, "T")):
        # Below the value that rounds up to 1000 of this prefix.
        if 9999.5 <= size < 10.0 ** (power + 3) * 0.99995:
            return f"{sign}{size / 10.0**power:.4g}{prefix}"
    mantissa, _, exponent = f"{size:.3e}".partition("e")
    return f"{sign}{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def any_layer(path: str) -> str:
    """Return a path with `*` for each number in it, which is the same for all layers.

    Example:
        >>> any_layer("blocks/3/attn/kernel")
        'blocks/*/attn/kernel'
    """
    return "/".join("*" if part.isdigit() else part for part in path.split("/"))


def smoothed(values: Sequence[float], share: float) -> list[float]:
    """Return the exponential moving average of `values`, with bias correction at the start.

    Args:
        values: the points of a curve.
        share: the share of the points that the average covers, for example 0.02.
    """
    decay = 1 - 1 / max(1.0, share * len(values))
    mean, weight = 0.0, 0.0
    averages = []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(mean / weight)
    return averages


def sparkline(
    values: Sequence[float], width: int = 60, peak: float | None = None
) -> str:
    """Return a curve as one line of text, from zero to its peak.

    Args:
        values: the points of the curve. Values that are not finite are drawn as zero.
        width: the largest number of characters.
        peak: the value of the highest character; the largest of `values` by default.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    top = max(finite, default=0.0) if peak is None else peak
    if not top > 0:
        return SPARKS[0] * width
    count = min(width, len(finite))
    spacing = (len(finite) - 1) / max(1, count - 1)
    picked = [finite[round(i * spacing)] for i in range(count)]
    return "".join(SPARKS[max(0, min(7, int(8 * value / top)))] for value in picked)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: one line per row, indented, with each column padded to its width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{text:{width}}" for text, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def printable(text: str, keep: str = "") -> str:
    """Return a text without characters that a terminal would interpret as commands.

    Texts from files may be a stranger's.

    Args:
        text: any text.
        keep: characters to keep, such as line breaks.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\N{REPLACEMENT CHARACTER}[2Jb'
    """
    return "".join(
        character if character.isprintable() or character in keep else "\ufffd"
        for character in text
    )


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the valid name closest to `name`; "" if none is close."""
    close = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
