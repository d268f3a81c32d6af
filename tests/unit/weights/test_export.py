"""Exports lose nothing, use the names of transformers, and load again bit for bit."""

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
from shardwise.weights.families import FAMILIES, family_of, family_of_tensors
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, config_from_shapes, config_to_hf

FIXTURE = np.load(Path(__file__).parents[2] / "fixtures" / "gpt2_tiny.npz")
WEIGHTS = {
    name.removeprefix("weights/"): FIXTURE[name]
    for name in FIXTURE.files
    if name.startswith("weights/")
}
CONFIG = config_from_hf(json.loads(FIXTURE["config"].tobytes()))


class Net(nnx.Module):
    """Parameters of two dtypes, a scalar, and statistics."""

    def __init__(self, rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(4, 8, rngs=rngs),
                nnx.Linear(8, 8, rngs=rngs, param_dtype=jnp.bfloat16),
            ]
        )
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.scalar = nnx.Param(jnp.float32(3))
        self.count = nnx.BatchStat(jnp.arange(3))


def save(directory, state, metadata=None):
    directory.mkdir(parents=True, exist_ok=True)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, metadata or {})
    return directory / str(int(state.step))


def gpt_spec(config, mesh="data=2,fsdp=4", optimizer=None):
    return abstract_state(
        lambda rngs: GPT(config, rngs),
        optimizer or optax.sgd(0.1),
        make_mesh(mesh),
        Rules(fsdp_min_size=64),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["unrolled", "scanned"])
def gpt2(request, tmp_path_factory):
    """A checkpoint of the GPT-2 of the fixture from 8 devices: directory and configuration."""
    config = dataclasses.replace(CONFIG, scan_layers=request.param, dropout=0.1)
    spec = gpt_spec(config)
    params = params_from_hf(WEIGHTS, config)
    state = TrainState(jnp.int32(3), params, {}, spec.optimizer.init(params))
    step = save(
        tmp_path_factory.mktemp("gpt2") / "checkpoints",
        jax.device_put(state, spec.shardings),
        {"model": describe_model(spec.module(spec.abstract))},
    )
    return step, config


def test_names_shapes_and_values_are_those_of_transformers(gpt2, tmp_path):
    step, config = gpt2
    export_hf(open_step(step), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, WEIGHTS[name]), name
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config_from_hf(exported) == CONFIG
    assert exported["resid_pdrop"] == config.dropout
    published = json.loads(FIXTURE["config"].tobytes())
    may_differ = ("_pdrop", "_token_id", "architectures")
    changed = [name for name in exported if exported[name] != published[name]]
    assert all(name.endswith(may_differ) for name in changed)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        metadata = file.metadata()
    # transformers refuses a file without this entry.
    assert metadata["format"] == "pt"
    assert metadata["step"] == "3"
    assert metadata["checkpoint_digest"] == open_step(step).digest


def test_an_export_loads_bit_for_bit_and_has_the_same_logits(gpt2, tmp_path):
    step, config = gpt2
    export_hf(open_step(step), tmp_path / "out")
    other = dataclasses.replace(config, scan_layers=not config.scan_layers, dropout=0.0)
    spec = gpt_spec(other, "data=4,fsdp=2")
    state, loaded = load_initial(InitFrom(tmp_path / "out"), spec, seed=0)
    assert loaded.fresh == loaded.left_out == ()
    actual = named_leaves(state.params)
    for name, value in named_leaves(params_from_hf(WEIGHTS, other)).items():
        assert np.array_equal(actual[name], value), name
    logits = jax.jit(lambda state, tokens: spec.module(state)(tokens))(
        state, FIXTURE["tokens"]
    )
    np.testing.assert_allclose(logits, FIXTURE["logits"], atol=1e-5)


def test_tokens_that_round_up_the_vocabulary_can_be_dropped(gpt2, tmp_path):
    saved = open_step(gpt2[0])
    out = tmp_path / "out"
    export_hf(saved, out, vocab_size=90)
    assert load_file(out / "model.safetensors")["transformer.wte.weight"].shape == (
        90,
        32,
    )
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 90
    message = "vocab_size is 98; it must be from 1 to the 97 tokens"
    with pytest.raises(CheckpointError, match=message):
        export_hf(saved, tmp_path / "more", vocab_size=98)
    with pytest.raises(ConfigError, match="already exists"):
        export_hf(saved, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "optimizer",
    [optim.adamw(1e-3, ema=0.9), optim.schedule_free(1e-3, b1=0.8)],
    ids=["ema", "schedule_free"],
)
def test_a_plain_file_has_every_variable_and_averages_on_request(tmp_path, optimizer):
    spec = abstract_state(Net, optimizer, make_mesh("fsdp=8"), Rules(fsdp_min_size=16))
    leaves, structure = jax.tree.flatten(init_state(spec, 0))
    rng = np.random.default_rng(0)
    noisy = [
        leaf
        if leaf.dtype == np.int32
        else jnp.asarray(rng.uniform(0.1, 1, leaf.shape), leaf.dtype)
        for leaf in leaves
    ]
    state = jax.device_put(jax.tree.unflatten(structure, noisy), spec.shardings)
    saved = open_step(save(tmp_path / "checkpoints", state))
    names = export_plain(saved, tmp_path / "plain.safetensors")
    export_plain(saved, tmp_path / "average.safetensors", average=True)
    plain = load_file(tmp_path / "plain.safetensors")
    average = load_file(tmp_path / "average.safetensors")

    expected = tensors_of(state.params) | tensors_of(state.other)
    assert sorted(names) == sorted(plain) == sorted(expected)
    for name, value in expected.items():
        actual = plain[name]
        assert (actual.dtype, actual.shape) == (value.dtype, value.shape), name
        assert actual.tobytes() == value.tobytes(), name
    for name, value in tensors_of(
        evaluation_params(state.opt_state, state.params)
    ).items():
        assert average[name].dtype == value.dtype
        tolerance = 1e-6 if value.dtype == np.float32 else 1e-2
        np.testing.assert_allclose(
            average[name].astype("f4"), value.astype("f4"), rtol=tolerance, err_msg=name
        )
    assert np.array_equal(average["norm.mean"], plain["norm.mean"])
    with safe_open(tmp_path / "average.safetensors", framework="np") as file:
        assert file.metadata()["average"] == "true"

    loaded, _ = load_initial(InitFrom(tmp_path / "plain.safetensors"), spec, seed=1)
    again = tensors_of(loaded.params) | tensors_of(loaded.other)
    for name, value in expected.items():
        assert np.array_equal(again[name], value), name


def tensors_of(tree):
    """Return the leaves of a tree as NumPy arrays, by their names in a safetensors file."""
    return {
        name.replace("/", "."): np.asarray(leaf)
        for name, leaf in named_leaves(tree).items()
    }


def test_unknown_models_and_missing_averages_are_refused(tmp_path):
    spec = abstract_state(Net, optax.sgd(0.1), make_mesh("data=8"))
    saved = open_step(save(tmp_path / "checkpoints", init_state(spec, 0)))
    message = (
        "cannot be written for transformers: these 10 parameters belong to no known"
    )
    with pytest.raises(CheckpointError, match=message):
        export_hf(saved, tmp_path / "out")
    with pytest.raises(CheckpointError, match="keeps no average"):
        export_plain(saved, tmp_path / "out", average=True)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("preset", ["byte", "gpt2"])
def test_the_configuration_follows_from_shapes_and_from_config_json(
    preset, scan_layers
):
    config = dataclasses.replace(PRESETS[preset], scan_layers=scan_layers)
    leaves = named_leaves(gpt_spec(config, "data=8").abstract.params)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    assert config_from_shapes(shapes) == config
    assert config_from_hf(config_to_hf(config)) == dataclasses.replace(
        config, scan_layers=False
    )
    with pytest.raises(ValueError, match="belong to no known model family"):
        config_from_shapes({**shapes, "tokens": (0, config.width)})


@pytest.mark.parametrize(
    "described", [7, -0.5, "0.1", True, float("inf"), float("nan"), None]
)
def test_invalid_values_in_the_description_of_a_model_are_ignored(described):
    leaves = named_leaves(gpt_spec(CONFIG, "data=8").abstract.params)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    metadata = {"class": "GPT", "config": {"dropout": described, "num_heads": 3}}
    expected = 7.0 if described == 7 else 0.0
    assert config_from_shapes(shapes, metadata) == dataclasses.replace(
        CONFIG, dropout=expected
    )
    for other in ({**metadata, "class": "Llama"}, {"class": "GPT", "config": 3}, 5):
        assert config_from_shapes(shapes, other) == CONFIG


def test_gpt2_is_recognized_by_its_tensor_names():
    without_prefix = [name.removeprefix("transformer.") for name in WEIGHTS]
    for names in (WEIGHTS, without_prefix):
        assert family_of_tensors(names).config_class is GPTConfig
    assert family_of_tensors(["tokens", "positions", "wte.weight"]) is None


def test_every_family_recognizes_its_own_tensors_and_no_others():
    for family in FAMILIES:
        names = [family.prefix + name for name in (family.embedding, family.marker)]
        assert [other for other in FAMILIES if other.owns(names)] == [family]
    with pytest.raises(TypeError, match="a dict belongs to no model family"):
        family_of({})


def test_a_model_describes_itself():
    spec = gpt_spec(CONFIG, "data=8")
    assert describe_model(spec.module(spec.abstract)) == {
        "class": "GPT",
        "config": dataclasses.asdict(CONFIG),
    }
    assert describe_model(Net(nnx.Rngs(0))) == {"class": "Net"}


def test_a_file_is_complete_or_absent(tmp_path):
    array = np.ones((3, 5), np.float16)
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(tmp_path / "a", {"x": array}, [array, array], {})
    assert list(tmp_path.iterdir()) == []
    arrays = {"x": array, "empty": np.zeros((0, 2), np.int8), "scalar": np.array(True)}
    write_safetensors(tmp_path / "a", arrays, arrays.values(), {"k": "v"})
    loaded = load_file(tmp_path / "a")
    for name, value in arrays.items():
        assert np.array_equal(loaded[name], value), name
        assert loaded[name].dtype == value.dtype


@pytest.mark.slow
@pytest.mark.skipif(
    "TRANSFORMERS_PYTHON" not in os.environ,
    reason="TRANSFORMERS_PYTHON names no interpreter with torch and transformers",
)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_transformers_loads_what_is_exported_and_writes_what_is_loaded(model, seed):
    script = (
        Path(__file__).parents[2] / "fixtures" / "check_export_with_transformers.py"
    )
    command = [
        os.environ["TRANSFORMERS_PYTHON"],
        script,
        "--shardwise-python",
        sys.executable,
    ]
    command += ["--model", model, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the greedy text is the same" in done.stdout
