"""Trackers: TensorBoard reads back what was written, and none of them can stop, slow or outlive a run."""

import io
import json
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise import Batches, Mean, Run, fit, trackers
from shardwise.errors import ConfigError, NumericsError
from shardwise.trackers.base import TensorBoard, TrackedRun, Tracking, make_trackers

X = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}


def loss(model, batch):
    return Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def make(out, *given, **options):
    """Three steps, an evaluation and a sample after every second one, a checkpoint after the fourth."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    usual = {"steps": 6, "eval_every": 2, "save_every": 4, "sample": lambda model: "<a>\n  sample"}
    return Run(model=lambda rngs: nnx.Linear(4, 1, rngs=rngs), loss=loss, optimizer=optax.sgd(0.05), data=Batches(DATA, 16),
               eval_data=Batches(DATA, 16), mesh=mesh, out=out, trackers=given, **usual | options)  # fmt: skip


def go(run):
    said = io.StringIO()
    try:
        fit(run, console=Console(file=said, width=400), plan=False)
    finally:
        assert not [
            t.name
            for t in threading.enumerate()
            if t.name in ("shardwise-tensorboard", "shardwise-notes")
        ]
    return said.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Notes:
    """A tracker as a user would write one: into a list."""

    name, rewinds = "notes", False

    def __init__(self):
        self.starts, self.records, self.texts, self.codes = [], [], [], []

    def start(self, run):
        self.starts.append(run)
        return run.id or "number 1"

    def log(self, records):
        self.records += records

    def text(self, step, name, text):
        self.texts.append((step, name, text))

    def finish(self, exit_code):
        self.codes.append(exit_code)


def undo(out, step):
    """As if the run had been killed before this step was saved."""
    (out / "checkpoints" / str(step)).rename(out.parent / f"{out.name}-{step}")


def test_every_step_is_told_once_also_after_a_resume(tmp_path):
    out, notes = tmp_path / "a", Notes()
    go(make(out, TensorBoard(), notes))
    assert notes.codes == [0]
    assert notes.starts[0] == TrackedRun("a", out, notes.starts[0].config, 0, None)
    undo(out, 6)
    go(make(out, TensorBoard(), notes, steps=8))

    # TensorBoard, which takes back what an earlier start wrote of later steps
    found = EventAccumulator(str(out / "tensorboard")).Reload()
    records = lines(out / "metrics.jsonl")
    for name in ("loss", "grad_norm", "step_s", "items_per_s"):
        written = [(r["step"], np.float32(r[name])) for r in records if name in r]
        assert [step for step, _ in written] == list(range(1, 9))
        assert [(event.step, event.value) for event in found.Scalars(name)] == written
    assert [event.step for event in found.Scalars("eval_loss")] == [2, 4, 6, 8]
    assert not {"step", "time"} & set(found.Tags()["scalars"])
    samples = found.Tensors("sample")
    assert [event.step for event in samples] == [2, 4, 6, 8]
    assert samples[-1].tensor_proto.string_val[0] == b"    <a>\n      sample"
    (config,) = found.Tensors("config")
    config = json.loads(config.tensor_proto.string_val[0])
    assert (config["mesh"], config["steps"]) == ("data=1", 6)

    # A tracker that cannot, and is not told again
    assert (notes.starts[1].step, notes.starts[1].id) == (4, "number 1")
    assert json.loads((out / "trackers.json").read_text()) == {
        "notes": "number 1",
        "tensorboard": "tensorboard",
    }
    assert [step for step, values in notes.records if "loss" in values] == list(range(1, 9))
    assert [step for step, values in notes.records if "eval_loss" in values] == [2, 4, 6, 8]
    assert [step for step, *_ in notes.texts] == [2, 4, 6, 8]

    # One that joins late hears what is new; a finished run opens nothing.
    later = Notes()
    later.name = "later"
    go(make(out, later, notes, steps=9))
    go(make(out, later, notes, steps=9))
    assert [step for step, values in later.records if "loss" in values] == [9]
    assert len(later.starts) == 1


def test_a_run_that_fails_says_so(tmp_path):
    notes = Notes()
    bad = lambda n: {**Batches(DATA, 16)(n), "y": np.full(16, np.nan, "f4")}  # noqa: E731
    with pytest.raises(NumericsError):
        go(replace(make(tmp_path / "a", notes), data=bad))
    assert notes.codes == [NumericsError.exit_code]
    with pytest.raises(ConfigError, match="trackers: the run needs a directory"):
        go(make(None, notes))


@pytest.mark.parametrize("where", ["start", "log", "text", "finish"])
def test_a_tracker_that_fails_is_switched_off_with_one_line(tmp_path, where):
    class Broken(Notes):
        pass

    def fail(self, *_):
        raise OSError(28, "No space left on device")

    setattr(Broken, where, fail)
    said, notes = [], Notes()
    tracking = Tracking([Broken(), notes], TrackedRun("a", tmp_path, {}, 0), 0, said.append)
    for step in range(1, 4):
        tracking.log(step, {"step": step, "loss": 1.0, "skipped": True, "note": "text"})
        tracking.text(step, "sample", "text")
    tracking.close(0)
    fact = "notes is switched off: OSError: [Errno 28] No space left on device. Training goes on; metrics.jsonl has every step."
    assert said == [fact]
    assert notes.records == [(step, {"loss": 1.0, "skipped": 1.0}) for step in (1, 2, 3)]
    assert len(notes.texts) == 3


def test_a_slow_tracker_costs_the_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "MOST", 50)
    hanging, said = threading.Event(), []

    class Slow(Notes):
        def start(self, run):
            hanging.wait(20)
            return "slow"

    begun = time.perf_counter()
    tracking = Tracking([Slow()], TrackedRun("a", tmp_path, {}, 0), 0, said.append)
    for step in range(1, 1001):
        tracking.log(step, {"step": step, "loss": 1.0})
    assert time.perf_counter() - begun < 0.2
    assert len(said) == 1
    assert "notes cannot keep up with the run" in said[0]
    tracking.close(0, seconds=0.1)
    assert time.perf_counter() - begun < 1.0
    assert "notes has not finished in time" in said[1]
    hanging.set()


def test_a_library_that_is_missing_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "no_such_library", TensorBoard)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[no_such_library\]'"):
        make_trackers(["tensorboard", "no_such_library"])
    assert [tracker.name for tracker in make_trackers(["tensorboard", "tensorboard"])] == [
        "tensorboard"
    ]
