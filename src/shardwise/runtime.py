"""What C++ code prints, and how it takes memory.

JAX's libraries tell much that is no news, and the rest as dumps.
"""

import ctypes
import os
import re
import stat
import sys
import threading
from pathlib import Path
from typing import Any

from shardwise.files.cache import cache_folder

MAX_CACHE_BYTES = 8 * 2**30  # bytes that the folder may hold; the longest unused go first
COMPILED = "/backend_compile_duration"  # the end of the event that JAX records after a compilation
PIECE, HEADER = (
    16 << 10,
    32,
)  # bytes that fill a gap, and at most between two of them that lie side by side
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
        threading.Thread(
            target=_relay, args=(reading, real), daemon=True, name=f"shardwise-{name}"
        ).start()


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
    monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: gaps.fill() if event.endswith(COMPILED) else None
    )


class Gaps:
    """Holds the free memory that lies between pieces in use, so that a search for some never passes it.

    A compilation leaves thousands of such gaps. XLA's products ask for 2,000 buffers a step of the default recipe, and glibc looks
    for each in a sorted list of them: a twelfth of the step.
    """

    def __init__(self, libc: Any):
        self.malloc, self.free = libc.malloc, libc.free
        self.malloc.restype, self.malloc.argtypes, self.free.argtypes = (
            ctypes.c_void_p,
            [ctypes.c_size_t],
            [ctypes.c_void_p],
        )
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


def use_compilation_cache() -> str | None:
    """Lets JAX keep its programs. Returns why not, where it cannot.

    What is in there is run by whoever finds it: so nobody else may be able to write to it. A folder that was given to JAX
    otherwise (JAX_COMPILATION_CACHE_DIR) is left alone.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return None
    folder = cache_folder("programs")
    if folder is None:
        return "there is no home directory to keep compiled programs in"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            return f"{folder} may be written by others, so no compiled programs are taken from there; chmod 700 it, or remove it"
        _prune(folder)
    except OSError as error:
        return f"compiled programs are not kept: {error}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", 0.0
    )  # a start compiles several small ones, 20 ms each
    return None


def _prune(folder: Path) -> None:
    """Removes what was not used for longest, down to `MAX_CACHE_BYTES`."""
    files = sorted(
        (
            (path.stat().st_atime, path.stat().st_size, path)
            for path in folder.iterdir()
            if path.is_file()
        ),
        reverse=True,
    )
    total = 0
    for _, size, path in files:
        total += size
        if total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)
