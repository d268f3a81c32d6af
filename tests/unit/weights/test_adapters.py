"""Fine-tuning: only adapters are trained and saved, they equal those of peft, and merged they are the model."""

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
from shardwise.tree import named_leaves
from shardwise.weights.adapters import checksums
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, model_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
QUIET = Console(quiet=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (32, 8)).astype(np.int32)


def gpt(**changes):
    config = dataclasses.replace(
        GPTConfig(vocab_size=64, max_length=8, num_layers=1, num_heads=2, width=16), **changes
    )
    return lambda rngs: GPT(config, rngs)


def llama(**changes):
    config = dataclasses.replace(
        LlamaConfig(64, 2, 4, 2, 16, 24, rope_theta=1e4, max_length=8), **changes
    )
    return lambda rngs: Llama(config, rngs)


LLAMA = [
    f"blocks/*{name}" for name in ("query", "key", "value", "out", "gate", "up", "down")
]  # of a stack or of single layers


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
    )
    return Mean(losses.sum(1), jnp.full(len(losses), losses.shape[1]))


class Net(nnx.Module):
    """Layers of Flax's own, an embedding that is the output layer too, a weight without a bias, statistics."""

    def __init__(self, rngs, classes=None, width=8):
        self.table = nnx.Embed(64, width, rngs=rngs)
        self.first = nnx.Linear(
            width,
            16,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp")),
        )
        self.heads = nnx.Param(jax.random.normal(rngs.params(), (16, 2, 4)))
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Linear(8, width, rngs=rngs)
        if classes:
            self.head = nnx.Linear(width, classes, rngs=rngs)
        else:
            self.unembed = self.table.embedding

    def __call__(self, tokens):
        x = jnp.tanh(self.first(self.table(tokens)))
        x = self.norm(
            self.second(jnp.einsum("bti,ihk->bthk", x, self.heads).reshape(*x.shape[:2], 8))
        )
        return self.head(x.mean(1)) if hasattr(self, "head") else x @ self.unembed.T


KERNELS = ["first/kernel", "second/kernel"]


def on(mesh, devices, model, optimizer=None):
    return abstract_state(
        model, optimizer or optax.adam(1e-2), make_mesh(mesh, jax.devices()[:devices])
    )


def one(model, optimizer=None):
    return on("data=1", 1, model, optimizer)


def trained(spec, steps=3, init=None, **options):
    state = init_state(spec, 0) if init is None else load_initial(init, spec, 0)[0]
    step = make_train_step(spec, loss, {"tokens": TOKENS[:8]}, **options)
    losses = []
    for n in range(steps):
        state, metrics = step(state, step.place({"tokens": TOKENS[8 * n : 8 * n + 8]}))
        losses.append(float(metrics["loss"]))
    return state, losses


def logits(spec, state):
    return np.asarray(jax.jit(lambda state: spec.module(state)(TOKENS[:4]))(state))


# What is trained


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (Net, KERNELS),
        pytest.param(llama(), LLAMA, marks=pytest.mark.slow),
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
def test_step_0_is_the_base_to_the_bit_and_only_adapters_are_trained(model, pattern):
    base, spec = one(model), one(lora(model, pattern, rank=2))
    start = init_state(spec, 0)
    assert set(spec.frozen) == set(base.params)  # under the same names
    assert all(path.endswith(("/lora_a", "/lora_b")) for path in spec.params)
    assert logits(spec, start).tobytes() == logits(base, init_state(base, 0)).tobytes()
    assert {leaf.shape for leaf in jax.tree.leaves(start.opt_state) if leaf.ndim} <= {
        p.shape for p in spec.params.values()
    }
    frozen = jax.device_get(start.frozen)
    state, _ = trained(spec, 2, accumulate=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, frozen, jax.device_get(state.frozen)))
    assert all(
        np.abs(leaf).max() > 0
        for name, leaf in named_leaves(state.params).items()
        if name.endswith("lora_b")
    )
    assert np.abs(logits(spec, state) - logits(base, init_state(base, 0))).max() > 1e-3


def test_shapes_of_adapters_follow_inputs_and_outputs():
    spec = one(lora(gpt(), "blocks/0/*kernel", rank=3))
    shapes = {path.removeprefix("blocks/0/"): p.shape for path, p in spec.params.items()}
    assert (shapes["attn/qkv/kernel/lora_a"], shapes["attn/qkv/kernel/lora_b"]) == (
        (16, 3),
        (3, 3, 2, 8),
    )
    assert (shapes["attn/out/kernel/lora_a"], shapes["attn/out/kernel/lora_b"]) == (
        (2, 8, 3),
        (3, 16),
    )
    stacked = {
        path: p.shape
        for path, p in one(
            lora(gpt(num_layers=2, scan_layers=True), "*/out/kernel", rank=3)
        ).params.items()
    }
    assert stacked == {
        "blocks/attn/out/kernel/lora_a": (2, 2, 8, 3),
        "blocks/attn/out/kernel/lora_b": (2, 3, 16),
    }


def test_a_weight_may_say_itself_which_dims_are_inputs():
    shapes = {path: p.shape for path, p in one(lora(llama(), LLAMA, rank=3)).params.items()}
    assert (shapes["blocks/query/lora_a"], shapes["blocks/query/lora_b"]) == (
        (2, 16, 3),
        (2, 3, 4, 4),
    )
    assert (shapes["blocks/key/lora_a"], shapes["blocks/key/lora_b"]) == ((2, 16, 3), (2, 3, 2, 4))
    assert (shapes["blocks/out/lora_a"], shapes["blocks/out/lora_b"]) == ((2, 4, 4, 3), (2, 3, 16))
    assert (shapes["blocks/down/lora_a"], shapes["blocks/down/lora_b"]) == ((2, 24, 3), (2, 3, 16))
    single = {
        path: p.shape
        for path, p in one(lora(llama(scan_layers=False), LLAMA, rank=3)).params.items()
    }
    assert (len(shapes), len(single)) == (14, 28)
    assert all(
        single[path.replace("blocks/", "blocks/1/")] == shape[1:] for path, shape in shapes.items()
    )
    given = one(
        lora(llama(scan_layers=False), {"blocks/*/query": "iio"}, rank=3)
    )  # what is asked for is done
    assert given.params["blocks/0/query/lora_a"].shape == (16, 4, 3)


def test_a_weight_without_a_bias_needs_a_letter_for_each_dim():
    with pytest.raises(
        ConfigError,
        match=r"'heads' has shape \(16, 2, 4\), and no bias tells .* \{'heads': 'iio'\}",
    ):
        one(lora(Net, "heads"))
    spec = one(lora(Net, {"heads": "ioo", "first/kernel": None}, rank=2))
    assert {path: p.shape for path, p in spec.params.items() if "heads" in path} == {
        "heads/lora_a": (16, 2),
        "heads/lora_b": (2, 2, 4),
    }
    for layout in ("io", "oii", "iii"):
        with pytest.raises(ConfigError, match=f"'{layout}' is no layout"):
            one(lora(Net, {"heads": layout}))
    with pytest.raises(ConfigError, match=r"'first/bias' has shape .* is no matrix"):
        one(lora(Net, "first/*"))


def test_a_bias_that_fits_in_two_ways_is_not_guessed():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.kernel, self.bias = nnx.Param(jnp.ones((4, 4, 5))), nnx.Param(jnp.ones((4, 5)))

    with pytest.raises(ConfigError, match="its bias fits in more ways than one"):
        one(lora(Stack, "kernel"))
    assert one(lora(Stack, {"kernel": "sio"}, rank=2)).params["kernel/lora_a"].shape == (4, 4, 2)


def test_a_shared_weight_is_adapted_wherever_it_is_used():
    module = build_module(lora(Net, "table/embedding", rank=2), 0)
    assert module.unembed is module.table.embedding
    assert module.unembed.shape == (64, 8)
    module.unembed.lora_b[...] = jnp.ones((2, 8))
    change = 8.0 * module.unembed.lora_a[...] @ jnp.ones((2, 8))
    np.testing.assert_allclose(
        module.table(jnp.arange(64)) - module.unembed.lora_base[...], change, rtol=1e-4, atol=1e-5
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


def test_patterns_that_fit_nothing_name_the_closest():
    with pytest.raises(
        ConfigError,
        match=r"lora: these patterns fit no parameter of the model:\n  'first/kernal'.*first/kernel",
    ):
        one(lora(Net, ["first/kernal"]))
    with pytest.raises(ConfigError, match="freeze: these patterns fit no parameter"):
        one(freeze(Net, "encoder/*"))
    with pytest.raises(ConfigError, match=r"no nnx\.Param that is not frozen"):
        one(freeze(Net, "*"))
    with pytest.raises(ConfigError, match="rank=0"):
        lora(Net, "first/kernel", rank=0)


def test_freezing_by_pattern_trains_the_rest():
    full, part = one(Net, optax.sgd(0.1)), one(freeze(Net, "table/*", "first/*"), optax.sgd(0.1))
    assert set(part.frozen) == {"table/embedding", "first/kernel", "first/bias"}
    (a, _), (b, _) = trained(full, 1), trained(part, 1)
    for path, leaf in named_leaves(b.params).items():
        np.testing.assert_allclose(leaf, named_leaves(a.params)[path], rtol=1e-5, atol=1e-6)
    assert checksums(b.frozen) == checksums(init_state(part, 0).frozen)


def test_a_base_in_bfloat16_takes_half_the_memory_and_the_sum_is_rounded_once():
    spec = one(lora(Net, KERNELS, rank=2, dtype="bfloat16"))
    assert {str(p.dtype) for p in spec.frozen.values()} == {"bfloat16"}
    assert {str(p.dtype) for p in spec.params.values()} == {"float32"}
    state, losses = trained(spec, 2, compute_dtype="bfloat16")
    assert np.isfinite(losses).all()
    kernel = spec.module(state).first.kernel
    whole = (
        kernel.lora_base[...].astype(jnp.float32) + 8.0 * kernel.lora_a[...] @ kernel.lora_b[...]
    )
    assert np.array_equal(kernel[...], whole.astype(jnp.bfloat16))


# Against peft


THEIRS = {  # our name of a matrix, and that of transformers
    "attn/qkv/kernel": "attn.c_attn",
    "attn/out/kernel": "attn.c_proj",
    "mlp/up/kernel": "mlp.c_fc",
    "mlp/down/kernel": "mlp.c_proj",
    **{name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "out")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def adapter_of_peft(known, when, path, shape):
    """An adapter by our path; those of a stack of layers one upon the other."""
    *name, part = path.removeprefix("blocks/").split("/")
    layers, name = ([int(name[0])], name[1:]) if name[0].isdecimal() else (range(shape[0]), name)
    stem, letter = "h" if "kernel" in name else "layers", part[-1].upper()
    found = [
        known[f"{when}/{stem}.{layer}.{THEIRS['/'.join(name)]}.lora_{letter}"].T for layer in layers
    ]
    return np.stack(found).reshape(shape)


@pytest.mark.parametrize(
    ("fixture", "file", "patterns", "changes"),
    [
        ("gpt2_tiny", "lora_tiny", "blocks/*/kernel", {"dropout": 0.0}),
        ("llama_tiny", "lora_llama_tiny", LLAMA, {"scan_layers": True}),
        pytest.param(
            "llama_tiny",
            "lora_llama_tiny",
            LLAMA,
            {"scan_layers": False, "remat": "block"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_adapters_and_merged_logits_equal_those_of_peft(fixture, file, patterns, changes):
    tiny, known = np.load(FIXTURES / f"{fixture}.npz"), np.load(FIXTURES / f"{file}.npz")
    settings = json.loads(known["settings"].tobytes())
    config = dataclasses.replace(config_from_hf(json.loads(tiny["config"].tobytes())), **changes)
    weights = params_from_hf(
        {name.removeprefix("weights/"): tiny[name] for name in tiny if name.startswith("weights/")},
        config,
    )
    model = lora(
        lambda rngs: model_of(config, rngs),
        patterns,
        rank=settings["rank"],
        alpha=settings["alpha"],
    )
    spec = one(model, optax.adamw(settings["lr"], weight_decay=settings["weight_decay"]))
    params = {
        path: adapter_of_peft(known, "start", path, p.shape) for path, p in spec.params.items()
    }
    assert sum(value.size for value in params.values()) == sum(
        known[name].size for name in known if name.startswith("start/")
    )
    fill = lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: params["/".join(k.key for k in path)], tree
    )  # noqa: E731
    state = dataclasses.replace(
        init_state(spec, 0),
        params=fill(spec.abstract.params),
        frozen=jax.tree.map(jnp.asarray, weights),
    )
    state = jax.device_put(state, spec.shardings)
    tokens = tiny["tokens"].astype(np.int32)
    step = make_train_step(spec, loss, {"tokens": tokens})
    losses = []
    for _ in known["losses"]:
        state, metrics = step(state, step.place({"tokens": tokens}))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, known["losses"], rtol=0, atol=1e-5)
    for path, leaf in named_leaves(state.params).items():
        np.testing.assert_allclose(
            leaf, adapter_of_peft(known, "end", path, leaf.shape), rtol=0, atol=1e-4, err_msg=path
        )
        assert np.abs(leaf - params[path]).max() > 1e-2, path
    np.testing.assert_allclose(spec.module(state)(tokens), known["logits"], rtol=0, atol=2e-4)


# Meshes and plans


def test_adapters_are_cut_like_their_weight():
    spec = on("data=2,model=2", 4, lora(gpt(), "blocks/*/kernel", rank=2))
    cut = {
        path.removeprefix("blocks/0/"): tuple(p.spec)
        for path, p in {**spec.params, **spec.frozen}.items()
        if "blocks/0" in path
    }
    assert cut["mlp/up/kernel"] == cut["mlp/up/kernel/lora_b"] == (None, "model")
    assert cut["mlp/up/kernel/lora_a"] == ()
    assert cut["attn/out/kernel/lora_a"] == ("model", None, None)
    assert cut["attn/qkv/kernel/lora_b"] == (None, None, "model", None)
    spec = on("data=2,model=2", 4, lora(llama(), LLAMA, rank=2))
    cut = {
        path.removeprefix("blocks/"): tuple(p.spec)
        for path, p in {**spec.params, **spec.frozen}.items()
    }
    assert (cut["query/lora_a"], cut["query/lora_b"]) == ((), (None, None, "model", None))
    assert (cut["out/lora_a"], cut["out/lora_b"]) == ((None, "model", None, None), ())


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
    found = verify(run, meshes=["data=4,model=2"], steps=2)
    assert found.ok, found


def test_a_plan_has_neither_gradients_nor_optimizer_states_of_the_base():
    config = GPTConfig(vocab_size=4096, max_length=16, num_layers=1, num_heads=2, width=256)
    run = Run(
        model=lambda rngs: GPT(config, rngs),
        loss=lambda model, batch: model(batch["tokens"]).mean(),
        optimizer=optim.adamw(1e-2),
        data=Batches({"tokens": TOKENS}, 2),
        steps=1,
        mesh=make_mesh("data=1", jax.devices()[:1]),
    )
    full = plan_run(run, "cpu:1")
    tuned = plan_run(
        dataclasses.replace(run, model=lora(run.model, "blocks/*/kernel", rank=4)), "cpu:1"
    )
    base = 4 * full.num_params
    assert full.memory.optimizer > 2 * base * 0.99
    assert tuned.memory.optimizer < 0.03 * base
    assert tuned.memory.parameters == pytest.approx(
        base, rel=0.02
    )  # the base itself, and the adapters
    assert (
        tuned.memory.temporaries < full.memory.temporaries - 4 * 4096 * 256
    )  # the gradient of the embedding alone


# Runs: what is saved, what is not, and the way back


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A safetensors file with all variables of a Net that no seed gives."""
    spec = one(lambda rngs: Net(rngs, width=256))
    state = init_state(spec, 7)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    leaves = {**named_leaves(state.params), **named_leaves(state.other)}
    save_file(
        {name.replace("/", "."): np.asarray(leaf) * 1.5 for name, leaf in leaves.items()}, path
    )
    return path


def net(classes=None):
    return lambda rngs: Net(rngs, classes, width=256)


def run_of(base, out, **changes):
    defaults = {
        "model": lora(net(), KERNELS, rank=2),
        "init_from": InitFrom(base),
        "steps": 4,
        "save_every": 2,
    }
    fixed = {
        "loss": loss,
        "optimizer": optim.adamw(1e-2, ema=0.5),
        "data": Batches({"tokens": TOKENS}, 8),
        "out": out,
    }
    return Run(**{**defaults, **fixed, "mesh": make_mesh("data=1", jax.devices()[:1]), **changes})


def fitted(run):
    return fit(run, console=QUIET, plan=False)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    run = run_of(base, tmp_path_factory.mktemp("tuned"))
    return run, fitted(run)


def test_a_resumed_run_equals_one_that_never_stopped_on_another_mesh_too(base, tuned, tmp_path):
    fitted(run_of(base, tmp_path / "a", steps=2))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    rest = fitted(run_of(base, tmp_path / "a"))
    assert jax.tree.all(jax.tree.map(np.array_equal, rest.state, tuned[1].state))
    other = fitted(
        run_of(base, tmp_path / "b", mesh=make_mesh("data=2,model=2", jax.devices()[:4]))
    )
    for path, leaf in named_leaves(tuned[1].state.params).items():
        np.testing.assert_allclose(
            named_leaves(other.state.params)[path], leaf, rtol=1e-4, atol=1e-5
        )


def test_checkpoints_hold_adapters_and_no_base(base, tuned):
    step = tuned[0].out / "checkpoints" / "4"
    with Checkpoints(step.parent) as checkpoints:
        restored = checkpoints.restore(tuned[1].spec, 4)
        leaves = checkpoints.metadata(4)["frozen"]["leaves"]
    assert restored.frozen == {}
    assert set(named_leaves(restored.params)) == {
        f"{path}/{part}" for path in KERNELS for part in ("lora_a", "lora_b")
    }
    assert leaves["first/kernel"]["from"] == "first/kernel"
    assert (
        directory_bytes(step) < base.stat().st_size * 0.6
    )  # with two moments, an average and the description of the run


def test_another_base_is_refused(base, tuned, tmp_path):
    weights = load_file(base)
    weights["second.kernel"].reshape(-1)[3] *= 1.0000002  # another last bit
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"beside other frozen weights.*'second/kernel' of 8 differ"
    ) as error:
        fitted(
            dataclasses.replace(
                tuned[0], steps=6, init_from=InitFrom(tmp_path / "other.safetensors")
            )
        )
    assert str(base) in str(error.value)
    assert "other.safetensors" in str(error.value)
    with pytest.raises(CheckpointError, match="begun afresh from the seed"):
        fitted(dataclasses.replace(tuned[0], steps=6, init_from=None))


def test_a_checksum_depends_on_every_bit_its_place_and_no_mesh():
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    of = lambda x: checksums({"w": x})["w"]  # noqa: E731
    cut = jax.device_put(
        values,
        jax.sharding.NamedSharding(
            make_mesh("data=4,model=2"), jax.sharding.PartitionSpec("data", "model")
        ),
    )
    assert of(cut) == of(values)
    other = values.view(np.uint32).copy()
    other[5, 5] ^= 1
    assert (
        len(
            {
                of(values),
                of(other.view(np.float32)),
                of(values.T.copy()),
                of(values[::-1].copy()),
                of(values.reshape(8, 16)),
            }
        )
        >= 4
    )
    for dtype in (np.float16, jnp.bfloat16, np.int8):
        assert of(values.astype(dtype)) != of(np.roll(values.astype(dtype), 1))
    assert of(values > 0) != of(values > 0.5)


def test_an_export_is_merged_and_computes_what_the_adapters_compute(base, tuned, tmp_path):
    run, result = tuned
    assert (
        main(["checkpoint", "export", str(run.out), "--out", str(tmp_path / "whole.safetensors")])
        == 0
    )
    plain = one(net())
    state, loaded = load_initial(InitFrom(tmp_path / "whole.safetensors"), plain, 0)
    assert loaded.fresh == loaded.left_out == ()
    assert logits(plain, state).tobytes() == logits(result.spec, result.state).tobytes()
    direct, _ = load_initial(
        InitFrom(run.out), plain, 0
    )  # a run of adapters is a whole model to whoever begins with it
    assert jax.tree.all(jax.tree.map(np.array_equal, direct, state))
    average, _ = load_initial(InitFrom(run.out, average=True), plain, 0)
    assert not np.array_equal(average.params["first"]["kernel"], state.params["first"]["kernel"])
    for name, options in {
        "last": [],
        "average": ["--average"],
        "trained": ["--average", "--trained-only"],
    }.items():
        assert (
            main(
                [
                    "checkpoint",
                    "export",
                    str(run.out),
                    "--out",
                    str(tmp_path / f"{name}.st"),
                    *options,
                ]
            )
            == 0
        )
        with safe_open(tmp_path / f"{name}.st", "np") as file:
            assert file.metadata().get("average") == (None if name == "last" else "true")
    exported = load_file(tmp_path / "average.st")
    assert all(
        np.array_equal(exported[path.replace("/", ".")], leaf)
        for path, leaf in named_leaves(average.params).items()
    )
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(run.out),
                "--trained-only",
                "--out",
                str(tmp_path / "adapters.safetensors"),
            ]
        )
        == 0
    )
    assert "first.kernel.lora_a" in load_file(tmp_path / "adapters.safetensors")
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(base.read_bytes())
    arguments = ["checkpoint", "export", str(run.out), "--base", str(moved)]
    assert main([*arguments, "--out", str(tmp_path / "again.safetensors")]) == 0
    assert all(
        np.array_equal(value, load_file(tmp_path / "whole.safetensors")[name])
        for name, value in load_file(tmp_path / "again.safetensors").items()
    )
    save_file({name: value + 1 for name, value in load_file(base).items()}, moved)
    assert main([*arguments, "--out", str(tmp_path / "wrong.safetensors")]) == 4
    assert not (tmp_path / "wrong.safetensors").exists()


@pytest.mark.parametrize(
    ("fixture", "patterns", "changes"),
    [
        pytest.param(
            "gpt2_tiny",
            "blocks/*/kernel",
            {"dropout": 0.0, "scan_layers": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2_tiny",
            "blocks/*/kernel",
            {"dropout": 0.0, "scan_layers": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("llama_tiny", LLAMA, {}, marks=pytest.mark.slow),
        pytest.param(
            "llama31_tiny", [*LLAMA, "tokens"], {"scan_layers": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_adapters_of_a_published_model_are_merged_for_transformers(
    fixture, patterns, changes, tmp_path
):
    tiny = np.load(FIXTURES / f"{fixture}.npz")
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_bytes(tiny["config"].tobytes())
    published = {
        name.removeprefix("weights/"): tiny[name] for name in tiny if name.startswith("weights/")
    }
    save_file(published, folder / "model.safetensors")
    config = dataclasses.replace(config_from_hf(json.loads(tiny["config"].tobytes())), **changes)
    plain = lambda rngs: model_of(config, rngs)  # noqa: E731
    run = run_of(folder, tmp_path / "run", model=lora(plain, patterns, rank=2), steps=2)
    result = fitted(run)
    moments = {name.partition("/")[2] for name in open_step(run.out / "checkpoints" / "2").leaves}
    assert not any(
        path.endswith(tuple(result.spec.frozen)) for path in moments
    )  # neither weights nor states of the base
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(run.out),
                "--format",
                "hf",
                "--out",
                str(tmp_path / "merged"),
            ]
        )
        == 0
    )
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in published.items()
    }
    changed = {name for name, value in merged.items() if not np.array_equal(value, published[name])}
    assert changed == {
        name
        for name in published
        if re.search(r"(_proj|c_attn|c_fc)\.weight$", name)
        or ("embed" in name and "tokens" in patterns)
    }
    spec = one(plain)
    state, _ = load_initial(InitFrom(tmp_path / "merged"), spec, 0)
    got, base = logits(spec, state), logits(spec, load_initial(InitFrom(folder), spec, 0)[0])
    np.testing.assert_array_equal(got, logits(result.spec, result.state))
    assert np.abs(got - base).max() > 1e-3


# A new head


def label_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["tokens"][:, 0] % 3
    ).mean()


@pytest.mark.slow
def test_a_new_head_begins_afresh_by_pattern_and_nothing_else_is_skipped(base, tmp_path):
    model = lora(net(classes=3), KERNELS, rank=2, train=("head/*",))
    init = InitFrom(base, rename={"head/*": None})
    spec = one(model)
    state, loaded = load_initial(init, spec, 3)
    assert set(loaded.fresh) == {
        "head/kernel",
        "head/bias",
        *(f"{path}/{part}" for path in KERNELS for part in ("lora_a", "lora_b")),
    }
    assert loaded.left_out == ()
    assert np.array_equal(
        state.params["head"]["kernel"], init_state(spec, 3).params["head"]["kernel"]
    )
    run = run_of(
        base, tmp_path, model=model, loss=label_loss, init_from=init, optimizer=optim.adamw(1e-2)
    )
    result = fitted(run)
    assert not np.array_equal(result.state.params["head"]["kernel"], state.params["head"]["kernel"])
    with pytest.raises(CheckpointError, match=r'(?s)head/kernel .*rename=\{"head/\*": None\}'):
        load_initial(InitFrom(base), spec, 3)
    with pytest.raises(ConfigError, match="these patterns fit no variable"):
        load_initial(InitFrom(base, rename={"top/*": None}), spec, 3)
    assert (
        main(["checkpoint", "export", str(tmp_path), "--out", str(tmp_path / "whole.safetensors")])
        == 0
    )
    plain = one(net(classes=3))
    merged, _ = load_initial(InitFrom(tmp_path / "whole.safetensors"), plain, 0)
    assert logits(plain, merged).tobytes() == logits(result.spec, result.state).tobytes()
