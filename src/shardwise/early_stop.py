"""Early stopping, decided from the evaluations alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class EarlyStop:
    """Stop after `patience` consecutive evaluations without improvement.

    The decision is a function of all evaluations so far. No state is kept, so a resumed run decides
    as a run that was never interrupted.

    Attributes:
        metric: a metric of an evaluation, by its name in `metrics.jsonl`.
        patience: the number of consecutive evaluations without improvement after which the run
            stops.
        min_delta: a value counts as an improvement if it is better than the best one by more than
            this.
        largest: whether larger values are better.

    Example:
        >>> Run(..., eval_every=100, stop_when=EarlyStop("eval_accuracy", patience=5, largest=True))
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    largest: bool = False

    def __post_init__(self) -> None:
        # `not >=` also refuses NaN.
        if self.patience < 1 or not self.min_delta >= 0:
            raise ConfigError(f"{self}: `patience` must be at least 1 and `min_delta` at least 0.")

    def why(self, evaluations: Sequence[tuple[int, float]]) -> str | None:
        """Return why the run stops after the last evaluation, or None if it continues.

        Args:
            evaluations: `(step, value)` of each evaluation, in order.
        """
        best, best_step, count = math.nan, 0, 0
        for step, value in evaluations:
            gain = value - best if self.largest else best - value
            # `not <=` is also true for the first finite value, when `best` is NaN.
            if math.isfinite(value) and not gain <= self.min_delta:
                best, best_step, count = value, step, 0
            else:
                count += 1
        if count < self.patience:
            return None
        if not best_step:
            return f"{self.metric} has not been finite for {count} evaluations"
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"{self.metric} has not improved on {best:.6g} (step {best_step}){margin} "
            f"for {count} evaluations"
        )
