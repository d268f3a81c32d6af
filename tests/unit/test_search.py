"""The search: every mesh is considered, few are compiled, the best is found, memory decides what else is tried."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shardwise.hardware import Chip
from shardwise.planning import Memory, Times, plan_run
from shardwise.search import Candidate, Search, find_meshes, search
from shardwise.target import find_target
from tests.unit.test_planning import make_run

CHIP = Chip("round", 2e10, 1e9, 1e10, link=1e9, network=1e8, group=8, products=1.0, copies=1.0)


def test_all_meshes_of_a_number_of_devices():
    assert find_meshes(4) == ["model=4", "fsdp=2,model=2", "fsdp=4", "data=2,model=2", "data=2,fsdp=2", "data=4"]
    assert find_meshes(1) == ["data=1"]
    assert len(find_meshes(16)) == 15
    for mesh in find_meshes(24):
        assert math.prod(int(part.split("=")[1]) for part in mesh.split(",")) == 24


@pytest.fixture(scope="module")
def everything():
    """Real compilations for eight virtual devices, on a chip of round numbers."""
    target = replace(find_target("cpu:8"), chip=CHIP, limit=1e9)
    return target, {mesh: plan_run(make(Candidate(mesh)), target) for mesh in find_meshes(8)}


def make(candidate):
    run = make_run(candidate.mesh, width=128, vocab_size=512, num_layers=1, num_heads=8)
    return replace(run, accumulate=candidate["accumulate"] or 1)


def test_the_best_of_all_meshes_is_found_with_few_compilations(everything):
    target, plans = everything
    compiled = []

    def compile_one(candidate, run):
        compiled.append(candidate.mesh)
        return plans[candidate.mesh]

    found = search(make, compile_one, target, find_meshes(8), {})
    times = {mesh: plan.times.total for mesh, plan in plans.items()}
    assert len(compiled) == len(set(compiled)) == found.num_compiled <= math.ceil(len(plans) / 3)
    assert times[found.best.candidate.mesh] <= 1.03 * min(times.values())
    assert {entry.candidate.mesh for entry in found.entries.values()} == set(plans)
    assert [e.status for e in found.ranking].count("compiled") == found.num_compiled


def test_what_does_not_fit_brings_on_what_saves_memory(everything):
    target, plans = everything
    plan = plans["data=8"]

    def compile_one(candidate, run):
        parts = candidate["accumulate"]
        return replace(
            plan, memory=Memory(temporaries=8e6 / parts), limit=3e6, fits=8e6 / parts <= 3e6, times=Times(parts, 1, 0, {}, "memory")
        )

    found = search(make, compile_one, target, ["data=8"], {"accumulate": [1, 2]}, budget=9)
    assert [e.status for e in found.ranking] == ["too large", "too large"]
    assert found.best is None
    found = search(
        lambda c: replace(make(c), data=make_run(rows=64).data), compile_one, target, ["data=8"], {"accumulate": [1, 2, 4, 8]}, budget=9
    )
    assert found.best.candidate["accumulate"] == 4
    assert {e.candidate["accumulate"]: e.status for e in found.entries.values()} == {1: "too large", 2: "too large", 4: "compiled"}


def test_what_cannot_work_is_not_compiled_and_says_why(everything):
    target, _ = everything

    def compile_one(candidate, run):
        raise AssertionError(f"{candidate} must not be compiled")

    found = search(make, compile_one, replace(target, limit=1e5), [*find_meshes(8), "expert=8"], {})
    whys = {e.candidate.mesh: (e.status, e.why) for e in found.entries.values()}
    assert whys["data=8"][0] == "pruned"
    assert "parameters and optimizer alone take" in whys["data=8"][1]
    assert whys["expert=8"][0] == "refused"
    assert found.best is None
    few = search(lambda c: replace(make(c), data=make_run(rows=4).data), compile_one, target, ["data=8"], {})
    assert "a batch of 4 rows cannot be split over 8 devices" in next(iter(few.entries.values())).why


def test_an_interruption_keeps_what_is_known(everything):
    target, plans = everything
    known = Search()

    def compile_one(candidate, run):
        if known.num_compiled == 2:
            raise KeyboardInterrupt
        return plans[candidate.mesh]

    with pytest.raises(KeyboardInterrupt):
        search(make, compile_one, target, find_meshes(8), {}, budget=9, found=known)
    assert known.num_compiled == 2
    assert known.best is not None
    assert np.isfinite(known.best.plan.times.total)


def test_a_candidate_is_known_by_its_options():
    one = Candidate("data=8").but("remat", "block").but("accumulate", 2)
    assert one == Candidate("data=8", (("accumulate", 2), ("remat", "block")))
    assert one["remat"] == "block"
    assert one["nothing"] is None
