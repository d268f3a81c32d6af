"""The pages on the doctor and on sweeps tell the truth: their commands run, in order, and leave what is shown."""

import re
from pathlib import Path

import pytest

from shardwise.cli import main

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def run_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    text = (ROOT / "docs" / f"{name}.md").read_text()
    commands = [line.removeprefix("$ shardwise ") for block in BLOCK.findall(text) for line in block.splitlines()]
    for command in commands:
        assert main(command.split()) == 0, command
    return text, commands


@pytest.mark.slow
def test_the_page_on_the_doctor(tmp_path, monkeypatch, capsys):
    _, commands = run_page("doctor", tmp_path, monkeypatch)
    assert len(commands) == 4
    out = capsys.readouterr().out
    assert "nothing in the way" in out
    assert "it has finished: shardwise report runs/a" in out
    assert "complete -F _shardwise shardwise" in out


@pytest.mark.slow
def test_the_page_on_sweeps(tmp_path, monkeypatch, capfd):
    text, _ = run_page("sweeps", tmp_path, monkeypatch)
    shown = re.search(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1].split()
    assert all((tmp_path / name).exists() for name in shown)
    assert (tmp_path / "sweeps/a/lr=0.008/metrics.jsonl").exists()
    assert "[1 of 3] lr=0.001 is done" in capfd.readouterr().err
