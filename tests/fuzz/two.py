"""One of two processes that run cases together: python -m tests.fuzz.two ADDRESS INDEX FOLDER.

The folder has the cases, one per line in `cases`, and receives `outcomes.INDEX`. Both processes
also run the loop by hand, each on its own.
"""

import json
import sys
from pathlib import Path

from tests.fuzz.fuzz import prepare_jax


def main(address: str, index: str, folder: str) -> None:
    """Run all cases of the folder."""
    prepare_jax(num_devices=4)
    from shardwise.cluster.group import start_group
    from shardwise.cluster.signals import Stop
    from shardwise.cluster.watch import Watch
    from tests.fuzz.cases import from_line
    from tests.fuzz.run_case import run_case

    group = start_group(address, 2, int(index))
    cases = Path(folder, "cases").read_text().splitlines()
    with Watch(group, Stop()), Path(folder, f"outcomes.{index}").open("w") as file:
        for number, line in enumerate(cases):
            # Both processes share the run directory.
            outcome = run_case(from_line(line), Path(folder, f"run{number}"))
            record = {"status": outcome.status, "detail": outcome.detail}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
