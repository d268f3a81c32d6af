"""The frame of a page and the building blocks that all pages share.

A page is one self-contained HTML file that makes no network requests. Text from a run or a plan
passes through `escape` and never reaches the script. Every page is readable without JavaScript.
"""

import base64
import hashlib
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shardwise.text import NONE

STATIC = Path(__file__).parent / "static"

# A table cell: markup, or a number to sort by (None if unknown) with its markup.
Cell: TypeAlias = str | tuple[float | None, str]


def page(
    title: str,
    kind: str,
    sections: Mapping[str, str],
    *,
    header: str = "",
    footer: str = "",
    assets: Sequence[str] = (),
    body_attributes: str = "",
    connect_to: str = "",
) -> str:
    """Return a complete page.

    Args:
        title: Heading of the page and title of the window, as plain text.
        kind: What kind of page it is, as markup above the heading.
        sections: Markup of each section by its name in the navigation. Empty sections are skipped.
        header: Markup below the heading.
        footer: Markup at the end of the page.
        assets: Names of style sheets and scripts in `static/`, without their endings.
        body_attributes: Attributes of the body element.
        connect_to: Sources that the script may fetch from, as a CSP value. None by default.

    Returns:
        The HTML text. Its content security policy allows only the scripts in `assets`, by digest.
    """
    style = _read_assets(assets, "css")
    script = _read_assets(assets, "js") + "enhance(document);\n"
    attributes = f" {body_attributes}" if body_attributes else ""
    links = [
        f'<a href="#{name.lower()}">{name}</a>'
        for name, text in sections.items()
        if text
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_content_policy(script, connect_to)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body{attributes}>
<header>
<p class="kind">{kind}</p>
<h1>{escape(title)}</h1>
{header}
<nav aria-label="Sections">{"".join(links)}</nav>
</header>
<main>
{"".join(sections.values())}
</main>
<footer>{footer}</footer>
<script>{script}</script>
</body>
</html>
"""


def _content_policy(script: str, connect_to: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if connect_to:
        rules.append(f"connect-src {connect_to}")
    return "; ".join(rules)


def _read_assets(names: Sequence[str], ending: str) -> str:
    """Join the asset files with this ending. A name may have a style sheet, a script, or both."""
    paths = [STATIC / f"{name}.{ending}" for name in names]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def escape(value: object) -> str:
    """Return `value` as text that HTML cannot mistake for markup, inside and outside attributes.

    Control characters and noncharacters, which no page may contain, become U+FFFD.
    """
    text = str(value).encode("utf-8", "replace").decode()
    # Most text is printable; only the rest is worth a loop over its characters.
    if not text.isprintable():
        text = "".join(
            "\N{REPLACEMENT CHARACTER}" if _is_forbidden(ord(character)) else character
            for character in text
        )
    return html.escape(text, quote=True)


def _is_forbidden(code: int) -> bool:
    is_control = (code < 32 and code not in (9, 10)) or 127 <= code < 160
    is_noncharacter = (code & 0xFFFE) == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    return is_control or is_noncharacter


def section(name: str, heading: str, body: str, kind: str = "") -> str:
    """Return a section of a page.

    Args:
        name: Anchor that links lead to.
        heading: Markup of the heading.
        body: Markup below the heading.
        kind: CSS classes of the heading.
    """
    classes = f' class="{kind}"' if kind else ""
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title"{classes}>{heading}</h2>
{body}
</section>
"""


def command_box(command: str) -> str:
    """Return a box with a shell command and a button that copies it."""
    button = '<button type="button" id="copy" hidden>Copy</button>'
    return f'<div class="command"><code id="command">{escape(command)}</code>{button}</div>'


def tile(label: str, value: str, note: str) -> str:
    """Return a tile with one headline number. All arguments are markup."""
    return f'<div class="tile"><h3>{label}</h3><p class="value">{value}</p><p>{note}</p></div>'


def facts(known: Mapping[str, str]) -> str:
    """Return a list of names and values, both markup."""
    entries = [f"<dt>{name}</dt><dd>{value}</dd>" for name, value in known.items()]
    return f"<dl>{''.join(entries)}</dl>"


@dataclass(frozen=True)
class BarSegment:
    """One segment of a stacked bar, and its row in the table below the bar.

    Attributes:
        label: Name of the segment.
        value: Length of the segment, in any unit.
        shown: The value with its unit, as markup.
        note: One line that explains the segment.
        color: CSS class of the fill: k0 to k7 in page.css, t0 to t2, rest and gone in
            report_page.css.
    """

    label: str
    value: float
    shown: str
    note: str
    color: str


def stacked_bar(
    segments: Sequence[BarSegment], total: float, limit: float | None = None
) -> str:
    """Return a bar of all segments.

    Args:
        segments: Segments from left to right. Those of value 0 are not drawn.
        total: Value that corresponds to the full width.
        limit: Value to mark with a line, or None.
    """
    total = total or 1.0
    spans = []
    for segment in segments:
        if segment.value > 0:
            spans.append(
                f'<span class="{segment.color}" title="{escape(segment.label)} {segment.shown}"'
                f' style="width:{100 * segment.value / total:.3f}%">'
                f"<b>{escape(segment.label)}</b> <em>{segment.shown}</em></span>"
            )
    classes = "stacked"
    line = ""
    if limit is not None:
        classes = "stacked limited"
        line = (
            f'<i class="limit" style="left:{100 * limit / total:.3f}%"><b>limit</b></i>'
        )
    label = escape(
        ", ".join(f"{segment.label} {segment.shown}" for segment in segments)
    )
    return f'<div class="{classes}" role="img" aria-label="{label}">{"".join(spans)}{line}</div>'


def swatch(segment: BarSegment) -> str:
    """Return the table cell that explains a segment: its color, name and note."""
    square = f'<span class="swatch {segment.color}" aria-hidden="true"></span>'
    name = f'<span class="named">{square}{escape(segment.label)}</span>'
    return f"{name}<small>{escape(segment.note)}</small>"


def bar(value: float, largest: float, shown: str) -> str:
    """Return a small bar of length `value / largest`, followed by the markup `shown`."""
    width = 100 * min(1.0, value / (largest or 1.0))
    drawn = f'<span class="bar"><span style="width:{width:.1f}%"></span></span>'
    return f'{drawn}<span class="bar-value">{shown}</span>'


def number(value: float | None, show: Callable[[float], str]) -> Cell:
    """Return a sortable cell with `show(value)`, or a dash if the value is unknown."""
    return value, NONE if value is None else show(value)


def table(label: str, head: Sequence[str], rows: Iterable[str], name: str = "") -> str:
    """Return a table that scrolls within its own region.

    Args:
        label: Accessible name of the region, as plain text.
        head: Column headings, as plain text.
        rows: Rows as returned by `row`.
        name: id of the table, if styles or scripts refer to it.
    """
    columns = "".join(f'<th scope="col">{escape(column)}</th>' for column in head)
    identity = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">'
        f"<table{identity}><thead><tr>{columns}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(cells: Iterable[Cell], attributes: str = "") -> str:
    """Return a table row, with optional attributes of its `tr` element."""
    shown = "".join(_table_cell(cell) for cell in cells)
    return f"<tr{f' {attributes}' if attributes else ''}>{shown}</tr>\n"


def _table_cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{cell}</td>"
    value, markup = cell
    key = "" if value is None else repr(float(value))
    return f'<td class="num" data-key="{key}">{markup}</td>'


def code(value: object) -> str:
    """Return `value` as code that may wrap after the slashes and commas of a path or a shape."""
    return f"<code>{escape(value).replace('/', '/<wbr>').replace(',', ',<wbr>')}</code>"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> plural(1, "start"), plural(1200, "step")
        ('1 start', '1,200 steps')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
