"""`shardwise launch`: several local processes as one run, or a job file for a cluster."""

import argparse
import sys

from shardwise.cli.options import command_parser
from shardwise.cli.train import find_out
from shardwise.cluster.jobfiles import Job, kubernetes, slurm
from shardwise.cluster.launch import Launcher
from shardwise.errors import ConfigError
from shardwise.text import Json


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise launch`.

    Args:
        args: the options of the command, then "--" and the command that each process runs.
        shared: unused; shared options belong after "--".

    Returns:
        An empty answer, and the exit code of the group of processes.
    """
    parser = command_parser("launch")
    separator = args.index("--") if "--" in args else len(args)
    options = parser.parse_args(args[:separator])
    command = args[separator + 1 :]
    if options.processes < 1 or options.restarts < 0:
        raise ConfigError(
            f"--processes {options.processes} --restarts {options.restarts}: use at least 1 "
            "process and at least 0 restarts."
        )
    if not command:
        raise ConfigError(
            "the command that each process runs is missing: add it after --, for example "
            f"-- train recipe.py.\n{parser.format_usage().strip()}"
        )
    if command[0] != "train":
        raise ConfigError(
            f"only `train` runs on several processes, not '{command[0]}'."
        )
    # Before a job waits in a queue.
    find_out(command[1:])
    if options.write is not None:
        _write_job(options, command)
        return {}, 0
    return {}, Launcher(command, options.processes, options.restarts).run()


def _write_job(options: argparse.Namespace, command: list[str]) -> None:
    """Write a job file to `--to`, or print it."""
    job = Job(
        command=tuple(command),
        nodes=options.nodes,
        processes=options.processes,
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        hours=options.hours,
        name=options.name,
        image=options.image,
        volume=options.volume,
    )
    is_slurm = options.write == "slurm"
    text = slurm(job) if is_slurm else kubernetes(job)
    if options.to is None:
        print(text, end="")
        return
    options.to.write_text(text)
    submit = f"sbatch {options.to}" if is_slurm else f"kubectl apply -f {options.to}"
    print(f"wrote {options.to}; submit it with: {submit}", file=sys.stderr)
