"""Fixtures of the experiments: a folder, a cache of compiled steps and undisturbed runs."""

import fcntl
import hashlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness

# A backslash joins two lines: docs/faults.md has the longer ones.
EXPLANATION = """\
# Faults

This page shows what happens to a run when things break. All experiments run on CPUs; \
[Determinism](determinism.md) says
what was tested on a GPU. Each one \
starts the real command and
breaks it from outside or at a named point of the code. Then it compares the result, bit by bit, \
with an undisturbed run: every
logged number, the digest of every batch, and every leaf of the last checkpoint as plain Orbax \
reads it. The model has dropout,
batch statistics, an average of its weights, a schedule and gradient accumulation, so that any \
lost state shows. The plain loop
is the usual hand-written one with NNX, Optax, Orbax's `CheckpointManager` and Grain \
(`tests/faults/plain.py`). It has the same
model and gets the same fault where possible.

*Passed*: the run resumed exactly, or it stopped with the exit code and the message for that \
fault. *Silent*: state was wrong or
lost, the exit code was 0 and there was no message. All other trials failed with a message or a \
traceback.

`make faults` writes this table again. It takes about 90 minutes on 2 cores and includes the tests \
of several hosts, which
need root. The quick experiments are part of `make test`.

"""


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Return a folder that all workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "faults"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(shared):
    """Return the folder of the compiled steps that all runs share."""
    folder = shared / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def bench(tmp_path, cache):
    """Return a bench for the runs of one test."""
    return harness.Bench(tmp_path, cache)


@pytest.fixture(scope="session")
def straight(shared, cache):
    """Return a function from arguments to the directory of an undisturbed run with them."""
    return _undisturbed(shared / "straight", cache, harness.Bench.train)


@pytest.fixture(scope="session")
def straight_plain(shared, cache):
    """Return the same function for the plain loop."""
    return _undisturbed(shared / "straight_plain", cache, harness.Bench.plain)


@pytest.fixture(scope="session")
def straight_pair(tmp_path_factory, cache):
    """Return the directory of an undisturbed run of two processes."""
    bench = harness.Bench(tmp_path_factory.mktemp("straight_pair"), cache)
    for ended in bench.start_group("run", *harness.SHORT).end():
        harness.check_done(ended)
    return bench.folder / "run"


def _undisturbed(folder, cache, start):
    """Return a function that runs each configuration once, in the first worker that needs it."""

    def get(*args):
        folder.mkdir(exist_ok=True)
        name = hashlib.sha256("\0".join(args).encode()).hexdigest()[:12]
        done = folder / f"{name}.done"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                harness.check_done(start(harness.Bench(folder, cache), name, *args))
                done.touch()
        return folder / name

    return get


def pytest_terminal_summary(terminalreporter):
    """Print the table, and write the page to the file that FAULTS_TABLE names."""
    if not harness.ROWS:
        return
    text = harness.table()
    terminalreporter.section("faults")
    terminalreporter.write_line(text)
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(EXPLANATION + text + "\n")
