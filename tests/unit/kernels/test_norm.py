"""Tests of the layer norm kernels against Flax, in the interpreter of Pallas.

On a GPU the same code is compiled.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.kernels.norm import (
    ResidualNorm,
    cpu_layer_norm,
    fused_layer_norm,
    plain_layer_norm,
    saving_layer_norm,
)


def flax_layer_norm(x, scale, bias, epsilon):
    norm = nnx.LayerNorm(
        x.shape[1], epsilon=epsilon, use_fast_variance=False, rngs=nnx.Rngs(0)
    )
    norm.scale[...], norm.bias[...] = scale, bias
    return x, norm(x)


def fused(x, scale, bias, epsilon):
    return fused_layer_norm(x, None, scale, bias, epsilon)


def value_and_grads(norm, x, scale, bias):
    def total(x, scale, bias):
        stream, normal = norm(x, scale, bias, 1e-5)
        return jnp.sin(stream).sum() + (normal**3).sum() / x.shape[0]

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, scale, bias)


def inputs(tokens, width, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(tokens, width)) * rng.uniform(0.1, 10) + rng.normal()).astype(
        "f4"
    )
    return (
        x,
        rng.normal(1, 0.1, width).astype("f4"),
        rng.normal(0, 0.1, width).astype("f4"),
    )


@pytest.mark.parametrize("norm", [fused, cpu_layer_norm, saving_layer_norm])
@settings(max_examples=4)
@given(
    tokens=st.integers(1, 70),
    width=st.sampled_from([2, 8, 96, 130]),
    seed=st.integers(0, 2**31),
)
def test_layer_norm_matches_flax_for_any_shape(norm, tokens, width, seed):
    arguments = inputs(tokens, width, seed)
    ours, theirs = (
        value_and_grads(norm, *arguments),
        value_and_grads(flax_layer_norm, *arguments),
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5 * float(1 + jnp.abs(b).max())
        )


def test_each_device_normalizes_its_own_tokens():
    mesh = make_mesh("data=4,model=2")
    x, scale, bias = inputs(64, 96)
    tokens = jax.device_put(x, NamedSharding(mesh, P("data")))
    run = jax.jit(lambda *arguments: value_and_grads(fused, *arguments))
    value, grads = run(tokens, scale, bias)
    assert grads[0].sharding.is_equivalent_to(tokens.sharding, 2)
    text = run.lower(tokens, scale, bias).compile().as_text()
    assert set(re.findall(r"all-\w+", text)) == {"all-reduce"}
    for a, b in zip(
        jax.tree.leaves((value, grads)),
        jax.tree.leaves(value_and_grads(flax_layer_norm, x, scale, bias)),
        strict=True,
    ):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5 * float(1 + jnp.abs(b).max())
        )


def test_bfloat16_is_rounded_once():
    x, scale, bias = (jnp.asarray(a, jnp.bfloat16) for a in inputs(40, 96))
    exact = plain_layer_norm(*(a.astype(jnp.float32) for a in (x, scale, bias)), 1e-5)[
        1
    ].astype(jnp.bfloat16)
    for norm in (fused, cpu_layer_norm, plain_layer_norm):
        normal = norm(x, scale, bias, 1e-5)[1]
        assert normal.dtype == jnp.bfloat16
        assert (normal == exact).mean() > 0.99


def test_gradient_of_the_pending_bias_is_summed_over_tokens():
    x, scale, bias = inputs(70, 96)
    pending_bias = np.linspace(-1, 1, 96, dtype="f4")

    def value_and_grads(norm):
        def total(x, pending_bias, scale, bias):
            return sum(
                jnp.sin(part).sum() for part in norm(x, pending_bias, scale, bias)
            )

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(
            x, pending_bias, scale, bias
        )

    ours = value_and_grads(
        lambda x, pending_bias, scale, bias: fused_layer_norm(
            x, pending_bias, scale, bias, 1e-5
        )
    )
    theirs = value_and_grads(
        lambda x, pending_bias, scale, bias: flax_layer_norm(
            x + pending_bias, scale, bias, 1e-5
        )
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5 * float(1 + jnp.abs(b).max())
        )


def test_module_returns_the_stream_and_its_layer_norm():
    x = inputs(6, 16)[0]
    stream, normal = ResidualNorm(16, rngs=nnx.Rngs(0))(x)
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(
        normal, nnx.LayerNorm(16, rngs=nnx.Rngs(0))(x), atol=1e-5
    )


def test_backward_pass_keeps_the_tokens_in_their_dtype():
    """Not the centered tokens in float32 as well, as JAX alone would."""
    x = jnp.ones((32, 64), jnp.bfloat16)
    weights = jnp.ones(64, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
    for norm, expected in (
        (saving_layer_norm, {"bfloat16"}),
        (plain_layer_norm, {"bfloat16", "float32"}),
    ):
        _, pull = jax.vjp(lambda x, *w, norm=norm: norm(x, *w, 1e-5)[1], x, *weights)
        kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == x.shape]
        assert {str(leaf.dtype) for leaf in kept} <= expected
        assert len(kept) == 1 or norm is plain_layer_norm
