"""Tests of the Hopper kernels against JAX, in the interpreter of Mosaic GPU.

Before jax 0.12 the interpreter cannot run them, so the tests only check that other kernels are
used.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise.flops import count_kernels
from shardwise.kernels import activation, float8, hopper
from shardwise.kernels import cross_entropy as losses
from shardwise.plan.hlo import parse
from shardwise.precision import sums_in_float32

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
needs_interpreter = pytest.mark.skipif(
    VERSION < (0, 12), reason="the interpreter came with jax 0.12"
)


@pytest.fixture
def interpreted(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(hopper, "multiprocessors", lambda: 2)
    jax.clear_caches()
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield
    jax.clear_caches()


def half(rng, *shape, scale=1.0):
    return jnp.asarray(rng.normal(0, scale, shape), jnp.bfloat16)


def wide(x):
    return np.asarray(x.astype(jnp.float32))


def gelu(product, bias):
    return jax.nn.gelu(
        product.astype(jnp.float32) + bias.astype(jnp.float32), approximate=True
    )


def test_kernels_require_a_hopper_gpu_and_shapes_that_the_tiles_divide():
    # The tests run without a GPU of compute capability 9.0.
    assert not hopper.is_available()
    assert hopper.supports_matmul(
        jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16), 3072
    )
    assert not hopper.supports_matmul(
        jax.ShapeDtypeStruct((65536, 768), jnp.float32), 3072
    )
    assert not hopper.supports_matmul(
        jax.ShapeDtypeStruct((65500, 768), jnp.bfloat16), 3072
    )
    assert hopper.supports_cross_entropy(jax.ShapeDtypeStruct((8, 50304), jnp.bfloat16))
    assert not hopper.supports_cross_entropy(
        jax.ShapeDtypeStruct((8, 50257), jnp.bfloat16)
    )
    assert not hopper.supports_cross_entropy(
        jax.ShapeDtypeStruct((8, 128256), jnp.bfloat16)
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "inner", "columns"), [(512, 192, 256), (256, 64, 384)]
)
def test_matmul_with_gelu(interpreted, tokens, inner, columns):
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        half(rng, tokens, inner),
        half(rng, inner, columns, scale=0.1),
        half(rng, columns),
    )
    y, slope = hopper.product_gelu(x, kernel, bias)
    product = (
        (x.astype(jnp.float32) @ kernel.astype(jnp.float32))
        .astype(jnp.bfloat16)
        .astype(jnp.float32)
    )
    expected, pull = jax.vjp(lambda product: gelu(product, bias), product)
    # A matmul may be rounded to the neighboring number.
    np.testing.assert_allclose(wide(y), expected, rtol=2**-8, atol=2e-2)
    np.testing.assert_allclose(
        wide(slope), pull(jnp.ones_like(expected))[0], rtol=2**-8, atol=1e-2
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "inner", "columns"), [(512, 128, 256), (768, 64, 512)]
)
def test_matmul_times_slope_and_its_sum_over_tokens(
    interpreted, tokens, inner, columns
):
    rng = np.random.default_rng(1)
    g, kernel, slope = (
        half(rng, tokens, inner),
        half(rng, columns, inner, scale=0.1),
        half(rng, tokens, columns),
    )
    gradient, sums = hopper.product_slope(g, kernel, slope)
    expected = wide(jnp.asarray(wide(g) @ wide(kernel).T, jnp.bfloat16)) * wide(slope)
    np.testing.assert_allclose(wide(gradient), expected, rtol=2**-7, atol=2e-2)
    # The sums are those of unrounded values.
    np.testing.assert_allclose(sums, expected.sum(0), rtol=1e-3, atol=1e-2)


@needs_interpreter
@pytest.mark.parametrize(
    ("tokens", "inner", "columns"), [(512, 128, 384), (4608, 64, 128)]
)
def test_exponentials_of_a_matmul_and_their_sums(interpreted, tokens, inner, columns):
    rng = np.random.default_rng(4)
    x, table, offset = (
        half(rng, tokens, inner),
        half(rng, columns, inner, scale=0.2),
        jnp.asarray(rng.normal(0, 2, tokens), jnp.float32),
    )
    # exp(200) overflows in float32.
    offset = offset.at[7].set(-200.0)
    exponentials, sums = hopper.product_exp(x, table, offset)
    product = jnp.asarray(
        wide(x) @ wide(table).T - np.asarray(offset)[:, None], jnp.bfloat16
    )
    expected = np.exp(np.minimum(wide(product), hopper.MAX_EXPONENT))
    # A matmul may be rounded to the neighboring number.
    np.testing.assert_allclose(wide(exponentials), expected, rtol=2**-5)
    np.testing.assert_allclose(sums, expected.sum(1), rtol=5e-3)
    assert (
        wide(exponentials)[7].max()
        == wide(exponentials)[7].min()
        == pytest.approx(np.exp(hopper.MAX_EXPONENT), rel=2**-8)
    )


@needs_interpreter
def test_linear_cross_entropy_matches_optax(interpreted, monkeypatch):
    monkeypatch.setattr(losses, "platform", lambda: "gpu")
    monkeypatch.setattr(hopper, "is_available", lambda: True)
    rng = np.random.default_rng(5)
    features, table = half(rng, 256, 64), half(rng, 384, 64, scale=0.3)
    labels, weights = rng.integers(0, 384, 256), rng.uniform(0, 2, 256).astype("f4")
    # Some labels are the most likely ones.
    labels[:3] = np.argmax(wide(features)[:3] @ wide(table).T, axis=1)

    def value_and_grads(loss, *arguments):
        value = jax.value_and_grad(
            lambda *args: (loss(*args, labels) * weights).sum(), argnums=(0, 1)
        )
        return jax.tree.map(lambda x: np.asarray(x, np.float32), value(*arguments))

    theirs = value_and_grads(
        lambda f, t, labels: optax.softmax_cross_entropy_with_integer_labels(
            f @ t.T, labels
        ),
        *map(wide, (features, table)),
    )
    ours = value_and_grads(losses.linear_cross_entropy, features, table)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * np.abs(b).max())


@needs_interpreter
def test_cross_entropy_matches_jax(interpreted):
    rng = np.random.default_rng(2)
    logits, labels = (
        half(rng, 9, 8448, scale=3),
        jnp.asarray(rng.integers(0, 8448, 9), jnp.int32),
    )
    gradient, nats = hopper.cross_entropy(logits, labels)
    expected = -jax.nn.log_softmax(wide(logits))[jnp.arange(9), labels]
    np.testing.assert_allclose(nats, expected, rtol=1e-5)
    np.testing.assert_allclose(
        wide(gradient),
        jax.nn.softmax(wide(logits)) - jax.nn.one_hot(labels, 8448),
        rtol=2**-7,
        atol=1e-6,
    )


@needs_interpreter
def test_fused_mlp_matches_plain_mlp(interpreted):
    rng = np.random.default_rng(3)
    arguments = (
        half(rng, 256, 64),
        half(rng, 64, 256, scale=0.1),
        half(rng, 256),
        half(rng, 256, 64, scale=0.1),
    )

    def value_and_grads(between):
        return jax.value_and_grad(
            lambda *args: jnp.sin(between(*args).astype(jnp.float32)).sum(),
            argnums=(0, 1, 2, 3),
        )(*arguments)

    ours, theirs = (
        value_and_grads(activation.fused_gelu_mlp),
        value_and_grads(activation.plain_gelu_mlp),
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            wide(a), wide(b), rtol=0.02, atol=0.02 * float(np.abs(wide(b)).max())
        )


@needs_interpreter
def test_layers_of_one_shape_share_a_kernel_whose_flops_are_counted(monkeypatch):
    """A kernel takes seconds to compile. One for each layer would add a minute to every start."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)

    def layers(x, kernels, bias):
        for kernel in kernels:
            y, slope = hopper.product_gelu(x, kernel, bias)
            x = (y + slope)[:, :128]
        return x.astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((256, 128), (3, 128, 256), (256,))
    ]
    traced = jax.jit(sums_in_float32(layers)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1
    assert count_kernels(traced.jaxpr.jaxpr) == {"product_gelu": 2 * 256 * 128 * 256}


@pytest.mark.skipif(
    VERSION < (0, 11), reason="Mosaic GPU has other names before jax 0.11"
)
@pytest.mark.parametrize(
    "name", ["product_gelu", "product_slope", "product_exp", "cross_entropy"]
)
def test_kernels_can_be_lowered_for_cuda(monkeypatch, name):
    """jax 0.12 refused to lower the store of the sums of `product_exp`."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)
    jax.clear_caches()
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    vectors = {
        "product_gelu": jax.ShapeDtypeStruct((256,), jnp.bfloat16),
        "product_exp": jax.ShapeDtypeStruct((256,), jnp.float32),
        "cross_entropy": jax.ShapeDtypeStruct((256,), jnp.int32),
    }
    inputs = [matrix, matrix, vectors.get(name, matrix)]
    if name == "cross_entropy":
        inputs = [matrix, vectors[name]]
    lowered = (
        jax.jit(getattr(hopper, name))
        .trace(*inputs)
        .lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(
    VERSION < (0, 11), reason="Mosaic GPU has other names before jax 0.11"
)
@pytest.mark.parametrize("name", ["product_gelu8", "product_slope8", "product_exp8"])
def test_kernels_of_8_bits_can_be_lowered_for_cuda(monkeypatch, name):
    """jax 0.12 refused to lower the store of the results of 8 bits."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)
    jax.clear_caches()

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    wide, narrow = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e5m2)
    vector, factors = array(jnp.float32, 256), array(jnp.float32, 2)
    extra = {
        "product_gelu8": [array(wide, 256)],
        "product_slope8": [array(wide, 256, 256)],
        "product_exp8": [vector],
    }
    options, matrix = {}, array(narrow, 256, 256)
    if name == "product_exp8":
        options, matrix = {"dtype": narrow}, array(wide, 256, 256)
    traced = jax.jit(partial(getattr(hopper, name), **options)).trace(
        matrix, matrix, *extra[name], factors
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(
    VERSION < (0, 11), reason="Mosaic GPU has other names before jax 0.11"
)
def test_the_loss_of_8_bits_can_be_lowered_for_cuda(monkeypatch):
    """A constant in a function that is partitioned made JAX fail, but only with the kernel."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)
    monkeypatch.setattr(hopper, "is_available", lambda: True)
    monkeypatch.setattr(losses, "platform", lambda: "gpu")

    def loss(features, table, labels):
        with float8.matmul_dtype("float8"):
            return losses.linear_cross_entropy(features, table, labels).sum()

    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((256,), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(matrix, matrix, labels)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_plan_recognizes_a_kernel_by_its_name():
    program = parse(
        """HloModule step

ENTRY %main (x: bf16[256,128], k: bf16[128,256]) -> bf16[256,256] {
  %x = bf16[256,128]{1,0} parameter(0)
  %k = bf16[128,256]{1,0} parameter(1)
  ROOT %y = bf16[256,256]{1,0} custom-call(%x, %k), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="step/product_gelu/mpmd_map"}
}
""",
        # Counted in the traced step, where the kernel has the tokens of all devices.
        {"product_gelu": 1e9},
    )
    op = next(op for op in program.entry.ops if op.opcode == "custom-call")
    work = program.work(program.entry, op)
    assert work.flops == 2 * 256 * 128 * 256
    assert work.bytes == 2 * (256 * 128 + 128 * 256 + 256 * 256)


def eight(x, scale, dtype=jnp.float8_e4m3fn):
    return (x.astype(jnp.float32) * scale).astype(dtype)


@needs_interpreter
def test_matmul_of_8_bits_with_gelu(interpreted):
    rng = np.random.default_rng(6)
    x8 = eight(half(rng, 256, 128), 1)
    kernel8 = eight(half(rng, 128, 128, scale=0.1), 32)
    bias = half(rng, 128)
    factors = jnp.asarray([1 / 32, 4], jnp.float32)
    y, slope, y8 = hopper.product_gelu8(x8, kernel8, bias, factors)
    product = jnp.asarray(wide(x8) @ wide(kernel8).T / 32, jnp.bfloat16)
    expected, pull = jax.vjp(
        lambda product: gelu(product, bias), product.astype(jnp.float32)
    )
    np.testing.assert_allclose(wide(y), expected, rtol=2**-8, atol=2e-2)
    np.testing.assert_allclose(
        wide(slope), pull(jnp.ones_like(expected))[0], rtol=2**-8, atol=1e-2
    )
    np.testing.assert_allclose(wide(y8) / 4, wide(y), rtol=2**-4, atol=2e-2)


@needs_interpreter
def test_matmul_of_8_bits_times_slope(interpreted):
    rng = np.random.default_rng(7)
    g8 = eight(half(rng, 256, 128), 16, jnp.float8_e5m2)
    kernel8 = eight(half(rng, 128, 128, scale=0.1), 32)
    slope = half(rng, 256, 128)
    factors = jnp.asarray([1 / (16 * 32), 16], jnp.float32)
    gradient, sums, gradient8 = hopper.product_slope8(g8, kernel8, slope, factors)
    product = jnp.asarray(wide(g8) @ wide(kernel8).T / (16 * 32), jnp.bfloat16)
    expected = wide(product) * wide(slope)
    np.testing.assert_allclose(wide(gradient), expected, rtol=2**-7, atol=2e-2)
    np.testing.assert_allclose(sums, expected.sum(0), rtol=1e-3, atol=2e-2)
    np.testing.assert_allclose(wide(gradient8) / 16, expected, rtol=2**-3, atol=2e-2)


@needs_interpreter
def test_exponentials_with_a_copy_of_8_bits(interpreted):
    rng = np.random.default_rng(8)
    x, table = half(rng, 256, 128), half(rng, 128, 128)
    offset = jnp.asarray(rng.normal(0, 2, 256), jnp.float32)
    factors = jnp.asarray([1 / 10, 2], jnp.float32)
    dtype = jnp.dtype(jnp.float8_e5m2)
    found, sums, narrow = hopper.product_exp8(x, table, offset, factors, dtype=dtype)
    logits = wide(x) @ wide(table).T / 10 - np.asarray(offset)[:, None]
    # 2 bits of fraction. The interpreter does not saturate values that are too large.
    np.testing.assert_allclose(wide(narrow) / 2, np.exp(logits), rtol=0.2, atol=1e-5)
    np.testing.assert_allclose(wide(found), np.exp(logits), rtol=2**-4)
    np.testing.assert_allclose(sums, np.exp(logits).sum(1), rtol=5e-3)
