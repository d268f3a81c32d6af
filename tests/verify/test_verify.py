"""`verify` accepts right runs, finds planted mistakes, and names the leaf and the cause."""

import gc
import importlib
import importlib.util
import inspect
import json
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Batches,
    Rules,
    Run,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
    verify,
)
from shardwise.errors import ConfigError, NumericsError
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.recipe import load_recipe
from shardwise.tree import named_leaves
from shardwise.verification.compare import Quantity, largest_difference, make_side
from shardwise.verification.verify import meshes_to_verify
from tests.helpers import command

ROOT = Path(__file__).parents[2]
# The package has a function of this name, too.
verification = importlib.import_module("shardwise.verification.verify")
PLANTED = Path(__file__).with_name("planted.py")
spec = importlib.util.spec_from_file_location("planted", PLANTED)
planted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)


def checked(function, meshes, steps=1):
    knows_mesh = "mesh" in inspect.signature(function).parameters
    return verify(
        (lambda mesh: function(mesh=mesh)) if knows_mesh else function(), meshes, steps
    )


def largest_ratio(found):
    return max(c.ratio for result in found.results for c in result.worst.values())


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("good", "data=2,fsdp=4"),
        pytest.param("good_by_hand", "data=8", marks=pytest.mark.slow),
        pytest.param("good_positions", "data=2,context=4", marks=pytest.mark.slow),
    ],
)
def test_a_right_run_stays_far_below_the_tolerances(name, mesh):
    found = checked(getattr(planted, name), [mesh], steps=2)
    assert found.ok
    assert largest_ratio(found) < 0.3
    assert found.lines()[-1] == "1 of 1 meshes agree with one device."


@pytest.mark.slow
def test_the_programs_of_a_mesh_are_freed_before_the_next_one(monkeypatch):
    """Linux allows a process about 65 compiled programs."""
    sides = []

    def weakly(*args):
        side = make_side(*args)
        sides.append(weakref.ref(side))
        return side

    monkeypatch.setattr(verification, "make_side", weakly)
    alive = []

    def tell(text):
        if text.endswith("compiling and running"):
            gc.collect()
            alive.append([side() is not None for side in sides])

    assert verify(planted.good(), ["data=8", "fsdp=8", "data=4,fsdp=2"], 1, tell).ok
    # The first one is that of one device.
    assert alive == [
        [True, True, True, True],
        [True, False, True, True],
        [True, False, False, True],
    ]


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "leaf", "meaning"),
    [
        pytest.param(
            "summed_loss",
            "data=8",
            "gradient",
            "hidden/bias",
            "8 times that of one device, and the batch is in 8 shards",
            marks=pytest.mark.slow,
        ),
        (
            "summed_gradients",
            "data=8",
            "gradient",
            "hidden/bias",
            "8 times that of one device, and the batch is in 8 shards",
        ),
        pytest.param(
            "summed_updates",
            "data=8",
            "parameter",
            "hidden/bias",
            "every update is 8 times that of one device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "per_device_batch_norm",
            "data=8",
            "gradient",
            "hidden/bias",
            "a statistic is taken over the examples of one device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mesh_dropout",
            "data=8",
            "gradient",
            "hidden/bias",
            "a random stream depends on the mesh",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mean_of_means",
            "data=8",
            "gradient",
            "hidden/bias",
            "Examples do not have equal weight",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lost_row",
            "data=8",
            "gradient",
            "hidden/bias",
            "8 of 40 examples (4, 9, 14, 19, 24, 29, 34, 39)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "slightly_scaled",
            "data=8",
            "gradient",
            "hidden/bias",
            "1.0005 times that of one device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "one_shard",
            "data=8",
            "parameter",
            "hidden/bias",
            "replicas of an array are no longer the same",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "local_clipping",
            "fsdp=8",
            "parameter",
            "hidden/bias",
            "over the shard of a device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "counts_devices",
            "data=8",
            "statistic",
            "norm/seen",
            "a counter that counts devices",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shifted_positions",
            "data=2,context=4",
            "gradient",
            "out/bias",
            "With all tokens of a sequence on one device both agree",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mesh_data",
            "data=8",
            "batch",
            "w",
            "The data depend on the mesh",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mesh_weights",
            "fsdp=8",
            "initial state",
            "params/hidden/kernel",
            "The initial weights depend on the mesh",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_planted_mistake_is_found_and_named(name, mesh, kind, leaf, meaning):
    found = checked(getattr(planted, name), [mesh])
    first = found.results[0].first
    assert not found.ok
    assert (first.kind, first.leaf) == (kind, leaf)
    assert first.step == (0 if kind == "initial state" else 1)
    assert meaning in first.meaning
    assert largest_ratio(found) > (3 if name == "slightly_scaled" else 100)
    assert found.lines()[-1] == "0 of 1 meshes agree with one device."
    if name == "one_shard":
        assert first.devices.startswith("7 of 8 devices: data=1; data=2")
    if name == "mesh_weights":
        assert (first.shape, first.layout, first.why) == (
            (8, 32),
            "(-, fsdp)",
            "automatic FSDP on dim 1",
        )


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"rows": 21}, "padding would change 'loss': it depends on the number"),
        ({"rows": 48, "accumulate": 2}, "accumulate=2 would change the loss"),
    ],
)
def test_a_loss_that_depends_on_the_batch_size_is_refused(arguments, fact):
    with pytest.raises(ConfigError, match=fact):
        verify(planted.size_of_batch(**arguments), ["data=8"], steps=1)


@pytest.mark.slow
def test_a_loss_that_depends_on_the_batch_size_is_evaluated_without_padding():
    assert verify(planted.size_of_batch(last=20), ["data=8"], steps=1).ok


@pytest.mark.slow
def test_a_right_run_agrees_with_dropout_micro_batches_and_a_short_last_batch():
    run = planted.make(
        model=lambda rngs: planted.Net(
            rngs, dropout=lambda rngs: nnx.Dropout(0.2, rngs=rngs)
        )
    )
    evaluation = Batches(run.data.source, 24)
    run = replace(run, accumulate=4, eval_data=evaluation)
    found = verify(run, ["data=8"], steps=1)
    assert found.ok
    assert found.accumulation.mesh == "accumulate=4"
    assert Quantity.EVALUATION in found.results[0].worst


def test_small_parameters_are_sharded_so_that_fsdp_is_tested():
    run = replace(planted.make(), rules=Rules())
    mesh = make_mesh("fsdp=8")
    one = make_side(run, make_mesh("data=1", jax.devices()[:1]))
    assert make_side(run, mesh).num_fsdp_leaves == 0
    # All but the bias of size 1.
    assert make_side(run, mesh, one.spec).num_fsdp_leaves == 3
    found = verify(run, ["fsdp=8"], steps=1)
    assert found.ok
    # It would say that nothing is sharded.
    assert found.results[0].note == ""


def test_an_axis_that_shards_nothing_is_mentioned():
    run = planted.make(model=lambda rngs: Odd(rngs))
    found = verify(run, ["fsdp=8"], steps=1)
    assert found.ok
    assert "fsdp=8: no parameter can be sharded over fsdp, so it is not tested" in (
        found.lines()
    )


class Odd(nnx.Module):
    """A model without a dimension that 8 divides."""

    def __init__(self, rngs):
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(x[:, :5])[:, 0]


def test_the_halves_of_a_step_compute_the_step():
    run = planted.good()
    spec = abstract_state(run.model, run.optimizer, "data=4,fsdp=2", run.rules)
    step = make_train_step(spec, run.loss, run.data(0))
    batch, state = step.place(run.data(0)), init_state(spec, 0)
    halves, metrics = step.update(
        state, *step.gradients(state, batch)
    )  # donates nothing
    complete, complete_metrics = step(state, batch)
    for name, leaf in named_leaves(complete).items():
        np.testing.assert_allclose(
            np.asarray(leaf),
            np.asarray(named_leaves(halves)[name]),
            rtol=1e-5,
            atol=1e-7,
            err_msg=name,
        )
    assert float(metrics["loss"]) == pytest.approx(
        float(complete_metrics["loss"]), rel=1e-6
    )


def test_default_meshes_use_the_axes_that_the_model_knows():
    gpt = abstract_state(
        lambda rngs: GPT(PRESETS["byte"], rngs), optax.sgd(1.0), "data=8"
    )
    assert meshes_to_verify(gpt, Rules(), 8) == [
        "data=8",
        "fsdp=8",
        "model=8",
        "data=4,model=2",
        "data=2,fsdp=2,model=2",
    ]
    assert meshes_to_verify(gpt, Rules(), 2) == ["data=2", "fsdp=2", "model=2"]
    # Sequences of tokens get a context axis, if it divides them.
    assert meshes_to_verify(gpt, Rules(), 8, length=64)[-1] == "data=2,context=4"
    assert meshes_to_verify(gpt, Rules(), 2, length=64)[-1] == "context=2"
    without = meshes_to_verify(gpt, Rules(), 8)
    assert meshes_to_verify(gpt, Rules(), 8, length=30) == without
    assert meshes_to_verify(gpt, Rules(context=()), 8, length=64) == without
    sizes = LlamaConfig(64, 2, 4, 4, 32, 64, num_experts=4, top_k=2)
    experts = abstract_state(lambda rngs: Llama(sizes, rngs), optax.sgd(1.0), "data=8")
    assert {"data=2,expert=4", "stage=2,data=4"} <= set(
        meshes_to_verify(experts, Rules(), 8)
    )
    net = abstract_state(planted.Net, optax.sgd(1.0), "data=8")
    assert meshes_to_verify(net, Rules(), 8) == ["data=8", "fsdp=8", "data=2,fsdp=4"]
    assert meshes_to_verify(net, Rules(batch=("dp",), fsdp=()), 8) == ["dp=8"]
    assert meshes_to_verify(
        net, Rules(paths=(("hidden/kernel", (None, "columns")),)), 6
    ) == [
        "data=6",
        "fsdp=6",
        "columns=6",
        "data=3,columns=2",
    ]


@pytest.mark.slow
def test_an_impossible_mesh_is_refused_if_given_and_skipped_by_default():
    run = planted.make(
        lambda model, batch: planted.squares(model, batch).mean()
    )  # 40 rows
    with pytest.raises(ConfigError, match="needs 3 devices, and there are 8"):
        verify(run, ["data=3"])
    with pytest.raises(
        ConfigError, match="mesh axis 'model' \\(size 8\\) shards neither"
    ):
        verify(run, ["model=8"])
    found = verify(
        replace(run, rules=Rules(paths=(("out/bias", ("model",)),))), steps=1
    )  # it has one entry
    assert found.ok
    assert [result.mesh for result in found.results] == ["data=8", "fsdp=8"]
    assert list(found.left_out) == [
        "model=8",
        "data=4,model=2",
        "data=2,fsdp=2,model=2",
    ]
    assert "1 is not divisible by 8" in found.lines()[0]


class Flattens(nnx.Module):
    """Works on the tokens of all sequences as one matrix, which cannot stay sharded."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens).reshape(-1, 32)
        for _ in range(3):
            x = nnx.relu(self.out(x) @ self.embed.embedding[...])
        return self.out(x).reshape(*tokens.shape, -1)


@pytest.mark.slow
def test_a_context_axis_that_divides_no_work_is_skipped():
    found = verify(replace(planted.good_positions(), model=Flattens), steps=1)
    assert found.ok
    meshes = [result.mesh for result in found.results]
    assert meshes == ["data=8", "fsdp=8", "data=2,fsdp=4"]
    assert list(found.left_out) == ["data=2,context=4"]
    assert "repeat each other's work" in found.left_out["data=2,context=4"]


def test_an_iterator_is_refused_unless_the_run_is_made_for_each_mesh():
    batches = planted.good().data
    with pytest.raises(ConfigError, match="can be read once"):
        verify(replace(planted.good(), data=map(batches, range(9))), ["data=8"])
    assert verify(
        lambda mesh: replace(planted.good_by_hand(), data=map(batches, range(9))),
        ["data=8"],
        steps=2,
    ).ok


def test_a_non_finite_step_on_one_device_is_an_error():
    with pytest.raises(NumericsError, match="step 1 on one device is not finite"):
        verify(
            planted.make(
                lambda model, batch: jnp.log(-planted.squares(model, batch).mean())
            ),
            ["data=8"],
        )


@pytest.mark.slow
def test_the_reference_run_uses_no_donated_arrays(monkeypatch):
    """On accelerators a copy on the host does not keep a donated array alive."""
    from shardwise.verification import compare

    def copied(leaf):
        return np.array(jnp.copy(compare._raw(leaf)))

    monkeypatch.setattr(compare, "leaf_to_host", copied)
    assert verify(planted.good(), ["data=8"], steps=2).ok


def test_parameters_in_bfloat16_are_verified_in_float32():
    coarse = lambda rngs: nnx.Linear(8, 1, param_dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
    run = planted.make(
        lambda model, batch: ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean(),
        coarse,
    )
    found = verify(run, ["data=8"], steps=1)
    assert found.ok
    assert found.results[0].worst["gradient"].tolerance < 1e-3


class Rotation(nnx.Module):
    """Complex parameters and statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        angles = jax.random.normal(rngs.params(), (8, 8))
        self.phase = nnx.Param(jnp.exp(1j * angles))
        self.mean = nnx.Variable(jnp.zeros((8,), jnp.complex64))

    def __call__(self, x):
        y = self.linear(x) @ self.phase[...]
        self.mean[...] = y.mean(0)
        return jnp.abs(y)


def complex_run(scale=1.0):
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    return Run(
        model=Rotation,
        loss=lambda model, batch: (scale * model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches({"x": x}, 16),
        steps=2,
    )


def test_complex_parameters_are_verified():
    found = verify(complex_run(), ["fsdp=8"], steps=1)
    assert found.ok
    assert largest_ratio(found) < 0.3


@pytest.mark.slow
def test_wrong_gradients_of_complex_parameters_are_found():
    found = verify(
        lambda mesh: complex_run(1.0 if mesh == "data=1" else 2.0), ["fsdp=8"], 1
    )
    assert not found.ok


def test_differences_of_complex_numbers():
    a = np.array([1 + 1j, 2, np.nan], np.complex64)
    b = np.array([1 + 2j, 2, np.nan], np.complex64)
    assert largest_difference(a, b) == 1.0
    assert largest_difference(a, a) == 0.0
    assert largest_difference(a, np.zeros(3, np.complex64)) == np.inf


def test_code_that_fails_on_a_mesh_is_reported_with_its_place():
    def loss(model, batch):
        if jax.sharding.get_abstract_mesh().shape.get("data", 1) > 1:
            raise ValueError("no such axis")
        return planted.squares(model, batch).mean()

    with pytest.raises(
        ConfigError,
        match=r"on data=8: the loss failed .*: no such axis \(.*test_verify.py",
    ):
        verify(planted.make(loss), ["data=8"], steps=1)


# The command


def shardwise(*args):
    return command.run(*args, cwd=ROOT)


@pytest.mark.slow
def test_the_command_accepts_a_right_recipe(tmp_path):
    answer = tmp_path / "answer.json"
    done = shardwise(
        "verify",
        "examples/data_parallel_by_hand.py",
        "--meshes",
        "data=4",
        "fsdp=4",
        "--cpu-devices",
        4,
        "--json",
        answer,
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 meshes agree with one device." in done.stdout
    assert "fsdp=4: compiling" in done.stderr
    found = json.loads(answer.read_text())
    assert found["ok"]
    assert [mesh["mesh"] for mesh in found["meshes"]] == ["data=4", "fsdp=4"]
    assert found["meshes"][0]["worst"]["gradient"]["tolerance"] > 0


@pytest.mark.slow
def test_the_command_names_the_leaf_of_a_mistake(tmp_path):
    done = shardwise(
        "verify", f"{PLANTED}:one_shard", "--mesh", "data=8", "--verify-steps", 1
    )
    assert done.returncode == 5, done.stderr
    assert (
        "data=8 differs from one device at step 1, first in the parameter 'hidden/bias'"
        in done.stdout
    )
    assert "on 7 of 8 devices: data=1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_signal_ends_the_command_at_once():
    process = command.start("verify", "recipes/digits.py", cwd=ROOT)
    assert "one device: compiling" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert err.strip() == "shardwise: stopped by a signal; nothing was written."


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--meshes", "data=3"], "mesh 'data=3' needs 3 devices, and there are 8"),
        (["--meshes", "data=8", "--mehs", "data=8"], "--mesh"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_exit_with_2(args, words):
    done = shardwise("verify", f"{PLANTED}:one_shard", *args)
    assert done.returncode == 2
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_verifies_a_context_axis(tmp_path):
    answer = tmp_path / "answer.json"
    recipe = ["recipes/llama.py", "--length", 32, "--verify-steps", 2]
    meshes = ["--meshes", "data=2,context=4", "--cpu-devices", 8]
    done = shardwise("verify", *recipe, *meshes, "--json", answer)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 meshes agree with one device." in done.stdout
    (found,) = json.loads(answer.read_text())["meshes"]
    assert (found["mesh"], found["ok"]) == ("data=2,context=4", True)


# Every recipe and every example, on all meshes. The command above verifies a quick one.

SMALL = {"batch_size": 8, "length": 32}
RECIPES = {
    "stdlib_gpt": {**SMALL, "dropout": 0.1, "scan_layers": True},
    "tokens_gpt": {**SMALL, "pack": True},
    "gpt2": {**SMALL, "preset": "byte", "loss_chunks": 4},
    "llama": SMALL,
    "stdlib_moe": SMALL,
    "shakespeare": {"config": "cpu"},
    "digits": {},
    "flow": {},
}
EXAMPLES = (
    "data_parallel_by_hand",
    "own_loop",
    "sharded_model",
    "transformer_block",
)


def test_every_recipe_and_example_is_verified():
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == set(RECIPES)
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {
        *EXAMPLES,
        # These train many small models, or none.
        "optuna_sweep",
        "pictures",
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(
        "\n\n".join(f"{n} times {n} is {n * n}." for n in range(2000))
    )
    assert (
        shardwise(
            "data", "prepare", folder / "text.txt", "--out", folder / "data"
        ).returncode
        == 0
    )
    return folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, *EXAMPLES])
def test_recipes_and_examples_agree_with_one_device(name, request):
    arguments = dict(RECIPES.get(name, {}))
    if name == "tokens_gpt":
        arguments["data"] = request.getfixturevalue("prepared")
    if name == "shakespeare":
        arguments["data"] = request.getfixturevalue("prepared").with_name("text.txt")
    recipe = load_recipe(
        ROOT / ("recipes" if name in RECIPES else "examples") / f"{name}.py", "recipe"
    )
    found = verify(lambda mesh: recipe(mesh=mesh, **arguments), steps=3)
    assert found.ok, "\n".join(found.lines())
    assert largest_ratio(found) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", "sgd", "lion", "adafactor", "muon", "schedule_free", "prodigy"],
)
def test_no_optimizer_causes_a_false_alarm(optimizer):
    recipe = load_recipe(ROOT / "recipes" / "stdlib_gpt.py", "recipe")
    arguments = {
        **SMALL,
        "optimizer": optimizer,
        "steps": 20,
        "accumulate": 2,
        "dropout": 0.1,
        "scan_layers": True,
    }
    found = verify(
        lambda mesh: recipe(mesh=mesh, **arguments),
        ["data=2,fsdp=2,model=2", "fsdp=8"],
        steps=4,
    )
    assert found.ok, "\n".join(found.lines())
    assert largest_ratio(found) < 0.5
