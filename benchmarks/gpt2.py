"""Measure tokens per second of GPT-2 on one accelerator, with the step of `shardwise train`.

    python -m benchmarks.gpt2 --preset gpt2 --rows 64
    python -m benchmarks.gpt2 --rows 64 --optimizer muon
    python -m benchmarks.gpt2 --rows 64 --profile profile     kernel times instead

`--share FOLDER` writes the initial weights and the text to FOLDER, so that benchmarks/gpt2_torch.py
starts from the same.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax

from benchmarks.text import (
    FIRST_RATE,
    RATE,
    WARMUP,
    batch,
    stdlib_tokens,
    steps_between_looks,
)
from shardwise import Mean, Run, init_state, optim, steps
from shardwise.models.gpt import GPT, PRESETS, GPTConfig
from shardwise.models.loss import chunked_cross_entropy, linear_cross_entropy
from shardwise.run import prepare
from shardwise.weights.hf import params_to_hf


def make_run(
    config: GPTConfig,
    rows: int,
    length: int,
    chunks: int = 1,
    matmul_dtype: Literal["float8"] | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    iterate_in: str = "float32",
) -> Run:
    """Return the run to measure: `rows` sequences of `length` tokens per step."""
    tokens = stdlib_tokens()

    def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
        inputs, labels = batch["inputs"], batch["labels"]
        if chunks == 1:
            return Mean(linear_cross_entropy(*model.features(inputs), labels))
        return Mean(
            chunked_cross_entropy(*model.features(inputs), labels, chunks),
            labels.size,
        )

    rate = optax.linear_schedule(FIRST_RATE, RATE, WARMUP)
    if optimizer == "muon":
        stacked = ("blocks/*",) if config.scan_layers else ()
        tx = optim.muon(
            rate,
            adam=("tokens", "positions"),
            stacked=stacked,
            iterate_in=iterate_in,
            weight_decay=0.1,
            clip=1.0,
        )
    else:
        tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)
        )
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=tx,
        data=lambda n: batch(tokens, n, rows, length),
        steps=1,
        compute_dtype="bfloat16",
        matmul_dtype=matmul_dtype,
        # As PyTorch's attention is. `benchmarks/determinism.py` measures the difference.
        deterministic=False,
        unit="tokens",
    )


def measure(
    run: Run, config: GPTConfig, count: int, share: Path | None = None
) -> dict[str, Any]:
    """Return the median step time over groups of steps, without the first two groups, and the
    losses.

    The host waits for the device only at the end of a group.
    """
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    if share is not None:
        share.mkdir(parents=True, exist_ok=True)
        np.save(share / "tokens.npy", stdlib_tokens())
        np.savez(share / "weights.npz", **params_to_hf(state.params, config))
    start, times, losses, last, every = (
        time.perf_counter(),
        [],
        [],
        None,
        steps_between_looks(count),
    )
    for n, _, metrics in steps(prepared.step, state, prepared.batches, until=count):
        losses.append(metrics["loss"])
        if n == 1:
            jax.block_until_ready(metrics)
            compile_s = time.perf_counter() - start
        if n % every == 0:
            jax.block_until_ready(metrics)
            now = time.perf_counter()
            if last is not None:
                times.append((now - last) / every)
            last = now
    seconds = statistics.median(times[1:] or times)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": float(metrics["weight"]) / seconds,
        "mfu": prepared.flops / seconds / prepared.peak_flops
        if prepared.peak_flops
        else None,
        "compile_s": compile_s,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "losses": [float(x) for x in losses],
    }


def profile(run: Run, folder: Path, top: int = 60) -> None:
    """Print the kernel times of five consecutive steps, largest first.

    The compiled program is written to `folder`.
    """
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.hlo").write_text(prepared.step.lower().compile().as_text())
    for n, _, metrics in steps(prepared.step, state, prepared.batches, until=45):
        if n == 40:
            jax.block_until_ready(metrics)
            jax.profiler.start_trace(folder / "trace")
    jax.block_until_ready(metrics)
    jax.profiler.stop_trace()
    data = jax.profiler.ProfileData.from_file(
        str(next((folder / "trace").rglob("*.xplane.pb")))
    )
    kernels: dict[str, list[float]] = {}
    first, last = float("inf"), 0.0
    for plane in data.planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                kernels.setdefault(event.name[:90], []).append(event.duration_ns / 1e6)
                first, last = (
                    min(first, event.start_ns),
                    max(last, event.start_ns + event.duration_ns),
                )
    rows = sorted(
        ((sum(times) / 5, len(times) // 5, key) for key, times in kernels.items()),
        reverse=True,
    )
    print(
        f"all kernels: {sum(row[0] for row in rows):.2f} ms per step; "
        f"from the first to the last: {(last - first) / 5e6:.2f} ms per step"
    )
    for total, count, key in rows[:top]:
        print(f"{total:8.3f} ms {count:4d} x  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of the loss")
    parser.add_argument("--float8", action="store_true", help="matmuls of 8 bits")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument(
        "--iterate-in", default="float32", help="dtype of Muon's iterations"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", type=Path)
    parser.add_argument(
        "--profile",
        type=Path,
        help="write a profile of five steps to this folder, instead of timing",
    )
    options = parser.parse_args()
    config = replace(
        PRESETS[options.preset],
        max_length=options.length,
        remat=options.remat,
        scan_layers=options.scan,
    )
    matmul_dtype: Literal["float8"] | None = "float8" if options.float8 else None
    run = make_run(
        config,
        options.rows,
        options.length,
        options.chunks,
        matmul_dtype,
        options.optimizer,
        options.iterate_in,
    )
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.preset}, "
        f"{options.rows} x {options.length} tokens, matmuls {matmul_dtype or 'bfloat16'}, "
        f"{options.optimizer}"
    )
    if options.profile:
        profile(run, options.profile)
        return
    answer = measure(run, config, options.steps, options.share)
    print(
        f"{answer['step_ms']:8.2f} ms, {answer['tokens_per_s']:10,.0f} tokens/s, "
        f"MFU {answer['mfu'] or 0:.1%}, loss {answer['losses'][-1]:.3f}, "
        f"peak {answer['peak_gib']:.1f} GiB, compilation {answer['compile_s']:.1f} s",
        flush=True,
    )
    if options.json:
        options.json.write_text(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
