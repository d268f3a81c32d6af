"""Paths are texts or path objects everywhere, and URLs are refused before anything is created."""

from functools import partial
from pathlib import Path

import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from rich.console import Console

from shardwise import (
    Batches,
    Checkpoints,
    InitFrom,
    Run,
    TensorBoard,
    Tokens,
    abstract_state,
    array_records,
    explain,
    fit,
    init_state,
    json_lines,
    load_initial,
    open_tokens,
    parquet,
    plan_run,
    text_lines,
)
from shardwise.checkpoint.reader import find_step, open_step
from shardwise.cli import main
from shardwise.data.tokenizers import Bytes, FromFile
from shardwise.errors import ConfigError
from shardwise.files.paths import local_path
from shardwise.weights.export import export_plain
from shardwise.weights.hub import tokenizer_files

X = np.ones((8, 4), np.float32)


def model(rngs):
    return nnx.Linear(4, 1, rngs=rngs)


def make_run(**options):
    return Run(
        model=model,
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches({"x": X}, 8),
        steps=1,
        mesh="data=8",
        **options,
    )


def spec():
    return abstract_state(model, optax.sgd(0.1), "data=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a run and a file of every kind of data."""
    folder = tmp_path_factory.mktemp("paths")
    fit(make_run(out=folder / "run"), console=Console(quiet=True), plan=False)
    np.save(folder / "tokens.npy", np.arange(100, dtype=np.uint16))
    (folder / "rows.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (folder / "rows.txt").write_text("a\nb\n")
    tokenizer = tokenizer_files(Bytes(), 8)["tokenizer.json"]
    (folder / "tokenizer.json").write_bytes(tokenizer)
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), folder / "rows.parquet")
    writer = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1")
    writer.write(b"1")
    writer.close()
    return folder


def save_and_restore(path):
    with Checkpoints(path) as checkpoints:
        checkpoints.save(init_state(spec(), 0), {})
        checkpoints.wait()
        return int(checkpoints.restore(spec(), checkpoints.latest()).step)


def decode(record):
    return {"n": np.int32(len(record))}


# Each function takes a path below the directory of the fixture, and returns anything but None.
READ = {
    "run": lambda path: load_initial(InitFrom(path), spec(), 0),
    "tokens.npy": lambda path: len(Tokens(open_tokens(path), 4)),
    "rows.jsonl": lambda path: len(json_lines(path)),
    "rows.txt": lambda path: len(text_lines([path], decode)),
    "rows.parquet": lambda path: len(parquet(path)),
    "rows.array_record": lambda path: len(array_records(path, decode)),
    "tokenizer.json": lambda path: FromFile(path).sha256,
}


def write_plot(path):
    explain(optax.sgd(0.1), model, steps=2).plot(path)
    return path


def track(path):
    run = make_run(out=Path(path).parent / "tracked", trackers=(TensorBoard(path),))
    return fit(run, console=Console(quiet=True), plan=False)


def export(path, folder):
    return export_plain(open_step(find_step(folder / "run")), path)


# Each function creates the path.
WRITE = {
    "checkpoints/of/mine": save_and_restore,
    "out": lambda path: fit(make_run(out=path), console=Console(quiet=True)),
    "plot.png": write_plot,
    "plans": lambda path: plan_run(make_run(), cache=path),
    "events": track,
}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", READ)
def test_paths_to_read_are_texts_or_path_objects(folder, name, kind):
    assert READ[name](kind(folder / name)) is not None


@pytest.mark.parametrize("name", WRITE)
def test_paths_to_write_are_texts_or_path_objects(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    # Relative, in a directory that may not exist.
    assert WRITE[name](name) is not None
    assert Path(name).exists()


def test_exports_are_written_to_texts(folder, tmp_path):
    export(str(tmp_path / "new" / "a.safetensors"), folder)
    assert (tmp_path / "new" / "a.safetensors").is_file()


# URLs


def test_a_url_is_refused_with_the_command_that_copies():
    for path in ("gs://bucket/a", Path("gs://bucket/a")):
        with pytest.raises(ConfigError, match=r"^gs://bucket/a is not on .*gcloud"):
            local_path(path)
    with pytest.raises(ConfigError, match=r"^s3://b is not on .* `aws s3 sync SOURCE"):
        local_path("s3://b")
    with pytest.raises(ConfigError, match="`rclone sync SOURCE DESTINATION`"):
        local_path("https://example.org/a")
    with pytest.raises(ConfigError, match=r"as a plain path: /tmp/a$"):
        local_path("file:///tmp/a")
    # These are local.
    for name in ("a", "/a/b:c", "./gs:/bucket", "a b/c:/d", "C:/a", "gs:", "~"):
        assert local_path(name) == Path(name)


ENTRIES = {
    **{f"read {name}": function for name, function in READ.items()},
    **{f"write {name}": function for name, function in WRITE.items()},
    "rows.*.jsonl": lambda path: json_lines([f"{path}/*.jsonl"]),
    "export": None,
}
# The tracker passes URLs on to TensorBoard, which knows some schemes.
del ENTRIES["write events"]


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ENTRIES)
def test_no_function_takes_a_url(folder, tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    call = ENTRIES[name] or partial(export, folder=folder)
    with pytest.raises(ConfigError, match="is not on a file system of this machine"):
        call(kind("gs://bucket/run"))
    assert list(tmp_path.iterdir()) == []


RECIPE = """
from pathlib import Path
def recipe(out: Path | None = None, lr: float = 1.0):
    raise SystemExit("the recipe was called")
"""
URL = "gs://bucket/run"
COMMANDS = [
    ["train", "recipe.py", "--out", URL],
    ["train", "recipe.py", f"--out={URL}"],
    ["sweep", "recipe.py", "--lr", "1", "2", "--out", URL],
    ["launch", "--processes", "2", "--", "train", "recipe.py", "--out", URL],
    ["launch", "--write", "slurm", "--", "train", "recipe.py", "--out", URL],
    ["report", URL],
    ["report", "run", "--out", URL],
    ["checkpoint", "ls", URL],
    ["checkpoint", "show", URL],
    ["checkpoint", "diff", "run", URL],
    ["checkpoint", "export", "run", "--out", URL],
    ["sample", URL, "--prompt", "a"],
    ["doctor", URL],
    ["plan", "recipe.py", "--html", URL],
    ["explain", "recipe.py", "--plot", URL],
    ["data", "prepare", URL, "--out", "prepared"],
    ["data", "prepare", "text.txt", "--out", URL],
    ["data", "show", URL],
    ["checkpoint", "ls", "run", "--json", URL],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_takes_a_url(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(RECIPE)
    assert main(words) == 2
    assert f"{URL} is not on a file system of this machine" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]


def test_a_recipe_that_returns_a_url_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = """
from shardwise import Run
def recipe(bucket: str = "b"):
    return Run(model=None, loss=None, optimizer=None, data=None, steps=1, out=f"gs://{bucket}")
"""
    Path("recipe.py").write_text(text)
    assert main(["train", "recipe.py"]) == 2
    assert "gs://b is not on a file system" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.py", "__pycache__"}
