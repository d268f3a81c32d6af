"""How to distinguish a stuck process from one that is busy or waits for another.

Progress is judged by what a process does, not by the clock alone. Only the processes that are
furthest behind can be stuck; the others wait for them. In a step, which should be short, stuck
means much longer than steps take. In a phase of unknown length (compiling, loading, saving,
evaluating) it means that the process neither computes nor reads nor writes.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.cluster.group import ProcessGroup
from shardwise.rundir.phases import Phase

# Seconds between two beats of a process.
BEAT = 0.5
# A step is stuck after this many times the longest step so far, if that exceeds the limit.
STEP_FACTOR = 10
# A process works if it computes for more than this share of a beat,
BUSY_SHARE = 0.1
# or reads and writes more than this many bytes in a beat.
BUSY_BYTES = 2**16


@dataclass(frozen=True)
class Beat:
    """What a process publishes twice per second.

    Attributes:
        count: how many phases and steps it has entered; the same sequence in all processes.
        phase: the current one, as text.
        idle: seconds without progress.
        limit: seconds without progress after which it counts as stuck.
    """

    count: int
    phase: str
    idle: float
    limit: float


class ProcessProgress:
    """The current phase of this process, and the time since its last progress.

    Args:
        limit: seconds without progress after which a process counts as stuck.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.phase: str = Phase.STARTING
        # When the process last made progress.
        self.moved = time.monotonic()
        self._is_step = False
        self._longest_step = 0.0
        # CPU seconds, and bytes read and written.
        self._used = (0.0, 0)

    def enter(self, phase: str, is_step: bool) -> None:
        """Note that a phase has begun.

        Args:
            phase: the phase, as text.
            is_step: it takes about as long as other steps do.
        """
        now = time.monotonic()
        if self._is_step and is_step:
            self._longest_step = max(self._longest_step, now - self.moved)
        self.phase = phase
        self._is_step = is_step
        self.moved = now

    def beat(self, count: int) -> Beat:
        """Return the state of this process; work since the last call counts as progress."""
        seconds, moved_bytes = time.process_time(), _bytes_moved()
        is_busy = (
            seconds - self._used[0] > BUSY_SHARE * BEAT
            or moved_bytes - self._used[1] > BUSY_BYTES
        )
        if is_busy and not self._is_step:
            self.moved = time.monotonic()
        self._used = (seconds, moved_bytes)
        limit = self.limit
        if self._is_step:
            limit = max(limit, STEP_FACTOR * self._longest_step)
        return Beat(count, self.phase, time.monotonic() - self.moved, limit)


class StuckDetector:
    """Decides from the beats of all processes which of them are stuck.

    Args:
        group: the processes of the run.
        limit: seconds without progress; 0 turns the detection off.
    """

    def __init__(self, group: ProcessGroup, limit: float):
        self.group = group
        self.limit = limit
        self._created = time.monotonic()
        # The last beat of each process, and when it arrived.
        self._last: dict[int, tuple[Beat, float]] = {}
        # The smallest count of all processes, and when it became that.
        self._smallest = -1
        self._smallest_since = -float("inf")

    def seconds_since_beat(self, index: int) -> float:
        """Return for how long nothing new was heard from a process."""
        _, heard = self._last.get(index, (None, self._created))
        return time.monotonic() - heard

    def judge(self, beats: Mapping[int, Beat]) -> str:
        """Return who is stuck, as a sentence for people; "" if nobody is.

        Args:
            beats: the newest beat of each process that has published one.
        """
        now = time.monotonic()
        for index, beat in beats.items():
            if index not in self._last or self._last[index][0] != beat:
                self._last[index] = (beat, now)
        smallest = min(beat.count for beat in beats.values())
        behind = {
            index: beat for index, beat in beats.items() if beat.count == smallest
        }
        # A process that has waited for others falls behind only when they pass it. Its own idle
        # time therefore counts from that moment.
        if smallest != self._smallest:
            self._smallest_since = now if self._smallest >= 0 else -float("inf")
            self._smallest = smallest
        idle = {}
        for index, beat in behind.items():
            unheard = now - self._last[index][1]
            idle[index] = min(beat.idle + unheard, now - self._smallest_since)
        if not self.limit or len(beats) < self.group.count:
            return ""
        if not all(idle[index] > beat.limit for index, beat in behind.items()):
            return ""
        phase = next(iter(behind.values())).phase
        return (
            f"{self._subject(list(behind))}: {phase}, without progress for "
            f"{min(idle.values()):.0f} s (--watchdog). The same command resumes."
        )

    def _subject(self, indices: list[int]) -> str:
        if self.group.count == 1:
            return "the run is stuck"
        if len(indices) == self.group.count:
            return "all processes are stuck"
        verb = "is" if len(indices) == 1 else "are"
        return f"{' and '.join(map(self.group.name, indices))} {verb} stuck"


def _bytes_moved() -> int:
    """Return how many bytes this process has read and written so far; 0 if unknown."""
    try:
        words = Path("/proc/self/io").read_text().split()
        return int(words[1]) + int(words[3])
    except (OSError, IndexError, ValueError):
        return 0
