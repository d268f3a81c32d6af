"""Runs with an accelerated loss are those with the loss itself, within rounding."""

import inspect
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from benchmarks.plain_gpt import Block, PlainGPT, plain_loss
from shardwise import Mean, Run, accelerate, evaluate, fit, init_state, make_mesh
from shardwise.console import Console
from shardwise.loop import steps
from shardwise.models.gpt import GPTConfig
from shardwise.run import prepare
from shardwise.step.evaluate import make_eval_step
from shardwise.tracing.jaxpr import inner_jaxprs

CONFIG = GPTConfig(vocab_size=48, max_length=16, num_layers=2, num_heads=2, width=16)
# What the accelerated step of a GPT with two layers calls.
LAYERS = {
    "look_up": 2,
    "layer_norm": 1,
    "add_layer_norm": 4,
    "linear_layers": 2,
    "attention_layer": 2,
    "linear_layer": 2,
    "gelu_mlp": 2,
    "linear_token_losses": 1,
}


def batch(n, rows=8):
    tokens = np.random.default_rng(n).integers(0, CONFIG.vocab_size, (rows, 17))
    return {
        "inputs": tokens[:, :-1].astype(np.int32),
        "labels": tokens[:, 1:].astype(np.int32),
    }


def gpt_run(**options):
    run = Run(
        model=partial(PlainGPT, CONFIG, None),
        loss=plain_loss,
        optimizer=optax.adam(1e-2),
        data=batch,
        steps=3,
    )
    return replace(run, **options)


def losses_of(run):
    """Return the losses of three steps, and the state after them."""
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    losses = []
    for _, last, metrics in steps(prepared.step, state, prepared.batches, until=3):
        losses.append(float(metrics["loss"]))
        state = last
    return losses, state


def names_in(jaxpr, found):
    """Count the jitted functions in a jaxpr by name, not those inside of other ones."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jit":
            found[equation.params["name"]] += 1
        else:
            for inner in inner_jaxprs(equation.params):
                names_in(inner, found)
    return found


def layers_of(loss, model):
    graphdef, state = nnx.split(model)
    traced = jax.make_jaxpr(
        lambda state, batch: loss(nnx.merge(graphdef, state), batch).total
    )(state, batch(0))
    found = names_in(traced.jaxpr, Counter())
    return {name: count for name, count in found.items() if name in LAYERS}


def test_all_layers_of_a_plain_gpt_are_found():
    model = PlainGPT(CONFIG, None, nnx.Rngs(0))
    assert layers_of(accelerate(plain_loss), model) == LAYERS
    assert layers_of(plain_loss, model) == {}


def one_device():
    return make_mesh("data=1", devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        pytest.param("one", None, marks=pytest.mark.slow),
        pytest.param("one", "bfloat16", marks=pytest.mark.slow),
        ("data=4,fsdp=2", None),
        pytest.param("data=4,fsdp=2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("data=4,context=2", None, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_same_losses(mesh, dtype):
    run = gpt_run(mesh=one_device() if mesh == "one" else mesh, compute_dtype=dtype)
    expected, _ = losses_of(run)
    accelerated = replace(run, loss=accelerate(plain_loss))
    actual, state = losses_of(accelerated)
    np.testing.assert_allclose(actual, expected, rtol=2e-5 if dtype is None else 2e-3)
    text = str(prepare(accelerated).step.trace().jaxpr)
    assert set(LAYERS) <= set(re.findall(r"name=(\w+)", text))
    assert state.params["tokens"]["embedding"].dtype == jnp.float32


@pytest.mark.slow
def test_checkpoints_fit_with_and_without(tmp_path):
    """A run starts plain, resumes accelerated, and ends plain again."""
    run = gpt_run(mesh="data=4,fsdp=2", out=tmp_path / "run", save_every=1)
    losses = {"plain": plain_loss, "accelerated": accelerate(plain_loss)}
    console = Console(quiet=True)
    for n, name in enumerate(("plain", "accelerated", "plain"), 1):
        result = fit(
            replace(run, loss=losses[name], steps=n), console=console, plan=False
        )
    expected, state = losses_of(gpt_run(mesh="data=4,fsdp=2"))
    np.testing.assert_allclose(result.metrics["loss"], expected[-1], rtol=2e-5)
    assert jax.tree.structure(result.state.params) == jax.tree.structure(state.params)


@pytest.mark.slow
def test_an_evaluation_has_the_same_loss():
    prepared = prepare(gpt_run(mesh="data=8"))
    state = init_state(prepared.spec, 0)
    values = [
        evaluate(make_eval_step(prepared.spec, loss, batch(0)), state, [batch(0, 6)])
        for loss in (plain_loss, accelerate(plain_loss))
    ]
    np.testing.assert_allclose(values[0]["loss"], values[1]["loss"], rtol=1e-5)


class Noisy(nnx.Module):
    """A model with dropout, statistics of the batch, and intermediate values."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.batch_norm(x)
        hidden = self.dropout(nnx.gelu(self.up(self.norm(x))))
        self.hidden = nnx.Intermediate(hidden)
        return x + self.dropout(self.down(hidden))


def test_random_numbers_and_statistics_are_the_same():
    def loss(model, batch, rngs, step):
        noise = jax.random.normal(rngs.noise(), batch.shape)
        y = model(batch + 0.1 * noise)
        return Mean((y**2).mean(-1)), {"step": Mean(step * jnp.ones(len(batch)))}

    data = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    run = Run(
        model=Noisy,
        loss=lambda model, batch, rngs: loss(model, batch, rngs, 0)[0],
        optimizer=optax.sgd(0.1),
        data=lambda n: data,
        steps=3,
        mesh="data=8",
    )
    expected, before = losses_of(run)
    actual, after = losses_of(replace(run, loss=accelerate(run.loss)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


class Stacked(nnx.Module):
    """Blocks in a scan, computed again in the backward pass."""

    def __init__(self, policy, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: Block(CONFIG, None, rngs))
        self.blocks = make(rngs.split(2))
        self.policy = policy

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat(policy=self.policy)
        def apply(block, x):
            return block(x)

        return apply(self.blocks, x)


@pytest.mark.parametrize(
    "saves_matmuls", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_layers_are_found_in_a_scan_with_remat(saves_matmuls):
    policy = jax.checkpoint_policies.dots_saveable if saves_matmuls else None
    model = Stacked(policy, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 16, 16))

    def loss(model, x):
        return (model(x) ** 2).mean()

    graphdef, state = nnx.split(model)
    accelerated = accelerate(loss)
    traced = jax.make_jaxpr(lambda s, x: accelerated(nnx.merge(graphdef, s), x))
    found = names_in(traced(state, x).jaxpr, Counter())
    mlp = "plain_gelu_mlp" if saves_matmuls else "gelu_mlp"
    expected = {mlp: 1, "layer_norm": 1, "add_layer_norm": 1, "attention_layer": 1}
    assert {name: found[name] for name in expected} == expected
    gradients = [
        jax.tree.leaves(nnx.jit(nnx.grad(f))(model, x)) for f in (loss, accelerated)
    ]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_arrays_whose_first_dim_is_not_the_batch_are_left_alone_on_a_mesh():
    """To merge (T, B, D) to rows would move tokens between devices."""

    class TimeMajor(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.layer(x.swapaxes(0, 1)).swapaxes(0, 1)

    run = Run(
        model=TimeMajor,
        loss=accelerate(lambda model, batch: (model(batch) ** 2).mean()),
        optimizer=optax.sgd(0.1),
        data=lambda n: np.ones((8, 4, 8), np.float32),
        steps=1,
    )
    for mesh, is_found in (("data=8", False), (one_device(), True)):
        jaxpr = prepare(replace(run, mesh=mesh)).step.trace().jaxpr
        assert ("linear_layer" in str(jaxpr)) == is_found


def test_signature_and_other_results_are_kept():
    def loss(model, batch, rngs=None, *, scale=2):
        """Say something."""
        return {"value": scale * batch["x"], "text": "no array", "count": 3}

    accelerated = accelerate(loss)
    assert inspect.signature(accelerated) == inspect.signature(loss)
    assert accelerated.__doc__ == loss.__doc__
    result = accelerated(None, {"x": jnp.ones(2), "name": "x"}, scale=4)
    np.testing.assert_array_equal(result.pop("value"), [4, 4])
    assert result == {"text": "no array", "count": 3}


class Adapted(nnx.Module):
    """A layer with an adapter, with statistics and a random stream that a loss may change."""

    def __init__(self, rngs):
        self.base = nnx.Linear(8, 8, rngs=rngs)
        self.adapter = nnx.LoRA(8, 2, 8, b_initializer=nnx.initializers.ones, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.base(x) + self.adapter(x)


def test_variables_of_another_trace_that_stay_the_same():
    """As in `jax.grad` of a part of the model: NNX refuses to change the rest."""
    x = jnp.ones((4, 8))
    definition, adapter, rest = nnx.split(Adapted(nnx.Rngs(0)), nnx.LoRAParam, ...)

    def loss(model, x):
        return (model(x) ** 2).mean()

    def of_adapter(loss):
        return lambda adapter: loss(nnx.merge(definition, adapter, rest), x)

    expected = jax.grad(of_adapter(loss))(adapter)
    for compiled in (lambda f: f, jax.jit):
        found = compiled(jax.grad(of_adapter(accelerate(loss))))(adapter)
        for left, right in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5)


def test_variables_that_the_function_changes_are_changed():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.zeros(()))
            self.last = nnx.Variable(jnp.ones(3))
            self.source = nnx.Variable(jnp.arange(3.0))

        def __call__(self, x):
            self.calls[...] += 1
            # A copy of another variable is a change too.
            self.last[...] = self.source[...]
            return x.sum()

    model = Counting()
    function = accelerate(lambda model, x: model(x))
    assert [float(function(model, jnp.ones(2))) for _ in range(2)] == [2, 2]
    assert float(model.calls[...]) == 2
    np.testing.assert_array_equal(model.last[...], [0, 1, 2])


def test_models_in_float64_stay_as_they_are():
    with jax.enable_x64(True):
        rngs = nnx.Rngs(0)
        options = {"param_dtype": jnp.float64, "rngs": rngs}
        model = nnx.Sequential(
            nnx.LayerNorm(8, **options),
            nnx.Linear(8, 16, **options),
            nnx.gelu,
            nnx.Linear(16, 8, **options),
        )
        x = jax.random.normal(rngs(), (2, 4, 8), jnp.float64)

        def loss(model, x):
            return (model(x) ** 2).mean()

        expected, found = (nnx.grad(f)(model, x) for f in (loss, accelerate(loss)))
        for left, right in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_array_equal(left, right)


def test_attention_before_a_layer_for_each_head():
    class PerHead(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.List(
                [nnx.LinearGeneral(32, (4, 8), rngs=rngs) for _ in range(3)]
            )
            self.out = nnx.Linear(8, 8, rngs=rngs)
            for layer in (*self.heads, self.out):
                layer.bias[...] += 1

        def __call__(self, x):
            q, k, v = (layer(x) for layer in self.heads)
            return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))

    model = PerHead(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))

    def loss(model, x):
        return (model(x) ** 2).mean()

    compute = [nnx.value_and_grad(f)(model, x) for f in (loss, accelerate(loss))]
    for left, right in zip(*map(jax.tree.leaves, compute), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)
