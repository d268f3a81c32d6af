"""Tokens a second of GPT-2 on one accelerator, through the very step that `shardwise train` runs.

python benchmarks/gpt2.py --preset gpt2 --rows 32

"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax

from shardwise import Batches, Mean, Run, Tokens, init_state, steps
from shardwise.models.gpt import GPT, PRESETS, cross_entropy
from shardwise.run import prepare


def loss(model, batch):
    return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))


def make_run(preset: str, rows: int, length: int, remat: str, scan: bool) -> Run:
    config = replace(PRESETS[preset], max_length=length, remat=remat, scan_layers=scan)
    tokens = np.random.default_rng(0).integers(0, 50257, 4_000_000).astype(np.uint16)
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1)),
        data=Batches(Tokens(tokens, length), rows),
        steps=1,
        compute_dtype="bfloat16",
        unit="tokens",
    )


def measure(run: Run, count: int) -> dict[str, float]:
    """Median over chunks of twenty steps; within a chunk nothing waits for the device but its end."""
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    start = time.perf_counter()
    chunk, times, last = 20, [], None
    for n, _, metrics in steps(prepared.step, state, prepared.batches, until=chunk * (count // chunk + 2)):
        if n == 1:
            jax.block_until_ready(metrics)
            compile_s = time.perf_counter() - start
        if n % chunk == 0:
            jax.block_until_ready(metrics)
            now = time.perf_counter()
            if last is not None:
                times.append((now - last) / chunk)
            last = now
    seconds = statistics.median(times)
    tokens = float(metrics["weight"])
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "mfu": prepared.flops / seconds / prepared.peak_flops if prepared.peak_flops else float("nan"),
        "loss": float(metrics["loss"]),
        "compile_s": compile_s,
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
    }


def profile(run: Run, folder: Path, top: int = 40) -> None:
    """Kernel times of three steps, largest first, with the operation each belongs to; the compiled program goes into `folder`."""
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.hlo").write_text(prepared.step.lower().compile().as_text())
    for n, _, metrics in steps(prepared.step, state, prepared.batches, until=8):
        jax.block_until_ready(metrics)
        if n == 5:
            jax.profiler.start_trace(folder / "trace")
    jax.profiler.stop_trace()
    data = jax.profiler.ProfileData.from_file(str(next((folder / "trace").rglob("*.xplane.pb"))))
    kernels: dict[str, list[float]] = {}
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                key = f"{stats.get('hlo_op', '')} | {event.name[:60]} | {str(stats.get('name', stats.get('tf_op', '')))[-90:]}"
                kernels.setdefault(key, []).append(event.duration_ns / 1e6)
    rows = sorted(((sum(times) / 3, len(times) // 3, key) for key, times in kernels.items()), reverse=True)
    print(f"all kernels: {sum(row[0] for row in rows):.2f} ms a step")
    for total, count, key in rows[:top]:
        print(f"{total:8.3f} ms {count:4d} x  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="instead of timing, write a profile of three steps into this folder")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.preset}, {options.length} tokens a row")
    if options.profile:
        profile(make_run(options.preset, options.rows[0], options.length, options.remat, options.scan), options.profile)
        return
    answers = []
    for rows in options.rows:
        answer = measure(make_run(options.preset, rows, options.length, options.remat, options.scan), options.steps)
        answers.append({"rows": rows, **answer})
        print(
            f"{rows:4d} rows: {answer['step_ms']:8.2f} ms, {answer['tokens_per_s']:10,.0f} tokens/s, MFU {answer['mfu']:.1%}, "
            f"loss {answer['loss']:.3f}, peak {answer['peak_gib']:.1f} GiB, compile {answer['compile_s']:.1f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    main()
