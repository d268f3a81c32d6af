"""Tests of the examples: their results, not only that they run."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import abstract_state

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == [
        "data_parallel_by_hand",
        "optuna_sweep",
        "own_loop",
        # tests/contract/test_known_results.py
        "pictures",
        "sharded_model",
        "transformer_block",
    ]


@pytest.mark.slow
def test_own_loop_started_in_another_directory_stops_early_and_keeps_the_best(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_loop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    # The example creates eight virtual devices.
    assert "{'fsdp': 8}" in printed
    assert "FSDP" in printed
    assert "step   10: loss" in printed
    stopped, best, of_module = re.search(
        r"stopped after step (\d+); the best was step (\d+): .*accuracy ([\d.]+)%",
        printed,
    ).groups()
    # Five evaluations without improvement.
    assert int(stopped) == int(best) + 50
    assert int(stopped) < 2000
    accuracy = float(
        re.search(rf"^step +{best}: .*accuracy ([\d.]+)%", printed, re.MULTILINE)[1]
    )
    assert accuracy > 80
    # The parameters of the best step, not of the last one.
    assert float(of_module) == pytest.approx(accuracy, abs=0.1)
    assert not list(tmp_path.iterdir())


def test_sharded_model_equals_one_device():
    figures = load("sharded_model").main()
    # Sharded over two devices of "model"; small biases are replicated.
    assert 0.5 <= figures["share_of_state"] < 0.51
    assert figures["sums_in_forward"] == 1
    assert figures["loss"] < 0.01
    assert figures["max_loss_difference"] < 1e-5
    assert figures["max_param_difference"] < 1e-4
    assert figures["max_logit_difference"] < 1e-3


@pytest.mark.slow
def test_data_parallel_by_hand_correct_and_wrong():
    figures = load("data_parallel_by_hand").main()
    ways = {name: value for name, value in figures.items() if isinstance(value, tuple)}
    correct = {
        name: value for name, value in ways.items() if not name.startswith("WRONG")
    }
    assert len(correct) == 7
    for name, (length, deviation) in correct.items():
        assert length == pytest.approx(1, abs=1e-5), name
        assert deviation < 1e-6, name

    assert ways["WRONG: shard_map, pmean(gradients)"][0] == pytest.approx(8, abs=1e-4)
    assert ways["WRONG: loop over shards, sum of gradients"][0] == pytest.approx(
        8, abs=1e-4
    )
    assert 4 < ways["WRONG: loop over shards, an update for each"][0] < 8
    assert ways["WRONG: jax.jit of NNX objects"][0] == 0
    # The errors of these two depend on the examples.
    assert ways["WRONG: shard_map unchecked, gradient of pmean(loss)"][1] > 1e-3
    assert ways["WRONG: mean of means"][1] > 1e-3
    # A new optimizer in each step loses the momentum, and nothing else.
    rebuilt = ways["WRONG: a new optimizer in each step"]
    assert rebuilt == ways["WRONG: no momentum (the same as a new optimizer)"]
    assert 0.2 < rebuilt[0] < 0.4
    assert len(ways) - len(correct) == 8

    assert figures["no wrt"].startswith("TypeError: Missing required argument `wrt`")
    assert figures["60 examples over 8 devices"].startswith(
        "ValueError: shard_map applied to the function 'step'"
    )
    assert "not evenly divisible" in figures["60 examples over 8 devices"]


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 8), (8, 1)])
def test_both_layouts_of_the_transformer_block_fit_the_meshes(shape):
    example = load("transformer_block")
    mesh = example.device_mesh(*shape)
    specs = {}
    for layout in ("first-dim", "pairs"):
        run = example.recipe(layout=layout)
        params = abstract_state(run.model, run.optimizer, mesh).params
        specs[layout] = {
            path: tuple(placement.spec) for path, placement in params.items()
        }
    # Only the first dim of every array of the block, and nothing else.
    for path, spec in specs["first-dim"].items():
        assert spec[:1] == (("model",) if path.startswith("block/") else ()), path
        assert not any(spec[1:]), path
    pairs = specs["pairs"]
    assert pairs["block/attention/query/kernel"] == (None, "model", None)
    assert pairs["block/attention/out/kernel"] == ("model", None, None)
    assert pairs["block/linear1/kernel"] == (None, "model")
    assert pairs["block/linear2/kernel"] == ("model", None)
    assert not any(pairs["block/layer_norm1/scale"])


@pytest.mark.slow
def test_the_transformer_block_trains_alike_on_all_meshes_and_pairs_send_less():
    figures = load("transformer_block").main()
    assert figures["loss"] < 4.5
    assert figures["max_loss_difference"] < 1e-5
    # An all-reduce after the attention and one after the MLP, forward and backward, and two more.
    assert figures["pairs_count"] <= 6
    assert figures["first-dim_count"] >= 3 * figures["pairs_count"]
    assert figures["first-dim_bytes"] > 3 * figures["pairs_bytes"]


@pytest.mark.parametrize("num_devices", [1, 2, 4.0, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (1, 1)])
def test_data_parallel_step_equals_one_device(num_devices, inputs, outputs):
    example = load("data_parallel_by_hand")
    random = np.random.default_rng(inputs)
    x = random.normal(size=(16, inputs)).astype("float32")
    y = random.normal(size=(16, outputs)).astype("float32")
    found = example.data_parallel_step(3.0, x, y, num_devices, 0.1)
    model = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(3))
    kernel, bias = np.asarray(model.kernel[...]), np.asarray(model.bias[...])
    error = x @ kernel + bias - y
    assert found.shape == (1,)
    assert found[0] == pytest.approx(np.mean(error**2), rel=1e-5)

    # The update inside is that of one device too, computed here without JAX.
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    shards = example.equal_shards(x, y, int(num_devices))
    assert len(shards) == num_devices
    loss = example.step_over_shards(model, optimizer, shards, example.mean)
    assert float(loss) == found[0]
    gradient = 2 * x.T @ error / error.size
    np.testing.assert_allclose(model.kernel[...], kernel - 0.1 * gradient, atol=1e-6)
    gradient = 2 * error.sum(0) / error.size
    np.testing.assert_allclose(model.bias[...], bias - 0.1 * gradient, atol=1e-6)


def test_data_parallel_step_refuses_a_remainder():
    step = load("data_parallel_by_hand").data_parallel_step
    with pytest.raises(ValueError, match="60 examples is not divisible by 8 devices"):
        step(0, np.ones((60, 2)), np.ones((60, 1)), 8, 0.1)


@pytest.mark.slow
def test_optuna_searches_prunes_and_resumes(tmp_path):
    optuna = load("optuna_sweep")
    storage = f"sqlite:///{tmp_path / 'digits.db'}"
    study = optuna.main(5, storage)
    assert len(study.trials) == 5
    # The study continues from the file.
    study = optuna.main(4, storage)
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 9
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert study.best_value < 0.6
    assert all(trial.intermediate_values for trial in study.trials)
