"""A checkpoint is plain Orbax, restores onto any mesh, and is refused with all differences at once."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise import Checkpoints, Rules, abstract_state, checkpoint, init_state, make_mesh
from shardwise.checkpoint.store import Keep
from shardwise.errors import CheckpointError
from shardwise.tree import named_leaves


class Net(nnx.Module):
    def __init__(self, rngs, width=32):
        self.hidden = nnx.Linear(16, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)


def spec_for(mesh, devices=8, optimizer=None, **options):
    rules = Rules(fsdp_min_size=16)
    return abstract_state(
        lambda rngs: Net(rngs, **options),
        optimizer or optax.adamw(1e-3),
        make_mesh(mesh, jax.devices()[:devices]),
        rules,
    )


@pytest.fixture
def saved(tmp_path):
    state = init_state(spec_for("data=2,fsdp=4"), 5)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, {"step": 0})
    checkpoints.close()
    return tmp_path / "checkpoints", {
        name: np.asarray(leaf) for name, leaf in named_leaves(state).items()
    }


@pytest.mark.parametrize(
    ("mesh", "devices"), [("data=2,fsdp=4", 8), ("fsdp=8", 8), ("fsdp=2", 2), ("data=1", 1)]
)
def test_it_restores_to_the_bit_onto_any_mesh(saved, mesh, devices):
    directory, leaves = saved
    spec = spec_for(mesh, devices)
    state = Checkpoints(directory).restore(spec, 0)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings
    for name, leaf in named_leaves(state).items():
        assert np.asarray(leaf).tobytes() == leaves[name].tobytes(), name


def test_a_copy_on_the_devices_is_saved_while_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_has_room", lambda tree: True)  # CPUs never say so
    spec = spec_for("data=2,fsdp=4")
    state = init_state(spec, 5)
    leaves = {name: np.array(leaf) for name, leaf in named_leaves(state).items()}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, {})
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # what a step does that takes the state over
        checkpoints.wait()
        restored = checkpoints.restore(spec, 0)
    for name, leaf in named_leaves(restored).items():
        assert np.asarray(leaf).tobytes() == leaves[name].tobytes(), name


class Chip:
    """A device with memory of its own."""

    def __init__(self, limit, peak):
        self.memory_stats = lambda: {"bytes_limit": limit, "peak_bytes_in_use": peak}

    def hold(self, size):
        return SimpleNamespace(
            addressable_shards=[SimpleNamespace(device=self, data=SimpleNamespace(nbytes=size))]
        )


def test_room_is_what_was_never_in_use():
    roomy, full = Chip(100, 60), Chip(100, 99)
    assert checkpoint._has_room([roomy.hold(30), roomy.hold(10)])
    assert not checkpoint._has_room([roomy.hold(30), roomy.hold(11)])
    assert not checkpoint._has_room([roomy.hold(30), full.hold(2)])
    assert not checkpoint._has_room({"x": jnp.ones(3)})  # on a CPU


def test_plain_orbax_reads_it(saved):
    directory, leaves = saved
    handler = ocp.PyTreeCheckpointHandler()
    item = handler.metadata(directory / "0" / "state")
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item.tree)
    tree = handler.restore(
        directory / "0" / "state", args=ocp.args.PyTreeRestore(restore_args=restore_args)
    )
    assert np.array_equal(tree["params"]["hidden"]["kernel"], leaves["params/hidden/kernel"])


def test_what_does_not_fit_is_refused_with_all_differences(saved):
    directory, _ = saved
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory).restore(
            spec_for("fsdp=8", width=64, optimizer=optax.sgd(0.1, momentum=0.9)), 0
        )
    rows = [line.split("  ") for line in str(error.value).split("\n")]
    rows = {tuple(part.strip() for part in row if part) for row in rows}
    assert ("params/hidden/kernel", "float32[16, 32]", "float32[16, 64]") in rows
    assert ("opt_state/0/mu/hidden/kernel", "float32[16, 32]", "-") in rows
    assert ("opt_state/0/trace/hidden/kernel", "-", "float32[16, 64]") in rows


def test_another_dtype_is_refused_and_not_cast(saved):
    directory, _ = saved
    half = optax.adamw(1e-3, mu_dtype="bfloat16")
    with pytest.raises(
        CheckpointError,
        match=r"opt_state/0/mu/hidden/kernel +float32\[16, 32\] +bfloat16\[16, 32\]",
    ):
        Checkpoints(directory).restore(spec_for("fsdp=8", optimizer=half), 0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_bit_and_every_cut_is_found(saved, data):
    directory, _ = saved
    files = sorted(
        path for path in (directory / "0").rglob("*") if path.is_file() and path.stat().st_size
    )
    path = data.draw(st.sampled_from(files))
    good = path.read_bytes()
    position, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    damaged = (
        bytes([*good[:position], good[position] ^ 1 << bit, *good[position + 1 :]])
        if data.draw(st.booleans())
        else good[:position]
    )
    path.write_bytes(damaged)
    try:
        assert Checkpoints(directory).verify(0)
    finally:
        path.write_bytes(good)
    assert Checkpoints(directory).verify(0) == []


def test_files_that_are_missing_or_too_many_and_links_are_found(saved, tmp_path):
    directory, _ = saved
    (directory / "0" / "more").write_text("")
    assert Checkpoints(directory).verify(0) == [f"{directory / '0' / 'more'} does not belong to it"]
    (directory / "0" / "more").unlink()
    (directory / "0" / "meta.json").rename(tmp_path / "meta.json")
    assert Checkpoints(directory).verify(0) == [f"{directory / '0' / 'meta.json'} is missing"]
    (directory / "0" / "meta.json").symlink_to(tmp_path / "meta.json")
    assert "neither a file nor a directory" in Checkpoints(directory).verify(0)[0]


def three(tmp_path, keep=None):
    """Three small checkpoints, each with its own values."""
    spec = spec_for("data=1", 1)
    state = init_state(spec, 5)
    with Checkpoints(tmp_path / "checkpoints", keep) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(
                replace(state, step=jnp.int32(step)),
                {"metrics": {"eval_loss": {10: 1.0, 20: 2.0, 30: 3.0}[step]}},
            )
    return spec, Checkpoints(tmp_path / "checkpoints", keep)


def test_a_damaged_step_is_kept_aside_and_the_one_before_is_used(tmp_path):
    _, checkpoints = three(tmp_path)
    for name in ("040", "٤٠", "40.tmp", "forty", "-1"):
        (checkpoints.directory / name).mkdir()
    assert checkpoints.steps() == [10, 20, 30]
    largest = max(
        (checkpoints.path(30) / "state").rglob("*"),
        key=lambda path: path.stat().st_size * path.is_file(),
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    warnings = []
    assert checkpoints.newest_good(warnings.append) == 20
    assert len(warnings) == 1
    assert str(largest) in warnings[0]
    assert "going back to step 20" in warnings[0]
    assert (checkpoints.directory / "30.bad").is_dir()
    for step in (10, 20):
        (checkpoints.path(step) / "MANIFEST").unlink()
    for _ in range(2):  # also when nothing but what was kept aside is left: never a fresh start
        with pytest.raises(CheckpointError, match="No whole checkpoint is left"):
            checkpoints.newest_good(warnings.append)


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.floats(allow_nan=False), min_size=1), st.integers(1, 4), st.integers(0, 7),
    st.integers(0, 4), st.booleans(),
)  # fmt: skip
def test_the_newest_and_the_best_are_kept(metrics, last, every, best, largest):
    kept = Keep(last=last, every=every, best=best, largest=largest).chosen(metrics)
    assert set(sorted(metrics)[-last:]) <= kept
    assert all(step in kept for step in metrics if every and step % every == 0)
    values = sorted((value for value in metrics.values() if value is not None), reverse=largest)[
        :best
    ]
    assert (
        sorted((v for s, v in metrics.items() if s in kept and v is not None), reverse=largest)[
            : len(values)
        ]
        == values
    )
    assert len(kept) <= last + best + len([step for step in metrics if every and step % every == 0])


def test_retention_keeps_the_best_beside_the_newest(tmp_path):
    _, checkpoints = three(tmp_path, Keep(last=1, best=1))
    assert checkpoints.steps() == [10, 30]
    assert [
        path.name for path in checkpoints.directory.iterdir() if not path.name.isdecimal()
    ] == []


def test_a_checkpoint_is_never_overwritten_and_a_full_disk_is_foreseen(tmp_path, monkeypatch):
    spec, checkpoints = three(tmp_path)
    state = checkpoints.restore(spec, 30)
    with pytest.raises(CheckpointError, match="is there already"):
        checkpoints.save(state, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"does not fit: 1000 B are free"):
        checkpoints.save(replace(state, step=jnp.int32(40)), {})
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["10", "20", "30"]
