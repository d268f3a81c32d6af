"""Attention compiled for eight TPU v5e chips that are not attached: scores are never kept."""

import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import make_mesh
from shardwise.kernels.attention import causal_attention

SEQUENCES, LENGTH, HEADS, WIDTH = 8, 4096, 16, 128


@pytest.mark.parametrize(
    ("mesh", "kv_heads"),
    [pytest.param("data=8", HEADS, marks=pytest.mark.slow), ("fsdp=4,model=2", 4)],
)
def test_the_gradient_needs_less_memory_than_the_scores_of_one_head(mesh, kv_heads):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4"
    ).devices
    mesh = make_mesh(mesh, devices)
    layout = NamedSharding(
        mesh, PartitionSpec(mesh.axis_names[0], None, *mesh.axis_names[1:])
    )

    def loss(q, k, v):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jnp.square(causal_attention(q, k, v).astype(jnp.float32)).sum()

    args = [
        jax.ShapeDtypeStruct(
            (SEQUENCES, LENGTH, n, WIDTH), jnp.bfloat16, sharding=layout
        )
        for n in (HEADS, kv_heads, kv_heads)
    ]
    memory = (
        jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=(layout,) * 3)
        .lower(*args)
        .compile()
        .memory_analysis()
    )
    used, scores_of_one_head = memory.temp_size_in_bytes, 2 * LENGTH**2
    print(
        f"{used / 2**20:.1f} MiB; scores of one head: {scores_of_one_head / 2**20:.1f} MiB"
    )
    assert used < scores_of_one_head
