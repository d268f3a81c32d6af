"""Benchmarks compare the same computation."""

import json
import pickle
from dataclasses import replace

import jax
import numpy as np

from benchmarks import growth, shakespeare
from benchmarks.nnx_jit import WAYS


def test_nnx_jit_measures_steps_with_the_same_losses():
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 8))
    steps = {name: make(1, 8) for name, make in WAYS.items()}
    losses = {
        name: [float(step(x, y)) for _ in range(3)] for name, step in steps.items()
    }
    assert losses["nnx_jit"] == losses["cached_partial"] == losses["jax_jit"]
    assert losses["jax_jit"][2] < losses["jax_jit"][0]


def test_growth_measures_a_step():
    row = growth.measure(replace(growth.SMALL, width=32, num_layers=1), rows=2)
    assert row["step"] > 0
    assert row["bytes"] > 0


def test_shakespeare_writes_the_data_of_nanogpt_and_times_steps_between_evaluations(
    tmp_path,
):
    text = "To be, or not to be"
    (tmp_path / "text.txt").write_text(text)
    shakespeare.write_nanogpt_data(tmp_path / "text.txt", tmp_path / "data")
    meta = pickle.loads((tmp_path / "data" / "meta.pkl").read_bytes())  # noqa: S301
    parts = [
        np.fromfile(tmp_path / "data" / name, np.uint16)
        for name in ("train.bin", "val.bin")
    ]
    assert [len(part) for part in parts] == [17, 2]
    assert "".join(meta["itos"][token] for token in np.concatenate(parts)) == text
    # An evaluation before step 20 takes from 12 s to 30 s.
    times = shakespeare.times_between({0: 10, 10: 12, 20: 30, 30: 34}, {20: 1.5})
    assert list(times) == [0.2, 0.4]


def test_shakespeare_prints_mean_and_spread_of_the_seeds(tmp_path):
    record = tmp_path / "record.json"
    seconds = {"step_ms": 5.0, "first_step_s": 9.0, "wall_s": 60.0, "cpu_s": 70.0}
    record.write_text(
        json.dumps(
            {
                f"{side} {seed}": {
                    **seconds,
                    "side": side,
                    "config": "gpu",
                    "steps": 5000,
                    "best_loss": 1.5 + seed / 100,
                    "best_step": 2000,
                }
                for side in ("shardwise", "nanoGPT")
                for seed in range(3)
            }
        )
    )
    lines = shakespeare.table(record, "gpu", 5000).splitlines()
    row = "| 3 | 1.5100 ± 0.0100 | 1.5000 to 1.5200 | 2000 | 5.00 | 9.0 | 60 | 70 |"
    assert lines[2:4] == [f"| {side} {row}" for side in ("shardwise", "nanoGPT")]
    assert "1.4697" in lines[4]
