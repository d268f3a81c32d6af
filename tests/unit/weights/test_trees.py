"""Checkpoints that plain Orbax wrote become the start of a run."""

import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
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
    lora,
    make_mesh,
)
from shardwise.checkpoint.reader import open_step
from shardwise.cli import main
from shardwise.errors import CheckpointError, ConfigError
from shardwise.tree import named_leaves
from shardwise.weights.load import merged_step
from tests.helpers import command


class Net(nnx.Module):
    """Layers in a list, statistics, random streams, and a key."""

    def __init__(self, rngs, classes=8):
        self.layers = nnx.List(
            [nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)]
        )
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, classes, rngs=rngs)
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        x = self.layers[1](nnx.relu(self.layers[0](x)))
        return self.head(self.dropout(self.norm(x)))


def spec_for(mesh="data=2,fsdp=4", model=Net, devices=8):
    return abstract_state(
        model,
        optax.adam(1e-3),
        make_mesh(mesh, jax.devices()[:devices]),
        Rules(fsdp_min_size=16),
    )


def make_model(seed=7):
    model = Net(nnx.Rngs(seed))
    # Statistics and key that no seed leads to.
    model.norm.mean[...] = jnp.arange(16.0)
    model.key[...] = jax.random.key(99)
    return model


def pure(state):
    return nnx.to_pure_dict(state)


def values(tree):
    """Return the arrays of a tree by path. Keys are their bits."""
    leaves = named_leaves(tree)
    return {
        name: np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for name, leaf in leaves.items()
    }


def expected(model, *filters):
    return values(pure(nnx.state(model, *filters)))


def assert_equal(actual, wanted):
    actual = values(actual)
    assert actual.keys() <= wanted.keys()
    for name, value in actual.items():
        assert value.dtype == wanted[name].dtype, name
        assert value.tobytes() == wanted[name].tobytes(), name


# Saving as tutorials show it.


def manager(path, steps, make_args, **options):
    options = ocp.CheckpointManagerOptions(max_to_keep=3, **options)
    with ocp.CheckpointManager(path, options=options) as mngr:
        for step in steps:
            mngr.save(step, args=make_args(step))
        mngr.wait_until_finished()
    return path


def save_alone(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def by_manager(path, model, optimizer):
    _, state = nnx.split(model)
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    return manager(
        path,
        [50, 100],
        lambda step: ocp.args.StandardSave(state if step == 100 else zeros),
    )


def with_prefix(path, model, optimizer):
    options = {"step_prefix": "ckpt", "step_format_fixed_length": 6}
    args = ocp.args.StandardSave(nnx.state(model))
    return manager(path, [5, 12], lambda _: args, **options)


def composite(path, model, optimizer):
    _, params, _ = nnx.split(model, nnx.Param, ...)
    args = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        optimizer=ocp.args.StandardSave(nnx.state(optimizer)),
        extra=ocp.args.JsonSave({"epoch": 3}),
    )
    return manager(path, [7], lambda _: args)


def item_named_state(path, model, optimizer):
    args = ocp.args.Composite(state=ocp.args.StandardSave(nnx.state(model)))
    return manager(path, [7], lambda _: args)


def in_a_dictionary(path, model, optimizer):
    tree = {"model": nnx.state(model), "opt_state": nnx.state(optimizer), "step": 5}
    args = ocp.args.StandardSave(tree)
    return manager(path, [3], lambda _: args)


def pytree_in_a_dictionary(path, model, optimizer):
    tree = {"model": pure(nnx.state(model)), "opt_state": pure(nnx.state(optimizer))}
    return manager(path, [3], lambda _: ocp.args.PyTreeSave(tree))


def pytree_checkpointer(path, model, optimizer):
    ocp.PyTreeCheckpointer().save(path, pure(nnx.state(model, nnx.Param)))
    return path


WAYS = {
    "manager": by_manager,
    "one step of a manager": lambda *args: by_manager(*args) / "100",
    "manager with a prefix": with_prefix,
    "composite": composite,
    "one item of a composite": lambda *args: composite(*args) / "7" / "params",
    "item named state": item_named_state,
    "dictionary": in_a_dictionary,
    "pytree in a dictionary": pytree_in_a_dictionary,
    "pytree checkpointer": pytree_checkpointer,
    "checkpointer": lambda path, model, _: save_alone(path, nnx.state(model)),
    "pure dictionary": lambda path, model, _: save_alone(
        path, pure(nnx.state(model, nnx.Not(nnx.RngState)))
    ),
}


@pytest.fixture(scope="module")
def trained():
    model = make_model()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize("way", WAYS)
def test_every_usual_way_to_save_is_read_onto_a_mesh(tmp_path, trained, way):
    model, optimizer = trained
    path = WAYS[way](tmp_path / "plain", model, optimizer)
    spec = spec_for()
    state, loaded = load_initial(InitFrom(str(path)), spec, seed=0)
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == (
        spec.shardings.params
    )
    assert_equal(state.params, expected(model))
    if loaded.fresh:
        # Only the parameters were saved.
        assert set(loaded.fresh) == {"norm/mean", "norm/var", "key"}
    else:
        assert_equal(state.other, expected(model))
    assert int(state.step) == 0


def test_a_sharded_module_that_was_saved_itself_is_read(tmp_path):
    # As a module, not as its state. Orbax cannot restore modules with an `nnx.List`.
    mesh = make_mesh("fsdp=8")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(1))
    nnx.update(model, jax.device_put(nnx.state(model), sharding))
    save_alone(tmp_path / "a", model)
    spec = spec_for("data=1", lambda rngs: nnx.Linear(8, 16, rngs=rngs), devices=1)
    state, _ = load_initial(InitFrom(tmp_path / "a"), spec, seed=0)
    assert_equal(state.params, expected(model))
    save_alone(tmp_path / "b", Net(nnx.Rngs(0)))
    with pytest.raises(CheckpointError, match=r"Save nnx.state\(module\) instead"):
        load_initial(InitFrom(tmp_path / "b"), spec_for(), seed=0)


class Odd(nnx.Module):
    """Variables that are named `value`, and an array outside of a variable."""

    def __init__(self, rngs):
        self.value = nnx.Linear(8, 4, rngs=rngs)
        self.attention = nnx.Module()
        self.attention.value = nnx.Param(jax.random.normal(rngs.params(), (8, 4)))
        self.table = np.arange(8.0, dtype=np.float32)


@pytest.mark.parametrize("layout", [lambda state: state, pure], ids=["state", "pure"])
def test_variables_may_be_named_value(tmp_path, layout):
    model = Odd(nnx.Rngs(1))
    path = save_alone(tmp_path / "a", layout(nnx.state(model)))
    state, loaded = load_initial(InitFrom(path), spec_for(model=Odd), seed=0)
    wanted = expected(model)
    assert wanted.keys() == loaded.taken.keys()
    assert_equal(state.params, wanted)


def test_a_run_starts_from_it(tmp_path, trained):
    path = composite(tmp_path / "plain", *trained)
    x = np.ones((16, 8), np.float32)
    run = Run(
        model=Net,
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.0),
        data=Batches({"x": x}, 8),
        steps=1,
        init_from=InitFrom(path),
        out=tmp_path / "run",
    )
    console = Console(file=io.StringIO(), width=200)
    result = fit(run, console=console, plan=False)
    assert_equal(result.state.params, expected(trained[0]))
    log = console.file.getvalue()
    # The title of a table is wrapped to its width.
    assert f"weightsfrom{path}/7/params" in "".join(log.split())
    assert "initialized from the seed" in log


# Which tree


@pytest.fixture
def two_models(tmp_path, trained):
    """A checkpoint with two items that match the model."""
    model, optimizer = trained
    average = jax.tree.map(lambda leaf: leaf / 2, nnx.state(model, nnx.Param))
    args = ocp.args.Composite(
        model=ocp.args.StandardSave(nnx.state(model, nnx.Param)),
        ema=ocp.args.StandardSave(average),
        optimizer=ocp.args.StandardSave(nnx.state(optimizer)),
        extra=ocp.args.JsonSave({"epoch": 3}),
    )
    return manager(tmp_path / "two", [1], lambda _: args)


def test_an_item_is_chosen_by_name(two_models, trained):
    spec = spec_for()
    state, loaded = load_initial(InitFrom(two_models, item="ema"), spec, seed=0)
    half = {name: value / 2 for name, value in expected(trained[0], nnx.Param).items()}
    assert_equal(state.params, half)
    assert loaded.source.endswith("two/1/ema")
    # Anything may be chosen, also by the path of a subtree.
    init = InitFrom(two_models, item="optimizer/opt_state/0/mu")
    state, loaded = load_initial(init, spec, seed=0)
    assert not any(value.any() for value in values(state.params).values())
    assert loaded.item == "opt_state/0/mu"


def test_several_trees_that_match_are_refused_with_a_list(two_models):
    with pytest.raises(CheckpointError) as error:
        load_initial(InitFrom(two_models), spec_for(), seed=0)
    text = str(error.value)
    assert text.startswith("init_from: several trees match this model in")
    items = [line.split()[0] for line in text.splitlines()[1:]]
    assert {"ema", "model", "optimizer", "optimizer/opt_state"} <= set(items)


@pytest.mark.parametrize("item", ["modle", "extra", "model/nothing", "1"])
def test_a_missing_item_is_refused_with_a_list(two_models, item):
    message = rf"has no arrays in '{item}'. It has:\n +item +arrays\n +ema +8"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(two_models, item=item), spec_for(), seed=0)


def test_a_subtree_of_the_only_item_is_chosen_by_its_path(tmp_path, trained):
    weights = pure(nnx.state(trained[0], nnx.Param))
    tree = {"state": {"params": weights, "ema": weights}}
    path = save_alone(tmp_path / "a", tree)
    # Two levels down nothing is found without a name.
    with pytest.raises(CheckpointError, match="does not match this model"):
        load_initial(InitFrom(path), spec_for(), seed=0)
    init = InitFrom(path, item="state/params")
    state, loaded = load_initial(init, spec_for(), seed=0)
    assert_equal(state.params, expected(trained[0]))
    assert loaded.item == "state/params"


def test_the_state_of_an_optimizer_is_never_taken_for_weights(tmp_path, trained):
    model, _ = trained
    momentum = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    trace = momentum.opt_state[0].trace
    args = ocp.args.Composite(
        optimizer=ocp.args.StandardSave(nnx.state(momentum)),
        opt=ocp.args.StandardSave(pure(trace)),
    )
    path = manager(tmp_path / "a", [1], lambda _: args)
    with pytest.raises(CheckpointError, match=r"no tree matches .*\n.*arrays"):
        load_initial(InitFrom(path), spec_for(), seed=0)


def test_items_and_best_steps_belong_to_their_kind_of_checkpoint(tmp_path, trained):
    path = by_manager(tmp_path / "plain", *trained)
    for options in ({"step": "best"}, {"average": True}):
        with pytest.raises(ConfigError, match="written by plain Orbax"):
            load_initial(InitFrom(path, **options), spec_for(), seed=0)
    with pytest.raises(CheckpointError, match=r"has no step 7. Saved steps: 50, 100"):
        load_initial(InitFrom(path, step=7), spec_for(), seed=0)
    with pytest.raises(CheckpointError, match=r"is not step 50. Drop `step`"):
        load_initial(InitFrom(path / "100", step=50), spec_for(), seed=0)
    state, _ = load_initial(
        InitFrom(path, step=50, rename={"key": None}), spec_for(), 0
    )
    assert not any(value.any() for value in values(state.params).values())
    run = tmp_path / "run"
    with Checkpoints(run) as checkpoints:
        checkpoints.save(init_state(spec_for(), 0), {})
    with pytest.raises(ConfigError, match=r"it has no items. Drop `item`"):
        load_initial(InitFrom(run, item="params"), spec_for(), seed=0)
    # The arrays of a run have digests, which only the complete step has.
    message = f"is a part of the checkpoint {run}/0. Pass {run}/0"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(run / "0/state"), spec_for(), seed=0)


# Models that differ


def test_other_shapes_and_missing_names_are_listed(tmp_path, trained):
    path = composite(tmp_path / "plain", *trained)
    spec = spec_for(model=lambda rngs: Net(rngs, classes=3))
    message = r"head/kernel +float32\[16, 8\] +float32\[16, 3\]"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(path), spec, seed=0)
    state, loaded = load_initial(InitFrom(path, {"head/*": None}), spec, seed=0)
    assert_equal(state.params["layers"], values(pure(nnx.state(trained[0].layers))))
    assert set(loaded.left_out) == {"head/kernel", "head/bias"}


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.body = Net(rngs)
        self.top = nnx.Linear(8, 2, rngs=rngs)


def test_variables_are_renamed(tmp_path, trained):
    path = by_manager(tmp_path / "plain", *trained)
    init = InitFrom(path, {"body/*": "*", "top/*": None})
    state, _ = load_initial(init, spec_for(model=Outer), seed=0)
    assert_equal(state.params["body"], expected(trained[0]))
    # Without the pattern, the table names what the checkpoint has.
    with pytest.raises(CheckpointError, match="Did you mean 'head/kernel'"):
        load_initial(InitFrom(path), spec_for(model=Outer), seed=0)


def test_a_base_of_adapters_is_found_again(tmp_path, two_models, trained):
    x = np.ones((16, 8), np.float32)
    run = Run(
        model=lora(Net, "layers/*/kernel", rank=2),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.0),
        data=Batches({"x": x}, 8),
        steps=1,
        init_from=InitFrom(two_models, item="ema"),
        out=tmp_path / "run",
    )
    fit(run, console=Console(quiet=True), plan=False)
    merged = merged_step(open_step(tmp_path / "run/checkpoints/1"))
    name = "params/head/kernel"
    value = expected(trained[0])["head/kernel"] / 2
    assert np.array_equal(merged.read([name])[name], value)


# Damaged and hostile files


def test_links_are_refused(tmp_path, trained):
    path = by_manager(tmp_path / "plain", *trained)
    secret = save_alone(tmp_path / "secret", nnx.state(trained[0]))
    for place in ("100/default", "100/default/d/link"):
        shutil.copytree(path, tmp_path / "copy", symlinks=True)
        link = tmp_path / "copy" / place
        if link.is_dir():
            shutil.rmtree(link)
        link.symlink_to(secret)
        with pytest.raises(CheckpointError, match=f"{link} is a link"):
            load_initial(InitFrom(tmp_path / "copy"), spec_for(), seed=0)
        shutil.rmtree(tmp_path / "copy")


def test_a_huge_shape_is_refused_before_it_is_read(tmp_path, trained):
    path = save_alone(tmp_path / "plain", pure(nnx.state(trained[0], nnx.Param)))
    base = f"file://{path}/"
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    array = json.loads(store["head.bias/.zarray"])
    array |= {"shape": [10**15], "chunks": [10**6]}
    store["head.bias/.zarray"] = json.dumps(array).encode()
    message = r"head/bias +float32\[1000000000000000\] +float32\[8\]"
    with pytest.raises(CheckpointError, match=message):
        load_initial(InitFrom(path), spec_for(), seed=0)


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b'{"use_ocdbt": true}'])
def test_a_damaged_list_is_refused_in_one_line(tmp_path, trained, content):
    path = by_manager(tmp_path / "plain", *trained)
    (path / "100/default/_METADATA").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read|OCDBT") as error:
        load_initial(InitFrom(path), spec_for(), seed=0)
    assert "\n" not in str(error.value)


RECIPE = """
import numpy as np, optax
from flax import nnx
from shardwise import Batches, InitFrom, Run

def recipe(weights: str, out: str) -> Run:
    return Run(
        model=lambda rngs: nnx.Linear(64, 64, rngs=rngs),
        loss=lambda model, batch: model(batch["x"]).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches({"x": np.ones((8, 64), np.float32)}, 8),
        steps=1,
        init_from=InitFrom(weights),
        out=out,
    )
"""


@pytest.mark.slow
def test_a_truncated_array_ends_a_run_with_one_line(tmp_path):
    path = save_alone(tmp_path / "a", nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
    (tmp_path / "recipe.py").write_text(RECIPE)
    words = ("train", "recipe.py", "--weights", "a", "--no-plan", "--out")
    assert command.run(*words, "good", cwd=tmp_path).returncode == 0
    largest = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    result = command.run(*words, "bad", cwd=tmp_path)
    assert result.returncode == 4
    assert "cannot be read" in result.stderr
    assert "Traceback" not in result.stderr


# Checkpoints of plain Orbax in the directory of a run


def test_a_run_neither_deletes_nor_renames_them(tmp_path, trained, capsys):
    path = by_manager(tmp_path / "run" / "checkpoints", *trained)
    before = sorted(path.rglob("*"))
    state = init_state(spec_for(), 0)
    with Checkpoints(path) as checkpoints:
        with pytest.raises(CheckpointError, match="Orbax wrote without shardwise"):
            checkpoints.save(state, {})
        with pytest.raises(CheckpointError, match="with another `out`"):
            checkpoints.newest_good(print)
    for words in (
        ["ls"],
        ["show"],
        ["verify"],
        ["export", "--out", str(tmp_path / "x")],
    ):
        for target in (path, path.parent, path / "100"):
            assert main(["checkpoint", words[0], str(target), *words[1:]]) == 4
            assert "without shardwise" in capsys.readouterr().err
    assert sorted(path.rglob("*")) == before
    # The run directory is also a place to start from.
    load_initial(InitFrom(path.parent), spec_for(), seed=0)
