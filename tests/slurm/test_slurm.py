"""The job script on a real Slurm: it runs, and restarts after a signal, a time limit or a loss."""

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
    """Return a job of a few seconds with a checkpoint every 5 steps."""
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
    """Return the steps in metrics.jsonl, in order."""
    path = folder / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    # The last line may be incomplete.
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if "grad_norm" in record]


def tasks_of(submitted):
    """Return the process id of each task, by the index of the task."""
    tasks = {}
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
            tasks.setdefault(int(environment["SLURM_PROCID"]), process)
    return tasks


def wait_for_step(submitted, step):
    submitted.wait_for(
        lambda: max(steps_of(submitted.folder), default=0) >= step, f"step {step}"
    )


def wait_for_restart(submitted, code):
    submitted.wait_for(
        lambda: "shardwise job: " in submitted.log, "the end of the first start"
    )
    assert f"(exit code {code}); resuming with start 2" in submitted.log


def check_done(submitted, starts):
    """Check that the job succeeded after `starts` starts, with every step logged once."""
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
def test_the_job_runs(slurm, tmp_path, processes):
    submitted = slurm.submit(jobfiles.slurm(job(processes=processes)), tmp_path)
    check_done(submitted, starts=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_job_resumes_after_a_signal(slurm, tmp_path, processes):
    submitted = slurm.submit(
        jobfiles.slurm(job("--pause", "0.3", processes=processes)), tmp_path
    )
    wait_for_step(submitted, 7)
    slurm.call("scancel", "--signal=TERM", submitted.number)
    wait_for_restart(submitted, 75)
    check_done(submitted, starts=2)


def test_the_job_saves_before_the_time_limit(slurm, tmp_path):
    # Slurm checks time limits every 30 s and signals up to 60 s early. With a limit of a minute the
    # signal comes in the first half of each start.
    text = jobfiles.slurm(job("--pause", "2.5"))
    submitted = slurm.submit(text, tmp_path, "--time=1", "--signal=TERM@10")
    wait_for_restart(submitted, 75)
    slurm.call("scontrol", "update", f"JobId={submitted.number}", "TimeLimit=10")
    check_done(submitted, starts=2)


def test_all_processes_restart_after_one_is_lost(slurm, tmp_path):
    submitted = slurm.submit(
        jobfiles.slurm(job("--pause", "0.3", processes=2)), tmp_path
    )
    wait_for_step(submitted, 7)
    os.kill(tasks_of(submitted)[1], signal.SIGKILL)
    wait_for_restart(submitted, 137)
    check_done(submitted, starts=2)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_invalid_argument_ends_the_job(slurm, tmp_path, processes):
    submitted = slurm.submit(
        jobfiles.slurm(job("--no-such-argument", "1", processes=processes)), tmp_path
    )
    assert submitted.end() == "FAILED"
    assert submitted.show("ExitCode") == "2:0"
    assert submitted.show("Restarts") == "0"
    assert "exit code 2 would occur again" in submitted.log


def test_restarts_are_limited(slurm, tmp_path):
    submitted = slurm.submit(
        jobfiles.slurm(job("--pause", "0.3", restarts=0)), tmp_path
    )
    wait_for_step(submitted, 7)
    slurm.call("scancel", "--signal=TERM", submitted.number)
    assert submitted.end() == "FAILED"
    assert submitted.show("ExitCode") == "75:0"
    assert "ending after 0 restarts. Submit it again to resume." in submitted.log


def test_a_cancelled_job_is_not_restarted(slurm, tmp_path):
    submitted = slurm.submit(jobfiles.slurm(job("--pause", "0.3")), tmp_path)
    wait_for_step(submitted, 7)
    slurm.call("scancel", submitted.number)
    assert submitted.end() == "CANCELLED"
    assert submitted.show("Restarts") == "0"
    assert "shardwise job:" not in submitted.log
