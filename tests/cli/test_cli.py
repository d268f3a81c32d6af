"""The real command: what it does, what it says to mistakes, and how it exits."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli.dispatch import _finite, main
from tests.helpers.command import run, start

ROOT = Path(__file__).parents[2]
RECIPE = '''
"""A tiny recipe."""
import time
from pathlib import Path
import numpy as np, optax
from flax import nnx
from shardwise import Batches, Run

def recipe(
    steps: int = 6,
    mesh: str = "data=-1",
    out: Path | None = None,
    batch_size: int = 8,
    lr: float = 0.1,
    pause: float = 0.0,
    save_every: int = 0,
    poison: int = -1,
    skip: bool = False,
) -> Run:
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(64, 4)).astype("f4"),
        "y": rng.normal(size=(64, 2)).astype("f4"),
    }
    inner = Batches(data, batch_size)
    def batches(step):
        time.sleep(pause)
        batch = inner(step)
        return {**batch, "x": batch["x"] * np.nan} if step == poison else batch
    return Run(
        model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=optax.sgd(lr),
        data=batches,
        eval_data=Batches(data, 5),
        steps=steps,
        mesh=mesh,
        out=out,
        save_every=save_every,
        on_nonfinite="skip" if skip else "stop",
        unit="rows",
    )

def broken() -> Run:
    raise ValueError("no such corpus")

def other() -> int:
    return 3
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "syntax.py").write_text("def recipe(:")
    (tmp_path / "latin.py").write_bytes(b"# The mesh (\xe9)\n")
    (tmp_path / "later.py").write_bytes(b"# A recipe\n\n\n# \xe9\n")
    (tmp_path / "unknown.py").write_bytes(b"# -*- coding: latin-99 -*-\n")
    return tmp_path


def shardwise(folder, *args):
    done = run(*args, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def records(folder, run="a"):
    return [
        json.loads(line)
        for line in (folder / run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["trian", "tiny.py"],
            "'trian' is not a command. The commands are train, plan, verify, explain",
        ),
        (["train"], "needs a recipe"),
        (
            ["train", "tinny.py"],
            "recipe file 'tinny.py' does not exist. Did you mean 'tiny.py'",
        ),
        (
            ["train", "tiny.py:recip"],
            "has no function 'recip'; it has recipe, broken, other. Did you mean 'recipe'",
        ),
        (["train", "syntax.py"], "cannot be imported: SyntaxError"),
        (["train", "tiny.py", "--stepz", "3"], "--steps"),
        (["train", "tiny.py", "--steps", "three"], "--steps"),
        (["train", "tiny.py:broken"], "the recipe raised ValueError: no such corpus"),
        (["train", "tiny.py:other"], "returned a int. It must return a shardwise.Run"),
        (["train", "tiny.py", "--steps", "0"], "steps=0; it must be at least 1"),
        (
            ["train", "tiny.py", "--steps", "1" + "0" * 30],
            "it must be at most 2,147,483,647",
        ),
        (["train", "tiny.py", "--out", ""], "a path is empty"),
        (
            ["train", "latin.py"],
            "recipe 'latin.py' is not valid utf-8: byte 0xe9 in line 1 (offset 12)",
        ),
        (
            ["train", "later.py"],
            "recipe 'later.py' is not valid utf-8: byte 0xe9 in line 4 (offset 15)",
        ),
        (
            ["train", "unknown.py"],
            "recipe 'unknown.py' cannot be read: unknown encoding",
        ),
        (
            ["train", "tiny.py", "--mesh", "data=3", "--cpu-devices", "8"],
            "mesh 'data=3' needs 3 devices, and there are 8",
        ),
        (
            ["--cpu-devices", "8", "train", "tiny.py", "--mesh", "data=4,model=2"],
            "mesh axis 'model' (size 2) shards neither",
        ),
        (
            ["train", "tiny.py", "--cpu-devices", "8", "--batch-size", "6"],
            "a batch of 6 examples is not divisible by 8",
        ),
        (["train", "tiny.py", "--cpu-devices", "zero"], "--cpu-devices"),
        (["train", "tiny.py", "--cpu-devices", "0"], "at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_exit_with_2_and_say_what_to_do(
    folder, args, words, monkeypatch, capsys
):
    if "--cpu-devices" in args:  # these need a process of their own
        code, out, err = shardwise(folder, *args)
    else:
        monkeypatch.chdir(folder)
        try:
            code = main(args)
        except SystemExit as stopped:  # by the parser of arguments
            code = stopped.code
        out, err = capsys.readouterr()
    assert code == 2
    assert words in out + err
    assert "Traceback" not in err
    assert "compiling" not in err


def test_a_recipe_may_declare_its_encoding(folder, monkeypatch, capsys):
    text = "# -*- coding: latin-1 -*-\n# größe\n" + RECIPE
    (folder / "latin.py").write_bytes(text.encode("latin-1"))
    monkeypatch.chdir(folder)
    assert main(["train", "latin.py", "--out", "it's [mine]", "--steps", "2"]) == 0
    saved = json.loads((folder / "it's [mine]" / "run.json").read_text())
    assert saved["source"] == text
    # Each command can be pasted into a shell.
    commands = [
        shlex.split(line, comments=True)
        for line in capsys.readouterr().err.partition("next:\n")[2].splitlines()
    ]
    assert [words[1] for words in commands] == ["report", "train", "explain"]
    assert all("it's [mine]" in words for words in commands)


def test_no_message_has_commands_for_the_terminal(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "a").mkdir()
    owner = {
        "pid": "\x1b[2J",
        "host": "\x1b]0;x\x07",
        "boot_id": "\x9b",
        "started": 1.5,
    }
    (folder / "a" / "lock").write_text(json.dumps(owner))
    assert main(["train", "tiny.py", "--out", "a"]) == 7
    assert main(["train", "\x1b[31m.py"]) == 2
    said = capsys.readouterr().err
    assert "--force-unlock" in said
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


def test_mistakes_that_need_no_recipe_are_answered_without_waiting_for_jax(folder):
    for args in (
        ["train", "missing.py"],
        ["trian"],
        ["train"],
        ["--cpu-devices", "x", "train", "tiny.py"],
        ["--help"],
    ):
        code = (
            f"import sys; from shardwise.cli import main; code = main({args}); "
            "sys.exit(9 if 'jax' in sys.modules else code)"
        )
        assert subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True
        ).returncode == (0 if args == ["--help"] else 2)


def test_train_leaves_a_run_directory_and_resumes_it_exactly(folder):
    code, _, err = shardwise(
        folder,
        "train",
        "tiny.py",
        "--steps",
        "6",
        "--out",
        "straight",
        "--json",
        "answer.json",
    )
    assert code == 0, err
    assert "shardwise train tiny.py --out straight --steps 12" in err
    assert "shardwise explain tiny.py --steps 6 --out straight --mesh" in err
    assert "shardwise report straight" in err
    assert "shardwise sample" not in err  # it knows neither this model nor its tokens
    answer = json.loads((folder / "answer.json").read_text())
    straight = records(folder, "straight")
    assert [r["step"] for r in straight if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert answer["eval"]["loss"] == straight[-1]["eval_loss"]
    assert (folder / "straight" / "loss.png").read_bytes().startswith(b"\x89PNG")
    described = json.loads((folder / "straight" / "run.json").read_text())
    assert described["recipe"] == "tiny.py:recipe"
    assert described["versions"]["jax"]
    assert "def recipe" in described["source"]

    assert shardwise(folder, "train", "tiny.py", "--out", "a", "--steps", "4")[0] == 0
    code, _, err = shardwise(folder, "train", "tiny.py", "--out", "a")
    assert code == 0
    assert "resuming a at step 4" in err

    def losses(run):
        return [(r["step"], r["loss"]) for r in records(folder, run) if "loss" in r]

    assert losses("a") == losses("straight")
    code, _, err = shardwise(folder, "train", "tiny.py", "--out", "a")
    assert code == 0
    assert "has finished its 6 steps" in err


def test_a_signal_saves_the_step_and_exits_with_75(folder):
    process = start(
        "train",
        "tiny.py",
        "--out",
        "a",
        "--steps",
        "100000",
        "--pause",
        "0.05",
        cwd=folder,
    )
    log = folder / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    last = records(folder)[-1]["step"]
    assert f"stopped by a signal after step {last}" in err
    code, _, err = shardwise(
        folder, "train", "tiny.py", "--out", "a", "--steps", str(last + 1)
    )
    assert code == 0
    assert f"resuming a at step {last}" in err


def test_numbers_that_are_not_finite_stop_the_run_or_are_skipped(folder):
    code, _, err = shardwise(folder, "train", "tiny.py", "--out", "a", "--poison", "3")
    assert code == 5
    assert "step 4: loss nan" in err
    assert "Traceback" not in err
    code, _, err = shardwise(
        folder, "train", "tiny.py", "--out", "b", "--poison", "3", "--skip"
    )
    assert code == 0, err
    steps = records(folder, "b")
    assert [r.get("skipped", False) for r in steps if "loss" in r] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_explain_shows_layouts_and_reasons(folder):
    recipe = str(ROOT / "recipes" / "stdlib_gpt.py")
    code, out, err = shardwise(
        folder,
        "explain",
        recipe,
        "--mesh",
        "fsdp=4,model=2",
        "--cpu-devices",
        "8",
        "--json",
        "answer.json",
    )
    assert code == 0, err
    assert "blocks/0/attn/qkv/kernel" in out
    assert "annotation (embed, -, heads, -)" in out
    leaves = {
        (leaf["kind"], leaf["path"]): leaf
        for leaf in json.loads((folder / "answer.json").read_text())["leaves"]
    }
    kernel = leaves["parameters", "blocks/0/mlp/up/kernel"]
    assert kernel["spec"] == ["fsdp", "model"]
    assert kernel["bytes"] == 128 * 512 * 4 // 8


@pytest.mark.slow  # in two processes it is run by the page docs/processes.md
def test_the_main_recipe_runs_on_a_mesh(folder):
    recipe = str(ROOT / "recipes" / "stdlib_gpt.py")
    args = [
        "--steps",
        "2",
        "--eval-every",
        "0",
        "--batch-size",
        "8",
        "--length",
        "32",
        "--mesh",
        "data=4,model=2",
        "--cpu-devices",
        "8",
    ]
    code, _, err = shardwise(folder, "train", recipe, *args)
    assert code == 0, err
    assert "a sample" in err
    assert "loss.png" in err
    assert "shardwise sample runs/stdlib_gpt-" in err


def test_an_answer_for_programs_holds_nothing_that_json_does_not_have():
    assert _finite({"a": [1.5, float("inf")], "b": (float("nan"), "x", None)}) == {
        "a": [1.5, None],
        "b": [None, "x", None],
    }


@pytest.mark.parametrize("path", [".", "no/such/folder.json"])
def test_a_file_for_json_that_cannot_be_written_is_refused_first(
    path, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    assert main(["doctor", "--no-devices", "--json", path]) == 2
    shown = capsys.readouterr()
    assert f"--json {path} cannot be written" in shown.err
    assert not shown.out
