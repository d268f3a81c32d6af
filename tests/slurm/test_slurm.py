"""The written script on a real Slurm: accepted, run, started again after a signal, a time limit or a loss, and not after a mistake."""

import json
import os
import signal
from pathlib import Path

import pytest

from shardwise.cluster import jobfiles

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[1] / "faults" / "recipe.py"
STEPS = 20


def job(*more, processes=1, **changes):
    """A run of some seconds, with a checkpoint at every fifth step."""
    mesh = ("--cpu-devices", "1", "--mesh", f"data={processes}")
    command = (
        "train",
        str(RECIPE),
        "--out",
        "run",
        *mesh,
        "--steps",
        str(STEPS),
        "--save-every",
        "5",
        *more,
    )
    return jobfiles.Job(command=command, processes=processes, name="tests", **changes)


def steps_of(folder):
    """The steps that the run has written down, in their order."""
    path = folder / "run" / "metrics.jsonl"
    entries = (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )
    return [entry["step"] for entry in entries if "grad_norm" in entry]


def tasks_of(submitted):
    """The process of each task, by its number."""
    found = {}
    for process in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
        try:
            text = Path(f"/proc/{process}/environ").read_text(errors="replace")
        except OSError:
            continue
        environment = dict(pair.partition("=")[::2] for pair in text.split("\0"))
        if (
            environment.get("SLURM_SUBMIT_DIR") == str(submitted.folder)
            and "SLURM_STEP_NODELIST" in environment
        ):
            found.setdefault(int(environment["SLURM_PROCID"]), process)
    return found


def wait_for_step(submitted, step):
    submitted.wait_for(lambda: max(steps_of(submitted.folder), default=0) >= step, f"step {step}")


def wait_for_restart(submitted, code):
    submitted.wait_for(lambda: "shardwise job: " in submitted.log, "the end of the first start")
    assert f"(exit code {code}); it goes on with start 2" in submitted.log


def check_done(submitted, starts):
    """It has ended well after so many starts, and no step is missing or written down twice."""
    assert submitted.end() == "COMPLETED", submitted.log
    assert submitted.show("Restarts") == str(starts - 1), submitted.log
    assert submitted.log.count("shardwise job: done") == 1
    assert steps_of(submitted.folder) == list(range(1, STEPS + 1))


def test_sbatch_accepts_the_script(slurm, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(jobfiles.slurm(job(processes=2, cpus=1)))
    assert "to start at" in slurm.call("sbatch", "--test-only", path)
    path.write_text(jobfiles.slurm(job(nodes=3, processes=3)))
    with pytest.raises(AssertionError, match="allocation failure"):
        slurm.call("sbatch", "--test-only", path)


@pytest.mark.parametrize("processes", [1, 2])
def test_it_runs(slurm, tmp_path, processes):
    submitted = slurm.submit(jobfiles.slurm(job(processes=processes)), tmp_path)
    check_done(submitted, starts=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_stops_it_and_it_goes_on(slurm, tmp_path, processes):
    submitted = slurm.submit(jobfiles.slurm(job("--pause", "0.3", processes=processes)), tmp_path)
    wait_for_step(submitted, 7)
    slurm.call("scancel", "--signal=TERM", submitted.number)
    wait_for_restart(submitted, 75)
    check_done(submitted, starts=2)


def test_the_time_limit_is_heard_before_it_comes(slurm, tmp_path):
    # Slurm looks at time limits every 30 s, and signals up to 60 s early: with a minute, some time in the first half of each start.
    text = jobfiles.slurm(job("--pause", "2.5"))
    submitted = slurm.submit(text, tmp_path, "--time=1", "--signal=TERM@10")
    wait_for_restart(submitted, 75)
    slurm.call("scontrol", "update", f"JobId={submitted.number}", "TimeLimit=10")
    check_done(submitted, starts=2)


def test_a_lost_process_ends_the_others_and_all_start_again(slurm, tmp_path):
    submitted = slurm.submit(jobfiles.slurm(job("--pause", "0.3", processes=2)), tmp_path)
    wait_for_step(submitted, 7)
    os.kill(tasks_of(submitted)[1], signal.SIGKILL)
    wait_for_restart(submitted, 137)
    check_done(submitted, starts=2)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_ends_it(slurm, tmp_path, processes):
    submitted = slurm.submit(
        jobfiles.slurm(job("--no-such-argument", "1", processes=processes)), tmp_path
    )
    assert submitted.end() == "FAILED"
    assert submitted.show("ExitCode") == "2:0"
    assert submitted.show("Restarts") == "0"
    assert "exit code 2 would come again" in submitted.log


def test_the_number_of_starts_has_an_end(slurm, tmp_path):
    submitted = slurm.submit(jobfiles.slurm(job("--pause", "0.3", restarts=0)), tmp_path)
    wait_for_step(submitted, 7)
    slurm.call("scancel", "--signal=TERM", submitted.number)
    assert submitted.end() == "FAILED"
    assert submitted.show("ExitCode") == "75:0"
    assert "Handed in again, it goes on" in submitted.log


def test_a_job_that_is_cancelled_stays_so(slurm, tmp_path):
    submitted = slurm.submit(jobfiles.slurm(job("--pause", "0.3")), tmp_path)
    wait_for_step(submitted, 7)
    slurm.call("scancel", submitted.number)
    assert submitted.end() == "CANCELLED"
    assert submitted.show("Restarts") == "0"
    assert "shardwise job:" not in submitted.log
