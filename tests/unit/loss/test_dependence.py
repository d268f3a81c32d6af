"""What a trace of a loss says about its examples, for the ways in which people write losses."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise.loss.trace import growth, inexact_metrics, summed_scalars, trace_loss
from shardwise.loss.value import Kind, Value
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import cross_entropy
from shardwise.state import abstract_state

ROWS = 8
CLASSES = 5


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(CLASSES, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x, batch_norm=False, dropout=False):
        x = nnx.relu(self.hidden(x))
        x = self.norm(x) if batch_norm else x
        return self.out(self.dropout(x) if dropout else x)


@pytest.fixture(scope="module")
def spec():
    return abstract_state(Net, optax.sgd(0.1), make_mesh("data=1", jax.devices()[:1]))


def batch_of(rows):
    return {
        "x": np.zeros((rows, CLASSES), "f4"),
        "y": np.zeros(rows, np.int32),
        "mask": np.ones(rows, "f4"),
    }


def nats(model, batch, **options):
    logits = model(batch["x"], **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def log_probs(model, batch):
    return jax.nn.log_softmax(model(batch["x"]))


def features(model, batch):
    return model(batch["x"])[:, 0]


def penalty(model):
    return 1e-3 * (model.hidden.kernel[...] ** 2).sum()


def top_k_of_examples(x):
    """Return the largest entries along the examples, which jax 0.11 can do without a transpose."""
    if "axis" in inspect.signature(jax.lax.top_k).parameters:
        return jax.lax.top_k(x, len(x), axis=0)[0]
    return jax.lax.top_k(x.T, len(x))[0].T


# Each entry depends on its own example alone.
INDEPENDENT = {
    "unstacked": lambda m, b: Mean(jnp.unstack(log_probs(m, b), axis=1)[0]),
    "entries": lambda m, b: Mean(nats(m, b)),
    "masked entries": lambda m, b: Mean(nats(m, b) * b["mask"], b["mask"]),
    "dropout": lambda m, b: Mean(nats(m, b, dropout=True)),
    "arange": lambda m, b: Mean(-log_probs(m, b)[jnp.arange(len(b["y"])), b["y"]]),
    "numpy arange": lambda m, b: Mean(-log_probs(m, b)[np.arange(len(b["y"])), b["y"]]),
    "one hot": lambda m, b: Mean(
        -(log_probs(m, b) * jax.nn.one_hot(b["y"], CLASSES)).sum(-1)
    ),
    "take along": lambda m, b: Mean(
        -jnp.take_along_axis(log_probs(m, b), b["y"][:, None], 1)[:, 0]
    ),
    "vmap": lambda m, b: Mean(jax.vmap(lambda x: m(x).sum())(b["x"])),
    "map": lambda m, b: Mean(jax.lax.map(lambda x: m(x[None])[0].sum(), b["x"])),
    "gradient penalty": lambda m, b: Mean(
        (jax.grad(lambda x: m(x).sum())(b["x"]) ** 2).sum(-1)
    ),
    "scan": lambda m, b: Mean(
        jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros(len(b["x"])), b["x"].T)[0]
    ),
    "flat": lambda m, b: Mean(m(b["x"]).reshape(-1).reshape(b["x"].shape)),
    "sorted classes": lambda m, b: Mean(jnp.sort(m(b["x"]), axis=-1)[:, 0]),
    "cond": lambda m, b, step: Mean(
        jax.lax.cond(step > 3, lambda x: x * 2, lambda x: x, nats(m, b))
    ),
    "remat": lambda m, b: Mean(jax.checkpoint(jnp.sin)(nats(m, b))),
    "attention": lambda m, b: Mean(
        jax.nn.dot_product_attention(*[b["x"].reshape(-1, CLASSES, 1, 1)] * 3)[
            :, 0, 0, 0
        ]
    ),
    "noise": lambda m, b, rngs: Mean(
        nats(m, b) + jax.random.normal(rngs.noise(), b["y"].shape)
    ),
}
# Means and sums: micro-batches give the exact result.
MEANS = {
    "mean": lambda m, b: nats(m, b).mean(),
    "mean and penalty": lambda m, b: nats(m, b).mean() + penalty(m),
    "two means": lambda m, b: nats(m, b).mean() + 0.1 * (m(b["x"]) ** 2).mean(),
    "average": lambda m, b: jnp.average(nats(m, b)),
    "sum over length": lambda m, b: nats(m, b).sum() / len(b["y"]),
    "sum over ones": lambda m, b: nats(m, b).sum() / jnp.ones_like(b["mask"]).sum(),
    "mean of a mean": lambda m, b: Mean(nats(m, b).mean()),
    "sums": lambda m, b: Mean((nats(m, b) * b["mask"]).sum(), b["mask"].sum()),
    "dot": lambda m, b: Mean(jnp.dot(nats(m, b), b["mask"]), b["mask"].sum()),
    "sum and length": lambda m, b: Mean(nats(m, b).sum(), float(len(b["y"]))),
}
SUMS = {
    "sum": lambda m, b: nats(m, b).sum(),
    "half a sum": lambda m, b: 0.5 * nats(m, b).sum(),
    "sum of squares": lambda m, b: jnp.sum(features(m, b) ** 2),
}
# Micro-batches would change the result.
STATISTICS = {
    "ratio": lambda m, b: (nats(m, b) * b["mask"]).sum() / b["mask"].sum(),
    "safe ratio": lambda m, b: (
        (nats(m, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)
    ),
    "where": lambda m, b: jnp.mean(nats(m, b), where=b["mask"] > 0),
    "weighted average": lambda m, b: jnp.average(nats(m, b), weights=b["mask"]),
    "covariance": lambda m, b: jnp.linalg.slogdet(m(b["x"]).T @ m(b["x"]))[1],
    "root": lambda m, b: jnp.sqrt((nats(m, b) ** 2).mean()),
}
COUPLED = {
    "unstacked examples": lambda m, b: jnp.unstack(nats(m, b))[0],
    "contrastive": lambda m, b: Mean(
        optax.softmax_cross_entropy_with_integer_labels(
            m(b["x"]) @ b["x"].T, jnp.arange(len(b["x"]))
        )
    ),
    "batch norm": lambda m, b: Mean(nats(m, b, batch_norm=True)),
    "centered": lambda m, b: Mean(((b["x"] - b["x"].mean(0)) ** 2).sum(1)),
    "pairs": lambda m, b: (features(m, b)[:, None] - features(m, b)).mean(),
    "maximum": lambda m, b: nats(m, b).max(),
    "logsumexp": lambda m, b: jax.nn.logsumexp(nats(m, b)),
    "neighbor": lambda m, b: Mean(features(m, b) - jnp.roll(features(m, b), 1)),
    "sorted": lambda m, b: Mean(jnp.sort(nats(m, b))),
    "hardest": lambda m, b: jax.lax.top_k(nats(m, b), 3)[0].mean(),
    "first": lambda m, b: Mean(nats(m, b) * nats(m, b)[0]),
    "reversed": lambda m, b: Mean(nats(m, b) * nats(m, b)[::-1]),
    "hardest by class": lambda m, b: Mean(top_k_of_examples(m(b["x"]))),
    "softmax": lambda m, b: Mean(jax.nn.softmax(nats(m, b), axis=0)),
    "cumulative": lambda m, b: Mean(jnp.cumsum(nats(m, b))),
}
MIXED = {
    "sum and penalty": lambda m, b: nats(m, b).sum() + penalty(m),
    "sum and one": lambda m, b: Mean(nats(m, b).sum()),
    "sum and constant": lambda m, b: Mean(nats(m, b).sum(), float(ROWS)),
    "rounded": lambda m, b: (nats(m, b) / len(b["y"])).astype(int).sum() * 1.0,
}


def traces(spec, loss, parts=2):
    return trace_loss(spec, loss, batch_of(ROWS)), trace_loss(
        spec, loss, batch_of(ROWS // parts)
    )


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_examples(spec, name):
    whole, part = traces(spec, INDEPENDENT[name])
    assert whole.dependent == ()
    assert inexact_metrics(whole, part, 2) == ()


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_means_and_sums(spec, name, parts):
    whole, part = traces(spec, {**MEANS, **SUMS}[name], parts)
    assert whole.dependent == ("loss",)
    assert inexact_metrics(whole, part, parts) == ()
    assert summed_scalars(whole, part, parts) == (("loss",) if name in SUMS else ())


@pytest.mark.parametrize("name", [*STATISTICS, *COUPLED, *MIXED])
def test_what_micro_batches_would_change(spec, name):
    loss = {**STATISTICS, **COUPLED, **MIXED}[name]
    whole, part = traces(spec, loss)
    assert inexact_metrics(whole, part, 2) == ("loss",)
    worst = whole.metrics["loss"].worst
    if name in STATISTICS:
        assert worst.kind == Kind.STATISTIC
    if name in COUPLED:
        assert worst.kind == Kind.COUPLED
    if name not in MIXED:
        assert __file__ in str(worst.cause)


def test_batch_norm_couples_in_training_mode_only(spec):
    loss, batch = COUPLED["batch norm"], batch_of(ROWS)
    assert trace_loss(spec, loss, batch).dependent == ("loss",)
    assert trace_loss(spec, loss, batch, is_training=False).dependent == ()


@pytest.mark.parametrize("scan", [False, True])
def test_a_gpt_keeps_its_sequences_apart(scan):
    config = GPTConfig(
        vocab_size=32,
        max_length=8,
        num_layers=2,
        num_heads=2,
        width=16,
        scan_layers=scan,
    )
    mesh = make_mesh("data=1", jax.devices()[:1])
    spec = abstract_state(lambda rngs: GPT(config, rngs), optax.sgd(0.1), mesh)
    tokens = np.zeros((4, 8), np.int32)

    def loss(model, batch):
        return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))

    traced = trace_loss(spec, loss, {"inputs": tokens, "labels": tokens})
    assert traced.dependent == ()


def test_an_operation_inside_a_function_of_jax_has_the_line_of_its_own_caller(spec):
    def first(model, batch):
        return Mean(jnp.sort(nats(model, batch)))

    def second(model, batch):
        return Mean(jnp.sort(nats(model, batch)))

    for loss in (first, second):
        cause = trace_loss(spec, loss, batch_of(ROWS)).metrics["loss"].worst.cause
        assert cause.place == f"{__file__}, line {loss.__code__.co_firstlineno + 1}"


def test_a_broadcast_to_all_pairs_is_a_finding(spec):
    def loss(model, batch):
        return ((model(batch["x"])[:, :1] - batch["mask"]) ** 2).mean()

    (finding,) = trace_loss(spec, loss, batch_of(ROWS)).findings
    assert finding.name == "examples-broadcast"
    assert "sub of (8, 1) and (1, 8)" in finding.fact
    assert f"{__file__}, line" in finding.fact


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_random_key_that_never_changes_is_a_finding(spec, is_fixed):
    def loss(model, batch, rngs):
        streams = nnx.Rngs(0) if is_fixed else rngs
        keep = jax.random.bernoulli(streams.dropout(), 0.9, batch["mask"].shape)
        return Mean(nats(model, batch) * keep)

    findings = trace_loss(spec, loss, batch_of(ROWS)).findings
    assert [finding.name for finding in findings] == ["fixed-random-key"] * is_fixed
    assert all(f"{__file__}, line" in finding.fact for finding in findings)


def test_growth_of_sums_means_and_constants():
    total = Value(Kind.SUM, factors=(1.0,))
    mean, half = (Value(Kind.SUM, factors=(1 / rows,)) for rows in (8, 4))
    free, offset = Value(Kind.FREE), Value(Kind.SUM, factors=(1.0,), has_offset=True)
    assert growth(total, total, 2) == 1
    assert growth(mean, half, 2) == 1 / 2
    assert growth(free, free, 2) == 1 / 2
    assert growth(offset, offset, 2) is None
    assert growth(Value(Kind.COUPLED), Value(Kind.COUPLED), 2) is None
