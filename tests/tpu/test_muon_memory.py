"""Muon with FSDP, compiled for eight TPU v5e chips: matrices are exchanged, never gathered."""

import os
import re

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import optax
import pytest
from flax import nnx
from jax.experimental import topologies

from shardwise import abstract_state, make_mesh, optim
from shardwise.optim.matrices import parameters_stored_as

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
        with parameters_stored_as(layout.params):
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(
        update, donate_argnums=(1, 2), out_shardings=(layout.params, layout.opt_state)
    )
    program = jitted.lower(params, state, params).compile()
    return program, 4 * spec.num_params


@pytest.mark.slow
def test_matrices_are_exchanged_once_in_and_once_out():
    program, momentum_bytes = compile_update(
        optim.muon(1e-3, weight_decay=0.1, clip=1.0), "fsdp=8"
    )
    memory, flops = program.memory_analysis(), program.cost_analysis()["flops"]
    lines = [line for line in program.as_text().splitlines() if " = " in line]
    exchanges = [line for line in lines if re.search(r" all-to-all(-start)?\(", line)]
    print(
        f"momentum of all matrices {momentum_bytes / 2**20:.0f} MiB; "
        f"temporary memory of an update {memory.temp_size_in_bytes / 2**20:.0f} MiB, "
        f"arithmetic per device {flops / 1e12:.2f} TFLOP, {len(exchanges)} all-to-alls"
    )
    # Four shapes, each in and out.
    assert len(exchanges) == 8
    # The gradient norm is a scalar, and nothing else is gathered or reduced.
    others = [
        line
        for line in lines
        if re.search(r" (all-gather|all-reduce|reduce-scatter)(-start)?\(", line)
    ]
    assert all(re.search(r" = \(?f32\[\]", line) for line in others), others
    # 5 iterations of three matmuls, an eighth of the matrices.
    widths = [3 * WIDTH, WIDTH, 4 * WIDTH, 4 * WIDTH]
    needed = 5 * LAYERS * sum(4 * WIDTH**2 * width + 2 * WIDTH**3 for width in widths)
    assert flops < 1.1 * needed / 8
    # An eighth of the gradients, the momentum and the weights.
    assert memory.argument_size_in_bytes < 1.02 * 3 * momentum_bytes / 8
    assert memory.temp_size_in_bytes < momentum_bytes / 4
