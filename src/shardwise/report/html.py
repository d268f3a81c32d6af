"""A page as one HTML file that asks nothing of any network: its frame, and the parts that pages are made of.

Whatever comes from a file passes through `escape`, and none of it into the script. All of a page can be read without JavaScript.
"""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Cell = str | tuple[float | None, str]  # markup, or a number to sort by and its markup


def page(
    title: str,
    kind: str,
    header: str,
    sections: Mapping[str, str],
    footer: str,
    assets: Sequence[str],
    body: str = "",
    connect: str = "",
) -> str:
    """The whole file. `assets` names styles and scripts beside this module; only these scripts run, by their digest.

    Of `sections`, by their names, the empty ones are left out. `connect` is where the script may ask for more, usually nowhere.
    """
    style = "".join(_assets(assets, "css"))
    script = "".join(_assets(assets, "js")) + "enhance(document);\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    policy += f"; connect-src {connect}" if connect else ""
    links = "".join(
        f'<a href="#{name.lower()}">{name}</a>' for name, section in sections.items() if section
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body{f" {body}" if body else ""}>
<header>
<p class="kind">{kind}</p>
<h1>{escape(title)}</h1>
{header}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{"".join(sections.values())}
</main>
<footer>{footer}</footer>
<script>{script}</script>
</body>
</html>
"""


def _assets(names: Sequence[str], ending: str) -> list[str]:
    paths = [(Path(__file__).parent / "static" / f"{name}.{ending}") for name in names]
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()]


def escape(value: object) -> str:
    """Anything as text that HTML cannot take for markup, in an attribute or out of it. What no page may hold becomes a sign for it."""
    text = str(value).encode("utf-8", "replace").decode()
    if not text.isprintable():
        text = "".join(
            "\N{REPLACEMENT CHARACTER}" if _is_control(ord(sign)) else sign for sign in text
        )
    return html.escape(text, quote=True)


def _is_control(code: int) -> bool:
    is_ascii = (code < 32 and code not in (9, 10)) or 127 <= code < 160
    return is_ascii or (code & 0xFFFE) == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def section(name: str, heading: str, body: str, kind: str = "") -> str:
    """`name` is what links lead to."""
    return f"""<section id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title"{f' class="{kind}"' if kind else ""}>{heading}</h2>
{body}
</section>
"""


def command_box(command: str) -> str:
    return f'<div class="command"><code id="command">{escape(command)}</code><button type="button" id="copy" hidden>Copy</button></div>'


def tile(label: str, value: str, note: str) -> str:
    return f'<div class="tile"><h3>{label}</h3><p class="value">{value}</p><p>{note}</p></div>'


def facts(known: Mapping[str, str]) -> str:
    """Names and values, both markup."""
    return (
        f"<dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in known.items())}</dl>"
    )


@dataclass(frozen=True)
class Part:
    """One of the parts of a bar."""

    label: str
    value: float
    shown: str
    note: str
    colour: str  # a class of page.css: k0 to k7


def stacked(parts: Sequence[Part], whole: float, limit: float | None = None) -> str:
    """A bar of all parts; with `limit`, a line where that is reached."""
    whole = whole or 1.0
    said = ", ".join(f"{part.label} {part.shown}" for part in parts)
    pieces = "".join(
        f'<span class="{part.colour}" title="{escape(part.label)} {part.shown}" style="width:{100 * part.value / whole:.3f}%">'
        f"<b>{escape(part.label)}</b> <em>{part.shown}</em></span>"
        for part in parts
        if part.value > 0
    )
    line = (
        f'<i class="limit" style="left:{100 * limit / whole:.3f}%"><b>limit</b></i>'
        if limit is not None
        else ""
    )
    return f'<div class="stacked{" limited" if line else ""}" role="img" aria-label="{escape(said)}">{pieces}{line}</div>'


def swatch(part: Part) -> str:
    square = f'<span class="swatch {part.colour}" aria-hidden="true"></span>'
    return (
        f'<span class="named">{square}{escape(part.label)}</span><small>{escape(part.note)}</small>'
    )


def bar(value: float, most: float, shown: str) -> str:
    width = 100 * min(1.0, value / (most or 1.0))
    return f'<span class="bar"><span style="width:{width:.1f}%"></span></span><span class="beside">{shown}</span>'


def table(label: str, head: Sequence[str], rows: Sequence[str], name: str = "") -> str:
    columns = "".join(f'<th scope="col">{escape(column)}</th>' for column in head)
    known = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table{known}>'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(cells: Sequence[Cell], attributes: str = "") -> str:
    shown = (
        f"<td>{cell}</td>"
        if isinstance(cell, str)
        else f'<td class="num" data-key="{"" if cell[0] is None else repr(float(cell[0]))}">{cell[1]}</td>'
        for cell in cells
    )
    return f"<tr{f' {attributes}' if attributes else ''}>{''.join(shown)}</tr>\n"


def code(value: object) -> str:
    """As code, with places where a long path or shape may break."""
    return f"<code>{escape(value).replace('/', '/<wbr>').replace(',', ',<wbr>')}</code>"
