"""Train GPT-2 124M on source code for thousands of steps, with several seeds; compare losses.

    python -m benchmarks.source_code build/code.npz
    python -m benchmarks.long_runs build/code.npz --out build/float8.jsonl --runs adamw adamw:float8
    python -m benchmarks.long_runs build/code.npz --out build/optimizers.jsonl --seeds 1 \
        --runs adamw muon normuon soap schedule_free --rates 1.5e-4 3e-4 6e-4

`python -m benchmarks.steps_to_target` makes a page of the second file. A line that is in the file
already is not measured again.

A run is the name of an optimizer in `RATES`, and `:float8` for matmuls of 8 bits. After it, `:300`
uses 16 bits in the last 300 steps, and `:hidden` in the output layer. `:logits` rounds the
operands of the logits to 8 bits, with a matmul of 16 bits: its losses are those of logits of 8
bits, its times are not. Each run writes one line of JSON with its training losses, its validation
loss and its time per step. Seeds change the initial weights and the order of the data, and are the
same for all runs. Runs with 8 bits are evaluated twice: with 16 bits, as a run does it, and with 8
bits.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise import (
    Batches,
    Mean,
    Run,
    Tokens,
    evaluate,
    init_state,
    optim,
    steps,
)
from shardwise.kernels import cross_entropy, float8
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.loss import linear_cross_entropy
from shardwise.run import Prepared, prepare
from shardwise.state import TrainState

# Peak learning rates, unless `--rates` names others.
RATES = {
    "adamw": 6e-4,
    "muon": 6e-4,
    "normuon": 6e-4,
    "soap": 6e-4,
    "schedule_free": 6e-4,
}
# Optimizers that use Adam for tables: a row of a table is a token, not an output.
MATRIX = ("muon", "normuon", "soap")
TABLES = ("tokens", "positions")
LENGTH = 1024
# Validation sequences.
NUM_EVAL = 320
# Each training loss in the record is the mean over this many steps.
MEAN_OVER = 20


def make_optimizer(name: str, peak: float, count: int) -> optax.GradientTransformation:
    """Return an optimizer by name, with its schedule for `count` steps."""
    warmup = count // 15
    if name == "schedule_free":
        schedule = optim.constant(peak, warmup=warmup)
    else:
        schedule = optim.cosine(peak, count, warmup=warmup)
    tables = {"adam": TABLES} if name in MATRIX else {}
    make = getattr(optim, name)
    tx: optax.GradientTransformation
    tx = make(schedule, weight_decay=0.1, clip=1.0, **tables)
    return tx


def loss(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the mean loss of the tokens of a batch."""
    inputs, labels = batch["inputs"], batch["labels"]
    return Mean(linear_cross_entropy(*model.features(inputs), labels))


def loss8(model: GPT, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss with matmuls of 8 bits."""
    with float8.matmul_dtype("float8"):
        return loss(model, batch)


def rounded_exponentials(
    features: jax.Array, table: jax.Array, *others: jax.Array, **options: bool
) -> tuple[jax.Array, ...]:
    """Return what the loss computes from logits of operands that are rounded to 8 bits."""
    # What all rows of the table have in common changes no probability.
    centered = (table - table.astype(jnp.float32).mean(0)).astype(table.dtype)
    operands = []
    for array in (features, centered):
        narrow, scale = float8.narrow_exactly(array)
        operands.append((narrow.astype(jnp.float32) / scale).astype(array.dtype))
    return exponentials(*operands, *others, **options)


exponentials = cross_entropy._float8_exponentials
# What is replaced in the loss of a variant.
REPLACED = {
    "hidden": ("uses_float8", lambda: False),
    "logits": ("_float8_exponentials", rounded_exponentials),
}


def make_run(name: str, peak: float, options: argparse.Namespace) -> Run:
    """Return the run of this name and peak learning rate."""
    optimizer, _, dtype = name.partition(":")
    rows, count = options.rows, options.steps
    arrays = np.load(options.tokens)
    config = replace(PRESETS["gpt2"], max_length=LENGTH)

    validation = arrays["validation"][: NUM_EVAL * (LENGTH + 1)]
    return Run(
        model=lambda rngs: GPT(config, rngs),
        loss=loss,
        optimizer=make_optimizer(optimizer, peak, count),
        data=Batches(Tokens(arrays["train"], LENGTH), rows),
        eval_data=Batches(Tokens(validation, LENGTH), rows),
        steps=count,
        compute_dtype="bfloat16",
        matmul_dtype="float8" if dtype.startswith("float8") else None,
        unit="tokens",
    )


def train(name: str, peak: float, options: argparse.Namespace) -> None:
    """Train a run with each seed, and append a line for each to the file."""
    seeds = [
        seed
        for seed in range(options.seeds)
        if (name, peak, seed) not in measured(options.out)
    ]
    if not seeds:
        return
    run = make_run(name, peak, options)
    variant = name.rpartition(":")[2]
    prepared = prepare(run)
    parts = [(prepared.step, options.steps)]
    if variant.isdigit():
        wide = prepare(replace(run, matmul_dtype=None))
        parts = [
            (prepared.step, options.steps - int(variant)),
            (wide.step, options.steps),
        ]
    num_records = len(Tokens(np.load(options.tokens)["train"], LENGTH))
    evaluations = {"validation_loss": prepared}
    if run.matmul_dtype is not None:
        run8 = replace(run, loss=loss8, matmul_dtype=None)
        evaluations["validation_loss_8_bits"] = prepare(run8)
    for seed in seeds:
        state = init_state(prepared.spec, seed)
        batches = replace(run.data, seed=seed)
        losses = []
        began = 0.0
        for step, until in parts:
            # The last state is evaluated.
            for n, state, metrics in steps(step, state, batches, until=until):  # noqa: B007
                losses.append(metrics["loss"])
                if n == options.steps // 10:
                    jax.block_until_ready(metrics)
                    began = time.perf_counter()
        jax.block_until_ready(losses)
        seconds = time.perf_counter() - began
        step_ms = 1e3 * seconds / (options.steps - options.steps // 10)
        found = {
            key: round(evaluate_state(by, state), 5) for key, by in evaluations.items()
        }
        smooth = np.asarray(jax.device_get(losses)).reshape(-1, MEAN_OVER).mean(1)
        line = {
            "run": name,
            "seed": seed,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "tokens_per_step": options.rows * LENGTH,
            "steps": options.steps,
            "epochs": round(options.steps * options.rows / num_records, 3),
            "rate": peak,
            "step_ms": round(step_ms, 3),
            **found,
            "losses": [round(float(value), 4) for value in smooth],
        }
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{name:16s} rate {peak:g} seed {seed}  validation {list(found.values())}  "
            f"last {smooth[-1]:.4f}  {step_ms:.2f} ms per step",
            flush=True,
        )


def evaluate_state(prepared: Prepared, state: TrainState) -> float:
    """Return the validation loss of a state."""
    assert prepared.eval_step is not None
    assert prepared.eval_batches is not None
    return evaluate(prepared.eval_step, state, prepared.eval_batches)["loss"]


def measured(path: Path) -> set[tuple[str, float, int]]:
    """Return the name, rate and seed of each line of a file."""
    if not path.exists():
        return set()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["run"], line["rate"], line["seed"]) for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", type=Path, help="a file of benchmarks.source_code")
    parser.add_argument("--runs", nargs="+", default=list(RATES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=12, help="sequences per step")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="peak learning rates of all runs"
    )
    options = parser.parse_args()
    for name in options.runs:
        for peak in options.rates or [RATES[name.partition(":")[0]]]:
            replaced = REPLACED.get(name.rpartition(":")[2])
            if replaced is None:
                train(name, peak, options)
            else:
                with mock.patch.object(cross_entropy, *replaced):
                    train(name, peak, options)


if __name__ == "__main__":
    main()
