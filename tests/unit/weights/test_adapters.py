"""Fine-tuning: only adapters are trained and saved, they equal those of peft, and can be merged."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from shardwise import (
    Batches,
    Checkpoints,
    InitFrom,
    Mean,
    Run,
    abstract_state,
    fit,
    freeze,
    init_state,
    load_initial,
    lora,
    make_mesh,
    make_train_step,
    optim,
    plan_run,
    verify,
)
from shardwise.checkpoint.reader import directory_bytes, open_step
from shardwise.cli import main
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.module import build_module
from shardwise.tree import leaf_name, named_leaves
from shardwise.weights.adapters import checksums
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, model_of
from shardwise.weights.load import merged_step

FIXTURES = Path(__file__).parents[2] / "fixtures"
QUIET = Console(quiet=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (32, 8)).astype(np.int32)
# Patterns of all matrices in the blocks of a Llama, with scanned or unrolled layers.
LLAMA = [
    f"blocks/*{name}" for name in ("query", "key", "value", "out", "gate", "up", "down")
]
MIXTRAL = [f"blocks/moe/{name}" for name in ("gate", "up", "down")]
KERNELS = ["first/kernel", "second/kernel"]


def gpt(**changes):
    config = GPTConfig(vocab_size=64, max_length=8, num_layers=1, num_heads=2, width=16)
    config = dataclasses.replace(config, **changes)
    return lambda rngs: GPT(config, rngs)


def llama(**changes):
    config = LlamaConfig(64, 2, 4, 2, 16, 24, rope_theta=1e4, max_length=8)
    config = dataclasses.replace(config, **changes)
    return lambda rngs: Llama(config, rngs)


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
    )
    return Mean(losses.sum(1), jnp.full(len(losses), losses.shape[1]))


class Net(nnx.Module):
    """Layers of Flax, an embedding shared with the output, a weight without bias, statistics."""

    def __init__(self, rngs, classes=None, width=8):
        sharded = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))
        self.table = nnx.Embed(64, width, rngs=rngs)
        self.first = nnx.Linear(width, 16, rngs=rngs, kernel_init=sharded)
        self.heads = nnx.Param(jax.random.normal(rngs.params(), (16, 2, 4)))
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Linear(8, width, rngs=rngs)
        if classes:
            self.head = nnx.Linear(width, classes, rngs=rngs)
        else:
            self.unembed = self.table.embedding

    def __call__(self, tokens):
        x = jnp.tanh(self.first(self.table(tokens)))
        x = jnp.einsum("bti,ihk->bthk", x, self.heads).reshape(*x.shape[:2], 8)
        x = self.norm(self.second(x))
        return self.head(x.mean(1)) if hasattr(self, "head") else x @ self.unembed.T


def spec_on(mesh, devices, model, optimizer=None):
    return abstract_state(
        model, optimizer or optax.adam(1e-2), make_mesh(mesh, jax.devices()[:devices])
    )


def spec_of(model, optimizer=None):
    """Return the abstract state on one device."""
    return spec_on("data=1", 1, model, optimizer)


def trained(spec, steps=3, init=None, **options):
    """Train for a few steps; return the state and the losses."""
    state = init_state(spec, 0) if init is None else load_initial(init, spec, 0)[0]
    step = make_train_step(spec, loss, {"tokens": TOKENS[:8]}, **options)
    losses = []
    for n in range(steps):
        state, metrics = step(state, step.place({"tokens": TOKENS[8 * n : 8 * n + 8]}))
        losses.append(float(metrics["loss"]))
    return state, losses


def logits(spec, state):
    """Return logits in evaluation mode, the only mode that a frozen `nnx.BatchNorm` has."""

    def forward(state):
        model = spec.module(state)
        model.eval()
        return model(TOKENS[:4])

    return np.asarray(jax.jit(forward)(state))


def shapes_of(spec):
    return {path: placement.shape for path, placement in spec.params.items()}


# What is trained


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (Net, KERNELS),
        pytest.param(llama(), LLAMA, marks=pytest.mark.slow),
        pytest.param(llama(num_experts=4, top_k=2), MIXTRAL, marks=pytest.mark.slow),
        pytest.param(
            gpt(num_layers=2, scan_layers=True, remat="block"),
            "blocks/*/kernel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            llama(scan_layers=False, tied=True, remat="dots"),
            [*LLAMA, "tokens"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_step_0_equals_the_base_bit_for_bit_and_only_adapters_are_trained(
    model, pattern
):
    base, spec = spec_of(model), spec_of(lora(model, pattern, rank=2))
    start = init_state(spec, 0)
    base_logits = logits(base, init_state(base, 0))
    assert set(spec.frozen) == set(base.params), "frozen weights keep their names"
    assert all(path.endswith(("/lora_a", "/lora_b")) for path in spec.params)
    assert logits(spec, start).tobytes() == base_logits.tobytes()
    optimizer_shapes = {
        leaf.shape for leaf in jax.tree.leaves(start.opt_state) if leaf.ndim
    }
    assert optimizer_shapes <= set(shapes_of(spec).values())
    frozen = jax.device_get(start.frozen)
    state, _ = trained(spec, 2, accumulate=2)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, frozen, jax.device_get(state.frozen))
    )
    for path, leaf in named_leaves(state.params).items():
        if path.endswith("lora_b"):
            assert np.abs(leaf).max() > 0, path
    assert np.abs(logits(spec, state) - base_logits).max() > 1e-3


def test_shapes_of_adapters_follow_inputs_and_outputs():
    spec = spec_of(lora(gpt(), "blocks/0/*kernel", rank=3))
    shapes = {
        path.removeprefix("blocks/0/"): shape for path, shape in shapes_of(spec).items()
    }
    assert shapes["attn/qkv/kernel/lora_a"] == (16, 3)
    assert shapes["attn/qkv/kernel/lora_b"] == (3, 3, 2, 8)
    assert shapes["attn/out/kernel/lora_a"] == (2, 8, 3)
    assert shapes["attn/out/kernel/lora_b"] == (3, 16)
    stacked = lora(gpt(num_layers=2, scan_layers=True), "*/out/kernel", rank=3)
    assert shapes_of(spec_of(stacked)) == {
        "blocks/attn/out/kernel/lora_a": (2, 2, 8, 3),
        "blocks/attn/out/kernel/lora_b": (2, 3, 16),
    }


def test_every_expert_has_its_own_adapters():
    model = lora(llama(num_experts=4, top_k=2), MIXTRAL, rank=3)
    shapes = shapes_of(spec_of(model))
    assert shapes["blocks/moe/up/lora_a"] == (2, 4, 16, 3)
    assert shapes["blocks/moe/up/lora_b"] == (2, 4, 3, 24)
    assert shapes["blocks/moe/down/lora_a"] == (2, 4, 24, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["data=2,context=2", "stage=2,data=2", "data=2,expert=2"]
)
def test_adapters_train_the_same_with_other_axes(mesh):
    has_experts = "expert" in mesh
    experts = {"num_experts": 4, "top_k": 2} if has_experts else {}
    model = lora(llama(**experts), MIXTRAL if has_experts else LLAMA, rank=2)
    _, expected = trained(spec_of(model))
    _, losses = trained(spec_on(mesh, 4, model))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_the_metadata_of_a_weight_can_name_its_inputs():
    shapes = shapes_of(spec_of(lora(llama(), LLAMA, rank=3)))
    assert shapes["blocks/query/lora_a"] == (2, 16, 3)
    assert shapes["blocks/query/lora_b"] == (2, 3, 4, 4)
    assert shapes["blocks/key/lora_a"] == (2, 16, 3)
    assert shapes["blocks/key/lora_b"] == (2, 3, 2, 4)
    assert shapes["blocks/out/lora_a"] == (2, 4, 4, 3)
    assert shapes["blocks/out/lora_b"] == (2, 3, 16)
    assert shapes["blocks/down/lora_a"] == (2, 24, 3)
    assert shapes["blocks/down/lora_b"] == (2, 3, 16)
    unrolled = shapes_of(spec_of(lora(llama(scan_layers=False), LLAMA, rank=3)))
    assert (len(shapes), len(unrolled)) == (14, 28)
    for path, shape in shapes.items():
        assert unrolled[path.replace("blocks/", "blocks/1/")] == shape[1:], path
    # A layout in the pattern takes precedence.
    explicit = spec_of(
        lora(llama(scan_layers=False), {"blocks/*/query": "iio"}, rank=3)
    )
    assert explicit.params["blocks/0/query/lora_a"].shape == (16, 4, 3)


def test_a_weight_without_a_bias_needs_a_layout():
    message = (
        r"'heads' has shape \(16, 2, 4\), and there is no bias .* \{'heads': 'iio'\}"
    )
    with pytest.raises(ConfigError, match=message):
        spec_of(lora(Net, "heads"))
    spec = spec_of(lora(Net, {"heads": "ioo", "first/kernel": None}, rank=2))
    shapes = {path: shape for path, shape in shapes_of(spec).items() if "heads" in path}
    assert shapes == {"heads/lora_a": (16, 2), "heads/lora_b": (2, 2, 4)}
    for layout in ("io", "oii", "iii"):
        with pytest.raises(ConfigError, match=f"'{layout}' is not a layout"):
            spec_of(lora(Net, {"heads": layout}))
    with pytest.raises(ConfigError, match=r"'first/bias' has shape .* is not a matrix"):
        spec_of(lora(Net, "first/*"))


def test_an_ambiguous_bias_is_an_error():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones((4, 4, 5)))
            self.bias = nnx.Param(jnp.ones((4, 5)))

    with pytest.raises(ConfigError, match="its bias allows more than one layout"):
        spec_of(lora(Stack, "kernel"))
    spec = spec_of(lora(Stack, {"kernel": "sio"}, rank=2))
    assert spec.params["kernel/lora_a"].shape == (4, 4, 2)


def test_a_shared_weight_is_adapted_wherever_it_is_used():
    module = build_module(lora(Net, "table/embedding", rank=2), 0)
    assert module.unembed is module.table.embedding
    assert module.unembed.shape == (64, 8)
    module.unembed.lora_b[...] = jnp.ones((2, 8))
    change = 8.0 * module.unembed.lora_a[...] @ jnp.ones((2, 8))
    embedded = module.table(jnp.arange(64))
    np.testing.assert_allclose(
        embedded - module.unembed.lora_base[...], change, rtol=1e-4, atol=1e-5
    )
    x = jnp.ones((3, 64))
    for value in (
        x @ module.unembed,
        x @ module.unembed.value,
        x @ jnp.asarray(module.unembed),
        x @ (module.unembed * 1.0),
        -(x @ -module.unembed),
    ):
        np.testing.assert_allclose(value, x @ module.unembed[...], rtol=1e-6)


def test_patterns_that_match_nothing_get_the_closest_name():
    message = r"these patterns match no parameter of the model:\n  'first/kernal'.*first/kernel"
    with pytest.raises(ConfigError, match=rf"lora: {message}"):
        spec_of(lora(Net, ["first/kernal"]))
    with pytest.raises(ConfigError, match="freeze: these patterns match no parameter"):
        spec_of(freeze(Net, "encoder/*"))
    with pytest.raises(ConfigError, match=r"no nnx\.Param that is not frozen"):
        spec_of(freeze(Net, "*"))
    with pytest.raises(ConfigError, match="rank=0"):
        lora(Net, "first/kernel", rank=0)


@pytest.mark.slow
def test_freezing_by_pattern_trains_the_rest():
    full = spec_of(Net, optax.sgd(0.1))
    part = spec_of(freeze(Net, "table/*", "first/*"), optax.sgd(0.1))
    assert set(part.frozen) == {"table/embedding", "first/kernel", "first/bias"}
    (full_state, _), (part_state, _) = trained(full, 1), trained(part, 1)
    expected = named_leaves(full_state.params)
    for path, leaf in named_leaves(part_state.params).items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6)
    assert checksums(part_state.frozen) == checksums(init_state(part, 0).frozen)


def test_a_bfloat16_base_needs_half_the_memory_and_the_sum_is_rounded_once():
    spec = spec_of(lora(Net, KERNELS, rank=2, dtype="bfloat16"))
    assert {str(placement.dtype) for placement in spec.frozen.values()} == {"bfloat16"}
    assert {str(placement.dtype) for placement in spec.params.values()} == {"float32"}
    state, losses = trained(spec, 2, compute_dtype="bfloat16")
    assert np.isfinite(losses).all()
    kernel = spec.module(state).first.kernel
    base = kernel.lora_base[...].astype(jnp.float32)
    merged = base + 8.0 * kernel.lora_a[...] @ kernel.lora_b[...]
    assert np.array_equal(kernel[...], merged.astype(jnp.bfloat16))


# Compared with peft


# Our name of a matrix to that of transformers.
PUBLISHED_NAMES = {
    "attn/qkv/kernel": "attn.c_attn",
    "attn/out/kernel": "attn.c_proj",
    "mlp/up/kernel": "mlp.c_fc",
    "mlp/down/kernel": "mlp.c_proj",
    **{name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "out")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def adapter_of_peft(arrays, when, path, shape):
    """Return an adapter of the fixture by our path. Those of scanned layers are stacked."""
    *name, part = path.removeprefix("blocks/").split("/")
    if name[0].isdecimal():
        layers, name = [int(name[0])], name[1:]
    else:
        layers = range(shape[0])
    stem = "h" if "kernel" in name else "layers"
    published = f"{PUBLISHED_NAMES['/'.join(name)]}.lora_{part[-1].upper()}"
    values = [arrays[f"{when}/{stem}.{layer}.{published}"].T for layer in layers]
    return np.stack(values).reshape(shape)


def fixture_weights(arrays):
    names = [name for name in arrays if name.startswith("weights/")]
    return {name.removeprefix("weights/"): arrays[name] for name in names}


@pytest.mark.parametrize(
    ("fixture", "file", "patterns", "changes"),
    [
        ("gpt2_tiny", "lora_tiny", "blocks/*/kernel", {"dropout": 0.0}),
        pytest.param(
            "llama_tiny",
            "lora_llama_tiny",
            LLAMA,
            {"scan_layers": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama_tiny",
            "lora_llama_tiny",
            LLAMA,
            {"scan_layers": False, "remat": "block"},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_losses_adapters_and_merged_logits_equal_those_of_peft(
    fixture, file, patterns, changes
):
    tiny, expected = (
        np.load(FIXTURES / f"{fixture}.npz"),
        np.load(FIXTURES / f"{file}.npz"),
    )
    settings = json.loads(expected["settings"].tobytes())
    config = dataclasses.replace(
        config_from_hf(json.loads(tiny["config"].tobytes())), **changes
    )
    weights = params_from_hf(fixture_weights(tiny), config)
    model = lora(
        lambda rngs: model_of(config, rngs),
        patterns,
        rank=settings["rank"],
        alpha=settings["alpha"],
    )
    spec = spec_of(
        model, optax.adamw(settings["lr"], weight_decay=settings["weight_decay"])
    )
    start = {
        path: adapter_of_peft(expected, "start", path, shape)
        for path, shape in shapes_of(spec).items()
    }
    published_start = [expected[name] for name in expected if name.startswith("start/")]
    assert sum(value.size for value in start.values()) == sum(
        value.size for value in published_start
    )
    state = dataclasses.replace(
        init_state(spec, 0),
        params=jax.tree_util.tree_map_with_path(
            lambda path, _: start[leaf_name(path)], spec.abstract.params
        ),
        frozen=jax.tree.map(jnp.asarray, weights),
    )
    state = jax.device_put(state, spec.shardings)
    tokens = tiny["tokens"].astype(np.int32)
    step = make_train_step(spec, loss, {"tokens": tokens})
    losses = []
    for _ in expected["losses"]:
        state, metrics = step(state, step.place({"tokens": tokens}))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-5)
    for path, leaf in named_leaves(state.params).items():
        end = adapter_of_peft(expected, "end", path, leaf.shape)
        np.testing.assert_allclose(leaf, end, rtol=0, atol=1e-4, err_msg=path)
        assert np.abs(leaf - start[path]).max() > 1e-2, path
    np.testing.assert_allclose(
        spec.module(state)(tokens), expected["logits"], rtol=0, atol=2e-4
    )


# Meshes and plans


def partitions(spec, prefix):
    """Return the partition of every parameter below a prefix, by the rest of its path."""
    placements = {**spec.params, **spec.frozen}
    return {
        path.removeprefix(prefix): tuple(placement.spec)
        for path, placement in placements.items()
        if path.startswith(prefix)
    }


def test_adapters_are_sharded_like_their_weight():
    spec = spec_on("data=2,model=2", 4, lora(gpt(), "blocks/*/kernel", rank=2))
    sharding = partitions(spec, "blocks/0/")
    assert (
        sharding["mlp/up/kernel"] == sharding["mlp/up/kernel/lora_b"] == (None, "model")
    )
    assert sharding["mlp/up/kernel/lora_a"] == ()
    assert sharding["attn/out/kernel/lora_a"] == ("model", None, None)
    assert sharding["attn/qkv/kernel/lora_b"] == (None, None, "model", None)
    spec = spec_on("data=2,model=2", 4, lora(llama(), LLAMA, rank=2))
    sharding = partitions(spec, "blocks/")
    assert sharding["query/lora_a"] == ()
    assert sharding["query/lora_b"] == (None, None, "model", None)
    assert sharding["out/lora_a"] == (None, "model", None, None)
    assert sharding["out/lora_b"] == ()


@pytest.mark.slow
def test_verify_finds_no_difference_on_meshes():
    run = Run(
        model=lora(Net, KERNELS, rank=2),
        loss=loss,
        optimizer=optim.adamw(1e-2),
        data=Batches({"tokens": TOKENS}, 8),
        steps=2,
        mesh="data=8",
    )
    report = verify(run, meshes=["data=4,model=2"], steps=2)
    assert report.ok, report


@pytest.mark.slow
def test_a_plan_has_neither_gradients_nor_optimizer_states_of_the_base():
    config = GPTConfig(
        vocab_size=4096, max_length=16, num_layers=1, num_heads=2, width=256
    )
    run = Run(
        model=lambda rngs: GPT(config, rngs),
        loss=lambda model, batch: model(batch["tokens"]).mean(),
        optimizer=optim.adamw(1e-2),
        data=Batches({"tokens": TOKENS}, 2),
        steps=1,
        mesh=make_mesh("data=1", jax.devices()[:1]),
    )
    full = plan_run(run, "cpu:1")
    adapters = lora(run.model, "blocks/*/kernel", rank=4)
    tuned = plan_run(dataclasses.replace(run, model=adapters), "cpu:1")
    base_bytes = 4 * full.num_params
    assert full.memory.optimizer > 2 * base_bytes * 0.99
    assert tuned.memory.optimizer < 0.03 * base_bytes
    # The parameters are the base and the adapters.
    assert tuned.memory.parameters == pytest.approx(base_bytes, rel=0.02)
    embedding_gradient = 4 * 4096 * 256
    assert tuned.memory.temporaries < full.memory.temporaries - embedding_gradient


# Runs: what is saved, what is not, and how to merge it again


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A safetensors file with variables of a Net that no seed produces."""
    spec = spec_of(net())
    state = init_state(spec, 7)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    leaves = {**named_leaves(state.params), **named_leaves(state.other)}
    tensors = {
        name.replace("/", "."): np.asarray(leaf) * 1.5 for name, leaf in leaves.items()
    }
    save_file(tensors, path)
    return path


def net(classes=None):
    return lambda rngs: Net(rngs, classes, width=256)


def run_of(base, out, **changes):
    settings = {
        "model": lora(net(), KERNELS, rank=2),
        "init_from": InitFrom(base),
        "steps": 4,
        "save_every": 2,
        "loss": loss,
        "optimizer": optim.adamw(1e-2, ema=0.5),
        "data": Batches({"tokens": TOKENS}, 8),
        "out": out,
        "mesh": make_mesh("data=1", jax.devices()[:1]),
    }
    return Run(**{**settings, **changes})


def fitted(run):
    return fit(run, console=QUIET, plan=False)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A finished run of adapters, and its result."""
    run = run_of(base, tmp_path_factory.mktemp("tuned"))
    return run, fitted(run)


def export(run, out, *options):
    """Return the exit code of `shardwise checkpoint export`."""
    return main(["checkpoint", "export", str(run), "--out", str(out), *options])


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_also_on_another_mesh(
    base, tuned, tmp_path
):
    fitted(run_of(base, tmp_path / "a", steps=2))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    resumed = fitted(run_of(base, tmp_path / "a"))
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed.state, tuned[1].state))
    mesh = make_mesh("data=2,model=2", jax.devices()[:4])
    resharded = named_leaves(
        fitted(run_of(base, tmp_path / "b", mesh=mesh)).state.params
    )
    for path, leaf in named_leaves(tuned[1].state.params).items():
        np.testing.assert_allclose(resharded[path], leaf, rtol=1e-4, atol=1e-5)


def test_checkpoints_hold_adapters_and_no_base(base, tuned):
    step = tuned[0].out / "checkpoints" / "4"
    with Checkpoints(step.parent) as checkpoints:
        restored = checkpoints.restore(tuned[1].spec, 4)
        leaves = checkpoints.metadata(4)["frozen"]["leaves"]
    assert restored.frozen == {}
    adapters = {f"{path}/{part}" for path in KERNELS for part in ("lora_a", "lora_b")}
    assert set(named_leaves(restored.params)) == adapters
    assert leaves["first/kernel"]["from"] == "first/kernel"
    # The checkpoint also has two moments, an average and the description of the run.
    assert directory_bytes(step) < base.stat().st_size * 0.6


def test_another_base_is_refused(base, tuned, tmp_path):
    run = dataclasses.replace(tuned[0], steps=6)
    weights = load_file(base)
    # Change the last bit of one weight.
    weights["second.kernel"].reshape(-1)[3] *= 1.0000002
    other = tmp_path / "other.safetensors"
    save_file(weights, other)
    message = r"with other frozen weights.*'second/kernel' of 8 differ"
    with pytest.raises(CheckpointError, match=message) as error:
        fitted(dataclasses.replace(run, init_from=InitFrom(other)))
    assert str(base) in str(error.value)
    assert "other.safetensors" in str(error.value)
    with pytest.raises(CheckpointError, match="initialized from the seed"):
        fitted(dataclasses.replace(run, init_from=None))


VALUES = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def checksum(array):
    return checksums({"w": array})["w"]


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ("data=4,model=2", PartitionSpec("data", "model")),
        ("data=4,model=2", PartitionSpec(None, "data")),
        ("data=8", PartitionSpec("data")),
        ("data=8", PartitionSpec()),
    ],
)
def test_a_checksum_does_not_depend_on_the_sharding(mesh, spec):
    sharded = jax.device_put(VALUES, NamedSharding(make_mesh(mesh), spec))
    assert checksum(sharded) == checksum(VALUES)


def test_a_checksum_depends_on_every_bit():
    bits = VALUES[:2, :4].view(np.uint32)
    sums = {checksum(bits)}
    for index in np.ndindex(bits.shape):
        for bit in range(32):
            flipped = bits.copy()
            flipped[index] ^= np.uint32(1 << bit)
            sums.add(checksum(flipped))
    assert len(sums) == 1 + bits.size * 32, "every checksum is different"


def test_a_checksum_depends_on_the_position_of_every_value():
    swapped = VALUES.copy()
    swapped[0, 0], swapped[0, 1] = VALUES[0, 1], VALUES[0, 0]
    arrays = [
        VALUES,
        swapped,
        VALUES.T.copy(),
        VALUES[::-1].copy(),
        VALUES[:, ::-1].copy(),
    ]
    assert len({checksum(array) for array in arrays}) == len(arrays)
    # The position is the index in row-major order, so a reshape changes nothing.
    assert checksum(VALUES.reshape(8, 16)) == checksum(VALUES)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int8, np.bool_])
def test_a_checksum_works_for_small_dtypes(dtype):
    values = (VALUES > 0) if dtype is np.bool_ else VALUES.astype(dtype)
    changed = values.copy()
    changed[3, 3] = 1 - changed[3, 3] if dtype is not np.bool_ else not changed[3, 3]
    assert len({checksum(values), checksum(np.roll(values, 1)), checksum(changed)}) == 3


def test_an_export_is_merged_and_computes_what_the_adapters_compute(
    base, tuned, tmp_path
):
    run, result = tuned
    merged_file = tmp_path / "merged.safetensors"
    assert export(run.out, merged_file) == 0
    plain = spec_of(net())
    state, loaded = load_initial(InitFrom(merged_file), plain, 0)
    assert loaded.fresh == loaded.left_out == ()
    assert logits(plain, state).tobytes() == logits(result.spec, result.state).tobytes()
    # A run of adapters can be loaded like a complete model.
    direct, _ = load_initial(InitFrom(run.out), plain, 0)
    assert jax.tree.all(jax.tree.map(np.array_equal, direct, state))


def test_averages_of_adapters_are_exported_and_marked(tuned, tmp_path):
    run, _ = tuned
    plain = spec_of(net())
    last, _ = load_initial(InitFrom(run.out), plain, 0)
    average, _ = load_initial(InitFrom(run.out, average=True), plain, 0)
    assert not np.array_equal(
        average.params["first"]["kernel"], last.params["first"]["kernel"]
    )
    for name, options, mark in (
        ("last", [], None),
        ("average", ["--average"], "true"),
        ("trained", ["--average", "--trained-only"], "true"),
    ):
        assert export(run.out, tmp_path / f"{name}.safetensors", *options) == 0
        with safe_open(tmp_path / f"{name}.safetensors", "np") as file:
            assert file.metadata().get("average") == mark
    exported = load_file(tmp_path / "average.safetensors")
    for path, leaf in named_leaves(average.params).items():
        assert np.array_equal(exported[path.replace("/", ".")], leaf), path
    assert export(run.out, tmp_path / "adapters.safetensors", "--trained-only") == 0
    assert "first.kernel.lora_a" in load_file(tmp_path / "adapters.safetensors")


def test_an_export_can_name_a_moved_base_and_refuses_another_one(base, tuned, tmp_path):
    run, _ = tuned
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(base.read_bytes())
    assert export(run.out, tmp_path / "merged.safetensors") == 0
    assert export(run.out, tmp_path / "again.safetensors", "--base", str(moved)) == 0
    expected = load_file(tmp_path / "merged.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == expected.keys()
    assert all(np.array_equal(again[name], expected[name]) for name in expected)
    save_file({name: value + 1 for name, value in load_file(base).items()}, moved)
    assert export(run.out, tmp_path / "wrong.safetensors", "--base", str(moved)) == 4
    assert not (tmp_path / "wrong.safetensors").exists()


def test_adapters_of_an_unlisted_weight_are_refused(tuned, tmp_path):
    run, _ = tuned
    saved = open_step(run.out / "checkpoints" / "4")
    frozen = saved.metadata["frozen"]
    leaves = {
        path: leaf for path, leaf in frozen["leaves"].items() if path != KERNELS[0]
    }
    saved.metadata["frozen"] = {**frozen, "leaves": leaves}
    with pytest.raises(
        CheckpointError, match=rf"'{KERNELS[0]}' has adapters, but is not listed"
    ):
        merged_step(saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "patterns", "changes"),
    [
        ("gpt2_tiny", "blocks/*/kernel", {"dropout": 0.0, "scan_layers": False}),
        ("gpt2_tiny", "blocks/*/kernel", {"dropout": 0.0, "scan_layers": True}),
        ("llama_tiny", LLAMA, {}),
        ("llama31_tiny", [*LLAMA, "tokens"], {"scan_layers": False}),
    ],
)
def test_adapters_of_a_published_model_are_merged_for_transformers(
    fixture, patterns, changes, tmp_path
):
    tiny = np.load(FIXTURES / f"{fixture}.npz")
    published = fixture_weights(tiny)
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_bytes(tiny["config"].tobytes())
    save_file(published, folder / "model.safetensors")
    config = dataclasses.replace(
        config_from_hf(json.loads(tiny["config"].tobytes())), **changes
    )

    def plain(rngs):
        return model_of(config, rngs)

    run = run_of(folder, tmp_path / "run", model=lora(plain, patterns, rank=2), steps=2)
    result = fitted(run)
    # The checkpoint has neither weights nor optimizer states of the base.
    saved = {
        name.partition("/")[2]
        for name in open_step(run.out / "checkpoints" / "2").leaves
    }
    assert not any(path.endswith(tuple(result.spec.frozen)) for path in saved)
    assert export(run.out, tmp_path / "merged", "--format", "hf") == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in published.items()
    }
    changed = {
        name
        for name, value in merged.items()
        if not np.array_equal(value, published[name])
    }
    adapted = {
        name for name in published if re.search(r"(_proj|c_attn|c_fc)\.weight$", name)
    }
    if "tokens" in patterns:
        adapted |= {name for name in published if "embed" in name}
    assert changed == adapted
    spec = spec_of(plain)
    state, _ = load_initial(InitFrom(tmp_path / "merged"), spec, 0)
    base_state, _ = load_initial(InitFrom(folder), spec, 0)
    merged_logits = logits(spec, state)
    np.testing.assert_array_equal(merged_logits, logits(result.spec, result.state))
    assert np.abs(merged_logits - logits(spec, base_state)).max() > 1e-3


# A new head


def label_loss(model, batch):
    labels = batch["tokens"][:, 0] % 3
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), labels
    ).mean()


@pytest.mark.slow
def test_a_new_head_is_initialized_by_pattern_and_nothing_else_is_skipped(
    base, tmp_path
):
    model = lora(net(classes=3), KERNELS, rank=2, train=("head/*",))
    init = InitFrom(base, rename={"head/*": None})
    spec = spec_of(model)
    state, loaded = load_initial(init, spec, 3)
    adapters = {f"{path}/{part}" for path in KERNELS for part in ("lora_a", "lora_b")}
    assert set(loaded.fresh) == {"head/kernel", "head/bias", *adapters}
    assert loaded.left_out == ()
    head = state.params["head"]["kernel"]
    assert np.array_equal(head, init_state(spec, 3).params["head"]["kernel"])
    optimizer = optim.adamw(1e-2)
    run = run_of(
        base,
        tmp_path,
        model=model,
        loss=label_loss,
        init_from=init,
        optimizer=optimizer,
    )
    result = fitted(run)
    assert not np.array_equal(result.state.params["head"]["kernel"], head)
    with pytest.raises(
        CheckpointError, match=r'(?s)head/kernel .*rename=\{"head/\*": None\}'
    ):
        load_initial(InitFrom(base), spec, 3)
    with pytest.raises(ConfigError, match="these patterns have no effect"):
        load_initial(InitFrom(base, rename={"top/*": None}), spec, 3)
    assert export(tmp_path, tmp_path / "merged.safetensors") == 0
    plain = spec_of(net(classes=3))
    merged, _ = load_initial(InitFrom(tmp_path / "merged.safetensors"), plain, 0)
    assert (
        logits(plain, merged).tobytes() == logits(result.spec, result.state).tobytes()
    )
