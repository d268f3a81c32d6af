"""When something that happens at a fixed interval of steps is due."""

from shardwise.run import Run


def is_due(n: int, every: int, last: int | None = None) -> bool:
    """Return whether something that happens at a fixed interval is due at step `n`.

    Args:
        n: the step.
        every: the number of steps; 0 means never, except at `last`.
        last: a step at which it is due in any case.

    Example:
        >>> is_due(20, every=10), is_due(25, every=10), is_due(25, every=0, last=25)
        (True, False, True)
    """
    return n == last or bool(every and n % every == 0)


def is_evaluation_due(run: Run, n: int) -> bool:
    """Return whether a run evaluates after step `n`: every `eval_every` steps and at its end."""
    return run.eval_data is not None and is_due(n, run.eval_every, run.steps)
