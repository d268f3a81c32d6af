"""A run in a few numbers, for a page, a table or a program."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.rundir.columns import Column
from shardwise.rundir.files import RunRecord
from shardwise.rundir.time_accounting import Account, account
from shardwise.text import SMOOTH

LOWER, HIGHER = (
    ("loss", "error", "perplexity", "nats", "bits"),
    ("acc", "f1", "auc", "bleu", "precision", "recall"),
)


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers."""

    run: RunRecord
    account: Account
    status: str
    step: int
    loss: float | None  # mean of the last steps
    loss_over: int  # how many of them
    held_out: dict[str, tuple[float, int, float]]  # the best value, its step, the last value
    rates: dict[str, float]  # median throughput: "tokens/s"
    mfu: float | None
    step_seconds: float | None
    skipped: int
    left: float | None  # seconds to the end, if it goes on

    def as_json(self) -> dict[str, Any]:
        starts = [
            {
                "from": s.first,
                "to": s.last,
                "begun": s.begun,
                "end": s.end,
                "down": s.down,
                "again": s.again,
                "seconds": s.seconds,
            }
            for s in self.account.starts
        ]
        return {
            "run": str(self.run.path),
            "status": self.status,
            "step": self.step,
            "steps": self.run.num_steps,
            "loss": self.loss,
            "held_out": {
                name: {"best": best, "step": at, "last": last}
                for name, (best, at, last) in self.held_out.items()
            },
            **{f"{name.removesuffix('/s')}_per_s": rate for name, rate in self.rates.items()},
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
    found = account(run)
    loss = _finite(run.column("loss"))
    over = max(1, round(SMOOTH * len(loss)))
    held_out = {}
    for name, column in run.columns.items():
        values = _finite(column)
        if name.startswith("eval_") and len(values):
            at = int(np.argmax(values.values) if better(name) > 0 else np.argmin(values.values))
            held_out[name.removeprefix("eval_")] = (
                float(values.values[at]),
                int(values.steps[at]),
                float(values.values[-1]),
            )
    firsts = {start.first + 1 for start in found.starts}
    rates = {
        f"{name.removesuffix('_per_s')}/s": median
        for name, column in run.columns.items()
        if name.endswith("_per_s") and (median := _median(column, firsts)) is not None
    }
    skipped = run.column("skipped")
    status = _status(run)
    seconds = _median(run.column("step_s"), firsts)
    left = (
        (run.num_steps - run.last_step) * seconds
        if status == "going on" and run.num_steps and seconds is not None
        else None
    )
    return Summary(
        run=run,
        account=found,
        status=status,
        step=run.last_step,
        loss=float(np.mean(loss.values[-over:])) if len(loss) else None,
        loss_over=over,
        held_out=held_out,
        rates=rates,
        mfu=_median(run.column("mfu"), firsts),
        step_seconds=seconds,
        skipped=int(np.count_nonzero(skipped.values)),
        left=left,
    )


def _finite(column: Column) -> Column:
    with np.errstate(all="ignore"):
        keep = np.abs(column.values) < 1e100
    return column if np.all(keep) else Column(column.steps[keep], column.values[keep])


def _median(column: Column, without: set[int]) -> float | None:
    """Of the latest ten thousand values, the first steps of the starts left out if there are others."""
    values = _finite(column)
    values = Column(values.steps[-10_000:], values.values[-10_000:])
    others = values.values[~np.isin(values.steps, list(without))]
    found = others if len(others) else values.values
    return float(np.median(found)) if len(found) else None


def _status(run: RunRecord) -> str:
    if run.num_steps is not None and run.last_step >= run.num_steps:
        return "finished"
    return "going on" if run.owner else "stopped"


def better(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where that cannot be told from the name."""
    lower = name.lower()
    return (
        -1
        if any(word in lower for word in LOWER)
        else 1
        if any(word in lower for word in HIGHER)
        else 0
    )
