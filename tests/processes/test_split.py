"""Any split of the same devices over processes is the same run: batches to the bit, losses to rounding."""

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
    """`train(count, model, layouts)`: what each of `count` processes with 8 devices in all has seen; made once."""
    folder, made = tmp_path_factory.mktemp("split"), {}
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PJRT_"))
    }
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}

    def start(count, model, layouts):
        key = count, model, layouts
        if key not in made:
            files = [folder / f"{len(made)}.{index}-of-{count}.json" for index in range(count)]
            address, output = (
                f"127.0.0.1:{free_port()}",
                {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
            )
            command = [sys.executable, HERE / "worker.py", address, count]
            commands = [
                [*command, index, 8 // count, file, model, *layouts]
                for index, file in enumerate(files)
            ]
            processes = [
                subprocess.Popen(list(map(str, command)), env=environment, **output)
                for command in commands
            ]
            try:
                outputs = [process.communicate(timeout=600)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
            assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
            made[key] = [json.loads(file.read_text()) for file in files]
        return made[key]

    return start


def check_split(train, count, layout, model, layouts):
    (alone,) = train(1, model, layouts)
    found = [process[layout] for process in train(count, model, layouts)]
    _, batches = data()
    for index, one in enumerate(found):
        # Each device was given the very rows of the global batch that are its own.
        for step in range(STEPS):
            whole = batches(step)["inputs"]
            for rows, digest in one["shards"][str(step)].items():
                first, last = map(int, rows.split("-"))
                assert (
                    digest
                    == hashlib.sha256(np.ascontiguousarray(whole[first:last]).tobytes()).hexdigest()
                ), (step, rows)
        # No row was read that no device of this process holds.
        needed = sum(last - first for first, last in one["ranges"])
        assert len(one["read"]) == needed * STEPS
        if layout == "data=8":
            assert one["ranges"] == [
                [index * BATCH_SIZE // count, (index + 1) * BATCH_SIZE // count]
            ]
        if layout == "model=8":
            assert one["ranges"] == [[0, BATCH_SIZE]]
        assert np.allclose(one["losses"], alone[layout]["losses"], rtol=2e-6, atol=0)
        assert abs(one["held_out"] - alone[layout]["held_out"]) <= 2e-6 * alone[layout]["held_out"]
    assert len({tuple(one["losses"]) for one in found}) == 1  # all processes say the same
    assert found[0]["losses"][-1] < found[0]["losses"][0]


QUICK = ("data=8", "model=2,fsdp=4")  # the second with its model axis across the processes


@pytest.mark.parametrize("layout", QUICK)
def test_two_processes_are_the_same_run(train, layout):
    check_split(train, 2, layout, "bigrams", QUICK)


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
