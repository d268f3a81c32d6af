"""Numbers as people read them. Imports nothing, so that what only shows things need not wait for JAX."""

import datetime
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

# A JSON object as `json.loads` returns it.
Json: TypeAlias = dict[str, Any]

NONE = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
SMOOTH = 0.02  # of the points of a curve, the weight of the mean's memory


def show_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_count(value: float, gap: str = "") -> str:
    """Three digits and a prefix: 844k, 13.2M, 1.56G."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{gap}{prefix}"
        value /= 1000
    return f"{value:.3g}{gap}P"


def show_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def show_short_time(seconds: float) -> str:
    """Three digits, also of what takes less than a second."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.2f} s" if seconds < 60 else show_seconds(seconds)


def show_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else NONE


def show_number(value: float) -> str:
    """As the axes of a chart have it: 0.0125, 12.5k, 1e-4. `report_page.js` writes the same."""
    size = abs(value)
    sign = "\N{MINUS SIGN}" if value < 0 else ""
    if not math.isfinite(value):
        return f"{sign}∞" if size == math.inf else "not a number"
    if size == 0:
        return "0"
    if 1e-3 <= size < 1e4:
        return f"{sign}{size:.4g}"
    for power, prefix in ((3, "k"), (6, "M"), (9, "G"), (12, "T")):
        if 1e4 <= size < 10.0 ** (power + 3) * 0.99995:
            return f"{sign}{size / 10.0**power:.4g}{prefix}"
    mantissa, _, power_text = f"{size:.3e}".partition("e")
    return f"{sign}{mantissa.rstrip('0').rstrip('.')}e{int(power_text)}"


def any_layer(path: str) -> str:
    """The path with "*" for every number in it: the same for a parameter that every layer has."""
    return "/".join("*" if part.isdigit() else part for part in path.split("/"))


def smoothed(values: Sequence[float], share: float) -> list[float]:
    """Exponential mean over about `share` of the points, corrected for its start."""
    decay = 1 - 1 / max(1.0, share * len(values))
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other, each column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest valid name, or nothing when none is close."""
    close = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
