"""TensorBoard reads back what was written, and no tracker can stop, slow down or outlive a run."""

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

from shardwise import Batches, Mean, Run, TensorBoard, fit
from shardwise.errors import ConfigError, NumericsError
from shardwise.trackers import base
from shardwise.trackers.base import TRACKERS, TrackedRun, Tracking, make_trackers

X = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}


def loss(model, batch):
    return Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


def make_run(out, *trackers, **options):
    """Six steps, with an evaluation and a sample every 2 steps and a checkpoint every 4."""
    defaults = {
        "steps": 6,
        "eval_every": 2,
        "save_every": 4,
        "sample": lambda model: "<a>\n  sample",
    }
    return Run(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(0.05),
        data=Batches(DATA, 16),
        eval_data=Batches(DATA, 16),
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)),
        out=out,
        trackers=trackers,
        **defaults | options,
    )


def train(run):
    """Run `fit` and check that the threads of the trackers have ended."""
    output = io.StringIO()
    try:
        fit(run, console=Console(file=output, width=400), plan=False)
    finally:
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"shardwise-tensorboard", "shardwise-notes"}
    return output.getvalue()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Notes:
    """A tracker that a user might write: it appends to lists."""

    name = "notes"
    rewinds = False

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

    def steps_with(self, metric):
        return [step for step, values in self.records if metric in values]


def undo_save(out, step):
    """Make the run look as if it had been killed before this step was saved."""
    (out / "checkpoints" / str(step)).rename(out.parent / f"{out.name}-{step}")


def test_each_step_is_logged_once_also_after_a_resume(tmp_path):
    out, notes = tmp_path / "a", Notes()
    train(make_run(out, TensorBoard(), notes))
    assert notes.codes == [0]
    assert notes.starts[0] == TrackedRun("a", out, notes.starts[0].config, 0, None)
    undo_save(out, 6)
    train(make_run(out, TensorBoard(), notes, steps=8))

    # TensorBoard drops what an earlier start wrote of later steps.
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    records = read_lines(out / "metrics.jsonl")
    for name in ("loss", "grad_norm", "step_s", "items_per_s"):
        written = [(r["step"], np.float32(r[name])) for r in records if name in r]
        assert [step for step, _ in written] == list(range(1, 9))
        assert [(event.step, event.value) for event in events.Scalars(name)] == written
    assert [event.step for event in events.Scalars("eval_loss")] == [2, 4, 6, 8]
    assert not {"step", "time"} & set(events.Tags()["scalars"])
    samples = events.Tensors("sample")
    assert [event.step for event in samples] == [2, 4, 6, 8]
    assert samples[-1].tensor_proto.string_val[0] == b"    <a>\n      sample"
    (config,) = events.Tensors("config")
    config = json.loads(config.tensor_proto.string_val[0])
    assert (config["mesh"], config["steps"]) == ("data=1", 6)

    # A tracker that cannot drop steps does not receive them again.
    assert (notes.starts[1].step, notes.starts[1].id) == (4, "number 1")
    assert json.loads((out / "trackers.json").read_text()) == {
        "notes": "number 1",
        "tensorboard": "tensorboard",
    }
    assert notes.steps_with("loss") == list(range(1, 9))
    assert notes.steps_with("eval_loss") == [2, 4, 6, 8]
    assert [step for step, *_ in notes.texts] == [2, 4, 6, 8]

    # A tracker that joins late receives only new steps; a finished run opens no tracker.
    later = Notes()
    later.name = "later"
    train(make_run(out, later, notes, steps=9))
    train(make_run(out, later, notes, steps=9))
    assert later.steps_with("loss") == [9]
    assert len(later.starts) == 1


def test_a_failed_run_passes_its_exit_code(tmp_path):
    notes = Notes()

    def nan_batches(n):
        return {**Batches(DATA, 16)(n), "y": np.full(16, np.nan, "f4")}

    with pytest.raises(NumericsError):
        train(replace(make_run(tmp_path / "a", notes), data=nan_batches))
    assert notes.codes == [NumericsError.exit_code]
    with pytest.raises(ConfigError, match="trackers needs a run directory"):
        train(make_run(None, notes))


@pytest.mark.parametrize("method", ["start", "log", "text", "finish"])
def test_a_failing_tracker_is_disabled_with_one_warning(tmp_path, method):
    class Broken(Notes):
        pass

    def fail(self, *_):
        raise OSError(28, "No space left on device")

    setattr(Broken, method, fail)
    warnings, notes = [], Notes()
    tracking = Tracking(
        [Broken(), notes], TrackedRun("a", tmp_path, {}, 0), 0, warnings.append
    )
    for step in range(1, 4):
        tracking.log(step, {"step": step, "loss": 1.0, "skipped": True, "note": "text"})
        tracking.text(step, "sample", "text")
    tracking.close(0)
    assert warnings == [
        "notes is disabled: OSError: [Errno 28] No space left on device. "
        "Training continues; metrics.jsonl has every step."
    ]
    assert notes.records == [
        (step, {"loss": 1.0, "skipped": 1.0}) for step in (1, 2, 3)
    ]
    assert len(notes.texts) == 3


def test_a_slow_tracker_does_not_slow_down_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MAX_QUEUED", 50)
    resume, warnings = threading.Event(), []

    class Slow(Notes):
        def start(self, run):
            resume.wait(20)
            return "slow"

    started = time.perf_counter()
    tracking = Tracking([Slow()], TrackedRun("a", tmp_path, {}, 0), 0, warnings.append)
    for step in range(1, 1001):
        tracking.log(step, {"step": step, "loss": 1.0})
    assert time.perf_counter() - started < 0.2
    assert len(warnings) == 1
    assert "notes cannot keep up with the run" in warnings[0]
    tracking.close(0, seconds=0.1)
    assert time.perf_counter() - started < 1.0
    assert "notes did not finish in time" in warnings[1]
    resume.set()


def test_a_missing_library_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(TRACKERS, "no_such_library", "TensorBoard")
    with pytest.raises(
        ConfigError, match=r"pip install 'shardwise\[no_such_library\]'"
    ):
        make_trackers(["tensorboard", "no_such_library"])
    trackers = make_trackers(["tensorboard", "tensorboard"])
    assert [tracker.name for tracker in trackers] == ["tensorboard"]
