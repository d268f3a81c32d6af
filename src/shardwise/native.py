"""What C++ code prints, and how it takes memory.

JAX's libraries tell much that is no news, and the rest as dumps.
"""

import ctypes
import os
import re
import sys
import threading

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
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        m_arena_max, m_mmap_max, m_trim_threshold = -8, -4, -1
        mallopt(m_arena_max, 1)  # other arenas hold no more than 64 MiB
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def has_accelerator() -> bool:
    """Whether this machine seems to have a GPU or a TPU, as far as that can be told without JAX."""
    return any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "accel0", "vfio/0"))
