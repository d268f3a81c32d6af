"""Watches over the processes of a run.

All processes stop and save at the same step, a lost process is named, and a stuck one ends them
all. Every process publishes its progress twice per second and reads what is asked of it. See
README.md in this directory for the whole picture.
"""

import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from shardwise.cluster.agreement import STOP, Agreement
from shardwise.cluster.group import (
    HEARTBEAT_TIMEOUT,
    ProcessGroup,
    split_address,
    wait_for,
)
from shardwise.cluster.signals import Stop, on_abort, print_last_words
from shardwise.cluster.stuck import BEAT, Beat, ProcessProgress, StuckDetector
from shardwise.errors import ExitCode, ShardwiseError
from shardwise.files.failpoints import fail_point
from shardwise.rundir.phases import Phase
from shardwise.text import Json

# Seconds without progress after which several processes count as stuck, by default.
DEFAULT_LIMIT = 300.0
# Numbers the watches of this process; all processes create them in the same order.
NUMBERS = itertools.count()
LOST = "lost: killed, suspended or disconnected. The same command resumes."


class _Departure(NamedTuple):
    """How a process has ended."""

    code: int
    reason: str

    @property
    def is_failure(self) -> bool:
        """Whether the others must end too, with the same code."""
        return self.code not in (ExitCode.DONE, ExitCode.STOPPED)


class Watch:
    """Receives the progress of a run, and answers whether to stop or save.

    Use it as a context manager around the run. A single process without a limit has no background
    thread.

    Args:
        group: the processes of the run.
        stop: set by signals.
        limit: seconds without progress after which the run ends with exit code 6; 0 means never.
            None means 300 for several processes and never for one.
        began: when the process started, on the monotonic clock; now if None.

    Attributes:
        group: the processes of the run, with keys of this watch.
        stop: the `Stop` from the arguments.
        folder: the run directory, where the stacks of stuck processes are written. None writes
            them to stderr.
        code: the exit code of this process, once it is known.
        start: `(phase, time)` of each phase up to the first step, on the monotonic clock.
    """

    def __init__(
        self,
        group: ProcessGroup,
        stop: Stop,
        limit: float | None = None,
        began: float | None = None,
    ):
        if limit is None:
            limit = DEFAULT_LIMIT if group.count > 1 else 0.0
        self.group = group.within(f"watch{next(NUMBERS)}")
        self.stop = stop
        self.folder: Path | None = None
        self.code: int | None = None
        self.agreement = Agreement(self.group)
        self.progress = ProcessProgress(limit)
        self.detector = StuckDetector(self.group, limit)
        now = time.monotonic()
        self.start: list[tuple[str, float]] = [
            (Phase.IMPORTING, now if began is None else began)
        ]
        # When the coordinator last answered.
        self._answered = now
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._end_lock = threading.Lock()
        # Looks since a process has failed: this one may be about to report the same itself.
        self._looks_since_failure = 0
        # Rounds of asking the coordinator which processes are alive.
        self._rounds = 0
        self._is_asking = False

    # Called by the run, on the main thread.

    def phase(self, text: str) -> None:
        """Enter a phase of unknown length. All processes must call it in the same order."""
        self.agreement.advance()
        self.progress.enter(text, is_step=False)
        if self.start[-1][0] != Phase.FIRST_STEP:
            name = Phase.FIRST_STEP if Phase.of(text) is Phase.STEP else text
            self.start.append((name, self.progress.moved))

    def tick(self, text: str) -> None:
        """Enter a step, which takes about as long as the others do.

        All processes must call it in the same order.
        """
        self.agreement.advance()
        self.progress.enter(text, is_step=True)

    def ask(self, what: str) -> None:
        """Ask that all processes "stop" or "save" at the same point. Does not block."""
        self.agreement.request(what)

    def is_stopping(self) -> bool:
        """Return whether all processes stop here. May wait briefly for an agreement."""
        if self.stop.requested and self.group.count == 1:
            self.ask(STOP)
        return self.agreement.is_stopping()

    def takes_save(self) -> bool:
        """Return whether all processes save here because one asked for it.

        May wait briefly for an agreement. Returns True once per request.
        """
        return self.agreement.takes_save()

    # Beginning and end.

    def __enter__(self) -> "Watch":
        """Start the background threads."""
        if self.group.count > 1:
            self._answer_aborts()
            self.stop.before_exit.append(lambda: self.leave(ExitCode.STOPPED))
            self._start_thread(self._guard, "guard")
        if self.progress.limit or self.group.count > 1:
            self._start_thread(self._watch, "watch")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave together with the others: in order, or because one of them has failed."""
        if self.group.count == 1:
            self._closing.set()
        elif error is None:
            self._leave_together()
        elif isinstance(error, ShardwiseError):
            self._leave_with(error)
        else:
            # The error may follow from the loss of another process. If so, the watch reports that
            # loss and ends this process during the wait.
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                time.sleep(HEARTBEAT_TIMEOUT + 6 * BEAT)
            self.leave(_exit_code(error), f"{type(error).__name__}: {error}")

    def _leave_together(self) -> None:
        """Wait until all processes have come to the end, then leave."""
        fail_point("end")
        self.phase(Phase.WAITING_TO_END)
        self.group.put(f"end/{self.group.index}", None)
        wait_for(
            lambda: (
                len(self.group.read("end").keys() | self.group.read("left").keys())
                == self.group.count
            )
        )
        self.leave(ExitCode.DONE)
        # No thread should be inside JAX when Python shuts down.
        for thread in self._threads:
            thread.join(timeout=2 * BEAT)

    def _leave_with(self, error: ShardwiseError) -> None:
        """Leave because of an error that the caller will print.

        If the first process has the same error, this one exits here without printing it again.
        """
        departure = _Departure(error.exit_code, str(error))
        self.leave(departure.code, departure.reason)
        # Reading fails if the coordinator is gone.
        with suppress(Exception):
            if not self.group.is_first and wait_for(
                lambda: self.left().get(0) == departure, 2 * BEAT
            ):
                os._exit(departure.code)

    def _start_thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, daemon=True, name=f"shardwise-{name}")
        self._threads.append(thread)
        thread.start()

    # The background thread that publishes progress and reads what the others publish.

    def _watch(self) -> None:
        looked = 0.0
        is_agreed = True
        while not self._closing.is_set():
            self.agreement.wake_up.wait(BEAT if is_agreed else BEAT / 20)
            self.agreement.wake_up.clear()
            try:
                is_agreed = self.group.count == 1 or self.agreement.agree()
                if time.monotonic() - looked >= BEAT:
                    looked = time.monotonic()
                    self._look()
            except Exception:
                if self.group.count == 1:
                    raise
                # The coordinator may be gone; `_guard` reports that.
                continue

    def _look(self) -> None:
        """Publish a beat, read the news, and act on them."""
        mine = self.progress.beat(self.agreement.count)
        self.group.put(f"beat/{self.group.index}", asdict(mine))
        beats = {self.group.index: mine}
        # Two processes judge, so that one of them is left if the other is stuck or lost.
        if self.group.index < 2:
            for index, beat in self.group.read("beat").items():
                beats[int(index)] = Beat(**beat)
        news = self.group.read("news")
        left = self.left()
        self._answered = time.monotonic()
        verdict = self.detector.judge(beats)
        self._pass_on_stop()
        self._follow_failures(left)
        self._check_alive(news, left)
        self._end_if_stuck(news, verdict)

    def _pass_on_stop(self) -> None:
        """Tell the others about a signal to this process, or this process about theirs."""
        if (
            self.stop.requested
            and not self.agreement.is_stop_requested
            and self.group.count > 1
        ):
            self.ask(STOP)
        if self.agreement.is_stop_requested and not self.stop.requested:
            # The first process prints the message.
            if not self.group.is_first:
                self.stop.last_words = ""
            # SIGHUP, because a signal to this process may have arrived since.
            self.stop.take(signal.SIGHUP)

    def _follow_failures(self, left: dict[int, _Departure]) -> None:
        """End this process if another one has failed."""
        failures = {
            index: departure
            for index, departure in left.items()
            if departure.is_failure
        }
        self._looks_since_failure += bool(failures)
        for index, departure in failures.items():
            if self._looks_since_failure > 3:
                text = f"{self.group.name(index)} ended: {departure.reason}"
                self.end(departure.code, text if self.group.is_first else "")

    def _check_alive(self, news: Json, left: dict[int, _Departure]) -> None:
        """Find out whether a silent process is dead or only busy.

        The coordinator knows, but it answers only when all living processes have asked. A note
        under "news" therefore starts a round in which all of them ask.
        """
        rounds = sum(name.startswith("lives") for name in news)
        if self._rounds < rounds:
            self._rounds = rounds
            self._is_asking = True
            self._start_thread(self._ask_who_lives, "lives")
        if self.group.index < 2 and self.group.count > 1:
            silent = [
                index
                for index in range(self.group.count)
                if index not in left
                and self.detector.seconds_since_beat(index) > 4 * BEAT
            ]
            if silent and self._rounds == rounds and not self._is_asking:
                self.group.put(f"news/lives{rounds}", 1)

    def _end_if_stuck(self, news: Json, verdict: str) -> None:
        """End this process if one of them has judged that the run is stuck."""
        if "stuck" in news:
            self._write_stacks()
            self.end(ExitCode.LOST, news["stuck"])
        if verdict:
            self.group.put("news/stuck", verdict)
            if self.group.count == 1:
                self._write_stacks()
                self.end(ExitCode.LOST, verdict)

    def _write_stacks(self) -> None:
        """Write the stacks of all threads of this process."""
        if self.folder is None:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            return
        folder = self.folder / "stacks"
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"process-{self.group.index}.txt").open("w") as file:
            file.write(f"{time.ctime()}: {self.progress.phase}\n")
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _ask_who_lives(self) -> None:
        """Ask the coordinator which processes send heartbeats, and end if one does not.

        Heartbeats are sent by C++ code, so a process that is busy in Python still sends them.
        """
        assert self.group.client is not None
        everyone = list(range(self.group.count))
        try:
            alive = self.group.client.get_live_nodes(everyone)
            lost = sorted(set(everyone) - set(alive) - self.left().keys())
        except Exception:
            # The coordinator is gone; `_guard` reports that.
            lost = []
        self._is_asking = False
        if lost and not self._closing.is_set():
            names = " and ".join(map(self.group.name, lost))
            verb = "is" if len(lost) == 1 else "are"
            self.end(ExitCode.LOST, f"{names} {verb} {LOST}", lost=len(lost))

    # The loss of the coordinator.

    def _guard(self) -> None:
        """End this process if the coordinator does not answer.

        Counts its own turns instead of reading the clock: a process that was suspended has not
        waited for an answer.
        """
        turns = 0
        while not self._closing.wait(BEAT):
            has_answered = time.monotonic() - self._answered < 3 * BEAT
            turns = 0 if has_answered else turns + 1
            if turns * BEAT > HEARTBEAT_TIMEOUT:
                self._end_without_coordinator()

    def _end_without_coordinator(self) -> NoReturn:
        name = f"{self.group.name(0)}, which coordinates the run at {self.group.coordinator},"
        self.end(ExitCode.LOST, f"{name} is {LOST}", tell=False)

    def _answer_aborts(self) -> None:
        """Report the loss of the coordinator in one line instead of a crash.

        JAX aborts a process whose coordinator is gone, from C++, with a stack dump.
        """

        def answer() -> None:
            if self.code is not None:
                os._exit(self.code)
            if not self.group.is_first and not _is_listening(self.group.coordinator):
                self._end_without_coordinator()
            # This is a real crash. Give the output of the C++ code time to appear.
            time.sleep(0.2)

        on_abort(answer)

    # Leaving.

    def left(self) -> dict[int, _Departure]:
        """Return the processes that have ended, with exit code and reason."""
        entries = self.group.read("left").items()
        return {
            int(index): _Departure(code, reason) for index, (code, reason) in entries
        }

    def leave(self, code: int, text: str = "", lost: int = 0) -> None:
        """Tell the others that this process ends.

        The first process also hosts the coordinator, so it waits until the others have left, for
        a limited time.

        Args:
            code: the exit code of this process.
            text: why it ends.
            lost: how many of the others are lost and will not leave.
        """
        self.code = code
        self._closing.set()
        try:
            self.group.put(f"left/{self.group.index}", [code, text])
            if code == ExitCode.STOPPED:
                self.group.put("ask/stop", 1)
            if self.group.is_first:
                wait_for(
                    lambda: len(self.left()) >= self.group.count - lost,
                    8 * BEAT if code else HEARTBEAT_TIMEOUT,
                )
                time.sleep(0.1)
        except Exception:
            # The coordinator is gone, so there is nobody to notify.
            return

    def end(self, code: int, text: str, tell: bool = True, lost: int = 0) -> NoReturn:
        """End this process now, whatever its other threads are doing.

        Args:
            code: the exit code.
            text: printed to stderr, unless empty.
            tell: whether to notify the other processes.
            lost: how many of the others are lost.
        """
        with self._end_lock:
            self.code = code
            try:
                print_last_words(text)
                if tell:
                    self.leave(code, lost=lost)
            finally:
                os._exit(code)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this exception."""
    if not isinstance(error, SystemExit):
        return ExitCode.FAILURE
    if isinstance(error.code, int):
        return error.code
    return ExitCode.DONE if error.code is None else ExitCode.FAILURE


def _is_listening(address: str) -> bool:
    """Return whether somebody accepts connections at "host:port"."""
    try:
        socket.create_connection(split_address(address), timeout=1.0).close()
    except OSError:
        return False
    return True
