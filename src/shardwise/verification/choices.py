"""Compare discrete choices: the experts that a router chooses for each token.

Rounding changes scores by a few units in the last place. Where two experts have almost the same
score, that decides between them, and everything after it changes by more than rounding. Such
choices are counted separately.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from flax import nnx

from shardwise.loss import LossValue, call_loss
from shardwise.module import Pure
from shardwise.run import Run
from shardwise.state import TrainState
from shardwise.step import TrainStep
from shardwise.step.access import access_hooks
from shardwise.tracing.choices import Choices, read_choices
from shardwise.tree import Batch, PyTree

# Scores that are closer to each other, in relation to the largest one, differ by rounding only.
ROUNDING = 1e-4

# The scores and the chosen indices of each `top_k` of a step.
HostChoices: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ChangedChoices:
    """How many choices of `jax.lax.top_k` a mesh makes differently.

    Attributes:
        changed: the number of choices that differ. Each token makes one per layer of experts.
        total: the number of all choices.
        gap: the largest distance of two scores, of which one device prefers the first and the mesh
            the second, in relation to the largest score.
    """

    changed: int = 0
    total: int = 0
    gap: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether choices have changed, and all of them by rounding."""
        return bool(self.changed) and self.gap < ROUNDING

    def __add__(self, other: "ChangedChoices") -> "ChangedChoices":
        return ChangedChoices(
            self.changed + other.changed,
            self.total + other.total,
            max(self.gap, other.gap),
        )

    def __str__(self) -> str:
        return (
            f"{self.changed:,} of {self.total:,} choices of experts differ, where scores are "
            f"within {self.gap:.1e} of each other"
        )


def choice_reader(run: Run, step: TrainStep) -> Callable[[TrainState, Batch], Choices]:
    """Return a jitted function from a state and a batch to the choices in the forward pass.

    Args:
        run: the run.
        step: its step.
    """
    hooks = access_hooks(step.spec)

    def forward(model: nnx.Module, _: Pure, *args: PyTree) -> LossValue:
        return call_loss(run.loss, model, *args)

    def loss(state: TrainState, batch: Batch) -> LossValue:
        key = jax.random.fold_in(jax.random.key(run.seed), state.step)
        arrays = (state.params, state.frozen, state.other)
        return step.spec.call(forward, arrays, batch, key, state.step, hooks=hooks)

    reader: Callable[[TrainState, Batch], Choices] = jax.jit(read_choices(loss))
    return reader


def choices_to_host(choices: Choices, rows: int) -> HostChoices:
    """Return choices as NumPy arrays.

    Args:
        choices: the scores and the chosen indices of each `top_k`.
        rows: the number of examples without padding.
    """
    return [
        (np.asarray(scores)[..., :rows, :, :], np.asarray(chosen)[..., :rows, :, :])
        for scores, chosen in choices
        # Scores of the tokens of all sequences, (..., B, T, E).
        if scores.ndim > 2
    ]


def compare_choices(one: HostChoices, many: HostChoices) -> ChangedChoices:
    """Return how many choices differ.

    A pipeline computes microbatches, whose choices cannot be compared with those of the batch.

    Args:
        one: the choices on one device.
        many: those on a mesh.
    """
    result = ChangedChoices()
    shapes = [[scores.shape for scores, _ in choices] for choices in (one, many)]
    if shapes[0] != shapes[1]:
        return result
    for (scores, chosen), (_, other) in zip(one, many, strict=True):
        result += _compare(scores, chosen, other)
    return result


def _compare(
    scores: np.ndarray, chosen: np.ndarray, other: np.ndarray
) -> ChangedChoices:
    is_chosen, is_other = (np.zeros(scores.shape, bool) for _ in range(2))
    np.put_along_axis(is_chosen, chosen, True, axis=-1)
    np.put_along_axis(is_other, other, True, axis=-1)
    lost, gained = is_chosen & ~is_other, is_other & ~is_chosen
    changed = lost.any(-1)
    total = changed.size
    if not changed.any():
        return ChangedChoices(0, total)
    highest = np.where(lost, scores, -np.inf)[changed].max(-1)
    lowest = np.where(gained, scores, np.inf)[changed].min(-1)
    gap = float((highest - lowest).max() / np.abs(scores).max())
    return ChangedChoices(int(changed.sum()), total, gap)
