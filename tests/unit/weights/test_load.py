"""Initial weights from another run: by path, onto any mesh, compared before anything is read."""

import dataclasses
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from flax import nnx
from rich.console import Console
from safetensors.numpy import save_file

from shardwise import (
    Checkpoints,
    InitFrom,
    Rules,
    abstract_state,
    init_state,
    load_initial,
    make_mesh,
    optim,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.manifest import write_manifest
from shardwise.models.gpt import GPT
from shardwise.optim.parts import evaluation_params
from shardwise.tree import named_leaves
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gpt2_tiny.npz"


class Encoder(nnx.Module):
    def __init__(self, rngs, dtype):
        self.layers = nnx.List(
            [
                nnx.Linear(8, 16, rngs=rngs, param_dtype=dtype),
                nnx.Linear(16, 16, rngs=rngs, param_dtype=dtype),
            ]
        )
        self.norm = nnx.BatchNorm(16, rngs=rngs)


class Net(nnx.Module):
    """An encoder, a head that may have another name, and batch statistics."""

    def __init__(
        self, rngs, classes=10, head="head", encoder="encoder", dtype=jnp.float32
    ):
        setattr(self, encoder, Encoder(rngs, dtype))
        setattr(self, head, nnx.Linear(16, classes, rngs=rngs, param_dtype=dtype))


def spec_for(mesh="data=1", devices=1, optimizer=None, **options):
    return abstract_state(
        lambda rngs: Net(rngs, **options),
        optimizer or optax.adamw(1e-3),
        make_mesh(mesh, jax.devices()[:devices]),
        Rules(fsdp_min_size=16),
    )


def trained(spec, seed=1):
    """Return a state in which no leaf has its initial value or that of another leaf."""
    leaves, structure = jax.tree.flatten(init_state(spec, seed))
    rng = np.random.default_rng(seed)
    noisy = [
        leaf
        if leaf.dtype == np.int32
        else jnp.asarray(rng.uniform(0.1, 1, leaf.shape), leaf.dtype)
        for leaf in leaves
    ]
    return jax.device_put(jax.tree.unflatten(structure, noisy), spec.shardings)


def save(directory, state, step=7):
    directory.mkdir(parents=True, exist_ok=True)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)), {})
    return directory


def values(tree):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].tobytes() == expected[name].tobytes(), name


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A run on four devices: its directory and its state."""
    state = trained(spec_for("fsdp=4", 4))
    run = tmp_path_factory.mktemp("pretrained")
    save(run / "checkpoints", state)
    return run, state


def test_the_same_model_gets_all_weights_on_another_mesh(pretrained):
    run, saved = pretrained
    spec = spec_for("data=2,fsdp=4", 8)
    state, loaded = load_initial(InitFrom(run), spec, seed=0)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings
    assert_equal(values(state.params), values(saved.params))
    assert_equal(values(state.other), values(saved.other))
    assert int(state.step) == 0
    # The moments and the count of the optimizer start at 0.
    assert not any(value.any() for value in values(state.opt_state).values())
    assert loaded.fresh == loaded.left_out == ()
    assert len(loaded.taken) == 8 + 2
    # All buffers can be donated.
    jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)(
        state
    )
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_new_head_is_initialized_from_the_seed(pretrained):
    run, saved = pretrained
    spec = spec_for("fsdp=8", 8, classes=3)
    state, loaded = load_initial(InitFrom(run, rename={"head/*": None}), spec, seed=5)
    fresh = values(init_state(spec, 5).params)
    expected = {
        name: fresh[name] if name.startswith("head/") else value
        for name, value in values(saved.params).items()
    }
    assert_equal(values(state.params), expected)
    assert loaded.fresh == ("head/bias", "head/kernel")
    assert set(loaded.left_out) == {"head/bias", "head/kernel"}
    console = Console(width=120)
    with console.capture() as capture:
        console.print(loaded.table())
    assert "initialized from the seed" in capture.get()
    assert "not used" in capture.get()


def test_paths_are_renamed_with_the_text_that_the_star_matched(pretrained):
    run, saved = pretrained
    spec = spec_for(encoder="backbone", head="classes")
    rename = {
        "classes/*": "head/*",
        "backbone/*/0/*": "encoder/*/1/*",
        "backbone/*": "encoder/*",
    }
    message = r"backbone/layers/0/kernel +float32\[16, 16\] +float32\[8, 16\]"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(run, rename), spec, seed=0)
    del rename["backbone/*/0/*"]
    state, loaded = load_initial(
        InitFrom(run / "checkpoints" / "7", rename), spec, seed=0
    )
    assert state.params["backbone"].keys() == saved.params["encoder"].keys()
    assert_equal(values(state.params["backbone"]), values(saved.params["encoder"]))
    assert_equal(values(state.other["backbone"]), values(saved.other["encoder"]))
    assert loaded.taken["classes/bias"] == "head/bias"


def test_one_saved_array_can_initialize_two_variables(pretrained):
    run, saved = pretrained
    rename = {"encoder/norm/bias": "encoder/norm/scale"}
    state, _ = load_initial(InitFrom(run, rename), spec_for("fsdp=8", 8), seed=0)
    scale = np.asarray(saved.params["encoder"]["norm"]["scale"])
    assert np.array_equal(state.params["encoder"]["norm"]["bias"], scale)
    assert np.array_equal(state.params["encoder"]["norm"]["scale"], scale)


def test_copies_in_the_optimizer_start_with_the_loaded_weights(pretrained):
    run, saved = pretrained
    optimizer = optim.adamw(1e-3, ema=0.9, master=True)
    spec = spec_for("fsdp=8", 8, optimizer=optimizer, dtype=jnp.bfloat16)
    with pytest.raises(CheckpointError, match="cast=True would convert it"):
        load_initial(InitFrom(run), spec, seed=0)
    state, _ = load_initial(InitFrom(run, cast=True), spec, seed=0)
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(state.params).items()}
    expected = {
        name: value.astype(dtypes[name]) for name, value in values(saved.params).items()
    }
    assert_equal(values(state.params), expected)
    assert_equal(values(evaluation_params(state.opt_state, state.params)), expected)
    in_float32 = {name: value.astype(np.float32) for name, value in expected.items()}
    for kind in ("average", "master"):
        copies = {
            name.partition(f"{kind}/")[2]: value
            for name, value in values(state.opt_state).items()
            if f"/{kind}/" in f"/{name}"
        }
        assert_equal(copies, in_float32)


@pytest.mark.parametrize(
    "optimizer",
    [optim.adamw(1e-3, ema=0.9), optim.schedule_free(1e-3, b1=0.8)],
    ids=["ema", "schedule_free"],
)
def test_averaged_weights_can_be_loaded(tmp_path, optimizer):
    saved = trained(spec_for("fsdp=2", 2, optimizer=optimizer))
    run = save(tmp_path, saved)
    state, _ = load_initial(InitFrom(run, average=True), spec_for("fsdp=8", 8), seed=0)
    expected = values(evaluation_params(saved.opt_state, saved.params))
    params = values(saved.params)
    for name, value in values(state.params).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
        assert not np.array_equal(value, params[name])


def test_a_missing_average_is_an_error(pretrained):
    with pytest.raises(CheckpointError, match="keeps no average"):
        load_initial(InitFrom(pretrained[0], average=True), spec_for(), seed=0)


def test_all_mismatches_are_listed_at_once(pretrained):
    run, _ = pretrained
    with pytest.raises(CheckpointError) as error:
        load_initial(InitFrom(run), spec_for(classes=3, encoder="encodr"), seed=0)
    text = str(error.value)
    # The table has all 8 parameters and no statistics, between a heading and the remedy.
    assert text.count("\n") == 1 + 8 + 1
    assert "Did you mean 'encoder/layers/0/kernel'?" in text
    assert 'rename={"encodr/layers/0/*": None}' in text
    head = next(line for line in text.splitlines() if "head/kernel" in line)
    assert head.split() == ["head/kernel", "float32[16,", "10]", "float32[16,", "3]"]


def test_statistics_that_were_not_saved_are_initialized(pretrained, tmp_path):
    _, saved = pretrained
    file = tmp_path / "weights.safetensors"
    save_file(
        {name.replace("/", "."): value for name, value in values(saved.params).items()},
        file,
    )
    state, loaded = load_initial(InitFrom(file), spec_for("fsdp=8", 8), seed=0)
    assert_equal(values(state.params), values(saved.params))
    assert loaded.fresh == ("encoder/norm/mean", "encoder/norm/var")


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"haed/*": None}, "'haed/\\*' Did you mean"),
        ({"head/*": None, "head/bias": None}, "or an earlier pattern matches it"),
        ({"head/kernel": "head/*"}, "more \\* than its pattern"),
    ],
)
def test_patterns_without_effect_are_errors(pretrained, rename, message):
    with pytest.raises(ConfigError, match=message):
        load_initial(InitFrom(pretrained[0], rename), spec_for(), seed=0)


def test_loading_nothing_is_an_error(pretrained):
    with pytest.raises(CheckpointError, match="no variable would be loaded"):
        load_initial(InitFrom(pretrained[0], {"*": None}), spec_for(), seed=0)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_initial(InitFrom("nowhere"), spec_for(), seed=0)
    with pytest.raises(CheckpointError, match=r"has no step 8\. Saved steps: 7\."):
        load_initial(InitFrom(pretrained[0], step=8), spec_for(), seed=0)


# Damaged and hostile files


@pytest.fixture
def copy(pretrained, tmp_path):
    """A copy of the step to damage."""
    return save(tmp_path / "checkpoints", pretrained[1]) / "7"


def test_a_flipped_bit_is_refused(copy):
    file = max(copy.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged: its digest"):
        load_initial(InitFrom(copy), spec_for(), seed=0)


def test_a_link_is_refused(copy, tmp_path):
    (tmp_path / "secret").write_text("s")
    (copy / "state" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        load_initial(InitFrom(copy), spec_for(), seed=0)


def test_a_huge_shape_is_refused_before_it_is_read(copy):
    url = f"file://{copy / 'state'}/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": url}).result()
    array = json.loads(store["params.head.bias/.zarray"])
    array |= {"shape": [10**15], "chunks": [10**6]}
    store["params.head.bias/.zarray"] = json.dumps(array).encode()
    write_manifest(copy)
    message = r"head/bias +float32\[1000000000000000\] +float32\[10\]"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(copy), spec_for(), seed=0)


def test_leaf_names_that_are_paths_on_disk_are_refused(copy):
    metadata = json.loads((copy / "state" / "_METADATA").read_text())
    leaf = {
        "key_metadata": [{"key": "/etc", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    not_ocdbt = {**metadata, "use_ocdbt": False, "tree_metadata": {"('/etc',)": leaf}}
    for content in (not_ocdbt, [], {"use_ocdbt": True}):
        (copy / "state" / "_METADATA").write_text(json.dumps(content))
        write_manifest(copy)
        with pytest.raises(
            CheckpointError, match=r"is not in the OCDBT format|cannot be read"
        ):
            load_initial(InitFrom(copy), spec_for(), seed=0)


HUGE_TENSOR = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}  '


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 67) + HUGE_TENSOR + b"1234",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 20000) + b"[" * 20000,
    ],
    ids=["empty", "huge header", "huge shape", "no dictionary", "deep"],
)
def test_an_invalid_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_initial(InitFrom(tmp_path), spec_for(), seed=0)


# GPT-2


@pytest.fixture
def published(tmp_path):
    """A directory as `transformers` writes it, its weights, and the configuration."""
    arrays = np.load(FIXTURE)
    names = [name for name in arrays.files if name.startswith("weights/")]
    weights = {name.removeprefix("weights/"): arrays[name] for name in names}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes(arrays["config"].tobytes())
    return tmp_path, weights, config_from_hf(json.loads(arrays["config"].tobytes()))


class Classifier(nnx.Module):
    def __init__(self, config, rngs):
        self.backbone = GPT(config, rngs)
        self.head = nnx.Linear(config.width, 3, rngs=rngs)


def gpt_spec(config, mesh="data=8", rules=None):
    return abstract_state(
        lambda rngs: GPT(config, rngs), optax.sgd(0.1), make_mesh(mesh), rules
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_gpt2_is_read_by_the_names_of_transformers(published, scan_layers):
    directory, weights, config = published
    config = dataclasses.replace(config, scan_layers=scan_layers, vocab_size=104)
    spec = gpt_spec(config, "fsdp=8", Rules(fsdp_min_size=64))
    for path in (directory, directory / "model.safetensors"):
        state, loaded = load_initial(InitFrom(path), spec, seed=0)
        assert_equal(values(state.params), values(params_from_hf(weights, config)))
        assert loaded.left_out == ()


def test_gpt2_can_be_a_part_of_the_model(published):
    directory, weights, config = published
    spec = abstract_state(
        lambda rngs: Classifier(config, rngs), optax.sgd(0.1), make_mesh("data=8")
    )
    init = InitFrom(directory, {"head/*": None, "backbone/*": "*"})
    state, loaded = load_initial(init, spec, seed=0)
    assert_equal(
        values(state.params["backbone"]), values(params_from_hf(weights, config))
    )
    assert loaded.fresh == ("head/bias", "head/kernel")


def test_gpt2_with_another_number_of_heads_is_refused_although_all_shapes_match(
    published,
):
    directory, _, config = published
    spec = gpt_spec(dataclasses.replace(config, num_heads=2))
    with pytest.raises(
        CheckpointError, match="it has num_heads=4, this model has num_heads=2"
    ):
        load_initial(InitFrom(directory), spec, seed=0)
    (directory / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"config\.json cannot be read: No such file"
    ):
        load_initial(InitFrom(directory), spec, seed=0)
    message = r"contains 0 configurations of shardwise\.models\.gpt\.GPT"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(directory), spec_for(), seed=0)
