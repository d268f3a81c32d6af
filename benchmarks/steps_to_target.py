"""Compare optimizers by the tokens and seconds that they need to reach AdamW's final loss.

    python -m benchmarks.steps_to_target build/optimizers.jsonl

The file is one of `benchmarks.long_runs`. For each optimizer, the rate with the lowest mean
validation loss counts. The page docs/optimizer_targets.md and its picture are generated.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.long_runs import MEAN_OVER
from benchmarks.page import DOCS, table

# A line of the file.
Line: TypeAlias = dict

# The target is the mean training loss of the last steps of AdamW with the same seed, which has the
# same data. The others reach it when their mean over as many steps does.
WINDOW = 100


@dataclass(frozen=True)
class Result:
    """The runs of one optimizer with its best learning rate, one for each seed.

    Attributes:
        name: the optimizer.
        rate: its peak learning rate.
        lines: a line of the file for each seed.
        rates: all rates that were tried, with the mean validation loss of each.
    """

    name: str
    rate: float
    lines: tuple[Line, ...]
    rates: dict[float, float]

    @property
    def step_ms(self) -> float:
        """The median time per step."""
        return statistics.median(line["step_ms"] for line in self.lines)

    @property
    def validation(self) -> float:
        """The mean validation loss."""
        return statistics.mean(line["validation_loss"] for line in self.lines)

    @property
    def last_losses(self) -> dict[int, float]:
        """The mean training loss of the last steps, by seed."""
        return {line["seed"]: smoothed(line["losses"])[-1] for line in self.lines}

    def steps_to(self, targets: dict[int, float]) -> list[int | None]:
        """Return the step at which each run reaches its target; None if it does not.

        Args:
            targets: the training loss to reach, by seed.
        """
        found: list[int | None] = []
        for line in self.lines:
            losses = smoothed(line["losses"])
            reached = np.flatnonzero(losses <= targets[line["seed"]])
            found.append(WINDOW + int(reached[0]) * MEAN_OVER if len(reached) else None)
        return found


def smoothed(losses: list[float]) -> np.ndarray:
    """Return running means over `WINDOW` steps of a curve with one value per `MEAN_OVER`."""
    count = WINDOW // MEAN_OVER
    return np.convolve(losses, np.ones(count) / count, mode="valid")


def best_results(lines: list[Line]) -> dict[str, Result]:
    """Return the result of each optimizer with its best rate."""
    groups: dict[str, dict[float, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        groups[line["run"]][line["rate"]].append(line)
    results = {}
    for name, by_rate in groups.items():
        losses = {
            rate: statistics.mean(line["validation_loss"] for line in found)
            for rate, found in by_rate.items()
        }
        best = min(losses, key=losses.__getitem__)
        results[name] = Result(name, best, tuple(by_rate[best]), losses)
    return results


def show(result: Result, adamw: Result) -> list[str]:
    """Return a row of the table."""
    steps = result.steps_to(adamw.last_losses)
    reached = [step for step in steps if step is not None]
    losses = [line["validation_loss"] for line in result.lines]
    tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in result.rates.items())
    to_target = seconds = f"{len(reached)} of {len(steps)} seeds reach it"
    if len(reached) == len(steps):
        mean = statistics.mean(reached)
        tokens = mean * result.lines[0]["tokens_per_step"] / 1e6
        shares = [f"{step / adamw.lines[0]['steps']:.0%}" for step in reached]
        to_target = f"{tokens:.1f} M ({', '.join(shares)})"
        seconds = f"{mean * result.step_ms / 1e3:.0f} s"
    return [
        f"`{result.name}`",
        f"{result.rate:g}",
        ", ".join(f"{loss:.3f}" for loss in losses),
        f"{result.step_ms:.1f} ms",
        to_target,
        seconds,
        tried,
    ]


def page(results: dict[str, Result]) -> str:
    """Return the page."""
    adamw = results["adamw"]
    one = adamw.lines[0]
    targets = ", ".join(f"{loss:.3f}" for loss in adamw.last_losses.values())
    ordered = sorted(results.values(), key=lambda result: result.validation)
    columns = [
        "optimizer",
        "peak rate",
        "validation loss of each seed",
        "step time",
        "tokens to the target",
        "time to the target",
        "mean validation loss by rate",
    ]
    rows = [show(result, adamw) for result in ordered]
    return f"""# Optimizers by steps to a target

GPT-2 124M on Python source code, {one["steps"]:,} steps of {one["tokens_per_step"]:,} tokens
({one["epochs"]:.2f} epochs), weight decay 0.1, clipping at 1.0, computed in bfloat16 on one
{one["device"]} with jax {one["jax"]}. Rates follow a cosine after a warm-up of a fifteenth of the
steps; that of `schedule_free` stays constant. Muon, NorMuon and SOAP use Adam for the tables of
tokens and positions.

The target is AdamW's training loss in its last {WINDOW} steps with the same seed, so with the same
data: {targets}. A row counts the tokens until the mean over {WINDOW} steps is as low: the mean of
all seeds, and the share of AdamW's tokens for each.

{table(columns, rows)}

![Training losses of all optimizers](optimizer_targets.png)

The best of the rates that were tried counts. `python -m benchmarks.long_runs` describes how to
measure this again, and `python -m benchmarks.steps_to_target` generates this page.
"""


def picture(results: dict[str, Result], path: Path) -> None:
    """Draw the training losses, averaged over the seeds."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for result in results.values():
        curves = [smoothed(line["losses"]) for line in result.lines]
        mean = np.mean(curves, axis=0)
        tokens = result.lines[0]["tokens_per_step"]
        steps = WINDOW + np.arange(len(mean)) * MEAN_OVER
        axes.plot(steps * tokens / 1e6, mean, label=result.name, linewidth=1.3)
    low = min(min(line["losses"]) for x in results.values() for line in x.lines)
    axes.set(xlabel="million tokens", ylabel="training loss", ylim=(low - 0.1, low + 2))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a file of benchmarks.long_runs")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    results = best_results(lines)
    (options.docs / "optimizer_targets.md").write_text(page(results))
    picture(results, options.docs / "optimizer_targets.png")


if __name__ == "__main__":
    main()
