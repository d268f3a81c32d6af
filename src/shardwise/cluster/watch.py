"""Watches over the processes of a run: all stop and save at the same step, a lost one is named, a stuck one ends them all.

Every process says twice a second how far it is, and hears what is asked of it. Being stuck is judged by what is done, not by
the clock alone: only those who are furthest behind can be, and in a phase whose length nobody knows (compiling, loading, saving,
evaluating) only one that neither computes nor reads nor writes.
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
from pathlib import Path
from typing import Any

from shardwise.cluster.group import HEARTBEAT_TIMEOUT as HEARTBEAT
from shardwise.cluster.group import ProcessGroup, split_address, wait_for
from shardwise.cluster.signals import Stop, on_abort, print_last_words
from shardwise.errors import LostError, ShardwiseError, Stopped
from shardwise.files.failpoints import fail_point

BEAT = 0.5  # seconds
LIMIT = 300.0  # seconds without progress, or ten times the longest step if that is more
FIRST_STEP = "first step"
NUMBERS = itertools.count()  # of the watches of this process; the same in all
GONE = "lost: killed, stopped or cut off. The same command resumes."


class Watch:
    """What `fit` tells of its progress, and asks. Alone, without a limit, nothing runs in the background."""

    def __init__(
        self,
        group: ProcessGroup,
        stop: Stop,
        limit: float | None = None,
        began: float | None = None,
    ):
        self.group, self.stop = group.within(f"watch{next(NUMBERS)}"), stop
        self.limit = limit if limit is not None else (LIMIT if group.count > 1 else 0.0)
        self.folder: Path | None = None  # the run directory, where stacks are written
        self.code: int | None = None  # what this process ends with, when that is known
        self._count = 0  # of phases and ticks: the same sequence in all processes
        self._phase, self._is_quick = "starting", False
        self._moved = self._heard = self._began = time.monotonic()
        self.start: list[tuple[str, float]] = [
            ("importing", self._began if began is None else began)
        ]  # phases up to the first step
        self._rounds, self._is_asking = 0, False  # of questions who lives
        self._longest = 0.0  # tick to tick
        self._used = (0.0, 0)
        self._asked: set[str] = set()
        self._gates: dict[str, int] = {}  # not to be passed before it is agreed where
        self._agreed: dict[str, int] = {}
        self._moving = threading.Lock()
        self._hurry = threading.Event()
        self._looks_since_left = 0
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._seen: dict[
            int, tuple[Any, float]
        ] = {}  # the last beat of each process, and when it came
        self._behind, self._waited_since = (
            -1,
            -float("inf"),
        )  # the least count of all, and when it rose to that

    # What the run tells

    def phase(self, text: str) -> None:
        """What is done now takes as long as it takes. All processes call it in the same order."""
        self._move(text, is_quick=False)
        if self.start[-1][0] != FIRST_STEP:
            self.start.append((FIRST_STEP if text.startswith("step ") else text, self._moved))

    def tick(self, text: str) -> None:
        """A step has begun, and takes about as long as the others. All processes call it in the same order."""
        if self._is_quick:
            self._longest = max(self._longest, time.monotonic() - self._moved)
        self._move(text, is_quick=True)

    def _move(self, text: str, is_quick: bool) -> None:
        with self._moving:
            self._count += 1
        self._phase, self._is_quick, self._moved = text, is_quick, time.monotonic()

    # What it asks

    def ask(self, what: str) -> None:
        """That all do `what`, "stop" or "save", at the same point: the first that none of them can have passed."""
        name = what if what == "stop" else f"{what}{self._count}"
        self._asked.add(name)
        if self.group.count == 1:
            self._agreed.setdefault(name, self._count)
        else:
            self.group.put(f"ask/{name}", 1)
            self._hurry.set()

    def is_stopping(self) -> bool:
        """Whether all stop here."""
        if self.stop.requested and self.group.count == 1:
            self.ask("stop")
        self._wait_for_agreement()
        return self._agreed.get("stop", self._count + 1) <= self._count

    def takes_save(self) -> bool:
        """Whether all save here although no step says so."""
        self._wait_for_agreement()
        due = [
            name
            for name, at in self._agreed.items()
            if name.startswith("save") and at <= self._count
        ]
        for name in due:
            self._agreed[name] = sys.maxsize
        return bool(due)

    def _wait_for_agreement(self) -> None:
        """At the gate. It is short: the background agrees, whatever the processes are at."""
        wait_for(
            lambda: all(
                name in self._agreed or self._count < gate
                for name, gate in list(self._gates.items())
            )
        )

    def _agree(self) -> bool:
        """In the background: each process says where it is and promises to wait at the next point; the furthest decides.
        Whether nothing is left to be agreed."""
        self._asked |= self.group.read("ask").keys()
        for name in self._asked - self._gates.keys():
            with self._moving:
                here = self._count
                self._gates[name] = here + 1
            self.group.put(f"at/{name}/{self.group.index}", here)
        for name in self._gates.keys() - self._agreed.keys():
            places = self.group.read(f"at/{name}")
            if len(places) == self.group.count:
                self._agreed[name] = max(places.values()) + 1
        return self._gates.keys() <= self._agreed.keys()

    # The background

    def __enter__(self) -> "Watch":
        if self.group.count > 1:
            self._answer_aborts()
            self.stop.before_exit.append(lambda: self.leave(Stopped.exit_code))
            self._start(self._guard, "guard")
        if self.limit or self.group.count > 1:
            self._start(self._watch, "watch")
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        """All leave together: in order, or because of what one of them tells."""
        if self.group.count == 1:
            self._closing.set()
            return
        if error is None:
            fail_point("end")
            self.phase("waiting for all to end")
            self.group.put(f"end/{self.group.index}", None)
            wait_for(
                lambda: (
                    len(self.group.read("end").keys() | self.group.read("left").keys())
                    == self.group.count
                )
            )
            self.leave(0)
            for thread in self._threads:  # none of them should meet the end of Python inside JAX
                thread.join(timeout=2 * BEAT)
            return
        if isinstance(error, ShardwiseError):
            self.leave(error.exit_code, str(error))
            with suppress(Exception):  # the coordinator is gone
                if not self.group.is_first and wait_for(
                    lambda: self.left().get(0) == (error.exit_code, str(error)), 2 * BEAT
                ):
                    os._exit(error.exit_code)  # the first process says the same
            return
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            time.sleep(
                HEARTBEAT + 6 * BEAT
            )  # it may follow from the loss of another process: then that is told, and this is the end
        self.leave(
            1 if not isinstance(error, SystemExit) else int(error.code or 0),
            f"{type(error).__name__}: {error}",
        )

    def _start(self, target: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True, name=f"shardwise-{name}"))
        self._threads[-1].start()

    def _watch(self) -> None:
        looked, is_agreed = 0.0, True
        while not self._closing.is_set():
            self._hurry.wait(BEAT if is_agreed else BEAT / 20)
            self._hurry.clear()
            try:
                is_agreed = self.group.count == 1 or self._agree()
                if time.monotonic() - looked >= BEAT:
                    looked = time.monotonic()
                    self._look()
            except Exception:
                if self.group.count == 1:
                    raise
                continue  # the coordinator is gone, perhaps; the guard tells

    def _look(self) -> None:
        mine = self._beat()
        self.group.put(f"beat/{self.group.index}", mine)
        beats = (
            {int(i): beat for i, beat in self.group.read("beat").items()}
            if self.group.index < 2
            else {}
        )
        news = self.group.read("news")
        left = self.left()
        self._heard = time.monotonic()
        text = self._judge(beats or {self.group.index: mine})
        if self.stop.requested and "stop" not in self._asked and self.group.count > 1:
            self.ask("stop")
        if "stop" in self._asked and not self.stop.requested:
            if not self.group.is_first:
                self.stop.last_words = ""  # the first process says it
            self.stop.take(signal.SIGTERM)
        self._looks_since_left += any(
            code and code != Stopped.exit_code for code, _ in left.values()
        )
        for index, (code, words) in left.items():
            if (
                code and code != Stopped.exit_code and self._looks_since_left > 3
            ):  # this process may be about to say the same
                self.end(
                    code, f"{self.group.name(index)} ended: {words}" if self.group.is_first else ""
                )
        rounds = sum(name.startswith("lives") for name in news)
        if self._rounds < rounds:
            self._rounds, self._is_asking = rounds, True
            self._start(self._ask_lives, "lives")
        if self.group.index < 2 and self.group.count > 1:
            self._suspect(left, rounds)
        if "stuck" in news:
            self._write_stacks()
            self.end(LostError.exit_code, news["stuck"])
        if text:
            self.group.put("news/stuck", text)
            if self.group.count == 1:
                self._write_stacks()
                self.end(LostError.exit_code, text)

    def _beat(self) -> dict[str, Any]:
        """How far this process is, and for how long it has done nothing."""
        used = (time.process_time(), _bytes_moved())
        if not self._is_quick and (
            used[0] - self._used[0] > 0.1 * BEAT or used[1] - self._used[1] > 2**16
        ):
            self._moved = time.monotonic()
        self._used = used
        limit = max(self.limit, 10 * self._longest) if self._is_quick else self.limit
        return {
            "count": self._count,
            "phase": self._phase,
            "idle": time.monotonic() - self._moved,
            "limit": limit,
        }

    def _judge(self, beats: dict[int, Any]) -> str:
        """Who is stuck, in words; "" if nobody is."""
        now = time.monotonic()
        for index, beat in beats.items():
            if index not in self._seen or self._seen[index][0] != beat:
                self._seen[index] = (beat, now)
        behind = min(beat["count"] for beat in beats.values())
        last = {index: beat for index, beat in beats.items() if beat["count"] == behind}
        if (
            behind != self._behind
        ):  # whoever has waited for others falls behind only when they have passed it
            self._behind, self._waited_since = behind, now if self._behind >= 0 else -float("inf")
        idle = {
            index: min(beat["idle"] + now - self._seen[index][1], now - self._waited_since)
            for index, beat in last.items()
        }
        if (
            not self.limit
            or len(beats) < self.group.count
            or not all(idle[index] > beat["limit"] for index, beat in last.items())
        ):
            return ""
        seconds, phase = min(idle.values()), next(iter(last.values()))["phase"]
        if self.group.count == 1:
            who = "the run is stuck"
        elif len(last) == self.group.count:
            who = "all processes are stuck"
        else:
            who = " and ".join(map(self.group.name, last)) + (
                " is stuck" if len(last) == 1 else " are stuck"
            )
        return f"{who}: {phase}, without progress for {seconds:.0f} s (--watchdog). The same command resumes."

    def _write_stacks(self) -> None:
        """Of all threads of this process."""
        if self.folder is None:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            return
        folder = self.folder / "stacks"
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"process-{self.group.index}.txt").open("w") as file:
            file.write(f"{time.ctime()}: {self._phase}\n")
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _suspect(self, left: dict[int, tuple[int, str]], rounds: int) -> None:
        """Who has not been heard for a while may be dead, or only busy: then the coordinator is asked, by all who live."""
        now = time.monotonic()
        silent = [
            i
            for i in range(self.group.count)
            if i not in left and now - self._seen.get(i, (None, self._began))[1] > 4 * BEAT
        ]
        if silent and self._rounds == rounds and not self._is_asking:
            self.group.put(f"news/lives{rounds}", 1)

    def _ask_lives(self) -> None:
        """JAX's coordinator knows who sends heartbeats; these come from C++ and need no Python. It answers when all who live have asked."""
        everyone = list(range(self.group.count))
        try:
            lost = (
                set(everyone) - set(self.group.client.get_live_nodes(everyone)) - self.left().keys()
            )
        except Exception:
            lost = set()  # the guard tells
        self._is_asking = False
        if lost and not self._closing.is_set():
            names = " and ".join(self.group.name(index) for index in sorted(lost))
            self.end(
                LostError.exit_code,
                f"{names} {'is' if len(lost) == 1 else 'are'} {GONE}",
                lost=len(lost),
            )

    def _guard(self) -> None:
        """Tells when the coordinator does not answer. Counts its own turns: a process that was not let run has not waited."""
        turns = 0
        while not self._closing.wait(BEAT):
            turns = 0 if time.monotonic() - self._heard < 3 * BEAT else turns + 1
            if turns * BEAT > HEARTBEAT:
                self._lost_coordinator()

    def _lost_coordinator(self) -> None:
        where = f"{self.group.name(0)}, which coordinates the run at {self.group.coordinator},"
        self.end(LostError.exit_code, f"{where} is {GONE}", tell=False)

    def _answer_aborts(self) -> None:
        """JAX aborts a process whose coordinator is gone, from C++, with a dump. That is no crash: it is told in a line."""

        def answer() -> None:
            if self.code is not None:
                os._exit(self.code)
            if not self.group.is_first and not _answers(self.group.coordinator):
                self._lost_coordinator()
            time.sleep(0.2)  # a crash, then: until what C++ has printed is out

        on_abort(answer)

    # The end

    def left(self) -> dict[int, tuple[int, str]]:
        """Those who have ended: (exit code, why)."""
        return {int(index): (code, text) for index, (code, text) in self.group.read("left").items()}

    def leave(self, code: int, text: str = "", lost: int = 0) -> None:
        """Tells the others, of whom so many are lost. The first process is the coordinator, too, and lets them go before."""
        self.code = code
        self._closing.set()
        try:
            self.group.put(f"left/{self.group.index}", [code, text])
            if code == Stopped.exit_code:
                self.group.put("ask/stop", 1)
            if self.group.is_first:
                wait_for(
                    lambda: len(self.left()) >= self.group.count - lost,
                    8 * BEAT if code else HEARTBEAT,
                )
                time.sleep(0.1)
        except Exception:
            return  # there is nobody to tell

    def end(self, code: int, text: str, tell: bool = True, lost: int = 0) -> None:
        """Ends this process now, whatever its other threads are at."""
        with self._lock:
            self.code = code
            print_last_words(text)
            if tell:
                self.leave(code, lost=lost)
            os._exit(code)


def _bytes_moved() -> int:
    """Read and written by this process so far, where the system tells."""
    try:
        lines = Path("/proc/self/io").read_text().split()
        return int(lines[1]) + int(lines[3])
    except (OSError, IndexError, ValueError):
        return 0


def _answers(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=1.0).close()
        return True
    except OSError:
        return False
