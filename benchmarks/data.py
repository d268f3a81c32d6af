"""Tokens a second from a memory-mapped file beside hand-written NumPy: `make bench-data`.

The loops by hand are given their random row numbers, made before the clock starts. They take windows from the same map in
one gather and make the same int32 inputs and labels: the first as one would write it, with `sliding_window_view`; the
second with the trick that `Tokens` uses, each window as one item that is copied in one piece. `Batches` computes the row
numbers, too, and checks the file. They take turns, batch after batch, and are timed in seconds of the CPU, so that other
work on the machine counts little; a round is long enough for `Batches` to compute its share of the shuffle. Each ratio
is to the first loop, the median over rounds. Packed batches and `Prefetch` (by the wall clock) are timed beside them.

Goal: at least 0.9 of the loop by hand for rows of 1,024 tokens, and at least 5 million tokens a second.
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
    """Seconds for `count` batches of each function, from step `first` on. They take turns batch by batch, each with steps of its own."""
    seconds = [0.0] * len(functions)
    for step in range(first, first + count):
        for number, function in enumerate(functions):
            start = clock()
            function(step + number * 10**6)
            seconds[number] += clock() - start
    return seconds


def through_prefetch(batches, first, count):
    with Prefetch(batches, first, first + count + 1) as prefetch:
        prefetch(first)
        return turns([prefetch], first + 1, count, clock=time.perf_counter)[0]


def compare(file, length, rounds, count):
    tokens = Tokens(file, length)
    batches = Batches(tokens, ROWS)
    packed = Batches(Packed(file, length, np.append(np.arange(0, len(file), 700), len(file))), ROWS)
    memory_map = np.asarray(np.memmap(file.path, np.uint16, "r"))
    windows = sliding_window_view(memory_map, length + 1)[::length]

    def by_hand(step):
        rows = windows[numbers[step]].astype(np.int32)
        return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}

    pieces = np.ndarray(
        len(tokens), np.dtype((np.void, 2 * length + 2)), memory_map, strides=(2 * length,)
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
        # For the second loop in another order, so that it does not find the rows of the first in the cache.
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
    """Microseconds a row: Grain's shuffle, which takes one index at a time, and ours."""
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
    parser.add_argument("--count", type=int, default=1024, help="batches for each in each round")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50257, options.megabytes * 2**19, np.uint16).tofile(
            path
        )
        file = open_tokens(path, "uint16")
        answer = {"shuffle": shuffle_costs()}
        print(
            "a row of the shuffle: Grain {grain_us:.2f} us, ours {ours_us:.3f} us".format(
                **answer["shuffle"]
            )
        )
        print(
            f"batches of {ROWS} rows; median of {options.rounds} rounds; M tokens/s, and of the loop by hand"
        )
        print(
            f"{'length':>6s} {'by hand':>9s} {'by hand, trick':>18s} {'Batches':>18s} {'Packed':>18s} {'Prefetch, 1 thread':>18s}"
        )
        for length in (128, 1024):
            row = answer[str(length)] = compare(file, length, options.rounds, options.count)
            parts = [
                f"{row['tokens_s'][name] / 1e6:9.0f} {row['ratio'][name]:6.2f} x"
                for name in ("trick", "batches", "packed", "prefetch")
            ]
            print(
                f"{length:6d} {row['tokens_s']['by hand'] / 1e6:9.0f} {' '.join(parts)}", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
