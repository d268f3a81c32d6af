"""The real sweep: a grid of real runs, stopped, killed, extended, and compared."""

import json
import signal
import time
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.options import shared_parser
from shardwise.cli.sweep import _forwarded_options
from shardwise.errors import ConfigError
from shardwise.files.lock import lock_directory
from shardwise.sweep.grid import (
    check_arguments,
    make_points,
    show_value,
    split_words,
)
from shardwise.sweep.runs import MEMORY_FRACTION, Sweep, SweepRecord
from tests.helpers.command import run, start

RECIPE = '''
"""A tiny recipe."""
import time
from pathlib import Path
import numpy as np, optax
from flax import nnx
from shardwise import Batches, Run

def recipe(
    steps: int = 6,
    out: Path | None = None,
    lr: float = 0.1,
    seed: int = 0,
    pause: float = 0.0,
    widths: tuple[int, ...] = (2,),
    bias: bool = True,
    mesh: str = "data=-1",
) -> Run:
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(64, 4)).astype("f4"),
        "y": rng.normal(size=(64, 2)).astype("f4"),
    }
    inner = Batches(data, 8, seed=seed)
    def batches(step):
        time.sleep(pause)
        return inner(step)
    return Run(
        model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=optax.sgd(lr),
        data=batches,
        eval_data=Batches(data, 16),
        steps=steps,
        seed=seed,
        out=out,
        save_every=2,
        mesh=mesh,
        unit="rows",
    )

def bare(lr: float = 0.1) -> Run: ...
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    return tmp_path


SWEEP = ("sweep", "tiny.py", "--out", "s", "--json", "answer.json")


def sweep(folder, *args):
    done = run(*SWEEP, *args, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def answer(folder):
    return json.loads((folder / "answer.json").read_text())


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def load(folder):
    from shardwise.recipe import load_recipe

    return load_recipe(folder / "tiny.py", "recipe")


@pytest.mark.slow
def test_a_grid_is_run_resumed_extended_and_compared(folder, monkeypatch, capsys):
    # stopped in its first run, which saves
    process = start(
        *SWEEP, "--lr", "0.1", "1e30", "--steps", "6", "--pause", "0.1", cwd=folder
    )
    log = folder / "s" / "lr=0.1" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "the same command resumes at lr=0.1" in err
    record = json.loads((folder / "s" / "sweep.json").read_text())
    assert record["points"]["lr=0.1"]["code"] == 75
    assert "code" not in record["points"]["lr=1e+30"]

    # goes on, with a value more; one run diverges, the sweep does not care
    args = ("--lr", "0.1", "1e30", "0.2", "--steps", "6", "--pause", "0.1")
    code, out, err = sweep(folder, *args)
    assert code == 5, err
    assert "1 runs are new" in err
    assert "[1 of 3] lr=0.1 resumes" in err
    assert "resuming s/lr=0.1 at step" in err
    assert (
        "[2 of 3] lr=1e+30 failed: exit code 5: non-finite numbers, a failed check, or diverged"
        in err
    )
    assert [
        json.loads(line)["step"]
        for line in log.read_text().splitlines()
        if "eval_loss" not in line
    ] == list(range(1, 7))
    points = answer(folder)["points"]
    assert {point["name"]: (point["code"], point["by"]) for point in points} == {
        **dict.fromkeys(["lr=0.1", "lr=0.2"], (0, "eval_loss")),
        "lr=1e+30": (5, "eval_loss"),
    }
    assert points[-1]["name"] == "lr=1e+30"
    assert (
        answer(folder)["best"]
        == min(points[:2], key=lambda point: point["value"])["name"]
    )
    assert answer(folder)["page"] == "s/report.html"
    page = (folder / "s" / "report.html").read_text()
    assert all(point["name"] in page for point in points)
    assert out.index("0.2") < out.index("1e+30")

    # what is done or has failed is not run again
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["sweep", "tiny.py", "--out", "s", *args, "--by", "eval_los"]) == 5
    err = capsys.readouterr().err
    assert "[1 of 3] lr=0.1 is done" in err
    assert (
        "lr=1e+30 failed before (exit code 5: non-finite numbers, a failed check, or "
        "diverged); --retry" in err
    )
    assert "there are eval_loss, loss. Did you mean 'eval_loss'?" in err

    # another sweep is refused, and so is a second one beside it
    assert (
        main(["sweep", "tiny.py", "--out", "s", "--lr", "0.1", "0.2", "--steps", "9"])
        == 2
    )
    err = capsys.readouterr().err
    assert "s holds a different sweep" in err
    assert "fixed: --steps 6 --pause 0.1 before, --steps 9 now" in err
    with lock_directory(folder / "s"):
        assert main(["sweep", "tiny.py", "--out", "s", *args]) == 7


def test_mistakes_are_told_all_at_once_before_anything_runs(folder):
    code, out, err = sweep(
        folder,
        "--lr",
        "1e-4",
        "x",
        "--stepz",
        "3",
        "--seed",
        "0",
        "0",
        "--steps",
        "q",
        "--bias",
        "True",
        "maybe",
    )
    assert code == 2, err
    assert out == ""
    for words in (
        "Error parsing --lr: could not convert string to float: 'x'",
        "no argument --stepz. Did you mean '--steps'?",
        "--seed 0 is given twice",
        "Error parsing --steps: invalid literal for int() with base 10: 'q'",
        "--bias maybe: Unrecognized options: maybe",
    ):
        assert words in err
    assert not (folder / "s").exists()


@pytest.mark.slow
def test_a_killed_sweep_goes_on(folder):
    args = ("--lr", "0.1", "0.2", "--steps", "12", "--pause", "0.2")
    process = start(*SWEEP, *args, cwd=folder)
    log = folder / "s" / "lr=0.1" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= 3)
    process.kill()
    process.communicate(timeout=60)
    code, _, err = sweep(
        folder, *args
    )  # at once: the run that was left saves first, and is waited for
    assert code == 0, err
    assert "resuming s/lr=0.1 at step" in err
    assert [point["step"] for point in answer(folder)["points"]] == [12, 12]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["3", "--lr", "1"], "'3' belongs to no argument"),
        (["--lr", "1", "--lr", "2"], "--lr is given twice. Put all values after one"),
        (["--lr=1", "2", "--out", "a", "b"], "--out takes one directory"),
    ],
)
def test_words_that_cannot_be_split(words, said):
    with pytest.raises(ConfigError, match=said):
        split_words(words)


def test_arguments_span_the_grid_or_are_for_all(folder):
    given = split_words(
        [
            "--lr",
            "1e-4",
            "3e-4",
            "--steps=5",
            "--widths",
            "1",
            "2",
            "--bias",
            "True",
            "False",
            "--mesh",
            "data=2,model=1",
            "data=1",
        ]
    )
    grid, fixed = check_arguments(load(folder), given, "p")
    assert fixed == {
        "--steps": ["5"],
        "--widths": ["1", "2"],
    }  # a tuple takes its values itself
    points = make_points(grid, {"--bias"})
    assert len(points) == 8
    assert points[0].name == "lr=0.0001,bias=True,mesh=data2.model1"
    assert points[1].name == "lr=0.0001,bias=True,mesh=data1"
    assert points[2].words == ["--lr", "1e-4", "--no-bias", "--mesh", "data=2,model=1"]
    assert len({point.name for point in points}) == 8
    with pytest.raises(ConfigError, match="one run only: use `shardwise train`"):
        check_arguments(load(folder), {"--steps": ["5"]}, "p")


def test_names_stay_in_the_directory_and_apart(folder):
    points = make_points(
        {"--mesh": ["../../etc", "a/b", "a.b", "é"], "--lr": ["1e-4"]}, set()
    )
    names = [point.name for point in points]
    assert len(set(names)) == 4
    for name in names:
        assert Path(name).name == name
        assert ".." not in name.split("=")
    assert [
        show_value(text)
        for text in ("1e-4", "0.0001", "03", "1e12", "0.1234567891", "adam")
    ] == [*("0.0001", "0.0001", "3", "1e+12", "0.1234567891", "adam")]


def test_every_option_of_train_reaches_the_runs_as_it_was_given():
    given = [
        *(
            "--profile",
            "10:15",
            "--cpu-devices",
            "4",
            "--watchdog",
            "30.0",
            "--accept",
            "lr",
        ),
        *("--accept", "seed", "--track", "tensorboard", "--force-unlock", "--no-plan"),
        "--strict",
    ]
    shared = shared_parser().parse_args(given)
    forwarded = _forwarded_options(shared)
    assert shared_parser().parse_args(forwarded) == shared
    assert sorted(forwarded) == sorted(given)


def test_options_of_process_groups_are_refused():
    with pytest.raises(ConfigError, match="a sweep runs on one process"):
        _forwarded_options(shared_parser().parse_args(["--process-id", "1"]))


def test_a_recipe_without_out_is_refused(folder):
    from shardwise.recipe import load_recipe

    with pytest.raises(ConfigError, match="has no argument 'out'"):
        check_arguments(
            load_recipe(folder / "tiny.py", "bare"), {"--lr": ["1", "2"]}, "p"
        )


def test_several_runs_at_a_time(folder):
    began = time.monotonic()
    args = ("--jobs", "3", "--steps", "4", "--pause", "0.5", "--lr", "0.1", "1e30", "2")
    code, _, err = sweep(folder, *args)
    seconds = time.monotonic() - began
    assert code == 5, err
    assert "[2 of 3] lr=1e+30 failed: exit code 5" in err
    assert "[3 of 3] lr=2 is done after" in err
    points = answer(folder)["points"]
    codes = {point["name"]: point["code"] for point in points}
    assert codes == {"lr=0.1": 0, "lr=2": 0, "lr=1e+30": 5}
    # They ran at the same time, and their output does not mix.
    assert sum(point["seconds"] for point in points) > 1.5 * seconds
    for name in codes:
        assert f"s/{name}" in (folder / "s" / f"{name}.log").read_text()
        assert f"s/{name}/report.html" not in err


def test_a_signal_stops_all_runs(folder):
    args = ("--jobs", "2", "--steps", "50", "--pause", "0.2", "--lr", "0.1", "0.2", "3")
    process = start(*SWEEP, *args, cwd=folder)
    logs = [folder / "s" / name / "metrics.jsonl" for name in ("lr=0.1", "lr=0.2")]
    wait_until(
        lambda: all(log.exists() and log.read_text().count("\n") > 1 for log in logs)
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "the same command resumes at lr=0.1" in err
    points = json.loads((folder / "s" / "sweep.json").read_text())["points"]
    assert {name: point.get("code") for name, point in points.items()} == {
        "lr=0.1": 75,
        "lr=0.2": 75,
        "lr=3": None,
    }


def test_runs_that_a_signal_ends_before_they_handle_it_are_resumed(folder):
    args = ("--jobs", "2", "--steps", "2", "--lr", "0.1", "0.2")
    process = start(*SWEEP, *args, cwd=folder)
    logs = [folder / "s" / f"lr={lr}.log" for lr in ("0.1", "0.2")]
    wait_until(lambda: all(log.exists() for log in logs))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    points = json.loads((folder / "s" / "sweep.json").read_text())["points"]
    assert {point["code"] for point in points.values()} == {75}
    code, _, err = sweep(folder, *args)
    assert code == 0, err
    assert "lr=0.1 resumes" in err


def test_memory_of_a_gpu_is_divided(monkeypatch):
    record = SweepRecord(Path("sweep.json"), {}, {})
    several = Sweep("recipe.py", [], Path("s"), record, [], False, 3)
    for name in MEMORY_FRACTION:
        monkeypatch.delenv(name, raising=False)
    assert several._environment()[MEMORY_FRACTION[0]] == "0.250"
    # JAX refuses both variables.
    monkeypatch.setenv(MEMORY_FRACTION[1], "0.1")
    assert MEMORY_FRACTION[0] not in several._environment()


def test_no_runs_at_a_time_are_refused(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main([*SWEEP, "--jobs", "0", "--lr", "0.1", "0.2"]) == 2
    assert (
        "argument --jobs: '0' is not a number of at least 1" in capsys.readouterr().err
    )
