"""What goes on beside the steps of a run: samples, early stopping, the best checkpoint, bad steps, a profile, where the time goes."""

import gzip
import io
import json
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
from shardwise.early_stop import EarlyStop
from shardwise.errors import ConfigError, DataError, NumericsError
from shardwise.files.durable import check_links
from shardwise.training.bad_steps import MAX_STEPS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X.sum(1), "kind": np.zeros(64, np.int32)}

ONE = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


class Net(nnx.Module):
    """Three layers; `kind` 1 makes the gradient after the second one NaN, 2 the value."""

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
    """Batches by step, of the kinds in `at`, {step: kind}; `step` counts from 1."""
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


def go(run, **options):
    """(what `fit` gives, what it says)"""
    said = io.StringIO()
    return fit(run, console=Console(file=said, width=400), plan=False, **options), said.getvalue()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kernel_sum(model):
    return f"sum {float(model.head.kernel[...].sum()):.6f}"


# Records


def test_records_have_their_time_and_samples_their_step_and_both_are_cut_back(tmp_path):
    before = time.time()
    run = make(
        tmp_path / "a", eval_data=Batches(DATA, 16), eval_every=4, save_every=5, sample=kernel_sum
    )
    result, _ = go(run)
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

    # As if it had been killed after step 12 with step 10 saved: what is later is cut, and made again, but for phases.jsonl.
    for step in (11, 12):
        if (path := tmp_path / "a" / "checkpoints" / str(step)).exists():
            path.rename(tmp_path / str(step))
    again, said = go(run)
    assert "at step 10" in said
    assert lines(tmp_path / "a" / "samples.jsonl") == samples
    assert [p["step"] for p in lines(tmp_path / "a" / "phases.jsonl")] == [12, 12]
    assert again.sample == result.sample
    _, said = go(run)  # a finished run adds nothing
    assert "nothing to do" in said
    assert lines(tmp_path / "a" / "samples.jsonl") == samples
    assert len(lines(tmp_path / "a" / "phases.jsonl")) == 2


def test_where_the_time_went_is_written_down_when_the_data_ends_too_early(tmp_path):
    with pytest.raises(DataError):
        go(make(tmp_path / "a", data=[poisoned({})(n) for n in range(6)]))
    assert [p["step"] for p in lines(tmp_path / "a" / "phases.jsonl")] == [6]


@pytest.mark.slow
def test_samples_come_as_often_as_asked_and_a_mistake_in_them_costs_nothing(tmp_path):
    def broken(model):
        raise ValueError("no such prompt")

    go(make(tmp_path / "a", sample=kernel_sum, sample_every=5))
    assert [s["step"] for s in lines(tmp_path / "a" / "samples.jsonl")] == [5, 10, 12]
    result, said = go(make(tmp_path / "b", sample=broken, sample_every=5))
    assert int(result.state.step) == 12
    assert "no sample: ValueError: no such prompt" in said
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
def test_patience_is_a_function_of_the_evaluations(stop, values, ends):
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


def test_a_run_that_learns_nothing_more_stops_and_knows_it_when_it_resumes(tmp_path):
    run = make(tmp_path / "a", **STUCK)
    result, said = go(run)
    assert int(result.state.step) == 6
    assert (
        result.stopped_early
        == "eval_loss has not improved on {:.6g} (step 2) for 2 evaluations".format(
            result.eval_metrics["loss"]
        )
    )
    assert f"stopped early after step 6: {result.stopped_early}" in said
    assert (
        json.loads((tmp_path / "a" / "run.json").read_text())["stopped_early"]
        == result.stopped_early
    )
    assert Checkpoints(tmp_path / "a" / "checkpoints").latest() == 6
    again, said = go(run)
    assert "nothing to do" in said
    assert result.stopped_early in said
    assert int(again.state.step) == 6
    more, _ = go(replace(run, stop_when=EarlyStop(patience=4)))
    assert int(more.state.step) == 10  # four evaluations, two of them before the resume


def test_what_early_stopping_and_the_best_checkpoint_go_by_must_be_measured(tmp_path):
    with pytest.raises(
        ConfigError, match=r"evaluations produce eval_loss\. Did you mean 'eval_loss'"
    ):
        go(make(**STUCK | {"stop_when": EarlyStop(metric="eval_los")}))
    with pytest.raises(
        ConfigError, match="keep depends on 'eval_loss', but the run has no eval_data"
    ):
        go(make(keep=Keep(best=1)))
    with pytest.raises(ConfigError, match="patience"):
        EarlyStop(patience=0)


def test_the_best_evaluation_is_saved_and_kept_and_found(tmp_path, capsys):
    """The learning rate is far too large from step 5 on: step 4 is the best of the evaluations, and no save is due there."""
    rate = optax.piecewise_constant_schedule(0.05, {4: 20.0})
    options = {
        "optimizer": optax.sgd(rate),
        "eval_data": Batches(DATA, 16),
        "eval_every": 2,
        "save_every": 5,
    }
    go(make(tmp_path / "a", **options, keep=Keep(last=1, best=1)))
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
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "best eval_loss" in line]
    assert row.split()[1] == "4"
    assert main(["checkpoint", "show", str(tmp_path / "a"), "--step", "best"]) == 0
    assert "checkpoints/4" in capsys.readouterr().out.replace("\n", "")


# Bad steps


def test_a_bad_gradient_is_named_and_its_batch_kept(tmp_path):
    run = make(
        tmp_path / "a", data=poisoned({8: 1}), on_nonfinite="skip", accumulate=2, mesh="data=8"
    )
    _, said = go(run)
    place = tmp_path / "a" / "bad" / "8"
    assert (
        "the update of step 8 was not applied (non-finite): first non-finite values in the gradient of "
        f"layers/1/bias; details in {place}"
    ) in said
    report = json.loads((place / "report.json").read_text())
    bad = {path for path, row in report["gradients"].items() if row["nonfinite"]}
    assert bad == {"layers/0/kernel", "layers/0/bias", "layers/1/kernel", "layers/1/bias"}
    assert report["first_path"] == "layers/1/bias"
    assert report["grad_norm"] == "nan"
    assert all(row["nonfinite"] == 0 for row in report["parameters"].values())
    assert list(report["gradients"])[-2:] == ["head/kernel", "head/bias"]  # in the order of use
    with np.load(place / "batch.npz", allow_pickle=False) as batch:
        for name, value in run.data(7).items():
            np.testing.assert_array_equal(batch[name], value)
    assert "layers/1/bias  <- first" in (place / "report.txt").read_text()
    # The next step was under way: the statistics are those of the parameters after it, and that is said.
    assert report["parameters_are"] == "one update later than in the step"


def test_a_bad_value_is_traced_to_the_operation_that_made_it(tmp_path):
    with pytest.raises(NumericsError, match="step 12"):
        go(make(tmp_path / "a", data=poisoned({12: 2})))
    report = json.loads((tmp_path / "a" / "bad" / "12" / "report.json").read_text())
    assert report["parameters_are"] == "those of the step"  # it was the last
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "jnp.log(" in text
    )
    assert f"'log' at {__file__}:{line}" in report["first"]


def test_gradients_of_a_bad_step_are_those_of_the_step(tmp_path):
    """Two bad steps in a row: nothing was applied between, so what is recomputed is exact, dropout and all."""
    run = make(tmp_path / "a", data=poisoned({5: 1, 6: 1}), steps=6, on_nonfinite="skip")
    result, _ = go(run)
    report = json.loads((tmp_path / "a" / "bad" / "5" / "report.json").read_text())
    assert report["parameters_are"] == "those of the step"
    assert report["recomputed"]["loss"] == pytest.approx(report["loss"], rel=1e-6)
    kernel = np.asarray(result.state.params["head"]["kernel"])
    assert report["parameters"]["head/kernel"]["norm"] == pytest.approx(
        np.linalg.norm(kernel), rel=1e-5
    )


@pytest.mark.slow
def test_spikes_are_looked_into_a_few_of_them(tmp_path):
    data = poisoned({})
    spiking = lambda n: {**data(n), "y": data(n)["y"] * (1e4 if n in (24, 26, 28, 30, 32) else 1)}  # noqa: E731
    _, said = go(
        make(tmp_path / "a", data=spiking, steps=36, optimizer=optim.adam(1e-3, spikes=5.0))
    )
    skipped = [r["step"] for r in lines(tmp_path / "a" / "metrics.jsonl") if r.get("skipped")]
    assert len(skipped) > MAX_STEPS
    assert (
        sorted(int(path.name) for path in (tmp_path / "a" / "bad").iterdir()) == skipped[:MAX_STEPS]
    )
    assert said.count("was not applied (loss spike): all values are finite") == MAX_STEPS


@pytest.mark.slow
def test_a_bad_step_of_an_iterator_and_of_a_run_without_a_directory(tmp_path):
    batches = [poisoned({3: 1})(n) for n in range(6)]
    _, said = go(make(tmp_path / "a", data=batches, steps=6, on_nonfinite="skip"))
    assert (
        "step 3 was not applied (non-finite): the data is an iterator, which cannot return to this "
        "batch; details in" in said
    )
    assert "parameters" in json.loads((tmp_path / "a" / "bad" / "3" / "report.json").read_text())
    _, said = go(make(data=poisoned({3: 1}), steps=6, on_nonfinite="skip"))
    assert "details in" not in said


# Profile


def test_a_window_of_steps_is_traced(tmp_path):
    _, said = go(make(tmp_path / "a", profile=(5, 7)))
    (trace,) = (tmp_path / "a" / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    names = {
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
    }
    assert "step" in names
    (perfetto,) = trace.parent.glob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))[
        "traceEvents"
    ]  # not `event.stats` above: jax 0.12.0 aborts there
    assert {int(event["args"]["step_num"]) for event in events if event.get("name") == "step"} == {
        5,
        6,
        7,
    }
    assert len(events) > 100
    assert f"profile of steps 5 to 7: open {perfetto} at https://ui.perfetto.dev" in said
    _, said = go(make(tmp_path / "a", steps=14, profile=(5, 7)))
    assert "no profile: the run is at step 12, after the steps 5:7 to trace" in said
    with pytest.raises(ConfigError, match="counted from 1"):
        go(make(tmp_path / "b", profile=(0, 3)))
    with pytest.raises(ConfigError, match="profile needs a run directory"):
        go(make(profile=(1, 3)))


def test_nothing_is_written_through_a_link(tmp_path):
    for place in ("bad/7", "profile/plugins/x", "tensorboard/events"):
        folder = tmp_path / place.replace("/", "-")
        (folder / place).parent.mkdir(parents=True)
        (folder / place).symlink_to(tmp_path)
        with pytest.raises(Exception, match="is a link"):
            check_links(folder)
