"""The pages on tracking and on looking inside tell the truth: their code and commands run, in order, and print what is shown."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def run_page(page, folder, capsys):
    (folder / "recipes").symlink_to(ROOT / "recipes")
    text = page.read_text()
    names = {}
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(2))  # so that an error shows the line of the page
        if block[1] == "python":
            exec(compile("\n" * before + block[2], page, "exec"), names)  # noqa: S102
            assert capsys.readouterr().out.split() == (block[3] or "").split(), f"line {before}"
            continue
        for line in block[2].splitlines():
            command = [sys.executable, "-m", "shardwise.cli", *line.removeprefix("$ shardwise ").split()]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tracking", "looking_inside"])
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / "docs" / f"{name}.md", tmp_path, capsys)
    if name == "tracking":
        assert list(Path("runs/tracked/tensorboard").glob("events.*"))
    else:
        assert list(Path("runs/profiled/profile").glob("plugins/profile/*/perfetto_trace.json.gz"))
