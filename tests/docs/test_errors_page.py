"""The index of error messages is complete: every message of the source has its row, and no row is of a message that is gone."""

import ast
import re

import pytest

from shardwise import errors
from tests.helpers.messages import (
    KINDS,
    PAGE,
    SOURCE,
    _text,
    find_messages,
    rows_of_the_page,
    without_row,
)


def test_every_message_is_on_the_page():
    lacking = without_row(find_messages(), rows_of_the_page())
    listed = "\n".join(f"  {m.kind}, {m.module}, line {m.line}: {m.text[:120]}" for m in lacking)
    assert not lacking, (
        f"docs/errors.md lacks rows for these; `python -m tests.helpers.messages` prints them:\n{listed}"
    )


def test_every_row_is_of_a_message():
    messages = find_messages()
    for kind, beginning, remedy in rows_of_the_page():
        assert any(m.kind == kind and m.text.startswith(beginning) for m in messages), (
            f"{kind}: {beginning}"
        )
        assert len(re.findall(r"[A-Za-z]{2,}", beginning)) >= 2, (
            f"{beginning} would stand for any message"
        )
        assert len(remedy.split()) >= 3, f"{beginning}: say what to do"


def test_messages_put_together_are_in_the_source():
    texts = []
    for path in SOURCE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [
            re.sub(r"\s+", " ", _text(node))
            for node in nodes
            if isinstance(node, ast.JoinedStr | ast.Constant)
        ]
    rows = re.findall(r"^\| (\d) \| `(.+?)` \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for _, shown in rows:
        assert any(shown in text for text in texts), shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_every_exit_code(kind):
    code = getattr(errors, kind).exit_code
    assert re.search(rf"^\| {code} \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert kind == "ShardwiseError" or re.search(
        rf"^## {code}: .*`{kind}`", PAGE.read_text(), re.MULTILINE
    )


def test_a_message_without_a_row_is_found(tmp_path, monkeypatch):
    (tmp_path / "new.py").write_text(
        'raise ConfigError(f"the moon is {phase}: wait for the sun. Then go on.")\n'
    )
    monkeypatch.setattr("tests.helpers.messages.SOURCE", tmp_path)
    (found,) = without_row(find_messages(), rows_of_the_page())
    assert (found.kind, found.module, found.text) == (
        "ConfigError",
        "new.py",
        "the moon is …: wait for the sun. Then go on.",
    )
