"""The page on sampling tells the truth: its code and its commands run, in order, and print what is shown."""

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from shardwise.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, names, written = PAGE.read_text(), {}, []
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(2))  # so that an error shows the line of the page
        if block[1] == "python":
            exec(compile("\n" * before + block[2], PAGE, "exec"), names)  # noqa: S102
            assert capsys.readouterr().out.split() == (block[3] or "").split(), f"line {before}"
            continue
        for command in block[2].splitlines():
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"return ")))
            words = shlex.split(command.removeprefix("$ shardwise "))
            words = words[: words.index("--cpu-devices")] if "--cpu-devices" in words else words  # there are eight already
            assert main(words) == 0, command
            written.append(capsys.readouterr().out)
    prompts = ["def ", "return ", "--- 1 of 2\nimport ", "class "]
    assert [out[: len(prompt)] for out, prompt in zip(written, prompts, strict=False)] == prompts
    assert len(json.loads(Path("texts.json").read_text())["continuations"]) == 2
    assert sorted(path.name for path in Path("hub").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
