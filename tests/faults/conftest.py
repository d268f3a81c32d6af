"""What the experiments share: a folder each, a cache of compiled steps, and one undisturbed run of each configuration."""

import fcntl
import hashlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness

EXPLANATION = """\
# Faults

What happens to a run when things break. Each experiment starts the real command, breaks it from outside or at a named point of
the code, and compares what is left, bit by bit, with a run that was never disturbed: every logged number, the digest of every
batch, every leaf of the last checkpoint as plain Orbax reads it. The model has dropout, batch statistics, an average of its
weights, a schedule and gradient accumulation, so that whatever is lost shows. Beside it stands the loop that one writes by hand
on NNX, Optax, Orbax's `CheckpointManager` and Grain (`tests/faults/plain.py`), with the same model under the same fault where
the fault can be applied to it.

*Passed*: the run did what it must: it resumed exactly, or it stopped with the exit code and the message for that fault. *Silent*:
state was wrong or lost, the exit code was 0 and nothing was said. The rest failed with a message or a traceback.

`make faults` makes this table again (about an hour and a half on 2 cores, with the tests of several hosts, which need root);
the quick experiments are part of `make test`.

"""


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all the workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "faults"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(shared):
    folder = shared / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def bench(tmp_path, cache):
    return harness.Bench(tmp_path, cache)


@pytest.fixture(scope="session")
def straight(shared, cache):
    """`straight(*arguments)`: the directory of a run with these arguments that nothing has disturbed."""
    return _undisturbed(shared / "straight", cache, harness.Bench.train)


@pytest.fixture(scope="session")
def straight_plain(shared, cache):
    return _undisturbed(shared / "straight_plain", cache, harness.Bench.plain)


def _undisturbed(folder, cache, start):
    """Each is made once, by the first worker that asks for it."""

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
    if not harness.ROWS:
        return
    text = harness.table()
    terminalreporter.section("faults")
    terminalreporter.write_line(text)
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(EXPLANATION + text + "\n")
