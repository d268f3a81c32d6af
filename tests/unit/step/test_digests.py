"""Tests of digests: every bit counts, and no mesh does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.step.digests import (
    as_text,
    combine,
    device_digests,
    disagreeing,
    from_text,
    tree_digests,
)

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.normal(size=(16, 8)).astype("f4"),
    "bfloat16": jnp.asarray(RNG.normal(size=(16, 8)), jnp.bfloat16),
    "float16": RNG.normal(size=(8, 3)).astype("f2"),
    "float8": jnp.asarray(RNG.normal(size=(8, 3)), jnp.float8_e4m3fn),
    "int32": RNG.integers(-9, 9, (8,), np.int32),
    "uint8": RNG.integers(0, 255, (8, 2), np.uint8),
    "bool": RNG.integers(0, 2, (8,)).astype(bool),
    "complex": (RNG.normal(size=(8, 2)) + 1j * RNG.normal(size=(8, 2))).astype("c8"),
    "scalar": np.float32(3.5),
}


def flipped(array, index, bit):
    """Return a copy of an array with one bit changed."""
    array = np.array(array)
    array.reshape(-1).view(np.uint8)[index % array.nbytes] ^= 1 << bit
    return array


@settings(max_examples=60)
@given(
    name=st.sampled_from([name for name in ARRAYS if name != "bool"]),
    index=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_every_bit_counts(name, index, bit):
    array = ARRAYS[name]
    before, after = tree_digests([array, flipped(array, index, bit)])
    assert before != after


def test_the_place_of_a_word_counts():
    array = np.arange(12, dtype="f4").reshape(3, 4)
    swapped = array.copy()
    swapped[0, 1], swapped[2, 3] = array[2, 3], array[0, 1]
    digests = np.asarray(tree_digests([array, swapped, array.T, array.reshape(4, 3)]))
    assert digests[0] not in digests[[1, 2]]
    # -0.0 and 0.0 are equal numbers with different bits.
    assert len(set(np.asarray(tree_digests([np.float32(0), np.float32(-0.0)])))) == 2


def test_typed_keys_have_digests():
    keys = [jax.random.key(0), jax.random.key(1)]
    before, after = tree_digests(keys)
    assert before != after


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=4", "fsdp=2,model=4"])
def test_digests_do_not_depend_on_the_mesh(mesh):
    mesh = make_mesh(mesh)
    arrays = list(map(np.asarray, ARRAYS.values()))
    expected = np.asarray(tree_digests(arrays))
    for spec in (P(), P(mesh.axis_names[0]), P(mesh.axis_names)):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P()))
            for x in arrays
        ]
        np.testing.assert_array_equal(tree_digests(placed), expected)


def test_texts_of_digests():
    digests = np.array([0, 1, 2**32 - 1], np.uint32)
    assert as_text(digests) == "0000000000000001ffffffff"
    np.testing.assert_array_equal(from_text(as_text(digests)), digests)
    assert len(combine(digests)) == 16
    assert combine(digests) != combine(digests[::-1])


def with_wrong_copy(array, sharding, *devices):
    """Return an array on a mesh whose copies on some devices have one changed bit."""
    shards = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        shard = array[index]
        if device in devices:
            shard = flipped(shard, 5, 3)
        shards.append(jax.device_put(shard, device))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "model")])
@pytest.mark.parametrize("wrong", range(0, 8, 3))
def test_a_device_with_another_copy_is_found(spec, wrong):
    mesh = make_mesh("data=2,fsdp=2,model=2")
    device = mesh.devices.flat[wrong]
    good = jax.device_put(np.ones((4, 4), "f4"), NamedSharding(mesh, P()))
    bad = with_wrong_copy(
        np.arange(16, dtype="f4").reshape(4, 4), NamedSharding(mesh, spec), device
    )
    found = disagreeing(device_digests([good, bad]), mesh, [P(), spec])
    assert [leaf for leaf, _ in found] == [1]
    assert found[0][1] == [device]


def test_two_copies_cannot_say_which_is_wrong():
    mesh = make_mesh("data=2,fsdp=4")
    sharding = NamedSharding(mesh, P("fsdp"))
    bad = with_wrong_copy(np.ones((8, 2), "f4"), sharding, mesh.devices[0, 1])
    found = disagreeing(device_digests([bad]), mesh, [P("fsdp")])
    assert found == [(0, list(mesh.devices[:, 1]))]
