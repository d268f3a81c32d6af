"""The page on checkpoints tells the truth: its code and its commands run, in order, and do what is shown."""

import re
from pathlib import Path

import pytest
from blake3 import blake3

from shardwise.checkpoint import Keep
from shardwise.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    names = {}
    for block in BLOCK.finditer(text):
        before = text.count("\n", 0, block.start(2))  # so that an error shows the line of the page
        if block[1] == "python":
            exec(compile("\n" * before + block[2], PAGE, "exec"), names)  # noqa: S102
            assert capsys.readouterr().out.split() == (block[3] or "").split(), f"line {before}"
        else:
            for line in block[2].splitlines():
                command, _, comment = line.partition("#")
                expected = re.match(r" exit code (\d)", comment)
                assert main(command.split()[2:]) == int(expected[1] if expected else 0), command
            capsys.readouterr()
    assert Path("a.safetensors").stat().st_size > 1000
    for line in Path("runs/a/checkpoints/50/MANIFEST").read_text().splitlines():  # as `b3sum --check` does
        digest, name = re.fullmatch(r"([0-9a-f]{64})  (.+)", line).groups()
        assert blake3(Path("runs/a/checkpoints/50", name).read_bytes()).hexdigest() == digest


def test_the_page_shows_what_is_kept_by_default():
    shown = re.search(r"`(Keep\(.*?\))`", PAGE.read_text())[1]
    assert eval(shown, {"Keep": Keep}) == Keep()  # noqa: S307
    assert all(f"{name}=" in shown for name in Keep.__dataclass_fields__)


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 7, 75])
def test_the_page_has_every_exit_code(kind):
    assert f"| {kind} |" in PAGE.read_text()
