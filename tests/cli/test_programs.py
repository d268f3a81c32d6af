"""The second start of a run finds its programs compiled, in a folder that nobody else can write to."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(folder, out, *words):
    command = [sys.executable, "-m", "shardwise.cli", "train", ROOT / "recipes/stdlib_gpt.py", "--steps", "2"]
    ended = subprocess.run(
        [*map(str, command), "--out", str(folder / out), *words],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr, json.loads((folder / out / "starting.jsonl").read_text())


def test_a_second_start_compiles_nothing(tmp_path):
    said, first = train(tmp_path, "first")
    programs = tmp_path / "cache" / "shardwise" / "programs"
    assert stat.S_IMODE(programs.stat().st_mode) == 0o700
    steps = sorted(programs.glob("jit_step-*-cache"))
    assert len(steps) == 2  # of training and of evaluation
    assert "to the end of the first step (importing" in said
    _, second = train(tmp_path, "second")
    assert sorted(programs.glob("jit_step-*-cache")) == steps
    assert second["seconds"]["compiling the step"] < first["seconds"]["compiling the step"] / 2
    assert set(second["seconds"]) >= {"importing", "preparing", "compiling the step", "loading the state", "first step"}
    assert second["total"] == pytest.approx(sum(second["seconds"].values()))


def test_programs_that_others_could_have_written_are_not_run(tmp_path):
    programs = tmp_path / "cache" / "shardwise" / "programs"
    programs.mkdir(parents=True)
    programs.chmod(0o777)
    said, _ = train(tmp_path, "run")
    assert f"{programs} may be written by others" in said
    assert not list(programs.iterdir())
