"""Arrays of all kinds in Orbax's format: random keys, complex numbers, damaged lists."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from rich.console import Console

from shardwise import (
    Batches,
    Checkpoints,
    InitFrom,
    Rules,
    Run,
    abstract_state,
    fit,
    init_state,
    load_initial,
    make_mesh,
    optim,
)
from shardwise.checkpoint.arrays import leaf_bytes, open_arrays, show_leaf
from shardwise.checkpoint.reader import open_step
from shardwise.errors import CheckpointError
from shardwise.tree import named_leaves
from shardwise.weights.export import export_plain
from tests.helpers import command

QUIET = Console(quiet=True)


class Noise(nnx.Variable):
    """A variable of a type that only this module knows."""


class Net(nnx.Module):
    """A model that draws its own noise, with keys that it keeps."""

    def __init__(self, rngs, impl="threefry2x32"):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.phase = nnx.Param(jnp.full((8,), 1 + 2j, jnp.complex64))
        self.key = Noise(jax.random.key(3, impl=impl))
        keys = jax.random.split(jax.random.key(4, impl=impl), 16)
        self.keys = Noise(keys, out_sharding=("fsdp",))

    def __call__(self, x):
        self.key[...], key = jax.random.split(self.key[...])
        self.keys[...] = jax.vmap(lambda key: jax.random.split(key)[0])(self.keys[...])
        noise = jax.random.normal(key, (8,))
        return jnp.abs(self.phase[...] * self.linear(x)) + noise


def spec_for(mesh, devices=8, **options):
    return abstract_state(
        lambda rngs: Net(rngs, **options),
        optax.adam(1e-2),
        make_mesh(mesh, jax.devices()[:devices]),
        Rules(fsdp_min_size=8),
    )


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(a, b):
    a, b = named_leaves(a), named_leaves(b)
    assert a.keys() == b.keys()
    assert [name for name in a if bits(a[name]) != bits(b[name])] == []


# Random keys and complex numbers


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_and_complex_numbers_restore_onto_any_mesh(tmp_path, impl):
    state = init_state(spec_for("fsdp=8", impl=impl), 0)
    assert state.other["keys"].sharding.shard_shape((16,)) == (2,)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        checkpoints.wait()
        for mesh, devices in (("data=2,fsdp=4", 8), ("data=1", 1)):
            spec = spec_for(mesh, devices, impl=impl)
            restored = checkpoints.restore(spec, 0)
            assert_same(restored, state)
            assert restored.other["key"].dtype == state.other["key"].dtype
            expected = spec.shardings.other["keys"]
            assert restored.other["keys"].sharding.is_equivalent_to(expected, 1)
    saved = open_step(tmp_path / "0")
    size = {"threefry2x32": 8}.get(impl, 16)
    assert leaf_bytes(saved.leaves["other/keys"]) == 16 * size
    assert np.array_equal(
        saved.read(["other/key"])["other/key"],
        jax.random.key_data(state.other["key"]),
    )


def test_keys_of_another_implementation_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(init_state(spec_for("fsdp=8", impl="rbg"), 0), {})
        checkpoints.wait()
        spec = spec_for("fsdp=8", impl="unsafe_rbg")
        message = r"other/key +key<rbg>\[\] +key<urbg>\[\]"
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(spec, 0)
        # Keys cannot be converted.
        init = InitFrom(tmp_path, cast=True)
        with pytest.raises(CheckpointError, match=r"keys +key<rbg>\[16\] +key<urbg>"):
            load_initial(init, spec, 0)


class KeysOnly(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.keys = Noise(jax.random.split(rngs.params(), 8))


def test_keys_are_initial_values_and_are_exported(tmp_path):
    def spec(mesh):
        return abstract_state(KeysOnly, optax.sgd(0.1), mesh)

    state = init_state(spec("fsdp=8"), 5)
    with Checkpoints(tmp_path / "steps") as checkpoints:
        checkpoints.save(state, {})
    file = tmp_path / "a.safetensors"
    export_plain(open_step(tmp_path / "steps/0"), file)
    for path in (tmp_path / "steps", file):
        loaded, _ = load_initial(InitFrom(path), spec("data=8"), seed=0)
        assert_same(loaded.other, state.other)
        assert_same(loaded.params, state.params)


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.key = Noise(jax.random.key(3))

    def __call__(self, x):
        self.key[...], key = jax.random.split(self.key[...])
        return self.linear(x) + jax.random.normal(key, (8,))


def test_a_resumed_run_continues_with_its_key_on_another_mesh(tmp_path):
    run = Run(
        model=Noisy,
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(1e-2),
        data=Batches({"x": np.ones((32, 4), np.float32)}, 8),
        steps=4,
        mesh="fsdp=8",
        out=tmp_path / "a",
    )
    fit(replace(run, steps=2, mesh="data=8"), console=QUIET, plan=False)
    result = fit(run, console=QUIET, plan=False)
    key = jax.random.key(3)
    for _ in range(4):
        key, _ = jax.random.split(key)
    assert bits(result.state.other["key"]) == bits(key)


RECIPE = """
from pathlib import Path
import sys
import numpy as np, optax
sys.path.insert(0, {folder!r})
from test_arrays import Net
from shardwise import Batches, Run

def recipe(out: Path | None = None, mesh: str = "data=8") -> Run:
    return Run(
        model=Net,
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.adam(1e-2),
        data=Batches({{"x": np.ones((32, 4), np.float32)}}, 8),
        steps=6,
        save_every=2,
        mesh=mesh,
        out=out,
    )
"""


@pytest.mark.slow
def test_keys_survive_a_kill(tmp_path):
    (tmp_path / "recipe.py").write_text(
        RECIPE.format(folder=str(Path(__file__).parent))
    )
    words = ("train", "recipe.py", "--cpu-devices", "8", "--no-plan")
    roots = str(Path(__file__).parents[3])
    options = {"cwd": tmp_path, "PYTHONPATH": f"{roots}/src:{roots}"}
    assert command.run(*words, "--out", "a", **options).returncode == 0
    killed = command.run(
        *words, "--out", "b", SHARDWISE_FAILPOINT="checkpoint.rename:2:kill", **options
    )
    assert killed.returncode == -9
    assert [path.name for path in (tmp_path / "b/checkpoints").iterdir()] != []
    resumed = command.run(*words, "--out", "b", "--mesh", "fsdp=8", **options)
    assert resumed.returncode == 0, resumed.stderr
    assert "at step 2" in resumed.stderr
    a, b = (open_step(tmp_path / name / "checkpoints/6") for name in "ab")
    names = ["other/key", "other/keys"]
    assert [show_leaf(b.leaves[name]) for name in names] == [
        "key<fry>[]",
        "key<fry>[16]",
    ]
    for name, value in a.read(names).items():
        assert np.array_equal(value, b.read(names)[name])


# The list of arrays


@pytest.fixture
def saved(tmp_path):
    """A tree that plain Orbax wrote, with a key."""
    tree = {"w": jnp.arange(8.0), "key": jax.random.key(1), "name": "text", "n": 3}
    ocp.PyTreeCheckpointer().save(tmp_path / "tree", tree)
    return tmp_path / "tree"


def test_arrays_and_numbers_are_listed(saved):
    arrays = open_arrays(saved)
    assert {name: show_leaf(leaf) for name, leaf in arrays.leaves.items()} == {
        "w": "float32[8]",
        "key": "key<fry>[]",
        "n": "int64[]",
    }
    assert np.array_equal(arrays.read(["w"])["w"], np.arange(8))


def test_two_leaves_with_one_name_are_refused(tmp_path):
    # Orbax itself restores one array for both.
    tree = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "tree", tree)
    with pytest.raises(CheckpointError, match="have the same name"):
        open_arrays(tmp_path / "tree")


def edit(path, change):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


def test_only_the_ocdbt_format_is_read(saved):
    # Old releases of Orbax write no entry.
    edit(saved / "_METADATA", lambda content: content.pop("use_ocdbt") and content)
    assert "w" in open_arrays(saved).leaves
    edit(saved / "_METADATA", lambda content: {**content, "use_ocdbt": False})
    with pytest.raises(
        CheckpointError, match=r"not in the OCDBT format.*save it again"
    ):
        open_arrays(saved)


def test_a_damaged_list_of_keys_is_refused(saved):
    file = saved / "array_metadatas" / "process_0"
    good = file.read_text()
    for old, new in (
        ("threefry2x32", "rbg"),
        ("threefry2x32", "os.system"),
        ('"array_metadatas"', '"other"'),
        ("{", "["),
    ):
        assert old in good
        file.write_text(good.replace(old, new))
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_arrays(saved)


def test_groups_whose_labels_have_slashes(tmp_path):
    """The label of a group is its pattern, which Orbax stores with the slash."""

    def run(steps):
        groups = [optim.Group("kernel/*", lr_scale=0.1), optim.Group("*")]
        return Run(
            model=lambda rngs: nnx.Dict(
                kernel=nnx.Linear(4, 4, rngs=rngs), other=nnx.Linear(4, 4, rngs=rngs)
            ),
            loss=lambda model, batch: (
                model["other"](model["kernel"](batch["x"])) ** 2
            ).mean(),
            optimizer=optim.adam(1e-2, groups=groups),
            data=lambda n: {"x": np.full((8, 4), n, np.float32)},
            steps=steps,
            out=tmp_path / "run",
        )

    fit(run(2), console=QUIET)
    assert int(fit(run(3), console=QUIET).state.step) == 3
    arrays = open_arrays(tmp_path / "run" / "checkpoints" / "3" / "state")
    labels = [name for name in arrays.leaves if "kernel/*" in name]
    assert labels
    assert arrays.unreadable() == []
    assert set(arrays.read(labels)) == set(labels)
