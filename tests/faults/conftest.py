"""What the experiments share: a folder each, a cache of compiled steps, and one undisturbed run of each configuration."""

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
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def bench(tmp_path, cache):
    return harness.Bench(tmp_path, cache)


@pytest.fixture(scope="session")
def straight(tmp_path_factory, cache):
    """`straight(*arguments)`: the directory of a run with these arguments that nothing has disturbed."""
    return _undisturbed(harness.Bench(tmp_path_factory.mktemp("straight"), cache), harness.Bench.train)


@pytest.fixture(scope="session")
def straight_plain(tmp_path_factory, cache):
    return _undisturbed(harness.Bench(tmp_path_factory.mktemp("straight_plain"), cache), harness.Bench.plain)


def _undisturbed(bench, start):
    made = {}

    def get(*args):
        if args not in made:
            name = f"run{len(made)}"
            harness.check_done(start(bench, name, *args))
            made[args] = bench.folder / name
        return made[args]

    return get


def pytest_terminal_summary(terminalreporter):
    if not harness.ROWS:
        return
    text = harness.table()
    terminalreporter.section("faults")
    terminalreporter.write_line(text)
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(EXPLANATION + text + "\n")
