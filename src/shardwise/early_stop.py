"""When a run has learned what it will: early stopping, from the evaluations alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class EarlyStop:
    """Stops after `patience` evaluations in a row without one that is better than the best before by more than `min_delta`.

    It is a function of the evaluations so far and keeps nothing, so a run that resumes knows as much as one that never stopped.
    """

    metric: str = "eval_loss"  # a name in metrics.jsonl, from an evaluation
    patience: int = 3
    min_delta: float = 0.0
    largest: bool = False  # whether more is better

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise ConfigError(f"{self}: `patience` must be at least 1 and `min_delta` at least 0.")

    def why(self, evaluations: Sequence[tuple[int, float]]) -> str | None:
        """Why the run stops after the last of these (step, value), or None if it goes on."""
        best, at, since = math.nan, 0, 0
        for step, value in evaluations:
            gain = value - best if self.largest else best - value
            if (
                math.isfinite(value) and not gain <= self.min_delta
            ):  # also the first that is a number
                best, at, since = value, step, 0
            else:
                since += 1
        if since < self.patience:
            return None
        way = "above" if self.largest else "below"
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        known = f"its {best:.6g} of step {at}" if at else "any number"
        return f"{self.metric} has not come {way} {known}{least} in {since} evaluations"
