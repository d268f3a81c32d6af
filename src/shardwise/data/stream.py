"""Batches of an iterator, and the position of the iterator after each of them."""

import base64
import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from shardwise.data import grain
from shardwise.errors import DataError

# A pytree of arrays; `shardwise.tree` has the same alias, but imports JAX.
Batch: TypeAlias = Any


def copied(batch: Batch) -> Batch:
    """Return `batch` with copies of its NumPy arrays. JAX arrays cannot change and stay."""
    # Data processes import this module, and they need no JAX.
    import jax

    return jax.tree.map(
        lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch
    )


class Stream:
    """Batches from an iterable, one step after the other.

    An iterator with `get_state` and `set_state`, as those of Grain have, can resume: its state
    after each batch is in `position`. Any other iterator cannot. The arrays are copied, so the
    iterable may fill the same arrays again for its next batch.

    Args:
        iterable: yields one batch per step.

    Attributes:
        position: the state of the iterator after the current batch, as JSON; None before the first
            batch, or if it cannot be saved.
        problem: why the position cannot be saved; None if it can.

    Example:
        >>> stream = Stream(dataset)  # doctest: +SKIP
        >>> stream(0)
        >>> saved = stream.position
        >>> Stream(dataset).resume(1, saved)
    """

    def __init__(self, iterable: Iterable[Batch]):
        grain.prepare_workers(iterable)
        self._iterator: Any = iter(iterable)
        # The user may continue to use an iterator that was passed. Others are closed at the latest
        # when Python exits, before it ends the worker processes.
        is_owner = grain.is_iterator(self._iterator) and not hasattr(
            iterable, "__next__"
        )
        self._close: Callable[[], object] = lambda: None
        if is_owner:
            self._close = weakref.finalize(self, grain.close, self._iterator)
        self._step = -1
        self._batch: Batch = None
        self.position: str | None = None
        self.problem: str | None = None
        if not all(
            hasattr(self._iterator, name) for name in ("get_state", "set_state")
        ):
            kind = type(iterable).__name__
            self.problem = f"the data is a {kind}, which has no get_state and set_state"

    def __call__(self, step: int) -> Batch:
        """Return the batch of the next step, or of the current one again.

        Raises:
            DataError: if the iterable has ended, or for any other step.
        """
        if step == self._step + 1:
            try:
                self._batch = copied(next(self._iterator))
            except StopIteration:
                raise DataError(
                    f"the data ended after {step} batches; batch {step} is needed. Repeat the data "
                    "(Grain: dataset.repeat()), or train for fewer steps."
                ) from None
            self._step = step
            # Before the next batch is read: reading ahead moves the iterator.
            self.position = self._read_position()
        elif step != self._step:
            raise DataError(
                f"batch {step} is needed, but a plain iterator is at batch {self._step + 1} and"
                " cannot resume. Use a function of the step, such as Batches(...), or a dataset of"
                " Grain."
            )
        return self._batch

    def resume(self, step: int, position: str) -> None:
        """Return to a position, and read the batch of `step`, the next one.

        Args:
            step: the number of batches before the position.
            position: the value of `position` after `step` batches.

        Raises:
            DataError: if the iterator cannot return to a position, or not to this one.
        """
        if self.problem is not None:
            raise DataError(
                f"{self.problem}, so it cannot return to step {step}. Use a function of the step, "
                "such as Batches(...), or a dataset of Grain."
            )
        try:
            self._iterator.set_state(_decode(position))
            self._step = step - 1
            # Grain notices only here that a state belongs to another number of workers.
            self(step)
        except DataError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"the data iterator cannot return to its position at step {step}: {reason}. The "
                "position fits only the pipeline that saved it: use the same source, "
                "transformations and number of workers."
            ) from error

    def close(self) -> None:
        """Stop threads and worker processes of an iterator that this object has made."""
        self._close()

    def _read_position(self) -> str | None:
        if self.problem is not None:
            return None
        try:
            return _encode(self._iterator.get_state())
        except (TypeError, ValueError) as error:
            self.problem = f"the state of the data iterator is not JSON: {error}"
            return None


def _encode(state: object) -> str:
    """Return the state of an iterator as JSON. No pickle: reading it must not run code."""
    if isinstance(state, bytes):
        return json.dumps({"base64": base64.b64encode(state).decode()})
    return json.dumps({"json": state}, default=_as_python)


def _as_python(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it has a {type(value).__name__}")


def _decode(position: str) -> object:
    value = json.loads(position)
    return base64.b64decode(value["base64"]) if "base64" in value else value["json"]
