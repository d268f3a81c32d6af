"""`shardwise report`: what runs were and did, as one page, or served and refreshed while they go on."""

import argparse
import contextlib
import hashlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Parser
from shardwise.report.run_page import report_page
from shardwise.report.server import PageServer
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize

USAGE = """\
shardwise report RUN [RUN ...] [--out FILE] [--watch [--port N]]

  RUN              a run directory; several are set side by side
  --out FILE       where the page is written; RUN/report.html if it is not given, for several runs report.html here
  --watch          serve the page on 127.0.0.1, under an address that holds a token, and refresh it while the run goes on
  --port N         of --watch; a free one if it is not given
  --every S        of --watch: seconds between two looks (3)
  --json FILE      the same numbers for programs
"""
MOST_RUNS = 64


def main(args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    parser = Parser(
        prog="shardwise report", usage=USAGE, add_help=False, allow_abbrev=False, help_text=USAGE
    )
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument("--every", type=float)
    parser.add_argument("-h", "--help", action="store_true")
    mine = parser.parse_args(args)
    if mine.help:
        print(USAGE, end="")
        return {}, 0
    runs = _find(mine.runs)
    if not mine.watch and (mine.port is not None or mine.every is not None):
        raise ConfigError("--port and --every belong to --watch.")
    if mine.watch:
        if mine.out is not None:
            raise ConfigError(
                "--watch writes no file: leave --out away, or ask for the file in a second command."
            )
        return _watch(runs, mine.port or 0, 3.0 if mine.every is None else mine.every)
    records = [_read(run) for run in runs]
    text = report_page(records)
    out = mine.out or (runs[0].path / "report.html" if len(runs) == 1 else Path("report.html"))
    _write(out, text)
    print(f"report: {out}" + (f" ({len(runs)} runs)" if len(runs) > 1 else ""))
    return {"page": str(out), "runs": [summarize(record).as_json() for record in records]}, 0


def _find(paths: list[Path]) -> list[RunFiles]:
    if not paths:
        raise ConfigError("'shardwise report' needs a run directory: shardwise report runs/a")
    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} runs; at most {MOST_RUNS} can be set side by side.")
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"there is no run directory {path}.")
        if not any((path / name).exists() for name in ("run.json", "metrics.jsonl")):
            inner = sorted(p.parent.name for p in path.glob("*/run.json"))[:5]
            hint = f" It holds runs: {', '.join(inner)}." if inner else ""
            raise ConfigError(
                f"{path} is no run directory: it has neither run.json nor metrics.jsonl.{hint}"
            )
    names = [path.resolve().name or str(path) for path in paths]
    twice = {name for name in names if names.count(name) > 1}
    return [
        RunFiles(path, str(path) if name in twice else name)
        for path, name in zip(paths, names, strict=True)
    ]


def _read(run: RunFiles) -> Any:
    try:
        return run.read()
    except OSError as error:
        raise ConfigError(
            f"the run directory {run.path} cannot be read: {error.strerror}."
        ) from error


def _write(out: Path, text: str) -> None:
    """Never through a link that a stranger has put into a run directory; whole or not at all."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        with temporary.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {out}: {error.strerror}. Choose another file with --out."
        ) from error


def _watch(runs: list[RunFiles], port: int, every: float) -> tuple[dict[str, Any], int]:
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: it must be from 0 to 65535.")
    if not 0.2 <= every <= 3600:
        raise ConfigError(f"--every {every:g}: it must be from 0.2 to 3600 seconds.")
    last: list[Any] = [None, ""]

    def make() -> tuple[str, str]:
        stamp = tuple(run.stamp() for run in runs)
        if stamp != last[0]:
            last[:] = [stamp, report_page([run.read() for run in runs], watch=every)]
        return last[1], hashlib.sha256(repr(stamp).encode()).hexdigest()[:32]

    try:
        server = PageServer(make, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. Leave --port away for a free one."
        ) from error
    with server, _until_told(), contextlib.suppress(KeyboardInterrupt):
        print(f"report: {server.url}\nonly this machine can open it; Ctrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    print("ended", file=sys.stderr)
    return {"runs": [summarize(_read(run)).as_json() for run in runs]}, 0


@contextmanager
def _until_told() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, also where a shell has started it in the background and set SIGINT aside."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
