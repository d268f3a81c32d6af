"""Real shells complete the command."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.completion import ANYWHERE, OF_TRAIN, VERBS, completion, recipe_arguments
from shardwise.errors import ConfigError

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
MODULES = {
    "verify": "verify_command",
    "launch": "launch",
    "report": "report_command",
    "sweep": "sweep",
    "doctor": "doctor",
    "checkpoint": "checkpoint_commands",
    "sample": "sample_command",
    "data": "data/commands",
    "plan": "plan_command",
}
RECIPE = (
    "def recipe(steps: int = 3, batch_size: int = 4, *, out=None): ...\ndef other(width=1): ...\n"
)


def options_of(module):
    return set(
        re.findall(r'add_argument\("(--[a-z-]+)"', (SOURCE / f"{module}.py").read_text())
    ) - {"--help"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shardwise"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardwise.cli "$@"\n')
    command.chmod(0o755)
    return tmp_path


def in_bash(folder, *words):
    """What bash offers for the last of these words."""
    script = f"""eval "$(shardwise --completion bash)"
COMP_WORDS=({" ".join(map(shlex.quote, words))})
COMP_CWORD={len(words) - 1}
_shardwise
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p shardwise >/dev/null
"""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-euc", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["re"], ["report"]),
        (["checkpoint", "e"], ["export"]),
        (["doctor", "--t"], ["--timeout"]),
        (["train", "ti"], ["tiny.py"]),
        (["train", "tiny.py", "--ba"], ["--batch-size"]),
        (["train", "tiny.py:other", "--w"], ["--watchdog", "--width"]),
        (["sweep", "tiny.py", "--steps", "3", "--ret"], ["--retry"]),
        (["--completion", "f"], ["fish"]),
        (["sample", "--prompt", "b"], ["bin"]),
    ],
)
def test_bash_completes(folder, words, offered):
    assert in_bash(folder, "shardwise", *words) == offered


def test_every_command_and_option_is_offered():
    cli = (SOURCE / "cli.py").read_text()
    known = {*re.findall(r'^    "(\w+)": "shardwise\.', cli, re.MULTILINE), "launch"}
    known |= set(re.findall(r'"(\w+)": \w+', cli[cli.index("VERBS = {") : cli.index("TOOLS = {")]))
    assert set(VERBS) == known
    for verb, module in MODULES.items():
        lacking = options_of(module) - set(VERBS[verb])
        assert not lacking, (verb, lacking)
    # Of the main parser each option is offered somewhere, and no other is offered as one of its own.
    assert options_of("cli") - {"--out", "--plot"} == {*ANYWHERE, *OF_TRAIN}


def test_a_recipe_is_read_and_not_run(tmp_path):
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef recipe(lr: float = 1.0): ...\n")
    assert recipe_arguments(str(path)) == ["--lr"]
    assert not (tmp_path / "ran").exists()
    path.write_text("def recipe(:")
    assert recipe_arguments(str(path)) == recipe_arguments("nowhere.py") == []


def test_other_shells():
    for verb in VERBS:
        assert verb in completion("zsh")
        assert f"__fish_seen_subcommand_from {verb}" in completion("fish")
    with pytest.raises(ConfigError, match="there are bash, zsh, fish"):
        completion("tcsh")
