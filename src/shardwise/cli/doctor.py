"""`shardwise doctor`: check whether training can work here, or how a run is doing."""

import argparse
import sys
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.options import command_parser
from shardwise.doctor.check import CheckResult, State
from shardwise.doctor.machine import check_machine
from shardwise.errors import ConfigError, ExitCode
from shardwise.text import Json, printable

COLORS: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise doctor`; return what `--json` writes, and the exit code."""
    options = command_parser("doctor").parse_args(args)
    if not 1 <= options.timeout <= 3600:
        raise ConfigError(
            f"--timeout {options.timeout:g} must be between 1 and 3600 seconds."
        )
    timeout = None if options.no_devices else options.timeout
    with Console(stderr=True).status("checking") as status:
        if options.run is None:
            results = check_machine(timeout, status.update, shared.cpu_devices)
        else:
            # Imports NumPy, which may be what is broken on this machine.
            from shardwise.doctor.run import check_run

            results = check_run(options.run, status.update)
    counts = Counter(result.state for result in results)
    _print(results, counts)
    answer: Json = {"findings": [result.as_json() for result in results]}
    answer |= {state: counts[state] for state in COLORS}
    return answer, ExitCode.CONFIG if counts["problem"] else ExitCode.DONE


def _print(results: list[CheckResult], counts: Counter[State]) -> None:
    """Print the results as a table, with a summary below."""
    console = Console(
        width=None if sys.stdout.isatty() else 160, markup=False, highlight=False
    )
    table = Table("", "", "check", "result", box=None, pad_edge=False)
    group = ""
    for result in results:
        text = Text(printable(result.text))
        if result.remedy:
            text.append(f"\n-> {printable(result.remedy)}", style="bold")
        table.add_row(
            result.group if result.group != group else "",
            Text(result.state, style=COLORS[result.state]),
            printable(result.name),
            text,
        )
        group = result.group
    console.print(table)
    problems, warnings = _plural(counts, "problem"), _plural(counts, "warning")
    if counts["problem"]:
        console.print(f"{problems} to fix first, {warnings}")
    else:
        console.print(f"no problems, {warnings}")


def _plural(counts: Counter[State], state: State) -> str:
    return f"{counts[state]} {state}{'' if counts[state] == 1 else 's'}"
