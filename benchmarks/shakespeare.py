"""Train nanoGPT's character-level GPT with several seeds, and nanoGPT's own train.py next to it.

    python -m benchmarks.shakespeare input.txt --config cpu --seeds 1
    python -m benchmarks.shakespeare input.txt --config gpu --seeds 5 \
        --nanogpt nanoGPT --torch /path/to/python

`input.txt` is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn. `--nanogpt` is a
checkout of github.com/karpathy/nanoGPT, and `--torch` a Python interpreter with PyTorch and NumPy.
Every run is a process. The runs of a seed follow each other: first shardwise, then nanoGPT.

Results are added to a JSON file after each run. The same command skips the runs that the file has,
so it can be stopped and started again. At the end it prints a table.

nanoGPT's train.py runs as it is, in a copy of the checkout. Its seed is fixed (1337), so
`torch.manual_seed` adds the number of the seed. nanoGPT evaluates training and validation data,
and draws other batches for each evaluation. The recipe evaluates validation data only, and the same
batches each time.
"""

import argparse
import json
import pickle
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.record import describe, save
from recipes.shakespeare import CONFIGS, read_characters

ROOT = Path(__file__).parents[1]
# The options of nanoGPT's README for each configuration.
NANOGPT_OPTIONS = {
    "gpu": (),
    "cpu": (
        "--device=cpu",
        "--compile=False",
        "--eval_iters=20",
        "--log_interval=1",
        "--block_size=64",
        "--batch_size=12",
        "--n_layer=4",
        "--n_head=4",
        "--n_embd=128",
        "--dropout=0.0",
    ),
}
PUBLISHED = {"gpu": 1.4697, "cpu": 1.88}
# Runs train.py with another seed.
SEEDED = """
import runpy, sys, torch
seed, manual_seed = int(sys.argv.pop(1)), torch.manual_seed
torch.manual_seed = lambda value: manual_seed(value + seed)
sys.path.insert(0, "")
runpy.run_path("train.py", run_name="__main__")
"""
EVALUATION = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
ITERATION = re.compile(r"iter (\d+): loss")
# Lines of a failed run that are printed.
TAIL = 15


@dataclass(frozen=True)
class Trained:
    """What a run has reached.

    Attributes:
        evaluations: validation losses by step.
        step_ms: median time of a training step.
        first_step_s: time from the start of the process to the end of the first step.
        wall_s: time of the process.
        cpu_s: time of all its threads on CPU cores, which other load hardly changes.
    """

    evaluations: dict[int, float]
    step_ms: float
    first_step_s: float
    wall_s: float
    cpu_s: float


def lines_of(words: list[str], folder: Path, log: Path) -> Iterator[tuple[float, str]]:
    """Run a command; yield each line that it prints, and the seconds since its start.

    Raises:
        RuntimeError: if it fails, with its last lines.
    """
    began = time.perf_counter()
    printed: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            words,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.perf_counter() - began
            file.write(f"{seconds:9.2f} {line}")
            printed.append(line)
            yield seconds, line
    if process.returncode:
        raise RuntimeError(
            f"exit code {process.returncode}:\n{''.join(printed[-TAIL:])}"
        )


def cpu_seconds() -> float:
    """Return the time on CPU cores of all processes that this one has started and awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train_shardwise(
    options: argparse.Namespace, seed: int, steps: int, folder: Path
) -> Trained:
    """Train the recipe with `shardwise train`."""
    words = [
        *(sys.executable, "-u", "-m", "shardwise.cli", "train"),
        *("recipes/shakespeare.py", "--data", str(options.text.resolve())),
        *("--config", options.config, "--steps", str(steps), "--seed", str(seed)),
        *("--out", str(folder / "run")),
    ]
    began, before, cpu_before = time.time(), time.perf_counter(), cpu_seconds()
    for seconds, line in lines_of(words, ROOT, folder / "log.txt"):
        if "validation" in line:
            print(f"{seconds:8.0f} s  {line.rstrip()}", flush=True)
    wall_s = time.perf_counter() - before
    metrics = folder / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    step_s = [record["step_s"] for record in records if "step_s" in record]
    return Trained(
        evaluations={
            record["step"]: record["eval_loss"]
            for record in records
            if "eval_loss" in record
        },
        step_ms=1e3 * statistics.median(step_s),
        first_step_s=records[0]["time"] - began,
        wall_s=wall_s,
        cpu_s=cpu_seconds() - cpu_before,
    )


def train_nanogpt(
    options: argparse.Namespace, seed: int, steps: int, folder: Path
) -> Trained:
    """Train with nanoGPT's train.py."""
    for name in ("train.py", "model.py", "configurator.py", "config"):
        source = options.nanogpt / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    write_nanogpt_data(options.text, folder / "data" / "shakespeare_char")
    words = [
        *(options.torch, "-u", "-c", SEEDED, str(seed)),
        "config/train_shakespeare_char.py",
        *NANOGPT_OPTIONS[options.config],
        *(f"--max_iters={steps}", f"--lr_decay_iters={steps}"),
    ]
    evaluations: dict[int, float] = {}
    iterations: dict[int, float] = {}
    before, cpu_before = time.perf_counter(), cpu_seconds()
    for seconds, line in lines_of(words, folder, folder / "log.txt"):
        if found := EVALUATION.match(line):
            print(f"{seconds:8.0f} s  {line.rstrip()}", flush=True)
            # The evaluation before the first step is of no interest.
            if found[1] != "0":
                evaluations[int(found[1])] = float(found[2])
        elif found := ITERATION.match(line):
            iterations[int(found[1])] = seconds
    wall_s = time.perf_counter() - before
    return Trained(
        evaluations=evaluations,
        step_ms=1e3 * statistics.median(times_between(iterations, evaluations)),
        first_step_s=min(iterations.values()),
        wall_s=wall_s,
        cpu_s=cpu_seconds() - cpu_before,
    )


def times_between(
    iterations: dict[int, float], evaluations: dict[int, float]
) -> Iterator[float]:
    """Yield seconds per step between printed iterations without an evaluation between them.

    Args:
        iterations: the time at which each of them was printed.
        evaluations: by the step before which they were made.
    """
    numbers = sorted(iterations)
    for before, after in pairwise(numbers):
        if not any(before < step <= after for step in evaluations):
            yield (iterations[after] - iterations[before]) / (after - before)


def write_nanogpt_data(text: Path, folder: Path) -> None:
    """Write the files that nanoGPT's prepare.py writes."""
    characters, tokens = read_characters(text)
    alphabet = characters.alphabet
    num_train = int(0.9 * len(tokens))
    folder.mkdir(parents=True)
    tokens[:num_train].astype(np.uint16).tofile(folder / "train.bin")
    tokens[num_train:].astype(np.uint16).tofile(folder / "val.bin")
    meta = {
        "vocab_size": len(alphabet),
        "itos": dict(enumerate(alphabet)),
        "stoi": {character: number for number, character in enumerate(alphabet)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


SIDES = {"shardwise": train_shardwise, "nanoGPT": train_nanogpt}


def measure(options: argparse.Namespace, side: str, seed: int) -> bool:
    """Train one side with one seed, and add the result to the record. Return whether it worked."""
    steps = options.steps or CONFIGS[options.config].steps
    name = f"{side} {options.config} {steps} steps seed {seed}"
    if options.out.exists() and name in json.loads(options.out.read_text()):
        print(f"{name}: measured before")
        return True
    print(f"{name}: starts", flush=True)
    folder = options.out.with_suffix("") / name.replace(" ", "_")
    # Of a run that was stopped. It would resume, and its time would not be that of a run.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        trained = SIDES[side](options, seed, steps, folder)
    except RuntimeError as error:
        print(f"{name}: failed with {error}", flush=True)
        return False
    kind = "cpu" if shutil.which("nvidia-smi") is None else "gpu"
    best_step = min(trained.evaluations, key=trained.evaluations.__getitem__)
    entry = {
        "side": side,
        "config": options.config,
        "steps": steps,
        "seed": seed,
        "best_loss": trained.evaluations[best_step],
        "best_step": best_step,
        "last_loss": trained.evaluations[max(trained.evaluations)],
        **asdict(trained),
        **describe(kind, options.torch if side == "nanoGPT" else None),
    }
    save(options.out, name, entry)
    # Checkpoints are large.
    for part in ("run", "out-shakespeare-char", "data"):
        shutil.rmtree(folder / part, ignore_errors=True)
    print(
        f"{name}: best validation loss {entry['best_loss']:.4f} at step {best_step},"
        f" {trained.step_ms:.2f} ms per step, {trained.wall_s:.0f} s",
        flush=True,
    )
    return True


def table(out: Path, config: str, steps: int) -> str:
    """Return the results of one configuration as a Markdown table."""
    entries = list(json.loads(out.read_text()).values()) if out.exists() else []
    lines = [
        "| | seeds | best validation loss, mean and standard deviation | range | after step |"
        " ms per step | seconds to the first step | seconds in all | seconds on CPU cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for side in SIDES:
        of_side = [
            entry
            for entry in entries
            if (entry["side"], entry["config"], entry["steps"]) == (side, config, steps)
        ]
        if not of_side:
            continue
        losses = [entry["best_loss"] for entry in of_side]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        best_steps = sorted({entry["best_step"] for entry in of_side})

        def median(key: str, of_side: list[dict[str, float]] = of_side) -> float:
            return statistics.median(entry[key] for entry in of_side)

        lines.append(
            f"| {side} | {len(losses)} | {statistics.mean(losses):.4f}{spread} |"
            f" {min(losses):.4f} to {max(losses):.4f} |"
            f" {', '.join(map(str, best_steps))} | {median('step_ms'):.2f} |"
            f" {median('first_step_s'):.1f} | {median('wall_s'):.0f} |"
            f" {median('cpu_s'):.0f} |"
        )
    lines.append(
        f"| published by nanoGPT | 1 | {PUBLISHED[config]} | | | | | about 180 | |"
    )
    return "\n".join(lines)


def main() -> int:
    """Train all seeds of both sides; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--config", choices=tuple(CONFIGS), default="gpu")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, help="fewer steps, to try it")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT")
    parser.add_argument("--torch", help="Python interpreter with PyTorch")
    parser.add_argument("--out", type=Path, default=Path("build/shakespeare.json"))
    options = parser.parse_args()
    if (options.nanogpt is None) != (options.torch is None):
        parser.error("--nanogpt and --torch need each other")
    options.out = options.out.resolve()
    sides = list(SIDES) if options.nanogpt else ["shardwise"]
    worked = [
        measure(options, side, seed) for seed in range(options.seeds) for side in sides
    ]
    print(
        table(
            options.out, options.config, options.steps or CONFIGS[options.config].steps
        )
    )
    return 0 if all(worked) else 1


if __name__ == "__main__":
    sys.exit(main())
