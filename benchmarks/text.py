"""Text and schedule of benchmarks, the same for every library: batch n is a function of n alone."""

import numpy as np

# The usual schedule of GPT-2 124M. At 200 steps the rate is 6e-5; at a constant 3e-4 two PyTorch models part by 3 % themselves.
FIRST_RATE, RATE, WARMUP = 0.0, 6e-4, 2000


def stdlib_tokens() -> np.ndarray:
    """The source code of Python's standard library, byte for byte."""
    from shardwise import stdlib_bytes

    return np.asarray(stdlib_bytes()[0])  # what there is to train on; the rest is held out


def steps_between_looks(count: int) -> int:
    """At the clock, which makes the host wait for the device."""
    return max(1, min(20, count // 4))


def batch(tokens: np.ndarray, n: int, rows: int, length: int) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(n).integers(0, len(tokens) - length - 1, rows)
    windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}
