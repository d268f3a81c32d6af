"""What a run did, for people: its curve as a picture, its end as a few lines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

from shardwise.metrics import read_metrics
from shardwise.text import show_count as show_count
from shardwise.text import show_seconds as show_seconds
from shardwise.text import smoothed


def warn(console: Console, text: str) -> None:
    """Print a warning, on one line and without markup."""
    console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def working(console: Console, text: str) -> Iterator[None]:
    """Show a spinner on a terminal, or print one line elsewhere, while something takes long.

    Args:
        console: where to show it.
        text: the operation, for example "compiling the step".
    """
    if console.is_terminal:
        with console.status(text):
            yield
        return
    console.print(text, highlight=False)
    yield


def progress_bar(console: Console) -> Progress:
    """Steps done of all, a status, the time taken and the time left."""
    counted = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    return Progress(
        *counted, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console
    )


def plot_losses(metrics: Path, picture: Path) -> None:
    """Training loss of every step and held-out loss, from `metrics.jsonl` to a PNG file."""
    records = read_metrics(metrics)
    trained = [(r["step"], r["loss"]) for r in records if "loss" in r and not r.get("skipped")]
    held_out = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    with line_picture(
        picture, xlabel="step", ylabel="loss", title=str(picture.parent.name)
    ) as axes:
        axes.plot(*zip(*trained, strict=True), color="#9db8d9", linewidth=1, label="training")
        smooth = smoothed([loss for _, loss in trained], 0.05)
        axes.plot(
            [step for step, _ in trained],
            smooth,
            color="#1f4e8c",
            linewidth=2,
            label="training, smoothed",
        )
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True),
                color="#d1495b",
                marker="o",
                label=f"held out, {held_out[-1][1]:.3f} at the end",
            )


@contextmanager
def line_picture(picture: Path, **labels: Any) -> Iterator[Any]:
    """Axes to plot lines on; written as a PNG file at the end. `labels` are those of `axes.set`: xlabel, ylabel, title ..."""
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


def show_metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
