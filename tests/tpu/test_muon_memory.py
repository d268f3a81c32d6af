"""Muon with FSDP, compiled for eight TPU v5e chips: it never gathers all matrices at once."""

import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import optax
import pytest
from flax import nnx
from jax.experimental import topologies

from shardwise import abstract_state, make_mesh, optim

LAYERS, WIDTH = 8, 1024


class Stack(nnx.Module):
    """The matrices of eight transformer layers: 96 million parameters."""

    def __init__(self, rngs):
        self.qkv = nnx.List(
            [nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs) for _ in range(LAYERS)]
        )
        self.out = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
        )
        self.up = nnx.List(
            [nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs) for _ in range(LAYERS)]
        )
        self.down = nnx.List(
            [nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
        )


def compile_update(tx, mesh):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4"
    ).devices
    spec = abstract_state(Stack, tx, make_mesh(mesh, devices))
    params, state, layout = (
        spec.abstract.params,
        spec.abstract.opt_state,
        spec.shardings,
    )

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(
        update, donate_argnums=(1, 2), out_shardings=(layout.params, layout.opt_state)
    )
    program = jitted.lower(params, state, params).compile()
    momentum_bytes = 4 * spec.num_params
    return program.memory_analysis(), program.cost_analysis()["flops"], momentum_bytes


@pytest.mark.slow
def test_no_device_gathers_the_complete_state():
    muon, flops, momentum_bytes = compile_update(
        optim.muon(1e-3, weight_decay=0.1, clip=1.0), "fsdp=8"
    )
    print(
        f"momentum of all matrices {momentum_bytes / 2**20:.0f} MiB; "
        f"temporary memory of an update {muon.temp_size_in_bytes / 2**20:.0f} MiB, "
        f"arithmetic per device {flops / 1e12:.2f} TFLOP"
    )
    # An eighth of the gradients, the momentum and the weights.
    assert muon.argument_size_in_bytes < 1.02 * 3 * momentum_bytes / 8
    assert muon.temp_size_in_bytes < momentum_bytes / 4
