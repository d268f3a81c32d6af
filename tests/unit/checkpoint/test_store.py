"""A checkpoint is plain Orbax, restores onto any mesh, and is refused with all differences."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise import Checkpoints, Rules, abstract_state, init_state, make_mesh
from shardwise.checkpoint import store
from shardwise.checkpoint.reader import open_step, verify_step
from shardwise.checkpoint.store import Keep
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.manifest import write_manifest
from shardwise.tree import named_leaves


class Net(nnx.Module):
    def __init__(self, rngs, width=32):
        self.hidden = nnx.Linear(16, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)


def spec_for(mesh, devices=8, optimizer=None, **options):
    return abstract_state(
        lambda rngs: Net(rngs, **options),
        optimizer or optax.adamw(1e-3),
        make_mesh(mesh, jax.devices()[:devices]),
        Rules(fsdp_min_size=16),
    )


@pytest.fixture
def saved(tmp_path):
    """The directory of one checkpoint, and its leaves by name."""
    state = init_state(spec_for("data=2,fsdp=4"), 5)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, {"step": 0})
    checkpoints.close()
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    return tmp_path / "checkpoints", leaves


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [("data=2,fsdp=4", 8), ("fsdp=8", 8), ("fsdp=2", 2), ("data=1", 1)],
)
def test_it_restores_bit_identical_onto_any_mesh(saved, mesh, devices):
    directory, leaves = saved
    spec = spec_for(mesh, devices)
    state = Checkpoints(directory).restore(spec, 0)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings
    for name, leaf in named_leaves(state).items():
        assert np.asarray(leaf).tobytes() == leaves[name].tobytes(), name


def test_a_copy_on_the_devices_is_saved_while_training_continues(tmp_path, monkeypatch):
    # CPUs report no memory statistics, so there is never room without this.
    monkeypatch.setattr(store, "_has_room", lambda tree: True)
    spec = spec_for("data=2,fsdp=4")
    state = init_state(spec, 5)
    leaves = {name: np.array(leaf) for name, leaf in named_leaves(state).items()}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, {})
        # A train step that donates the state deletes its buffers too.
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        checkpoints.wait()
        restored = checkpoints.restore(spec, 0)
    for name, leaf in named_leaves(restored).items():
        assert np.asarray(leaf).tobytes() == leaves[name].tobytes(), name


class FakeDevice:
    """A device that reports memory statistics."""

    def __init__(self, limit, peak):
        self.memory_stats = lambda: {"bytes_limit": limit, "peak_bytes_in_use": peak}

    def hold(self, size):
        """Return an array of `size` bytes on this device."""
        shard = SimpleNamespace(device=self, data=SimpleNamespace(nbytes=size))
        return SimpleNamespace(addressable_shards=[shard])


def test_there_is_room_for_as_much_as_was_never_in_use():
    roomy, full = FakeDevice(100, 60), FakeDevice(100, 99)
    assert store._has_room([roomy.hold(30), roomy.hold(10)])
    assert not store._has_room([roomy.hold(30), roomy.hold(11)])
    assert not store._has_room([roomy.hold(30), full.hold(2)])
    on_cpu = {"x": jnp.ones(3)}
    assert not store._has_room(on_cpu)


def test_plain_orbax_reads_it(saved):
    directory, leaves = saved
    handler = ocp.PyTreeCheckpointHandler()
    item = handler.metadata(directory / "0" / "state")
    restore_args = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item.tree
    )
    tree = handler.restore(
        directory / "0" / "state",
        args=ocp.args.PyTreeRestore(restore_args=restore_args),
    )
    assert np.array_equal(
        tree["params"]["hidden"]["kernel"], leaves["params/hidden/kernel"]
    )


def test_a_mismatch_is_refused_with_all_differences(saved):
    directory, _ = saved
    other = spec_for("fsdp=8", width=64, optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory).restore(other, 0)
    lines = [line.split("  ") for line in str(error.value).split("\n")]
    listed = {tuple(part.strip() for part in line if part) for line in lines}
    assert ("params/hidden/kernel", "float32[16, 32]", "float32[16, 64]") in listed
    assert ("opt_state/0/mu/hidden/kernel", "float32[16, 32]", "-") in listed
    assert ("opt_state/0/trace/hidden/kernel", "-", "float32[16, 64]") in listed


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
def test_every_flipped_bit_and_every_truncation_is_found(saved, data):
    directory, _ = saved
    files = [path for path in (directory / "0").rglob("*") if path.is_file()]
    path = data.draw(
        st.sampled_from(sorted(path for path in files if path.stat().st_size))
    )
    good = path.read_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        damaged = bytes(
            [*good[:position], good[position] ^ 1 << bit, *good[position + 1 :]]
        )
    else:
        damaged = good[:position]
    path.write_bytes(damaged)
    try:
        assert Checkpoints(directory).verify(0)
    finally:
        path.write_bytes(good)
    assert Checkpoints(directory).verify(0) == []


def test_missing_and_unexpected_files_and_links_are_found(saved, tmp_path):
    directory, _ = saved
    step = directory / "0"
    (step / "more").write_text("")
    assert Checkpoints(directory).verify(0) == [
        f"{step / 'more'} is not listed in MANIFEST"
    ]
    (step / "more").unlink()
    (step / "meta.json").rename(tmp_path / "meta.json")
    assert Checkpoints(directory).verify(0) == [f"{step / 'meta.json'} is missing"]
    (step / "meta.json").symlink_to(tmp_path / "meta.json")
    assert "neither a file nor a directory" in Checkpoints(directory).verify(0)[0]


def save_three(tmp_path, keep=None):
    """Save three small checkpoints with different metrics. Return the spec and the checkpoints."""
    spec = spec_for("data=1", 1)
    state = init_state(spec, 5)
    with Checkpoints(tmp_path / "checkpoints", keep) as checkpoints:
        for step, loss in {10: 1.0, 20: 2.0, 30: 3.0}.items():
            checkpoints.save(
                replace(state, step=jnp.int32(step)), {"metrics": {"eval_loss": loss}}
            )
    return spec, Checkpoints(tmp_path / "checkpoints", keep)


def test_a_damaged_step_is_renamed_and_the_previous_one_is_used(tmp_path):
    _, checkpoints = save_three(tmp_path)
    for name in ("040", "٤٠", "40.tmp", "forty", "-1"):
        (checkpoints.directory / name).mkdir()
    assert checkpoints.steps() == [10, 20, 30]
    files = (checkpoints.path(30) / "state").rglob("*")
    largest = max(files, key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[:-1])
    warnings = []
    assert checkpoints.newest_good(warnings.append) == 20
    assert len(warnings) == 1
    assert str(largest) in warnings[0]
    assert "going back to step 20" in warnings[0]
    assert (checkpoints.directory / "30.bad").is_dir()
    for step in (10, 20):
        (checkpoints.path(step) / "MANIFEST").unlink()
    # The second time only *.bad directories are left. That must not become a fresh start either.
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No intact checkpoint is left"):
            checkpoints.newest_good(warnings.append)


def test_a_step_under_another_number_is_set_aside(tmp_path):
    _, checkpoints = save_three(tmp_path)
    checkpoints.path(30).rename(checkpoints.path(40))
    shutil.copytree(checkpoints.path(10), checkpoints.path(35))
    assert "its meta.json names 30" in checkpoints.verify(40)[0]
    warnings = []
    assert checkpoints.newest_good(warnings.append) == 20
    assert "its meta.json names 30" in warnings[0]
    assert (checkpoints.directory / "35.bad").is_dir()
    assert (checkpoints.directory / "40.bad").is_dir()
    # A copy that is not named like a step is one.
    shutil.copytree(checkpoints.path(20), tmp_path / "best")
    assert verify_step(tmp_path / "best") == []


def test_a_state_of_another_step_is_not_restored(tmp_path):
    spec, checkpoints = save_three(tmp_path)
    moved = checkpoints.path(30).rename(checkpoints.path(40))
    (moved / "meta.json").write_text(json.dumps({"step": 40}))
    write_manifest(moved)
    assert checkpoints.verify(40) == [f"{moved}: the saved state belongs to step 30"]
    with pytest.raises(CheckpointError, match="holds the state of step 30"):
        checkpoints.restore(spec, 40)


NAMES = [
    "lr[1e-3]",
    "a*b?",
    "{a,b}",
    "50%20",
    "a#b",
    "two words",
    'it\'s "q"',
    "back\\slash",
    "new\nline",
    "größe",
    "**",
    "$HOME ~ file:",
]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_work_below_any_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    spec, checkpoints = save_three(folder)
    state = replace(init_state(spec, 5), step=jnp.int32(30))
    assert checkpoints.verify(30, state) == []
    restored = named_leaves(checkpoints.restore(spec, 30))
    for path, leaf in named_leaves(state).items():
        assert np.asarray(leaf).tobytes() == np.asarray(restored[path]).tobytes(), path
    saved = open_step(checkpoints.path(30))
    assert saved.read(["step"])["step"] == 30
    # The same files, read at a plain path.
    shutil.copytree(checkpoints.path(30), tmp_path / "plain" / "30")
    assert verify_step(tmp_path / "plain" / "30") == []


def test_arrays_that_cannot_be_read_are_found_although_all_digests_match(tmp_path):
    spec, checkpoints = save_three(tmp_path)
    state = checkpoints.restore(spec, 30)
    other = replace(state, params={"more": jnp.zeros(3)})
    assert "params/more" in checkpoints.verify(30, other)[0]
    (checkpoints.path(30) / "state" / "manifest.ocdbt").unlink()
    write_manifest(checkpoints.path(30))
    for problems in (checkpoints.verify(30), verify_step(checkpoints.path(30))):
        assert len(problems) == 1
        assert "manifest.ocdbt is missing" in problems[0]
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{checkpoints.path(20)}/state/"}
    ).result()
    keys = [key for key in store.list().result() if b"hidden.kernel/0" in key]
    for key in keys:
        store.write(key, None).result()
    write_manifest(checkpoints.path(20))
    problems = checkpoints.verify(20)
    assert len(problems) == len(keys)
    assert "has no content of 'opt_state/0/mu/hidden/kernel'" in problems[0]


@settings(max_examples=200)
@given(
    metrics=st.dictionaries(
        st.integers(0, 50), st.none() | st.floats(allow_nan=False), min_size=1
    ),
    last=st.integers(1, 4),
    every=st.integers(0, 7),
    best=st.integers(0, 4),
    largest=st.booleans(),
)
def test_the_newest_and_the_best_are_kept(metrics, last, every, best, largest):
    kept = Keep(last=last, every=every, best=best, largest=largest).chosen(metrics)
    periodic = [step for step in metrics if every and step % every == 0]
    assert set(sorted(metrics)[-last:]) <= kept
    assert set(periodic) <= kept
    measured = {step: value for step, value in metrics.items() if value is not None}
    best_values = sorted(measured.values(), reverse=largest)[:best]
    kept_values = sorted(
        (measured[step] for step in kept & measured.keys()), reverse=largest
    )
    assert kept_values[: len(best_values)] == best_values
    assert len(kept) <= last + best + len(periodic)


def test_retention_keeps_the_best_and_the_newest(tmp_path):
    _, checkpoints = save_three(tmp_path, Keep(last=1, best=1))
    assert checkpoints.steps() == [10, 30]
    assert all(path.name.isdecimal() for path in checkpoints.directory.iterdir())


def test_a_checkpoint_is_never_overwritten_and_a_full_disk_is_predicted(
    tmp_path, monkeypatch
):
    spec, checkpoints = save_three(tmp_path)
    state = checkpoints.restore(spec, 30)
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoints.save(state, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"does not fit on the disk: 1000 B free"):
        checkpoints.save(replace(state, step=jnp.int32(40)), {})
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [
        "10",
        "20",
        "30",
    ]


# A further tree of arrays


def test_a_further_tree_is_saved_with_the_state_and_restored(tmp_path):
    spec = spec_for("data=2,fsdp=4")
    state = init_state(spec, 5)
    sharded = jax.sharding.NamedSharding(spec.mesh, jax.sharding.PartitionSpec("fsdp"))
    counts = np.arange(4)
    extra = {
        "replay": {"rewards": jax.device_put(jnp.arange(8.0), sharded)},
        "history": [counts, np.array(7, np.int64)],
        "key": jax.random.key(1),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"metrics": {"eval_loss": jnp.float32(0.5)}}, extra)
        # The array belongs to the loop, which may change it.
        counts[:] = 0
        checkpoints.wait()
        assert checkpoints.verify(0) == []
        assert checkpoints.metadata(0)["metrics"] == {"eval_loss": 0.5}
        # The state is restored without it.
        restored = checkpoints.restore(spec, 0)
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        plain = checkpoints.restore_extra(0)
        assert list(plain["history"]["0"]) == [0, 1, 2, 3]
        assert plain["key"].dtype == np.uint32
        mesh = make_mesh("fsdp=2", jax.devices()[:2])
        halves = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        rewards = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=halves)
        like = {**extra, "replay": {"rewards": rewards}}
        same = checkpoints.restore_extra(0, like)
        assert same["replay"]["rewards"].sharding == halves
        assert np.array_equal(same["replay"]["rewards"], np.arange(8.0))
        assert isinstance(same["history"][0], np.ndarray)
        assert same["history"][1] == 7
        assert jax.random.key_data(same["key"]).tolist() == plain["key"].tolist()
        with pytest.raises(
            CheckpointError, match=r"extra/replay/rewards +float32\[8\] +-"
        ):
            checkpoints.restore_extra(0, {**extra, "replay": {}})


def test_there_may_be_no_further_tree(saved):
    directory, _ = saved
    checkpoints = Checkpoints(directory)
    assert checkpoints.restore_extra(0) == {}
    with pytest.raises(
        CheckpointError, match=r"differs from `like`:\n.*\n +extra/a +- "
    ):
        checkpoints.restore_extra(0, {"a": np.zeros(3)})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": {"b": "text"}}, r"extra\['a/b'\] is a str, .*`metadata`"),
        ({"n": 3}, r"extra\['n'\] is a int"),
        (np.zeros(3), r"extra is a ndarray. Pass a dictionary"),
        ({"a.b": np.zeros(1), "a": {"b": np.ones(1)}}, "would have the same name"),
    ],
)
def test_what_is_not_a_tree_of_arrays_is_refused(tmp_path, extra, message):
    state = init_state(spec_for("fsdp=8"), 0)
    with Checkpoints(tmp_path / "a") as checkpoints:
        with pytest.raises(ConfigError, match=message):
            checkpoints.save(state, extra=extra)
        assert not (tmp_path / "a").exists()
        checkpoints.save(state, extra={})
    assert Checkpoints(tmp_path / "a").latest() == 0


def test_numpy_arrays_are_saved_next_to_a_copy_on_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_has_room", lambda tree: True)
    state = init_state(spec_for("fsdp=8"), 0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={"a": np.arange(3), "b": jnp.ones(2)})
        checkpoints.wait()
        extra = checkpoints.restore_extra(0)
    assert extra["a"].tolist() == [0, 1, 2]
    assert extra["b"].tolist() == [1, 1]
