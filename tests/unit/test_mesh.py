"""Mesh strings: what they mean, and the errors for those that do not fit."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh, mesh_text, parse_mesh

sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(sizes, st.data())
def test_sizes_are_parsed_and_one_axis_can_be_filled(values, data):
    names = [f"axis{i}" for i in range(len(values))]
    want = dict(zip(names, values, strict=True))
    total = math.prod(values)
    assert parse_mesh(",".join(f"{n}={s}" for n, s in want.items()), total) == want
    filled = data.draw(st.sampled_from(names))
    assert (
        parse_mesh(
            ", ".join(f"{n}={-1 if n == filled else s}" for n, s in want.items()), total
        )
        == want
    )


@given(sizes, st.integers(1, 64))
def test_mesh_uses_all_devices_or_is_refused_with_one_that_does(values, devices):
    text = ",".join(f"a{i}={s}" for i, s in enumerate(values))
    if math.prod(values) == devices:
        assert math.prod(parse_mesh(text, devices).values()) == devices
    else:
        with pytest.raises(ConfigError) as error:
            parse_mesh(text, devices)
        suggestion = str(error.value).split("'")[3]
        assert math.prod(parse_mesh(suggestion, devices).values()) == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=4,model=3", "needs 12 devices, and there are 8. 'data=8,model=1' would"),
        ("data=3,model=-1", "a multiple of 3 devices, and there are 8"),
        ("data=-1,model=-1", "only one axis can be -1"),
        ("data=4,data=2", "axis 'data' is given twice"),
        ("data", "cannot read 'data'"),
        ("data=4;model=2", "cannot read"),
        ("data=0", "axis 'data' has size 0"),
        ("", "cannot read ''"),
    ],
)
def test_errors_name_the_values(text, message):
    with pytest.raises(ConfigError, match="mesh") as error:
        parse_mesh(text, 8)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "data=4,model=2",
        "data=2,model=4",
        "data=1,model=8",
        "data=8,model=1",
        "replica=2,fsdp=2,tp=2",
    ],
)
def test_meshes_have_automatic_axes_and_use_every_device(text):
    mesh = make_mesh(text)
    assert mesh_text(mesh) == text
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {device.id for device in mesh.devices.flat} == {
        device.id for device in jax.devices()
    }


def test_mesh_over_some_of_the_devices():
    assert make_mesh("data=-1", jax.devices()[:2]).shape == {"data": 2}
