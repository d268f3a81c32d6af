"""Runs the processes of one run on this machine, and restarts them together.

Several programs on one machine behave as one: signals go to all of them, their output is merged
under one progress bar, and when one fails the others are ended.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import TaskID
from rich.text import Text

from shardwise.cluster.signals import noted_signals
from shardwise.console import progress_bar
from shardwise.errors import ConfigError, ExitCode
from shardwise.text import Json

# Exit codes after which another start may succeed.
RETRIED = (ExitCode.LOST, ExitCode.STOPPED)
# Exit codes of errors that would occur again.
FINAL = (
    ExitCode.FAILURE,
    ExitCode.CONFIG,
    ExitCode.DATA,
    ExitCode.CHECKPOINT,
    ExitCode.NUMERICS,
    ExitCode.IN_USE,
)
# Give up when this many consecutive starts have reached no new checkpoint.
MAX_STALLED = 3
# Seconds that processes have to end by themselves after one has ended with an error,
PATIENCE = 20.0
# and after one was killed: then the others have nothing to save.
SHORT_PATIENCE = 0.5
# Seconds for which a message is not repeated when another process prints it too.
REPEAT_AFTER = 30.0


@dataclass
class Launcher:
    """Starts a group of processes, and restarts all of them when one is lost or stuck.

    Attributes:
        command: the words after `shardwise`, for all processes.
        processes: the number of processes.
        restarts: how often to restart them at most.
        console: where to print.
        signals: the signals that the launcher has received.
        starts: for each start the step that it resumed from; None until that is known.
        total: the number of steps of the run.
        started: the time of the launch, which names the run directory.
    """

    command: list[str]
    processes: int
    restarts: int
    console: Console = field(
        default_factory=lambda: Console(stderr=True, highlight=False)
    )
    signals: list[int] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    total: int = 0
    started: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))

    def run(self) -> int:
        """Run the processes until they finish, fail, or are stopped.

        Returns:
            The exit code of the group, as `group_code` defines it.
        """
        with noted_signals() as self.signals:
            while True:
                code = self._run_once()
                attempt = len(self.starts)
                if code not in RETRIED or self.signals or attempt > self.restarts:
                    return code
                recent = self.starts[-MAX_STALLED:]
                if len(recent) == MAX_STALLED and len(set(recent)) == 1:
                    step = self.starts[-1]
                    place = "the start" if step is None else f"step {step}"
                    self.say(
                        f"{MAX_STALLED} consecutive starts have reached no checkpoint after "
                        f"{place}: giving up."
                    )
                    return code
                self._pause(attempt)
                if self.signals:
                    return code

    def _pause(self, attempt: int) -> None:
        """Wait before a restart: longer each time if no checkpoint was reached."""
        stalled = self.starts.count(self.starts[-1]) - 1
        pause = min(2.0**stalled, 60.0) if stalled else 0.0
        when = f"in {pause:.0f} s" if pause else "now"
        self.say(
            f"restarting all processes {when} (restart {attempt} of {self.restarts})"
        )
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not self.signals:
            time.sleep(0.1)

    def say(self, text: str) -> None:
        """Print a line of the launcher itself."""
        self.console.print(Text(f"shardwise launch: {text}"), soft_wrap=True)

    def _run_once(self) -> int:
        """Start all processes, wait for their end, and return the exit code of the group."""
        self.starts.append(None)
        num_received = len(self.signals)
        port = free_port()
        with _Output(self.console) as output:
            children = [
                self._start(index, port, output) for index in range(self.processes)
            ]
            self._supervise(children, num_received)
            for thread in output.readers:
                thread.join(timeout=2.0)
        return group_code([child.returncode for child in children])

    def _supervise(
        self, children: list[subprocess.Popen[bytes]], num_received: int
    ) -> None:
        """Wait until all processes have ended; pass on signals, and kill them if one has failed.

        Args:
            children: the processes.
            num_received: the number of signals that came before the processes were started.
        """
        kill_at = float("inf")
        while any(child.poll() is None for child in children):
            time.sleep(0.05)
            for number in self.signals[num_received:]:
                num_received += 1
                for child in children:
                    with suppress(ProcessLookupError):
                        child.send_signal(number)
            codes = [child.poll() for child in children]
            failed = {
                i: code
                for i, code in enumerate(codes)
                if code not in (None, ExitCode.DONE, ExitCode.STOPPED)
            }
            if failed and kill_at == float("inf"):
                killed = {
                    i: code
                    for i, code in failed.items()
                    if code is not None and code < 0
                }
                kill_at = time.monotonic() + (SHORT_PATIENCE if killed else PATIENCE)
                for index, code in killed.items():
                    self.say(
                        f"process {index} was ended by {signal.Signals(-code).name}"
                    )
            if time.monotonic() > kill_at:
                for child in children:
                    child.kill()

    def _start(
        self, index: int, port: int, output: "_Output"
    ) -> subprocess.Popen[bytes]:
        """Start one process, and the threads that read its output and its progress."""
        options: list[str] = []
        if self.processes > 1:
            options += ["--coordinator", f"127.0.0.1:{port}"]
            options += [
                "--num-processes",
                str(self.processes),
                "--process-id",
                str(index),
            ]
        environment = {
            **os.environ,
            "SHARDWISE_STARTED": self.started,
            "COLUMNS": str(max(self.console.width - 5, 40)),
            **self._visible_devices(index),
        }
        reading, writing = os.pipe()
        if index == 0:
            # The first process reports its progress here; "bar" asks for every step.
            suffix = ":bar" if self.console.is_terminal else ""
            environment["SHARDWISE_PROGRESS"] = f"{writing}{suffix}"
        child = subprocess.Popen(
            # -P: modules of the current directory must not shadow others.
            [sys.executable, "-P", "-m", "shardwise.cli", *options, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(writing,),
            # Ctrl-C reaches only the launcher, which passes it on once.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        os.close(writing)
        assert child.stdout is not None
        output.read(child.stdout, lambda line: output.show(index, line))
        output.read(
            os.fdopen(reading, "rb"), lambda line: self._take_progress(line, output)
        )
        return child

    def _take_progress(self, line: bytes, output: "_Output") -> None:
        """Handle a report of the first process: where it starts, and how far it is."""
        with suppress(ValueError, KeyError):
            report = json.loads(line)
            if "start" in report:
                self.starts[-1] = int(report["start"])
                self.total = int(report["steps"])
            output.update(report, self.total)

    def _visible_devices(self, index: int) -> dict[str, str]:
        """Return the variable that gives a process its share of the GPUs of this machine."""
        uses_cpu = (
            "--cpu-devices" in self.command or os.environ.get("JAX_PLATFORMS") == "cpu"
        )
        if self.processes == 1 or uses_cpu:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            gpus = visible.split(",")
        else:
            count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
            gpus = [str(number) for number in range(count)]
        if len(gpus) % self.processes:
            raise ConfigError(
                f"{len(gpus)} GPUs cannot be divided among {self.processes} processes."
            )
        share = len(gpus) // self.processes
        if not share:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])
        }


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_code(codes: Sequence[int]) -> int:
    """Return the exit code of a group from those of its processes.

    An error that one of them has reported comes first; then 6 if one was lost, 75 if all were
    stopped, and 0 if all are done.

    Example:
        >>> group_code([0, 75]), group_code([3, 6]), group_code([-9, 0])
        (75, 3, 6)
    """
    final = [code for code in codes if code in FINAL]
    if final:
        return final[0]
    if set(codes) <= {ExitCode.DONE, ExitCode.STOPPED}:
        return max(codes)
    return ExitCode.LOST


class _Output:
    """Prints the output of all processes above one progress bar.

    Each line starts with the index of its process. The bar is shown only on a terminal.
    """

    def __init__(self, console: Console):
        self.console = console
        self.readers: list[threading.Thread] = []
        self._progress = progress_bar(console)
        self._task: TaskID | None = None
        # When each line was last printed.
        self._printed: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "_Output":
        if self.console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("starting", total=None, status="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def read(self, stream: IO[bytes], handle: Callable[[bytes], None]) -> None:
        """Call `handle` for each line of a stream, in a new thread."""

        def work() -> None:
            with stream:
                for line in stream:
                    handle(line)

        self.readers.append(threading.Thread(target=work, daemon=True))
        self.readers[-1].start()

    def show(self, index: int, line: bytes) -> None:
        """Print a line of a process, unless another process has just printed the same message."""
        with self._lock:
            now = time.monotonic()
            is_repeated = (
                line.startswith(b"shardwise: ")
                and now - self._printed.get(line, -2 * REPEAT_AFTER) < REPEAT_AFTER
            )
            if is_repeated or not line.strip():
                return
            self._printed[line] = now
            text = Text.from_ansi(line.decode(errors="replace").rstrip("\n"))
            self.console.print(Text(f"[{index}] ", style="dim") + text, soft_wrap=True)

    def update(self, report: Json, total: int) -> None:
        """Move the bar to the step of a progress report."""
        if self._task is not None:
            self._progress.update(
                self._task,
                description="training",
                total=total,
                completed=report.get("step", report.get("start")),
                status=report.get("text", ""),
            )


def end_with_parent() -> None:
    """Ask the kernel to send SIGHUP to this process when its parent dies. Linux only.

    It sends the signal again for each thread of the parent that outlives the previous one, and
    SIGHUP may come repeatedly. It is not ignored here, also if `nohup` started the parent: a new
    session has no terminal to lose.
    """
    set_parent_death_signal = 1
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGHUP)
