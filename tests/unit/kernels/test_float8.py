"""Matmuls of 8 bits: numerics against NumPy, and what is left at 16 bits."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Batches, Mean, Run, Tokens, init_state, steps
from shardwise.errors import ConfigError
from shardwise.flops import matmul_dtypes
from shardwise.kernels import cross_entropy, float8
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import linear_cross_entropy
from shardwise.run import prepare

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(x, dtype=E4M3, largest=256.0):
    """Return `x` in float64, rounded to 8 bits with the largest power of two that fits."""
    scale = 2.0 ** np.floor(np.log2(largest / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def normal(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype("f4")


@pytest.mark.parametrize(
    ("contracted", "x_shape", "w_shape"),
    [
        (((1,), (0,)), (64, 32), (32, 48)),
        (((2,), (1,)), (2, 32, 16), (48, 16)),
        (((1, 2), (0, 1)), (64, 4, 8), (4, 8, 16)),
        (((2, 1), (0, 1)), (64, 4, 8), (8, 4, 16)),
    ],
)
def test_matmul_rounds_its_operands_and_nothing_else(contracted, x_shape, w_shape):
    x, w = normal(0, *x_shape, scale=3), normal(1, *w_shape, scale=0.02)
    y, pull = jax.vjp(
        lambda x, w: float8.float8_matmul(x, w, contracted, x.dtype), x, w
    )
    expected = np.tensordot(rounded(x), rounded(w), contracted)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    g = normal(2, *y.shape, scale=1e-6)
    dx, dw = pull(jnp.asarray(g))
    # Gradients of activations: of rounded gradients and weights. Those of weights: of neither.
    _, exact = jax.vjp(lambda x, w: jnp.tensordot(x, w, contracted), x, rounded(w))
    np.testing.assert_allclose(
        dx,
        exact(jnp.asarray(rounded(g, E5M2, 2.0**10), "f4"))[0],
        rtol=1e-4,
        atol=1e-12,
    )
    np.testing.assert_allclose(dw, exact(jnp.asarray(g))[1], rtol=1e-4, atol=1e-10)


def test_values_out_of_range_saturate():
    x = jnp.asarray([1e9, -1e9, 448.0, 500.0, 0.0])
    found = float8.narrow(x).astype(jnp.float32)
    np.testing.assert_array_equal(found, [448, -448, 448, 448, 0])


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 255.0, 256.0, 3e38])
def test_scales_are_powers_of_two_that_keep_values_in_range(value):
    found, scale = float8.narrow_exactly(jnp.full((4,), value))
    assert np.log2(float(scale)) == round(np.log2(float(scale)))
    assert np.isfinite(found.astype(jnp.float32)).all()
    if 1e-20 < value < 1e30:
        np.testing.assert_allclose(found.astype(jnp.float32) / scale, value, rtol=0.07)


def test_only_matmuls_that_become_faster_are_changed():
    tokens, wide, narrow = (
        normal(0, 4096, 2048),
        normal(1, 2048, 2048),
        normal(2, 2048, 64),
    )

    def function(x, w, v):
        return x @ w, x @ v

    converted = float8.with_float8_matmuls(function, weights=(1, 2))
    jaxpr = jax.make_jaxpr(converted)(tokens, wide, narrow)
    assert str(jaxpr).count("f8_e4m3fn[2048,2048]") > 0
    assert "f8_e4m3fn[2048,64]" not in str(jaxpr)


@pytest.mark.parametrize("num_tokens", [2064, 1936])
def test_what_depends_on_the_batch_counts_as_activations(num_tokens):
    x, w = normal(0, num_tokens, 2048), normal(1, 2048, 2048)
    functions = (lambda x, w: x @ w), (lambda x, w: (w.T @ x.T).T)
    exact = x @ w
    for function in functions:
        converted = float8.with_float8_matmuls(function, weights=(1,))
        y, pull = jax.vjp(converted, x, w)
        assert 0.01 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.05
        # The gradient of the weights is that of 16 or 32 bits, however many tokens there are.
        _, dw = pull(jnp.asarray(exact))
        np.testing.assert_allclose(dw, x.T @ exact, rtol=1e-3, atol=1)


def test_matmuls_of_two_dtypes():
    x, w = normal(0, 2048, 2048), normal(1, 2048, 2048, scale=0.02)
    for dtypes in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)):
        args = [jnp.asarray(a, dtype) for a, dtype in zip((x, w), dtypes, strict=True)]
        converted = float8.with_float8_matmuls(jnp.matmul, weights=(1,))
        y, pull = jax.vjp(converted, *args)
        assert y.dtype == jnp.float32
        assert [g.dtype for g in pull(y)] == list(dtypes)
        assert np.linalg.norm(y - x @ w) < 0.05 * np.linalg.norm(y)


@pytest.mark.parametrize("length", [1, 8, 64, 96, 128, 1024])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_the_scale_is_found_if_one_place_of_each_sequence_has_a_gradient(length, place):
    g = np.zeros((8192 // length, length, 4), np.float32)
    g[:, int(place * (length - 1))] = 1e-6
    scale = float(float8.gradient_scale(jnp.asarray(g.reshape(-1, 4))))
    assert 1e-6 * scale == pytest.approx(2.0**float8.SAMPLED_EXPONENT, rel=0.5)


def test_the_scale_of_a_sharded_gradient_moves_one_number():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    g = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16, sharding=sharding)
    program = jax.jit(float8.gradient_scale).lower(g).compile().as_text()
    moved = re.findall(r"= (\S+) (?:all-|collective-|reduce-scatter)", program)
    assert moved
    assert all(shape.endswith("[]") for shape in moved)


def gpt_run(**changes):
    config = GPTConfig(
        vocab_size=256, max_length=32, num_layers=1, num_heads=4, width=128
    )
    config = replace(config, **changes.pop("config", {}))
    tokens = np.random.default_rng(0).integers(0, 256, 5000)

    def loss(model, batch):
        return Mean(
            linear_cross_entropy(*model.features(batch["inputs"]), batch["labels"])
        )

    run = Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optax.adamw(1e-3),
        data=Batches(Tokens(tokens, 32), 8),
        steps=3,
        compute_dtype="bfloat16",
        matmul_dtype="float8",
    )
    return replace(run, **changes)


def losses(run):
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    loop = steps(prepared.step, state, prepared.batches, until=run.steps)
    return np.array([float(metrics["loss"]) for _, _, metrics in loop])


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"scan_layers": True, "remat": "block"}])
def test_a_gpt_trains_within_the_rounding_of_8_bits(config):
    found = losses(gpt_run(config=config))
    expected = losses(gpt_run(config=config, matmul_dtype=None))
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=2e-3)


@pytest.mark.parametrize("mesh", ["data=4,fsdp=2", "data=4,model=2"])
@pytest.mark.slow
def test_meshes_agree(mesh):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    expected = losses(gpt_run(mesh=one, compute_dtype=None))
    found = losses(gpt_run(mesh=mesh, compute_dtype=None))
    # The same weights give the same loss. Later, a difference in the last bit of a gradient may
    # change a number of 8 bits to its neighbor.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 1792, rngs=rngs)
        self.second = nnx.Linear(1792, 1792, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x))).mean(-1)


def wide_run(model=Wide, **changes):
    x = normal(0, 2048, 64)
    run = Run(
        model=model,
        loss=lambda model, batch: Mean((model(batch["x"]) - batch["y"]) ** 2),
        optimizer=optax.sgd(0.1),
        data=lambda n: {"x": x, "y": x[:, 0]},
        steps=2,
        matmul_dtype="float8",
    )
    return replace(run, **changes)


def test_matmuls_of_other_models_are_changed_too():
    text = str(prepare(wide_run()).step.trace().jaxpr)
    assert "f8_e4m3fn[1792,1792]" in text
    assert "f8_e5m2[2048,1792]" in text
    assert "f8_e4m3fn[64,1792]" not in text


def test_the_matmuls_that_change_are_known():
    choices = prepare(wide_run()).step.traced.matmuls.choices
    found = {(x.rows, x.depth, x.columns): (x.count, x.why_not) for x in choices}
    assert found[2048, 1792, 1792] == (1, "")
    count, why_not = found[2048, 64, 1792]
    assert count == 1
    assert why_not.startswith("converting takes")


def test_the_matmuls_of_scanned_layers_are_counted():
    run = gpt_run(config={"scan_layers": True, "num_layers": 2})
    choices = prepare(run).step.traced.matmuls.choices
    # The tokens of a batch, and the layers of the MLP.
    in_mlp = [x for x in choices if {x.depth, x.columns} == {128, 512}]
    assert {(x.rows, x.count, x.why_not) for x in in_mlp} == {(256, 2, "")}
    in_loss = [x for x in choices if x.columns == 256]
    why = "only the gradient of its input uses 8 bits"
    assert [(x.rows, x.depth, x.why_not) for x in in_loss] == [(256, 128, why)]


def test_a_model_without_a_large_matmul_is_refused():
    def small(rngs):
        return nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), lambda x: x.mean(-1))

    with pytest.raises(ConfigError, match="has no effect"):
        prepare(wide_run(model=small)).step.trace()


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="'int8' is unknown"):
        prepare(wide_run(matmul_dtype="int8"))
    with pytest.raises(ConfigError, match="pipeline"):
        prepare(
            gpt_run(
                config={"scan_layers": True, "num_layers": 2}, mesh="data=4,stage=2"
            )
        )


def test_flops_of_both_formats_are_counted_together():
    a = jax.ShapeDtypeStruct((32, 16), jnp.float8_e5m2)
    b = jax.ShapeDtypeStruct((16, 8), jnp.float8_e4m3fn)

    def dot(a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.bfloat16)

    found = matmul_dtypes(jax.make_jaxpr(dot)(a, b).jaxpr)
    assert dict(found.flops) == {"float8": 2.0 * 32 * 16 * 8}


def test_the_start_of_a_run_says_so():
    text = str(prepare(gpt_run()).step.traced.matmuls)
    assert text.endswith("float8 where that is faster")
    text = str(prepare(gpt_run(matmul_dtype=None)).step.traced.matmuls)
    assert "float8" not in text


@pytest.mark.parametrize("spread", [0.1, 0.8])
def test_loss_of_8_bits_next_to_float64(spread):
    features, table = normal(3, 64, 32), normal(4, 512, 32, scale=spread)
    # The logits are not rounded; the gradient of the features uses a rounded table.
    logits = features.astype("f8") @ table.T
    table8 = rounded(table - table.mean(0))
    # Labels that are likely, unlikely, and hardly possible.
    ranks = np.tile([1, 2, 100, 512], 16)
    tokens = np.arange(64)
    labels = np.argsort(logits, axis=1)[tokens, 512 - ranks]
    weights = np.random.default_rng(5).uniform(0.5, 1.5, 64)

    def loss(features, table):
        with float8.matmul_dtype("float8"):
            nats = linear_cross_entropy(features, table, jnp.asarray(labels))
        return (nats * weights.astype(np.float32)).sum(), nats

    (dfeatures, dtable), nats = jax.grad(loss, (0, 1), has_aux=True)(features, table)

    log_total = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(nats, log_total - logits[tokens, labels], rtol=1e-5)
    gradient = np.exp(logits - log_total[:, None])
    gradient[tokens, labels] -= 1
    gradient *= weights[:, None]
    # The gradient of the table has the precision of the features.
    np.testing.assert_allclose(dtable, gradient.T @ features, rtol=1e-4, atol=1e-5)
    # The other one has 2 bits of fraction, so rounding changes it by at most 1 in 8.
    expected = gradient @ table8
    error = np.linalg.norm(dfeatures - expected, axis=1)
    error /= np.linalg.norm(expected, axis=1)
    is_possible = np.asarray(nats) < 20
    assert error[is_possible].max() < 0.125
    # A probability of another token saturates.
    assert error.max() < 0.3


@pytest.mark.parametrize("gap", [0, 4, 8, 15])
def test_likely_tokens_that_are_no_labels(gap):
    """Their exponentials saturate, or are too many: their sum is larger than the largest number."""
    features, table = normal(0, 64, 128), normal(1, 8192, 128, scale=0.3)
    common = np.full(128, 128**-0.5, np.float32)
    features = 0.02 * features + common
    # 500 tokens are more likely than the 2 labels of this batch, by about `gap` nats.
    table -= np.outer(table @ common, common)
    table[10:510] += gap * common
    labels = jnp.asarray(np.random.default_rng(2).integers(0, 2, 64))

    def loss(features, table):
        return linear_cross_entropy(features, table, labels).sum()

    expected = jax.grad(loss)(features, table)
    with float8.matmul_dtype("float8"):
        found = jax.grad(loss)(features, table)
    assert jnp.linalg.norm(found - expected) < 0.05 * jnp.linalg.norm(expected)


def test_losses_of_certain_labels_are_not_negative():
    """Logits are not rounded to 16 bits, because that of the label is exact."""
    features, table = normal(3, 128, 256), normal(4, 128, 256, scale=0.05)
    # Each label has a logit of about 15.
    table += 15 * features / jnp.square(features).sum(1, keepdims=True)
    features, table = features.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    labels = jnp.arange(128)
    logits = np.asarray(features, "f8") @ np.asarray(table, "f8").T
    factors = jnp.asarray([1, cross_entropy.EXPONENTIAL_SCALE])
    # Not compiled: XLA for CPUs leaves out the rounding.
    with jax.disable_jit():
        nats, *_ = cross_entropy._float8_exponentials(features, table, labels, factors)
        _, total = cross_entropy._exponentials(features, table, labels)
    expected = np.log(np.exp(logits).sum(1)) - logits[labels, labels]
    np.testing.assert_allclose(nats, expected, atol=1e-4)
    np.testing.assert_allclose(jnp.log(total), expected, atol=1e-4)


def test_a_certain_label_has_a_small_gradient():
    # In 8 bits, the probability of the label would be rounded to 1 or to 0.875.
    table = jnp.concatenate([jnp.eye(32), -jnp.eye(32)])
    features, labels = 6.5 * table, jnp.arange(64)
    with float8.matmul_dtype("float8"):
        gradient = jax.grad(lambda x: linear_cross_entropy(x, table, labels).sum())(
            features
        )
    # Of 64 logits, one is 6.5, one is -6.5, and the others are 0.
    probability = 1 / (1 + 62 * math.exp(-6.5) + math.exp(-13))
    of_label = (gradient * table).sum(1)
    np.testing.assert_allclose(of_label, probability - 1, rtol=1e-4)


def test_a_table_with_similar_rows_is_rounded_as_if_they_were_not():
    # The softmax does not depend on the common part, so rounding must not either.
    features, table = normal(3, 64, 32), normal(4, 512, 32)
    common = normal(5, 1, 32, scale=20.0)
    labels = jnp.arange(64)

    def loss(features, table):
        with float8.matmul_dtype("float8"):
            return linear_cross_entropy(features, table, labels).sum()

    compute = jax.value_and_grad(loss, (0, 1))
    expected, found = compute(features, table), compute(features, table + common)
    for left, right in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        assert jnp.linalg.norm(right - left) < 5e-3 * jnp.linalg.norm(left)


def test_labels_that_the_model_expects_have_no_gradient_on_average():
    # Every token of the vocabulary is a label, weighted by its probability. The row of the label
    # must be rounded as the others are. Otherwise the mean gradient of all contexts is 0.0020 of
    # the size of single ones, instead of 0.0002.
    table = normal(4, 256, 64, scale=0.3)
    contexts = normal(3, 1024, 64)
    labels = jnp.arange(256)

    def loss(features):
        with float8.matmul_dtype("float8"):
            return linear_cross_entropy(features, table, labels)

    def mean(context):
        features = jnp.tile(context, (256, 1))
        nats, transpose = jax.vjp(loss, features)
        (gradient,) = transpose(jnp.exp(-nats))
        return gradient.sum(0), jnp.linalg.norm(gradient, axis=1).sum()

    means, sizes = jax.jit(lambda x: jax.lax.map(mean, x))(jnp.asarray(contexts))
    assert jnp.linalg.norm(means.mean(0)) < 0.001 * sizes.mean()
