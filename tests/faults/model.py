"""The model and the data of the fault experiments, in plain NNX and NumPy.

The model has every kind of state that a resume could lose: dropout, batch statistics, a cache and
a custom variable. All of them change at every step.
"""

import errno
import hashlib
import itertools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx


class Seen(nnx.Variable):
    """Number of tokens that the model was trained on: a custom kind of variable."""


class Block(nnx.Module):
    """A residual block with batch statistics and dropout."""

    def __init__(self, width: int, dropout: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * width, momentum=0.9, param_dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class Model(nnx.Module):
    """Predicts the next token from the last one and the mean of all previous ones."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        dropout: float,
        dtype: str,
        renamed: bool,
        rngs: nnx.Rngs,
    ):
        kind = jnp.dtype(dtype)
        self.tokens = nnx.Embed(vocabulary, width, param_dtype=kind, rngs=rngs)
        self.blocks = nnx.List(
            [Block(width, dropout, kind, rngs) for _ in range(depth)]
        )
        head = nnx.Linear(width, vocabulary, param_dtype=kind, rngs=rngs)
        setattr(self, "output" if renamed else "head", head)
        self.seen = Seen(jnp.zeros((), jnp.float32))
        self.last = nnx.Cache(jnp.zeros(width, jnp.float32))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.tokens(inputs)
        x = (
            x
            + jnp.cumsum(x, 1)
            / jnp.arange(1, inputs.shape[1] + 1, dtype=x.dtype)[:, None]
        )
        for block in self.blocks:
            x = block(x)
        self.seen[...] = self.seen[...] + inputs.size
        self.last[...] = x.mean((0, 1)).astype(jnp.float32)
        return (self.head if hasattr(self, "head") else self.output)(x)


@jax.custom_vjp
def amplify(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `x` unchanged. Its gradient is multiplied by `factor`, which may be infinite."""
    return x


amplify.defvjp(
    lambda x, factor: (x, factor),
    lambda factor, g: (g * factor, jnp.zeros_like(factor)),
)


def entries(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the loss of each token in nats, times the weight of its example."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    nats = (
        jax.nn.logsumexp(logits, -1)
        - jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
    )
    return amplify(nats * batch["weight"][:, None], batch["amplify"][:, None])


def corpus(records: int, length: int, vocabulary: int) -> np.ndarray:
    """Return a noisy walk that is long enough for `records` windows.

    A model can learn it, and it is the same on every machine.
    """
    size = records * length + (records > 0)
    rng = np.random.default_rng(1234)
    steps = rng.integers(0, 3, size) + (rng.random(size) < 0.1) * rng.integers(
        0, vocabulary, size
    )
    return (np.cumsum(steps) % vocabulary).astype(np.uint16)


def poison(
    batch: dict[str, np.ndarray], nan: bool, infinite: bool
) -> dict[str, np.ndarray]:
    """Return the batch with one example whose loss is NaN, or whose gradient is infinite."""
    weight, factor = (
        np.ones(len(batch["inputs"]), np.float32),
        np.ones(len(batch["inputs"]), np.float32),
    )
    weight[0] = np.nan if nan else 1
    factor[0] = np.inf if infinite else 1
    return {**batch, "weight": weight, "amplify": factor}


def note(step: int, batch: dict[str, np.ndarray]) -> None:
    """Append the step and the digest of its batch to the file that BATCH_LOG names.

    A single write, so that a kill cannot leave a partial line.
    """
    if path := os.environ.get("BATCH_LOG"):
        digest = hashlib.sha256(
            b"".join(
                name.encode() + np.ascontiguousarray(batch[name]).tobytes()
                for name in sorted(batch)
            )
        )
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{step} {digest.hexdigest()}\n".encode())
        os.close(handle)


def break_save() -> None:
    """Let Orbax fail in the save with the number in BREAK_SAVE, in this process alone."""
    number = int(os.environ.get("BREAK_SAVE", 0))
    handler = ocp.StandardCheckpointHandler
    save, numbers = handler.async_save, itertools.count(1)

    async def broken(*args: object, **named: object) -> object:
        if next(numbers) == number:
            raise OSError(errno.EIO, "Input/output error")
        return await save(*args, **named)

    handler.async_save = broken


def wait_for_data(step: int, pause: float, stall_at: int) -> None:
    """Pause before every batch. At step `stall_at`, wait as long as the file in STALL exists."""
    time.sleep(pause)
    stall = os.environ.get("STALL")
    if step == stall_at and stall:
        Path(stall + ".reached").touch()
        while Path(stall).exists():
            time.sleep(0.02)
