"""Compare the bits of runs, and measure what determinism costs: `python -m benchmarks.determinism`.

    python -m benchmarks.determinism                       all runs, about 12 minutes on an H200
    python -m benchmarks.determinism --runs llama digits   some of them
    python -m benchmarks.determinism --price               the step with and without determinism

Each run is made three times with the real command: twice in processes with separate compilation
caches, so that nothing is shared, and once killed five times with SIGKILL. All losses, gradient
norms, digests and arrays of the last checkpoint must be equal.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from shardwise import Batches, Mean, Run, Tokens, stdlib_bytes

KILLS = 5

# The arguments of `shardwise train`, without steps and directory.
RUNS = {
    "gpt2_scanned": ["recipes/gpt2.py", "--save-every", "60", "--batch-size", "16"],
    "gpt2_unrolled": [
        *("recipes/gpt2.py", "--save-every", "60", "--batch-size", "16"),
        "--no-scan-layers",
    ],
    "llama": [
        *("recipes/llama.py", "--save-every", "60", "--batch-size", "16"),
        *("--length", "512", "--no-scan-layers"),
    ],
    "plain_nnx": ["benchmarks/determinism.py:plain_nnx"],
    "digits": ["recipes/digits.py"],
}


class Block(nnx.Module):
    """A transformer block of plain Flax layers, with cuDNN's attention on GPUs."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, width // 64, 64), rngs=rngs)
        self.out = nnx.LinearGeneral((width // 64, 64), width, axis=(-2, -1), rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.unstack(self.qkv(self.norm1(x)), axis=-3)
        kind = "cudnn" if jax.default_backend() == "gpu" else None
        heads = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=kind
        )
        x = x + self.out(heads)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Plain(nnx.Module):
    """A language model of plain Flax layers."""

    def __init__(self, rngs: nnx.Rngs, vocab: int = 256, width: int = 512):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_nnx(steps: int = 300, out: Path | None = None) -> Run:
    """Train a language model of plain Flax layers on Python's standard library.

    Args:
        steps: Number of training steps.
        out: Run directory.
    """

    def loss(model: Plain, batch: dict[str, jax.Array]) -> Mean:
        logits = model(batch["inputs"]).astype(jnp.float32)
        return Mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        )

    return Run(
        model=Plain,
        loss=loss,
        optimizer=optax.adamw(1e-3),
        data=Batches(Tokens(stdlib_bytes()[0], 512), batch_size=16),
        steps=steps,
        save_every=60,
        compute_dtype="bfloat16",
        out=out,
        unit="tokens",
    )


def train(
    args: list[str], steps: int, out: Path, cache: Path
) -> "subprocess.Popen[bytes]":
    """Start `shardwise train` with a compilation cache of its own."""
    words = [sys.executable, "-m", "shardwise.cli", "train", *args]
    words += ["--steps", str(steps), "--out", str(out)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    log = out.with_suffix(".log").open("ab")
    return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


def train_killed(args: list[str], steps: int, out: Path, cache: Path) -> int:
    """Run to the end, killed at `KILLS` different steps; return how often it was killed."""
    kills = 0
    while True:
        process = train(args, steps, out, cache)
        target = (kills + 1) * steps // (KILLS + 1)
        while process.poll() is None:
            time.sleep(0.05)
            if kills < KILLS and last_step(out) >= target:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
        if process.returncode != -signal.SIGKILL:
            if process.returncode:
                raise SystemExit(out.with_suffix(".log").read_text()[-3000:])
            return kills


def last_step(out: Path) -> int:
    """Return the last step in metrics.jsonl, or 0."""
    return max((record["step"] for record in records(out)), default=0)


def records(out: Path) -> list[dict[str, float]]:
    """Return the records of all steps of a run."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in found if "loss" in record]


def compare(a: Path, b: Path) -> tuple[int, int, bool]:
    """Return how many of how many records are equal, and whether the last checkpoints are."""
    names = ("step", "loss", "grad_norm", "digest")
    pairs = [
        [tuple(record.get(name) for name in names) for record in records(out)]
        for out in (a, b)
    ]
    equal = sum(x == y for x, y in zip(*pairs, strict=True))
    words = [
        sys.executable,
        "-m",
        "shardwise.cli",
        "checkpoint",
        "diff",
        str(a),
        str(b),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    diff = subprocess.run(words, env=environment, capture_output=True, check=False)
    return equal, len(pairs[0]), diff.returncode == 0


def check(name: str, steps: int, folder: Path) -> bool:
    """Make the three runs of a configuration, print one line, and return whether all are equal."""
    begin = time.perf_counter()
    outs = [folder / f"{name}-{kind}" for kind in ("a", "b", "killed")]
    caches = [folder / f"{name}-cache-{kind}" for kind in ("a", "b")]
    for out, cache in zip(outs, caches, strict=False):
        process = train(RUNS[name], steps, out, cache)
        if process.wait():
            raise SystemExit(out.with_suffix(".log").read_text()[-3000:])
    kills = train_killed(RUNS[name], steps, outs[2], caches[0])
    results = [compare(outs[0], out) for out in outs[1:]]
    texts = [
        f"{equal} of {count} records, checkpoint {'equal' if is_same else 'DIFFERENT'}"
        for equal, count, is_same in results
    ]
    seconds = time.perf_counter() - begin
    print(
        f"{name}: second run {texts[0]}; killed {kills} times {texts[1]} ({seconds:.0f} s)",
        flush=True,
    )
    return all(equal == count and is_same for equal, count, is_same in results)


def price(rows: int, count: int = 60) -> None:
    """Print the time of a GPT-2 124M step with and without determinism, measured in turn."""
    from dataclasses import replace

    from benchmarks.gpt2 import make_run
    from shardwise import init_state
    from shardwise.models.gpt import PRESETS
    from shardwise.run import prepare

    for scan in (False, True):
        run = make_run(replace(PRESETS["gpt2"], scan_layers=scan), rows, 1024)
        states, compiled, times = {}, {}, {}
        for is_deterministic in (True, False):
            prepared = prepare(replace(run, deterministic=is_deterministic))
            compiled[is_deterministic] = prepared.step.compile()
            states[is_deterministic] = init_state(prepared.spec, 0)
            times[is_deterministic] = []
        batch = prepared.step.place(prepared.batches(0))
        for _ in range(4):
            for key, step in compiled.items():
                begin = time.perf_counter()
                for _ in range(count // 4):
                    states[key], metrics = step(states[key], batch)
                jax.block_until_ready(metrics)
                times[key].append((time.perf_counter() - begin) / (count // 4))
        yes, no = (statistics.median(times[key][1:]) * 1e3 for key in (True, False))
        layers = "scanned" if scan else "unrolled"
        print(
            f"{layers}, {rows} x 1024: deterministic {yes:.2f} ms, otherwise {no:.2f} ms "
            f"({yes / no - 1:+.1%})",
            flush=True,
        )


def main() -> None:
    """Make the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    if options.price:
        price(options.rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [check(name, options.steps, Path(folder)) for name in options.runs]
    raise SystemExit(0 if all(results) else 5)


if __name__ == "__main__":
    main()
