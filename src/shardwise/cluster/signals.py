"""Signals ask a run to stop; they never interrupt it in the middle of something.

Python runs signal handlers between bytecodes, and a compilation can take minutes without one. A
wake-up descriptor and a thread therefore receive signals at once. Before the first step there is
nothing to lose, and the process ends. Later the training loop is asked to save and stop.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeAlias

from shardwise.errors import ExitCode

EXIT_STOPPED = ExitCode.STOPPED
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler: TypeAlias = (
    Callable[[int, FrameType | None], object] | int | signal.Handlers | None
)


@dataclass
class Stop:
    """Whether a signal has asked this run to stop.

    The first signal is a request. The second ends the process if `may_exit` is set; otherwise it
    goes to the handler that was installed before. SIGHUP is always a request only, because it
    often comes twice: from the shell and from the terminal, or when the parent process is killed,
    once for each of its threads.

    Attributes:
        may_exit: the process exists for this run alone, so a signal may end it.
        requested: a signal has arrived.
        at_once: there is nothing to lose, so the first signal may end the process.
        before_exit: called, in order, before a signal ends the process.
        last_words: printed when a signal ends the process while `at_once` is set.
    """

    may_exit: bool = False
    requested: bool = False
    at_once: bool = False
    before_exit: list[Callable[[], None]] = field(default_factory=list)
    last_words: str = (
        "stopped by a signal before the first step; the same command starts it again."
    )

    def take(self, number: int) -> None:
        """Handle a signal. Any thread may call this; it may not return."""
        is_repeated = self.requested and number != signal.SIGHUP
        if self.may_exit and (self.at_once or is_repeated):
            if self.at_once:
                text = self.last_words
                code = int(ExitCode.STOPPED)
            else:
                text = "stopped at once by a second signal; earlier checkpoints are intact."
                code = 128 + number
            try:
                for action in self.before_exit:
                    action()
                print_last_words(text)
            finally:
                os._exit(code)
        self.requested = True


def print_last_words(text: str) -> None:
    """Print a final line to stderr, from any thread, right before the process exits.

    A terminal or a pipe that is gone does not matter.
    """
    if not text:
        return
    # `sys.stderr` may be None, closed, or not a file.
    with suppress(OSError, ValueError, AttributeError):
        # A progress bar may have hidden the cursor of the terminal.
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{show_cursor}\nshardwise: {text}\n".encode())


# C holds pointers to these callbacks, so they must not be garbage-collected. The previous one is
# kept too, because another thread may be running it.
_ABORT_CALLBACKS: list[object] = []


def on_abort(answer: Callable[[], None]) -> None:
    """Call `answer` when C++ code aborts this process.

    Args:
        answer: called on the thread that aborts. If it returns, the process dies from SIGABRT.
    """
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: answer())
    _ABORT_CALLBACKS[:] = [*_ABORT_CALLBACKS[-1:], callback]
    ctypes.CDLL(None).signal(signal.SIGABRT, callback)


@contextmanager
def stop_on_signals(*, may_exit: bool = False) -> Iterator[Stop]:
    """Record SIGINT, SIGTERM and SIGHUP in a `Stop` for the duration of a `with` block.

    A separate thread listens, so that a long call into C delays nothing. Outside the main thread
    the block changes nothing, because signals belong to whoever runs the main thread.

    Args:
        may_exit: the process exists for this run alone. It may end at once as long as there is
            nothing to lose, and on a second signal.

    Yields:
        The `Stop` that the signals set.
    """
    stop = Stop(may_exit=may_exit, at_once=may_exit)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while data := os.read(reading, 1):
            if data[0] in SIGNALS:
                stop.take(data[0])

    previous = _install_handlers(may_exit)
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="shardwise-signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def _handled_signals() -> list[signal.Signals]:
    """Return the signals to handle: not SIGHUP if `nohup` started this process."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in SIGNALS if n != signal.SIGHUP or not is_nohup]


def _install_handlers(may_exit: bool) -> dict[int, Handler]:
    """Install Python's side of the handlers, and return the previous ones.

    The thread of `stop_on_signals` does the work. If the process is not ours, a second signal goes
    to the previous handler, which is then active again.
    """
    previous: dict[int, Handler] = {
        number: signal.getsignal(number) for number in _handled_signals()
    }
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if may_exit or len(received) == 1 or number == signal.SIGHUP:
            return
        handler = previous[number]
        signal.signal(number, handler)
        if callable(handler):
            handler(number, frame)
        else:
            os.kill(os.getpid(), number)

    for number in previous:
        signal.signal(number, handle)
    return previous


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list, for a parent that passes them on.

    Yields:
        The list of signal numbers, which grows with every signal.
    """
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in _handled_signals()
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
