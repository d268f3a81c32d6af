"""`shardwise report`: writes the report of runs as one page, or serves it while they continue."""

import argparse
import contextlib
import hashlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shardwise.cli.options import command_parser
from shardwise.errors import ConfigError
from shardwise.report.run_page import report_page
from shardwise.report.server import PageServer
from shardwise.rundir.files import RunFiles, RunRecord
from shardwise.rundir.summary import summarize
from shardwise.text import Json

MOST_RUNS = 64
DEFAULT_SECONDS = 3.0
MIN_SECONDS, MAX_SECONDS = 0.2, 3600.0


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run the command.

    Args:
        args: Command-line arguments after "report".
        shared: Options shared by all commands.

    Returns:
        The answer for `--json`, and the exit code.
    """
    options = command_parser("report").parse_args(args)
    runs = _find_runs(options.runs)
    if not options.watch and (options.port is not None or options.every is not None):
        raise ConfigError("`--port` and `--every` require `--watch`.")
    if options.watch:
        if options.out is not None:
            raise ConfigError(
                "`--watch` serves the page and writes no file. Drop `--out`, "
                "or run `shardwise report` again without `--watch`."
            )
        seconds = DEFAULT_SECONDS if options.every is None else options.every
        return _watch(runs, options.port or 0, seconds)
    return _write_report(runs, options.out)


def _find_runs(paths: list[Path]) -> list[RunFiles]:
    """Return the run directories, named so that no two names are equal."""
    if not paths:
        raise ConfigError(
            "'shardwise report' needs a run directory: shardwise report runs/a"
        )
    if len(paths) > MOST_RUNS:
        raise ConfigError(
            f"{len(paths)} runs given; at most {MOST_RUNS} can be compared."
        )
    for path in paths:
        _check_run_directory(path)
    names = [path.resolve().name or str(path) for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        is_unique = names.count(name) == 1
        runs.append(RunFiles(path, name if is_unique else str(path)))
    return runs


def _check_run_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"run directory {path} does not exist.")
    if any((path / name).exists() for name in ("run.json", "metrics.jsonl")):
        return
    inner = sorted(file.parent.name for file in path.glob("*/run.json"))[:5]
    hint = f" It contains runs: {', '.join(inner)}." if inner else ""
    raise ConfigError(
        f"{path} is not a run directory: it has neither run.json nor metrics.jsonl.{hint}"
    )


def _read(run: RunFiles) -> RunRecord:
    try:
        return run.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the run directory {run.path}: {error.strerror}."
        ) from error


def _write_report(runs: list[RunFiles], out: Path | None) -> tuple[Json, int]:
    """Write the page and return what `main` returns."""
    records = [_read(run) for run in runs]
    if out is None:
        out = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    _write_page(out, report_page(records))
    count = f" ({len(runs)} runs)" if len(runs) > 1 else ""
    print(f"report: {out}{count}")
    return {
        "page": str(out),
        "runs": [summarize(record).as_json() for record in records],
    }, 0


def _write_page(out: Path, text: str) -> None:
    """Write the complete page or nothing.

    The page replaces `out` instead of being written into it, so that a link which a stranger put
    into a run directory cannot redirect it.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        with temporary.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {out}: {error.strerror}. Choose another file with `--out`."
        ) from error


class _LivePage:
    """The page of runs, made again only when one of their files has changed."""

    def __init__(self, runs: list[RunFiles], seconds: float):
        self._runs = runs
        self._seconds = seconds
        self._stamps: list[object] = []
        self._text = ""

    def __call__(self) -> tuple[str, str]:
        """Return the page, and a tag that changes with it."""
        stamps: list[object] = [run.stamp() for run in self._runs]
        if stamps != self._stamps:
            self._text = report_page(
                [run.read() for run in self._runs], watch=self._seconds
            )
            self._stamps = stamps
        return self._text, hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]


def _watch(runs: list[RunFiles], port: int, seconds: float) -> tuple[Json, int]:
    """Serve the page until a signal arrives, and return what `main` returns."""
    if not 0 <= port < 65536:
        raise ConfigError(
            f"`--port {port}` is out of range. Use a port from 0 to 65535."
        )
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ConfigError(
            f"`--every {seconds:g}` is out of range. "
            f"Use {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds."
        )
    try:
        server = PageServer(_LivePage(runs, seconds), port)
    except OSError as error:
        raise ConfigError(
            f"cannot use port {port} of 127.0.0.1: {error.strerror}. "
            "Drop `--port` to use a free port."
        ) from error
    with server, _stop_on_signals(), contextlib.suppress(KeyboardInterrupt):
        print(f"report: {server.url}")
        print("Only this machine can open it. Press Ctrl-C to stop.", flush=True)
        server.serve_forever(poll_interval=0.2)
    print("stopped", file=sys.stderr)
    return {"runs": [summarize(_read(run)).as_json() for run in runs]}, 0


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM.

    SIGINT needs a handler too: a shell ignores it for commands that it starts in the background.
    """

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
