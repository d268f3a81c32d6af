"""Random cases train as a loop written by hand does. `make fuzz` runs many more of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cluster.launch import free_port
from tests.fuzz import run_case
from tests.fuzz.cases import Case, from_line

ROOT = Path(__file__).parents[2]
# Cases for two processes: each axis between the processes, data of each kind, padding, and a
# resume on another mesh.
PROCESS_CASES = (
    Case(mesh="data=8", loss="tokens", data="batches", batch_size=12, eval_examples=7),
    Case(
        mesh="fsdp=4,model=2",
        annotate="logical",
        blocks=("scan", "batchnorm"),
        optimizer="sw_adamw",
        drive="fit",
        resume_at=1,
        resume_mesh="data=8",
        eval_examples=11,
        metrics=("rows_weighted",),
    ),
    Case(mesh="model=2,data=4", annotate="mesh", stem="tokens", accumulate=2),
)


def environment() -> dict[str, str]:
    """Return the environment for a process with its own JAX."""
    names = ("JAX_", "XLA_", "PJRT_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    return {**kept, "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_random_cases_train_as_a_loop_by_hand(tmp_path):
    # In its own process, because compiler options for fast compilation belong to the process.
    # Cases that once differed come first.
    words = ["--first", str(Path(__file__).with_name("differed.txt"))]
    words += ["--seconds", "15", "--seed", "0", "--out", str(tmp_path / "cases.jsonl")]
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "cases.jsonl").read_text().splitlines()
    compared = [line for line in lines if json.loads(line)["status"] == "same"]
    # Refusals show nothing.
    assert len(compared) >= len(lines) / 4 > 0, result.stdout


def test_a_wrong_loss_is_found(monkeypatch):
    case = Case(loss="rows", mesh="data=2", batch_size=4, steps=2)
    assert run_case.run_case(case).status == "same"
    make_loss = run_case.make_loss

    def wrong(case):
        def loss(model, batch):
            value = make_loss(case)(model, batch)
            return type(value)(1.0001 * value.total, value.weight)

        return loss

    monkeypatch.setattr(run_case, "make_loss", wrong)
    outcome = run_case.run_case(case)
    assert outcome.status == "different"
    assert "step/1/loss" in outcome.detail


def test_refusals_and_errors_are_told_apart(monkeypatch):
    refused = run_case.run_case(Case(mesh="data=2", batch_size=5))
    assert refused.status == "refused"
    assert "ConfigError" in refused.kind

    def fails(*_):
        raise KeyError("x")

    monkeypatch.setattr(run_case, "train", fails)
    assert run_case.run_case(Case()).status == "error"


def test_a_case_is_one_line():
    case = PROCESS_CASES[1]
    assert from_line(case.line()) == case


@pytest.mark.slow
def test_two_processes_train_as_a_loop_by_hand(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "cases").write_text("\n".join(case.line() for case in PROCESS_CASES))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.two", address, str(index), tmp_path],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, process in enumerate(processes):
        assert process.returncode == 0, outputs[index]
        lines = (tmp_path / f"outcomes.{index}").read_text().splitlines()
        statuses = [json.loads(line)["status"] for line in lines]
        assert statuses == ["same"] * len(PROCESS_CASES), lines
