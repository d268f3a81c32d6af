"""How all processes stop or save at the same step, without waiting for each other.

All processes run the same program, so they pass the same sequence of points: each new phase and
each new step is one. A request is put into the key-value store. A background thread of every
process then publishes the point that its process has reached, and promises that the process will
wait at the next point. One more than the furthest published point is a point that no process can
have passed, and there all of them act.

An agreement between the main threads would not work. One of them may already wait for another in
a collective, and the two would wait for each other forever.
"""

import sys
import threading

from shardwise.cluster.group import ProcessGroup, wait_for

STOP = "stop"
SAVE = "save"


class Agreement:
    """Counts the points that this process passes, and agrees with the others on where to act.

    The main thread calls `advance`, `request`, `is_stopping` and `takes_save`; a background thread
    calls `agree`.

    Args:
        group: the processes of the run, with keys that nobody else uses.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        # Set when the background thread has something to agree on.
        self.wake_up = threading.Event()
        self._count = 0
        # Guards `_count` against `agree`, which must not promise a point that is being passed.
        self._lock = threading.Lock()
        self._requested: set[str] = set()
        # Points that must not be passed before the agreement on a request is known.
        self._gates: dict[str, int] = {}
        # The point where each request is carried out.
        self._agreed: dict[str, int] = {}

    @property
    def count(self) -> int:
        """The number of points that this process has passed."""
        return self._count

    def advance(self) -> None:
        """Pass a point. All processes must pass the same points in the same order."""
        with self._lock:
            self._count += 1

    def request(self, action: str) -> None:
        """Ask that all processes stop or save at the same point.

        Any process may call this alone; it does not wait for the others.

        Args:
            action: `STOP` or `SAVE`.
        """
        # A run stops once but may save often, so requests to save are numbered.
        name = STOP if action == STOP else f"{action}{self._count}"
        self._requested.add(name)
        if self.group.count == 1:
            self._agreed.setdefault(name, self._count)
        else:
            self.group.put(f"ask/{name}", 1)
            self.wake_up.set()

    @property
    def is_stop_requested(self) -> bool:
        """Whether this process knows that one of them has asked to stop."""
        return STOP in self._requested

    def is_stopping(self) -> bool:
        """Return whether all processes stop here. May wait briefly for `agree`."""
        self._wait_at_gate()
        return self._agreed.get(STOP, self._count + 1) <= self._count

    def takes_save(self) -> bool:
        """Return whether all processes save here because one asked for it.

        May wait briefly for `agree`. Returns True once per request.
        """
        self._wait_at_gate()
        due = [
            name
            for name, point in self._agreed.items()
            if name.startswith(SAVE) and point <= self._count
        ]
        for name in due:
            self._agreed[name] = sys.maxsize
        return bool(due)

    def _wait_at_gate(self) -> None:
        """Wait until all requests whose gate is reached are agreed on.

        The wait is short: the background threads agree, whatever the main threads are doing.
        """
        wait_for(
            lambda: all(
                name in self._agreed or self._count < gate
                for name, gate in list(self._gates.items())
            )
        )

    def agree(self) -> bool:
        """Take part in open agreements. Called by the background thread of every process.

        Returns:
            Whether nothing is left to agree on.
        """
        self._requested |= self.group.read("ask").keys()
        for name in self._requested - self._gates.keys():
            with self._lock:
                here = self._count
                self._gates[name] = here + 1
            self.group.put(f"at/{name}/{self.group.index}", here)
        for name in self._gates.keys() - self._agreed.keys():
            points = self.group.read(f"at/{name}")
            if len(points) == self.group.count:
                self._agreed[name] = max(points.values()) + 1
        return self._gates.keys() <= self._agreed.keys()
