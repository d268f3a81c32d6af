"""`shardwise checkpoint` on one device, for checkpoints that eight have written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from flax import nnx
from safetensors.numpy import load_file

from shardwise import (
    Checkpoints,
    Rules,
    TrainState,
    abstract_state,
    init_state,
    make_mesh,
    optim,
)
from shardwise.cli import main
from shardwise.files.manifest import write_manifest


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.half = nnx.Param(jnp.ones((4, 8), jnp.bfloat16))


def changed(state, step, change=lambda params: params):
    return TrainState(
        jnp.int32(step), change(state.params), state.other, state.opt_state
    )


@pytest.fixture
def run(tmp_path, state):
    """A run directory with the steps 100 and 200, which differ in one element of one parameter."""
    return write(tmp_path / "a", state)


@pytest.fixture(scope="module")
def state():
    spec = abstract_state(
        Net,
        optim.adamw(1e-3, ema=0.9),
        make_mesh("data=2,fsdp=4"),
        Rules(fsdp_min_size=16),
    )
    return init_state(spec, 0)


def write(directory, state):
    (directory / "checkpoints").mkdir(parents=True)
    metadata = {
        "mesh": "data=2,fsdp=4",
        "seed": 0,
        "data": {"rows": 64},
        "lr": {"all": {"0": 0.1, "10": 0.01}},
    }
    bump = lambda params: {**params, "half": params["half"].at[1, 2].add(0.5)}  # noqa: E731
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(
            changed(state, 100),
            {
                **metadata,
                "metrics": {"step": 100, "loss": 2.5, "eval_loss": 2.75, "step_s": 0.1},
            },
        )
        checkpoints.save(
            changed(state, 200, bump),
            {**metadata, "seed": 1, "metrics": {"step": 200, "loss": 1.5}},
        )
    return directory


@pytest.fixture
def shardwise(tmp_path, capsys, monkeypatch):
    """Runs the command in this process: (exit code, answer for programs, what it printed)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        Path("answer.json").unlink(missing_ok=True)
        code = main(["checkpoint", *map(str, args), "--json", "answer.json"])
        captured = capsys.readouterr()
        return (
            code,
            json.loads(Path("answer.json").read_text())
            if Path("answer.json").exists()
            else None,
            captured.out + captured.err,
        )

    return call


@pytest.mark.slow
def test_one_device_reads_what_eight_have_written(run, tmp_path):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }

    def fresh(*args):
        code = (
            "import sys, jax; from shardwise.cli import main; "
            "code = main(sys.argv[1:]); assert jax.device_count() == 1; sys.exit(code)"
        )
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            code,
            "checkpoint",
            *args,
            "--json",
            "answer.json",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return (
            done.returncode,
            json.loads((tmp_path / "answer.json").read_text()),
            done.stdout + done.stderr,
        )

    code, answer, text = fresh("show", "a", "--values")
    assert code == 0, text
    leaves = {leaf["path"]: leaf for leaf in answer["leaves"]}
    assert leaves["params/half"] | {"std": 0} == {
        "path": "params/half",
        "shape": [4, 8],
        "dtype": "bfloat16",
        "bytes": 64,
        "min": 1.0,
        "max": 1.5,
        "mean": 1 + 0.5 / 32,
        "std": 0,
        "not_finite": 0,
    }
    assert answer["totals"]["params"] == {
        "arrays": 5,
        "elements": 16 * 32 + 3 * 32 + 32,
        "bytes": 4 * (16 * 32 + 3 * 32) + 2 * 32,
    }
    assert answer["metadata"]["mesh"] == "data=2,fsdp=4"
    assert "float32[16, 32]" in text
    assert "from 0.01 to 0.1 (2 samples)" in text

    code, answer, text = fresh("diff", "a/checkpoints/100", "a")
    assert code == 1, text
    assert {row["path"] for row in answer["different"]} == {"step", "params/half"}
    half = next(row for row in answer["different"] if row["path"] == "params/half")
    assert (half["elements"], half["absolute"], half["relative"]) == (1, 0.5, 0.5 / 1.5)
    assert {"name": "seed", "a": 0, "b": 1} in answer["metadata"]

    code, answer, text = fresh("export", "a", "--out", "weights.safetensors")
    assert code == 0, text
    tensors = load_file(tmp_path / "weights.safetensors")
    assert sorted(tensors) == sorted(answer["tensors"])
    assert tensors["half"][1, 2] == 1.5


def test_ls_lists_what_there_is_without_jax(run, tmp_path, shardwise):
    os.rename(run / "checkpoints" / "100", run / "checkpoints" / "100.bad")
    (run / "checkpoints" / "300.tmp").mkdir()
    code, answer, text = shardwise("ls", "a")
    assert code == 0
    assert [(row["step"], row["state"]) for row in answer["steps"]] == [
        ("200", ""),
        ("100.bad", "damaged, set aside"),
        ("300.tmp", "unfinished save"),
    ]
    assert answer["steps"][0]["metrics"] == {"step": 200, "loss": 1.5}
    assert answer["steps"][0]["bytes"] > 1000
    assert "1.5" in text
    assert (
        shardwise("ls", "a/checkpoints", "--verify")[1]["steps"][0]["state"]
        == "verified"
    )
    for args in (["ls", "a"], ["ls", "a", "--verify"]):
        code = (
            "import sys; from shardwise.cli import main; "
            f"main({['checkpoint', *args]}); sys.exit('jax' in sys.modules)"
        )
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True
        )


def test_verify_names_the_damaged_files_and_exits_with_4(run, shardwise):
    assert shardwise("verify", "a")[0] == 0
    file = max(
        (run / "checkpoints" / "100").rglob("d/*"), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    (run / "checkpoints" / "100" / "meta.json").unlink()
    code, answer, text = shardwise("verify", "a")
    assert code == 4
    assert [len(problems) for problems in answer["steps"].values()] == [2, 0]
    assert f"{file.name} is damaged: its digest" in text
    assert "meta.json is missing" in text
    assert shardwise("verify", "a", "--step", 200)[0] == 0
    assert shardwise("verify", "a/checkpoints/100")[0] == 4
    assert shardwise("ls", "a")[0] == 4
    for args in (
        ["show", "a", "--step", 100],
        ["diff", "a", "a/checkpoints/100"],
        ["export", "a/checkpoints/100", "--out", "x"],
    ):
        code, _, text = shardwise(*args)
        assert code == 4
        assert "is damaged" in text
        assert f"{file.name} is damaged: its digest" in text
    assert not Path("x").exists()


def test_diff_of_equals_and_of_other_trees(run, state, tmp_path, shardwise):
    write(tmp_path / "b", state)
    assert shardwise("diff", "a", "b")[0] == 0
    code, answer, text = shardwise("diff", "a", "b", "--step", 100)
    assert (code, answer["different"], answer["metadata"]) == (0, [], [])
    assert "arrays are bit-identical, 0 differ" in text
    other = {
        **state.params,
        "half": state.params["half"].astype(jnp.float32),
        "more": jnp.float32(np.nan),
    }
    with Checkpoints(tmp_path / "b" / "checkpoints") as checkpoints:
        checkpoints.save(
            TrainState(jnp.int32(300), other, state.other, state.opt_state), {}
        )
        zeros = jax.tree.map(jnp.zeros_like, other)
        checkpoints.save(
            TrainState(jnp.int32(400), zeros, state.other, state.opt_state), {}
        )
    different = {
        row["path"]: (row["a"], row["b"])
        for row in shardwise("diff", "a", "b/checkpoints/300")[1]["different"]
    }
    assert different == {
        "step": ("int32[]", "int32[]"),
        "params/half": ("bfloat16[4, 8]", "float32[4, 8]"),
        "params/more": ("-", "float32[]"),
    }
    _, answer, text = shardwise("diff", "b/checkpoints/300", "b")
    rows = {row["path"]: row for row in answer["different"]}
    assert (
        rows["params/more"]["absolute"] is None
    )  # not a number, against zero: JSON has no infinity
    assert re.search(r"params/more .*\binf\b", text)
    assert rows["params/half"]["elements"] == 32
    assert rows["params/half"]["relative"] == 1


def test_averages_are_exported(run, shardwise):
    assert (
        shardwise("export", "a", "--average", "--out", "out/average.safetensors")[0]
        == 0
    )
    assert np.array_equal(
        load_file("out/average.safetensors")["half"], np.ones((4, 8))
    )  # of the start


def test_a_shape_that_nothing_can_hold_is_refused_before_it_is_read(run, shardwise):
    step = run / "checkpoints" / "200"
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{step}/state/"}
    ).result()
    array = json.loads(store["params.hidden.bias/.zarray"])
    store["params.hidden.bias/.zarray"] = json.dumps(
        {**array, "shape": [10**15], "chunks": [10**6]}
    ).encode()
    write_manifest(step)
    code, answer, _ = shardwise("show", "a")  # reads no array
    assert code == 0
    assert answer["totals"]["params"]["elements"] > 10**15
    for args in (
        ["show", "a", "--values"],
        ["diff", "a", "a"],
        ["export", "a", "--out", "x"],
    ):
        code, _, text = shardwise(*args)
        assert code == 4
        assert (
            "'params/hidden/bias' claims to be float32[1000000000000000], 4.0 PB"
            in text
        )
    assert not Path("x").exists()


def test_what_a_checkpoint_says_cannot_command_the_terminal(state, tmp_path, shardwise):
    hostile = {
        "note": "\x1b[2J\r [/bold] \u202e",
        "optimizer": {"a": ["x"], "\x1b": "[red]"},
        "metrics": [1],
        "lr": {"all": {"0": "x"}},
    }
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    with Checkpoints(tmp_path / "a" / "checkpoints") as checkpoints:
        checkpoints.save(changed(state, 5), hostile)
    for args in (["ls", "a"], ["show", "a"], ["diff", "a", "a"]):
        code, _, text = shardwise(*args)
        assert code == 0
        assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert "[/bold]" in shardwise("show", "a")[2]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (
            [],
            2,
            "the following arguments are required: COMMAND. See `shardwise checkpoint --help`",
        ),
        (["sho", "a"], 2, "invalid choice: 'sho'"),
        (
            ["diff", "a"],
            2,
            "the following arguments are required: TARGET. See `shardwise checkpoint diff --help`",
        ),
        (["export", "a"], 2, "--out"),
        (
            ["export", "a", "--out", "answer.json", "--vocab-size", "3"],
            2,
            "--vocab-size needs --format hf",
        ),
        (["export", "a", "--out", "a"], 2, "a already exists. Nothing is overwritten"),
        (
            ["export", "a", "--out", "x", "--format", "gpt2"],
            4,
            "cannot be written for transformers",
        ),
        (["show", "nowhere"], 4, "nowhere does not exist. Pass a run directory"),
        (["show", "a", "--step", "3"], 4, "has no step 3. Saved steps: 100, 200"),
        (
            ["show", "a/checkpoints/100", "--step", "200"],
            4,
            "is a single step, and not step 200",
        ),
        (["verify", "tests"], 4, "tests has no checkpoints"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_without_a_traceback(run, shardwise, args, code, words):
    Path("tests").mkdir()
    found, _, text = shardwise(*args)
    assert found == code
    assert words in text
