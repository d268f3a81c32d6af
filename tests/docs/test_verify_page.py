"""The page on verifying tells the truth: its commands print what is shown, but for the figures of rounding, and its code runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verify.md"
COMMAND = re.compile(r"^```console\n\$ shardwise (.*?)(?:\s+# exit code (\d))?\n```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)


def without_numbers(text):
    return re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", text).split()


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_is_shown():
    commands = COMMAND.findall(PAGE.read_text())
    assert [code for _, code, _ in commands] == ["", "5"]
    for command, code, shown in commands:
        words = [sys.executable, "-m", "shardwise.cli", *command.split()]
        done = subprocess.run(words, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300)
        assert done.returncode == int(code or 0), done.stderr
        assert without_numbers(done.stdout) == without_numbers(shown), command


def test_the_code_of_the_page_is_what_is_tested_and_runs():
    mistake, use = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert mistake in (ROOT / "tests" / "verify" / "planted.py").read_text()
    path = ROOT / "examples" / "data_parallel_by_hand.py"
    spec = importlib.util.spec_from_file_location("by_hand", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    exec(compile(use, PAGE, "exec"), {"run": example.recipe(), "recipe": example.recipe})  # noqa: S102
