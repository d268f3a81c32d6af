"""SIGINT and SIGTERM ask a run to stop; they never break into it."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

EXIT_STOPPED = 75  # EX_TEMPFAIL: a scheduler must not take an unfinished run for a finished one
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Whether a signal came. The first one asks; the second ends, the process if it is ours (`may_exit`), else by the usual handler."""

    may_exit: bool = False
    requested: bool = False
    at_once: bool = (
        False  # there is nothing to lose yet, or no more: the first signal may end the process
    )
    before_exit: list[Callable[[], None]] = field(
        default_factory=list
    )  # done before ending at once
    last_words: str = "stopped by a signal before the first step; the same command starts it again."

    def take(self, number: int) -> None:
        if self.may_exit and (self.at_once or self.requested):
            text = (
                self.last_words
                if self.at_once
                else "stopped at once by a second signal; what was saved before is unharmed."
            )
            for action in self.before_exit:
                action()
            last_words(text)
            os._exit(EXIT_STOPPED if self.at_once else 128 + number)
        self.requested = True


def last_words(text: str) -> None:
    """Before the process ends at once, from whatever thread."""
    if not text:
        return
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(sys.stderr.fileno(), f"{show_cursor}\nshardwise: {text}\n".encode())


_KEPT: list[Any] = []  # C holds a pointer to it


def on_abort(answer: Callable[[], None]) -> None:
    """From now on calls `answer` when C++ code aborts this process, from whatever thread; if that returns, the process dies as it would."""
    _KEPT[:] = [*_KEPT[-1:], ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: answer())]
    ctypes.CDLL(None).signal(signal.SIGABRT, _KEPT[-1])


@contextmanager
def stop_on_signals(*, may_exit: bool = False) -> Iterator[Stop]:
    """Within it signals are noted in the `Stop`. A thread of its own listens, so that a long compilation delays nothing.

    may_exit: the process is there for this run alone, and may end at once as long as there is nothing to lose.
    """
    stop = Stop(may_exit=may_exit, at_once=may_exit)
    if threading.current_thread() is not threading.main_thread():  # signals are somebody else's
        yield stop
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    seen: list[int] = []

    def listen() -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] in SIGNALS:
                stop.take(numbers[0])

    def handle(number: int, frame: Any) -> None:
        """Runs when Python gets to it; the first time there is nothing left to do."""
        seen.append(number)
        usual = previous[number]
        if len(seen) > 1 and not may_exit:
            signal.signal(number, usual)
            if callable(usual):
                usual(number, frame)
            else:
                os.kill(os.getpid(), number)

    previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, handle)
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="shardwise-signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number in SIGNALS:
            signal.signal(number, previous[number])
        os.close(writing)
        thread.join()
        os.close(reading)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Within it signals do nothing but to be added to the list: for who looks after processes, and passes them on."""
    heard: list[int] = []
    usual = {
        number: signal.signal(number, lambda number, _: heard.append(number)) for number in SIGNALS
    }
    try:
        yield heard
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
