"""A context axis shards the tokens of each sequence, and never changes the math.

Models train 20 float32 steps with dropout, packed documents, grouped key heads and accumulation, on
one device and on meshes with a context axis.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import (
    Batches,
    Mean,
    Rules,
    Run,
    Tokens,
    abstract_state,
    attention,
    attention_fn,
    evaluate,
    fit,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    plan_run,
    steps,
)
from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.kernels.mask import Mask
from shardwise.mesh import parse_mesh
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.loss import chunked_cross_entropy, linear_cross_entropy
from shardwise.models.sampling import generate
from shardwise.plan.compile import find_idle_axes
from shardwise.plan.plan import Memory, Plan
from shardwise.recipe import load_recipe
from shardwise.run import prepare
from shardwise.sharding import activations_on

ROWS, LENGTH = 8, 32
LAYOUTS = [
    "context=8",
    "data=2,context=4",
    "data=4,context=2",
    "fsdp=2,context=4",
    "context=4,model=2",
    "context=2,model=4",
    "data=2,context=2,model=2",
    "fsdp=2,context=2,model=2",
    "data=2,fsdp=2,context=2",
    "context=2,data=2,fsdp=2",
]
GPT_CONFIG = GPTConfig(64, LENGTH, 2, 4, 32, dropout=0.1)
LLAMA_CONFIG = LlamaConfig(64, 2, 4, 2, 32, 96)


def batches(n):
    """Return random tokens, of which 16 occur, in sequences of up to three documents."""
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, 16, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1).astype(np.int32)
    starts = np.argmax(segments[:, :, None] == segments[:, None, :], axis=2)
    return {
        "inputs": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segment_ids": segments,
        "positions": (np.arange(LENGTH) - starts).astype(np.int32),
        "weight": rng.uniform(0.5, 1, ROWS).astype(np.float32),
    }


@dataclass(frozen=True)
class Case:
    """A model and its loss; `model_size` is the largest model axis that the model can use."""

    model: Any
    loss: Any
    accumulate: int = 2
    coupled_examples: str = "exact"
    model_size: int = 4

    @property
    def layouts(self):
        return [
            text
            for text in LAYOUTS
            if parse_mesh(text, 8).get("model", 1) <= self.model_size
        ]


def gpt_loss(model, batch):
    features, table = model.features(
        batch["inputs"], batch["segment_ids"], batch["positions"]
    )
    nats = linear_cross_entropy(features, table, batch["labels"])
    weights = jnp.broadcast_to(batch["weight"][:, None], nats.shape)
    return Mean(nats * weights, weights)


def chunked_loss(model, batch):
    features, table = model.features(batch["inputs"])
    labels = batch["labels"]
    return Mean(chunked_cross_entropy(features, table, labels, 4), labels.size)


def logits_loss(model, batch):
    logits = model(batch["inputs"])
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


class Plain(nnx.Module):
    """A model of plain Flax layers that knows nothing about a mesh, without attention."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, 32)))
        self.mlp = nnx.Linear(32, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[jnp.arange(tokens.shape[1])]
        # The mean of all earlier tokens: the only operation across tokens.
        counts = jnp.arange(1, tokens.shape[1] + 1)[:, None]
        x = x + jnp.cumsum(nnx.gelu(self.mlp(x)), axis=1) / counts
        return self.head(self.dropout(x))


CASES = {
    "gpt-small": Case(
        lambda rngs: GPT(replace(GPT_CONFIG, num_layers=1), rngs), gpt_loss
    ),
    "gpt": Case(lambda rngs: GPT(GPT_CONFIG, rngs), gpt_loss),
    "gpt-scan": Case(
        lambda rngs: GPT(replace(GPT_CONFIG, scan_layers=True, remat="block"), rngs),
        gpt_loss,
    ),
    "gpt-chunks": Case(lambda rngs: GPT(GPT_CONFIG, rngs), chunked_loss, accumulate=1),
    # Two key heads, and no annotations.
    "llama": Case(lambda rngs: Llama(LLAMA_CONFIG, rngs), logits_loss, model_size=2),
    "plain": Case(Plain, logits_loss, model_size=1),
}


def make_step(case, mesh, accumulate=None):
    spec = abstract_state(case.model, optax.adamw(3e-3), mesh, Rules(fsdp_min_size=64))
    return make_train_step(
        spec,
        case.loss,
        batches(0),
        accumulate=accumulate or case.accumulate,
        coupled_examples=case.coupled_examples,
    )


def train(case, mesh):
    """Return losses and gradient norms of 20 steps, and the validation loss."""
    step = make_step(case, mesh)
    values = []
    for _, state, metrics in steps(step, init_state(step.spec, 3), batches, until=20):
        last = state
        values.append((metrics["loss"], metrics["grad_norm"]))
    eval_step = make_eval_step(step.spec, case.loss, batches(0))
    validation = evaluate(eval_step, last, [batches(100), batches(101)])
    return np.array(jax.device_get(values)), validation["loss"]


def check(case, layouts):
    expected, validation = train(case, make_mesh("data=1", jax.devices()[:1]))
    assert expected[-5:, 0].mean() < expected[:5, 0].mean()
    for text in layouts:
        values, sharded_validation = train(case, make_mesh(text))
        loss, norm = np.abs(values / expected - 1).max(axis=0)
        print(f"{text:26s} loss {loss:.1e}, gradient norm {norm:.1e}")
        # A norm is a sum of squares of thousands of gradients.
        assert loss < 2e-6, text
        assert norm < 2e-5, text
        assert sharded_validation == pytest.approx(validation, rel=2e-6), text


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Four heads on two context devices exchange heads, on four with a model axis they do not.
        ("gpt-small", "data=2,context=2,model=2"),
        pytest.param("llama", "context=4,model=2", marks=pytest.mark.slow),
    ],
)
def test_a_context_axis_trains_the_same(name, layout):
    check(CASES[name], [layout])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_context_layout_trains_the_same(name):
    check(CASES[name], CASES[name].layouts)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("gpt-small", "data=2,context=4", marks=pytest.mark.slow),
        pytest.param("llama", "fsdp=2,context=4", marks=pytest.mark.slow),
    ],
)
def test_the_work_is_divided(name, layout):
    """A device does an eighth of the arithmetic. Flattened sequences would be computed by all."""
    case = replace(CASES[name], accumulate=1)
    one, many = (
        make_step(case, mesh).compile().program.cost_analysis()["flops"]
        for mesh in (make_mesh("data=1", jax.devices()[:1]), make_mesh(layout))
    )
    assert many * 8 < 1.15 * one


class Flattened(Plain):
    """Reshapes sequences to one matrix, which cannot stay sharded over context."""

    def __call__(self, tokens):
        x = self.embed(tokens).reshape(-1, 32)
        for _ in range(3):
            x = x + nnx.gelu(self.mlp(x))
        return self.head(x).reshape(*tokens.shape, -1)


@pytest.mark.parametrize(("model", "is_idle"), [(Plain, False), (Flattened, True)])
def test_an_axis_that_divides_no_arithmetic_is_refused(model, is_idle):
    run = Run(
        model=model,
        loss=logits_loss,
        optimizer=optax.adamw(3e-3),
        data=batches,
        steps=2,
        mesh="data=2,context=4",
    )
    if not is_idle:
        fit(run)
        return
    with pytest.raises(ConfigError, match=r"'context' \(size 4\).*4\.\d times"):
        fit(run)


def test_an_axis_is_not_idle_because_a_kernel_pads_or_recomputes():
    plan = Plan(
        target="cpu:8",
        chip="cpu",
        mesh={"data": 2, "context": 4},
        options={},
        batch={},
        items=1,
        unit="tokens",
        num_params=1,
        memory=Memory(),
        limit=1.0,
        fits=True,
        buffers=[],
        # Five times the arithmetic of the model.
        flops=5 / 8,
        model_flops=1.0,
        bytes=0.0,
        traffic=[],
        times=None,
        peak_flops=None,
        leaves=[],
    )
    (finding,) = find_idle_axes(plan, Rules())
    assert finding.name == "idle-axis"
    assert not find_idle_axes(replace(plan, step_flops=5.0), Rules())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt-scan", "llama"])
def test_the_traced_step_has_the_arithmetic_of_all_devices(name):
    """Also if layers are computed again, and in the `shard_map` of a ring."""
    run = Run(
        model=CASES[name].model,
        loss=CASES[name].loss,
        optimizer=optax.adamw(3e-3),
        data=batches,
        steps=2,
        mesh="context=8",
    )
    plan = plan_run(run, "cpu:8")
    assert 0.9 < plan.flops * 8 / plan.step_flops < 1.1


@pytest.mark.slow
def test_chunks_of_the_llama_loss_move_no_tokens():
    path = Path(__file__).parents[2] / "recipes" / "llama.py"
    recipe = load_recipe(path, "recipe")
    plans = [
        plan_run(recipe(mesh="data=2,context=4", loss_chunks=chunks), "cpu:8")
        for chunks in (1, 4)
    ]
    moved = [
        {
            traffic.kind: traffic.count
            for traffic in plan.traffic
            if "all-to" in traffic.kind
        }
        for plan in plans
    ]
    assert moved[0] == moved[1] != {}


MASKS = {
    "causal": {},
    "window": {"window": 9},
    "both sides": {"causal": False},
    "window on both sides": {"causal": False, "window": 9},
}


def heads(batch_size=8, length=64):
    """Return queries of 4 heads, keys and values of 2, and the documents of the tokens."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (batch_size, length, count, 16))
        for key, count in zip(keys, (4, 2, 2), strict=True)
    )
    segments = jax.random.randint(keys[0], (batch_size, length), 0, 5)
    return q, k, v, jnp.sort(segments, axis=1)


def value_and_gradients(function, mesh=None):
    """Return a number that depends on all outputs of attention, and its gradients."""
    *arrays, segments = heads()

    def total(*arrays):
        out = function(*arrays, segments)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    def compute(*arrays):
        with nullcontext() if mesh is None else activations_on(mesh, Rules()):
            return jax.value_and_grad(total, (0, 1, 2))(*arrays)

    if mesh is not None:
        sharding = NamedSharding(mesh, PartitionSpec("data", "context"))
        arrays = jax.device_put(arrays, sharding)
    return jax.tree.leaves(jax.jit(compute)(*arrays))


# Four heads are exchanged on 2 and 4 devices. On 8 devices there is a ring.
QUICK = {(4, "causal"), (8, "window"), (8, "both sides")}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product((2, 4, 8), MASKS)
    ],
)
def test_attention_is_that_of_jax(size, name):
    options = MASKS[name]
    mesh = make_mesh(f"data={8 // size},context={size}")
    mask = Mask(**options)

    def reference(q, k, v, segments):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=segments[:, None, :, None] == segments[:, None, None, :],
            is_causal=mask.causal,
            local_window_size=mask.local_window,
            implementation="xla",
        )

    def ours(q, k, v, segments):
        return attention(q, k, v, segment_ids=segments, **options)

    expected = value_and_gradients(reference)
    for found in (value_and_gradients(ours), value_and_gradients(ours, mesh)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


class Encoder(nnx.Module):
    """Flax's own attention layer, with dropout of the attention weights."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4,
            in_features=32,
            dropout_rate=0.1,
            decode=False,
            attention_fn=attention_fn,
            rngs=rngs,
        )
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x, mask=nnx.make_causal_mask(tokens)))


@pytest.mark.slow
def test_flax_attention_with_dropout_and_a_mask():
    check(Case(Encoder, logits_loss), ["data=2,context=4"])


def test_too_few_heads_for_dropout_are_refused():
    run = Run(
        model=Encoder,
        loss=logits_loss,
        optimizer=optax.sgd(0.1),
        data=batches,
        steps=1,
        mesh="context=8",
    )
    with pytest.raises(ConfigError, match="the 4 heads of attention are not divisible"):
        fit(run)


def test_tokens_that_cannot_be_divided_are_refused():
    def data(n):
        return {"inputs": np.zeros((8, 30), np.int32), "labels": np.zeros(8, np.int32)}

    run = Run(
        model=lambda rngs: nnx.Embed(64, 8, rngs=rngs),
        loss=lambda model, batch: Mean(model(batch["inputs"]).mean((1, 2))),
        optimizer=optax.sgd(0.1),
        data=data,
        steps=1,
        mesh="data=2,context=4",
    )
    with pytest.raises(
        ConfigError, match=r"'inputs' of the batch has 30 tokens.*size 4.*28 tokens"
    ):
        prepare(run)
    flat = replace(
        run,
        data=lambda n: {"x": np.zeros(8, np.int32)},
        loss=lambda model, batch: Mean(model(batch["x"]).mean(1)),
    )
    with pytest.raises(ConfigError, match="all arrays of this batch have one dim"):
        prepare(flat)


@pytest.mark.slow
def test_a_run_on_a_context_axis_is_sampled(tmp_path, capsys):
    """By the run itself, on its mesh, and by the command, on one device and on a mesh."""
    config = GPTConfig(256, LENGTH, 1, 4, 32)
    text = np.frombuffer(b"the cat sat on the mat and " * 40, np.uint8)
    prompt = np.frombuffer(b"the cat ", np.uint8)[None].astype(np.int32)

    def sample(model):
        rows = generate(model, prompt, 20, jax.random.key(0), temperature=0)
        return bytes(np.asarray(rows[0], np.uint8)).decode(errors="replace")

    run = Run(
        model=lambda rngs: GPT(config, rngs),
        loss=logits_loss,
        optimizer=optax.adamw(1e-2),
        data=Batches(Tokens(text, LENGTH), 8),
        steps=30,
        mesh="data=2,context=4",
        sample=sample,
        out=tmp_path / "run",
        unit="bytes",
    )
    written = fit(run).sample
    assert written.startswith("the cat ")
    options = ["--prompt", "the cat ", "--tokens", "20", "--temperature", "0"]
    for mesh in ([], ["--mesh", "data=2,context=4"], ["--mesh", "context=8"]):
        assert main(["sample", str(tmp_path / "run"), *options, *mesh]) == 0
        assert capsys.readouterr().out.rstrip("\n") == written.rstrip("\n"), mesh


def test_context_axes_store_parameters_sharded_where_fsdp_does():
    """All context devices use the same parameters, so each stores a part of them."""
    model = CASES["llama"].model
    for text, axes in (
        ("fsdp=2,context=4", ("fsdp", "context")),
        ("data=2,context=4", None),
    ):
        spec = abstract_state(model, optax.adamw(1e-3), make_mesh(text))
        stored = spec.params["blocks/up"].spec
        assert not any(stored) if axes is None else stored[1] == axes, text
        assert not any(spec.at_use("blocks/up").spec)
        assert spec.opt_state["0/mu/blocks/up"].spec == stored


def test_arrays_without_tokens_are_not_sharded_over_context():
    step = make_step(CASES["gpt"], make_mesh("data=2,context=4"))
    placed = step.place(batches(0))
    specs = {name: tuple(array.sharding.spec) for name, array in placed.items()}
    assert specs["inputs"] == specs["positions"] == ("data", "context")
    assert specs["weight"] == ("data",)
