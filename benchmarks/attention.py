"""Time attention on a Hopper GPU, next to cuDNN, and compare its results with plain JAX.

    python -m benchmarks.attention

Forward and backward pass in bfloat16. cuDNN's is measured twice: as it is, and in its deterministic
version. Long rows are measured as one document and as packed documents of 2,048 tokens on average.
Ratios are those of one process. One line of JSON each.
"""

import json
import subprocess
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import milliseconds, normal
from shardwise import attention
from shardwise.kernels.mask import Mask, same_document
from shardwise.step.deterministic import OPTIONS

Array = jax.Array
Attention: TypeAlias = Callable[[Array, Array, Array], Array]

# Sequences, tokens, heads and head width.
SHAPES = (64, 1024, 12, 64), (16, 1024, 16, 128), (1, 16_384, 12, 64)
LENGTHS = 4096, 16_384, 65_536
DOCUMENT = 2048
# Masks, query heads for each key head, and the mean length of documents, for comparisons.
CASES = (
    (Mask(), 1, None),
    (Mask(), 4, 150),
    (Mask(causal=False), 2, 150),
    (Mask(window=200), 1, None),
    (Mask(causal=False, window=200), 2, 50),
)


def documents(shape: tuple[int, int], mean: int = DOCUMENT) -> Array:
    """Return segment ids (B, T) of documents with random lengths."""
    ends = np.random.default_rng(0).random(shape) < 1 / mean
    return jnp.asarray(np.cumsum(ends, axis=1).astype(np.int32))


def with_gradients(function: Attention) -> Callable[..., tuple[Array, ...]]:
    """Return a function of q, k, v and the gradient of the output: the output and gradients."""

    def run(q: Array, k: Array, v: Array, grad: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(function, q, k, v)
        return (out, *pull(grad))

    return run


def plain(q: Array, k: Array, v: Array, mask: Mask, ids: Array | None) -> Array:
    """Return attention in float32, with all scores in memory."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest")
    position = jnp.arange(q.shape[1])
    visible = mask.visible(position, position)[None, None]
    if ids is not None:
        visible &= same_document(ids, ids)
    scores = jnp.where(visible, scores * q.shape[3] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("bhts,bshk->bthk", weights, v, precision="highest")


def compare(mask: Mask, group: int, mean: int | None, width: int) -> dict[str, object]:
    """Return how far results are from plain JAX, and whether a second call has the same bits."""
    shape = 2, 1024
    heads = 4, 4 // group, 4 // group, 4
    q, k, v, grad = (normal(i, (*shape, h, width)) for i, h in enumerate(heads))
    ids = None if mean is None else documents(shape, mean)

    def kernel(q: Array, k: Array, v: Array) -> Array:
        return attention(
            q, k, v, causal=mask.causal, window=mask.window, segment_ids=ids
        )

    run = jax.jit(with_gradients(kernel))
    found, again = run(q, k, v, grad), run(q, k, v, grad)
    expected = with_gradients(lambda *x: plain(*x, mask, ids))(
        q, k, v, grad.astype(jnp.float32)
    )
    errors = {
        name: float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    }
    is_same = all((a == b).all() for a, b in zip(found, again, strict=True))
    return {
        "causal": mask.causal,
        "window": mask.window,
        "documents": mean,
        "group": group,
        "width": width,
        **{name: float(f"{error:.1e}") for name, error in errors.items()},
        "same_bits": bool(is_same),
    }


def time_all(shape: tuple[int, ...]) -> dict[str, object]:
    """Return milliseconds of ours and of cuDNN's attention."""
    arrays = [normal(i, shape) for i in range(4)]

    def cudnn(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )

    functions = {
        "forward": jax.jit(attention),
        "all": jax.jit(with_gradients(attention)),
        "cudnn_forward": jax.jit(cudnn),
        "cudnn_all": jax.jit(with_gradients(cudnn)),
        "cudnn_deterministic": jax.jit(with_gradients(cudnn), compiler_options=OPTIONS),
    }
    record: dict[str, object] = {"shape": shape}
    for name, function in functions.items():
        args = arrays[:3] if "forward" in name else arrays
        record[name] = round(milliseconds(function, *args, calls=20), 4)
    return record


def time_documents(length: int) -> dict[str, object]:
    """Return milliseconds and MiB of temporaries for one document, and for packed documents."""
    arrays = [normal(i, (1, length, 12, 64)) for i in range(4)]
    record: dict[str, object] = {"tokens": length}
    for name, ids in (("one", None), ("packed", documents((1, length)))):

        def kernel(q: Array, k: Array, v: Array, ids: Array | None = ids) -> Array:
            return attention(q, k, v, segment_ids=ids)

        compiled = jax.jit(with_gradients(kernel)).lower(*arrays).compile()
        memory = compiled.memory_analysis()
        record[f"{name}_ms"] = round(milliseconds(compiled, *arrays, calls=5), 3)
        record[f"{name}_mib"] = round(memory.temp_size_in_bytes / 2**20, 1)
    return record


def main() -> None:
    """Print the comparisons and the times."""
    query = "name,driver_version,clocks.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    card = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(json.dumps({"jax": jax.__version__, "card": card.strip()}), flush=True)
    for shape in SHAPES:
        print(json.dumps(time_all(shape)), flush=True)
    for length in LENGTHS:
        print(json.dumps(time_documents(length)), flush=True)
    for width in (64, 128):
        for case in CASES:
            print(json.dumps(compare(*case, width)), flush=True)


if __name__ == "__main__":
    main()
