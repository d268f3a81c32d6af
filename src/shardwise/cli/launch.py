"""`shardwise launch`: several local processes as one run, or a job file for a cluster."""

import argparse

from shardwise.cluster import launch
from shardwise.text import Json


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise launch`; return what `--json` writes, and the exit code."""
    return {}, launch.main(args)
