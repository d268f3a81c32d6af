"""What C++ code prints, and how it takes memory.

JAX's libraries tell much that is no news, and the rest as dumps.
"""

import ctypes
import os
import re
import sys
import threading
from typing import Any

COMPILED = "/backend_compile_duration"  # the end of the event that JAX records after a compilation
PIECE, HEADER = 16 << 10, 32  # bytes that fill a gap, and at most between two of them that lie side by side
ROW = 64  # pieces side by side: 1 MiB is no gap
MAX_PIECES = 1 << 15
NOISE = re.compile(
    rb"^$|.*(is connected to|peer ranks\. Expected number of connected)|^(\[Gloo\] Rank )+$"  # gloo's threads write into each other's lines
    rb"|^[WE]\d{4} .*(coordination_service|recoverable task)"  # what becomes of processes is told by shardwise
    rb"|^F\d{4} .*JAX distributed service detected fatal errors"
    rb"|^(Additional GRPC error information|:UNKNOWN:|:UNAVAILABLE:|RPC: /xla|The tasks have crashed|\d+$)"
    rb"|^\*\*\* Check failure stack trace"
    rb"|^    @ +0x[0-9a-f]+ "
)


def filter_native_output() -> None:
    """From now on what C++ code prints passes a filter; `sys.stdout` and `sys.stderr` print as before."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        real = os.dup(number)
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        threading.Thread(target=_relay, args=(reading, real), daemon=True, name=f"shardwise-{name}").start()


def _relay(reading: int, real: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not NOISE.match(line):
                os.write(real, line)


def keep_freed_memory() -> None:
    """Memory that is freed stays with the process. For computing on CPUs, before JAX has started its threads.

    XLA takes the temporaries of a step in one piece and gives it back at its end. glibc takes large pieces from the system each time,
    and every page that is touched for the first time costs as much as computing on it: a fifth of a step of the default recipe.
    All threads then share what a compilation has left in pieces, which is why its gaps are filled.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # glibc has it
        return
    m_arena_max, m_mmap_max, m_trim_threshold = -8, -4, -1
    libc.mallopt(m_arena_max, 1)  # other arenas hold no more than 64 MiB
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)
    from jax import monitoring

    gaps = Gaps(libc)
    monitoring.register_event_duration_secs_listener(lambda event, *_, **__: gaps.fill() if event.endswith(COMPILED) else None)


class Gaps:
    """Holds the free memory that lies between pieces in use, so that a search for some never passes it.

    A compilation leaves thousands of such gaps. XLA's products ask for 2,000 buffers a step of the default recipe, and glibc looks
    for each in a sorted list of them: a twelfth of the step.
    """

    def __init__(self, libc: Any):
        self.malloc, self.free = libc.malloc, libc.free
        self.malloc.restype, self.malloc.argtypes, self.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        self.held: list[int] = []
        self.lock = threading.Lock()

    def fill(self) -> None:
        """glibc gives the smallest gaps first. Where many pieces in a row lie side by side, there is no gap any more."""
        with self.lock:
            while self.held:
                self.free(self.held.pop())
            row = 0
            while row < ROW and len(self.held) < MAX_PIECES and (at := self.malloc(PIECE)):
                row = row + 1 if self.held and 0 < at - self.held[-1] <= PIECE + HEADER else 1
                self.held.append(at)
            for _ in range(row):
                self.free(self.held.pop())


def has_accelerator() -> bool:
    """Whether this machine seems to have a GPU or a TPU, as far as that can be told without JAX."""
    return any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "accel0", "vfio/0"))
