"""`shardwise doctor`: check the machine, or how a run is doing."""

import argparse

from shardwise.doctor import doctor
from shardwise.text import Json


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise doctor`; return what `--json` writes, and the exit code."""
    return doctor.main(args, shared)
