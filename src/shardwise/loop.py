"""The training loop as a generator, and exact evaluation.

There are no callbacks: the body of your `for` statement is the place for everything that happens
between steps.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial, reduce

import jax

from shardwise.cluster.group import current_group
from shardwise.data.batches import Batches, as_batches, is_plain
from shardwise.data.contract import DataCheck
from shardwise.data.prefetch import Prefetch
from shardwise.errors import DataError
from shardwise.metrics import Mean
from shardwise.state import TrainState
from shardwise.step import Batch, BatchLayout, EvalStep, Metrics, TrainStep, num_rows

# Numbers the calls of `steps`; all processes make them in the same order.
NUMBERS = itertools.count()


def steps(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Batch] | Iterable[Batch] | Prefetch,
    *,
    until: int,
) -> Iterator[tuple[int, TrainState, Metrics]]:
    """Yield `(n, state, metrics)` after each update, from step `state.step + 1` to step `until`.

    Nothing here waits for the devices, unless the loss has checks. The metrics are arrays that may
    still be computed, and the next batches are read and placed in the background. The state that
    was yielded is donated to the next step, so copy what you want to keep. If a batch cannot be
    read, the error is raised when the batch is needed, after all steps before it have been yielded.

    Args:
        step: the training step.
        state: the state to start from; it is donated.
        batches: a function from the step number to a host batch, an iterable of host batches, or a
            `Prefetch`. With several processes each of them supplies the global batch, or only
            the examples of its devices if `step.layout` is that of `BatchLayout.per_process`.
        until: the number of the last step.

    Raises:
        DataError: if a batch cannot be read, or if the batches of several processes contradict
            each other.
        CheckError: if a check in the model or the loss failed. Its step is not yielded.

    Example:
        >>> for n, state, metrics in steps(step, state, Batches(data, 32), until=1000):
        ...     if n % 100 == 0:
        ...         print(n, float(metrics["loss"]))
    """
    n = int(state.step)
    prefetch: AbstractContextManager[Callable[[int], Batch]]
    if isinstance(batches, Prefetch):
        prefetch = batches
    else:
        group = current_group().within(f"steps{next(NUMBERS)}")
        check = DataCheck(group, step.layout, n)
        prefetch = Prefetch(
            as_batches(batches),
            n,
            until,
            # A `Prefetch` owns its batches already.
            place=partial(step.layout.place, copy=False),
            inspect=check.inspect,
            agree=check.agree,
        )
    with prefetch as placed:
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
    """Return the exact weighted mean of the loss and of each metric over all batches.

    Args:
        step: the evaluation step.
        state: the state to evaluate.
        batches: host batches of any number and size. With `Batches`, every example of its source
            counts exactly once.
        rows: the size of the largest batch, if sizes differ; by default that of the first batch.
        before: a function that is called before each batch.

    Raises:
        DataError: if there are no batches.
        ConfigError: if the loss cannot be averaged over several batches.
        CheckError: if a check in the model or the loss failed.

    Example:
        >>> step = make_eval_step(spec, loss, batch)
        >>> evaluate(step, state, Batches(validation, 32))["loss"]
    """
    parts: list[dict[str, Mean]] = []
    sizes: set[int] = set()
    for layout, batch in _with_layouts(step, batches, rows):
        before()
        if parts and (len(parts) == 1 or layout.rows not in sizes):
            step.check_sizes({*sizes, layout.rows})
        sizes.add(layout.rows)
        parts.append(step.on(state, batch, layout, len(parts)))
    if not parts:
        raise DataError(
            "the evaluation data has no batches, so there is nothing to evaluate."
        )
    # All results are fetched at once. Python adds them in float64, so that the order of the batches
    # hardly matters.
    on_host: list[dict[str, Mean]] = jax.tree.map(float, jax.device_get(parts))
    sums = reduce(_add, on_host)
    return {name: float(mean.value) for name, mean in sums.items()}


def _add(left: dict[str, Mean], right: dict[str, Mean]) -> dict[str, Mean]:
    return {name: mean + right[name] for name, mean in left.items()}


def _with_layouts(
    step: EvalStep, batches: Batches | Iterable[Batch], rows: int | None
) -> Iterator[tuple[BatchLayout, Batch]]:
    """Yield each batch with its layout; of plain `Batches` only the examples this process needs."""
    if is_plain(batches):
        total = len(batches.source)
        for first in range(0, total, batches.batch_size):
            size = min(batches.batch_size, total - first)
            layout = step.layout(size, batches.batch_size).per_process()
            yield layout, batches.in_order(first, layout.ranges)
        return
    # A subclass of `Batches` that builds batches itself.
    if isinstance(batches, Batches):
        rows, batches = batches.batch_size, batches.once()
    for batch in batches:
        size = num_rows(batch)
        rows = rows or size
        yield step.layout(size, rows), batch
