"""An expert axis shards the experts of a layer, and never changes the math.

Models train 20 float32 steps with dropout, packed documents and accumulation, on one device and on
meshes with an expert axis.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardwise import (
    Mean,
    MoE,
    Rules,
    Run,
    abstract_state,
    attention,
    evaluate,
    fit,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    moe,
    steps,
    verify,
)
from shardwise.axes import TENSOR
from shardwise.errors import ConfigError
from shardwise.kernels import experts
from shardwise.mesh import parse_mesh
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.models.moe import route
from shardwise.step import fsdp

ROWS, LENGTH, WIDTH, HIDDEN, EXPERTS = 16, 32, 32, 48, 8
LAYOUTS = [
    "expert=8",
    "data=2,expert=4",
    "data=4,expert=2",
    "fsdp=2,expert=4",
    "expert=4,model=2",
    "expert=2,model=4",
    "data=2,expert=2,model=2",
    "fsdp=2,expert=2,model=2",
    "data=2,fsdp=2,expert=2",
    "expert=4,context=2",
    "expert=2,context=4",
    "data=2,expert=2,context=2",
    "expert=2,context=2,model=2",
    "fsdp=2,expert=2,context=2",
    "data=8",
    "fsdp=4,model=2",
]


def batches(n):
    """Return random tokens, of which 16 occur, in sequences of up to three documents."""
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, 16, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segment_ids": segments,
    }


class Block(nnx.Module):
    def __init__(self, rngs, dropout, **options):
        self.qkv = nnx.LinearGeneral(WIDTH, (3, 4, WIDTH // 4), rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.moe = MoE(WIDTH, HIDDEN, num_experts=EXPERTS, rngs=rngs, **options)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, segment_ids):
        q, k, v = jnp.unstack(self.qkv(x), axis=2)
        x = x + attention(q, k, v, segment_ids=segment_ids).reshape(x.shape)
        y, routing = self.moe(self.norm(x))
        return x + self.dropout(y), routing


class Model(nnx.Module):
    def __init__(self, rngs, num_layers, **options):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, **options) for _ in range(num_layers)])
        self.head = nnx.Linear(WIDTH, 64, rngs=rngs)

    def __call__(self, tokens, segment_ids):
        x = self.embed(tokens)
        routings = []
        for block in self.blocks:
            x, routing = block(x, segment_ids)
            routings.append(routing)
        return self.head(x), routings


def loss(model, batch):
    logits, routings = model(batch["inputs"], batch["segment_ids"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    aux = sum(0.01 * r.balance + 0.001 * r.z for r in routings)
    dropped = sum(r.dropped for r in routings)
    return Mean(nats + aux[:, None]), {"aux": Mean(aux), "dropped": Mean(dropped)}


MIXTRAL = LlamaConfig(
    64, 2, 4, 2, WIDTH, HIDDEN, num_experts=EXPERTS, top_k=2, remat="block"
)


def mixtral_loss(model, batch):
    features, routing = model.features_and_routing(batch["inputs"])
    logits = features @ model.output()
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return Mean(nats + 0.01 * routing.balance[:, None])


@dataclass(frozen=True)
class Case:
    """Options of the layer, and of the step."""

    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 2
    has_context: bool = True
    model_size: int = 4
    dropout: float = 0.1
    num_layers: int = 2
    model: Any = None
    loss: Any = loss

    def build(self, rngs):
        if self.model is not None:
            return self.model(rngs)
        return Model(rngs, self.num_layers, dropout=self.dropout, **self.options)

    @property
    def layouts(self):
        sizes = {text: parse_mesh(text, 8) for text in LAYOUTS}
        return [
            text
            for text in LAYOUTS
            if (self.has_context or "context" not in sizes[text])
            and sizes[text].get("model", 1) <= self.model_size
        ]


CASES = {
    "dropless": Case(),
    "bias": Case({"bias_rate": 0.5, "top_k": 1}),
    "capacity": Case({"capacity": 1.0}, has_context=False),
    "without gates": Case({"gated": False, "activation": jax.nn.gelu, "top_k": 3}, 1),
    # Scanned layers that are computed again in the backward pass.
    "mixtral": Case(
        model=lambda rngs: Llama(MIXTRAL, rngs), loss=mixtral_loss, model_size=2
    ),
}


def make_step(case, mesh, accumulate=None, rules=None):
    rules = rules or Rules(fsdp_min_size=64)
    spec = abstract_state(case.build, optax.adamw(3e-3), mesh, rules)
    accumulate = accumulate or case.accumulate
    return make_train_step(spec, case.loss, batches(0), accumulate=accumulate)


def train(case, mesh, until=20, **options):
    """Return losses and gradient norms of 20 steps, the validation loss, and the biases."""
    step = make_step(case, mesh, **options)
    values = []
    for _, state, metrics in steps(
        step, init_state(step.spec, 3), batches, until=until
    ):
        last = state
        values.append((metrics["loss"], metrics["grad_norm"]))
    eval_step = make_eval_step(step.spec, case.loss, batches(0))
    # The last batch is not divisible by the devices.
    part = {name: array[:3] for name, array in batches(101).items()}
    validation = evaluate(eval_step, last, [batches(100), part])
    other = jax.device_get(last.other)
    return np.array(jax.device_get(values)), validation["loss"], other


def check(case, layouts, **options):
    one = make_mesh("data=1", jax.devices()[:1])
    expected, validation, _ = train(case, one)
    assert expected[-5:, 0].mean() < expected[:5, 0].mean()
    for text in layouts:
        values, sharded_validation, _ = train(case, make_mesh(text), **options)
        loss, norm = np.abs(values / expected - 1).max(axis=0)
        print(f"{text:26s} loss {loss:.1e}, gradient norm {norm:.1e}")
        # A norm is a sum of squares of thousands of gradients.
        assert loss < 2e-6, text
        assert norm < 2e-5, text
        assert sharded_validation == pytest.approx(validation, rel=2e-6), text


def test_an_expert_axis_trains_the_same():
    check(replace(CASES["bias"], num_layers=1), ["data=2,expert=2,model=2"])


@pytest.mark.slow
def test_named_collectives_train_the_same(monkeypatch):
    monkeypatch.setattr(fsdp, "PLATFORMS", {"cpu": TENSOR})
    layouts = ["fsdp=2,expert=4", "data=2,fsdp=2,expert=2", "fsdp=8"]
    layouts.append("fsdp=2,expert=2,model=2")
    check(CASES["mixtral"], layouts)
    check(CASES["capacity"], layouts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_expert_layout_trains_the_same(name):
    check(CASES[name], CASES[name].layouts)


@pytest.mark.slow
def test_experts_in_the_stages_of_a_pipeline():
    """Parameters of a stage are gathered before its loop, also experts."""
    layouts = ["stage=2,data=4", "stage=2,expert=4", "stage=2,expert=2,model=2"]
    check(CASES["mixtral"], [*layouts, "stage=2,fsdp=2,expert=2"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropless", "capacity"])
def test_experts_can_be_sharded_over_an_axis_that_shares_the_batch(name):
    rules = Rules(logical={"experts": "model", "mlp": None}, fsdp_min_size=64)
    check(CASES[name], ["data=2,model=4", "fsdp=4,model=2"], rules=rules)


@pytest.mark.slow
def test_biases_do_not_depend_on_micro_batches():
    # Each micro-batch has its own masks of dropout.
    case = replace(CASES["bias"], dropout=0.0)
    one = make_mesh("data=1", jax.devices()[:1])
    _, _, expected = train(case, one, until=4, accumulate=1)
    _, _, found = train(case, one, until=4, accumulate=4)
    biases = jax.tree.leaves(expected)
    assert max(np.abs(bias).max() for bias in biases) > 0.01
    for a, b in zip(biases, jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def batch_loss(model, batch):
    """The balancing loss of the whole batch instead of each sequence."""
    logits, routings = model(batch["inputs"], batch["segment_ids"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    balance = sum((r.load.mean(0) * r.probability.mean(0)).sum() for r in routings)
    return nats.mean() + 0.01 * EXPERTS * balance


def test_a_balance_of_the_whole_batch_is_refused_with_micro_batches():
    with pytest.raises(ConfigError, match="accumulate=2 would change the loss"):
        make_step(Case(loss=batch_loss), make_mesh("data=2,expert=4"), 2)


@pytest.mark.slow
def test_a_balance_of_the_whole_batch_is_exact_on_a_mesh():
    mesh = make_mesh("data=2,expert=4")
    values = [
        float(step(init_state(step.spec, 3), step.place(batches(0)))[1]["loss"])
        for step in (
            make_step(Case(loss=batch_loss), mesh, 1)
            for mesh in (mesh, make_mesh("data=1", jax.devices()[:1]))
        )
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_experts_stay_on_their_devices():
    mesh = make_mesh("data=2,expert=2,model=2")
    spec = make_step(CASES["dropless"], mesh).spec
    assert spec.at_use("blocks/0/moe/up").spec == P("expert", None, "model")
    assert not any(spec.at_use("blocks/0/qkv/kernel").spec)
    spec = make_step(CASES["dropless"], make_mesh("fsdp=2,expert=4")).spec
    stored = spec.params["blocks/0/moe/up"].spec
    assert stored == P("expert", "fsdp", None)
    assert spec.at_use("blocks/0/moe/up").spec == P("expert", None, None)
    # All devices of the expert axis use the same attention, and each stores a part of it.
    stored = spec.params["blocks/0/qkv/kernel"].spec
    assert ("fsdp", "expert") in stored
    assert not any(spec.at_use("blocks/0/qkv/kernel").spec)


def kernels(num_experts=EXPERTS):
    keys = jax.random.split(jax.random.key(1), 3)
    inner, outer = (num_experts, WIDTH, HIDDEN), (num_experts, HIDDEN, WIDTH)
    return tuple(
        jax.random.normal(key, shape) * shape[1] ** -0.5
        for key, shape in zip(keys, (inner, inner, outer), strict=True)
    )


def every_expert(x, logits, kernels, top_k):
    """The definition: every token passes through every expert; most have a weight of 0."""
    gate, up, down = kernels
    chosen, index = jax.lax.top_k(logits, top_k)
    one_hot = jax.nn.one_hot(index, logits.shape[-1])
    weights = (one_hot * jax.nn.softmax(chosen)[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate))
    hidden = hidden * jnp.einsum("btd,edf->btef", x, up)
    return jnp.einsum("btef,efd,bte->btd", hidden, down, weights)


@pytest.mark.parametrize(
    ("length", "top_k", "capacity"),
    [(40, 2, None), (7, 8, None), (1, 1, None), (40, 2, EXPERTS)],
)
def test_the_layer_computes_its_definition(length, top_k, capacity):
    """Nothing is dropped if every expert has a place for every token."""
    x = jax.random.normal(jax.random.key(0), (4, length, WIDTH))
    # All tokens prefer one of the experts, and one expert gets none.
    skew = jnp.zeros(EXPERTS).at[3].set(9.0).at[5].set(-99.0)
    router = jax.random.normal(jax.random.key(2), (WIDTH, EXPERTS))

    def ours(x, router, kernels):
        logits = x @ router + skew
        return moe(x, logits, kernels, top_k=top_k, capacity=capacity)[0]

    def definition(x, router, kernels):
        return every_expert(x, x @ router + skew, kernels, top_k)

    def value_and_gradients(function):
        def total(*arrays):
            out = function(*arrays)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

        gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
        return jax.tree.leaves(gradients(x, router, kernels()))

    for a, b in zip(
        value_and_gradients(ours), value_and_gradients(definition), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_capacity_drops_the_last_tokens_of_a_sequence():
    x = jax.random.normal(jax.random.key(0), (3, 10, WIDTH))
    logits = jax.random.normal(jax.random.key(2), (3, 10, EXPERTS))
    y, routing = moe(x, logits, kernels(), top_k=2, capacity=0.6)
    places = math.ceil(0.6 * 10 * 2 / EXPERTS)
    choices, _ = route(logits, 2)
    for row in range(3):
        used = dict.fromkeys(range(EXPERTS), 0)
        dropped = 0
        for token in range(10):
            expected = np.zeros(WIDTH)
            for expert, weight in zip(
                np.asarray(choices.experts[row, token]),
                np.asarray(choices.weights[row, token]),
                strict=True,
            ):
                used[expert] += 1
                if used[expert] > places:
                    dropped += 1
                    continue
                gate, up, down = (kernel[expert] for kernel in kernels())
                hidden = jax.nn.silu(x[row, token] @ gate) * (x[row, token] @ up)
                expected = expected + weight * (hidden @ down)
            np.testing.assert_allclose(y[row, token], expected, rtol=1e-5, atol=1e-5)
        assert float(routing.dropped[row]) == pytest.approx(dropped / 20)
        assert dropped


def test_a_capacity_per_sequence_needs_whole_sequences():
    with pytest.raises(ConfigError, match=r"capacity=1\.0 count the tokens"):
        make_step(CASES["capacity"], make_mesh("expert=4,context=2")).trace()


def test_the_router_computes_in_float32():
    batch = {"x": np.ones((8, 4, WIDTH), np.float32)}
    spec = abstract_state(
        lambda rngs: MoE(WIDTH, HIDDEN, num_experts=4, rngs=rngs),
        optax.sgd(0.1),
        make_mesh("expert=4,data=2"),
    )
    step = make_train_step(
        spec,
        lambda model, batch: Mean(model(batch["x"].astype("bfloat16"))[0].sum((1, 2))),
        batch,
        compute_dtype="bfloat16",
    )
    matmuls = step.traced.matmuls.flops
    tokens = 8 * 4
    assert matmuls["float32"] == 2 * tokens * WIDTH * 4
    # Two experts of three matmuls each per token, however the step computes them.
    assert matmuls["bfloat16"] == 2 * tokens * 2 * 3 * WIDTH * HIDDEN
    assert step.traced.inactive == 2 * 3 * WIDTH * HIDDEN


def run_of(model=lambda rngs: Model(rngs, 1, dropout=0.0), **options):
    options = {"mesh": "data=8", "steps": 2, "data": batches, **options}
    return Run(model=model, loss=loss, optimizer=optax.adamw(3e-3), **options)


@pytest.mark.slow
def test_tokens_that_are_counted_twice_are_found(monkeypatch):
    """A planted bug: each device counts the tokens of its first expert twice."""
    found = verify(run_of(), ["data=2,expert=4"], steps=1)
    assert found.ok
    assert "all 512 choices of experts are the same on every mesh" in found.lines()
    own_experts = experts._own_experts

    def with_bug(x, choice, weight, kernels, first, num_shards, activation):
        if num_shards > 1:
            weight = jnp.where(choice == first, 2 * weight, weight)
        return own_experts(x, choice, weight, kernels, first, num_shards, activation)

    monkeypatch.setattr(experts, "_own_experts", with_bug)
    jax.clear_caches()
    result = verify(run_of(), ["data=2,expert=4"], steps=1).results[0]
    assert result.first is not None
    assert result.choices.total == ROWS * LENGTH
    assert result.choices.changed == 0


@pytest.mark.slow
def test_tokens_that_change_experts_by_rounding_are_counted():
    def close(rngs):
        model = Model(rngs, 2, dropout=0.0)
        for block in model.blocks:
            router = block.moe.router
            noise = 1e-9 * jax.random.normal(rngs.params(), (WIDTH, EXPERTS - 1))
            router[...] = router[...].at[:, 1:].set(router[...][:, :1] + noise)
        return model

    (result,) = verify(run_of(close), ["model=8"], steps=1).results
    assert result.choices.total == 2 * ROWS * LENGTH
    assert 0 < result.choices.changed < result.choices.total
    assert result.choices.is_rounding
    assert result.as_json()["choices"]["gap"] < 1e-6


@pytest.mark.slow
def test_resume_with_and_without_expert_axes(tmp_path):
    meshes = ("data=2,expert=4", "fsdp=8", "expert=2,context=2,model=2", "expert=8")
    for number, mesh in enumerate(meshes, 1):
        resumed = fit(run_of(mesh=mesh, steps=2 * number, out=tmp_path))
    straight = fit(run_of(mesh="data=8", steps=2 * len(meshes)))
    assert resumed.metrics["loss"] == pytest.approx(straight.metrics["loss"], rel=2e-6)


@pytest.mark.slow
def test_blocks_that_are_not_full_do_not_look_like_repeated_work():
    """With few tokens, experts multiply more padding than tokens, on every mesh."""
    config = LlamaConfig(64, 4, 8, 8, 64, 128, num_experts=4, top_k=2)

    def llama_loss(model, batch):
        features, routing = model.features_and_routing(batch["inputs"])
        nats = optax.softmax_cross_entropy_with_integer_labels(
            features @ model.output(), batch["labels"]
        )
        return Mean(nats + 0.01 * routing.balance[:, None])

    run = Run(
        model=lambda rngs: Llama(config, rngs),
        loss=llama_loss,
        optimizer=optax.adamw(1e-3),
        data=lambda n: {
            name: batches(n)[name][:8, :16] for name in ("inputs", "labels")
        },
        steps=1,
        mesh="data=2,expert=2,context=2",
    )
    assert np.isfinite(fit(run).metrics["loss"])
