"""The search considers every mesh, compiles few, and finds the best one."""

import math
from dataclasses import replace
from typing import Literal

import jax
import numpy as np
import optax
import pytest

from shardwise import Run
from shardwise.cli.plan import BoundRecipe
from shardwise.errors import ConfigError
from shardwise.hardware import Chip
from shardwise.mesh import make_mesh, parse_sizes
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.plan.compile import plan_run
from shardwise.plan.plan import Memory, Times, Traffic
from shardwise.plan.search import (
    Candidate,
    Search,
    _Predictor,
    find_meshes,
    search,
    searched_axes,
)
from shardwise.plan.target import find_target
from shardwise.run import describe_state
from shardwise.sharding import num_batch_shards
from tests.helpers.runs import make_run

CHIP = Chip(
    "round", 2e10, 1e9, 1e10, link=1e9, network=1e8, group=8, products=1.0, copies=1.0
)


def test_find_meshes_returns_all_meshes_of_a_number_of_devices():
    assert find_meshes(4) == [
        "model=4",
        "fsdp=2,model=2",
        "fsdp=4",
        "data=2,model=2",
        "data=2,fsdp=2",
        "data=4",
    ]
    assert find_meshes(1) == ["data=1"]
    assert len(find_meshes(16)) == 15
    for mesh in find_meshes(24):
        assert math.prod(int(part.split("=")[1]) for part in mesh.split(",")) == 24


def test_other_axes_are_tried_where_they_can_help():
    def searched(batch, devices=8, **config):
        sizes = LlamaConfig(64, 4, 4, 4, 32, 64, **config)
        mesh = make_mesh("data=1", jax.devices()[:1])
        run = replace(make_run(), model=lambda rngs: Llama(sizes, rngs), mesh=mesh)
        model = describe_state(run).definition
        return searched_axes({"inputs": batch}, model, devices)

    long = np.zeros((4, 8192), np.int32)
    assert searched(long) == ["data", "fsdp", "context", "model"]
    for other in (long[:, :4096], long.astype("float32"), long[0], long[:, :, None]):
        assert searched(other) == ["data", "fsdp", "model"]
    short = long[:, :16]
    experts = searched(short, num_experts=4, top_k=2)
    assert experts == ["data", "fsdp", "expert", "model"]
    assert searched(short, devices=32) == ["stage", "data", "fsdp", "model"]
    unrolled = searched(short, devices=32, scan_layers=False)
    assert unrolled == ["data", "fsdp", "model"]


def test_context_axes_are_refused_once_one_is_idle(one):
    target, plan = one
    compiled = []

    def compile_one(candidate, run):
        compiled.append(candidate.mesh)
        mesh = parse_sizes(candidate.mesh)
        repeats = mesh.get("context", 1)
        flops = repeats * plan.step_flops / 8
        return replace(plan, mesh=mesh, flops=flops)

    meshes = ["data=4,context=2", "data=2,context=4", "context=8", "data=8"]
    found = search(make, compile_one, target, meshes, {}, budget=9)
    entries = {e.candidate.mesh: e for e in found.entries.values()}
    assert found.best.candidate.mesh == "data=8"
    assert len([mesh for mesh in compiled if "context" in mesh]) == 1
    for mesh in meshes[:3]:
        assert entries[mesh].status == "refused"
        assert "repeat each other's work" in entries[mesh].why


def test_a_context_axis_that_does_not_divide_the_tokens_is_refused(one):
    target, plan = one

    def make_short(candidate):
        run = make(candidate)
        return replace(run, data=lambda n: {"inputs": np.zeros((8, 30), np.int32)})

    found = search(
        make_short, lambda *args: plan, target, ["data=2,context=4"], {}, budget=9
    )
    (entry,) = found.entries.values()
    assert "30 tokens" in entry.why


def test_an_expectation_counts_the_tokens_of_a_device(one):
    """Half of the tokens of twice as many examples need the same memory."""
    target, plan = one
    meshes = ["data=8", "data=4,context=2", "data=2,context=4", "data=4,model=2"]
    traffic = [
        Traffic("all-to-all", "context", "links", 1, 1e6, 1e-3, 1e-3),
        Traffic("all-reduce", "data*context", "links", 1, 1e6, 1e-3, 1e-3),
    ]
    predictor = _Predictor(target)
    for mesh in meshes:
        candidate = Candidate(mesh)
        run = make(candidate)
        spec = describe_state(replace(run, mesh=make_mesh(mesh)))
        predictor.add(candidate, run, spec, 16 / num_batch_shards(spec.mesh, run.rules))
    sizes = [predictor.sizes[Candidate(mesh)] for mesh in meshes]
    assert [size.examples for size in sizes] == [2, 2, 2, 4]
    assert [size.num_tensor for size in sizes] == [1, 1, 1, 2]
    predictor.learn(Candidate(meshes[1]), replace(plan, traffic=traffic))
    assert predictor.context_bytes == 1e6 / 2
    assert predictor.tensor_bytes == 0


@pytest.fixture(scope="module")
def everything():
    """Return real plans for eight virtual devices, on a chip with round numbers."""
    target = replace(find_target("cpu:8"), chip=CHIP, limit=1e9)
    return target, {
        mesh: plan_run(make(Candidate(mesh)), target) for mesh in find_meshes(8)
    }


@pytest.fixture(scope="module")
def one():
    target = replace(find_target("cpu:8"), chip=CHIP, limit=1e9)
    return target, plan_run(make(Candidate("data=8")), target)


def make(candidate):
    run = make_run(candidate.mesh, width=128, vocab_size=512, num_layers=1, num_heads=8)
    return replace(run, accumulate=candidate["accumulate"] or 1)


@pytest.mark.slow
def test_the_best_mesh_is_found_with_few_compilations(everything):
    target, plans = everything
    compiled = []

    def compile_one(candidate, run):
        compiled.append(candidate.mesh)
        return plans[candidate.mesh]

    found = search(make, compile_one, target, find_meshes(8), {})
    times = {mesh: plan.times.total for mesh, plan in plans.items()}
    assert (
        len(compiled)
        == len(set(compiled))
        == found.num_compiled
        <= math.ceil(len(plans) / 3)
    )
    assert times[found.best.candidate.mesh] <= 1.03 * min(times.values())
    assert {entry.candidate.mesh for entry in found.entries.values()} == set(plans)
    assert [e.status for e in found.ranking].count("compiled") == found.num_compiled


def test_accumulation_is_tried_where_a_candidate_does_not_fit(one):
    target, plan = one

    def compile_one(candidate, run):
        parts = candidate["accumulate"]
        return replace(
            plan,
            memory=Memory(temporaries=8e6 / parts),
            limit=3e6,
            fits=8e6 / parts <= 3e6,
            times=Times(parts, 1, 0, {}, "memory"),
        )

    found = search(
        make, compile_one, target, ["data=8"], {"accumulate": [1, 2]}, budget=9
    )
    assert [e.status for e in found.ranking] == ["too large", "too large"]
    assert found.best is None
    found = search(
        lambda c: replace(make(c), data=make_run(rows=64).data),
        compile_one,
        target,
        ["data=8"],
        {"accumulate": [1, 2, 4, 8]},
        budget=9,
    )
    assert found.best.candidate["accumulate"] == 4
    assert {e.candidate["accumulate"]: e.status for e in found.entries.values()} == {
        1: "too large",
        2: "too large",
        4: "compiled",
    }


def test_impossible_candidates_are_not_compiled_and_have_a_reason(one):
    target, _ = one

    def compile_one(candidate, run):
        raise AssertionError(f"{candidate} must not be compiled")

    found = search(
        make, compile_one, replace(target, limit=1e5), [*find_meshes(8), "other=8"], {}
    )
    whys = {e.candidate.mesh: (e.status, e.why) for e in found.entries.values()}
    assert whys["data=8"][0] == "pruned"
    assert "parameters and optimizer alone need" in whys["data=8"][1]
    assert whys["other=8"][0] == "refused"
    assert found.best is None
    few = search(
        lambda c: replace(make(c), data=make_run(rows=4).data),
        compile_one,
        target,
        ["data=8"],
        {},
    )
    (entry,) = few.entries.values()
    assert "a batch of 4 examples cannot be sharded over 8 devices" in entry.why


def test_an_interruption_keeps_the_results_so_far(one):
    target, plan = one
    known = Search()

    def compile_one(candidate, run):
        if known.num_compiled == 2:
            raise KeyboardInterrupt
        return plan

    with pytest.raises(KeyboardInterrupt):
        search(make, compile_one, target, find_meshes(8), {}, budget=9, result=known)
    assert known.num_compiled == 2
    assert known.best is not None
    assert np.isfinite(known.best.plan.times.total)


def test_candidates_with_the_same_options_are_equal():
    one = Candidate("data=8").with_option("remat", "block").with_option("accumulate", 2)
    assert one == Candidate("data=8", (("accumulate", 2), ("remat", "block")))
    assert one["remat"] == "block"
    assert one["nothing"] is None


def test_impossible_options_are_refused_and_the_others_are_tried(one):
    target, plan = one

    def picky(candidate):
        if candidate["remat"] == "dots":
            raise ConfigError("this recipe has no dots")
        return make(candidate)

    found = search(
        picky,
        lambda candidate, run: plan,
        target,
        ["data=8"],
        {"remat": ["none", "dots", "block"]},
        budget=9,
    )
    assert {e.candidate["remat"]: e.status for e in found.entries.values()} == {
        "none": "compiled",
        "dots": "refused",
        "block": "compiled",
    }


def test_the_search_exceeds_its_default_budget_until_something_fits(one):
    target, plan = one

    def compile_one(candidate, run):
        fits = candidate["accumulate"] == 8
        return replace(
            plan, fits=fits, memory=Memory(temporaries=2e9 if not fits else 1e6)
        )

    parts = {"accumulate": [1, 2, 4, 8]}
    many = lambda c: replace(make(c), data=make_run(rows=64).data)  # noqa: E731
    found = search(many, compile_one, replace(target, limit=4e9), ["data=8"], parts)
    assert found.best.candidate["accumulate"] == 8
    assert (
        search(
            many, compile_one, replace(target, limit=4e9), ["data=8"], parts, budget=1
        ).best
        is None
    )


def test_a_batch_that_is_not_divisible_is_padded_as_in_a_run(one):
    target, plan = one
    odd = lambda c: replace(make(c), data=make_run(rows=12).data)  # noqa: E731
    found = search(odd, lambda candidate, run: plan, target, ["data=8"], {})
    assert found.best.candidate.mesh == "data=8"


def test_an_optimizer_that_does_not_match_the_model_is_refused(one):
    target, _ = one
    wrong = optax.masked(optax.adam(1e-3), {"nothing": True})
    found = search(
        lambda c: replace(make(c), optimizer=wrong),
        lambda *_: None,
        target,
        ["data=8"],
        {},
    )
    assert "the optimizer cannot be applied" in next(iter(found.entries.values())).why


def recipe(
    mesh: str = "data=-1", remat: Literal["none", "block"] = "none", width: int = 64
) -> Run:
    return make_run(mesh)


def test_the_command_is_that_of_the_chosen_candidate():
    cpu, chosen = (
        find_target("cpu:8"),
        Candidate("data=4,model=2", (("accumulate", 2), ("remat", "block"))),
    )
    words = ["--mesh=data=8", "--remat", "none", "--width", "5"]
    given = BoundRecipe(
        "r.py", recipe, {"mesh": "data=8", "remat": "none", "width": 5}, words
    )
    expected = (
        "shardwise train r.py --width 5 --mesh data=4,model=2 --remat block --cpu-devices 8"
        "   # with Run(accumulate=2) in the recipe"
    )
    assert given.command("train", chosen, cpu) == expected
    assert given.command(
        "train", Candidate("data=8", (("remat", "none"),)), cpu
    ).startswith("shardwise train r.py --mesh=data=8 --remat none")
    assert given.choices("remat") == ["none", "block"]
    assert given.run(chosen).accumulate == 2
