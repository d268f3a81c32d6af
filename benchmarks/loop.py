"""Compare the overhead of the training loop with a hand-written one: `make bench-loop`.

Model, loss, optimizer and batches are the same, on one device, in three loops:

- a jitted NNX step in a plain `for` loop, as one would write it by hand
- `steps()`
- `steps()` with everything that `fit()` does per step: finite check, gradient norm, metrics.jsonl

The three run in turn, round after round, so that noise affects all of them. Each figure is the
median over the rounds of a ratio within one round. `--cases gpt2`, for a GPU, also runs `fit()`
with a checkpoint of 1.5 GB every 100 steps. The first checkpoint is counted separately, because the
driver pins host memory for it once.

Goal: at most 1.02 times the time for steps of 5 ms or more, and at most 100 microseconds of
additional host time per step. Host time is the CPU time of the thread that runs the loop. An
accelerator waits for nothing else. On a CPU, the program and the prefetching thread compete for the
same cores.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from shardwise import Batches, Mean, Run, Tokens, fit, init_state, steps
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import cross_entropy
from shardwise.run import prepare
from shardwise.step import COMPILER_OPTIONS
from shardwise.training.log import RunLog


def loss(model, batch):
    """Return the loss of every token."""
    return Mean(cross_entropy(model(batch["inputs"]), batch["labels"]))


def gpt(
    width: int,
    layers: int,
    rows: int,
    length: int,
    vocab: int = 256,
    heads: int = 2,
    dtype: str | None = None,
    scan: bool = False,
):
    """Return the model factory, the batches and the compute dtype of a case."""
    config = GPTConfig(
        vocab_size=vocab,
        max_length=length,
        num_layers=layers,
        num_heads=heads,
        width=width,
        scan_layers=scan,
    )
    tokens = np.random.default_rng(0).integers(0, 256, 200_000)
    return (
        (lambda rngs: GPT(config, rngs)),
        Batches(Tokens(tokens, length), rows),
        dtype,
    )


# Model, data and dtype of each case. The first step is all overhead, the last all arithmetic.
CASES = {
    "tiny": gpt(width=8, layers=1, rows=2, length=8),
    "small": gpt(width=64, layers=1, rows=16, length=64),
    "medium": gpt(width=128, layers=2, rows=16, length=64),
    "gpt2": gpt(
        width=768,
        layers=12,
        rows=32,
        length=1024,
        vocab=50304,
        heads=12,
        dtype="bfloat16",
        scan=True,
    ),
}


@dataclass
class ByHand:
    """A good hand-written loop.

    It uses plain arrays in nested dictionaries, a jitted step with donation, and reads the loss one
    step late.
    """

    factory: Any
    batches: Batches
    dtype: str | None

    def __post_init__(self):
        with nnx.use_eager_sharding(False):
            graphdef, params, rest = nnx.split(
                self.factory(nnx.Rngs(0)), nnx.Param, ...
            )
        optimizer = make_optimizer()
        params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        self.state = params, optimizer.init(params)

        def objective(params, batch):
            params = (
                params
                if self.dtype is None
                else jax.tree.map(lambda x: x.astype(self.dtype), params)
            )
            model = nnx.merge(graphdef, nnx.State(params), nnx.State(rest))
            return cross_entropy(model(batch["inputs"]), batch["labels"]).mean()

        def step(state, batch):
            params, opt_state = state
            value, grads = jax.value_and_grad(objective)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        self.step = jax.jit(
            step,
            donate_argnums=0,
            compiler_options=COMPILER_OPTIONS.get(jax.default_backend()),
        )

    def run(self, count):
        previous = None
        for n in range(count):
            self.state, value = self.step(self.state, jax.device_put(self.batches(n)))
            if previous is not None:
                float(previous)
            previous = value
        float(previous)


@dataclass
class Ours:
    """`steps()`. It reads the loss one step late, like the hand-written loop."""

    run_: Run

    def __post_init__(self):
        self.prepared = prepare(self.run_)
        self.state = init_state(self.prepared.spec, 0)

    def run(self, count):
        previous = None
        start = int(self.state.step)
        for _, self.state, metrics in steps(
            self.prepared.step, self.state, self.prepared.batches, until=start + count
        ):
            if previous is not None:
                float(previous)
            previous = metrics["loss"]
        float(previous)


@dataclass
class Whole(Ours):
    """`steps()` with the log of `fit()`: all metrics of every step are written to a file."""

    def __post_init__(self):
        super().__post_init__()
        self.log = RunLog(self.run_, self.prepared, 0)

    def run(self, count):
        start = int(self.state.step)
        for n, self.state, metrics in steps(
            self.prepared.step, self.state, self.prepared.batches, until=start + count
        ):
            self.log.record(n, metrics)
        self.log.finish()


def make_optimizer():
    """Return AdamW with gradient clipping."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def whole_fit(run):
    """Return the seconds per step of `fit()` with a log and a save every 100 steps.

    The times are those at which `fit()` requests data. Also return the seconds that the first save
    costs.
    """
    asked = {}

    def data(n):
        asked[n] = time.perf_counter()
        return run.data(n)

    fit(
        replace(run, data=data, steps=370, out=Path(tempfile.mkdtemp()), save_every=100)
    )
    waits = {n: asked[n + 1] - asked[n] for n in range(60, 360)}
    print(
        "longest steps: "
        + ", ".join(
            f"{waits[n] * 1e3:.0f} ms at step {n}"
            for n in sorted(waits, key=waits.get)[:-6:-1]
        ),
        flush=True,
    )
    usual = statistics.median(waits.values())
    return (asked[360] - asked[160]) / 200, asked[160] - asked[60] - 100 * usual


def timed(loop, count):
    """Return the wall seconds and the CPU seconds of this thread, per step."""
    start, own = time.perf_counter(), time.thread_time()
    loop.run(count)
    return (time.perf_counter() - start) / count, (time.thread_time() - own) / count


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="seconds of work per loop and round"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=["tiny", "small", "medium"]
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    answer = {}
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; median of {options.rounds} rounds"
    )
    print(
        f"{'case':8s} {'hand-written':>12s} {'steps()':>20s} {'host':>11s} {'with log':>22s} "
        f"{'host':>11s}"
    )
    for name in options.cases:
        factory, batches, dtype = CASES[name]
        out = Path(tempfile.mkdtemp())
        run = Run(
            model=factory,
            loss=loss,
            optimizer=make_optimizer(),
            data=batches,
            steps=1,
            mesh=mesh,
            out=out,
            compute_dtype=dtype,
        )
        loops = {
            "by hand": ByHand(factory, batches, dtype),
            "steps": Ours(run),
            "fit": Whole(run),
        }
        for loop in loops.values():
            loop.run(3)
        count = max(20, int(options.seconds / timed(loops["by hand"], 20)[0]))
        rounds = [
            {key: timed(loop, count) for key, loop in loops.items()}
            for _ in range(options.rounds)
        ]
        hand = statistics.median(r["by hand"][0] for r in rounds)
        row = {"by_hand_s": hand}
        text = f"{name:8s} {hand * 1e3:9.3f} ms"
        for key in ("steps", "fit"):
            ratio = statistics.median(r[key][0] / r["by hand"][0] for r in rounds)
            extra, host = (
                statistics.median(r[key][i] - r["by hand"][i] for r in rounds)
                for i in (0, 1)
            )
            row |= {
                f"{key}_ratio": ratio,
                f"{key}_extra_s": extra,
                f"{key}_host_s": host,
            }
            text += f"   {ratio:6.3f} x {extra * 1e6:+7.0f} us {host * 1e6:+8.0f} us"
        print(text, flush=True)
        if name == "gpt2":
            del loops
            each, row["first_save_s"] = whole_fit(run)
            row["with_checkpoint_ratio"] = each / hand
            print(
                f"fit() with data, log and a checkpoint every 100 steps: "
                f"{row['with_checkpoint_ratio']:.3f} x; "
                f"the first checkpoint costs {row['first_save_s']:.2f} s",
                flush=True,
            )
        answer[name] = row
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
