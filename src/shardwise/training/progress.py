"""What people see of a run: its first line, a progress bar, and a summary at the end."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import jax
from rich.console import Console

from shardwise.console import plot_losses, progress_bar, show_metrics, warn
from shardwise.errors import CheckpointError
from shardwise.files.durable import write_atomically
from shardwise.files.regular import file_errors
from shardwise.mesh import mesh_text
from shardwise.plan.plan import Plan
from shardwise.run import Prepared, Run
from shardwise.text import show_bytes, show_count, show_seconds
from shardwise.training.log import RunLog

# Set by `shardwise launch`: a file descriptor, followed by ":draws" if the launcher draws the bar.
LAUNCHER_VARIABLE = "SHARDWISE_PROGRESS"
# Seconds between two lines without a terminal.
LINE_INTERVAL = 10.0
# The waiting time for data is shown if it is more than this fraction of a step.
SHOWN_WAIT = 0.1
# Phases of a start that took less are not listed in the summary.
MIN_SHOWN_SECONDS = 0.05

# Takes the record of a step and the metrics of the last evaluation.
Show: TypeAlias = Callable[[Mapping[str, float], Mapping[str, float]], None]


@contextmanager
def progress(console: Console, run: Run, start: int) -> Iterator[Show]:
    """Yield a function that shows the progress of a run.

    On a terminal it updates a bar. Elsewhere it prints a line every 10 seconds, and for the first
    and the last step. If a launcher started this process, all of it is sent to the launcher, which
    may draw the bar itself.

    Args:
        console: where to show it.
        run: the run.
        start: the step that the run starts from.
    """
    descriptor, _, draws = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    if descriptor:
        _send(int(descriptor), {"start": start, "steps": run.steps})
    if console.is_terminal:
        with _bar(console, run, start) as show:
            yield show
        return
    last_shown = time.monotonic()

    def show_line(
        record: Mapping[str, float], eval_metrics: Mapping[str, float]
    ) -> None:
        nonlocal last_shown
        step = record["step"]
        if descriptor:
            status = _status(run, record, eval_metrics)
            _send(int(descriptor), {"step": step, "text": status})
        is_due = time.monotonic() - last_shown > LINE_INTERVAL or step in (
            start + 1,
            run.steps,
        )
        if is_due and not draws:
            last_shown = time.monotonic()
            status = _status(run, record, eval_metrics)
            console.print(f"step {step:.0f} of {run.steps}: {status}")

    yield show_line


@contextmanager
def _bar(console: Console, run: Run, start: int) -> Iterator[Show]:
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=run.steps, completed=start, status="")

        def show(
            record: Mapping[str, float], eval_metrics: Mapping[str, float]
        ) -> None:
            status = _status(run, record, eval_metrics)
            completed = int(record["step"])
            bar.update(task, description="training", completed=completed, status=status)

        yield show


def _send(descriptor: int, message: Mapping[str, object]) -> None:
    # Training continues if the launcher is gone.
    with suppress(OSError):
        os.write(descriptor, json.dumps(message).encode() + b"\n")


def _status(
    run: Run, record: Mapping[str, float], eval_metrics: Mapping[str, float]
) -> str:
    parts = [f"loss {record['loss']:.4f}"]
    if eval_metrics:
        parts.append(f"validation {show_metrics(eval_metrics)}")
    parts.append(f"{show_count(record[f'{run.unit}_per_s'])} {run.unit}/s")
    waiting = record["data_s"]
    if waiting > SHOWN_WAIT * record["step_s"]:
        parts.append(f"{waiting / record['step_s']:.0%} waiting for data")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return ", ".join(parts)


def headline(console: Console, prepared: Prepared) -> None:
    """Print size, mesh and cost of a run, before anything is compiled."""
    spec = prepared.spec
    frozen = f" and {show_count(spec.num_frozen)} frozen ones" if spec.frozen else ""
    inactive = prepared.step.traced.inactive
    active = ""
    if inactive:
        active = f" ({show_count(spec.num_params - inactive)} per token)"
    console.print(
        f"[bold]{show_count(spec.num_params)} parameters[/]{active}{frozen} on mesh "
        f"[bold]{mesh_text(spec.mesh)}[/] ({spec.mesh.devices.flat[0].device_kind}), "
        f"{show_bytes(spec.bytes_per_device)} of state per device, "
        f"{show_count(prepared.flops, ' ')}FLOP per step, {prepared.step.traced.matmuls}",
        soft_wrap=True,
    )
    layout = prepared.step.layout
    if layout.padded_rows != layout.rows:
        console.print(
            f"each batch of {layout.rows} examples is padded to {layout.padded_rows}, "
            "so that it divides evenly over the mesh",
            highlight=False,
        )


def print_summary(
    console: Console,
    run: Run,
    log: RunLog,
    eval_metrics: Mapping[str, float],
    sample: str | None,
) -> None:
    """Print the result of a run, plot its losses, and compare it with its plan.

    Args:
        console: where to print.
        run: the run.
        log: its log.
        eval_metrics: the metrics of the last evaluation; empty if there was none.
        sample: the sample of the last state, or None.
    """
    if eval_metrics:
        console.print(f"validation: {show_metrics(eval_metrics)}")
    if log.plan is not None and log.step_seconds:
        _compare_with_plan(console, run, log, log.plan)
    if log.starting:
        shown = {name: s for name, s in log.starting.items() if s >= MIN_SHOWN_SECONDS}
        total = show_seconds(sum(log.starting.values()))
        console.print(
            f"start: {total} to the end of the first step ({_show_times(shown)})",
            soft_wrap=True,
        )
    waited = show_seconds(log.waited)
    console.print(
        f"time: {_show_times(log.clock.seconds)}; {waited} of it waiting for data"
    )
    if sample is not None:
        console.rule("a sample")
        console.print(sample, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    if run.out is not None and log.last:
        text = f"run directory: {run.out}"
        picture = run.out / "loss.png"
        with _reported(console, picture):
            plot_losses(run.out / "metrics.jsonl", picture)
            text += f"\nloss curve:    {picture}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _reported(console: Console, path: Path) -> Iterator[None]:
    """Report that a file cannot be written: the run is saved, so this is no reason to fail."""
    try:
        with file_errors(path):
            yield
    except CheckpointError as error:
        warn(console, str(error))


def _compare_with_plan(console: Console, run: Run, log: RunLog, plan: Plan) -> None:
    """Print plan and measurement, and write both to `plan.json`."""
    seconds = statistics.median(log.step_seconds)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    measured = f"{seconds * 1e3:.1f} ms per step"
    if peak:
        measured += f", {show_bytes(peak)} at the peak"
    console.print(
        f"planned: {plan.line()}; measured: {measured}", highlight=False, soft_wrap=True
    )
    if run.out is not None:
        record = {
            "plan": plan.as_json(),
            "measured": {"seconds": seconds, "peak": peak},
        }
        path = run.out / "plan.json"
        with _reported(console, path):
            write_atomically(path, json.dumps(record, indent=2, default=str) + "\n")


def _show_times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {show_seconds(value)}" for name, value in seconds.items())
