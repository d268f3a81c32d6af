"""What the loop costs beside a hand-written one: `make bench-loop`.

The same model, loss, optimizer and batches, on one device: once as a jitted NNX step in a plain `for` loop, as one would
write it by hand, once through `steps()`, once through all that `fit()` does for a step (finite check, gradient norm,
metrics.jsonl). The three take turns, round after round, so that a noisy machine is noisy for all; each figure is the
median over the rounds of a ratio within one round. `--cases gpt2`, for a GPU, runs `fit()` itself once more, with a checkpoint
of 1.5 GB every 100 steps. The first one counts by itself: it makes the driver pin as much memory of the host, once.

Goal: at most 1.02 times the time for steps of 5 ms or more, and at most 100 microseconds a step of extra host time. That is the
time of the processor in the thread that runs the loop, which is all that an accelerator waits for: on a CPU the program itself, and the
thread that reads ahead, want the same cores.
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
    config = GPTConfig(
        vocab_size=vocab,
        max_length=length,
        num_layers=layers,
        num_heads=heads,
        width=width,
        scan_layers=scan,
    )
    tokens = np.random.default_rng(0).integers(0, 256, 200_000)
    return (lambda rngs: GPT(config, rngs)), Batches(Tokens(tokens, length), rows), dtype


CASES = {  # name: model, data and dtype; from a step that is all overhead to one that is all arithmetic
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
    """A good loop written by hand: plain arrays in nested dictionaries, jitted and donated, the loss read one step late."""

    factory: Any
    batches: Batches
    dtype: str | None

    def __post_init__(self):
        with nnx.use_eager_sharding(False):
            graphdef, params, rest = nnx.split(self.factory(nnx.Rngs(0)), nnx.Param, ...)
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
            step, donate_argnums=0, compiler_options=COMPILER_OPTIONS.get(jax.default_backend())
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
    """`steps()`, reading the loss one step late like the loop by hand."""

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
    """`steps()` with the bookkeeping of `fit()`: every metric of every step fetched and written to a file."""

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
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def whole_fit(run):
    """Seconds of a step of `fit()` as it is used, by the times at which it asks for data: a log, and a save every hundred steps; and
    the seconds that the first save costs."""
    asked = {}

    def data(n):
        asked[n] = time.perf_counter()
        return run.data(n)

    fit(replace(run, data=data, steps=370, out=Path(tempfile.mkdtemp()), save_every=100))
    waits = {n: asked[n + 1] - asked[n] for n in range(60, 360)}
    print(
        "longest: "
        + ", ".join(
            f"{waits[n] * 1e3:.0f} ms at step {n}" for n in sorted(waits, key=waits.get)[:-6:-1]
        ),
        flush=True,
    )
    usual = statistics.median(waits.values())
    return (asked[360] - asked[160]) / 200, asked[160] - asked[60] - 100 * usual


def timed(loop, count):
    """Seconds of a step, and those of this thread in it."""
    start, own = time.perf_counter(), time.thread_time()
    loop.run(count)
    return (time.perf_counter() - start) / count, (time.thread_time() - own) / count


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="of work for each loop in each round"
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
        f"{'step':8s} {'by hand':>12s} {'steps()':>20s} {'host':>11s} {'all of fit()':>22s} {'host':>11s}"
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
        loops = {"by hand": ByHand(factory, batches, dtype), "steps": Ours(run), "fit": Whole(run)}
        for loop in loops.values():
            loop.run(3)
        count = max(20, int(options.seconds / timed(loops["by hand"], 20)[0]))
        rounds = [
            {key: timed(loop, count) for key, loop in loops.items()} for _ in range(options.rounds)
        ]
        hand = statistics.median(r["by hand"][0] for r in rounds)
        row = {"by_hand_s": hand}
        text = f"{name:8s} {hand * 1e3:9.3f} ms"
        for key in ("steps", "fit"):
            ratio = statistics.median(r[key][0] / r["by hand"][0] for r in rounds)
            extra, host = (
                statistics.median(r[key][i] - r["by hand"][i] for r in rounds) for i in (0, 1)
            )
            row |= {f"{key}_ratio": ratio, f"{key}_extra_s": extra, f"{key}_host_s": host}
            text += f"   {ratio:6.3f} x {extra * 1e6:+7.0f} us {host * 1e6:+8.0f} us"
        print(text, flush=True)
        if name == "gpt2":
            del loops
            each, row["first_save_s"] = whole_fit(run)
            row["with_checkpoint_ratio"] = each / hand
            print(
                f"fit() with data, log and a checkpoint every 100 steps: {row['with_checkpoint_ratio']:.3f} x; "
                f"the first one costs {row['first_save_s']:.2f} s",
                flush=True,
            )
        answer[name] = row
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
