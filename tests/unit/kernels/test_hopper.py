"""The kernels for Hopper, carried out step by step by Mosaic GPU's interpreter, against JAX's own arithmetic.

Before jax 0.12 the interpreter does not run them: there the tests only see that other kernels are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise.flops import count_kernels
from shardwise.kernels import activation, hopper
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
    return jax.nn.gelu(product.astype(jnp.float32) + bias.astype(jnp.float32), approximate=True)


def test_taken_on_hopper_alone():
    assert not hopper.is_available()  # no GPU of compute capability 9.0 among the devices of the tests
    assert hopper.supports_matmul(jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16), 3072)
    assert not hopper.supports_matmul(jax.ShapeDtypeStruct((65536, 768), jnp.float32), 3072)
    assert not hopper.supports_matmul(jax.ShapeDtypeStruct((65500, 768), jnp.bfloat16), 3072)
    assert hopper.supports_cross_entropy(jax.ShapeDtypeStruct((8, 50304), jnp.bfloat16))
    assert not hopper.supports_cross_entropy(jax.ShapeDtypeStruct((8, 50257), jnp.bfloat16))
    assert not hopper.supports_cross_entropy(jax.ShapeDtypeStruct((8, 128256), jnp.bfloat16))


@needs_interpreter
@pytest.mark.parametrize(("rows", "inner", "columns"), [(512, 192, 256), (256, 64, 384)])
def test_a_product_with_its_gelu(interpreted, rows, inner, columns):
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        half(rng, rows, inner),
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
    np.testing.assert_allclose(
        wide(y), expected, rtol=2**-8, atol=2e-2
    )  # a product may be rounded to the neighbouring number
    np.testing.assert_allclose(wide(slope), pull(jnp.ones_like(expected))[0], rtol=2**-8, atol=1e-2)


@needs_interpreter
@pytest.mark.parametrize(("rows", "inner", "columns"), [(512, 128, 256), (768, 64, 512)])
def test_a_product_times_a_slope_and_the_sum_of_its_rows(interpreted, rows, inner, columns):
    rng = np.random.default_rng(1)
    g, kernel, slope = (
        half(rng, rows, inner),
        half(rng, columns, inner, scale=0.1),
        half(rng, rows, columns),
    )
    gradient, sums = hopper.product_slope(g, kernel, slope)
    expected = wide(jnp.asarray(wide(g) @ wide(kernel).T, jnp.bfloat16)) * wide(slope)
    np.testing.assert_allclose(wide(gradient), expected, rtol=2**-7, atol=2e-2)
    np.testing.assert_allclose(
        sums, expected.sum(0), rtol=1e-3, atol=1e-2
    )  # of what is not rounded once more


@needs_interpreter
@pytest.mark.parametrize(("rows", "inner", "columns"), [(512, 128, 384), (4608, 64, 128)])
def test_a_product_as_exponentials_and_their_sums(interpreted, rows, inner, columns):
    rng = np.random.default_rng(4)
    x, table, less = (
        half(rng, rows, inner),
        half(rng, columns, inner, scale=0.2),
        jnp.asarray(rng.normal(0, 2, rows), jnp.float32),
    )
    less = less.at[7].set(-200.0)  # exp(200) is no number in float32
    shares, sums = hopper.product_exp(x, table, less)
    product = jnp.asarray(wide(x) @ wide(table).T - np.asarray(less)[:, None], jnp.bfloat16)
    expected = np.exp(np.minimum(wide(product), hopper.MAX_EXPONENT))
    np.testing.assert_allclose(
        wide(shares), expected, rtol=2**-5
    )  # a product may be rounded to the neighbouring number
    np.testing.assert_allclose(sums, expected.sum(1), rtol=5e-3)
    assert (
        wide(shares)[7].max()
        == wide(shares)[7].min()
        == pytest.approx(np.exp(hopper.MAX_EXPONENT), rel=2**-8)
    )


@needs_interpreter
def test_the_loss_of_a_product_as_without_the_kernel(interpreted, monkeypatch):
    monkeypatch.setattr(losses, "platform", lambda: "gpu")
    monkeypatch.setattr(hopper, "is_available", lambda: True)
    rng = np.random.default_rng(5)
    features, table = half(rng, 256, 64), half(rng, 384, 64, scale=0.3)
    labels, weights = rng.integers(0, 384, 256), rng.uniform(0, 2, 256).astype("f4")
    labels[:3] = np.argmax(wide(features)[:3] @ wide(table).T, axis=1)  # and some that are likely

    def found(loss, *arguments):
        value = jax.value_and_grad(
            lambda *args: (loss(*args, labels) * weights).sum(), argnums=(0, 1)
        )
        return jax.tree.map(lambda x: np.asarray(x, np.float32), value(*arguments))

    theirs = found(
        lambda f, t, labels: optax.softmax_cross_entropy_with_integer_labels(f @ t.T, labels),
        *map(wide, (features, table)),
    )
    ours = found(losses.linear_cross_entropy, features, table)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * np.abs(b).max())


@needs_interpreter
def test_the_loss_of_a_row_held_on_chip(interpreted):
    rng = np.random.default_rng(2)
    logits, labels = half(rng, 9, 8448, scale=3), jnp.asarray(rng.integers(0, 8448, 9), jnp.int32)
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
def test_between_two_layers_as_without_the_kernels(interpreted):
    rng = np.random.default_rng(3)
    arguments = (
        half(rng, 256, 64),
        half(rng, 64, 256, scale=0.1),
        half(rng, 256),
        half(rng, 256, 64, scale=0.1),
    )

    def found(between):
        return jax.value_and_grad(
            lambda *args: jnp.sin(between(*args).astype(jnp.float32)).sum(), argnums=(0, 1, 2, 3)
        )(*arguments)

    ours, theirs = found(activation.fused_gelu_mlp), found(activation.plain_gelu_mlp)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            wide(a), wide(b), rtol=0.02, atol=0.02 * float(np.abs(wide(b)).max())
        )


@needs_interpreter
def test_many_layers_share_one_kernel_whose_arithmetic_plans_know(monkeypatch):
    """Each kernel takes seconds to compile: one of its own for every layer was a minute of a start."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)

    def layers(x, kernels, bias):
        for kernel in kernels:
            y, slope = hopper.product_gelu(x, kernel, bias)
            x = (y + slope)[:, :128]
        return x.astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (3, 128, 256), (256,))
    ]
    traced = jax.jit(sums_in_float32(layers)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("kernel_hash") == 1
    assert count_kernels(traced.jaxpr.jaxpr) == {"product_gelu": 2 * 256 * 128 * 256}


def test_a_kernel_in_a_compiled_program_is_known_by_its_name():
    program = parse(
        """HloModule step

ENTRY %main (x: bf16[256,128], k: bf16[128,256]) -> bf16[256,256] {
  %x = bf16[256,128]{1,0} parameter(0)
  %k = bf16[128,256]{1,0} parameter(1)
  ROOT %y = bf16[256,256]{1,0} custom-call(%x, %k), custom_call_target="mosaic_gpu_v2", metadata={op_name="step/product_gelu/mpmd_map"}
}
""",
        {"product_gelu": 1e6},
    )
    op = next(op for op in program.entry.ops if op.opcode == "custom-call")
    work = program.work(program.entry, op)
    assert work.flops == 1e6
    assert work.bytes == 2 * (256 * 128 + 128 * 256 + 256 * 256)
