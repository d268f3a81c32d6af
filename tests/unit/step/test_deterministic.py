"""Tests of what makes a step deterministic on GPUs, as far as a CPU can run it.

`benchmarks/determinism.py` compares bits on a GPU.
"""

import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from rich.console import Console

from shardwise import Batches, Mean, Run, evaluate, fit
from shardwise.loop import steps
from shardwise.precision import sums_in_float32
from shardwise.run import prepare
from shardwise.state import init_state
from shardwise.step import deterministic
from shardwise.step import evaluate as evaluation
from shardwise.step import train as training
from shardwise.step.deterministic import force_attention, sum_rows_in_order


@pytest.fixture
def on_gpu(monkeypatch):
    """Trace as for a GPU; its kernels are interpreted."""
    monkeypatch.setattr(deterministic, "platform", lambda: "gpu")


def lowered_attention(monkeypatch, layers):
    """Lower the gradient of attention layers for a GPU, which need not be there."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(
        cudnn, "is_cuda_compute_capability_equal", lambda capability: False
    )

    def loss(x):
        for _ in range(layers):
            x = jax.nn.dot_product_attention(
                x, x, x, is_causal=True, implementation="cudnn"
            )
        return x.astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    return jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",))


def configs_of(lowered):
    calls = re.findall(
        r'custom_call @__cudnn\$fmha\w+.*?backend_config = "(.*?)"[,}]',
        lowered.as_text().replace('\\"', "'").replace("\\22", "'"),
    )
    return [json.loads(text.replace("'", '"')) for text in calls]


def test_all_equal_attention_layers_are_deterministic(monkeypatch):
    lowered = lowered_attention(monkeypatch, layers=3)
    before = configs_of(lowered)
    assert len(before) == 6
    assert not any(
        "force_deterministic" in x["cudnn_fmha_backend_config"] for x in before
    )
    after = configs_of(force_attention(lowered))
    assert len(after) == 6
    for old, new in zip(before, after, strict=True):
        old["cudnn_fmha_backend_config"]["force_deterministic"] = True
        assert new == old


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_gradients_of_embeddings_are_sums_in_a_fixed_order(on_gpu, dtype, mode):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(9, 5)), dtype)
    # Some are outside of the table.
    indices = jnp.asarray(rng.integers(0, 11, (4, 6)))
    g = jnp.asarray(rng.normal(size=(4, 6, 5)), dtype)

    def gradient(table, g):
        return jax.vjp(lambda t: jnp.take(t, indices, axis=0, mode=mode), table)[1](g)[
            0
        ]

    expected = jax.jit(sums_in_float32(gradient))(table, g)
    ours = jax.jit(sums_in_float32(gradient, sum_rows_in_order))
    text = str(jax.make_jaxpr(ours)(table, g))
    assert "sum_rows" in text
    assert "scatter-add" not in text
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(ours(table, g), "f4"),
        np.asarray(expected, "f4"),
        rtol=tolerance,
        atol=1e-5,
    )


def test_other_scatters_stay(on_gpu):
    values = jnp.arange(12.0).reshape(3, 4)
    labels = jnp.array([1, 0, 3])

    def of_columns(x):
        return jnp.take_along_axis(x, labels[:, None], axis=1).sum()

    def unique(x):
        return x.at[jnp.array([0, 2])].get(unique_indices=True).sum()

    for function in (of_columns, unique):
        summed = sums_in_float32(jax.grad(function), sum_rows_in_order)
        np.testing.assert_array_equal(summed(values), jax.grad(function)(values))
        assert "sum_rows" not in str(jax.make_jaxpr(summed)(values))


def test_cpus_compute_embeddings_as_before():
    def gradient(table):
        return jax.grad(lambda t: (t[jnp.array([1, 1, 2])] ** 2).sum())(table)

    summed = sums_in_float32(gradient, sum_rows_in_order)
    assert "sum_rows" not in str(jax.make_jaxpr(summed)(jnp.ones((4, 2))))


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Compile steps as on a GPU. A CPU accepts the options and ignores them."""
    for module in (training, evaluation):
        monkeypatch.setattr(module, "needs_options", lambda mesh, deterministic: True)


X = np.random.default_rng(0).normal(size=(100, 8)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}


def small_run(**changes):
    settings = {
        "model": lambda rngs: nnx.Linear(8, 1, rngs=rngs),
        "loss": lambda model, batch: Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2),
        "optimizer": optax.adamw(1e-2),
        "data": Batches(DATA, 24),
        # The last of these batches is shorter.
        "eval_data": Batches(DATA, 32),
        "steps": 5,
        "mesh": "data=4,fsdp=2",
        "accumulate": 3,
    }
    return Run(**{**settings, **changes})


def test_steps_and_evaluations_are_those_of_jit(as_on_gpu, monkeypatch):
    console = Console(file=io.StringIO())
    ours = fit(small_run(), console=console)
    prepared = prepare(small_run())
    assert isinstance(prepared.step.function, deterministic.DeterministicJit)
    # Without `compile`, as in a loop of the user.
    first = init_state(prepared.spec, 0)
    *_, (_, state, _) = steps(prepared.step, first, prepared.batches, until=5)
    values = evaluate(prepared.eval_step, state, prepared.eval_batches)
    monkeypatch.undo()
    plain = fit(small_run(), console=console)
    for other in (ours.state, state):
        jax.tree.map(np.testing.assert_array_equal, other, plain.state)
    assert ours.eval_metrics == plain.eval_metrics == values


def test_an_error_of_the_compiler_names_the_remedy(as_on_gpu, monkeypatch):
    option = {"xla_cpu_no_such_option": True}
    monkeypatch.setattr(training, "OPTIONS", option)
    prepared = prepare(small_run(eval_data=None))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        prepared.step.compile()
    assert "deterministic=False" in "".join(caught.value.__notes__)
