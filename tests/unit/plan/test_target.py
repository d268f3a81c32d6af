"""Targets by name: found, or refused with the right way to write them."""

import sys
from dataclasses import replace

import jax
import pytest

from shardwise import make_mesh, runtime
from shardwise.errors import ConfigError
from shardwise.hardware import GPU_NAMES, TPU_NAMES, find_chip
from shardwise.plan import target
from shardwise.plan.target import (
    cpu_devices_of,
    find_target,
    local_target,
    missing_packages_named,
)


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("cpu:8", 8, "cpu"),
        ("cpu:3", 3, "cpu"),
        ("cpu", 8, "cpu"),
        ("v5e:4x4", 16, "TPU v5 lite"),
        ("v5p:2x2x2", 8, "TPU v5"),
        ("v6e:2x4", 8, "TPU v6 lite"),
        ("v4:2x2x1", 4, "TPU v4"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
        ("2*v5e:2x2", 8, "TPU v5 lite"),
    ],
)
def test_a_target_has_its_devices(text, count, kind):
    target = find_target(text)
    assert len(target.devices) == count
    assert target.kind == kind
    assert target.chip is find_chip(kind)
    assert target.limit > 0


def test_every_name_has_a_chip():
    assert all(find_chip(kind) is not None for kind in TPU_NAMES.values())
    gpus = [find_chip(kind) for kind in GPU_NAMES.values()]
    assert all(chip is not None and chip.architecture is not None for chip in gpus)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "how many chips"),
        ("v5e:3x3", "no such arrangement"),
        ("v9:2x2", "there is no chip 'v9'"),
        ("v5litepod:2x2", "there is no chip"),
        ("gpu:2x2", "write gpu:8"),
        ("2*cpu:4", "write cpu:8"),
        ("16 chips", "write it like"),
        ("gpu", "no GPU here"),
        ("h200:2x4", "write h200:8"),
        ("2*h200:4", "write h200:8"),
        ("h2000:8", "Did you mean 'h200'"),
        ("cpu:64", "--cpu-devices 64"),
    ],
)
def test_a_wrong_target_is_refused_with_the_way_to_write_it(text, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        find_target(text)


def test_without_the_tpu_compiler_the_message_names_the_extra(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[tpu-plan\]'"):
        find_target("v5e:2x4")


def test_without_the_gpu_compiler_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(runtime, "GPU_PLUGINS", ("jax_plugins.not_installed",))
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[gpu-plan\]'"):
        find_target("h200:8")


def test_a_description_has_the_numbers_of_the_gpu():
    kind = GPU_NAMES["h200"]
    text = target._describe(kind, find_chip(kind))
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert "core_count: 132" in text
    assert f"device_memory_size: {139 * 2**30}" in text


def test_a_missing_package_of_cuda_is_named():
    absent = replace(local_target(), is_attached=False)
    with (
        pytest.raises(ConfigError, match="cuDNN not found") as caught,
        missing_packages_named(absent),
    ):
        raise RuntimeError("cuDNN not found.")
    assert "pip install 'shardwise[gpu-plan]'" in str(caught.value)
    # On devices that are attached, and for other errors, the error stays.
    for devices, message in ((local_target(), "cuDNN not found."), (absent, "other")):
        with (
            pytest.raises(RuntimeError, match=message),
            missing_packages_named(devices),
        ):
            raise RuntimeError(message)


def test_the_default_target_is_the_devices_of_this_process():
    target = local_target()
    assert target.devices == tuple(jax.devices())
    assert target.chip is None  # the speed of CPUs is unknown
    assert 2**28 < target.limit < 2**44


def test_the_number_of_virtual_devices_is_known_before_jax_starts():
    assert cpu_devices_of("cpu:8") == 8
    assert cpu_devices_of("v5e:2x2") is None


def test_slices_are_connected_by_the_axis_that_shards_the_batch():
    target = find_target("2*v5e:2x2")
    for text, crossing in (
        ("data=2,model=4", "data"),
        ("model=4,data=2", "data"),
        ("fsdp=8", "fsdp"),
        ("data=4,model=2", "data"),
    ):
        mesh = make_mesh(text, target.devices)
        for index, axis in enumerate(mesh.axis_names):
            slices = (
                {d.slice_index for d in mesh.devices.take(0, axis=1 - index).flat}
                if mesh.devices.ndim > 1
                else {0, 1}
            )
            assert (len(slices) == 2) == (axis == crossing), (text, axis)
    mesh = make_mesh("data=2,fsdp=2,model=4", find_target("4*v5e:2x2").devices)
    # `model` stays within a slice.
    for row in mesh.devices.reshape(4, 4):
        assert len({device.slice_index for device in row}) == 1
