"""`shardwise launch`: the processes of a run on this machine, looked after as one; or a job file for a cluster."""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.cluster.jobfiles import Job, kubernetes, slurm
from shardwise.cluster.signals import noted_signals
from shardwise.console import progress_bar
from shardwise.errors import ConfigError, Parser

HELP = """\
shardwise launch --processes N [--restarts R] -- train RECIPE [arguments]    on this machine
shardwise launch --write slurm|k8s [--nodes M] [--processes N] [--to FILE] ... -- train RECIPE [arguments]

  --processes N    processes in all; GPUs are divided among them, --cpu-devices is for each
  --restarts R     start all of them again, up to R times, when one is lost or stuck (exit code 6) or was asked to stop (75);
                   gives up sooner when three starts in a row have reached no new checkpoint
  --write KIND     write a job file instead: slurm or k8s; to FILE, or to the screen
  --nodes M --gpus G --cpus C --memory 64G --hours H --name NAME --image IMAGE --volume CLAIM    of that job
"""
AGAIN = (6, 75)  # exit codes that another start may mend
TOLD = (1, 2, 3, 4, 5, 7)  # and those that it would not
PATIENCE = 20.0  # seconds that processes have to end by themselves when one of them has ended with an error
QUICK = 0.5  # and when one was killed: the others have nothing to save


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code of the group."""
    words = list(argv)
    if "--" not in words:
        if {"-h", "--help"} & set(words):
            print(HELP, end="")
            return 0
        raise ConfigError(f"after -- comes the command that each process runs.\n{HELP}")
    at = words.index("--")
    options, command = _parse(words[:at]), words[at + 1 :]
    if command[:1] != ["train"]:
        raise ConfigError(f"only `train` runs on several processes, not '{' '.join(command[:1])}'.")
    if options.write is not None:
        return _write(options, command)
    return Launcher(command, options.processes, options.restarts).run()


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(help_text=HELP, prog="shardwise launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--write", choices=["slurm", "k8s"])
    parser.add_argument("--to", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=0)
    parser.add_argument("--memory", default="")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--name", default="shardwise")
    parser.add_argument("--image", default="")
    parser.add_argument("--volume", default="")
    options = parser.parse_args(words)
    if options.processes < 1 or options.restarts < 0:
        raise ConfigError(
            f"--processes {options.processes} --restarts {options.restarts}: at least 1, and at least 0."
        )
    return options


def _write(options: argparse.Namespace, command: list[str]) -> int:
    names = ("nodes", "processes", "gpus", "cpus", "memory", "hours", "name", "image", "volume")
    job = Job(command=tuple(command), **{name: getattr(options, name) for name in names})
    text = slurm(job) if options.write == "slurm" else kubernetes(job)
    if options.to is None:
        print(text, end="")
    else:
        options.to.write_text(text)
        how = (
            f"sbatch {options.to}" if options.write == "slurm" else f"kubectl apply -f {options.to}"
        )
        print(f"{options.to} is written; start it with: {how}", file=sys.stderr)
    return 0


@dataclass
class Launcher:
    """Starts a group of processes, and starts it again."""

    command: list[str]
    processes: int
    restarts: int
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    signals: list[int] = field(default_factory=list)  # that came for the launcher
    starts: list[int | None] = field(
        default_factory=list
    )  # the step that each start went on from, when it got that far
    total: int = 0  # steps of the run
    started: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))

    def run(self) -> int:
        with noted_signals() as self.signals:  # passed on to the processes by `_run_once`
            while True:
                code = self._run_once()
                attempt = len(self.starts)
                if code not in AGAIN or self.signals or attempt > self.restarts:
                    return code
                if attempt >= 3 and len(set(self.starts[-3:])) == 1:
                    where = (
                        f"step {self.starts[-1]}" if self.starts[-1] is not None else "the start"
                    )
                    self.say(
                        f"three starts in a row have come to no checkpoint after {where}: giving up."
                    )
                    return code
                stalled = len([s for s in self.starts if s == self.starts[-1]]) - 1
                pause = min(2.0**stalled, 60.0) if stalled else 0.0
                when = f"in {pause:.0f} s" if pause else "now"
                self.say(
                    f"starting all processes again {when} ({attempt} of {self.restarts} restarts)"
                )
                end = time.monotonic() + pause
                while time.monotonic() < end and not self.signals:
                    time.sleep(0.1)
                if self.signals:
                    return code

    def say(self, text: str) -> None:
        self.console.print(Text(f"shardwise launch: {text}"), soft_wrap=True)

    def _run_once(self) -> int:
        """One life of the group; its exit code."""
        self.starts.append(None)
        heard = len(self.signals)
        with _Bar(self.console) as bar:
            children = [
                self._start(index, port, bar)
                for port in [free_port()]
                for index in range(self.processes)
            ]
            first_end: float | None = None
            patience = PATIENCE
            while any(child.poll() is None for child in children):
                time.sleep(0.05)
                for number in self.signals[heard:]:
                    heard += 1
                    for child in children:
                        with suppress(ProcessLookupError):
                            child.send_signal(number)
                bad = [code for child in children if (code := child.poll()) not in (None, 0, 75)]
                if bad and first_end is None:
                    first_end = time.monotonic()
                    patience = QUICK if any(code < 0 for code in bad) else PATIENCE
                    for index, child in enumerate(children):
                        if (code := child.poll()) is not None and code < 0:
                            self.say(f"process {index} was ended by {signal.Signals(-code).name}")
                if first_end is not None and time.monotonic() > first_end + patience:
                    for child in children:
                        child.kill()
            for thread in bar.readers:
                thread.join(timeout=2.0)
        return group_code([child.returncode for child in children])

    def _start(self, index: int, port: int, bar: "_Bar") -> subprocess.Popen[bytes]:
        where = [
            "--coordinator",
            f"127.0.0.1:{port}",
            "--num-processes",
            str(self.processes),
            "--process-id",
            str(index),
        ]
        options = where if self.processes > 1 else []
        environment = {
            **os.environ,
            "SHARDWISE_STARTED": self.started,
            "COLUMNS": str(max(self.console.width - 5, 40)),
            **self._devices(index),
        }
        reading, writing = os.pipe()
        if index == 0:
            environment["SHARDWISE_PROGRESS"] = (
                f"{writing}:bar" if self.console.is_terminal else str(writing)
            )
        child = subprocess.Popen(
            [sys.executable, "-m", "shardwise.cli", *options, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on once
            preexec_fn=end_with_parent,
        )
        os.close(writing)
        assert child.stdout is not None
        bar.read(child.stdout, lambda line: bar.show(index, line))
        bar.read(os.fdopen(reading, "rb"), lambda line: self._progress(line, bar))
        return child

    def _progress(self, line: bytes, bar: "_Bar") -> None:
        """What the first process tells: where it begins, and how far it is."""
        with suppress(ValueError, KeyError):
            told = json.loads(line)
            if "start" in told:
                self.starts[-1], self.total = int(told["start"]), int(told["steps"])
            bar.update(told, self.total)

    def _devices(self, index: int) -> dict[str, str]:
        """The GPUs of this machine, divided."""
        if (
            self.processes == 1
            or "--cpu-devices" in self.command
            or os.environ.get("JAX_PLATFORMS") == "cpu"
        ):
            return {}
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            given.split(",")
            if given
            else [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
        )
        if len(gpus) % self.processes:
            raise ConfigError(
                f"{len(gpus)} GPUs cannot be divided among {self.processes} processes."
            )
        each = len(gpus) // self.processes
        return (
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * each : (index + 1) * each])}
            if each
            else {}
        )


def free_port() -> int:
    """One that nobody uses now, on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_code(codes: Sequence[int]) -> int:
    """The exit code of a group: what one of them has told, else 6 for one that was lost, 75 when all were stopped, 0 when all are done."""
    told = [code for code in codes if code in TOLD]
    if told:
        return told[0]
    if set(codes) <= {0, 75}:
        return max(codes)
    return 6


class _Bar:
    """What the processes print, each line with the number of its process, above one bar of progress."""

    def __init__(self, console: Console):
        self.console = console
        self.progress = progress_bar(console)
        self.task: Any = None
        self.readers: list[threading.Thread] = []
        self._said: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "_Bar":
        if self.console.is_terminal:
            self.progress.start()
            self.task = self.progress.add_task("starting", total=None, status="")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.task is not None:
            self.progress.stop()

    def read(self, stream: Any, take: Any) -> None:
        def work() -> None:
            with stream:
                for line in stream:
                    take(line)

        self.readers.append(threading.Thread(target=work, daemon=True))
        self.readers[-1].start()

    def show(self, index: int, line: bytes) -> None:
        with self._lock:
            now = time.monotonic()
            if not line.strip() or (
                line.startswith(b"shardwise: ") and now - self._said.get(line, -60.0) < 30
            ):
                return  # the same words from another process
            self._said[line] = now
            text = Text(f"[{index}] ", style="dim") + Text.from_ansi(
                line.decode(errors="replace").rstrip("\n")
            )
            self.console.print(text, soft_wrap=True)

    def update(self, told: dict[str, Any], total: int) -> None:
        if self.task is not None:
            step = told.get("step", told.get("start"))
            self.progress.update(
                self.task,
                description="training",
                total=total,
                completed=step,
                status=told.get("text", ""),
            )


def end_with_parent() -> None:
    """In the child: when the launcher dies, however that comes, it is asked to stop. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
