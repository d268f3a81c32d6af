"""`fit` with optimizers: live values, averages, non-finite values, and resuming."""

import io
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from shardwise import (
    Batches,
    Checkpoints,
    EarlyStop,
    Mean,
    Run,
    evaluate,
    fit,
    make_eval_step,
    optim,
)
from shardwise.cli.report import main as report_main
from shardwise.cluster.group import current_group
from shardwise.cluster.signals import Stop
from shardwise.cluster.watch import Watch
from shardwise.errors import ConfigError, NumericsError
from shardwise.files import failpoints
from shardwise.optim import Group

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("f4")
DATA = {"x": X, "y": X @ RNG.normal(size=(4, 2)).astype("f4")}


def model(rngs):
    return nnx.Sequential(
        nnx.Linear(4, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 2, rngs=rngs)
    )


def loss(model, batch):
    return Mean(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


def go(tmp_path=None, *, data=DATA, steps=20, optimizer=None, console=None, **options):
    run = Run(
        model=model,
        loss=loss,
        optimizer=optimizer or optim.transformer(steps),
        data=Batches(data, 16),
        steps=steps,
        mesh="data=8",
        out=tmp_path,
        **options,
    )
    return fit(run, console=console or Console(file=io.StringIO()))


def records(tmp_path):
    return [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]


def test_live_values_are_in_the_metrics_of_every_step(tmp_path):
    groups = (Group("layers/0/*", lr_scale=0.1, name="body"), Group("*", name="head"))
    optimizer = optim.adamw(optim.cosine(0.1, 20, warmup=5), clip=0.5, groups=groups)
    go(tmp_path, optimizer=optimizer, norms=True)
    lines = records(tmp_path)
    assert len(lines) == 20
    for n, line in enumerate(lines):
        assert line["lr/head"] == pytest.approx(
            float(optim.cosine(0.1, 20, warmup=5)(n)), rel=1e-5
        )
        assert line["lr/body"] == pytest.approx(0.1 * line["lr/head"], rel=1e-5)
        assert line["clipped_norm"] == pytest.approx(
            min(line["grad_norm"], 0.5), rel=1e-5
        )
        for name in ("grad_norm", "update_norm", "param_norm"):
            assert line[name] == pytest.approx(
                np.hypot(line[f"{name}/body"], line[f"{name}/head"]), rel=1e-5
            )


def test_the_run_directory_may_be_a_string(tmp_path):
    go(str(tmp_path / "a"), steps=2)
    assert [record["step"] for record in records(tmp_path / "a")] == [1, 2]


def test_evaluation_uses_the_averaged_weights():
    optimizer = optim.adam(0.05, ema=0.9)
    result = go(optimizer=optimizer, eval_data=Batches(DATA, 16))
    average = optim.evaluation_params(result.state.opt_state, result.state.params)
    by_hand = (
        loss(
            result.spec.definition.merge(
                average, result.state.other, jax.random.key(0)
            ),
            DATA,
        )
        .summed()
        .value
    )
    assert result.eval_metrics["loss"] == pytest.approx(float(by_hand), rel=1e-5)
    other = go(optimizer=optim.adam(0.05))
    last = evaluate(make_eval_step(other.spec, loss, DATA), other.state, [DATA])
    assert abs(last["loss"] - result.eval_metrics["loss"]) > 1e-3


def poisoned(bad):
    """Return data whose batches 6 to 8 are bad; a batch has 16 examples, in order."""
    rows = {name: np.concatenate([value] * 5) for name, value in DATA.items()}
    rows["y"] = rows["y"].copy()
    rows["y"][5 * 16 : 8 * 16] = bad
    return lambda step: {
        name: value[step * 16 : step * 16 + 16] for name, value in rows.items()
    }


def test_skipped_updates_change_nothing_and_too_many_stop_the_run(tmp_path):
    run = Run(
        model=model,
        loss=loss,
        optimizer=optim.adam(optim.linear(0.01, 20)),
        data=poisoned(np.nan),
        steps=20,
        mesh="data=8",
        on_nonfinite="skip",
        out=tmp_path / "a",
    )
    result = fit(run, console=Console(file=io.StringIO()))
    lines = records(tmp_path / "a")
    assert [n for n, line in enumerate(lines) if line.get("skipped")] == [5, 6, 7]
    assert all(
        bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result.state.params)
    )
    # Three updates were skipped, so the schedule is at update 5.
    assert lines[8]["lr"] == pytest.approx(float(optim.linear(0.01, 20)(5)), rel=1e-5)

    strict = Run(**{**run.__dict__, "max_skips": 2, "out": tmp_path / "b"})
    with pytest.raises(
        NumericsError, match="step 8: 3 updates in succession were skipped"
    ):
        fit(strict, console=Console(file=io.StringIO()))


def test_spikes_are_skipped_and_logged(tmp_path):
    optimizer = optim.skip_spikes(optim.adam(0.01), factor=10.0, window=3)
    run = Run(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=poisoned(1e4),
        steps=20,
        mesh="data=8",
        out=tmp_path,
    )
    result = fit(run, console=Console(file=io.StringIO()))
    assert [n for n, line in enumerate(records(tmp_path)) if line.get("skipped")] == [
        5,
        6,
        7,
    ]
    assert int(result.state.opt_state.count) == 17


def test_changed_learning_rate_is_refused_unless_accepted(tmp_path):
    go(tmp_path, steps=10)
    # The run is complete, so this call trains nothing.
    before = jax.tree.map(np.asarray, go(tmp_path, steps=10).state.params)
    with pytest.raises(
        ConfigError,
        match=r"(?s)lr/of group 'all' at update 9 +3.661e-05 +0.0001981.* --accept lr",
    ):
        go(tmp_path, steps=20)
    with pytest.raises(ConfigError, match="group 'all'"):
        go(tmp_path, steps=20, optimizer=optim.adamw(1e-2, clip=1.0))
    result = go(tmp_path, steps=20, accept=("lr",))
    assert int(result.state.step) == 20
    assert not np.array_equal(
        before["layers"]["0"]["kernel"], result.state.params["layers"]["0"]["kernel"]
    )


def test_run_with_constant_rate_can_be_extended(tmp_path):
    go(tmp_path, steps=10, optimizer=optim.adam(1e-3))
    assert int(go(tmp_path, steps=15, optimizer=optim.adam(1e-3)).state.step) == 15


def test_optimizer_whose_state_changes_dtype_is_refused():
    def half(rngs):
        return nnx.Linear(4, 2, param_dtype=jnp.bfloat16, rngs=rngs)

    injected = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-3)
    run = Run(
        model=half,
        loss=loss,
        optimizer=injected,
        data=Batches(DATA, 16),
        steps=2,
        mesh="data=8",
    )
    with pytest.raises(ConfigError, match="bfloat16 becomes float32"):
        fit(run, console=Console(file=io.StringIO()))
    fixed = Run(**{**run.__dict__, "optimizer": optim.with_master(injected)})
    assert int(fit(fixed, console=Console(file=io.StringIO())).state.step) == 2


def test_signal_after_the_run_does_not_touch_the_closed_lock(tmp_path):
    """The number of its descriptor may belong to another file by then."""
    stop = Stop()
    run = Run(
        model=model,
        loss=loss,
        optimizer=optim.transformer(2),
        data=Batches(DATA, 16),
        steps=2,
        mesh="data=8",
        out=tmp_path / "run",
    )
    with Watch(current_group(), stop) as watch:
        fit(run, watch=watch, console=Console(file=io.StringIO()))
    assert stop.before_exit == []


@pytest.mark.parametrize("name", ["lr[1e-3]", "[lr=0.1] *?", "a[/b]", "größe\n$\\x$#%"])
def test_a_run_directory_may_have_any_name(tmp_path, name):
    out = tmp_path / name
    go(out, steps=10, optimizer=optax.sgd(0.1))
    resumed = go(out, steps=20, optimizer=optax.sgd(0.1))
    straight = go(tmp_path / "plain", steps=20, optimizer=optax.sgd(0.1))
    assert resumed.metrics["loss"] == straight.metrics["loss"]
    assert len(records(out)) == 20
    assert (out / "loss.png").is_file()


def test_a_run_continues_while_its_logs_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(failpoints, "_VISITS", {})
    monkeypatch.setenv("SHARDWISE_FAILPOINT", "log.write:2-12:enospc")
    output = io.StringIO()
    go(tmp_path, console=Console(file=output))
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 21))
    # One for each file.
    assert 1 <= output.getvalue().count("No space left on device") <= 3
    assert "could not be written to" not in output.getvalue()
    # The last lines are lost, and the state is not.
    monkeypatch.setattr(failpoints, "_VISITS", {})
    monkeypatch.setenv("SHARDWISE_FAILPOINT", "log.write:30-999:enospc")
    go(tmp_path / "end", steps=40, console=Console(file=output))
    lost = re.search(r"written to .*metrics.jsonl: (\d+)", output.getvalue())
    assert len(records(tmp_path / "end")) + int(lost[1]) == 40
    assert Checkpoints(tmp_path / "end" / "checkpoints").verify(40) == []


def test_values_of_other_kinds_in_the_log_do_not_stop_a_resumed_run(tmp_path):
    options = {
        "eval_data": Batches(DATA, 16),
        "eval_every": 5,
        "stop_when": EarlyStop(patience=9),
        "optimizer": optax.sgd(0.1),
    }
    go(tmp_path, steps=10, **options)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for value in ("[1, 2]", '"text"', "null", "{}", "true", "1" + "0" * 400):
            file.write(f'{{"step": 3, "loss": {value}, "eval_loss": {value}}}\n')
        file.write(f'{{"step": {10**400}, "loss": 1.0}}\n{{"step": true}}\n')
    result = go(tmp_path, steps=20, **options)
    assert result.metrics["step"] == 20
    assert report_main([str(tmp_path)], None)[1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 10**30},
        {"steps": -(10**30)},
        {"steps": 2**31},
        {"save_every": 10**30},
        {"save_minutes": float("nan")},
        {"seed": 10**30},
        {"accumulate": 10**30},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="it must be"):
        go(optimizer=optax.sgd(0.1), **options)


def test_an_empty_path_or_one_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a path is empty"):
        go("", optimizer=optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"a\\xff is not valid UTF-8"):
        go(os.fsdecode(b"a\xff"), optimizer=optax.sgd(0.1))
