"""The page on planning tells the truth: its command for this machine prints what is shown, its code runs, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_planning import make_run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan.md"
COMMAND = re.compile(r"^```console\n\$ shardwise (.*?)(?:\s+# exit code (\d))?\n```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = COMMAND.findall(PAGE.read_text())


def words_of(text):
    """Without figures, which differ between compilers, and without what is drawn of tables."""
    plain = re.sub(r"\d[\d.,:]*%? ?(?:[KMGT]?i?B|m?s|[kMGT]FLOP)?\b", "#", text)
    return [word for word in plain.split() if not set(word) <= set("━┏┓┳┡┩╇└┘┴─│┃")]


def run(command, cache):
    words = [sys.executable, "-m", "shardwise.cli", *command.split()]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_the_page_shows_a_plan_here_one_that_is_too_large_and_a_search():
    assert [code for _, code, _ in COMMANDS] == ["", "2", ""]
    assert ["--on cpu:8" in COMMANDS[0][0], "--on v5e:4x4" in COMMANDS[1][0], "--search" in COMMANDS[2][0]] == [True] * 3


def test_the_command_for_this_machine_prints_what_is_shown(tmp_path):
    command, _, shown = COMMANDS[0]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert words_of(done.stdout) == words_of(shown)


@pytest.mark.slow
def test_too_large_is_answered_as_shown(tmp_path):
    command, code, shown = COMMANDS[1]
    done = run(command, tmp_path)
    assert done.returncode == int(code), done.stderr
    for line in ("too large", "largest buffers among the temporaries", "--mesh fsdp=16 --remat block"):
        assert line in done.stdout
        assert line in shown


@pytest.mark.slow
def test_the_code_of_the_page_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, PAGE, "exec"), {"run": make_run("data=8")})  # noqa: S102
    said = capsys.readouterr().out
    assert "fsdp=8 " in said
    assert said.count("on each device") == 3


def test_the_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link
