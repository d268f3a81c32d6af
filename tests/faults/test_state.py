"""All state that a run carries from step to step is saved and restored."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from harness import (
    HERE,
    LIMIT,
    SHORT,
    Silent,
    check_done,
    check_exact,
    copy_of,
    experiment,
    leaves,
    rewrite,
)

# Kind of state -> words in the paths of its leaves.
KINDS = {
    "nnx.Param": ("/params/", "kernel"),
    "nnx.BatchStat": ("/other/", "norm/mean"),
    "nnx.Cache": ("/other/last",),
    "custom variable": ("/other/seen",),
    "first moment": ("/opt_state/", "mu"),
    "second moment": ("/opt_state/", "nu"),
    "count of updates": ("/opt_state/", "count"),
    "average of the weights": ("/opt_state/", "average"),
    "step": ("/step",),
}


@pytest.mark.faults
def test_f27_every_kind_of_state_is_saved_and_restored(bench, straight):
    run = straight(*SHORT)
    with experiment(
        "F27", "every kind of state: changed, saved, restored in another process"
    ) as row:
        earlier, later = leaves(run, 16), leaves(run, 20)
        for kind, words in KINDS.items():
            with row.ours.trial(f"{kind} changes between checkpoints"):
                paths = [path for path in later if all(word in path for word in words)]
                assert paths, f"no leaf of {kind} in {sorted(later)}"
                still = [path for path in paths if earlier[path] == later[path]]
                if still:
                    raise Silent(f"{still} did not change")
        with row.ours.trial("random values for every leaf, byte by byte"):
            out, rng = (
                copy_of(run, bench, "random", without=(12, 20)),
                np.random.default_rng(27),
            )
            rewrite(
                out / "checkpoints" / "16",
                lambda path, array: (
                    array if path == "/step" else random_like(array, rng)
                ),
            )
            written = {
                path.lstrip("/"): hashlib.sha256(content).hexdigest()
                for path, (_, _, content) in leaves(out, 16).items()
            }
            found = subprocess.run(
                [sys.executable, HERE / "restore.py", out, "16"],
                env=bench.environment(),
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
            assert found.returncode == 0, found.stderr[-500:]
            restored = json.loads(found.stdout.splitlines()[-1])
            differing = sorted(
                path
                for path in written.keys() | restored.keys()
                if written.get(path) != restored.get(path)
            )
            if differing:
                raise Silent(f"{len(differing)} leaves differ: {differing[:3]}")
        with row.ours.trial("resumed at step 16, exact at step 20"):
            out = copy_of(run, bench, "run", without=(20,))
            check_done(bench.train("run", *SHORT))
            check_exact(out, run, 20)


def random_like(array, rng):
    """Return a random array of the same shape and dtype."""
    if array.dtype.kind == "f":
        return rng.normal(size=array.shape).astype(array.dtype)
    return rng.integers(0, 1000, array.shape).astype(array.dtype)
