"""Batches made ahead of need, in threads or in processes, and placed where they will be used."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pickle import PicklingError
from typing import Any

from shardwise.data.batches import Stream
from shardwise.errors import ConfigError, DataError, Stopped

THREAD = "shardwise-prefetch"


def identity(batch: Any) -> Any:
    return batch


class Prefetch:
    """`prefetch(step)` is `place(batches(step))`, for one step after the other from `first` to before `until`.

    Up to `depth` batches are made before they are asked for, by `threads` threads here or by `processes` processes,
    which are spawned: the batch function, its source and decode functions must then be such as can be sent to another
    process (no lambda). `place` always runs in a thread here. How many work never changes a batch. A `Stream` is
    called by one thread only. What the batch function raises is raised at the step that asks for that batch. Waiting ends with
    Stopped when `is_stopped()` says so.
    """

    def __init__(
        self,
        batches: Callable[[int], Any],
        first: int,
        until: int,
        *,
        place: Callable[[Any], Any] = identity,
        threads: int = 1,
        processes: int = 0,
        depth: int = 2,
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        self.waited = 0.0  # seconds that the caller has waited for batches
        self._batches, self._place, self._until, self._is_stopped = (
            batches,
            place,
            until,
            is_stopped,
        )
        self._next = self._asked = first  # the step to begin next; the step that is asked for next
        self._futures: dict[int, Future[Any]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._children: list[Any] = []
        if isinstance(batches, Stream):
            threads, processes = 1, 0
        workers = max(processes or threads, 1)
        self._depth = max(depth, workers)
        self._threads = [
            threading.Thread(target=self._work, args=(processes > 0,), daemon=True, name=THREAD)
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, step: int) -> Any:
        if self._closed or step != self._asked or step >= self._until:
            state = (
                "the prefetch is closed"
                if self._closed
                else f"{self._asked} comes next, and {self._until - 1} is the last"
            )
            raise DataError(f"batch {step} was asked for; {state}.")
        start = time.perf_counter()
        with self._changed:
            future = self._futures.setdefault(step, Future())
        try:
            while not future.done():
                wait([future], timeout=0.2)  # not for ever, so that signals are heard
                if self._is_stopped():
                    raise Stopped(f"stopped by a signal while waiting for batch {step}")
            return future.result()
        finally:
            self.waited += time.perf_counter() - start
            with self._changed:
                self._futures.pop(step, None)
                self._asked += 1
                self._changed.notify_all()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers: processes are killed, threads finish what they are at, and are waited for, but not long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            children = list(self._children)
        for child, _ in children:
            child.kill()
        for child, pipe in children:
            child.join()
            pipe.close()
        deadline = time.monotonic() + 1.0
        for (
            thread
        ) in self._threads:  # one that is inside JAX when Python ends would abort the process
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _take(self) -> tuple[int, Future[Any]] | None:
        """The next step to make a batch for, when there is room for it; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._next >= self._until
                    or self._next < self._asked + self._depth
                )
            )
            if self._closed or self._next >= self._until:
                return None
            step = self._next
            self._next += 1
            return step, self._futures.setdefault(step, Future())

    def _work(self, in_process: bool) -> None:
        call = self._batches
        while (taken := self._take()) is not None:
            step, future = taken
            try:
                if in_process and call is self._batches:
                    call = self._start_child()
                future.set_result(self._place(call(step)))
            except BaseException as error:
                future.set_exception(error)

    def _start_child(self) -> Callable[[int], Any]:
        """A function that has a new process call the batch function."""
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork of a process with JAX's threads may hang
        ours, theirs = context.Pipe()
        child = context.Process(
            target=_serve, args=(theirs, self._batches), daemon=True, name="prefetch"
        )
        with self._changed:
            if self._closed:
                raise DataError("the prefetch is closed.")
            try:
                child.start()
            except (PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"the data cannot be sent to another process: {error}. Use functions that have a name in a module, or threads."
                ) from None
            self._children.append((child, ours))
        theirs.close()

        def call(step: int) -> Any:
            try:
                ours.send(step)
                batch, skipped, error = ours.recv()
            except (EOFError, OSError):
                child.join(5)
                raise DataError(
                    f"a data process (pid {child.pid}) ended with exit code {child.exitcode} in batch {step}."
                ) from None
            if error is not None:
                raise error
            if skipped:
                self._batches.note(skipped)  # type: ignore[attr-defined]
            return batch

        return call


def _serve(pipe: Any, batches: Callable[[int], Any]) -> None:
    """A process that makes batches until its parent is gone. Devices are the parent's business."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent decides
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = batches(step), dict(getattr(batches, "skipped", {})), None
        except Exception as error:
            answer = None, {}, error
        try:
            pipe.send(answer)
        except (
            TypeError,
            AttributeError,
            ValueError,
        ) as error:  # what cannot be sent to another process
            pipe.send(
                (
                    None,
                    {},
                    DataError(
                        f"batch {step}: {answer[2] or 'it'} cannot be sent between processes: {error}"
                    ),
                )
            )
