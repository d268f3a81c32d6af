"""A mean that can be summed exactly, and the log of a run with one JSON object for every step."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """`total / weight`, kept apart so that parts of a batch add up to the whole.

    A loss returns it with an entry for each row, or for each token of each row (first dimension: the rows of the
    batch), or already summed. Only with an entry for each row can a batch be padded, since only then can shardwise
    leave the padding out. A weight of fewer dimensions than the total holds for each entry of it: `Mean(nats)` is the
    plain mean.
    """

    total: Any
    weight: Any = 1.0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> Any:
        return self.total / self.weight

    def summed(self, mask: Any = None) -> "Mean":
        """Both parts summed in float32, without the rows where `mask` is False."""
        return Mean(_masked_sum(self.total, mask), _masked_sum(self._weights(), mask))

    def has_rows(self, rows: int) -> bool:
        """Whether there is an entry for each row."""
        return all(
            jnp.ndim(x) > 0 and jnp.shape(x)[0] == rows for x in (self.total, self._weights())
        )

    @property
    def items(self) -> int | None:
        """What the weights add up to as far as it is known while tracing: a mask counts as if it were all ones. None if it is not."""
        entries = max(jnp.size(self.total), jnp.size(self.weight))
        if isinstance(self.weight, jax.core.Tracer):
            return entries if jnp.ndim(self.weight) else None
        return round(float(np.mean(self.weight)) * entries)

    def _weights(self) -> Any:
        if jnp.ndim(self.weight) >= jnp.ndim(self.total):
            return self.weight
        missing = jnp.ndim(self.total) - jnp.ndim(self.weight)
        return jnp.broadcast_to(
            jnp.reshape(self.weight, (*jnp.shape(self.weight), *(1,) * missing)),
            jnp.shape(self.total),
        )


def _masked_sum(x: Any, mask: Any) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if mask is not None and x.ndim:
        x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    return x.sum()


class MetricsLog:
    """`metrics.jsonl`, or another file of records with a "step": appended to while the run goes on, cut back when it resumes at `step`."""

    def __init__(self, path: Path, step: int = 0):
        lines = read_metrics(path) if path.exists() else []
        self.seen = max(
            (record["step"] for record in lines), default=0
        )  # the last step before it was cut
        self.kept = [record for record in lines if record["step"] <= step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Numbers that are not finite are written as text, since JSON has none."""
        finite = {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a log; lines that are none, such as a last one that a crash cut short, are left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
