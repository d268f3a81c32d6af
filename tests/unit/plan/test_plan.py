"""Plans: what the compiler says, by kind; too large is an answer; what was planned is what runs."""

import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Batches, Mean, Run, fit, init_state, make_mesh
from shardwise.errors import ConfigError
from shardwise.hardware import Chip
from shardwise.kernels.cross_entropy import chunked_cross_entropy
from shardwise.models.gpt import GPT, PRESETS
from shardwise.plan.compile import check_fits, compile_run, plan_run
from shardwise.plan.target import find_target
from shardwise.run import prepare
from tests.helpers.runs import loss, make_run

CHIP = Chip("round", 1e12, 1e9, 1e11, link=1e10, network=1e9, group=8)


def tiny_run(data=None):
    """Compiles in a moment."""

    def squares(model, batch):
        return Mean(((model(batch["x"]) - 1) ** 2).reshape(len(batch["x"]), -1).mean(-1))

    data = (
        Batches({"x": np.random.default_rng(0).normal(size=(64, 8)).astype("f4")}, 16)
        if data is None
        else data
    )
    model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)  # noqa: E731
    return Run(
        model=model, loss=squares, optimizer=optax.adam(1e-3), data=data, steps=3, mesh="data=8"
    )


@pytest.fixture(scope="module")
def plan():
    return plan_run(make_run("data=2,fsdp=2,model=2"), find_target("cpu:8"))


def test_memory_by_kind_is_that_of_the_abstract_state_and_of_the_compiler(plan):
    prepared = prepare(replace(make_run(), mesh=make_mesh("data=2,fsdp=2,model=2")))
    spec = prepared.spec
    assert plan.memory.parameters == sum(p.bytes_per_device for p in spec.params.values())
    assert plan.memory.optimizer == sum(p.bytes_per_device for p in spec.opt_state.values())
    assert (
        plan.memory.batch == 2 * 4 * 32 * 4
    )  # inputs and labels, 16 rows over data x fsdp = 4, 32 tokens of int32
    m = prepared.step.lower().compile().memory_analysis()
    said = (
        m.argument_size_in_bytes
        + m.temp_size_in_bytes
        + m.output_size_in_bytes
        - m.alias_size_in_bytes
    )
    assert plan.memory.peak == pytest.approx(said, rel=0.05)


def test_arithmetic_is_that_of_the_model_shared_among_the_devices(plan):
    # On CPUs attention leaves out keys that no query of a part sees.
    assert plan.flops * 8 == pytest.approx(plan.model_flops, rel=0.03)
    assert plan.items == 16 * 32


@pytest.mark.parametrize(
    "changes", [{"scan_layers": True}, {"scan_layers": True, "remat": "block"}]
)
def test_scanned_layers_count_as_often_as_they_run_and_recomputed_ones_twice(plan, changes):
    changed = plan_run(make_run("data=2,fsdp=2,model=2", **changes), find_target("cpu:8"))
    assert changed.model_flops == plan.model_flops
    more = changed.flops / plan.flops
    assert more == pytest.approx(1.0, rel=0.02) if "remat" not in changes else 1.1 < more < 4 / 3


@pytest.mark.slow
def test_accumulation_moves_gradients_once_and_parameters_in_every_part():
    one = plan_run(make_run("data=4,fsdp=2"), find_target("cpu:8"))
    four = plan_run(replace(make_run("data=4,fsdp=2", rows=64), accumulate=4), find_target("cpu:8"))
    assert four.flops == pytest.approx(4 * one.flops, rel=0.02)
    assert four.memory.temporaries < 2.5 * one.memory.temporaries  # and not four times


def test_what_cannot_fit_is_said_with_the_largest_buffers(plan):
    small = replace(find_target("cpu:8"), limit=1e6)
    found = plan_run(make_run("data=8", num_layers=1), small)
    assert not found.fits
    assert found.buffers
    assert found.buffers == sorted(found.buffers, key=lambda b: -b.bytes)
    assert sum(b.bytes for b in found.buffers) <= found.memory.temporaries
    assert any("jit(step)" in b.name for b in found.buffers)
    with pytest.raises(ConfigError, match=r"needs .* per device .*parameters.*optimizer"):
        check_fits(found)


def test_a_plan_is_kept_and_found_again(tmp_path, monkeypatch):
    target = replace(find_target("cpu:8"), chip=CHIP)
    first = plan_run(tiny_run(), target, {"remat": "none"}, tmp_path)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr("shardwise.plan.compile.compile_and_read", None)  # must not be needed
    again = plan_run(tiny_run(), target, {"remat": "none"}, tmp_path)
    assert again == first
    assert json.loads(json.dumps(again.as_json()))["seconds"] == first.times.total
    monkeypatch.undo()
    file.write_text('{"target": 1}')
    assert plan_run(tiny_run(), target, {"remat": "none"}, tmp_path).memory == first.memory
    plan_run(replace(tiny_run(), unit="rows"), target, {}, tmp_path)
    plan_run(
        tiny_run(), replace(target, chip=replace(CHIP, flops=2e12), name="other"), {}, tmp_path
    )
    assert len(list(tmp_path.iterdir())) == 3


def narrow_gpt_run():
    return replace(make_run(num_layers=1), mesh=make_mesh("data=4,model=2"))


@pytest.mark.parametrize(
    "make", [tiny_run, pytest.param(narrow_gpt_run, marks=pytest.mark.slow)], ids=["tiny", "gpt"]
)
def test_the_step_that_was_planned_is_the_step_that_runs(make):
    run = make()
    plain = prepare(run)
    plan, planned = compile_run(run, prepare(run))
    assert plan.fits
    states = []
    for prepared in (plain, planned):
        state = init_state(prepared.spec, 0)
        for n in range(2):
            state, metrics = prepared.step(state, prepared.step.place(prepared.batches(n)))
        states.append((state.params, metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_fit_refuses_what_cannot_fit_before_anything_is_allocated(monkeypatch, tmp_path):
    from shardwise.plan import compile as planning

    monkeypatch.setattr(planning, "local_target", lambda: replace(find_target("cpu:8"), limit=100))
    run = replace(tiny_run(), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="--no-plan skips this check"):
        fit(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert fit(run, plan=False).metrics["step"] == 3


def test_the_report_of_a_run_sets_plan_and_measurement_side_by_side(tmp_path):
    fit(replace(tiny_run(), out=tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert found["plan"]["peak"] > 0
    assert found["measured"]["seconds"] > 0


@pytest.mark.slow
def test_the_loss_in_chunks_needs_less_memory():
    def chunked(model, batch):
        labels = batch["labels"]
        return Mean(
            chunked_cross_entropy(*model.features(batch["inputs"]), labels.reshape(-1), 8),
            labels.size,
        )

    config = replace(PRESETS["byte"], max_length=32, width=32, vocab_size=8192, num_layers=1)
    whole = replace(make_run("data=8", rows=64), model=lambda rngs: GPT(config, rngs))
    peaks = [
        plan_run(replace(whole, loss=f), find_target("cpu:8")).memory.temporaries
        for f in (loss, chunked)
    ]
    assert peaks[1] < 0.5 * peaks[0]


def test_a_program_from_jaxs_own_cache_is_compiled_again_to_be_read(tmp_path):
    """A program that comes from JAX's persistent cache comes without its list of buffers."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
            jax.config.update(name, value)
        plans = [plan_run(tiny_run(), "cpu:8") for _ in range(2)]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert plans[0].memory == plans[1].memory
    assert plans[1].memory.parameters > 0


def test_an_answer_that_cannot_be_kept_is_still_an_answer(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert plan_run(tiny_run(), "cpu:8", cache=tmp_path / "file").fits


def test_batches_whose_length_changes_are_trained_on_as_without_a_plan():
    x = np.random.default_rng(0).normal(size=(16, 7, 8)).astype("f4")
    run = tiny_run(lambda n: {"x": x[:, : (5, 7, 5)[n]]})
    assert fit(run).metrics["loss"] == fit(run, plan=False).metrics["loss"]


def test_what_a_tpu_compiler_refuses_as_too_large_is_refused_with_numbers(monkeypatch):
    from shardwise.plan import compile as planning

    target = find_target("v5e:1x1")
    monkeypatch.setattr(planning, "local_target", lambda: target)
    config = replace(PRESETS["byte"], max_length=32, vocab_size=8192, width=32768, num_layers=1)
    run = replace(
        make_run(), model=lambda rngs: GPT(config, rngs), mesh=make_mesh("data=1", target.devices)
    )
    plan, _ = compile_run(run, prepare(run))
    assert plan.memory.peak > target.limit
    with pytest.raises(ConfigError, match="TPU v5e"):
        check_fits(plan)


class Bigrams(nnx.Module):
    def __init__(self, rngs):
        self.logits = nnx.Embed(64, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.logits(tokens)


def test_a_plan_counts_what_the_loss_counts():
    tokens = np.zeros((16, 33), "i4")

    def data(n):
        return {"a": np.ones(16, "f4"), "inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

    run = replace(make_run(), model=Bigrams, data=data)
    assert plan_run(run, "cpu:8").items == 16 * 32
    assert plan_run(replace(run, unit="bytes"), "cpu:8").items == 16 * 32  # a unit is only a name
    by_row = replace(run, loss=lambda model, batch: model(batch["inputs"]).mean(), unit="rows")
    assert plan_run(by_row, "cpu:8").items == 16
    masked = replace(
        run,
        loss=lambda model, batch: Mean(model(batch["inputs"]).sum(), (batch["labels"] > 0).sum()),
    )
    assert plan_run(replace(masked, unit="tokens"), "cpu:8").items == 16 * 32
