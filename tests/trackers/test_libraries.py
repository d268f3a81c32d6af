"""Weights & Biases, MLflow and Trackio read back what a run wrote before and after a resume.

`make test-trackers` installs the libraries. All data stays on this machine: W&B is offline, MLflow
and Trackio keep databases in a temporary directory.
"""

import io
import json
import os

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from shardwise import Batches, Mean, MLflow, Run, Trackio, WandB, fit

# Warnings of the libraries are not errors here.
pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]

X = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}


def loss(model, batch):
    return Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def train(out, tracker, steps):
    run = Run(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(0.05),
        data=Batches(DATA, 16),
        steps=steps,
        eval_data=Batches(DATA, 16),
        eval_every=2,
        save_every=4,
        sample=lambda model: "<a> sample",
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)),
        out=out,
        trackers=(tracker,),
    )
    output = io.StringIO()
    fit(run, console=Console(file=output, width=400), plan=False)
    assert "warning" not in output.getvalue(), output.getvalue()


def train_twice(out, make_tracker):
    """Train 6 steps, lose the last two, and resume up to step 8.

    Returns `{metric: {step: value}}` as metrics.jsonl has it.
    """
    train(out, make_tracker(), 6)
    (out / "checkpoints" / "6").rename(out.parent / "lost")
    train(out, make_tracker(), 8)
    metrics = {}
    for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in record:
                metrics.setdefault(name, {})[record["step"]] = record[name]
    assert list(metrics["loss"]) == list(range(1, 9))
    return metrics


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Remove the user's settings, and work in an empty directory."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def wandb_records(path):
    """Yield the messages in a .wandb file.

    The file is a LevelDB log in blocks of 32 KiB, after a header of 7 bytes.
    """
    content, at, parts = path.read_bytes(), 7, []
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        length, kind = (
            int.from_bytes(content[at + 4 : at + 6], "little"),
            content[at + 6],
        )
        # 1 is a complete message; 2, 3 and 4 are the first, a middle and the last part of one.
        if kind:
            parts.append(content[at + 7 : at + 7 + length])
            if kind in (1, 4):
                yield b"".join(parts)
                parts = []
        at += 7 + length
        # No header fits into the rest of the block.
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


def test_wandb_stays_offline_without_a_login(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    out = tmp_path / "a"
    written = train_twice(out, WandB)
    found, ids, html = {}, set(), 0
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                html += any(name.startswith("sample") for name in values)
                for name in set(values) & set(written):
                    assert values["_step"] not in found.setdefault(name, {}), (
                        "a step was logged twice"
                    )
                    found[name][values["_step"]] = values[name]
    assert found == written
    assert ids == {json.loads((out / "trackers.json").read_text())["wandb"]}
    assert html == 4
    (page,) = out.glob("wandb/offline-run-*/files/media/html/sample_8_*.html")
    assert page.read_text() == "<pre>&lt;a&gt; sample</pre>"


def test_mlflow_database_matches_the_log(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/store.db"
    written = train_twice(tmp_path / "a", lambda: MLflow(uri, "tests"))
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "a"
    assert run.data.params["mesh"] == "data=1"
    for name, values in written.items():
        history = [
            (metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        assert sorted(history) == sorted(values.items())
    assert [file.path for file in client.list_artifacts(run.info.run_id, "sample")] == [
        f"sample/{step}.txt" for step in (2, 4, 6, 8)
    ]


def test_trackio_database_matches_the_log(tmp_path):
    from trackio.sqlite_storage import SQLiteStorage

    written = train_twice(tmp_path / "a", Trackio)
    name = json.loads((tmp_path / "a" / "trackers.json").read_text())["trackio"]
    logs = SQLiteStorage.get_logs("shardwise", name)
    for metric, values in written.items():
        assert [
            (line["step"], line[metric]) for line in logs if metric in line
        ] == list(values.items())
    assert [line["step"] for line in logs if "sample" in line] == [2, 4, 6, 8]
    assert list((tmp_path / "trackio").glob("*.db"))
