"""Text and schedule of benchmarks, the same for every library: batch n is a function of n alone."""

import numpy as np

FIRST_RATE, RATE, WARMUP = 1e-6, 1e-4, 100  # a gentle rate: at three times this two PyTorch models part by 3 % themselves
CHUNK = 20  # steps between two looks at the clock


def stdlib_tokens() -> np.ndarray:
    """The source code of Python's standard library, byte for byte."""
    from shardwise import stdlib_bytes

    return np.asarray(stdlib_bytes()[0])  # what there is to train on; the rest is held out


def batch(tokens: np.ndarray, n: int, rows: int, length: int) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(n).integers(0, len(tokens) - length - 1, rows)
    windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}
