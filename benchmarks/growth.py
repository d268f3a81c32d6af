"""Measure how time, compilation and memory grow with the model and the mesh.

    python -m benchmarks.growth            about 10 minutes on 2 cores

On the CPU, each size of a small GPT is doubled repeatedly. GPT-2 124M is compiled for TPU v5e with
unrolled and with scanned layers. `prepare` is the work of shardwise before XLA: abstract state,
shardings, traces.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from shardwise import Batches, Mean, Run, Tokens, init_state, use_cpu_devices
from shardwise.models.gpt import GPT, PRESETS, GPTConfig
from shardwise.models.loss import cross_entropy
from shardwise.plan.compile import plan_run
from shardwise.run import prepare
from shardwise.runtime import keep_freed_memory

SMALL = GPTConfig(vocab_size=256, max_length=64, num_layers=2, num_heads=4, width=64)
ROWS = 16


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss of every token."""
    return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))


def make_run(config: GPTConfig, rows: int, mesh: Any) -> Run:
    """Return a run with `rows` random sequences per step."""
    tokens = np.random.default_rng(0).integers(0, 256, 2 * rows * config.max_length)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    data = Batches(Tokens(tokens, config.max_length), rows)
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optimizer,
        data=data,
        steps=1,
        mesh=mesh,
    )


def measure(config: GPTConfig, rows: int = ROWS, devices: int = 1) -> dict[str, float]:
    """Return the seconds of each phase and of a step, and the peak bytes per device."""
    jax.clear_caches()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    moments = [time.perf_counter()]
    prepared = prepare(make_run(config, rows, mesh))
    moments.append(time.perf_counter())
    lowered = prepared.step.lower()
    moments.append(time.perf_counter())
    step = prepared.step.compile(lowered)
    moments.append(time.perf_counter())
    state, batch = (
        init_state(prepared.spec, 0),
        prepared.step.place(prepared.batches(0)),
    )
    times = []
    for _ in range(12):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - begun)
    assert step.program is not None
    m = step.program.memory_analysis()
    seconds = dict(
        zip(("prepare", "lower", "compile"), np.diff(moments).tolist(), strict=True)
    )
    flops = prepared.flops
    return {
        **seconds,
        "step": statistics.median(times[2:]),
        "bytes": float(m.argument_size_in_bytes + m.temp_size_in_bytes),
        "flops": flops,
        "leaves": len(prepared.spec.params),
    }


def sizes() -> dict[str, list[tuple[int, dict[str, float]]]]:
    """Return the measurements at each size, for each way to grow."""
    ways: dict[str, list[tuple[int, Any]]] = {
        "layers, unrolled": [
            (n, {"config": replace(SMALL, num_layers=n)}) for n in (2, 4, 8, 16, 32)
        ],
        "layers, scanned": [
            (n, {"config": replace(SMALL, num_layers=n, scan_layers=True)})
            for n in (2, 4, 8, 16, 32)
        ],
        "width": [
            (n, {"config": replace(SMALL, width=n)}) for n in (64, 128, 256, 512)
        ],
        "length": [
            (n, {"config": replace(SMALL, max_length=n), "rows": 2048 // n})
            for n in (64, 128, 256, 512, 1024)
        ],
        "batch size": [(n, {"config": SMALL, "rows": n}) for n in (8, 16, 32, 64, 128)],
        "devices, 8 sequences each": [
            (n, {"config": SMALL, "rows": 8 * n, "devices": n}) for n in (1, 2, 4, 8)
        ],
    }
    found: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for name, cases in ways.items():
        for size, arguments in cases:
            row = measure(**arguments)
            found.setdefault(name, []).append((size, row))
            show = " ".join(
                f"{key} {row[key]:.2f} s" for key in ("prepare", "lower", "compile")
            )
            print(
                f"{name} {size}: {show}, step {row['step'] * 1e3:.1f} ms, "
                f"{row['bytes'] / 2**20:.1f} MiB",
                flush=True,
            )
    return found


def on_tpu() -> list[dict[str, Any]]:
    """Return plans of GPT-2 124M and deeper models for v5e chips."""
    found = []
    for layers, scan, target in (
        (6, False, "2x4"),
        (12, False, "2x4"),
        (24, False, "2x4"),
        *((n, True, "2x4") for n in (6, 12, 24, 48)),
    ):
        found.append(_planned(layers, scan, target))
    found += [
        _planned(12, True, target) for target in ("1x1", "2x2", "4x4", "8x8", "16x16")
    ]
    return found


def _planned(layers: int, scan: bool, target: str) -> dict[str, Any]:
    config = replace(PRESETS["gpt2"], num_layers=layers, scan_layers=scan)
    chips = int(np.prod([int(n) for n in target.split("x")]))
    run = replace(make_run(config, 4 * chips, "data=-1"), compute_dtype="bfloat16")
    plan = plan_run(run, f"v5e:{target}")
    seconds = plan.times.total if plan.times else None
    row = {
        "layers": layers,
        "scan": scan,
        "chips": chips,
        "compile": plan.compile_seconds,
        "peak": plan.memory.peak,
        "step": seconds,
    }
    print(
        f"v5e:{target}, {layers} layers{', scanned' if scan else ''}: "
        f"compilation {row['compile']:.1f} s, {row['peak'] / 2**30:.2f} GiB",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # As the command line does.
    keep_freed_memory()
    use_cpu_devices(8)
    found = {"sizes": sizes(), "tpu": on_tpu()}
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
