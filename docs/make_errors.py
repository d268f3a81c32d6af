"""Write docs/errors.md from the source: every error message, by exit code and package.

    python docs/make_errors.py            # write the page
    python docs/make_errors.py --check    # exit with 1 if the page is out of date

A message states the fact with its values, the place and the remedy, so the page needs no further
text. "…" replaces a value that a run fills in.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
SOURCE = ROOT / "src" / "shardwise"
# A message with fewer words takes its text from another one that is listed.
MIN_WORDS = 3
INTRODUCTION = """\
# Error messages

shardwise reports a mistake that you can fix in a message: the fact with its values, the place, the
remedy. The exit code says which kind of mistake it is. In Python the
same message is an exception of the class in the heading, a subclass of `shardwise.ShardwiseError`.

`…` replaces a value. Search this page for the words of your message that are not names or
numbers. The page is generated from the source (`python docs/make_errors.py`), so every message is
here.

## Exit codes

| exit code | meaning |
| --- | --- |
"""


@dataclass(frozen=True)
class Message:
    """One error message in the source.

    Attributes:
        kind: the name of the exception class.
        module: the file, relative to the package.
        line: its line.
        text: the message, with "…" for values.
    """

    kind: str
    module: str
    line: int
    text: str


def error_classes() -> list[type[errors.ShardwiseError]]:
    """Return the exceptions of shardwise, ordered by exit code."""
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ShardwiseError)
    ]
    return sorted(classes, key=lambda kind: kind.exit_code)


def find_messages(source: Path = SOURCE) -> list[Message]:
    """Return every message that the source passes to an exception of shardwise."""
    kinds = {kind.__name__ for kind in error_classes()}
    messages = []
    for path in sorted(source.rglob("*.py")):
        module = str(path.relative_to(source))
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if not is_call or node.func.id not in kinds or not node.args:
                continue
            text = re.sub(r"\s+", " ", _text(node.args[0])).strip()
            text = text.replace("`", "").replace("|", "/")
            if len(re.findall(r"[a-z]{2,}", text)) >= MIN_WORDS:
                messages.append(Message(node.func.id, module, node.lineno, text))
    return messages


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with "…" for what is computed."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.BinOp(left=left, right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body):
            return _text(body)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=parts)]):
            return " ".join(map(_text, parts))
        case ast.Call(func=ast.Name(id="listing"), args=[first, *_]):
            return _text(first)
    return "…"


def page() -> str:
    """Return the text of docs/errors.md."""
    lines = [f"| {int(code)} | {code.meaning} |" for code in errors.ExitCode]
    return INTRODUCTION + "\n".join(lines) + "\n" + "".join(_sections())


def _sections() -> Iterator[str]:
    messages = find_messages()
    for kind in error_classes():
        own = [message for message in messages if message.kind == kind.__name__]
        if not own:
            continue
        code = int(kind.exit_code)
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        yield f"\n## {code}: `{kind.__name__}`\n\n{summary}\n"
        modules = sorted({message.module for message in own})
        for module in modules:
            # One message may be raised in several places.
            texts = dict.fromkeys(
                message.text for message in own if message.module == module
            )
            rows = "".join(f"- `{text}`\n" for text in texts)
            yield f"\n### {kind.__name__} in {module}\n\n{rows}"


def main() -> int:
    """Write or check the page; return the exit code."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    print(f"{PAGE}: {len(find_messages())} messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
