"""Adapters trained by several processes are those of one, and merged they are the same model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardwise.checkpoint.reader import find_step, open_step
from shardwise.cli import main

HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "llama_tiny.npz"


def train(count, base, out, *args):
    """Eight devices in `count` processes."""
    launch = ["launch", "--processes", count, "--"] if count > 1 else []
    arguments = [
        "train",
        HERE / "adapters.py",
        "--base",
        base,
        "--out",
        out,
        "--cpu-devices",
        8 // count,
        *args,
    ]
    command = [sys.executable, "-m", "shardwise.cli", *launch, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return open_step(find_step(out))


@pytest.mark.slow
def test_adapters_of_two_processes_are_those_of_one_also_after_a_resume(tmp_path):
    known = np.load(FIXTURE)
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads(known["config"].tobytes())
    (base / "config.json").write_text(
        json.dumps({**config, "vocab_size": 96})
    )  # of 97, which no mesh divides
    weights = {
        name.removeprefix("weights/"): known[name] for name in known if name.startswith("weights/")
    }
    save_file(
        {name: value[:96] if len(value) == 97 else value for name, value in weights.items()},
        base / "model.safetensors",
    )

    alone = train(1, base, tmp_path / "alone", "--mesh", "data=8")
    train(2, base, tmp_path / "both", "--mesh", "data=2,fsdp=2,model=2", "--steps", "3")
    both = train(2, base, tmp_path / "both", "--mesh", "fsdp=4,model=2")
    assert alone.leaves.keys() == both.leaves.keys()
    assert (
        len([name for name in both.leaves if name.startswith("params/")]) == 14
    )  # A and B beside seven stacks of matrices
    assert all(
        name.endswith(("lora_a", "lora_b")) or not both.leaves[name].shape for name in both.leaves
    )  # no state of the base
    sums = [
        {path: leaf["checksum"] for path, leaf in step.metadata["frozen"]["leaves"].items()}
        for step in (alone, both)
    ]
    assert sums[0] == sums[1]
    ours, theirs = (step.read(step.leaves) for step in (alone, both))
    gaps = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours}
    assert max(gaps.values()) < 2e-6, gaps
    assert min(np.abs(ours[name]).max() for name in ours if name.startswith("params/")) > 1e-2

    for run in ("alone", "both"):
        assert (
            main(
                [
                    "checkpoint",
                    "export",
                    str(tmp_path / run),
                    "--format",
                    "hf",
                    "--out",
                    str(tmp_path / f"{run}-hub"),
                ]
            )
            == 0
        )
    first, second = (
        load_file(tmp_path / f"{run}-hub" / "model.safetensors") for run in ("alone", "both")
    )
    gaps = {name: float(np.abs(first[name] - second[name]).max()) for name in first}
    assert max(gaps.values()) < 2e-6, gaps
    assert json.loads((tmp_path / "both-hub" / "config.json").read_text())["model_type"] == "llama"
