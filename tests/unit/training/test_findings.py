"""`fit` reports likely mistakes before it trains, and refuses them with `strict`."""

import io
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from shardwise import Batches, Mean, Run, fit, optim
from shardwise.errors import ConfigError
from shardwise.explanation.explain import explain_state
from shardwise.findings import Finding
from shardwise.recipe import load_recipe, make_run
from shardwise.run import Prepared, describe_state, prepare
from shardwise.training.starting import check_findings
from tests.helpers import command
from tests.helpers.runs import make_run as make_gpt_run

ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).normal(size=(16, 4)).astype("f4")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


def run_with(optimizer: optax.GradientTransformation, **fields: object) -> Run:
    return Run(
        model=Net,
        loss=lambda model, batch: Mean(model(batch["x"])[:, 0] ** 2),
        optimizer=optimizer,
        data=Batches({"x": X}, 8),
        steps=2,
        mesh="data=8",
        **fields,
    )


def printed(run: Run) -> str:
    console = Console(file=io.StringIO(), width=60)
    fit(run, console=console, plan=False)
    return console.file.getvalue()


def never_true(params: object) -> object:
    """Return False for every leaf, because it compares text with key objects."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in path, params)


BAD = {
    "decay-reaches-nothing": optax.adamw(1e-3, weight_decay=0.1, mask=never_true),
    "ascends": optax.chain(optax.trace(0.9), optax.scale(0.01)),
}


@pytest.mark.parametrize("name", BAD)
def test_fit_prints_one_line_for_a_mistake(name: str) -> None:
    lines = [line for line in printed(run_with(BAD[name])).splitlines() if name in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {name}: ")


def test_fit_prints_nothing_if_there_is_no_mistake() -> None:
    assert "warning" not in printed(run_with(optim.adamw(1e-3)))


@pytest.mark.parametrize("name", BAD)
def test_strict_refuses_a_mistake(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"there are findings:\n  {name}: .*\n.*strict"
    ):
        fit(run_with(BAD[name], strict=True), console=Console(quiet=True))


def test_strict_measures_an_optimizer_that_cannot_be_predicted() -> None:
    def update(updates: object, state: object, params: object = None) -> object:
        return jax.tree.map(lambda g: 0.1 * g, updates), state

    uphill = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    assert "warning" not in printed(run_with(uphill))
    with pytest.raises(ConfigError, match="ascends"):
        fit(run_with(uphill, strict=True), console=Console(quiet=True))


def with_finding(run: Run) -> Prepared:
    finding = Finding("of-the-loss", "the loss is a sum", "Return a mean.")
    return replace(prepare(run), findings=(finding,))


def test_findings_of_prepare_are_reported_too() -> None:
    console = Console(file=io.StringIO(), width=200)
    run = run_with(optim.adamw(1e-3))
    check_findings(run, with_finding(run), console)
    assert console.file.getvalue() == (
        "warning: of-the-loss: the loss is a sum. Return a mean.\n"
    )
    with pytest.raises(ConfigError, match="of-the-loss"):
        check_findings(replace(run, strict=True), with_finding(run), console)


RECIPES = {
    "recipes/digits.py": {},
    "recipes/flow.py": {},
    "recipes/gpt2.py": {},
    "recipes/llama.py": {},
    "recipes/stdlib_gpt.py": {},
    "recipes/stdlib_gpt.py sgd": {"optimizer": "sgd"},
    "recipes/stdlib_gpt.py muon": {"optimizer": "muon"},
    "examples/own_loop.py": {},
    "examples/sharded_model.py": {},
    "examples/transformer_block.py": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_and_examples_have_no_findings(name: str) -> None:
    recipe = load_recipe(ROOT / name.partition(" ")[0], "recipe")
    run = make_run(recipe, RECIPES[name])
    assert explain_state(describe_state(run), run.steps).findings == ()
    assert prepare(run).findings == ()


@pytest.mark.slow
def test_the_runs_of_other_tests_have_no_findings() -> None:
    assert "warning" not in printed(make_gpt_run())


RECIPE = '''
import numpy as np, optax
from flax import nnx
from shardwise import Batches, Mean, Run

def recipe() -> Run:
    """Train uphill."""
    return Run(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=lambda model, batch: Mean(model(batch["x"])[:, 0] ** 2),
        optimizer=optax.sgd(-0.1),
        data=Batches({"x": np.ones((16, 4), "f4")}, 8),
        steps=3,
    )
'''


def test_the_command_refuses_a_mistake_with_strict(tmp_path: Path) -> None:
    path = tmp_path / "uphill.py"
    path.write_text(RECIPE)
    refused = command.run("train", path, "--strict", cwd=tmp_path)
    assert refused.returncode == ConfigError.exit_code
    assert "ascends: updates point along the gradient" in refused.stderr
    assert not (tmp_path / "runs").exists()
    trained = command.run("train", path, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "warning: ascends: updates point along the gradient" in trained.stderr
