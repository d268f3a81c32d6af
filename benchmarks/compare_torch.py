"""Compare the training step of `shardwise train` on a CPU with the same model in PyTorch.

    python -m benchmarks.compare_torch --torch /path/to/python [--json FILE]

`--torch` is a Python interpreter with PyTorch, usually of another virtual environment. Each library
runs in a separate process that answers "go N" with the seconds per step. All libraries run in every
round, in turn, and a ratio compares two times of one round. So other load on the machine affects
all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

THREADS = 2
ROWS, LENGTH, VOCAB, HEADS, WIDTH = 16, 128, 256, 4, 128
# The number of layers of each model.
MODELS = {"4 layers": 4, "2 layers (default recipe)": 2}


def shardwise_step(layers: int) -> Callable[[int], None]:
    """Return a function that runs a number of steps in shardwise."""
    from shardwise.runtime import keep_freed_memory

    # As the command line does, before JAX is imported.
    keep_freed_memory()
    import jax

    from recipes.stdlib_gpt import recipe
    from shardwise import init_state
    from shardwise.models.gpt import GPT, PRESETS
    from shardwise.run import prepare

    config = replace(PRESETS["byte"], num_layers=layers)
    assert (config.vocab_size, config.max_length, config.num_heads, config.width) == (
        VOCAB,
        LENGTH,
        HEADS,
        WIDTH,
    )
    prepared = prepare(
        replace(
            recipe(batch_size=ROWS, length=LENGTH, optimizer="adamw"),
            model=lambda rngs: GPT(config, rngs),
        )
    )
    state, batch = (
        init_state(prepared.spec, 0),
        prepared.step.place(prepared.batches(0)),
    )

    def steps(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = prepared.step(state, batch)
        jax.block_until_ready(metrics)

    return steps


def torch_step(layers: int, compiled: bool) -> Callable[[int], None]:
    """Return a function that runs a number of steps in PyTorch."""
    import torch

    from benchmarks.gpt2_torch import GPT

    torch.set_num_threads(THREADS)
    model = GPT(LENGTH, VOCAB, layers, HEADS, WIDTH)
    loss = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1))

    def steps(count: int) -> None:
        for _ in range(count):
            loss(tokens[:, :-1], tokens[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


def answer(side: str, layers: int) -> None:
    """Answer each line "go N" of standard input with the seconds per step."""
    steps = (
        shardwise_step(layers)
        if side == "shardwise"
        else torch_step(layers, side == "compile")
    )
    for line in sys.stdin:
        count, start = int(line.split()[1]), time.perf_counter()
        steps(count)
        print((time.perf_counter() - start) / count, flush=True)


def ask(child: Any, count: int) -> float:
    """Return the seconds per step of `count` steps in a child process."""
    print("go", count, file=child.stdin, flush=True)
    return float(child.stdout.readline())


def measure(
    layers: int, sides: dict[str, str], rounds: int, count: int
) -> dict[str, list[float]]:
    """Return the seconds per step of each library, one value per round."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(THREADS)}
    words = ["-m", "benchmarks.compare_torch", "--layers", str(layers), "--answer"]
    pipes: Any = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": env,
    }
    children = {
        side: subprocess.Popen([python, *words, side], **pipes)
        for side, python in sides.items()
    }
    for child in children.values():
        # The first steps compile.
        ask(child, 3)
    found = [
        {side: ask(child, count) for side, child in children.items()}
        for _ in range(rounds)
    ]
    for child in children.values():
        child.communicate()
    return {side: [times[side] for times in found] for side in sides}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch", metavar="PYTHON", help="a Python interpreter with PyTorch"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--steps", type=int, default=5, help="steps of each library per round"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.layers)
        return
    sides = {"shardwise": sys.executable} | (
        dict.fromkeys(("eager", "compile"), options.torch) if options.torch else {}
    )
    rows = []
    for name, layers in MODELS.items():
        times = measure(layers, sides, options.rounds, options.steps)
        for side, seconds in times.items():
            ratio = statistics.median(
                ours / other
                for ours, other in zip(times["shardwise"], seconds, strict=True)
            )
            rows.append(
                {
                    "model": name,
                    "side": side,
                    "step_ms": statistics.median(seconds) * 1e3,
                    "shardwise_over_it": ratio,
                }
            )
            print(
                f"{name:26} {side:10} {rows[-1]['step_ms']:7.1f} ms per step; "
                f"shardwise takes {ratio:.2f} times as long",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
