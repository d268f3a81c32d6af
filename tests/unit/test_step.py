"""One step: exact for any split of the batch, safe from non-finite values, compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, DataError
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import cross_entropy
from shardwise.sharding import Rules
from shardwise.state import abstract_state, init_state
from shardwise.step import make_train_step
from shardwise.tree import named_leaves

LR = 0.1


class Plain(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.hidden = nnx.Linear(6, 16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.tanh(self.hidden(x))))


def weighted_loss(model, batch):
    squares = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
    return Mean(squares * batch["w"], batch["w"])


def scalar_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_batch(rows, seed=0, weights=True):
    rng = np.random.default_rng(seed)
    batch = {
        "x": rng.normal(size=(rows, 6)).astype("f4"),
        "y": rng.normal(size=(rows, 3)).astype("f4"),
    }
    return batch | ({"w": rng.uniform(0, 2, rows).astype("f4")} if weights else {})


def one_step(
    batch, mesh="data=1", loss=weighted_loss, factory=Plain, optimizer=None, **options
):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    spec = abstract_state(factory, optimizer or optax.sgd(LR), make_mesh(mesh, devices))
    step = make_train_step(spec, loss, batch, **options)
    return step(init_state(spec, 0), step.place(batch))


def expected_step(batch):
    """Return loss and parameters after one step of gradient descent, without shardwise."""
    model = Plain(nnx.Rngs(jax.random.key(0)))

    def loss(model):
        squares = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
        return (squares * batch["w"]).sum() / batch["w"].sum()

    value, grads = nnx.value_and_grad(loss)(model)
    nnx.Optimizer(model, optax.sgd(LR), wrt=nnx.Param).update(model, grads)
    return float(value), {
        "/".join(map(str, path)): np.asarray(v[...])
        for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def assert_step(result, batch, tolerance=2e-6):
    state, metrics = result
    value, params = expected_step(batch)
    assert abs(float(metrics["loss"]) - value) < tolerance
    for name, leaf in named_leaves(state.params).items():
        np.testing.assert_allclose(leaf, params[name], atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("rows", "mesh", "accumulate"),
    [(13, "data=8", 3), (40, "data=4,fsdp=2", 4), (1, "data=4,fsdp=2", 1)],
)
def test_batch_size_mesh_and_accumulation_do_not_change_the_step(
    rows, mesh, accumulate
):
    batch = make_batch(rows)
    assert_step(one_step(batch, mesh, accumulate=accumulate), batch)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from(["data=1", "data=8", "data=4,fsdp=2"]),
    st.integers(1, 4),
)
def test_any_batch_size_mesh_and_accumulation_gives_the_same_step(
    rows, mesh, accumulate
):
    batch = make_batch(rows)
    accumulate = min(accumulate, rows)
    assert_step(one_step(batch, mesh, accumulate=accumulate), batch)


def test_examples_with_weight_zero_have_no_effect():
    batch = make_batch(16)
    batch["w"][5:] = 0
    part = {name: array[:5] for name, array in batch.items()}
    assert_step(one_step(batch, "data=8", accumulate=2), part)


def test_padding_changes_neither_loss_nor_weight():
    _, metrics = one_step(make_batch(13), "data=8")
    assert float(metrics["weight"]) == pytest.approx(
        make_batch(13)["w"].sum(), rel=1e-6
    )


def test_batch_with_scalar_loss_is_not_padded():
    batch = make_batch(13, weights=False)
    with pytest.raises(
        ConfigError,
        match=r"13 examples is not divisible by 8 .* Use a batch size of 8 or 16, "
        r"or return Mean.* for 'loss'",
    ):
        one_step(batch, "data=8", scalar_loss)
    one_step(batch, "data=1", scalar_loss)
    with pytest.raises(ConfigError, match="not divisible by 2"):
        one_step(batch, "data=1", scalar_loss, accumulate=2)


def test_padding_is_refused_if_it_would_change_batch_statistics():
    class Normed(Plain):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(6, rngs=rngs)

        def __call__(self, x):
            return super().__call__(self.norm(x))

    with pytest.raises(
        ConfigError,
        match="padding would change the statistics that the model keeps \\('norm/mean'\\)",
    ):
        one_step(make_batch(13), "data=8", factory=Normed)
    state, _ = one_step(make_batch(16), "data=8", factory=Normed)
    # Statistics are those of the global batch, not of a shard.
    mean = make_batch(16)["x"].mean(0)
    np.testing.assert_allclose(state.other["norm"]["mean"], 0.01 * mean, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nonfinite_values_leave_the_state_unchanged(accumulate):
    good = make_batch(16)
    spec = abstract_state(Plain, optax.adamw(1e-2), make_mesh("data=8"))
    step = make_train_step(spec, weighted_loss, good, accumulate=accumulate)
    state, _ = step(init_state(spec, 0), step.place(good))
    for bad in (np.nan, np.inf):
        batch, count = make_batch(16), int(state.step)
        batch["x"][3, 2] = bad
        before = {
            name: np.asarray(leaf).tobytes()
            for name, leaf in named_leaves((state.params, state.opt_state)).items()
        }
        state, metrics = step(state, step.place(batch))
        after = {
            name: np.asarray(leaf).tobytes()
            for name, leaf in named_leaves((state.params, state.opt_state)).items()
        }
        assert not bool(metrics["finite"])
        assert before == after
        # The batch is consumed in any case.
        assert int(state.step) == count + 1
        state, metrics = step(state, step.place(good))
        assert bool(metrics["finite"])


def test_infinite_gradient_with_finite_loss_is_detected():
    # The square root has an infinite derivative at 0, where its value is 0.
    def loss(model, batch):
        return jnp.sqrt(jnp.abs(model.out.kernel[...] * 0).sum()) + scalar_loss(
            model, batch
        )

    state, metrics = one_step(make_batch(8, weights=False), "data=8", loss)
    assert np.isfinite(float(metrics["loss"]))
    assert not bool(metrics["finite"])
    assert all(
        np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.params)
    )


def test_random_streams_depend_on_seed_and_step_only():
    def factory(rngs):
        return Plain(rngs, dropout=0.5)

    batch = make_batch(16)

    @functools.cache
    def make(seed, mesh):
        spec = abstract_state(
            factory,
            optax.sgd(0.0),
            make_mesh(mesh, jax.devices()[:1] if mesh == "data=1" else None),
        )
        return spec, make_train_step(
            spec, weighted_loss, batch, seed=seed, accumulate=2
        )

    def losses(seed, mesh, start=0):
        spec, step = make(seed, mesh)
        state = init_state(spec, 0)
        state = type(state)(
            state.step + start, state.params, state.other, state.opt_state
        )
        out = []
        for _ in range(3):
            state, metrics = step(state, step.place(batch))
            out.append(float(metrics["loss"]))
        return np.array(out)

    one = losses(0, "data=1")
    # Each step has another mask.
    assert len(set(one)) == 3
    np.testing.assert_allclose(losses(0, "data=4,fsdp=2"), one, rtol=1e-6)
    # Nothing is carried over from the steps before.
    np.testing.assert_allclose(losses(0, "data=1", start=1)[:2], one[1:], rtol=1e-6)
    assert not np.allclose(losses(1, "data=1"), one)


def test_second_call_does_not_compile_and_state_is_donated():
    batch = make_batch(16)
    spec = abstract_state(
        lambda rngs: Plain(rngs, 0.1),
        optax.adamw(1e-3),
        make_mesh("data=2,fsdp=4"),
        Rules(fsdp_min_size=8),
    )
    step = make_train_step(spec, weighted_loss, batch, accumulate=2)
    state = init_state(spec, 0)
    first, _ = step(state, step.place(batch))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    for _ in range(3):
        first, _ = step(first, step.place(batch))
    jax.block_until_ready(first)
    jax.monitoring.clear_event_listeners()
    assert [name for name in compiled if "backend_compile" in name] == []
    assert jax.tree.map(lambda leaf: leaf.sharding, first) == spec.shardings


def test_mixed_precision_keeps_float32_parameters():
    seen = []

    def loss(model, batch):
        seen.append(model.hidden.kernel[...].dtype)
        out = model(batch["x"].astype(jnp.bfloat16))
        seen.append(out.dtype)
        return Mean(((out.astype(jnp.float32) - batch["y"]) ** 2).sum(-1), batch["w"])

    state, metrics = one_step(
        make_batch(16),
        "data=4,fsdp=2",
        loss,
        compute_dtype="bfloat16",
        optimizer=optax.adam(1e-3),
    )
    assert seen[-2:] == [jnp.bfloat16, jnp.bfloat16]
    assert {
        leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))
    } == {jnp.dtype("float32")}
    assert np.isfinite(float(metrics["loss"]))


def test_additional_metrics_are_exact_means():
    def loss(model, batch):
        squares = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
        return Mean(squares, jnp.ones_like(squares)), {
            "big": Mean((squares > 1).astype(jnp.float32), jnp.ones_like(squares))
        }

    _, metrics = one_step(make_batch(13), "data=8", loss)
    _, reference = one_step(make_batch(13), "data=1", loss)
    assert float(metrics["big"]) == pytest.approx(float(reference["big"]), rel=1e-6)
    with pytest.raises(ConfigError, match="grad_norm"):
        one_step(
            make_batch(8),
            loss=lambda model, batch: (scalar_loss(model, batch), {"grad_norm": 1.0}),
        )


def test_invalid_losses_and_batches_are_refused():
    with pytest.raises(ConfigError, match=r"array of shape \(8, 3\) for 'loss'"):
        one_step(make_batch(8), loss=lambda model, batch: model(batch["x"]))
    with pytest.raises(DataError, match="same number of examples"):
        one_step({**make_batch(8), "w": np.ones(7, "f4")})
    with pytest.raises(
        ConfigError, match="accumulate=9 cannot split a batch of 8 examples"
    ):
        one_step(make_batch(8), accumulate=9)
    spec = abstract_state(Plain, optax.sgd(LR), make_mesh("data=8"))
    step = make_train_step(spec, weighted_loss, make_batch(8))
    with pytest.raises(DataError, match="compiled for 8 examples"):
        step.place(make_batch(16))


def test_compiled_step_runs_its_program_and_falls_back_for_other_shapes():
    batch, longer = make_batch(16), make_batch(24)
    spec = abstract_state(Plain, optax.sgd(LR), make_mesh("data=8"))
    step = make_train_step(spec, weighted_loss, batch)
    compiled = step.compile()
    assert step.program is None
    assert compiled.program.memory_analysis() is not None
    for examples in (batch, longer):
        placed = jax.device_put(examples, step.layout.sharding)
        plain, _ = step(init_state(spec, 0), placed)
        state, metrics = compiled(init_state(spec, 0), placed)
        assert float(metrics["weight"]) == pytest.approx(examples["w"].sum(), rel=1e-6)
        jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)


def plain_step():
    spec = abstract_state(Plain, optax.sgd(LR), make_mesh("data=8"))
    return make_train_step(spec, weighted_loss, make_batch(8))


def barrier_step():
    """A user's own barrier in a small loop, which XLA cannot compile if it keeps barriers."""

    def loss(model, batch):
        def body(scale, _):
            return jax.lax.optimization_barrier(scale) * 1.5, None

        scale, _ = jax.lax.scan(body, jnp.ones(()), None, length=3)
        return ((model(scale * batch["x"]) - batch["y"]) ** 2).mean()

    spec = abstract_state(Plain, optax.sgd(LR), make_mesh("data=8"))
    return make_train_step(spec, loss, make_batch(8))


def gpt_step():
    config = GPTConfig(vocab_size=64, max_length=8, num_layers=2, num_heads=2, width=16)
    spec = abstract_state(
        lambda rngs: GPT(config, rngs), optax.sgd(LR), make_mesh("data=8")
    )
    tokens = np.zeros((8, 8), np.int32)

    def loss(model, batch):
        return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))

    return make_train_step(spec, loss, {"inputs": tokens, "labels": tokens})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (plain_step, None),
        (barrier_step, None),
        (gpt_step, {"xla_disable_hlo_passes": "cse_barrier_expander"}),
    ],
)
def test_only_the_barriers_of_our_models_are_kept(make, options, monkeypatch):
    """The option is for our GPT on CPUs. Other models are compiled as plain JAX compiles them."""
    jit, passed = jax.jit, []

    def recording_jit(function, **arguments):
        if function.__name__ == "step":
            passed.append(arguments["compiler_options"])
        return jit(function, **arguments)

    monkeypatch.setattr(jax, "jit", recording_jit)
    step = make()
    assert passed == [options]
    assert ("opt-barrier" in step.compile().program.as_text()) == (options is not None)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("coupled_examples", ["exact", "separate"])
def test_gradients_of_16_bits_are_accumulated_in_32(dtype, coupled_examples):
    """The weight of this batch, 66,560 tokens, is beyond the range of float16."""

    class Small(nnx.Module):
        def __init__(self, rngs):
            self.weights = nnx.Param(jnp.zeros(4, dtype))

    def loss(model, batch):
        y = (batch["x"].astype(dtype) @ model.weights[...]).astype(jnp.float32)
        return Mean((y - batch["x"].sum(-1)) ** 2)

    x = 0.02 * np.random.default_rng(0).normal(size=(64, 1040, 4)).astype("f4")
    mesh = make_mesh("data=1", jax.devices()[:1])
    spec = abstract_state(Small, optax.sgd(0.1), mesh)
    norms = []
    for accumulate in (1, 4, 64):
        options = {"accumulate": accumulate, "coupled_examples": coupled_examples}
        step = make_train_step(spec, loss, {"x": x}, **options)
        _, metrics = step(init_state(spec, 0), step.place({"x": x}))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(norms[1:], norms[0], rtol=5e-3)
