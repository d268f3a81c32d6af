"""The examples do what they say: their figures, not only their exit, are checked."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == [
        "data_parallel_by_hand",
        "digits",
        "optuna_sweep",
        "own_loop",
        "sharded_model",
    ]


@pytest.mark.slow
def test_digits_on_copies_and_on_pieces():
    digits = load("digits")
    copies, pieces = digits.main("data=8"), digits.main("fsdp=8")
    assert copies["accuracy"] > 0.97
    assert pieces["accuracy"] > 0.97
    assert copies["loss"] == pytest.approx(
        pieces["loss"], abs=0.01
    )  # a mesh does not change what is learnt


def test_own_loop_started_by_a_user_from_anywhere_stops_early_and_keeps_the_best(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "{'fsdp': 8}" in printed  # it has given itself eight devices
    assert "FSDP" in printed
    assert "step   10: loss" in printed
    stopped, best, of_module = re.search(
        r"stopped after step (\d+); the best was step (\d+): .*accuracy ([\d.]+)%", printed
    ).groups()
    assert int(stopped) == int(best) + 50  # five evaluations without a better one
    assert int(stopped) < 2000
    accuracy = float(re.search(rf"^step +{best}: .*accuracy ([\d.]+)%", printed, re.MULTILINE)[1])
    assert accuracy > 80
    assert float(of_module) == pytest.approx(accuracy, abs=0.1)  # the best, not the last
    assert not list(tmp_path.iterdir())


def test_sharded_model_equals_one_device():
    figures = load("sharded_model").main()
    assert (
        0.5 <= figures["share_of_state"] < 0.51
    )  # cut in two over "model"; small biases stay whole
    assert figures["sums_in_forward"] == 1
    assert figures["loss"] < 0.01
    assert figures["max_loss_difference"] < 1e-5
    assert figures["max_param_difference"] < 1e-4
    assert figures["max_logit_difference"] < 1e-3


def test_data_parallel_by_hand_right_and_wrong():
    figures = load("data_parallel_by_hand").main()
    ways = {name: value for name, value in figures.items() if isinstance(value, tuple)}
    right = {name: value for name, value in ways.items() if not name.startswith("WRONG")}
    assert len(right) == 6
    for name, (length, deviation) in right.items():
        assert length == pytest.approx(1, abs=1e-5), name
        assert deviation < 1e-6, name

    assert ways["WRONG: shard_map, pmean(gradients)"][0] == pytest.approx(8, abs=1e-4)
    assert ways["WRONG: loop over shards, sum of gradients"][0] == pytest.approx(8, abs=1e-4)
    assert 4 < ways["WRONG: loop over shards, an update for each"][0] < 8
    assert ways["WRONG: jax.jit of NNX objects"][0] == 0
    # By how much these two are off depends on the rows.
    assert ways["WRONG: shard_map unchecked, gradient of pmean(loss)"][1] > 1e-3
    assert ways["WRONG: mean of means"][1] > 1e-3
    assert len(ways) - len(right) == 6

    assert figures["no wrt"].startswith("TypeError: Missing required argument `wrt`")
    assert figures["60 examples over 8 devices"].startswith(
        "ValueError: shard_map applied to the function 'step'"
    )
    assert "not evenly divisible" in figures["60 examples over 8 devices"]


@pytest.mark.slow
def test_optuna_searches_prunes_and_goes_on(tmp_path):
    optuna = load("optuna_sweep")
    storage = f"sqlite:///{tmp_path / 'digits.db'}"
    study = optuna.main(5, storage)
    assert len(study.trials) == 5
    study = optuna.main(4, storage)  # the study is in the file
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 9
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert study.best_value < 0.6
    assert all(trial.intermediate_values for trial in study.trials)
