"""Time attention over long rows of packed documents, next to one document of the same length.

    python -m benchmarks.packed

Forward and backward pass in bfloat16, 12 heads of width 64, documents of 2,048 tokens on average.
Ratios are those of one process.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import milliseconds, normal
from shardwise import attention

Array = jax.Array
HEADS, HEAD_WIDTH, DOCUMENT = 12, 64, 2048
LENGTHS = (4096, 16_384, 65_536)


def gradients(
    q: Array, k: Array, v: Array, segment_ids: Array | None
) -> tuple[Array, ...]:
    """Return the gradients of queries, keys and values."""
    out, pull = jax.vjp(lambda *x: attention(*x, segment_ids=segment_ids), q, k, v)
    return tuple(pull(out))


def documents(length: int) -> Array:
    """Return segment ids (1, T) of documents with random lengths."""
    ends = np.random.default_rng(0).random(length) < 1 / DOCUMENT
    return jnp.asarray(np.cumsum(ends)[None].astype(np.int32))


def main() -> None:
    """Print one line of JSON for each length, with and without documents."""
    for length in LENGTHS:
        shape = (1, length, HEADS, HEAD_WIDTH)
        q, k, v = (normal(seed, shape) for seed in range(3))
        for name, segment_ids in (("one", None), ("packed", documents(length))):
            record: dict[str, object] = {"tokens": length, "documents": name}
            try:
                compiled = jax.jit(gradients).lower(q, k, v, segment_ids).compile()
                memory = compiled.memory_analysis()
                record["temporaries_mib"] = round(memory.temp_size_in_bytes / 2**20, 1)
                ms = milliseconds(compiled, q, k, v, segment_ids, calls=5)
                record["ms"] = round(ms, 3)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
