"""Weights leave as safetensors with nothing lost, as GPT-2 under the names of transformers, and come back to the bit."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from shardwise import (
    Checkpoints,
    InitFrom,
    Rules,
    TrainState,
    abstract_state,
    init_state,
    load_initial,
    make_mesh,
    optim,
)
from shardwise.checkpoint.reader import open_step
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.gpt import GPT, PRESETS, GPTConfig
from shardwise.module import describe_model
from shardwise.optim.parts import evaluation_params
from shardwise.tree import named_leaves
from shardwise.weights.export import export_hf, export_plain, write_safetensors
from shardwise.weights.hf import kind_of, params_from_hf
from shardwise.weights.hf_config import config_from_hf, config_from_shapes, config_to_hf

FIXTURE = np.load(Path(__file__).parents[2] / "fixtures" / "gpt2_tiny.npz")
WEIGHTS = {
    name.removeprefix("weights/"): FIXTURE[name]
    for name in FIXTURE.files
    if name.startswith("weights/")
}
CONFIG = config_from_hf(json.loads(FIXTURE["config"].tobytes()))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs, param_dtype=jnp.bfloat16)]
        )
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.scalar = nnx.Param(jnp.float32(3))
        self.count = nnx.BatchStat(jnp.arange(3))


def save(directory, state, metadata=None):
    directory.mkdir(parents=True, exist_ok=True)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, metadata or {})
    return directory / str(int(state.step))


def gpt_state(spec, params):
    """A state with these parameters."""
    state = TrainState(jnp.int32(3), params, {}, spec.optimizer.init(params))
    return jax.device_put(state, spec.shardings)


def gpt_spec(config, mesh="data=2,fsdp=4", optimizer=None):
    return abstract_state(
        lambda rngs: GPT(config, rngs),
        optimizer or optax.sgd(0.1),
        make_mesh(mesh),
        Rules(fsdp_min_size=64),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["layers", "stacked"])
def gpt2(request, tmp_path_factory):
    """The model of the fixture, as a checkpoint written by eight devices: (directory of the step, configuration)."""
    config = dataclasses.replace(CONFIG, scan_layers=request.param, dropout=0.1)
    spec = gpt_spec(config)
    metadata = {"model": describe_model(spec.module(spec.abstract))}
    return save(
        tmp_path_factory.mktemp("gpt2") / "checkpoints",
        gpt_state(spec, params_from_hf(WEIGHTS, config)),
        metadata,
    ), config


def test_names_shapes_and_values_are_those_of_transformers(gpt2, tmp_path):
    step, config = gpt2
    export_hf(open_step(step), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, WEIGHTS[name]), name
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config_from_hf(described) == CONFIG
    assert described["resid_pdrop"] == config.dropout
    theirs = json.loads(FIXTURE["config"].tobytes())
    assert [
        n
        for n in described
        if described[n] != theirs[n] and not n.endswith(("_pdrop", "_token_id", "architectures"))
    ] == []
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"  # without it, transformers refuses the file
    assert metadata["step"] == "3"
    assert metadata["checkpoint_digest"] == open_step(step).digest


def test_what_was_exported_comes_back_to_the_bit_with_the_same_logits(gpt2, tmp_path):
    step, config = gpt2
    export_hf(open_step(step), tmp_path / "out")
    other = dataclasses.replace(config, scan_layers=not config.scan_layers, dropout=0.0)
    spec = gpt_spec(other, "data=4,fsdp=2")
    state, loaded = load_initial(InitFrom(tmp_path / "out"), spec, seed=0)
    assert loaded.fresh == loaded.left_out == ()
    back, want = named_leaves(state.params), named_leaves(params_from_hf(WEIGHTS, other))
    assert all(np.array_equal(back[name], want[name]) for name in want)
    logits = jax.jit(lambda state, tokens: spec.module(state)(tokens))(state, FIXTURE["tokens"])
    np.testing.assert_allclose(logits, FIXTURE["logits"], atol=1e-5)


def test_rows_that_only_round_the_vocabulary_up_can_be_left_out(gpt2, tmp_path):
    saved = open_step(gpt2[0])
    export_hf(saved, tmp_path / "out", vocab_size=90)
    assert load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"].shape == (
        90,
        32,
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 90
    with pytest.raises(CheckpointError, match="vocab_size is 98; the model has 97 rows"):
        export_hf(saved, tmp_path / "more", vocab_size=98)
    with pytest.raises(ConfigError, match="is there already"):
        export_hf(saved, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "optimizer",
    [optim.adamw(1e-3, ema=0.9), optim.schedule_free(1e-3, b1=0.8)],
    ids=["ema", "schedule_free"],
)
def test_averages_and_every_kind_of_variable_in_a_plain_file(tmp_path, optimizer):
    spec = abstract_state(Net, optimizer, make_mesh("fsdp=8"), Rules(fsdp_min_size=16))
    state = init_state(spec, 0)
    leaves, structure = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    noisy = [
        leaf if leaf.dtype == np.int32 else jnp.asarray(rng.uniform(0.1, 1, leaf.shape), leaf.dtype)
        for leaf in leaves
    ]
    state = jax.device_put(jax.tree.unflatten(structure, noisy), spec.shardings)
    saved = open_step(save(tmp_path / "checkpoints", state))
    names = export_plain(saved, tmp_path / "plain.safetensors")
    export_plain(saved, tmp_path / "average.safetensors", average=True)
    want = named_leaves(
        {
            **state.params,
            "norm": {**state.params["norm"], **state.other["norm"]},
            "count": state.other["count"],
        }
    )
    plain, average = (
        load_file(tmp_path / "plain.safetensors"),
        load_file(tmp_path / "average.safetensors"),
    )
    assert sorted(names) == sorted(plain) == sorted(name.replace("/", ".") for name in want)
    for name, leaf in want.items():
        got = plain[name.replace("/", ".")]
        assert (got.dtype, got.shape, got.tobytes()) == (
            leaf.dtype,
            leaf.shape,
            np.asarray(leaf).tobytes(),
        ), name
    averaged = {
        name.replace("/", "."): leaf
        for name, leaf in named_leaves(evaluation_params(state.opt_state, state.params)).items()
    }
    for name, leaf in averaged.items():
        assert average[name].dtype == leaf.dtype
        np.testing.assert_allclose(
            average[name].astype("f4"),
            np.asarray(leaf, "f4"),
            rtol=1e-6 if leaf.dtype == np.float32 else 1e-2,
        )
    assert np.array_equal(average["norm.mean"], plain["norm.mean"])
    with safe_open(tmp_path / "average.safetensors", framework="np") as file:
        assert file.metadata()["average"] == "true"
    back, _ = load_initial(InitFrom(tmp_path / "plain.safetensors"), spec, seed=1)
    for name, leaf in named_leaves((state.params, state.other)).items():
        assert np.array_equal(
            np.asarray(leaf), np.asarray(named_leaves((back.params, back.other))[name])
        ), name


def test_what_is_no_gpt_or_keeps_no_average_is_refused(tmp_path):
    spec = abstract_state(Net, optax.sgd(0.1), make_mesh("data=8"))
    saved = open_step(save(tmp_path / "checkpoints", init_state(spec, 0)))
    with pytest.raises(
        CheckpointError,
        match="cannot be written for transformers: these 10 parameters are neither those of GPT",
    ):
        export_hf(saved, tmp_path / "out")
    with pytest.raises(CheckpointError, match="keeps no average"):
        export_plain(saved, tmp_path / "out", average=True)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("preset", ["byte", "gpt2"])
def test_the_configuration_is_in_the_shapes_and_in_config_json(preset, scan_layers):
    config = dataclasses.replace(PRESETS[preset], scan_layers=scan_layers)
    shapes = {
        name: leaf.shape
        for name, leaf in named_leaves(gpt_spec(config, "data=8").abstract.params).items()
    }
    assert config_from_shapes(shapes) == config
    assert config_from_hf(config_to_hf(config)) == dataclasses.replace(config, scan_layers=False)
    with pytest.raises(ValueError, match="neither those of GPT"):
        config_from_shapes({**shapes, "tokens": (0, config.width)})


def test_gpt2_is_known_by_its_names():
    assert (
        kind_of(WEIGHTS)
        is kind_of(name.removeprefix("transformer.") for name in WEIGHTS)
        is GPTConfig
    )
    assert kind_of(["tokens", "positions", "wte.weight"]) is None


def test_a_model_describes_itself():
    spec = gpt_spec(CONFIG, "data=8")
    assert describe_model(spec.module(spec.abstract)) == {
        "class": "GPT",
        "config": dataclasses.asdict(CONFIG),
    }
    assert describe_model(Net(nnx.Rngs(0))) == {"class": "Net"}


def test_a_file_is_whole_or_not_there(tmp_path):
    array = np.ones((3, 5), np.float16)
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(tmp_path / "a", {"x": array}, [array, array], {})
    assert list(tmp_path.iterdir()) == []
    arrays = {"x": array, "empty": np.zeros((0, 2), np.int8), "scalar": np.array(True)}
    write_safetensors(tmp_path / "a", arrays, arrays.values(), {"k": "v"})
    back = load_file(tmp_path / "a")
    assert all(
        np.array_equal(back[name], value) and back[name].dtype == value.dtype
        for name, value in arrays.items()
    )


@pytest.mark.slow
@pytest.mark.skipif(
    "TRANSFORMERS_PYTHON" not in os.environ,
    reason="TRANSFORMERS_PYTHON names no interpreter with torch and transformers",
)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_real_transformers_loads_what_is_exported_and_writes_what_is_loaded(model, seed):
    script = Path(__file__).parents[2] / "fixtures" / "check_export_with_transformers.py"
    command = [
        os.environ["TRANSFORMERS_PYTHON"],
        script,
        "--shardwise-python",
        sys.executable,
        "--model",
        model,
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the greedy text is the same" in done.stdout
