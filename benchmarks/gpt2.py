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
    """Median over chunks of ten steps; within a chunk nothing waits for the device but its end."""
    prepared = prepare(run)
    state = init_state(prepared.spec, 0)
    start = time.perf_counter()
    chunk, times, last = 10, [], None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.preset}, {options.length} tokens a row")
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
