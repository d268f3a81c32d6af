"""Checks in the model and the loss, through the step, the loop, the evaluation and `fit`."""

import io
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise import (
    Batches,
    Checkpoints,
    Mean,
    Run,
    abstract_state,
    evaluate,
    fit,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    steps,
)
from shardwise.errors import CheckError, ConfigError, NumericsError
from shardwise.models.sampling import generate
from shardwise.tree import named_leaves

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype("f4")
DATA = {"x": X, "y": (np.arange(64) % 4).astype(np.int32)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def unchecked(model, batch):
    logits = model(batch["x"])
    labels = jnp.minimum(batch["y"], 3)
    return Mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss(model, batch):
    top = batch["y"].max()
    checkify.check(top < 4, "labels must be below 4, the largest is {top}", top=top)
    return unchecked(model, batch)


LINE = loss.__code__.co_firstlineno + 2


def spoiled(*bad):
    """Return batches by step, with a wrong label in each of the steps `bad`, counted from 1."""
    batches = Batches(DATA, 16)

    def batch(n):
        found = batches(n)
        if n + 1 not in bad:
            return found
        labels = found["y"].copy()
        labels[13] = 7
        return {**found, "y": labels}

    return batch


def spec_on(mesh="data=8", model=Net, optimizer=None):
    return abstract_state(model, optimizer or optax.adam(1e-2), make_mesh(mesh))


def host(state):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


def test_a_failed_check_leaves_the_state_as_it_was():
    spec = spec_on()
    step = make_train_step(spec, loss, DATA)
    state = init_state(spec, 0)
    before = host(state)
    assert step.traced.has_checks
    batch = {**DATA, "y": np.full(64, 9, np.int32)}
    with pytest.raises(CheckError) as raised:
        step(state, step.place(batch))
    assert str(raised.value) == (
        f"step 1: check failed: labels must be below 4, the largest is 9 ({__file__}, "
        f"line {LINE}). The update was not applied."
    )
    after = host(raised.value.state)
    assert after.pop("step") == before.pop("step") + 1
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert np.isfinite(raised.value.metrics["loss"])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_passing_check_changes_nothing(accumulate):
    spec = spec_on(model=lambda rngs: nnx.Linear(8, 4, rngs=rngs))
    ends = []
    for function in (loss, unchecked):
        step = make_train_step(spec, function, spoiled()(0), accumulate=accumulate)
        state = init_state(spec, 0)
        for _, state, _ in steps(step, state, spoiled(), until=4):  # noqa: B007
            pass
        ends.append(host(state))
    for name, value in ends[1].items():
        np.testing.assert_array_equal(ends[0][name], value, err_msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_stops_at_the_failed_step(accumulate):
    spec = spec_on(model=lambda rngs: nnx.Linear(8, 4, rngs=rngs))
    step = make_train_step(spec, loss, spoiled()(0), accumulate=accumulate).compile()
    made = steps(step, init_state(spec, 0), spoiled(3), until=5)
    assert [next(made)[0], next(made)[0]] == [1, 2]
    with pytest.raises(CheckError, match="step 3: check failed: labels must be below"):
        next(made)


def test_a_loss_without_checks_is_compiled_as_before():
    """The error is an output only where there are checks."""
    spec = spec_on()
    step = make_train_step(spec, unchecked, DATA)
    assert not step.traced.has_checks
    traced = step.trace()
    metrics = {"loss": 0, "weight": 0, "grad_norm": 0, "finite": 0}
    expected = len(jax.tree.leaves((spec.abstract, metrics)))
    assert len(traced.jaxpr.out_avals) == expected
    assert "check" not in str(traced.jaxpr)

    checked = make_train_step(spec, loss, DATA).trace()
    # Whether one failed; then its predicate, its code, and the value of its message.
    assert len(checked.jaxpr.out_avals) == expected + 4


def test_the_first_half_of_a_step_raises_too():
    spec = spec_on()
    step = make_train_step(spec, loss, DATA)
    state = init_state(spec, 0)
    step.update(state, *step.gradients(state, step.place(DATA)))
    batch = step.place({**DATA, "y": np.full(64, 5, np.int32)})
    with pytest.raises(CheckError, match=r"step 1: .*the largest is 5"):
        step.gradients(state, batch)


@pytest.mark.parametrize("batch_size", [16, 12])
def test_an_evaluation_reports_its_batch(batch_size):
    spec = spec_on()
    batches = Batches(DATA, batch_size)
    step = make_eval_step(spec, loss, batches.example())
    plain = make_eval_step(spec, unchecked, batches.example())
    state = init_state(spec, 0)
    assert evaluate(step, state, batches) == evaluate(plain, state, batches)
    labels = DATA["y"].copy()
    labels[2 * batch_size] = 6
    with pytest.raises(CheckError, match=r"evaluation after step 0, batch 3: .* is 6 "):
        evaluate(step, state, Batches({**DATA, "y": labels}, batch_size))


class Guarded(Net):
    def __call__(self, x):
        h = self.norm(self.hidden(x))
        checkify.check(jnp.all(h < 1e3), "activation of {top:.0f}", top=h.max())
        return self.out(nnx.remat(nnx.relu)(h))


def test_a_check_in_the_model_sees_its_activations():
    spec = spec_on(model=Guarded)
    step = make_train_step(spec, unchecked, DATA, compute_dtype="bfloat16")
    state = init_state(spec, 0)
    state, _ = step(state, step.place(DATA))
    scale = state.params["norm"]["scale"] * 1e5
    params = {**state.params, "norm": {**state.params["norm"], "scale": scale}}
    with pytest.raises(CheckError, match=r"step 2: check failed: activation of \d+ "):
        step(replace(state, params=params), step.place(DATA))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        checkify.check(jnp.all(y < 1e3), "activation of {top:.0f}", top=y.max())
        return x + nnx.tanh(y)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.layers = make(rngs.split(3))

    def __call__(self, x):
        layer = nnx.remat(lambda x, layer: layer(x))
        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)[:, :4]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_check_in_scanned_layers_is_not_lost(accumulate):
    """`jax.grad` drops the checks inside of a scan."""
    spec = spec_on("fsdp=8", Scanned)
    step = make_train_step(spec, unchecked, DATA, accumulate=accumulate)
    state = init_state(spec, 0)
    state, _ = step(state, step.place(DATA))
    with pytest.raises(CheckError, match=r"step 2: check failed: activation of \d+ "):
        step(state, step.place({**DATA, "x": DATA["x"] * 1e5}))


def make_run(out=None, **options):
    given = {
        "model": Net,
        "loss": loss,
        "optimizer": optax.adam(1e-2),
        "data": spoiled(),
        "steps": 8,
        "save_every": 2,
        "mesh": "data=8",
        "out": out,
    }
    return Run(**given | options)


def train(run):
    return fit(run, console=Console(file=io.StringIO()))


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_fit_stops_and_saves_nothing_after_the_failed_step(tmp_path, on_nonfinite):
    run = make_run(tmp_path, data=spoiled(6), on_nonfinite=on_nonfinite)
    with pytest.raises(NumericsError) as raised:
        train(run)
    assert str(raised.value) == (
        "step 6: check failed: labels must be below 4, the largest is 7 "
        f"({__file__}, line {LINE}). The update was not applied. "
        "The newest checkpoint is step 4."
    )
    assert raised.value.exit_code == 5
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
    # The steps before the failed one are recorded.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    report = json.loads((tmp_path / "bad" / "6" / "report.json").read_text())
    assert report["why"] == "failed check"
    assert "the largest is 7" in report["check"]
    assert report["batch"]["y"]["largest"] == 7
    with np.load(tmp_path / "bad" / "6" / "batch.npz") as kept:
        assert kept["y"].max() == 7


def test_the_run_continues_once_the_data_is_correct(tmp_path):
    with pytest.raises(NumericsError):
        train(make_run(tmp_path / "a", data=spoiled(6)))
    resumed = train(make_run(tmp_path / "a"))
    straight = train(make_run(tmp_path / "b"))
    for name, value in host(straight.state).items():
        np.testing.assert_array_equal(host(resumed.state)[name], value, err_msg=name)


def test_a_run_resumes_without_its_checks(tmp_path):
    """A check is not part of what a loss computes: no `--accept loss` is needed."""

    def tolerant(model, batch):
        top = batch["y"].max()
        checkify.check(top < 9, "labels must be below 9, the largest is {top}", top=top)
        jax.debug.callback(lambda top: None, top)
        return unchecked(model, batch)

    train(make_run(tmp_path, steps=4))
    result = train(make_run(tmp_path, steps=6, loss=tolerant, data=spoiled(6)))
    assert int(result.state.step) == 6


def test_fit_stops_at_a_check_that_fails_in_an_evaluation(tmp_path):
    labels = DATA["y"].copy()
    labels[40] = 5
    run = make_run(tmp_path, eval_data=Batches({**DATA, "y": labels}, 16), eval_every=3)
    with pytest.raises(NumericsError, match="evaluation after step 3, batch 3"):
        train(run)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]


def test_a_check_inside_of_shard_map_is_refused():
    mesh = make_mesh("data=8")
    part = PartitionSpec("data")

    def sharded(model, batch):
        def shard(x):
            checkify.check(jnp.all(x < 1e3), "too large")
            return x

        x = jax.shard_map(shard, mesh=mesh, in_specs=part, out_specs=part)(batch["x"])
        return unchecked(model, {**batch, "x": x})

    with pytest.raises(ConfigError, match=r"a check is inside of jax\.shard_map"):
        make_train_step(spec_on(), sharded, DATA)


def test_a_check_in_the_optimizer_is_refused():
    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        checkify.check(norm < 1e6, "norm {norm}", norm=norm)
        return updates, state

    guard = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    spec = spec_on(optimizer=optax.chain(guard, optax.sgd(0.1)))
    step = make_train_step(spec, unchecked, DATA)
    with pytest.raises(ConfigError, match=r"a check .* is in the optimizer"):
        step.lower()
    with pytest.raises(ConfigError, match="Move it to the model or the loss"):
        step(init_state(spec, 0), step.place(DATA))


def test_a_print_runs_once_per_step_and_never_in_a_trace(capfd):
    def printing(model, batch):
        jax.debug.print("labels up to {top}", top=batch["y"].max())
        return unchecked(model, batch)

    spec = spec_on(model=lambda rngs: nnx.Linear(8, 4, rngs=rngs))
    step = make_train_step(spec, printing, spoiled()(0), accumulate=2).compile()
    assert capfd.readouterr().out == ""
    for _ in steps(step, init_state(spec, 0), spoiled(2), until=3):
        pass
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out.split("\n"))
    assert printed == ["", *["labels up to 3"] * 5, "labels up to 7"]


def test_an_ordered_print_needs_one_device(capfd):
    def ordered(model, batch):
        jax.debug.print("labels up to {top}", top=batch["y"].max(), ordered=True)
        return unchecked(model, batch)

    with pytest.raises(ConfigError, match=r"mesh has 8 devices.*Remove ordered=True"):
        make_train_step(spec_on(), ordered, DATA)
    one = abstract_state(Net, optax.sgd(0.1), make_mesh("data=1", jax.devices()[:1]))
    step = make_train_step(one, ordered, DATA).compile()
    step(init_state(one, 0), step.place(DATA))
    jax.effects_barrier()
    assert capfd.readouterr().out == "labels up to 3\n"


METRICS = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy())
AVERAGE = nnx.metrics.Average("loss")
RNGS = nnx.Rngs(0)
NORM = nnx.BatchNorm(4, rngs=RNGS)


def with_metrics(model, batch):
    METRICS.update(logits=model(batch["x"]), labels=batch["y"])
    return unchecked(model, batch)


def with_average(model, batch):
    AVERAGE.update(loss=batch["x"].sum())
    return unchecked(model, batch)


def with_rngs(model, batch):
    return unchecked(model, {**batch, "x": batch["x"] + RNGS.normal()})


def with_norm(model, batch):
    return Mean(NORM(model(batch["x"])) ** 2)


@pytest.mark.parametrize(
    ("function", "variable", "remedy"),
    [
        (with_metrics, "MetricState", r'return loss, \{"accuracy": Mean\(hits\)\}'),
        (with_average, "MetricState", "Return the metric next to the loss"),
        (with_rngs, "RngCount", r"loss\(model, batch, rngs\)"),
        (with_norm, "BatchStat", "Make it a part of the model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_flax_objects_from_outside_of_the_loss_are_refused(function, variable, remedy):
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=remedy) as raised:
        make_train_step(spec_on(), function, DATA)
    place = f"outside of it: {variable} ({__file__}, line {line})"
    assert place in str(raised.value)


class Speller(nnx.Module):
    def __init__(self, rngs, is_checked):
        self.table = nnx.Embed(16, 8, rngs=rngs)
        self.out = nnx.Linear(8, 16, rngs=rngs)
        self.is_checked = is_checked

    def __call__(self, tokens):
        logits = self.out(self.table(tokens))
        if self.is_checked:
            checkify.check(jnp.all(logits > 1e9), "logits are small")
        return logits


def test_sampling_ignores_checks():
    prompt, key = np.ones((1, 4), np.int32), jax.random.key(0)
    one, two = (
        generate(Speller(nnx.Rngs(0), is_checked), prompt, 5, key)
        for is_checked in (True, False)
    )
    np.testing.assert_array_equal(one, two)
