"""The names of phases, with and without step numbers."""

import pytest

from shardwise.rundir.phases import Phase


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_found_from_its_text(phase):
    assert Phase.of(phase) is phase
    assert Phase.of(phase.at(17)) is phase
    assert Phase.of(phase.after(3)) is phase


def test_texts_of_old_versions_without_a_phase():
    assert Phase.of("a sample after step 5") is None
    assert Phase.of("") is None


def test_texts_that_run_directories_contain():
    """Old run directories must read the same: these strings are in `starting.jsonl`."""
    stored = {
        Phase.IMPORTING: "importing",
        Phase.PREPARING: "preparing",
        Phase.VERIFYING: "verifying the newest checkpoint",
        Phase.COMPILING: "compiling the step",
        Phase.LOADING: "loading the state",
        Phase.WAITING_TO_START: "waiting for all to be ready",
        Phase.EVALUATING: "evaluating",
        Phase.FIRST_STEP: "first step",
    }
    for phase, text in stored.items():
        assert phase == text
