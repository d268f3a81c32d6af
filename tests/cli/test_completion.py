"""Real shells complete the command, from the parsers that the command itself uses."""

import os
import shlex
import subprocess
import sys

import pytest

from shardwise.cli.completion import SHELLS, full_parser, recipe_arguments, script
from shardwise.cli.options import COMMANDS, command_parser
from shardwise.errors import ConfigError

RECIPE = """\
def recipe(steps: int = 3, batch_size: int = 4, *, out=None): ...
def other(width=1): ...
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shardwise"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardwise.cli "$@"\n'
    )
    command.chmod(0o755)
    return tmp_path


def in_bash(folder, *words):
    """Return what bash offers for the last of these words."""
    line = shlex.join(words)
    setup = f"""eval "$(shardwise --completion bash)"
COMP_WORDS=({line})
COMP_CWORD={len(words) - 1}
COMP_LINE={shlex.quote(line)}
COMP_POINT={len(line)}
COMP_TYPE=9
_python_argcomplete shardwise shardwise
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p shardwise >/dev/null
"""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-ec", setup],
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
        (["rep"], ["replay", "report"]),
        (["checkpoint", "e"], ["export"]),
        (["checkpoint", "export", "--tr"], ["--trained-only"]),
        (["doctor", "--t"], ["--timeout"]),
        (["train", "ti"], ["tiny.py"]),
        (["train", "tiny.py", "--ba"], ["--batch-size"]),
        (["train", "tiny.py:other", "--w"], ["--watchdog", "--width"]),
        (["sweep", "tiny.py", "--steps", "3", "--ret"], ["--retry"]),
        (["train", "tiny.py", "--track", "w"], ["wandb"]),
        (["--completion", "f"], ["fish"]),
        (["sample", "--prompt", "b"], ["bin/"]),
    ],
)
def test_bash_completes(folder, words, offered):
    assert in_bash(folder, "shardwise", *words) == offered


def test_every_option_of_every_command_is_offered():
    parser = full_parser([])
    commands = next(
        action for action in parser._actions if action.dest == "command_name"
    )
    assert set(commands.choices) == {command.name for command in COMMANDS}
    for name, inner in commands.choices.items():
        offered = {
            option for action in inner._actions for option in action.option_strings
        }
        own = command_parser(name)._actions
        assert {option for action in own for option in action.option_strings} <= offered
        assert {"--json", "--cpu-devices"} <= offered


def test_a_recipe_is_parsed_and_not_executed(tmp_path):
    path = tmp_path / "evil.py"
    path.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef recipe(lr: float = 1.0): ...\n"
    )
    assert recipe_arguments(str(path)) == ["--lr"]
    assert not (tmp_path / "ran").exists()
    path.write_text("def recipe(:")
    assert recipe_arguments(str(path)) == recipe_arguments("nowhere.py") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell):
    assert "shardwise" in script(shell)


def test_an_unknown_shell_is_refused():
    with pytest.raises(ConfigError, match="the shells are bash, zsh, fish, tcsh"):
        script("elvish")
