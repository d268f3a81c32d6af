"""Accumulation, padding and evaluation give what a hand-written loop gives, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise.data.batches import Batches
from shardwise.errors import ConfigError
from shardwise.loop import evaluate
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.run import Run, prepare
from shardwise.state import abstract_state, init_state
from shardwise.step import make_eval_step, make_train_step

CLASSES = 5


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def examples(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 4)).astype("f4"),
        "y": rng.integers(0, CLASSES, rows).astype(np.int32),
        "mask": (rng.random(rows) > 0.4).astype("f4"),
    }


def nats(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["y"]
    )


def total(model, batch):
    return nats(model, batch).sum()


def mean(model, batch):
    return nats(model, batch).mean()


def ratio(model, batch):
    return (nats(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def sums(model, batch):
    return Mean((nats(model, batch) * batch["mask"]).sum(), batch["mask"].sum())


def contrastive(model, batch):
    vectors = model(batch["x"])
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(
            vectors @ vectors.T, jnp.arange(len(vectors))
        )
    )


def spec_on(mesh, factory=Net, optimizer=None):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    return abstract_state(
        factory, optimizer or optax.sgd(0.1), make_mesh(mesh, devices)
    )


def by_hand(loss, batch, steps=3):
    """Losses of plain Flax and Optax on one device, from the same weights."""
    spec = spec_on("data=1")
    model = spec.module(init_state(spec, 0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    values = []
    for _ in range(steps):

        def scalar(model):
            value = loss(model, batch)
            return value.summed().value if isinstance(value, Mean) else value

        value, grads = nnx.value_and_grad(scalar)(model)
        optimizer.update(model, grads)
        values.append(float(value))
    return values


def by_shardwise(loss, batch, mesh="data=1", steps=3, **options):
    spec = spec_on(mesh)
    step = make_train_step(spec, loss, batch, **options)
    state, values = init_state(spec, 0), []
    for _ in range(steps):
        state, metrics = step(state, step.place(batch))
        values.append(float(metrics["loss"]))
    return values


@pytest.mark.parametrize(
    "mesh", [pytest.param("data=1", marks=pytest.mark.slow), "data=4,fsdp=2"]
)
@pytest.mark.parametrize("loss", [total, mean, sums])
def test_accumulation_is_exact(loss, mesh):
    batch = examples(32)
    expected = by_hand(loss, batch)
    for accumulate in (1, 2, 4):
        found = by_shardwise(loss, batch, mesh, accumulate=accumulate)
        np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_ratio_is_exact_without_accumulation_and_refused_with_it():
    batch = examples(16)
    found = by_shardwise(ratio, batch, "data=8")
    np.testing.assert_allclose(found, by_hand(ratio, batch), rtol=2e-6)
    with pytest.raises(ConfigError, match=r"accumulate=2 would change the loss: div"):
        by_shardwise(ratio, batch, accumulate=2)


def test_a_loss_that_combines_examples():
    batch = examples(16)
    expected = by_hand(contrastive, batch)
    for mesh in ("data=8", "fsdp=8"):
        found = by_shardwise(contrastive, batch, mesh)
        np.testing.assert_allclose(found, expected, rtol=2e-6)
    with pytest.raises(ConfigError, match=r"dot_general of .* combines examples"):
        by_shardwise(contrastive, batch, accumulate=2)
    with pytest.raises(
        ConfigError, match=r"13 examples .* padding would change 'loss'"
    ):
        by_shardwise(contrastive, examples(13), "data=8")


def test_separate_micro_batches_are_averaged():
    batch = examples(16)
    found = by_shardwise(
        contrastive, batch, steps=1, accumulate=2, coupled_examples="separate"
    )
    # Example i is in micro-batch i % 2.
    halves = [{name: x[i::2] for name, x in batch.items()} for i in range(2)]
    expected = np.mean([by_hand(contrastive, half, steps=1) for half in halves])
    np.testing.assert_allclose(found, [expected], rtol=2e-6)


def evaluated(loss, rows, size, mesh="data=1"):
    spec = spec_on(mesh)
    batches = Batches(examples(rows), size)
    step = make_eval_step(spec, loss, next(batches.once()))
    return evaluate(step, init_state(spec, 0), batches)["loss"]


def evaluated_by_hand(loss, rows, size):
    """The mean over batches, weighted by their sizes."""
    spec = spec_on("data=1")
    model = spec.module(init_state(spec, 0))
    parts = list(Batches(examples(rows), size).once())
    values = [by_value(loss, model, part) for part in parts]
    return np.average(values, weights=[len(part["y"]) for part in parts])


def by_value(loss, model, batch):
    value = loss(model, batch)
    return float(value.summed().value if isinstance(value, Mean) else value)


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
@pytest.mark.parametrize("loss", [mean, contrastive])
def test_evaluation_with_a_short_last_batch(loss, mesh):
    expected = evaluated_by_hand(loss, 100, 16)
    np.testing.assert_allclose(evaluated(loss, 100, 16, mesh), expected, rtol=2e-6)


def test_evaluation_of_sums_over_a_mask_is_exact_over_all_examples():
    spec = spec_on("data=1")
    expected = by_value(sums, spec.module(init_state(spec, 0)), examples(100))
    np.testing.assert_allclose(evaluated(sums, 100, 16), expected, rtol=2e-6)


def test_evaluation_that_would_be_inexact_is_refused():
    with pytest.raises(
        ConfigError, match="cannot be evaluated in several batches: div"
    ):
        evaluated(ratio, 100, 16)
    with pytest.raises(ConfigError, match="batches have 4 and 16 of them"):
        evaluated(total, 100, 16)
    expected = evaluated_by_hand(total, 96, 16)
    np.testing.assert_allclose(evaluated(total, 96, 16), expected, rtol=2e-6)
    expected = evaluated_by_hand(ratio, 16, 16)
    np.testing.assert_allclose(evaluated(ratio, 16, 16), expected, rtol=2e-6)


def run_with(loss, **options):
    data = Batches(examples(64), 16)
    options = {"optimizer": optax.sgd(0.1), **options}
    return prepare(Run(model=Net, loss=loss, data=data, steps=3, **options))


def test_metrics_that_are_no_means_are_findings():
    def with_metrics(model, batch):
        values = nats(model, batch)
        return Mean(values), {"ratio": ratio(model, batch), "max": values.max()}

    prepared = run_with(with_metrics, accumulate=2, eval_data=Batches(examples(64), 16))
    assert [(f.name, f.fact.split()[0:2]) for f in prepared.findings] == [
        ("metric-of-micro-batches", ["metric", "'ratio'"]),
        ("metric-of-micro-batches", ["metric", "'max'"]),
        ("metric-of-batches", ["eval_ratio", "is"]),
    ]


def test_an_evaluation_that_would_be_inexact_is_refused_before_training():
    with pytest.raises(ConfigError, match="cannot be evaluated in several batches"):
        run_with(ratio, eval_data=Batches(examples(64), 16))


def log_of_count():
    """An optimizer whose third update is the logarithm of a negative number."""

    def update(grads, count, params=None):
        factor = jnp.log(1.5 - count)
        return jax.tree.map(lambda g: -0.1 * factor * g, grads), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([]), update)


class Counting(nnx.Module):
    """Keeps a variable that becomes infinite in the third step, and does not use it."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, CLASSES, rngs=rngs)
        self.kept = nnx.Variable(jnp.float32(1.0))

    def __call__(self, x):
        self.kept[...] = self.kept[...] * 1e19
        return self.linear(x)


def injected(params_dtype):
    def factory(rngs):
        return nnx.Linear(4, CLASSES, param_dtype=params_dtype, rngs=rngs)

    return factory


@pytest.mark.parametrize(
    ("factory", "optimizer", "bad"),
    [
        (Net, log_of_count(), [3]),
        (Counting, optax.sgd(0.1), [3]),
        (injected(jnp.bfloat16), optax.inject_hyperparams(optax.adam)(1e-3), [1, 2, 3]),
        (Net, optax.sgd(lambda count: jnp.where(count == 1, jnp.inf, 0.1)), [2, 3]),
    ],
    ids=["update", "kept variable", "injected bfloat16", "schedule"],
)
def test_nothing_that_is_not_finite_enters_the_state(factory, optimizer, bad):
    batch = examples(16)
    spec = spec_on("data=8", factory, optimizer)
    step = make_train_step(spec, mean, batch)
    state = init_state(spec, 0)
    found = []
    for n in range(1, 4):
        before = jax.tree.map(np.asarray, state)
        state, metrics = step(state, step.place(batch))
        after = jax.tree.map(np.asarray, state)
        assert np.isfinite(metrics["loss"])
        if not metrics["finite"]:
            found.append(n)
            for part in ("params", "other", "opt_state"):
                jax.tree.map(
                    np.testing.assert_array_equal,
                    getattr(before, part),
                    getattr(after, part),
                )
    assert found == bad
