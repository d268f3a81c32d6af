"""Tests of the attention kernels for TPUs (interpreted) and CPUs against the attention of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)

from shardwise import make_mesh
from shardwise.kernels.attention import causal_attention, tpu_attention
from shardwise.kernels.platform import platform

TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")


def inputs(sequences, length, heads, kv_heads, width, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(
        jnp.array(rng.normal(size=(sequences, length, n, width)), dtype)
        for n in (heads, kv_heads, kv_heads)
    )


def value_and_grads(attention, args, segment_ids=None):
    def total(q, k, v):
        out = attention(q, k, v, segment_ids)
        return jnp.sin(out).sum(), out

    (_, out), grads = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    )(*args)
    return out, *grads


def kernel(q, k, v, segment_ids):
    return tpu_attention(q, k, v, segment_ids, block=128, interpret=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "packed"),
    [(4, 2, 64, False), (2, 2, 128, True)],
    ids=["grouped, narrow heads", "packed sequences"],
)
def test_tpu_kernel_matches_plain_attention(heads, kv_heads, width, packed):
    args = inputs(2, 256, heads, kv_heads, width)
    segment_ids = (
        jnp.array(np.sort(np.random.default_rng(1).integers(0, 3, (2, 256)), axis=1))
        if packed
        else None
    )
    for ours, plain in zip(
        value_and_grads(kernel, args, segment_ids),
        value_and_grads(causal_attention, args, segment_ids),
        strict=True,
    ):
        np.testing.assert_allclose(ours, plain, atol=3e-5)


def plain(q, k, v, segment_ids):
    mask = (
        None
        if segment_ids is None
        else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    )
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


@pytest.mark.parametrize(
    ("sequences", "length", "kv_heads", "groups", "width", "packed"),
    [
        (1, 1, 1, 1, 1, False),
        (2, 40, 1, 3, 24, False),
        (3, 17, 2, 3, 8, True),
        (2, 33, 2, 1, 8, True),
    ],
)
def test_cpu_attention_matches_jax(sequences, length, kv_heads, groups, width, packed):
    check_against_jax(sequences, length, kv_heads, groups, width, packed)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    sequences=st.integers(1, 3),
    length=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    width=st.sampled_from([1, 8, 24]),
    packed=st.booleans(),
)
def test_cpu_attention_matches_jax_for_any_shape(
    sequences, length, kv_heads, groups, width, packed
):
    check_against_jax(sequences, length, kv_heads, groups, width, packed)


def check_against_jax(sequences, length, kv_heads, groups, width, packed):
    args = inputs(sequences, length, kv_heads * groups, kv_heads, width)
    segment_ids = (
        jnp.array(
            np.sort(
                np.random.default_rng(1).integers(0, 3, (sequences, length)), axis=1
            )
        )
        if packed
        else None
    )
    for ours, theirs in zip(
        value_and_grads(causal_attention, args, segment_ids),
        value_and_grads(plain, args, segment_ids),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


def test_cpu_attention_handles_large_scores_and_keeps_half_precision():
    q, k, v = inputs(2, 32, 2, 2, 16)
    for ours, theirs in zip(
        value_and_grads(causal_attention, (100 * q, k, v)),
        value_and_grads(plain, (100 * q, k, v)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    args = inputs(2, 32, 2, 2, 16, jnp.bfloat16)
    for ours, theirs in zip(
        value_and_grads(causal_attention, args),
        value_and_grads(plain, args),
        strict=True,
    ):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.06
        )


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "over"),
    [(2, 2, "fsdp"), (1, 1, None)],
    ids=["sharded sequences and heads", "replicated"],
)
def test_each_device_works_on_its_own_sequences_and_heads(sequences, kv_heads, over):
    args = inputs(sequences, 128, 4, kv_heads, 64)
    mesh = make_mesh("fsdp=2,model=2", jax.devices()[:4])
    where = NamedSharding(mesh, PartitionSpec(over, None, "model"))

    def sharded(q, k, v, segment_ids):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.lax.with_sharding_constraint(kernel(q, k, v, segment_ids), where)

    ours = value_and_grads(
        sharded, jax.device_put(args, NamedSharding(mesh, PartitionSpec(over)))
    )
    assert ours[0].sharding.is_equivalent_to(where, 4)
    for one, plain in zip(ours, value_and_grads(causal_attention, args), strict=True):
        np.testing.assert_allclose(one, plain, atol=3e-5)


def test_kernel_is_chosen_for_the_mesh_of_the_trace():
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=TPU)
    args = inputs(2, 256, 2, 2, 64, jnp.bfloat16)
    assert platform() == "cpu"
    assert "pallas_call" not in str(jax.make_jaxpr(causal_attention)(*args))
    with jax.sharding.use_abstract_mesh(mesh):
        assert platform() == "tpu"
        assert "pallas_call" in str(jax.make_jaxpr(causal_attention)(*args))
        # The kernel does not support this length.
        odd = inputs(2, 100, 2, 2, 64)
        assert "pallas_call" not in str(jax.make_jaxpr(causal_attention)(*odd))
        with pytest.raises(
            ValueError, match=r"sequence length 100 is not a multiple of 128"
        ):
            tpu_attention(*odd)
