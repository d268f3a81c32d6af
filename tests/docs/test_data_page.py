"""The page on data tells the truth: its code and its commands run, in order, and print what is shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def test_the_page_runs_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    text = PAGE.read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        language, content, shown = block.groups()
        before = text.count("\n", 0, block.start(2))  # so that an error shows the line of the page
        if language == "python":
            exec(compile("\n" * before + content, PAGE, "exec"), names)  # noqa: S102
            assert capsys.readouterr().out.split() == (shown or "").split(), f"line {before}"  # lines are wrapped on the page
            continue
        for command in content.splitlines():
            words = [sys.executable, "-m", "shardwise.cli", *command.removeprefix("$ shardwise ").split()]
            found = subprocess.run(words, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300)
            assert found.returncode == 0, (command, found.stderr)
    assert (tmp_path / "run" / "metrics.jsonl").exists()
