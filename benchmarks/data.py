"""Compare tokens per second from a memory-mapped file with hand-written NumPy: `make bench-data`.

The two hand-written loops receive random window numbers that are computed before the clock starts.
They gather windows from the same memory map and return the same int32 inputs and labels. The first
loop uses `sliding_window_view`, as most people would. The second uses the method of `Tokens`: each
window is one item that is copied at once. `Batches` also computes the window numbers and checks the
file.

All loops run in turn, batch by batch. They are timed in CPU seconds, so other load on the machine
has little effect. A round is long enough for `Batches` to compute its share of the shuffle. Ratios
are relative to the first loop, as the median over rounds. Packed batches and `Prefetch` (in wall
time) are timed too.

Goal: at least 0.9 of the hand-written loop for sequences of 1,024 tokens, and at least 5 million
tokens per second.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import grain
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardwise.data import Batches, Packed, Prefetch, Tokens, open_tokens
from shardwise.data.shuffle import order

ROWS = 64


def turns(functions, first, count, clock=time.thread_time):
    """Return the seconds of each function for `count` batches, in turn, each at different steps."""
    seconds = [0.0] * len(functions)
    for step in range(first, first + count):
        for number, function in enumerate(functions):
            start = clock()
            function(step + number * 10**6)
            seconds[number] += clock() - start
    return seconds


def through_prefetch(batches, first, count):
    """Return the wall seconds of `count` batches read through `Prefetch`."""
    with Prefetch(batches, first, first + count + 1) as prefetch:
        prefetch(first)
        return turns([prefetch], first + 1, count, clock=time.perf_counter)[0]


def compare(file, length, rounds, count):
    """Return tokens per second of each loop, and ratios to the first loop."""
    tokens = Tokens(file, length)
    batches = Batches(tokens, ROWS)
    packed = Batches(
        Packed(file, length, np.append(np.arange(0, len(file), 700), len(file))), ROWS
    )
    memory_map = np.asarray(np.memmap(file.path, np.uint16, "r"))
    windows = sliding_window_view(memory_map, length + 1)[::length]

    def by_hand(step):
        rows = windows[numbers[step]].astype(np.int32)
        return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}

    pieces = np.ndarray(
        len(tokens),
        np.dtype((np.void, 2 * length + 2)),
        memory_map,
        strides=(2 * length,),
    )

    def by_trick(step):
        rows = (
            pieces[numbers[step - 10**6 + count]]
            .view(np.uint16)
            .reshape(-1, length + 1)
            .astype(np.int32)
        )
        return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}

    times = []
    for first in range(0, rounds * count, count):
        # The second loop has another order, so that the windows of the first are not in the cache.
        numbers = {
            step: order(len(tokens), step * ROWS, (step + 1) * ROWS, 0)
            for step in range(first, first + 2 * count)
        }
        assert all(
            np.array_equal(by_hand(first)[name], batches(first)[name])
            for name in ("inputs", "labels")
        )
        hand, trick, ours = turns([by_hand, by_trick, batches], first, count)
        times.append(
            {
                "by hand": hand,
                "trick": trick,
                "batches": ours,
                "packed": turns([packed], first, count // 8)[0] * 8,
            }
        )
        times[-1]["prefetch"] = through_prefetch(batches, first, count)
    speed = {
        name: count * ROWS * length / statistics.median(entry[name] for entry in times)
        for name in times[0]
    }
    ratio = {
        name: statistics.median(entry["by hand"] / entry[name] for entry in times)
        for name in times[0]
    }
    return {"tokens_s": speed, "ratio": ratio}


def shuffle_costs(size=10**7, count=2**14):
    """Return microseconds per example of Grain's shuffle, one index at a time, and of ours."""
    one = grain.experimental.index_shuffle
    start = time.perf_counter()
    for index in range(count):
        one(index, max_index=size - 1, seed=1, rounds=4)
    by_grain = (time.perf_counter() - start) / count
    start = time.perf_counter()
    order(size, 0, 8 * count, seed=1)
    return {
        "grain_us": by_grain * 1e6,
        "ours_us": (time.perf_counter() - start) / (8 * count) * 1e6,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--count", type=int, default=1024, help="batches of each loop per round"
    )
    parser.add_argument("--megabytes", type=int, default=256, help="size of the file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(
            0, 50257, options.megabytes * 2**19, np.uint16
        ).tofile(path)
        file = open_tokens(path, "uint16")
        answer = {"shuffle": shuffle_costs()}
        print(
            "shuffle, per example: Grain {grain_us:.2f} us, shardwise {ours_us:.3f} us".format(
                **answer["shuffle"]
            )
        )
        print(
            f"batches of {ROWS} sequences; median of {options.rounds} rounds; "
            "million tokens/s, and relative to the first loop"
        )
        print(
            f"{'length':>6s} {'NumPy':>9s} {'NumPy, items':>18s} {'Batches':>18s} "
            f"{'Packed':>18s} {'Prefetch, 1 thread':>18s}"
        )
        for length in (128, 1024):
            row = answer[str(length)] = compare(
                file, length, options.rounds, options.count
            )
            parts = [
                f"{row['tokens_s'][name] / 1e6:9.0f} {row['ratio'][name]:6.2f} x"
                for name in ("trick", "batches", "packed", "prefetch")
            ]
            print(
                f"{length:6d} {row['tokens_s']['by hand'] / 1e6:9.0f} {' '.join(parts)}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
