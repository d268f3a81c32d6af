"""The phases of a run: the one place that names them for logs, messages and files."""

from enum import StrEnum


class Phase(StrEnum):
    """What a process of a run is doing.

    Each value is the text that people read, and that `starting.jsonl` and `stacks/` store.
    A phase that belongs to a step is written with its number by `at` or `after`.

    Example:
        >>> Phase.STEP.at(5), Phase.EVALUATING.after(5)
        ('step 5', 'evaluating after step 5')
        >>> Phase.of("evaluating after step 5")
        <Phase.EVALUATING: 'evaluating'>
    """

    # Up to the first step, in this order.
    STARTING = "starting"
    IMPORTING = "importing"
    PREPARING = "preparing"
    VERIFYING = "verifying the newest checkpoint"
    COMPILING = "compiling the step"
    LOADING = "loading the state"
    WAITING_TO_START = "waiting for all to be ready"
    FIRST_STEP = "first step"
    # While the run trains.
    STEP = "step"
    EVALUATING = "evaluating"
    SAVING = "saving step"
    SAMPLING = "sampling"
    PROFILING = "profiling"
    INSPECTING = "inspecting step"
    AUDITING = "auditing step"
    # At the end.
    SAVING_LAST = "saving the last step"
    FINISHING = "finishing"
    WAITING_TO_END = "waiting for all to end"

    def at(self, step: int) -> str:
        """Return the text of this phase for a step: "saving step 5"."""
        return f"{self} {step}"

    def after(self, step: int) -> str:
        """Return the text of this phase between two steps: "evaluating after step 5"."""
        return f"{self} after step {step}"

    @classmethod
    def of(cls, text: str) -> "Phase | None":
        """Return the phase that `text` names, with or without a step number, or None."""
        without_number = text.rstrip("0123456789").rstrip().removesuffix(" after step")
        try:
            return cls(without_number)
        except ValueError:
            return None
