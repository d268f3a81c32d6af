"""What people see of a run while it goes on: warnings, signs of life, the bar."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.markup import escape

from shardwise.console import progress_bar, show_metrics
from shardwise.mesh import mesh_text
from shardwise.run import Prepared, Run
from shardwise.text import show_bytes, show_count


def warn(console: Console, text: str) -> None:
    console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """While something takes long: a sign of life on a terminal, elsewhere a line."""
    if console.is_terminal:
        with console.status(text):
            yield
        return
    console.print(text, highlight=False)
    yield


@contextmanager
def progress(
    console: Console, run: Run, start: int
) -> Iterator[Callable[[dict[str, float], dict[str, float]], None]]:
    """A live bar on a terminal; elsewhere a line now and then. A launcher is told all of it, and may draw the bar itself."""
    launcher, _, draws = os.environ.get("SHARDWISE_PROGRESS", "").partition(":")
    if launcher:
        _tell(int(launcher), start=start, steps=run.steps)
    if console.is_terminal:
        with progress_bar(console) as bar:
            task = bar.add_task("starting", total=run.steps, completed=start, status="")

            def show(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
                bar.update(
                    task,
                    description="training",
                    completed=int(record["step"]),
                    status=_status(run, record, eval_metrics),
                )

            yield show
        return
    shown = [time.monotonic()]

    def show_line(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
        if launcher:
            _tell(int(launcher), step=record["step"], text=_status(run, record, eval_metrics))
        if not draws and (
            time.monotonic() - shown[0] > 10 or record["step"] in (start + 1, run.steps)
        ):
            shown[0] = time.monotonic()
            console.print(
                f"step {record['step']:.0f} of {run.steps}: {_status(run, record, eval_metrics)}"
            )

    yield show_line


def _tell(descriptor: int, **what: Any) -> None:
    with suppress(OSError):  # the launcher is gone; that is its business
        os.write(descriptor, json.dumps(what).encode() + b"\n")


def _status(run: Run, record: dict[str, Any], eval_metrics: dict[str, float]) -> str:
    text = f"loss {record['loss']:.4f}"
    if eval_metrics:
        text += f", held out {show_metrics(eval_metrics)}"
    text += f", {show_count(record[f'{run.unit}_per_s'])} {run.unit}/s"
    if record["data_s"] > 0.1 * record["step_s"]:
        text += f", {record['data_s'] / record['step_s']:.0%} waiting for data"
    return text + (f", MFU {record['mfu']:.1%}" if "mfu" in record else "")


def headline(console: Console, prepared: Prepared) -> None:
    spec = prepared.spec
    frozen = f" beside {show_count(spec.num_frozen)} frozen ones" if spec.frozen else ""
    console.print(
        f"[bold]{show_count(spec.num_params)} parameters[/]{frozen} on mesh [bold]{mesh_text(spec.mesh)}[/] "
        f"({spec.mesh.devices.flat[0].device_kind}), {show_bytes(spec.bytes_per_device)} of state on each device, "
        f"{show_count(prepared.flops, ' ')}FLOP a step",
        soft_wrap=True,
    )
    layout = prepared.step.layout
    if layout.padded_rows != layout.rows:
        console.print(
            f"each batch of {layout.rows} rows is padded to {layout.padded_rows}, which the mesh divides",
            highlight=False,
        )
