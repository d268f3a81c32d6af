"""Plans: figures of the compiler by kind, steps that do not fit, the cache, and the JSON schema."""

import json
import math
import re
import subprocess
import sys
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
from shardwise.plan.plan import Plan
from shardwise.plan.target import find_target
from shardwise.run import prepare
from tests.helpers.runs import loss, make_run

CHIP = Chip("round", 1e12, 1e9, 1e11, link=1e10, network=1e9, group=8)


def tiny_run(data=None):
    """Return a run that compiles in a moment."""

    def squares(model, batch):
        return Mean(
            ((model(batch["x"]) - 1) ** 2).reshape(len(batch["x"]), -1).mean(-1)
        )

    if data is None:
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("f4")
        data = Batches({"x": x}, 16)
    return Run(
        model=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        loss=squares,
        optimizer=optax.adam(1e-3),
        data=data,
        steps=3,
        mesh="data=8",
    )


@pytest.fixture(scope="module")
def plan():
    return plan_run(make_run("data=2,fsdp=2,model=2"), find_target("cpu:8"))


@pytest.fixture(scope="module")
def tiny_plan():
    return plan_run(
        tiny_run(), replace(find_target("cpu:8"), chip=CHIP), {"remat": "none"}
    )


def test_memory_by_kind_matches_the_abstract_state_and_the_compiler(plan):
    prepared = prepare(replace(make_run(), mesh=make_mesh("data=2,fsdp=2,model=2")))
    spec = prepared.spec
    assert plan.memory.parameters == sum(
        p.bytes_per_device for p in spec.params.values()
    )
    assert plan.memory.optimizer == sum(
        p.bytes_per_device for p in spec.opt_state.values()
    )
    # Inputs and labels: 16 sequences over data x fsdp = 4 shards, 32 tokens of int32.
    assert plan.memory.batch == 2 * 4 * 32 * 4
    analysis = prepared.step.lower().compile().memory_analysis()
    peak = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    assert plan.memory.peak == pytest.approx(peak, rel=0.05)


def test_flops_are_those_of_the_model_divided_by_the_devices(plan):
    # On CPUs attention skips keys that no query of a block sees.
    assert plan.flops * 8 == pytest.approx(plan.model_flops, rel=0.03)
    assert plan.items == 16 * 32


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"scan_layers": True}, 0.98, 1.02),
        pytest.param(
            {"scan_layers": True, "remat": "block"},
            1.1,
            4 / 3,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["scanned", "recomputed"],
)
def test_scanned_layers_count_for_each_layer_and_recomputed_ones_twice(
    plan, changes, least, most
):
    changed = plan_run(
        make_run("data=2,fsdp=2,model=2", **changes), find_target("cpu:8")
    )
    assert changed.model_flops == plan.model_flops
    assert least < changed.flops / plan.flops < most


def bytes_of(plan, kind):
    return sum(traffic.bytes for traffic in plan.traffic if traffic.kind == kind)


@pytest.mark.slow
def test_accumulation_reduces_gradients_in_every_micro_batch_and_saves_memory():
    one = plan_run(make_run("data=4,fsdp=2"), find_target("cpu:8"))
    run = replace(make_run("data=4,fsdp=2", rows=64), accumulate=4)
    four = plan_run(run, find_target("cpu:8"))
    assert four.flops == pytest.approx(4 * one.flops, rel=0.02)
    # XLA reduces the gradients inside the loop, but moves the gathering of parameters out of it.
    assert bytes_of(one, "all-reduce") >= 4 * one.num_params
    assert bytes_of(four, "all-reduce") == pytest.approx(
        4 * bytes_of(one, "all-reduce"), rel=0.01
    )
    assert bytes_of(one, "all-gather") <= bytes_of(four, "all-gather")
    assert bytes_of(four, "all-gather") < 2 * bytes_of(one, "all-gather")
    # Four times as many examples at once would need four times as much.
    assert four.memory.temporaries < 2.5 * one.memory.temporaries
    assert four.memory.state == one.memory.state
    assert four.memory.batch == 4 * one.memory.batch


def test_a_step_that_does_not_fit_lists_the_largest_buffers():
    small = replace(find_target("cpu:8"), limit=1e6)
    large = plan_run(make_run("data=8", num_layers=1), small)
    assert not large.fits
    assert large.memory.peak > large.limit == 1e6
    assert len(large.buffers) == 12
    sizes = [buffer.bytes for buffer in large.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= large.memory.temporaries
    for buffer in large.buffers:
        dims = re.fullmatch(r"f32\[([\d,]+)\]", buffer.shape)[1].split(",")
        assert buffer.bytes == 4 * math.prod(map(int, dims))
    # The gradients of both kernels of the MLP are among them.
    assert {"f32[64,256]", "f32[256,64]"} <= {buffer.shape for buffer in large.buffers}
    assert any("jit(step)" in buffer.name for buffer in large.buffers)
    with pytest.raises(
        ConfigError, match=r"needs .* per device .*parameters.*optimizer"
    ):
        check_fits(large)


def test_a_cached_plan_is_used_again_and_a_damaged_one_is_replaced(
    tmp_path, monkeypatch
):
    target = replace(find_target("cpu:8"), chip=CHIP)
    first = plan_run(tiny_run(), target, {"remat": "none"}, tmp_path)
    (file,) = tmp_path.iterdir()
    stored = file.read_text()
    # It must not be needed.
    monkeypatch.setattr("shardwise.plan.compile.compile_and_read", None)
    assert plan_run(tiny_run(), target, {"remat": "none"}, tmp_path) == first
    # Options only describe the candidate, so they are not part of the key.
    other = plan_run(tiny_run(), target, {"remat": "block"}, tmp_path)
    assert other == replace(first, options={"accumulate": 1, "remat": "block"})
    monkeypatch.undo()
    for damaged in ('{"target": 1}', "", "[]", stored[: len(stored) // 2]):
        file.write_text(damaged)
        again = plan_run(tiny_run(), target, {"remat": "none"}, tmp_path)
        assert (again.memory, again.times) == (first.memory, first.times)
        assert Plan.from_json(json.loads(file.read_text())) == again


@pytest.mark.parametrize(
    "change",
    [
        lambda run, target: (replace(run, unit="rows"), target),
        lambda run, target: (run, replace(target, name="other")),
        lambda run, target: (run, replace(target, limit=1e8)),
        lambda run, target: (replace(run, optimizer=optax.sgd(1e-3)), target),
        lambda run, target: (replace(run, mesh="fsdp=8"), target),
    ],
    ids=["unit", "target", "limit", "optimizer", "mesh"],
)
def test_everything_that_a_plan_depends_on_is_part_of_its_key(change, tmp_path):
    target = find_target("cpu:8")
    plan_run(tiny_run(), target, cache=tmp_path)
    plan_run(*change(tiny_run(), target), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_the_compiler_are_part_of_the_key(variable, tmp_path, monkeypatch):
    plan_run(tiny_run(), "cpu:8", cache=tmp_path)
    monkeypatch.setenv(variable, "--something=1")
    plan_run(tiny_run(), "cpu:8", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_plan_survives_json(tiny_plan):
    written = json.loads(json.dumps(tiny_plan.as_json()))
    assert Plan.from_json(written) == tiny_plan
    assert written["seconds"] == tiny_plan.times.total
    assert written["num_devices"] == 8
    unknown = replace(tiny_plan, times=None, peak_flops=None, limit=math.inf)
    assert Plan.from_json(json.loads(json.dumps(unknown.as_json()))) == unknown
    for name in ("unknown_kernels", "compile_seconds", "compile_memory"):
        del written[name]
    assert Plan.from_json(written).compile_seconds == 0.0


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["chip"], 1, "plan.chip"),
        (["fits"], 1, "plan.fits"),
        (["items"], 1.5, "plan.items"),
        (["items"], True, "plan.items"),
        (["items"], 2**53, "plan.items"),
        (["num_params"], -1, "plan.num_params"),
        (["flops"], "1", "plan.flops"),
        (["flops"], math.nan, "plan.flops"),
        (["peak_flops"], -1.0, "plan.peak_flops"),
        (["memory"], [], "plan.memory"),
        (["memory", "batch"], None, "plan.memory.batch"),
        (["times", "total"], 0.0, "plan.times.total"),
        (["times", "network"], {"data": "x"}, "plan.times.network.data"),
        (["traffic", 0, "count"], "many", r"plan.traffic\[0\].count"),
        (["leaves", 0, "shape"], "8x8", r"plan.leaves\[0\].shape"),
        (["leaves", 0, "axes"], [[], [], []], "plan.leaves"),
        (["options", "remat"], {}, "plan.options.remat"),
        (["mesh"], {}, "plan.mesh"),
        (["mesh"], {"data": 0}, "plan.mesh"),
        (["num_devices"], 9, "plan.num_devices"),
        (["peak"], "<b>", "plan.peak"),
    ],
)
def test_a_damaged_field_is_named(tiny_plan, path, value, field):
    written = json.loads(json.dumps(tiny_plan.as_json()))
    owner = written
    for part in path[:-1]:
        owner = owner[part]
    owner[path[-1]] = value
    with pytest.raises(ValueError, match=f"^{field}"):
        Plan.from_json(written)


@pytest.mark.parametrize("name", ["target", "memory", "leaves", "times"])
def test_a_missing_field_is_named(tiny_plan, name):
    written = tiny_plan.as_json()
    del written[name]
    with pytest.raises(ValueError, match=rf"plan\.{name}: missing"):
        Plan.from_json(written)


@pytest.mark.parametrize("value", [None, [], "plan", 1])
def test_a_plan_that_is_not_an_object_is_an_error(value):
    with pytest.raises(ValueError, match=r"plan: .* is not an object"):
        Plan.from_json(value)


def test_long_texts_are_cut_off(tiny_plan):
    written = {**tiny_plan.as_json(), "chip": "x" * 5000}
    assert Plan.from_json(written).chip == "x" * 2000


def test_plans_are_read_without_jax():
    code = "import sys, shardwise.plan.plan; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def narrow_gpt_run():
    return replace(make_run(num_layers=1), mesh=make_mesh("data=4,model=2"))


@pytest.mark.parametrize(
    "make",
    [tiny_run, pytest.param(narrow_gpt_run, marks=pytest.mark.slow)],
    ids=["tiny", "gpt"],
)
def test_the_step_that_was_planned_is_the_step_that_runs(make):
    run = make()
    plain = prepare(run)
    plan, planned = compile_run(run, prepare(run))
    assert plan.fits
    assert plan.memory.parameters == sum(
        placement.bytes_per_device for placement in plain.spec.params.values()
    )
    states = []
    for prepared in (plain, planned):
        state = init_state(prepared.spec, 0)
        for n in range(2):
            state, metrics = prepared.step(
                state, prepared.step.place(prepared.batches(n))
            )
        states.append((state.params, metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_fit_refuses_a_step_that_does_not_fit_before_it_allocates(
    monkeypatch, tmp_path
):
    from shardwise.plan import compile as planning

    monkeypatch.setattr(
        planning, "local_target", lambda: replace(find_target("cpu:8"), limit=100)
    )
    run = replace(tiny_run(), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="--no-plan skips this check"):
        fit(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert fit(run, plan=False).metrics["step"] == 3


def test_a_run_records_its_plan_and_what_was_measured(tmp_path):
    fit(replace(tiny_run(), out=tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "plan.json").read_text())
    plan = Plan.from_json(record["plan"])
    # A kernel of 8 x 8 and a bias of 8 in float32, replicated. Adam has two moments and a count.
    assert plan.memory.parameters == 72 * 4
    assert plan.memory.optimizer == 2 * 72 * 4 + 4
    assert plan.memory.batch == 2 * 8 * 4
    assert plan.fits
    assert record["plan"]["peak"] == plan.memory.peak > 0
    assert record["measured"]["seconds"] > 0


@pytest.mark.slow
def test_the_loss_in_chunks_needs_less_memory():
    def chunked(model, batch):
        labels = batch["labels"]
        features = model.features(batch["inputs"])
        return Mean(chunked_cross_entropy(*features, labels, 8), labels.size)

    config = replace(
        PRESETS["byte"], max_length=32, width=32, vocab_size=8192, num_layers=1
    )
    run = replace(make_run("data=8", rows=64), model=lambda rngs: GPT(config, rngs))
    target = find_target("cpu:8")
    complete, in_chunks = (
        plan_run(replace(run, loss=f), target) for f in (loss, chunked)
    )
    assert in_chunks.memory.temporaries < 0.5 * complete.memory.temporaries


def test_a_step_in_jaxs_own_compilation_cache_is_compiled_again(tmp_path):
    """A program from JAX's persistent cache comes without a list of buffers."""
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


def test_a_plan_that_cannot_be_cached_is_still_a_plan(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert plan_run(tiny_run(), "cpu:8", cache=tmp_path / "file").fits


def test_batches_of_changing_length_train_as_without_a_plan():
    x = np.random.default_rng(0).normal(size=(16, 7, 8)).astype("f4")
    run = tiny_run(lambda n: {"x": x[:, : (5, 7, 5)[n]]})
    assert fit(run).metrics["loss"] == fit(run, plan=False).metrics["loss"]


def test_a_step_that_a_tpu_compiler_rejects_is_refused_with_numbers(monkeypatch):
    from shardwise.plan import compile as planning

    target = find_target("v5e:1x1")
    monkeypatch.setattr(planning, "local_target", lambda: target)
    config = replace(
        PRESETS["byte"], max_length=32, vocab_size=8192, width=32768, num_layers=1
    )
    mesh = make_mesh("data=1", target.devices)
    run = replace(make_run(), model=lambda rngs: GPT(config, rngs), mesh=mesh)
    plan, _ = compile_run(run, prepare(run))
    assert plan.memory.peak > target.limit
    with pytest.raises(ConfigError, match="TPU v5e"):
        check_fits(plan)


class Bigrams(nnx.Module):
    def __init__(self, rngs):
        self.logits = nnx.Embed(64, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.logits(tokens)


def test_a_plan_counts_the_items_of_the_loss():
    tokens = np.zeros((16, 33), "i4")

    def data(n):
        return {
            "a": np.ones(16, "f4"),
            "inputs": tokens[:, :-1],
            "labels": tokens[:, 1:],
        }

    def by_example(model, batch):
        return model(batch["inputs"]).mean()

    def masked(model, batch):
        return Mean(model(batch["inputs"]).sum(), (batch["labels"] > 0).sum())

    run = replace(make_run(), model=Bigrams, data=data)
    assert plan_run(run, "cpu:8").items == 16 * 32
    # A unit is only a name.
    assert plan_run(replace(run, unit="bytes"), "cpu:8").items == 16 * 32
    assert plan_run(replace(run, loss=by_example, unit="rows"), "cpu:8").items == 16
    assert plan_run(replace(run, loss=masked, unit="tokens"), "cpu:8").items == 16 * 32
    assert plan_run(replace(run, loss=masked, unit="images"), "cpu:8").items == 16
