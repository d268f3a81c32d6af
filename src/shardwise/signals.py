"""SIGINT and SIGTERM ask a run to stop; they never break into it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EXIT_STOPPED = 75  # EX_TEMPFAIL: a scheduler must not take an unfinished run for a finished one
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Whether a signal came. The first one asks; the second ends the process at once."""

    requested: bool = False
    at_once: bool = False  # there is nothing to lose yet, or no more: the first signal may end the process
    before_exit: list[Callable[[], None]] = field(default_factory=list)  # done before ending at once
    last_words: str = "stopped by a signal before the first step; the same command starts it again."

    def take(self, number: int) -> None:
        if self.at_once or self.requested:
            text = self.last_words if self.at_once else "stopped at once by a second signal; what was saved before is unharmed."
            for action in self.before_exit:
                action()
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{show_cursor}\nshardwise: {text}\n".encode())
            os._exit(EXIT_STOPPED if self.at_once else 128 + number)
        self.requested = True


@contextmanager
def stop_on_signals(*, at_once: bool = False) -> Iterator[Stop]:
    """Within it signals are noted in the `Stop`. A thread of its own listens, so that a long compilation delays nothing."""
    stop = Stop(at_once=at_once)
    if threading.current_thread() is not threading.main_thread():  # signals are somebody else's
        yield stop
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while numbers := os.read(reading, 1):
            if numbers[0] in SIGNALS:
                stop.take(numbers[0])

    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
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
