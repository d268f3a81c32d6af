"""Output for people: warnings, status lines, progress bars, and curves as PNG files.

This module imports no JAX at its top, because the launcher uses it before any process needs JAX.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from shardwise.text import printable, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def warn(console: Console, text: str) -> None:
    """Print a warning, on one line and without markup. It may quote a file of a stranger."""
    shown = escape(printable(text, keep="\n\t"))
    console.print(f"[bold yellow]warning:[/] {shown}", highlight=False, soft_wrap=True)


@contextmanager
def working(console: Console, text: str = "") -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal, or print lines elsewhere, while something takes long.

    Args:
        console: where to show it.
        text: the operation, for example "compiling the step".

    Yields:
        A function that shows another text, for an operation of several parts.
    """
    if console.is_terminal:
        with console.status(escape(text)) as status:
            yield lambda text: status.update(escape(text))
        return

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if text:
        show(text)
    yield show


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with steps, a status text, elapsed time and remaining time.

    Tasks of the bar need a field `status`: `bar.add_task("training", total=100, status="")`.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        # The bar passes on what the process prints, above itself. Text for a file or a pipe does
        # not disturb it, and must arrive there.
        redirect_stdout=sys.stdout.isatty(),
    )


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as text: `loss 0.5123, accuracy 0.8800`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def plot_losses(metrics: Path, picture: Path) -> None:
    """Plot training loss and validation loss.

    Args:
        metrics: the `metrics.jsonl` of a run.
        picture: the PNG file to write.
    """
    # Here, because shardwise.metrics imports JAX.
    from shardwise.metrics import read_metrics

    records = read_metrics(metrics)
    applied = [
        record for record in records if "loss" in record and not record.get("skipped")
    ]
    evaluated = [record for record in records if "eval_loss" in record]
    steps = [record["step"] for record in applied]
    losses = [_number(record["loss"]) for record in applied]
    # Matplotlib takes text between two dollar signs for a formula.
    title = picture.parent.name.replace("$", r"\$")
    with line_picture(picture, xlabel="step", ylabel="loss", title=title) as axes:
        axes.plot(steps, losses, color="#9db8d9", linewidth=1, label="training")
        label = "training, smoothed"
        axes.plot(
            steps, smoothed(losses, 0.05), color="#1f4e8c", linewidth=2, label=label
        )
        if evaluated:
            values = [_number(record["eval_loss"]) for record in evaluated]
            axes.plot(
                [record["step"] for record in evaluated],
                values,
                color="#d1495b",
                marker="o",
                label=f"validation ({values[-1]:.3f} at the end)",
            )


def _number(value: object) -> float:
    """Return a number of `metrics.jsonl`, where non-finite ones are texts; NaN for other values."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


@contextmanager
def line_picture(picture: Path, **labels: object) -> Iterator["Axes"]:
    """Yield axes to plot lines on, and write them to a PNG file at the end.

    Args:
        picture: the file to write.
        **labels: arguments of `axes.set`: `xlabel`, `ylabel`, `title` and others.
    """
    # Here, because matplotlib takes most of a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    yield axes
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=120)
