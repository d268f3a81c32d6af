"""Eight virtual CPU devices for every test. Too few is a failure, never a skip."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests, and commands that they start, reuse compiled programs from this folder, also those of an
# earlier test run. The user's own cache stays untouched.
os.environ["XDG_CACHE_HOME"] = str(
    Path(tempfile.gettempdir()) / f"shardwise-tests-{os.getuid()}"
)

# Commands that tests start take SIGHUP, also if `nohup` started the tests: a signal with a handler
# has its default action in child processes.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from shardwise import use_cpu_devices
from shardwise.runtime import use_compilation_cache

use_cpu_devices(8)
# Many tests compile the same small programs, such as those that create a state.
use_compilation_cache()
# No deadline: an example may have to compile.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shardwise")


def pytest_sessionstart(session):
    assert jax.device_count() == 8, (
        f"the tests need 8 CPU devices and found {jax.device_count()}"
    )


@pytest.fixture(autouse=True)
def _reset_compilation_cache():
    """Undo the compilation cache that a command sets when it runs inside a test."""
    before = jax.config.jax_compilation_cache_dir
    yield
    if jax.config.jax_compilation_cache_dir != before:
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()


@pytest.fixture(autouse=True)
def _free_compiled_programs():
    """Free compiled programs before the process has too many of them.

    A program takes about 1,000 memory maps. Linux allows 65,530 in a process, and beyond it LLVM
    ends the process. Test modules keep programs in functions with `functools.cache`.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        for name, module in list(sys.modules.items()):
            if name.startswith("tests."):
                for value in list(vars(module).values()):
                    getattr(value, "cache_clear", lambda: None)()
        jax.clear_caches()
        gc.collect()


LONGEST_FIRST = (
    "tests/tpu",
    "tests/mesh/test_layouts.py",
    "tests/processes",
)


def pytest_collection_modifyitems(items):
    """Start the tests that take a minute or more first, so that no worker ends alone with one."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST_FIRST))
