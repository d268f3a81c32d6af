"""The messages of the errors that users meet, as they are written in the source, with "…" for what a run fills in.

python -m tests.helpers.messages    # rows for docs/errors.md that it lacks
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
SOURCE = ROOT / "src" / "shardwise"
KINDS = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.ShardwiseError)
]
FEWEST_WORDS = (
    2  # of a message itself; with fewer, its text comes from another place that is listed
)


@dataclass(frozen=True)
class Message:
    kind: str
    module: str
    line: int
    text: str


def find_messages() -> list[Message]:
    """Every message that is given to an error of shardwise, or to a ValueError of a model."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            kind = node.func.id
            if kind in KINDS or (kind == "ValueError" and module.startswith("models/")):
                text = re.sub(
                    r"\s+", " ", _text(node.args[0]).replace("`", "").replace("|", "/")
                ).strip()
                if len(re.findall(r"[a-z]{2,}", text)) >= FEWEST_WORDS:
                    found.append(Message(kind, module, node.lineno, text))
    return found


def _text(node: ast.expr) -> str:
    """What an expression says, as far as it stands there."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values) | ast.List(elts=values):
            return (" " if isinstance(node, ast.List) else "").join(map(_text, values))
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body):
            return _text(body)
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner]):
            return _text(inner)
        case ast.Call(func=ast.Name(id="listing"), args=[first, *_]):
            return _text(first)
    return "…"


def rows_of_the_page() -> list[tuple[str, str, str]]:
    """(kind, beginning of the message, remedy) for each row of a table below a heading that names the kind."""
    rows, kind = [], ""
    for line in PAGE.read_text().splitlines():
        if heading := re.match(r"## .*`(\w+)`", line):
            kind = heading[1]
        elif row := re.match(r"\| `(.+?)` \| (.+) \|$", line):
            rows.append((kind, row[1], row[2]))
    return rows


def without_row(messages: list[Message], rows: list[tuple[str, str, str]]) -> list[Message]:
    return [
        m
        for m in messages
        if not any(m.kind == kind and m.text.startswith(beginning) for kind, beginning, _ in rows)
    ]


def beginning(text: str) -> str:
    """The first sentence, or enough of it to be found."""
    first = re.split(r"(?<=[.;:]) (?=[A-Z…])", text)[0] if len(text) > 90 else text
    return first if len(first) <= 120 else first[:120].rsplit(" ", 1)[0]


if __name__ == "__main__":
    for message in without_row(find_messages(), rows_of_the_page()):
        print(
            f"{message.kind} ({message.module}, line {message.line})\n| `{beginning(message.text)}` | what it means, and what to do |"
        )
