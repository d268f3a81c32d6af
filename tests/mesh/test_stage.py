"""A stage axis divides layers into the stages of a pipeline, and never changes the math.

Models train 20 float32 steps with dropout, packed documents, grouped key heads and accumulation, on
one device and on meshes with a stage axis.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Mean,
    Rules,
    Run,
    Stack,
    abstract_state,
    attention,
    evaluate,
    fit,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    plan_run,
    steps,
    verify,
)
from shardwise.errors import ConfigError
from shardwise.mesh import parse_mesh
from shardwise.models import stack
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.loss import linear_cross_entropy
from shardwise.models.sampling import generate

ROWS, LENGTH, LAYERS = 16, 32, 8
LAYOUTS = [
    "stage=8",
    "stage=4,data=2",
    "data=2,stage=4",
    "stage=2,data=4",
    "stage=2,fsdp=4",
    "stage=4,model=2",
    "fsdp=2,stage=2,data=2",
    "stage=2,data=2,model=2",
    "stage=2,fsdp=2,model=2",
    "stage=2,data=2,context=2",
    "stage=2,context=2,model=2",
]
GPT_CONFIG = GPTConfig(64, LENGTH, LAYERS, 4, 32, dropout=0.1, scan_layers=True)
LLAMA_CONFIG = LlamaConfig(64, LAYERS, 4, 2, 32, 96)


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
    accumulate: int = 1
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


def logits_loss(model, batch):
    logits = model(batch["inputs"])
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def packed_loss(model, batch):
    logits = model(batch["inputs"], batch["segment_ids"])
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


class Layer(nnx.Module):
    """A small layer in which tokens see the others of their document, with dropout."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, segment_ids, scale):
        heads = x[:, :, None]
        mixed = attention(heads, heads, heads, segment_ids=segment_ids)
        return x + scale * self.dropout(nnx.gelu(self.mix(mixed[:, :, 0])))


class Small(nnx.Module):
    """A model of plain Flax layers, with a stack."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.layers = Stack(Layer, 4, rngs)
        self.head = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, tokens, segment_ids):
        return self.head(self.layers(self.embed(tokens), segment_ids, scale=0.5))


CASES = {
    "small": Case(Small, packed_loss, model_size=1),
    "gpt": Case(lambda rngs: GPT(GPT_CONFIG, rngs), gpt_loss),
    "gpt-accumulate": Case(
        lambda rngs: GPT(replace(GPT_CONFIG, remat="block"), rngs),
        gpt_loss,
        accumulate=2,
    ),
    # Two key heads.
    "llama": Case(lambda rngs: Llama(LLAMA_CONFIG, rngs), logits_loss, model_size=2),
}


@cache
def compiled_step(name, layout, microbatches, rounds=1):
    """Return the compiled step of a case on a mesh, or on one device if there is no layout."""
    case = CASES[name]
    mesh = make_mesh(layout) if layout else make_mesh("data=1", jax.devices()[:1])
    spec = abstract_state(case.model, optax.adamw(3e-3), mesh, Rules(fsdp_min_size=64))
    options = {"accumulate": case.accumulate, "microbatches": microbatches}
    step = make_train_step(spec, case.loss, batches(0), rounds=rounds, **options)
    return step.compile()


@cache
def train(name, layout, microbatches=None, rounds=1):
    """Return losses and gradient norms of 20 steps, and the validation loss."""
    step = compiled_step(name, layout, microbatches, rounds)
    values = []
    for _, state, metrics in steps(step, init_state(step.spec, 3), batches, until=20):
        last = state
        values.append((metrics["loss"], metrics["grad_norm"]))
    eval_step = make_eval_step(step.spec, CASES[name].loss, batches(0))
    # The last batch is smaller, and the mesh does not divide it.
    part = {name: array[:5] for name, array in batches(101).items()}
    validation = evaluate(eval_step, last, [batches(100), part])
    return np.array(jax.device_get(values)), validation["loss"]


@cache
def gradients(name, layout):
    """Return the gradients of the first step."""
    step = compiled_step(name, layout, None)
    state = init_state(step.spec, 3)
    return jax.device_get(step.gradients(state, step.place(batches(0)))[0])


def check(name, layout, microbatches=None, rounds=1):
    expected, validation = train(name, None)
    assert expected[-5:, 0].mean() < expected[:5, 0].mean()
    values, sharded_validation = train(name, layout, microbatches, rounds)
    loss, norm = np.abs(values / expected - 1).max(axis=0)
    print(f"{name}, {layout}: loss {loss:.1e}, gradient norm {norm:.1e}")
    assert loss < 2e-6
    # A norm is a sum of squares of thousands of gradients.
    assert norm < 2e-5
    assert sharded_validation == pytest.approx(validation, rel=2e-6)


def test_a_stage_axis_trains_the_same():
    check("small", "stage=4,data=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in list(CASES)[1:] for layout in CASES[name].layouts],
)
def test_every_stage_layout_trains_the_same(name, layout):
    check(name, layout)
    pairs = zip(
        jax.tree.leaves(gradients(name, layout)),
        jax.tree.leaves(gradients(name, None)),
        strict=True,
    )
    difference = max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
    print(f"{name}, {layout}: gradients {difference:.1e}")
    assert difference < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, 8])
def test_the_number_of_microbatches_does_not_matter(microbatches):
    check("small", "stage=4,data=2", microbatches)


@pytest.mark.slow
def test_a_pipeline_with_two_rounds_trains_the_same():
    check("small", "stage=2,data=4", microbatches=4, rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "microbatches", "rounds"),
    [
        ("small", "stage=2,data=4", 2, 2),
        ("gpt", "stage=4,data=2", 8, 2),
        ("gpt", "stage=2,fsdp=4", 4, 2),
        ("gpt", "stage=2,data=2,context=2", 4, 4),
        ("llama", "stage=2,data=2,model=2", 8, 4),
    ],
)
def test_rounds_of_a_pipeline_do_not_matter(name, layout, microbatches, rounds):
    check(name, layout, microbatches, rounds)


def collectives(step):
    """Return the number of collectives inside and outside of loops, by kind."""
    text = step.program.as_text()
    inside, outside = Counter(), Counter()
    is_inside = True
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            # Every other computation that has collectives is the body of a loop.
            is_inside = not line.startswith("ENTRY")
        found = re.search(r" (all-[a-z-]+|reduce-scatter|collective-permute)\(", line)
        if found:
            (inside if is_inside else outside)[found[1]] += 1
    return inside, outside


def test_gradients_are_reduced_once_per_step():
    """The loop over ticks passes activations on, and does nothing else between devices."""
    inside, outside = collectives(compiled_step("small", "stage=4,data=2", None))
    assert set(inside) == {"collective-permute"}
    # Activations and segment ids forward, the gradient of the activations backward.
    assert inside["collective-permute"] <= 4
    assert outside["all-reduce"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_loop_of_a_transformer_only_passes_activations_on(name):
    for layout in ("stage=4,data=2", "stage=2,data=4", "stage=2,fsdp=4"):
        inside, _ = collectives(compiled_step(name, layout, None))
        assert set(inside) == {"collective-permute"}, layout
    # Layers that belong to other stages with two rounds move before and after the loop.
    inside, outside = collectives(compiled_step(name, "stage=4,data=2", 8, 2))
    assert set(inside) == {"collective-permute"}
    assert outside["all-to-all"] > 0


def test_stages_hold_their_layers():
    """The parameters are the same arrays as without stages, sharded along their layers."""
    model = CASES["llama"].model
    plain, staged = (
        abstract_state(model, optax.adamw(1e-3), make_mesh(text))
        for text in ("data=8", "stage=4,data=2")
    )
    shapes = {name: (x.shape, x.dtype) for name, x in plain.params.items()}
    assert {name: (x.shape, x.dtype) for name, x in staged.params.items()} == shapes
    for name, placement in staged.params.items():
        axes = ("stage",) if name.startswith("blocks/") else ()
        assert tuple(axis for axis in placement.spec if axis) == axes, name
        assert staged.opt_state[f"0/mu/{name}"].spec == placement.spec
    rules = Rules(paths={"blocks/up": (None, None, "model")})
    ruled = abstract_state(model, optax.sgd(1.0), make_mesh("stage=4,model=2"), rules)
    assert tuple(ruled.params["blocks/up"].spec) == ("stage", None, "model")


def run_of(model, loss=logits_loss, **options):
    options = {"mesh": "stage=4,data=2", "steps": 2, "data": batches, **options}
    return Run(model=model, loss=loss, optimizer=optax.adamw(3e-3), **options)


@pytest.mark.slow
def test_idle_time_follows_the_formula():
    """Stages without a microbatch compute too, so the compiled FLOPs show the idle time."""

    def planned(mesh, **options):
        run = run_of(CASES["llama"].model, mesh=mesh, **options)
        return plan_run(run, "cpu:8")

    without = planned("data=8")
    for microbatches, rounds in ((4, 1), (8, 1), (8, 2)):
        plan = planned("stage=4,data=2", microbatches=microbatches, rounds=rounds)
        assert plan.bubble == 3 / (microbatches * rounds + 3)
        # The embedding and the output are not in the pipeline.
        outside = 3 * 2 * LLAMA_CONFIG.vocab_size * LLAMA_CONFIG.width * ROWS * LENGTH
        in_pipeline = [p.flops - outside / 8 for p in (without, plan)]
        assert in_pipeline[0] / in_pipeline[1] == pytest.approx(1 - plan.bubble, 0.03)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.embed(tokens)


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x, segment_ids, scale):
        return self.norm(x)


class WithStatistics(Small):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = Stack(Normalized, 4, rngs)


class CenteredLayer(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(16))

    def __call__(self, x, segment_ids, scale):
        return (x - x.mean(0)) * self.scale


class Centered(Small):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = Stack(CenteredLayer, 4, rngs)


def small_with(layer):
    """Return a function that builds the small model with another kind of layers."""

    def build(rngs):
        model = Small(rngs)
        model.layers = Stack(layer, 4, rngs)
        return model

    return build


class NumberedLayer(Layer):
    def __call__(self, x, segment_ids, scale):
        return super().__call__(x, segment_ids, scale / len(x))


class WithTable(Small):
    """Passes a table of positions as if it had an entry per example."""

    def __call__(self, tokens, segment_ids):
        return self.head(self.layers(self.embed(tokens), jnp.ones((LENGTH, 16)), 0.5))


class SometimesLayer(nnx.Module):
    """A layer that is skipped for some examples, with a key for each of them."""

    def __init__(self, rngs):
        self.mix = nnx.Linear(16, 16, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x, segment_ids, scale):
        keys = jax.random.split(self.rngs.dropout(), len(x))
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
        return x + kept[:, None, None] * nnx.gelu(self.mix(x))


class FoldedLayer(SometimesLayer):
    def __call__(self, x, segment_ids, scale):
        key = self.rngs.dropout()
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
        return x + kept[:, None, None] * nnx.gelu(self.mix(x))


def test_keys_of_examples_do_not_depend_on_the_microbatch():
    found = [
        fit(
            run_of(small_with(SometimesLayer), packed_loss, mesh=mesh, steps=2)
        ).metrics["loss"]
        for mesh in ("data=8", "stage=4,data=2")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("mesh", ["data=8", "stage=4,data=2"])
def test_an_argument_of_a_stack_without_examples_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"shape \[32, 16\], .* each of the 16 examp"):
        fit(run_of(WithTable, packed_loss, mesh=mesh))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of(Plain), r"Plain has none. Change three lines(.|\n)*Stack\(Layer"),
        (
            run_of(lambda rngs: GPT(replace(GPT_CONFIG, scan_layers=False), rngs)),
            "GPT has none. Use scan_layers=True",
        ),
        (
            run_of(lambda rngs: Llama(replace(LLAMA_CONFIG, num_layers=6), rngs)),
            "stack of 6 layers, which is not divisible by mesh axis 'stage'",
        ),
        (
            run_of(Small, packed_loss, rounds=3),
            r"4 layers cannot be divided into 4 stages times 3 rounds. Use rounds=1",
        ),
        (
            run_of(Small, packed_loss, microbatches=6),
            "microbatches=6 is not a multiple of the 4 stages",
        ),
        (
            run_of(WithStatistics, packed_loss, coupled_examples="separate"),
            "variable 'norm/mean' of type BatchStat",
        ),
        (run_of(Centered, packed_loss), "sub of .* combines examples"),
        (
            run_of(small_with(FoldedLayer), packed_loss),
            "keys from the numbers of the examples",
        ),
        (
            run_of(small_with(NumberedLayer), packed_loss),
            "an example depends on their number",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        fit(run)


@pytest.mark.slow
def test_segment_ids_of_another_microbatch_are_found(monkeypatch):
    """A planted bug: segment ids stay where they are, and activations move on."""
    run = run_of(Small, packed_loss)
    assert verify(run, meshes=["stage=4,data=2"], steps=2).ok
    ticks = stack._ticks

    def with_bug(schedule, run_stage, layers, x, examples):
        wrong = jax.tree.map(lambda leaf: jnp.roll(leaf, 4, axis=0), examples)
        return ticks(schedule, run_stage, layers, x, wrong)

    monkeypatch.setattr(stack, "_ticks", with_bug)
    result = verify(run, meshes=["stage=4,data=2"], steps=2)
    assert not result.ok


@pytest.mark.slow
def test_resume_with_and_without_stages(tmp_path):
    def model(rngs):
        return GPT(GPT_CONFIG, rngs)

    meshes = ("stage=4,data=2", "data=8", "fsdp=2,stage=2,data=2", "stage=8")
    for number, mesh in enumerate(meshes, 1):
        resumed = fit(
            run_of(model, gpt_loss, mesh=mesh, steps=2 * number, out=tmp_path)
        )
    straight = fit(run_of(model, gpt_loss, mesh="data=8", steps=2 * len(meshes)))
    assert resumed.metrics["loss"] == pytest.approx(straight.metrics["loss"], rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sampling_with_stages(name):
    prompt = jnp.arange(8)[None]

    def sample(model):
        return str(generate(model, prompt, 8, jax.random.key(0), 0.0).tolist())

    texts = {
        fit(
            run_of(CASES[name].model, CASES[name].loss, mesh=mesh, sample=sample)
        ).sample
        for mesh in ("data=8", "stage=4,data=2")
    }
    assert len(texts) == 1
