"""Several processes train the same adapters as one, and merging them gives the same model."""

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
    """Train with 8 devices in `count` processes, and open the last checkpoint."""
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
        list(map(str, command)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return open_step(find_step(out))


def export(run):
    """Export a run for transformers, and return the directory."""
    out = run.with_name(f"{run.name}-hub")
    assert (
        main(["checkpoint", "export", str(run), "--format", "hf", "--out", str(out)])
        == 0
    )
    return out


def max_difference(first, second):
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


@pytest.mark.slow
def test_two_processes_train_the_same_adapters_as_one_also_after_a_resume(tmp_path):
    fixture = np.load(FIXTURE)
    base = tmp_path / "base"
    base.mkdir()
    # No mesh divides the 97 tokens of the fixture.
    config = json.loads(fixture["config"].tobytes()) | {"vocab_size": 96}
    (base / "config.json").write_text(json.dumps(config))
    weights = {}
    for name in fixture:
        if name.startswith("weights/"):
            value = fixture[name]
            weights[name.removeprefix("weights/")] = (
                value[:96] if len(value) == 97 else value
            )
    save_file(weights, base / "model.safetensors")

    alone = train(1, base, tmp_path / "alone", "--mesh", "data=8")
    train(2, base, tmp_path / "both", "--mesh", "data=2,fsdp=2,model=2", "--steps", "3")
    both = train(2, base, tmp_path / "both", "--mesh", "fsdp=4,model=2")
    assert alone.leaves.keys() == both.leaves.keys()
    # A and B for seven stacks of matrices, and no state of the frozen weights.
    assert len([name for name in both.leaves if name.startswith("params/")]) == 14
    assert all(
        name.endswith(("lora_a", "lora_b")) or not leaf.shape
        for name, leaf in both.leaves.items()
    )
    checksums = [
        {
            path: leaf["checksum"]
            for path, leaf in step.metadata["frozen"]["leaves"].items()
        }
        for step in (alone, both)
    ]
    assert checksums[0] == checksums[1]
    ours, theirs = (step.read(step.leaves) for step in (alone, both))
    assert max_difference(ours, theirs) < 2e-6
    assert (
        min(np.abs(ours[name]).max() for name in ours if name.startswith("params/"))
        > 1e-2
    )

    exported = [export(tmp_path / run) for run in ("alone", "both")]
    first, second = (load_file(folder / "model.safetensors") for folder in exported)
    assert max_difference(first, second) < 2e-6
    assert (
        json.loads((exported[1] / "config.json").read_text())["model_type"] == "llama"
    )
