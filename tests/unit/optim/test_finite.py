"""Which updates a step checks for non-finite values."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import make_mesh, optim
from shardwise.optim.finite import all_finite, representative_leaves

PARAMS = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}


def checked(tx):
    return representative_leaves(tx, PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_is_judged_by_one_parameter_of_each_group(dtype):
    tx = optim.muon(1e-3, weight_decay=0.1, clip=1.0, iterate_in=dtype)
    assert set(checked(tx) or ()) == {"kernel", "bias"}


def test_iterations_in_float16_may_overflow():
    assert checked(optim.muon(1e-3, iterate_in="float16")) is None


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18])
def test_orthogonalized_matrices_are_finite_whatever_their_size(size):
    tx = optim.orthogonalize(rms=0.2)
    x = {"kernel": size * jnp.linspace(-1, 1, 12).reshape(4, 3)}
    assert jnp.isfinite(tx.update(x, tx.init(x))[0]["kernel"]).all()


def test_the_smallest_parameter_of_a_group_is_checked_and_not_gathered():
    shapes = {"large": (64, 64), "small": (16, 8), "empty": (0, 8)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    tx = optim.adamw(1e-3)
    names = representative_leaves(tx, params, tx.init(params))
    assert names == ("small",)
    mesh = make_mesh("fsdp=8")
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    check = jax.jit(lambda updates: all_finite(updates, names))
    updates = {"small": jax.device_put(params["small"], sharding)}
    assert check(updates)
    assert not check({"small": updates["small"].at[3, 5].set(jnp.nan)})
    assert "all-gather" not in check.lower(updates).compile().as_text()
