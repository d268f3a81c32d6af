"""Batches that are read and placed on the devices ahead of need, by threads or processes."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pickle import PicklingError

from shardwise.data.batches import BatchFunction
from shardwise.data.reuse import Copied, owned
from shardwise.data.stream import Batch, Stream
from shardwise.errors import ConfigError, DataError, Stopped
from shardwise.runtime import protect_output

THREAD = "shardwise-prefetch"
# Seconds between two checks for a signal while waiting for a batch.
POLL = 0.2
# Seconds that `close` waits for threads.
MAX_CLOSE = 1.0


def identity(batch: Batch) -> Batch:
    """Return the batch as it is."""
    return batch


class Prefetch:
    """A function of the step that returns batches prepared in the background.

    `prefetch(step)` returns `place(batches(step))`, for one step after the other. The number of
    workers never changes a batch. An exception of the batch function is raised at the step that
    needs the batch. Arrays of a user's function are copied, so that it may reuse them.

    Args:
        batches: returns the batch of a step.
        first: the first step.
        until: the step after the last.
        place: called with each batch, in a thread of this process; usually puts it on the devices.
            The batch is its own to keep.
        inspect: called with each step and its batch before `place`, in the same thread.
        agree: called with each step before its batch is returned, in the thread of the caller.
        threads: threads that read batches. A `Stream` is always read by one.
        processes: processes that read batches instead of threads. They are spawned, so the batch
            function and all that it refers to must be picklable (no lambda).
        depth: how many batches to prepare in advance; at least one per worker.
        is_stopped: checked while waiting; if true, `Stopped` is raised.
        position: the position of a `Stream` before the first batch.

    Attributes:
        waited: seconds that the caller has waited for batches.
        position: the position of a `Stream` after the batch that was returned last; None for a
            function of the step. Save it with the state that this batch was used for.

    Example:
        >>> with Prefetch(lambda step: step * 2, first=0, until=3) as prefetch:
        ...     [prefetch(step) for step in range(3)]
        [0, 2, 4]
    """

    def __init__(
        self,
        batches: BatchFunction,
        first: int,
        until: int,
        *,
        place: Callable[[Batch], Batch] = identity,
        inspect: Callable[[int, Batch], None] | None = None,
        agree: Callable[[int], None] | None = None,
        threads: int = 1,
        processes: int = 0,
        depth: int = 2,
        is_stopped: Callable[[], bool] = lambda: False,
        position: str | None = None,
    ):
        self.waited = 0.0
        self.position = position
        self._place = place
        self._inspect = inspect
        self._agree = agree
        self._until = until
        self._is_stopped = is_stopped
        # The next step that a worker starts, and the next step that the caller asks for.
        self._next_started = first
        self._next_asked = first
        # Batches with the position after them.
        self._futures: dict[int, Future[tuple[Batch, str | None]]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._children: list[tuple[SpawnProcess, Connection]] = []
        if isinstance(batches, Stream):
            threads, processes = 1, 0
        num_workers = max(processes or threads, 1)
        self._depth = max(depth, num_workers)
        # What comes from another process is new here.
        if processes and isinstance(batches, Copied):
            batches = batches.batches
        elif not processes:
            batches = owned(batches, num_workers, self._depth)
        self._batches = batches
        self._threads = [
            threading.Thread(
                target=self._work, args=(processes > 0,), daemon=True, name=THREAD
            )
            for _ in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, step: int) -> Batch:
        """Return the batch of the next step, and wait for it if necessary.

        Raises:
            DataError: for any other step, or after `close`.
            Stopped: if `is_stopped()` becomes true while waiting.
        """
        if self._is_closed:
            raise DataError(f"batch {step} is needed, but the prefetch is closed.")
        if step != self._next_asked or step >= self._until:
            raise DataError(
                f"batch {step} is needed, but {self._next_asked} is next, and {self._until - 1} is"
                " the last."
            )
        batch, position = self._wait(step)
        if self._agree is not None:
            self._agree(step)
        self.position = position
        return batch

    def _wait(self, step: int) -> tuple[Batch, str | None]:
        start = time.perf_counter()
        with self._changed:
            future = self._futures.setdefault(step, Future())
        try:
            while True:
                try:
                    # A wait without a timeout would keep signals from being handled.
                    return future.result(timeout=POLL)
                except TimeoutError:
                    # The batch function may have raised a TimeoutError as well.
                    if future.done():
                        raise
                if self._is_stopped():
                    raise Stopped(f"stopped by a signal while waiting for batch {step}")
        finally:
            self.waited += time.perf_counter() - start
            with self._changed:
                self._futures.pop(step, None)
                self._next_asked += 1
                self._changed.notify_all()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers: processes are killed, threads may finish their current batch."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            children = list(self._children)
        for child, _ in children:
            child.kill()
        for child, pipe in children:
            child.join()
            pipe.close()
        # A thread inside JAX while the interpreter shuts down would abort the process.
        deadline = time.monotonic() + MAX_CLOSE
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _next_job(self) -> tuple[int, Future[tuple[Batch, str | None]]] | None:
        """Return the next step to prepare, once there is room for it; None at the end."""

        def is_ready() -> bool:
            is_over = self._is_closed or self._next_started >= self._until
            return is_over or self._next_started < self._next_asked + self._depth

        with self._changed:
            self._changed.wait_for(is_ready)
            if self._is_closed or self._next_started >= self._until:
                return None
            step = self._next_started
            self._next_started += 1
            return step, self._futures.setdefault(step, Future())

    def _work(self, in_process: bool) -> None:
        read = self._batches
        while (job := self._next_job()) is not None:
            step, future = job
            try:
                if in_process and read is self._batches:
                    read = self._start_child()
                batch = read(step)
                # One thread alone reads a stream, and it has not read ahead yet.
                position = read.position if isinstance(read, Stream) else None
                future.set_result((self._prepare(step, batch), position))
            except BaseException as error:
                future.set_exception(error)

    def _prepare(self, step: int, batch: Batch) -> Batch:
        if self._inspect is not None:
            self._inspect(step, batch)
        return self._place(batch)

    def _start_child(self) -> BatchFunction:
        """Start a process; return a function that lets it call the batch function."""
        # Forking a process with JAX's threads may deadlock.
        context = multiprocessing.get_context("spawn")
        pipe, child_pipe = context.Pipe()
        child = context.Process(
            target=_serve,
            args=(child_pipe, self._batches),
            daemon=True,
            name="prefetch",
        )
        with self._changed:
            if self._is_closed:
                raise DataError("the prefetch is closed.")
            try:
                child.start()
            except (PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"the data cannot be sent to another process: {error}. Use functions that are"
                    " defined at the top level of a module, or threads."
                ) from None
            self._children.append((child, pipe))
        child_pipe.close()

        def read(step: int) -> Batch:
            try:
                pipe.send(step)
                batch, skipped, error = pipe.recv()
            except (EOFError, OSError):
                child.join(5)
                raise DataError(
                    f"a data process (pid {child.pid}) ended with exit code {child.exitcode} in"
                    f" batch {step}."
                ) from None
            if error is not None:
                raise error
            if skipped:
                # Only functions that count bad records report any.
                self._batches.note(skipped)  # type: ignore[attr-defined]
            return batch

        return read


def _serve(pipe: Connection, batches: BatchFunction) -> None:
    """Read batches in a child process until the parent is gone. It uses no devices."""
    # These signals reach the whole process group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    protect_output()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            return
        batch: Batch = None
        skipped: dict[str, str] = {}
        failure: Exception | None = None
        try:
            batch = batches(step)
            skipped = dict(getattr(batches, "skipped", {}))
        except Exception as error:
            failure = error
        try:
            pipe.send((batch, skipped, failure))
        except (TypeError, AttributeError, ValueError) as error:
            reason = f"batch {step}: {failure or 'it'} cannot be sent between processes: {error}"
            pipe.send((None, {}, DataError(reason)))
