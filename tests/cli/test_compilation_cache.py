"""A second start reuses compiled programs from a folder that only the user can write to."""

import json
import os
import stat
from pathlib import Path

import jax
import pytest

from shardwise import runtime as programs_module
from shardwise.files.cache import make_private
from shardwise.plan.compile import plan_cache
from shardwise.runtime import use_compilation_cache
from tests.helpers.command import run

ROOT = Path(__file__).parents[2]


def train(folder, out, *words):
    recipe = ROOT / "tests/faults/recipe.py"
    ended = run(
        "train",
        recipe,
        "--steps",
        2,
        "--cpu-devices",
        1,
        "--out",
        folder / out,
        *words,
        XDG_CACHE_HOME=str(folder / "cache"),
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr, json.loads((folder / out / "starting.jsonl").read_text())


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    said, first = train(tmp_path, "first")
    programs = tmp_path / "cache" / "shardwise" / "programs"
    assert stat.S_IMODE(programs.stat().st_mode) == 0o700
    steps = sorted(programs.glob("jit_step-*-cache"))
    assert len(steps) == 2  # of training and of evaluation
    assert "to the end of the first step (importing" in said
    _, second = train(tmp_path, "second")
    assert sorted(programs.glob("jit_step-*-cache")) == steps
    assert (
        second["seconds"]["compiling the step"]
        < first["seconds"]["compiling the step"] / 2
    )
    assert set(second["seconds"]) >= {
        "importing",
        "preparing",
        "compiling the step",
        "loading the state",
        "first step",
    }
    assert second["total"] == pytest.approx(sum(second["seconds"].values()))


def test_programs_that_others_could_have_written_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    programs = tmp_path / "shardwise" / "programs"
    programs.mkdir(parents=True)
    programs.chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() == (
        f"{programs} is writable by other users, so compiled programs are not read "
        "from it; run chmod 700 on it, or remove it"
    )
    assert jax.config.jax_compilation_cache_dir is None


def test_only_the_user_can_write_to_the_folders_whatever_the_umask(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    before = os.umask(0)
    try:
        assert use_compilation_cache() is None
        plans = plan_cache()
        make_private(plans)
    finally:
        os.umask(before)
    for folder in (plans, *plans.parents[:3], plans.parent / "programs"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    # Earlier releases left this one open.
    plans.parent.chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() is None
    assert stat.S_IMODE(plans.parent.stat().st_mode) == 0o700


def test_what_was_not_used_for_longest_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(programs_module, "MAX_CACHE_BYTES", 250)
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9))
    programs_module._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
