"""Replays agree with the run that recorded the steps, and name the first difference."""

import io
import json
import shutil
import time
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from shardwise import Batches, Keep, Run, fit, replay
from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.step.digests import tree_digests
from shardwise.training import audit, session
from tests.unit.training.test_audit import DATA, Net, Transient, flip_weight, loss

RECIPE = """
import optax
from pathlib import Path
from shardwise import Batches, Run
from tests.unit.training.test_audit import DATA, Net, loss

def recipe(steps: int = 12, lr: float = 1e-2, fast: bool = False, out: Path | None = None):
    return Run(model=Net, loss=loss, optimizer=optax.adamw(lr), data=Batches(DATA, 32),
               steps=steps, save_every=4, digest_every=2, mesh="data=2,fsdp=4", out=out)
"""


def run_of(out, **changes):
    settings = {
        "model": Net,
        "loss": loss,
        "optimizer": optax.adamw(1e-2),
        "data": Batches(DATA, 32),
        "steps": 12,
        "mesh": "data=2,fsdp=4",
        "save_every": 4,
        "digest_every": 2,
        "out": out,
    }
    return Run(**{**settings, **changes})


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoints 4, 8 and 12."""
    out = tmp_path_factory.mktemp("replay") / "run"
    fit(run_of(out), console=quiet())
    return out


def rewrite(path, change):
    """Change the records of a log."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(x)) + "\n" for x in records))


def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def test_digests_are_in_the_log(finished):
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    digests = {x["step"]: x["digest"] for x in map(json.loads, lines) if "digest" in x}
    assert list(digests) == [2, 4, 6, 8, 10, 12]
    assert len(set(digests.values())) == 6


def test_compiling_the_digests_is_not_step_time(tmp_path, monkeypatch):
    """The first digests are compiled after step 2. No step takes that long in the log."""

    def slow_digests(state):
        if int(state.step) == 2:
            time.sleep(1.5)
        return tree_digests(state)

    monkeypatch.setattr(session, "tree_digests", slow_digests)
    result = fit(run_of(tmp_path / "run", steps=4), console=quiet())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = {x["step"]: x["step_s"] for x in map(json.loads, lines)}
    assert all(seconds[n] < 1.4 for n in (2, 3, 4)), seconds
    assert result.seconds["compile"] > 1.5


@pytest.mark.parametrize(
    ("first", "last", "start"), [(1, 12, 0), (5, 8, 4), (6, 6, 4), (9, 12, 8)]
)
def test_a_replay_is_equal_bit_for_bit(finished, first, last, start):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    result = replay(run_of(finished), first, last, console=quiet())
    assert result.exact
    assert result.first_difference is None, result.text()
    assert result.start == start
    assert [step.step for step in result.steps] == list(range(first, last + 1))
    assert result.num_digests == len([n for n in range(first, last + 1) if n % 2 == 0])
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert after == before


def test_another_mesh_is_equal_up_to_rounding(finished):
    run = run_of(finished, mesh="data=8")
    result = replay(run, 5, 12, console=quiet())
    assert not result.exact
    assert result.first_difference is None
    assert result.changed == ("mesh",)
    assert "mesh differ: losses within 0.1%" in result.text()


def test_a_wrong_loss_is_found(finished, tmp_path):
    out = copied(finished, tmp_path)

    def change(record):
        if record["step"] == 7:
            record["loss"] = float(np.nextafter(np.float32(record["loss"]), 9))
        return record

    rewrite(out / "metrics.jsonl", change)
    result = replay(run_of(out), 5, 10, console=quiet())
    assert result.first_difference.step == 7
    assert "step 7 is the first that differs" in result.text()


def test_a_bit_of_the_state_that_changed_is_found_with_its_array(tmp_path, monkeypatch):
    """A bit of a moment changes after step 6: only the digest shows it."""
    transient = Transient(at=6)
    audited = audit.Auditor.audited

    def broken(self, step):
        def flip(state):
            return flip_weight(state, "nu['first']['bias']", *jax.devices())

        return audited(self, replace(step, function=transient.wrap(step, flip)))

    monkeypatch.setattr(audit.Auditor, "audited", broken)
    run = run_of(tmp_path / "run", keep=Keep(last=9))
    fit(run, console=quiet())
    monkeypatch.undo()
    result = replay(run, 5, 8, console=quiet())
    found = result.first_difference
    assert found.step == 6
    assert found.recorded == found.computed
    assert [name for name in found.arrays if name.endswith("nu/first/bias")]
    assert len(found.arrays) == 1
    # A replay from the checkpoint of step 8, which has the wrong bit, agrees.
    assert replay(run, 9, 12, console=quiet()).first_difference is None


def test_a_damaged_checkpoint_is_skipped(finished, tmp_path):
    out = copied(finished, tmp_path)
    (out / "checkpoints" / "8" / "meta.json").write_text("{}")
    result = replay(run_of(out), 9, 12, console=quiet())
    assert result.start == 4
    assert result.first_difference is None


def test_what_cannot_be_replayed_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match="steps 1 to 12, and not all of 10 to 13"):
        replay(run_of(finished), 10, 13)
    with pytest.raises(ConfigError, match="is not a run directory"):
        replay(run_of(tmp_path), 1, 2)
    with pytest.raises(ConfigError, match=r"set Run\.out"):
        replay(run_of(None), 1, 2)
    with pytest.raises(ConfigError, match="seed"):
        replay(run_of(finished, seed=1), 5, 6)
    with pytest.raises(ConfigError, match="not a range"):
        replay(run_of(finished), 6, 5)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(RECIPE)
    out = ["--out", "a", "--lr", "0.02"]
    assert main(["train", "own.py", *out]) == 0
    capsys.readouterr()
    # The directory does not decide what is executed.
    assert main(["replay", "a", "--steps", "5:8"]) == 2
    error = capsys.readouterr().err
    assert "shardwise replay a --steps 5:8 --recipe" in error
    assert "own.py:recipe" in error
    command = ["replay", "a", "--steps", "5:8", "--recipe", "own.py"]
    assert main([*command, "--json", "answer.json"]) == 0
    shown = capsys.readouterr().out
    assert "equal: 4 steps and 2 states" in shown
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["exact"]
    assert answer["first_difference"] is None

    def change(record):
        return record | ({"digest": "0" * 16} if record["step"] == 6 else {})

    rewrite(tmp_path / "a" / "metrics.jsonl", change)
    assert main(command) == 5
    assert "step 6 is the first that differs" in capsys.readouterr().out
    assert main(["replay", "a", "--steps", "x", "--recipe", "own.py"]) == 2
