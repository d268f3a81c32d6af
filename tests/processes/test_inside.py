"""All processes decide alike, from evaluations, when to stop and which step to keep."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import run

RECIPE = Path(__file__).parent / "stuck.py"


def train(out, *args):
    """Run two processes on this machine; return what they print."""
    done = run(
        "launch",
        "--processes",
        2,
        "--",
        "train",
        RECIPE,
        "--out",
        out,
        "--cpu-devices",
        1,
        *args,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_two_processes_stop_early_together_and_stay_stopped_when_resumed(tmp_path):
    out = tmp_path / "a"
    assert "stopped early after step 6: eval_loss has not improved on" in train(out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["2", "6"]
    samples = [
        json.loads(line)["step"]
        for line in (out / "samples.jsonl").read_text().splitlines()
    ]
    assert samples == [2, 4, 6]
    assert "nothing to do" in train(out)
    assert "stopped early after step 10" in train(out, "--patience", "4")
    assert [
        json.loads(line)["step"]
        for line in (out / "phases.jsonl").read_text().splitlines()
    ] == [6, 10]


@pytest.mark.slow
def test_two_processes_are_audited_and_replayed_by_one(tmp_path):
    out = tmp_path / "a"
    train(out, "--audit-every", "2", "--patience", "4")
    seconds = json.loads((out / "phases.jsonl").read_text().splitlines()[-1])["seconds"]
    assert seconds["audit"] > 0
    done = run("replay", out, "--steps", "3:10", "--recipe", RECIPE, "--cpu-devices", 2)
    assert done.returncode == 0, done.stderr
    # One process with two devices may add gradients in another order.
    assert "devices/processes differ" in done.stdout, done.stdout
    assert "equal: 8 steps" in done.stdout, done.stdout
