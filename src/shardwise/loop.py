"""The loop is a generator: the hook system is the body of your `for` statement."""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import jax

from shardwise.data.batches import Batches, as_batches, is_plain
from shardwise.data.prefetch import Prefetch
from shardwise.errors import DataError
from shardwise.metrics import Mean
from shardwise.state import TrainState
from shardwise.step import Batch, BatchLayout, EvalStep, TrainStep, num_rows


def steps(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Batch] | Iterable[Batch] | Prefetch,
    *,
    until: int,
) -> Iterator[tuple[int, TrainState, dict[str, jax.Array]]]:
    """Yields (n, state, metrics) after each update, n counting from where `state` stands up to `until`.

    Nothing here waits for the devices: the metrics are arrays that may still be under way, and the batches of the next
    steps are read and placed in the background. The state that was yielded before is donated to the next step. A batch
    that cannot be had raises where it is needed, after everything before it has been yielded.
    """
    n = int(state.step)
    with (
        batches
        if isinstance(batches, Prefetch)
        else Prefetch(as_batches(batches), n, until, place=step.place) as placed
    ):
        while n < until:
            state, metrics = step(state, placed(n))
            n += 1
            yield n, state, metrics


def evaluate(
    step: EvalStep,
    state: TrainState,
    batches: Batches | Iterable[Batch],
    *,
    rows: int | None = None,
    before: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Exact weighted means over batches of any number and length; `rows` is the largest batch, if they differ.

    With `Batches`, every row of the source counts once. `before` is called before each batch.
    """
    parts: list[dict[str, Mean]] = []
    for layout, batch in _with_layouts(step, batches, rows):
        before()
        parts.append(step.on(state, batch, layout))
    if not parts:
        raise DataError("there is nothing to evaluate: no batch came.")
    sums = reduce(lambda a, b: {name: a[name] + b[name] for name in a}, _on_host(parts))
    return {name: float(mean.value) for name, mean in sums.items()}


def _with_layouts(
    step: EvalStep, batches: Batches | Iterable[Batch], rows: int | None
) -> Iterator[tuple[BatchLayout, Batch]]:
    """Each batch, or of `Batches` the part of it that this process needs, and how it is placed."""
    if is_plain(batches):
        total = len(batches.source)
        for first in range(0, total, batches.batch_size):
            layout = step.layout(min(batches.batch_size, total - first), batches.batch_size)
            yield layout, batches.in_order(first, layout.ranges)
        return
    if isinstance(batches, Batches):  # made its own way
        rows, batches = batches.batch_size, batches.once()
    for batch in batches:
        rows = rows or num_rows(batch)
        yield step.layout(num_rows(batch), rows), batch


def _on_host(parts: Any) -> Any:
    """Fetched in one go, and added in float64 by Python, so that the order of batches hardly matters."""
    return jax.tree.map(float, jax.device_get(parts))
