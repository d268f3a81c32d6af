"""A run in a few numbers, for a page, a table or a program."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from shardwise.rundir.columns import Column
from shardwise.rundir.files import RunRecord
from shardwise.rundir.time_accounting import Account, account
from shardwise.text import SMOOTH, Json

# Parts of metric names that say which direction is better.
LOWER_IS_BETTER = ("loss", "error", "perplexity", "nats", "bits")
HIGHER_IS_BETTER = ("acc", "f1", "auc", "bleu", "precision", "recall")
# Medians are over this many latest steps.
MEDIAN_STEPS = 10_000


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers.

    Attributes:
        run: the content of the run directory.
        account: where the time of the run went.
        status: "finished", "running" or "stopped".
        step: the last step.
        loss: mean training loss over the last `loss_over` steps, or None.
        loss_over: number of steps that `loss` averages.
        held_out: for each validation metric its best value, the step of that value, and its last
            value.
        rates: median throughput by unit, for example `{"tokens/s": 51000.0}`.
        mfu: median model FLOP utilization, or None.
        step_seconds: median seconds per step, or None.
        skipped: number of steps whose update was skipped.
        left: estimated seconds to the end of a run in progress, or None.
    """

    run: RunRecord
    account: Account
    status: str
    step: int
    loss: float | None
    loss_over: int
    held_out: dict[str, tuple[float, int, float]]
    rates: dict[str, float]
    mfu: float | None
    step_seconds: float | None
    skipped: int
    left: float | None

    def as_json(self) -> Json:
        """Return the summary as a JSON object, as `shardwise report --json` writes it."""
        held_out = {
            name: {"best": best, "step": at, "last": last}
            for name, (best, at, last) in self.held_out.items()
        }
        rates = {
            f"{name.removesuffix('/s')}_per_s": rate
            for name, rate in self.rates.items()
        }
        starts = []
        for start in self.account.starts:
            fields = dataclasses.asdict(start)
            first, last = fields.pop("first"), fields.pop("last")
            starts.append({"from": first, "to": last, **fields})
        return {
            "run": str(self.run.path),
            "status": self.status,
            "step": self.step,
            "steps": self.run.num_steps,
            "loss": self.loss,
            "held_out": held_out,
            **rates,
            "mfu": self.mfu,
            "step_s": self.step_seconds,
            "skipped": self.skipped,
            "wall_s": self.account.wall,
            "useful_s": self.account.useful,
            "goodput": self.account.goodput,
            "steps_done_again": self.account.again,
            "seconds": self.account.seconds,
            "starts": starts,
            "notes": self.run.notes,
        }


def summarize(run: RunRecord) -> Summary:
    """Return the summary of a run."""
    accounted = account(run)
    losses = _finite(run.column("loss")).values
    loss_over = max(1, round(SMOOTH * len(losses)))
    # The first step of a start loads programs and is slower than all others.
    first_steps = {start.first + 1 for start in accounted.starts}
    status = _status(run)
    step_seconds = _median(run.column("step_s"), first_steps)
    left = None
    if status == "running" and run.num_steps and step_seconds is not None:
        left = (run.num_steps - run.last_step) * step_seconds
    return Summary(
        run=run,
        account=accounted,
        status=status,
        step=run.last_step,
        loss=float(np.mean(losses[-loss_over:])) if len(losses) else None,
        loss_over=loss_over,
        held_out=_validation_metrics(run),
        rates=_rates(run, first_steps),
        mfu=_median(run.column("mfu"), first_steps),
        step_seconds=step_seconds,
        skipped=int(np.count_nonzero(run.column("skipped").values)),
        left=left,
    )


def _validation_metrics(run: RunRecord) -> dict[str, tuple[float, int, float]]:
    metrics = {}
    for name, column in run.columns.items():
        finite = _finite(column)
        if not name.startswith("eval_") or not len(finite):
            continue
        values = finite.values
        best = int(np.argmax(values) if better(name) > 0 else np.argmin(values))
        metrics[name.removeprefix("eval_")] = (
            float(values[best]),
            int(finite.steps[best]),
            float(values[-1]),
        )
    return metrics


def _rates(run: RunRecord, first_steps: set[int]) -> dict[str, float]:
    rates = {}
    for name, column in run.columns.items():
        median = _median(column, first_steps) if name.endswith("_per_s") else None
        if median is not None:
            rates[f"{name.removesuffix('_per_s')}/s"] = median
    return rates


def _finite(column: Column) -> Column:
    with np.errstate(all="ignore"):
        keep = np.abs(column.values) < 1e100
    return column if np.all(keep) else Column(column.steps[keep], column.values[keep])


def _median(column: Column, first_steps: set[int]) -> float | None:
    """Return the median of the latest values, without first steps unless there are no others."""
    finite = _finite(column)
    steps = finite.steps[-MEDIAN_STEPS:]
    values = finite.values[-MEDIAN_STEPS:]
    others = values[~np.isin(steps, list(first_steps))]
    if len(others):
        values = others
    return float(np.median(values)) if len(values) else None


def _status(run: RunRecord) -> str:
    if run.num_steps is not None and run.last_step >= run.num_steps:
        return "finished"
    return "running" if run.owner else "stopped"


def better(name: str) -> int:
    """Return 1 if more is better for a metric, -1 if less is, 0 if its name does not say.

    Example:
        >>> better("eval_loss"), better("eval_accuracy"), better("grad_norm")
        (-1, 1, 0)
    """
    lower = name.lower()
    if any(part in lower for part in LOWER_IS_BETTER):
        return -1
    if any(part in lower for part in HIGHER_IS_BETTER):
        return 1
    return 0
