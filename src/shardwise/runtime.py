"""Settings of the process: its output, memory allocation on CPUs, the compilation cache.

JAX's C++ libraries print many lines that are not news, and crash dumps for the rest.
"""

import ctypes
import glob
import io
import os
import re
import select
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shardwise.files.cache import cache_folder, make_private

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# The compilation cache is pruned to this many bytes; entries that were not used for longest go
# first.
MAX_CACHE_BYTES = 8 * 2**30
# The end of the name of the event that JAX records after each compilation.
COMPILED = "/backend_compile_duration"

# `Gaps` fills gaps with blocks of this many bytes.
PIECE = 16 << 10
# The largest distance between two adjacent blocks, in addition to their size: malloc's header.
HEADER = 32
# This many adjacent blocks, 1 MiB, are free memory and not a gap.
RUN_LENGTH = 64
# `Gaps` holds at most 64 MiB.
MAX_PIECES = (64 << 20) // PIECE

# Options of glibc's `mallopt`, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8

# Without these, libtpu asks the network what machine this is, and logs errors if nobody answers.
QUIET_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# XLA's compilers for GPUs, as JAX names the packages.
GPU_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Without a GPU, XLA's compiler for GPUs looks for CUDA's libraries, and warns that sorts would be
# faster with one.
QUIET_GPU = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# The driver of NVIDIA GPUs. WSL has another one.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
# TPUs are PCI devices of this vendor. So are some network cards.
GOOGLE_PCI = "0x1ae0"
PCI_VENDORS = "/sys/bus/pci/devices/*/vendor"

# Lines of C++ libraries that are dropped. Gloo's threads write into each other's lines. The fate of
# other processes is reported by shardwise itself.
NOISE = re.compile(
    rb"^$|.*(is connected to|peer ranks\. Expected number of connected)|^(\[Gloo\] Rank )+$"
    rb"|^[WE]\d{4} .*(coordination_service|recoverable task)"
    rb"|^F\d{4} .*JAX distributed service detected fatal errors"
    rb"|^(Additional GRPC error information|:UNKNOWN:|:UNAVAILABLE:|RPC: /xla)"
    rb"|^(The tasks have crashed|\d+$)"
    rb"|^\*\*\* Check failure stack trace"
    rb"|^    @ +0x[0-9a-f]+ "
)


def set_quiet_tpu() -> None:
    """Set the environment so that libtpu does not look for a TPU."""
    for variable, value in QUIET_TPU.items():
        os.environ.setdefault(variable, value)


def quiet_without_tpu(vendors: str = PCI_VENDORS) -> None:
    """Call `set_quiet_tpu` on a machine without a TPU, before JAX is imported.

    JAX loads libtpu wherever it is installed, also where it is only used to compile plans.

    Args:
        vendors: a pattern for the files with the vendors of PCI devices.
    """
    try:
        found = {Path(file).read_text().strip() for file in glob.glob(vendors)}
    except OSError:
        return
    if GOOGLE_PCI not in found:
        set_quiet_tpu()


def quiet_without_gpu(drivers: Sequence[str] = GPU_DRIVERS) -> None:
    """Keep XLA's compiler for GPUs quiet on a machine without a GPU, before JAX is imported.

    JAX loads it wherever it is installed, also where it is only used to compile plans.

    Args:
        drivers: the files of GPU drivers.
    """
    if has_gpu_compiler() and not any(map(os.path.exists, drivers)):
        for variable, value in QUIET_GPU.items():
            os.environ.setdefault(variable, value)


def has_gpu_compiler() -> bool:
    """Return whether XLA's compiler for GPUs is installed."""
    return any(map(_is_installed, GPU_PLUGINS))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Its package is not there either.
        return False


class _SafeOutput(io.FileIO):
    """A descriptor whose writes never fail.

    The terminal may be gone, the reader of a pipe may have ended, or the disk of a log may be full.
    Text that cannot be written is dropped: it must not end a run.

    Attributes:
        is_lost: whether text was dropped.
    """

    is_lost = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or drop the data if that is not possible."""
        try:
            # None: somebody made the descriptor non-blocking, and its reader is slow.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError:
            self.is_lost = True
            return memoryview(data).nbytes
        return written


def protect_output() -> None:
    """Make output harmless: writing to `sys.stdout` and `sys.stderr` does not fail from now on.

    A standard descriptor that is closed is opened, so that no file of the run gets its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # This is the lowest free number. Child processes need it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has no stream for a descriptor that was closed when it started.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = _text_output(1, sys.stdout)
    sys.stderr = _text_output(2, sys.stderr)


def is_lost(stream: TextIO) -> bool:
    """Return whether text for a stream of `protect_output` was dropped."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return isinstance(raw, _SafeOutput) and raw.is_lost


def _text_output(descriptor: int, previous: TextIO | None) -> TextIO:
    """Return a stream that writes to a descriptor, and replaces `previous`."""
    errors = "strict"
    if previous is not None:
        errors = previous.errors or errors
        with suppress(OSError, ValueError):
            previous.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_SafeOutput(descriptor, "w", closefd=False)),
        encoding=getattr(previous, "encoding", None),
        # A character that the terminal does not have must not end a run either.
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=True,
    )


def filter_native_output() -> None:
    """Filter what C++ code prints from now on. `sys.stdout` and `sys.stderr` are not filtered."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        real = os.dup(number)
        # Python writes to the real descriptor; only native code writes to the pipe.
        setattr(sys, name, _text_output(real, getattr(sys, name)))
        read_end, write_end = os.pipe()
        os.dup2(write_end, number)
        os.close(write_end)
        thread = threading.Thread(
            target=_relay, args=(read_end, real), daemon=True, name=f"shardwise-{name}"
        )
        thread.start()


def _relay(read_end: int, real: int) -> None:
    output = _SafeOutput(real, "w", closefd=False)
    with os.fdopen(read_end, "rb") as lines:
        for line in lines:
            if not NOISE.match(line):
                output.write(line)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, for training on CPUs. Does nothing without glibc.

    Call it before JAX starts its threads. XLA allocates the temporaries of a step as one block and
    frees it at the end of the step. glibc gets such blocks from the system each time, and the first
    access to each page costs as much as computing on it: 20 % of a step of the default recipe.

    With these settings all threads share one heap, which a compilation leaves fragmented; `Gaps` is
    the remedy.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    # One heap, because other arenas hold at most 64 MiB.
    libc.mallopt(M_ARENA_MAX, 1)
    # Allocate large blocks in the heap too, and never return it to the system.
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    from jax import monitoring

    gaps = Gaps(libc)

    def fill_after_compilation(event: str, *_: object, **__: object) -> None:
        if event.endswith(COMPILED):
            gaps.fill()

    monitoring.register_event_duration_secs_listener(fill_after_compilation)


class Gaps:
    """Allocates the gaps between used blocks of the heap, so that malloc does not search them.

    A compilation leaves thousands of gaps. XLA's matmuls allocate 2,000 buffers per step of the
    default recipe, and glibc searches for each in a sorted list of the gaps. Without `Gaps`, a step
    of the default recipe takes 5 % more CPU time (lower quartile and median of 6 alternating runs
    of 250 steps on 2 shared cores). The gaps are filled again after each compilation.

    The memory that is held would not serve large buffers anyway, because they do not fit into the
    gaps. It is at most 64 MiB; the same runs showed no loss from this limit.

    Attributes:
        held: addresses of the blocks that fill gaps.
    """

    def __init__(self, libc: ctypes.CDLL):
        """Use `malloc` and `free` of this C library."""
        self.malloc = libc.malloc
        self.malloc.restype = ctypes.c_void_p
        self.malloc.argtypes = [ctypes.c_size_t]
        self.free = libc.free
        self.free.argtypes = [ctypes.c_void_p]
        self.held: list[int] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Release all blocks, and fill the gaps that exist now.

        glibc returns the smallest gaps first. When `RUN_LENGTH` consecutive blocks are adjacent,
        they come from free memory: there are no gaps left, and these blocks are released.
        """
        with self._lock:
            while self.held:
                self.free(self.held.pop())
            adjacent = 0
            while adjacent < RUN_LENGTH and len(self.held) < MAX_PIECES:
                address = self.malloc(PIECE)
                if not address:
                    break
                distance = address - self.held[-1] if self.held else 0
                adjacent = adjacent + 1 if 0 < distance <= PIECE + HEADER else 1
                self.held.append(address)
            for _ in range(adjacent):
                self.free(self.held.pop())


def has_accelerator() -> bool:
    """Return whether this machine seems to have a GPU or a TPU, without importing JAX."""
    return any(
        os.path.exists(f"/dev/{name}")
        for name in ("nvidiactl", "kfd", "accel0", "vfio/0")
    )


def use_compilation_cache() -> str | None:
    """Let JAX keep compiled programs in the cache directory of the user.

    Programs in the cache are executed, so nobody else may be able to write to it. A directory that
    was configured otherwise (`JAX_COMPILATION_CACHE_DIR`) is left alone.

    Returns:
        None, or the reason why programs are not kept.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return None
    folder = cache_folder("programs")
    if folder is None:
        return "there is no home directory to keep compiled programs in"
    try:
        make_private(folder)
        # Earlier releases created it with the permissions that the umask left. Who can write to it
        # can replace the folder.
        if folder.parent.stat().st_uid == os.getuid():
            folder.parent.chmod(0o700)
        status = folder.stat()
        others_may_write = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.getuid() or others_may_write:
            return (
                f"{folder} is writable by other users, so compiled programs are not read from it; "
                "run chmod 700 on it, or remove it"
            )
        _prune(folder)
    except OSError as error:
        return f"compiled programs are not kept: {error}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A start compiles several small programs of about 20 ms each; keep these too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return None


def _prune(folder: Path) -> None:
    """Remove the files that were not used for longest, down to `MAX_CACHE_BYTES`."""
    files = []
    for path in folder.iterdir():
        if path.is_file():
            status = path.stat()
            files.append((status.st_atime, status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MAX_CACHE_BYTES:
            path.unlink(missing_ok=True)
