"""`shardwise scale`: roles, coordinate check and transfer from the command line."""

import json
import textwrap

import pytest

from shardwise.cli import main

RECIPE = textwrap.dedent(
    """
    from pathlib import Path

    import numpy as np
    import optax
    from flax import nnx

    from shardwise import Batches, Mean, Run, scaled


    class Net(nnx.Module):
        def __init__(self, width, rngs):
            self.first = nnx.Linear(8, width, rngs=rngs)
            self.hidden = nnx.Linear(width, width, rngs=rngs)
            self.head = nnx.Linear(width, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.hidden(nnx.relu(self.first(x)))))


    def loss(model, batch):
        return Mean(((model(batch["x"]) - batch["y"]) ** 2).mean(axis=1))


    def standard(width: int = 32, lr: float = 1e-2, steps: int = 3,
                 out: Path | None = None, seed: int = 0) -> Run:
        "Train three linear layers."
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        data = Batches({"x": x, "y": x[:, :4] * x[:, 4:]}, batch_size=32)
        return Run(model=lambda rngs: Net(width, rngs), loss=loss,
                   optimizer=optax.adam(lr), data=data, steps=steps, out=out, seed=seed)


    def seedless(width: int = 32, lr: float = 1e-2, out: Path | None = None) -> Run:
        "Train with one seed."
        return standard(width, lr, out=out)


    recipe = scaled(width=32)(standard)
    """
)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.py").write_text(RECIPE)
    return "wide.py"


def test_roles_and_json(recipe, tmp_path, capsys):
    args = ["scale", recipe, "--sizes", "32,128", "--json", "a.json"]
    assert main(args) == 0
    assert "from width 32 to 128" in capsys.readouterr().out
    answer = json.loads((tmp_path / "a.json").read_text())
    found = {item["path"]: item for item in answer["parameters"]}
    assert found["hidden/kernel"]["role"] == "hidden"
    assert found["hidden/kernel"]["rate"] == 0.25
    assert found["head/kernel"]["init"] == 0.5


def test_a_recipe_without_the_decorator(recipe, capsys):
    assert main(["scale", f"{recipe}:standard", "--sizes", "32,64"]) == 0
    assert "from width 32 to 64" in capsys.readouterr().out


def test_explain_shows_the_roles(recipe, capsys):
    assert main(["explain", recipe, "--width", "64"]) == 0
    out = capsys.readouterr().out
    assert "from width 32 to 64" in out
    assert "scale_updates(multiplier=0.5)" in out
    # The measured update of the hidden layer is half as large as the learning rate.
    rows = out.partition("what each parameter gets")[2].splitlines()
    row = next(line for line in rows if "hidden/kernel" in line)
    assert [cell.strip() for cell in row.split("│")][5:7] == ["0.01", "0.005"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "32,x"], "'32,x' is not a list of sizes"),
        (["--sizes", "32,64", "--width", "64"], "--sizes varies"),
        (["--vary", "widht"], "Did you mean 'width'?"),
        (["--role", "head=hiden"], "Did you mean 'hidden'?"),
        (["--role", "heads/*=output"], "matches no parameter"),
        (["--transfer"], "--transfer needs --rates"),
        (["--transfer", "--rates", "1"], "not a range of learning rates"),
        (["--check", "--sizes", "32"], "Use at least 2"),
        (["--check", "--transfer"], "Use one of them"),
        (["--vary-depth", "depth"], "Give both"),
    ],
)
def test_mistakes(recipe, words, message, capsys):
    assert main(["scale", recipe, *words]) == 2
    assert message in capsys.readouterr().err


def test_several_seeds_need_an_argument(recipe, capsys):
    words = ["--sizes", "32,64", "--transfer", "--rates", "1e-3:1e-1:2", "--seeds", "2"]
    assert main(["scale", f"{recipe}:seedless", *words]) == 2
    assert "needs an integer argument 'seed'" in capsys.readouterr().err


@pytest.mark.slow
def test_check(recipe, tmp_path, capsys):
    args = ["scale", recipe, "--sizes", "32,64,128", "--check", "--seeds", "1"]
    assert main([*args, "--standard", "--json", "a.json"]) == 5
    assert "some slopes are outside of ±0.1" in capsys.readouterr().out
    answer = json.loads((tmp_path / "a.json").read_text())
    assert answer["worst"] > 0.3
    assert (tmp_path / answer["picture"]).exists()


@pytest.mark.slow
def test_transfer_resumes(recipe, tmp_path, capfd):
    words = [
        "--sizes",
        "32,64,96",
        "--transfer",
        "--rates",
        "1e-3:1e-1:2",
        "--to",
        "128",
    ]
    args = ["scale", recipe, *words, "--cpu-devices", "1", "--json", "a.json"]
    assert main(args) == 0
    answer = json.loads((tmp_path / "a.json").read_text())
    assert len(answer["best"]) == 3
    assert answer["prediction"]["low"] <= answer["prediction"]["high"]
    assert answer["rate"] in (0.001, 0.1)
    assert "no price: the speed of the devices is unknown" in capfd.readouterr().out
    assert main([*args, "--on", "v5e:2x2"]) == 0
    out, err = capfd.readouterr()
    assert err.count("is done") == 6
    assert "price of width 128: 3 steps in" in out
    answer = json.loads((tmp_path / "a.json").read_text())
    assert answer["price"]["target"] == "v5e:2x2"
    assert answer["price"]["seconds"] > 0
    # Losses of another base would be those of other runs.
    assert main([*args, "--base", "64"]) == 2
    assert "holds a different sweep" in capfd.readouterr().err


@pytest.mark.slow
def test_transfer_with_several_seeds(recipe, tmp_path, capfd):
    words = ["--sizes", "32,64", "--transfer", "--rates", "1e-3:1e-1:2", "--seed", "4"]
    args = ["scale", recipe, *words, "--cpu-devices", "1", "--json", "a.json"]
    assert main([*args, "--seeds", "2"]) == 0
    assert "mean of its seeds" in capfd.readouterr().out
    answer = json.loads((tmp_path / "a.json").read_text())
    for best in answer["best"]:
        first, second = best["seeds"]
        losses = answer["losses"][str(best["width"])]
        assert first == losses[f"{best['rate']:g}"] != second
        assert best["loss"] == (first + second) / 2
        name = f"width={best['width']},lr={best['rate']:g},seed=5"
        run = json.loads(
            (tmp_path / answer["out"] / "seeds" / name / "run.json").read_text()
        )
        assert run["seed"] == 5
    assert main([*args, "--seeds", "2"]) == 0
    assert capfd.readouterr().err.count("is done") == 6
