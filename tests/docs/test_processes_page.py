"""The page on many processes tells the truth: its commands run and print what is shown, but for the figures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "processes.md"


def without_numbers(line):
    return re.sub(r"\d[\d.]*k?", "#", line)


def call(words, tmp_path):
    """The command of the page, with its files in a folder that is thrown away."""
    words = [str(tmp_path / word) if word.startswith(("runs/", "job.")) else word for word in words]
    command = [sys.executable, "-m", "shardwise.cli", *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path):
    commands = [line.removeprefix("$ shardwise ").split() for line in PAGE.read_text().splitlines() if line.startswith("$ ")]
    launch, slurm, kubernetes = commands
    done = call(launch, tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    printed = [without_numbers(line) for line in done.stderr.splitlines()]
    assert [line for line in map(without_numbers, shown.splitlines()) if line not in printed] == []
    for words, name, start in ((slurm, "job.sbatch", "sbatch"), (kubernetes, "job.yaml", "kubectl")):
        done = call(words, tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"start it with: {start}" in done.stderr
        assert "recipes/gpt2.py" in (tmp_path / name).read_text()
