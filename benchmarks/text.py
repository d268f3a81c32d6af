"""Text and schedule of the benchmarks, the same for every library. Batch n depends only on n."""

import numpy as np

# The usual schedule of GPT-2 124M. After 200 steps the rate is 6e-5. At a constant 3e-4, the losses
# of the two PyTorch models differ by 3 %.
FIRST_RATE, RATE, WARMUP = 0.0, 6e-4, 2000


def stdlib_tokens() -> np.ndarray:
    """Return the training bytes of the source code of Python's standard library."""
    from shardwise import stdlib_bytes

    return np.asarray(stdlib_bytes()[0])


def steps_between_looks(count: int) -> int:
    """Return how many steps to time at once: reading the clock waits for the device."""
    return max(1, min(20, count // 4))


def batch(tokens: np.ndarray, n: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Return batch `n`: `rows` sequences of `length` tokens."""
    starts = np.random.default_rng(n).integers(0, len(tokens) - length - 1, rows)
    windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}
