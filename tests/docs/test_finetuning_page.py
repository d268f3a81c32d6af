"""The page on fine-tuning tells the truth: its code and its commands run, in order, and print what is shown."""

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, names = PAGE.read_text(), {}
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(2))  # so that an error shows the line of the page
        if block[1] == "python":
            exec(compile("\n" * before + block[2], PAGE, "exec"), names)  # noqa: S102
            assert capsys.readouterr().out.split() == (block[3] or "").split(), f"line {before}"
            continue
        for command in block[2].splitlines():
            assert main(shlex.split(command.removeprefix("$ shardwise "))) == 0, command
            capsys.readouterr()
    before, after = (names[name].eval_metrics["loss"] for name in ("base", "tuned"))
    said = re.search(r"from about ([\d.]+) to ([\d.]+) nats a byte", text)
    assert abs(before - float(said[1])) < 0.15, before
    assert abs(after - float(said[2])) < 0.15, after
