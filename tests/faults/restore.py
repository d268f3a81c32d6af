"""Restore a checkpoint as the command does, in a new process, and print all leaf digests."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from recipe import recipe

from shardwise import Checkpoints, use_cpu_devices
from shardwise.run import prepare
from shardwise.tree import named_leaves


def main(out: Path, step: int) -> None:
    """Print the digest of every leaf of a step as JSON."""
    use_cpu_devices(2)
    spec = prepare(recipe(steps=20, mesh="fsdp=2")).spec
    with Checkpoints(out / "checkpoints") as checkpoints:
        state = checkpoints.restore(spec, step)
    tree = {
        "step": state.step,
        "params": state.params,
        "other": state.other,
        "opt_state": state.opt_state,
    }
    digests = {
        path: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in named_leaves(tree).items()
    }
    print(json.dumps(digests))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
