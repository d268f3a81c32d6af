"""The collectives of FSDP in programs for TPUs that are not attached."""

import os
import re

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import make_mesh
from shardwise.plan.compile import plan_run
from shardwise.plan.target import find_target
from shardwise.recipe import bind_recipe, load_recipe, make_run
from shardwise.step import fsdp
from tests.helpers.pages import ROOT

pytestmark = pytest.mark.slow


def moved(plan, kind):
    """Return the bytes that all collectives of a kind move."""
    return sum(traffic.bytes for traffic in plan.traffic if traffic.kind == kind)


@pytest.mark.parametrize(
    ("target", "mesh", "layers"),
    [
        ("v5e:2x4", "fsdp=8", "--no-scan-layers"),
        ("v5e:2x4", "data=2,fsdp=4", "--no-scan-layers"),
        ("v6e:2x4", "fsdp=8", "--scan-layers"),
        # A torus of three dims: in two stages.
        ("v5p:2x2x2", "fsdp=8", "--scan-layers"),
    ],
)
def test_gradients_are_scattered(target, mesh, layers):
    recipe = load_recipe(ROOT / "recipes" / "gpt2.py", "recipe")
    words = [layers, "--batch-size", "16", "--mesh", mesh]
    run = make_run(recipe, bind_recipe(recipe, words, prog="plan"))
    plan = plan_run(run, find_target(target))
    scattered, reduced = moved(plan, "reduce-scatter"), moved(plan, "all-reduce")
    print(f"{mesh}: reduce-scatter {scattered:.0f} bytes, all-reduce {reduced:.0f}")
    # 16 bits for each parameter. Embeddings of positions, norms and biases are left. Replicas add
    # their shards. Over a torus of three dims, one of two stages all-reduces the table.
    left = 0.03 + (0.25 if "data" in mesh else 0.0) + (0.31 if "v5p" in target else 0.0)
    assert scattered > (1 - left) * 2 * plan.num_params
    assert reduced < left * 2 * plan.num_params


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [("v5e:2x4", "fsdp=8"), ("v5p:4x4x4", "fsdp=64"), ("v5p:4x4x4", "fsdp=32,data=2")],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_are_gathered_and_not_reduced(topology, mesh, dim):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    spec = PartitionSpec(*[None] * dim, "fsdp")
    sharding = NamedSharding(make_mesh(mesh, devices), spec)
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=sharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    gather = jax.jit(lambda x: fsdp.all_gather(x, sharding, replicated))
    program = gather.lower(x).compile()
    kinds = set(re.findall(r" (all-[a-z]+)(?:-start)?\(", program.as_text()))
    assert kinds == {"all-gather"}


def test_neighbors_of_a_torus_gather_first():
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5p:4x4x4"
    ).devices
    mesh = make_mesh("fsdp=64", devices)
    first, second = fsdp._stages(mesh, ("fsdp",), fsdp.GATHER_SIDE)
    line = mesh.devices.flatten()
    for groups, num_changing in ((first, 1), (second, 2)):
        assert sorted(np.ravel(groups)) == list(range(64))
        for group in groups:
            coords = np.array([line[i].coords for i in group])
            assert (np.ptp(coords, axis=0) > 0).sum() == num_changing
    # Slices of a torus, and rings, are gathered at once.
    for side in (fsdp.GATHER_SIDE, fsdp.SCATTER_SIDE):
        assert fsdp._stages(make_mesh("data=2,fsdp=32", devices), ("fsdp",), side) == [
            None
        ]
