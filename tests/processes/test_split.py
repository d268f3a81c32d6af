"""Any split of the same devices over processes is the same run.

Batches are bit-identical, and losses agree within rounding error.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from layouts import BATCH_SIZE, LAYOUTS, STEPS, data

from shardwise.cluster.launch import free_port

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that trains with 8 devices in `count` processes.

    `train(count, model, layouts)` returns what each process has recorded. Results are cached.
    """
    folder = tmp_path_factory.mktemp("split")
    cache = {}
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PJRT_"))
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    }

    def run(count, model, layouts, files):
        address = f"127.0.0.1:{free_port()}"
        processes = []
        for index, file in enumerate(files):
            words = [
                sys.executable,
                HERE / "worker.py",
                address,
                count,
                index,
                8 // count,
                file,
            ]
            process = subprocess.Popen(
                list(map(str, [*words, model, *layouts])),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(process)
        try:
            outputs = [process.communicate(timeout=600)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * count, "\n".join(
            outputs
        )

    def get(count, model, layouts):
        key = count, model, layouts
        if key not in cache:
            files = [
                folder / f"{len(cache)}.{index}-of-{count}.json"
                for index in range(count)
            ]
            run(count, model, layouts, files)
            cache[key] = [json.loads(file.read_text()) for file in files]
        return cache[key]

    return get


def check_split(train, count, layout, model, layouts):
    """Compare `count` processes with one: batches, examples read, and losses."""
    (alone,) = train(1, model, layouts)
    results = [process[layout] for process in train(count, model, layouts)]
    _, batches = data()
    for index, result in enumerate(results):
        # Each device received exactly its own examples and tokens of the global batch.
        for step in range(STEPS):
            inputs = batches(step)["inputs"]
            for part, digest in result["shards"][str(step)].items():
                first, last, start, stop = map(int, part.split("-"))
                expected = np.ascontiguousarray(inputs[first:last, start:stop])
                sha = hashlib.sha256(expected.tobytes()).hexdigest()
                assert digest == sha, (step, part)
        # No example was read that no device of this process holds.
        needed = sum(last - first for first, last in result["ranges"])
        assert len(result["read"]) == needed * STEPS
        if layout == "data=8":
            share = BATCH_SIZE // count
            assert result["ranges"] == [[index * share, (index + 1) * share]]
        if layout == "model=8":
            assert result["ranges"] == [[0, BATCH_SIZE]]
        assert np.allclose(result["losses"], alone[layout]["losses"], rtol=2e-6, atol=0)
        difference = abs(result["held_out"] - alone[layout]["held_out"])
        assert difference <= 2e-6 * alone[layout]["held_out"]
    # All processes report the same losses.
    assert len({tuple(result["losses"]) for result in results}) == 1
    assert results[0]["losses"][-1] < results[0]["losses"][0]


# Both have an axis across the processes. They are trained together.
QUICK = ("model=2,fsdp=4", "context=2,data=4")


@pytest.mark.parametrize("layout", QUICK)
def test_two_processes_are_the_same_run(train, layout):
    check_split(train, 2, layout, "bigrams", QUICK)


@pytest.mark.slow
def test_two_processes_have_different_examples(train):
    check_split(train, 2, "data=8", "bigrams", ("data=8",))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [2, 4])
def test_every_split_is_the_same_run(train, count, layout):
    check_split(train, count, layout, "gpt", LAYOUTS)


@pytest.mark.slow
def test_layouts_agree_with_each_other(train):
    (alone,) = train(1, "gpt", LAYOUTS)
    first = np.array(alone[LAYOUTS[0]]["losses"])
    for layout in LAYOUTS[1:]:
        assert np.allclose(alone[layout]["losses"], first, rtol=2e-6, atol=0)
