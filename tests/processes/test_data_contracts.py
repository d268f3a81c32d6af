"""Loaders of both contracts train like one process, or are refused before a step is trained."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.cluster.launch import free_port

HERE = Path(__file__).parent

# Cases that must give the loss of one process with the case on the right.
RIGHT = {
    2: {
        "complete iterator @ data=8": "complete @ data=8",
        "grain slice @ data=8": "complete @ data=8",
        "grain loader @ data=8": "halves @ data=8",
        "sharded Batches @ data=8": "complete @ data=8",
        "sharded @ model=2,data=4": "complete @ data=8",
        "own loop, sharded @ data=8": "complete @ data=8",
        "own loop, assembled @ data=8": "complete @ data=8",
    },
    4: {
        "seeded @ data=2,model=4": "seeded @ data=8",
        "sharded @ data=2,model=4": "complete @ data=8",
        "sharded iterator @ data=8": "complete @ data=8",
    },
}
DIFFERENT = (
    r"batch 0: process 0 and process 1 supplied different batches. Array 'x' differs: "
)
# Cases that must be refused, with a part of the error.
WRONG = {
    2: {
        "wrong: grain loader @ data=8": DIFFERENT
        + "float32 of shape (16, 4) with mean",
        "wrong: grain loader, local @ data=8": DIFFERENT + "float32 of shape (8, 4)",
        "wrong: grain slice @ data=8": 'set Run(data_scope="process")',
        "wrong: sharded @ data=8": DIFFERENT,
        "wrong: sharded Batches @ data=8": "Run.data differs between processes: "
        "source/arrays/x/hash is ",
        "wrong: eval @ data=8": "Run.eval_data differs between processes: ",
        "wrong: unseeded @ data=8": "use the same seed in every process",
        "wrong: names @ data=8": "process 0 supplied arrays 'x', and process 1 supplied "
        "'x', 'y'",
        "wrong: complete @ data=8": "process 0 and process 1 supplied the same examples",
        "wrong: by process @ model=2,data=4": "all processes must load the same examples",
        "wrong: sizes @ data=8": "process 0 are part of a global batch of 16, and those "
        "of process 1 of one of 32",
        "own loop, wrong @ data=8": DIFFERENT,
        "own loop, too few @ data=8": "8 is the number of examples for the devices of "
        "this process. If the data is sharded by process, set",
    },
    4: {
        "wrong: by process @ data=2,model=4": "Load shard 0 of 2 in process 0, 1; shard 1 "
        "of 2 in process 2, 3.",
        "wrong: complete @ data=2,model=4": "process 0 and process 2 supplied the same "
        "examples",
        "wrong: grain loader @ data=8": DIFFERENT,
    },
}
# Cases that differ from a later step on.
LATER = {
    "wrong: later @ data=8": "batch 2: process 0 and process 1 supplied different",
    "wrong: much later @ data=8": "batch 5: process 0 and process 1 supplied different",
}


# All cases together take a minute for each number of processes.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that runs all cases with 8 devices in `count` processes, once."""
    folder = tmp_path_factory.mktemp("contracts")
    cache = {}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")

    def run(count):
        if count in cache:
            return cache[count]
        cases = [*RIGHT[count], *WRONG[count]] if count > 1 else references()
        if count == 2:
            cases += LATER
        address = f"127.0.0.1:{free_port()}"
        files = [folder / f"{count}.{index}.json" for index in range(count)]
        processes = []
        for index, file in enumerate(files):
            command = [sys.executable, HERE / "contracts.py", address, count, index]
            command += [8 // count, file, *cases]
            processes.append(
                subprocess.Popen(
                    list(map(str, command)),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * count, "\n".join(
            outputs
        )
        cache[count] = [json.loads(file.read_text()) for file in files]
        return cache[count]

    return run


def references():
    return sorted({case for cases in RIGHT.values() for case in cases.values()})


@pytest.mark.parametrize(
    ("count", "case"), [(n, case) for n in RIGHT for case in RIGHT[n]]
)
def test_both_contracts_train_like_one_process(train, count, case):
    (alone,) = train(1)
    expected = alone[RIGHT[count][case]]["loss"]
    for result in train(count):
        assert "error" not in result[case]
        assert result[case]["step"] == 6
        assert result[case]["loss"] == pytest.approx(expected, rel=2e-6)


def test_other_examples_have_another_loss(train):
    """Without this, the losses above could agree by chance."""
    (alone,) = train(1)
    losses = sorted(result["loss"] for result in alone.values())
    assert min(b - a for a, b in pairwise(losses)) > 0.01


@pytest.mark.parametrize(
    ("count", "case"), [(n, case) for n in WRONG for case in WRONG[n]]
)
def test_a_loader_of_the_other_contract_is_refused_before_anything_compiles(
    train, count, case
):
    errors = [result[case].get("error") for result in train(count)]
    # All processes raise the same error.
    assert len(set(errors)) == 1
    assert errors[0] is not None
    assert WRONG[count][case] in errors[0]
    for result in train(count):
        assert not result[case].get("compiled")
        assert result[case].get("step", 0) == 0


@pytest.mark.parametrize("case", LATER)
def test_a_difference_at_a_later_step_is_found_too(train, case):
    for result in train(2):
        assert LATER[case] in result[case]["error"]
