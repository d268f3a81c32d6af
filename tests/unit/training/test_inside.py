"""Operations of `fit` between steps: records, samples, early stopping, bad steps, profiles."""

import gzip
import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from shardwise import Batches, Checkpoints, Keep, Mean, Run, fit, optim
from shardwise.checkpoint.reader import best_step, find_step
from shardwise.cli import main
from shardwise.cluster.group import current_group
from shardwise.cluster.signals import stop_on_signals
from shardwise.cluster.watch import Watch
from shardwise.console import plot_losses
from shardwise.errors import ConfigError, DataError, NumericsError
from shardwise.files.durable import check_links
from shardwise.metrics import EarlyStop
from shardwise.training import log, starting
from shardwise.training.bad_steps import MAX_STEPS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X.sum(1), "kind": np.zeros(64, np.int32)}

ONE = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


class Net(nnx.Module):
    """Three layers; `kind` 1 makes the gradient of the second one NaN, `kind` 2 its value."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, kind):
        for i, layer in enumerate(self.layers):
            x = jnp.tanh(layer(x))
            if i == 1:
                x = x + jnp.sqrt(x * 0 + (kind != 1))
                x = x + jnp.log(x * 0 + jnp.where(kind == 2, -1.0, 1.0))
        return self.head(x)[:, 0]


def loss(model, batch):
    return Mean((model(batch["x"], batch["kind"][:, None]) - batch["y"]) ** 2)


def poisoned(at):
    """Return batches by step, with the kinds of `at`: {step: kind}, counted from 1."""
    batches = Batches(DATA, 16)
    return lambda n: {**batches(n), "kind": np.full(16, at.get(n + 1, 0), np.int32)}


def make(out=None, **options):
    given = {
        "model": Net,
        "loss": loss,
        "optimizer": optax.sgd(0.05),
        "data": poisoned({}),
        "steps": 12,
        "mesh": ONE,
        "out": out,
    }
    return Run(**given | options)


def train(run, **options):
    """Run `fit`; return its result and its output."""
    stream = io.StringIO()
    result = fit(run, console=Console(file=stream, width=400), plan=False, **options)
    return result, stream.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kernel_sum(model):
    return f"sum {float(model.head.kernel[...].sum()):.6f}"


# Records


def test_the_picture_has_losses_that_are_not_finite(tmp_path):
    records = [
        {"step": 1, "loss": 2.0, "eval_loss": "NaN"},
        {"step": 2, "loss": "Infinity", "eval_loss": 1.5},
        {"step": 3, "loss": [1], "eval_loss": "nothing"},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_losses(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_records_and_samples_after_the_checkpoint_are_removed_on_resume(tmp_path):
    before = time.time()
    run = make(
        tmp_path / "a",
        eval_data=Batches(DATA, 16),
        eval_every=4,
        save_every=5,
        sample=kernel_sum,
    )
    result, _ = train(run)
    records = lines(tmp_path / "a" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    times = [r["time"] for r in records]
    assert times == sorted(times)
    assert all(before <= t <= time.time() and t == round(t, 3) for t in times)
    samples = lines(tmp_path / "a" / "samples.jsonl")
    assert [s["step"] for s in samples] == [4, 8, 12]
    assert len({s["text"] for s in samples}) == 3
    assert samples[-1] == {"step": 12, "text": result.sample}

    (phase,) = lines(tmp_path / "a" / "phases.jsonl")
    assert phase["step"] == 12
    assert phase["start"] == lines(tmp_path / "a" / "starts.jsonl")[0]["time"]
    assert set(phase["seconds"]) == {"compile", "steps", "data", "evaluate", "save"}
    assert sum(phase["seconds"].values()) <= phase["time"] - phase["start"] + 0.1
    assert phase["seconds"]["evaluate"] > 0 < phase["seconds"]["save"]

    # As if the run had been killed after step 12, with step 10 saved. Later records are removed
    # and written again, except those in phases.jsonl.
    for step in (11, 12):
        if (path := tmp_path / "a" / "checkpoints" / str(step)).exists():
            path.rename(tmp_path / str(step))
    again, output = train(run)
    assert "at step 10" in output
    assert lines(tmp_path / "a" / "samples.jsonl") == samples
    assert [p["step"] for p in lines(tmp_path / "a" / "phases.jsonl")] == [12, 12]
    assert again.sample == result.sample
    # A finished run adds nothing.
    _, output = train(run)
    assert "nothing to do" in output
    assert lines(tmp_path / "a" / "samples.jsonl") == samples
    assert len(lines(tmp_path / "a" / "phases.jsonl")) == 2


def test_phases_are_written_when_the_data_ends_early(tmp_path, monkeypatch):
    # However short the start was.
    monkeypatch.setattr(log, "MIN_NEW_SECONDS", 1e6)
    with pytest.raises(DataError):
        train(make(tmp_path / "a", data=map(poisoned({}), range(6))))
    assert [p["step"] for p in lines(tmp_path / "a" / "phases.jsonl")] == [6]


@pytest.mark.slow
def test_sample_every_and_an_error_in_a_sample_does_not_stop_the_run(tmp_path):
    def broken(model):
        raise ValueError("no such prompt")

    train(make(tmp_path / "a", sample=kernel_sum, sample_every=5))
    assert [s["step"] for s in lines(tmp_path / "a" / "samples.jsonl")] == [5, 10, 12]
    result, output = train(make(tmp_path / "b", sample=broken, sample_every=5))
    assert int(result.state.step) == 12
    assert "no sample: ValueError: no such prompt" in output
    assert lines(tmp_path / "b" / "samples.jsonl") == []


# Early stopping and the best checkpoint


@pytest.mark.parametrize(
    ("stop", "values", "ends"),
    [
        (EarlyStop(patience=2), [3, 2, 2, 2], 4),
        (EarlyStop(patience=2), [3, 2, 2.1, 1.9, 2, 2], 6),
        (EarlyStop(patience=1, min_delta=0.5), [3, 2.4, 2.2], 3),
        (EarlyStop(patience=2, largest=True), [1, 2, 3, 3, 2], 5),
        (EarlyStop(patience=2), [float("nan"), float("nan")], 2),
        (EarlyStop(patience=2), [float("nan"), 3, float("inf"), 2], None),
    ],
)
def test_early_stop_depends_only_on_the_evaluations(stop, values, ends):
    found = [(10 * i, value) for i, value in enumerate(values, 1)]
    first = next((n for n in range(1, len(found) + 1) if stop.why(found[:n])), None)
    assert first == ends
    assert stop.why([]) is None


STUCK = {
    "optimizer": optax.sgd(0.0),
    "eval_data": Batches(DATA, 16),
    "eval_every": 2,
    "stop_when": EarlyStop(patience=2),
}


def test_a_run_that_stops_early_stays_stopped_when_resumed(tmp_path):
    run = make(tmp_path / "a", **STUCK)
    result, output = train(run)
    assert int(result.state.step) == 6
    assert (
        result.stopped_early
        == "eval_loss has not improved on {:.6g} (step 2) for 2 evaluations".format(
            result.eval_metrics["loss"]
        )
    )
    assert f"stopped early after step 6: {result.stopped_early}" in output
    assert (
        json.loads((tmp_path / "a" / "run.json").read_text())["stopped_early"]
        == result.stopped_early
    )
    assert Checkpoints(tmp_path / "a" / "checkpoints").latest() == 6
    again, output = train(run)
    assert "nothing to do" in output
    assert result.stopped_early in output
    assert int(again.state.step) == 6
    more, _ = train(replace(run, stop_when=EarlyStop(patience=4)))
    # Four evaluations, two of them before the resume.
    assert int(more.state.step) == 10


def test_early_stopping_and_best_checkpoint_need_an_existing_metric(tmp_path):
    with pytest.raises(
        ConfigError, match=r"evaluations produce eval_loss\. Did you mean 'eval_loss'"
    ):
        train(make(**STUCK | {"stop_when": EarlyStop(metric="eval_los")}))
    with pytest.raises(
        ConfigError, match="keep depends on 'eval_loss', but the run has no eval_data"
    ):
        train(make(keep=Keep(best=1)))
    with pytest.raises(ConfigError, match="patience"):
        EarlyStop(patience=0)


def test_the_step_with_the_best_evaluation_is_saved_and_kept(tmp_path, capsys):
    """The learning rate is too large from step 5 on, so step 4 is best; no save is due there."""
    rate = optax.piecewise_constant_schedule(0.05, {4: 20.0})
    options = {
        "optimizer": optax.sgd(rate),
        "eval_data": Batches(DATA, 16),
        "eval_every": 2,
        "save_every": 5,
    }
    train(make(tmp_path / "a", **options, keep=Keep(last=1, best=1)))
    checkpoints = tmp_path / "a" / "checkpoints"
    values = {
        r["step"]: r["eval_loss"]
        for r in lines(tmp_path / "a" / "metrics.jsonl")
        if "eval_loss" in r
    }
    best = min(values, key=values.get)
    assert best == 4
    assert Checkpoints(checkpoints).steps() == [best, 12]
    assert best_step(checkpoints) == best
    assert find_step(tmp_path / "a", "best") == checkpoints / "4"
    assert main(["checkpoint", "ls", str(tmp_path / "a")]) == 0
    (row,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "best eval_loss" in line
    ]
    assert row.split()[1] == "4"
    assert main(["checkpoint", "show", str(tmp_path / "a"), "--step", "best"]) == 0
    assert "checkpoints/4" in capsys.readouterr().out.replace("\n", "")


# Bad steps


def test_report_names_the_first_bad_gradient_and_has_the_batch(tmp_path):
    run = make(
        tmp_path / "a",
        data=poisoned({8: 1}),
        on_nonfinite="skip",
        accumulate=2,
        mesh="data=8",
    )
    _, output = train(run)
    place = tmp_path / "a" / "bad" / "8"
    assert (
        "the update of step 8 was not applied (non-finite): first non-finite values in the "
        f"gradient of layers/1/bias; details in {place}"
    ) in output
    report = json.loads((place / "report.json").read_text())
    bad = {path for path, row in report["gradients"].items() if row["nonfinite"]}
    assert bad == {
        "layers/0/kernel",
        "layers/0/bias",
        "layers/1/kernel",
        "layers/1/bias",
    }
    assert report["first_path"] == "layers/1/bias"
    assert report["grad_norm"] == "nan"
    assert all(row["nonfinite"] == 0 for row in report["parameters"].values())
    # In the order of use.
    assert list(report["gradients"])[-2:] == ["head/kernel", "head/bias"]
    with np.load(place / "batch.npz", allow_pickle=False) as batch:
        for name, value in run.data(7).items():
            np.testing.assert_array_equal(batch[name], value)
    assert "layers/1/bias  <- first" in (place / "report.txt").read_text()
    # The next step was running already, and the report says that its parameters are used.
    assert report["parameters_are"] == "one update later than in the step"


def test_report_names_the_operation_that_produced_a_nan(tmp_path):
    with pytest.raises(NumericsError, match="step 12"):
        train(make(tmp_path / "a", data=poisoned({12: 2})))
    report = json.loads((tmp_path / "a" / "bad" / "12" / "report.json").read_text())
    # It was the last step, so no update came after it.
    assert report["parameters_are"] == "those of the step"
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "jnp.log(" in text
    )
    assert f"'log' at {__file__}:{line}" in report["first"]


def test_recomputed_gradients_are_those_of_the_step(tmp_path):
    """Between two bad steps nothing is applied, so the recomputed values are exact."""
    run = make(
        tmp_path / "a", data=poisoned({5: 1, 6: 1}), steps=6, on_nonfinite="skip"
    )
    result, _ = train(run)
    report = json.loads((tmp_path / "a" / "bad" / "5" / "report.json").read_text())
    assert report["parameters_are"] == "those of the step"
    assert report["recomputed"]["loss"] == pytest.approx(report["loss"], rel=1e-6)
    kernel = np.asarray(result.state.params["head"]["kernel"])
    assert report["parameters"]["head/kernel"]["norm"] == pytest.approx(
        np.linalg.norm(kernel), rel=1e-5
    )


@pytest.mark.slow
def test_only_a_few_loss_spikes_are_inspected(tmp_path):
    data = poisoned({})

    def spiking(n):
        scale = 1e4 if n in (24, 26, 28, 30, 32) else 1
        return {**data(n), "y": data(n)["y"] * scale}

    _, output = train(
        make(
            tmp_path / "a",
            data=spiking,
            steps=36,
            optimizer=optim.adam(1e-3, spikes=5.0),
        )
    )
    skipped = [
        r["step"] for r in lines(tmp_path / "a" / "metrics.jsonl") if r.get("skipped")
    ]
    assert len(skipped) > MAX_STEPS
    assert (
        sorted(int(path.name) for path in (tmp_path / "a" / "bad").iterdir())
        == skipped[:MAX_STEPS]
    )
    assert (
        output.count("was not applied (loss spike): all values are finite") == MAX_STEPS
    )


@pytest.mark.slow
def test_bad_steps_of_an_iterator_and_of_a_run_without_a_directory(tmp_path):
    batches = [poisoned({3: 1})(n) for n in range(6)]
    run = make(tmp_path / "a", data=iter(batches), steps=6, on_nonfinite="skip")
    _, output = train(run)
    assert (
        "step 3 was not applied (non-finite): the data is an iterator, which cannot return to this "
        "batch; details in" in output
    )
    assert "parameters" in json.loads(
        (tmp_path / "a" / "bad" / "3" / "report.json").read_text()
    )
    _, output = train(make(data=poisoned({3: 1}), steps=6, on_nonfinite="skip"))
    assert "warning: the update of step 3 was not applied (non-finite)" in output
    assert "details in" not in output


def test_the_message_says_what_is_not_finite():
    nan = optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: x * jnp.nan, updates)
    )
    with pytest.raises(NumericsError, match="both are finite, but the update"):
        train(make(optimizer=optax.chain(optax.sgd(0.1), nan), steps=2))

    def forgotten(model, batch):
        nats = (model(batch["x"], batch["kind"][:, None]) - batch["y"]) ** 2
        return Mean(nats, (batch["y"] > 0) * 1.0)

    with pytest.raises(NumericsError, match=r"Mean\(nats \* mask, mask\)"):
        train(make(loss=forgotten, steps=2))


# Profile


PROFILED = """
import sys
from pathlib import Path
from shardwise import use_cpu_devices
use_cpu_devices(1)
from tests.unit.training.test_inside import make, train
if "plan" in sys.argv:
    from shardwise import find_target
    find_target("v5e:2x4")
out = Path(sys.argv[1])
print(train(make(out, profile=(5, 7)))[1])
print(train(make(out, steps=14, profile=(5, 7)))[1])
"""


def in_new_process(script, *words):
    """Run a script that profiles: other tests load libtpu into this process."""
    command = [sys.executable, "-c", script, *map(str, words)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_range_of_steps_is_profiled(tmp_path):
    output = in_new_process(PROFILED, tmp_path / "a")
    (trace,) = (tmp_path / "a" / "profile" / "plugins" / "profile").glob(
        "*/*.xplane.pb"
    )
    names = {
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
    }
    assert "step" in names
    (perfetto,) = trace.parent.glob("perfetto_trace.json.gz")
    # Not from `event.stats` above: jax 0.12.0 aborts there.
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    numbers = {
        int(event["args"]["step_num"])
        for event in events
        if event.get("name") == "step"
    }
    assert numbers == {5, 6, 7}
    assert len(events) > 100
    assert (
        f"profile of steps 5 to 7: open {perfetto} at https://ui.perfetto.dev" in output
    )
    assert "no profile: the run is at step 12, after the steps 5:7 to trace" in output


@pytest.mark.slow
def test_a_profile_after_a_plan_for_tpus_is_refused_and_the_run_continues(tmp_path):
    """JAX's profiler crashes the process if libtpu is loaded on a machine without TPUs."""
    output = in_new_process(PROFILED, tmp_path / "a", "plan")
    assert "no profile: libtpu is loaded in this process without a TPU" in output
    assert len(lines(tmp_path / "a" / "metrics.jsonl")) == 14


def test_an_invalid_profile_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="counted from 1"):
        train(make(tmp_path / "b", profile=(0, 3)))
    with pytest.raises(ConfigError, match="profile needs a run directory"):
        train(make(profile=(1, 3)))


def test_links_in_a_run_directory_are_refused(tmp_path):
    for place in ("bad/7", "profile/plugins/x", "tensorboard/events"):
        folder = tmp_path / place.replace("/", "-")
        (folder / place).parent.mkdir(parents=True)
        (folder / place).symlink_to(tmp_path)
        with pytest.raises(Exception, match="is a link"):
            check_links(folder)


# Order of operations


class RecordingWatch(Watch):
    """Records the phases and steps that a run announces."""

    def __init__(self, stop):
        super().__init__(current_group(), stop)
        self.events = []

    def phase(self, text):
        self.events.append(str(text))
        super().phase(text)

    def tick(self, text):
        self.events.append(f"tick {text}")
        super().tick(text)


ORDERED = """
import json, sys
from pathlib import Path
from shardwise import use_cpu_devices
use_cpu_devices(1)
from tests.unit.training.test_inside import announced
print(json.dumps(announced(Path(sys.argv[1]))))
"""


def announced(out):
    """Return what a run with every operation announces."""
    run = make(
        out,
        steps=3,
        data=poisoned({1: 1}),
        on_nonfinite="skip",
        eval_data=Batches(DATA, 64),
        eval_every=2,
        save_every=2,
        sample=kernel_sum,
        profile=(3, 3),
    )
    with stop_on_signals() as stop, RecordingWatch(stop) as watch:
        train(run, watch=watch)
    return watch.events


def test_operations_happen_in_their_order(tmp_path):
    """The watchdog and the agreement between processes rely on this exact sequence."""
    assert json.loads(in_new_process(ORDERED, tmp_path / "a")) == [
        "preparing",
        "verifying the newest checkpoint",
        "compiling the step",
        "loading the state",
        "waiting for all to be ready",
        "step 1",
        "tick step 1",
        "tick step 2",
        "inspecting step 1",
        "evaluating after step 2",
        "evaluating",
        "tick step 2",
        "saving step 2",
        "tick step 2",
        "sampling after step 2",
        "tick step 2",
        "profiling after step 2",
        "tick step 2",
        "tick step 3",
        "evaluating after step 3",
        "evaluating",
        "tick step 3",
        "profiling after step 3",
        "tick step 3",
        "saving the last step",
        "finishing",
    ]


# Learning rates


def test_unreadable_learning_rates_do_not_prevent_a_resume(tmp_path, monkeypatch):
    """An Optax release may make the optimizer unreadable; the schedule is then not compared."""
    train(make(tmp_path / "a", steps=4))
    monkeypatch.setattr(starting, "sample_rates", lambda tx, params, steps: {})
    result, output = train(make(tmp_path / "a", steps=6, optimizer=optax.sgd(0.01)))
    assert int(result.state.step) == 6
    assert (
        "warning: the learning rates of this run or of its checkpoint could not be read"
        in output
    )


def test_a_changed_learning_rate_is_refused(tmp_path):
    train(make(tmp_path / "a", steps=4))
    with pytest.raises(ConfigError, match="--accept lr"):
        train(make(tmp_path / "a", steps=6, optimizer=optax.sgd(0.01)))
