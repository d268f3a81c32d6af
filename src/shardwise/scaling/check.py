"""The coordinate check: how the sizes of activations and of their changes depend on the width."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.data.layout import as_arrays, map_rows
from shardwise.errors import ConfigError
from shardwise.run import Run, prepare
from shardwise.scaling.record import Recorded, recorded
from shardwise.scaling.trace import abstract_model, input_numbers, trace_loss_of
from shardwise.state import TrainState, init_state
from shardwise.text import Json

# A slope of log size against log width up to this passes.
LIMIT = 0.1
# Examples whose activations are recorded.
NUM_EXAMPLES = 4


@dataclass(frozen=True)
class Coordinates:
    """Sizes of activations of one model.

    Attributes:
        activations: the root mean square of each activation after training, by name.
        updates: the root mean square of its change since initialization, by name.
        loss: the training loss of the last step.
    """

    activations: Mapping[str, float]
    updates: Mapping[str, float]
    loss: float


def measure(run: Run, steps: int, seeds: Sequence[int] = (0,)) -> Coordinates:
    """Train a few steps, and measure the activations of a few examples before and after.

    Args:
        run: the run. It writes nothing.
        steps: the number of steps.
        seeds: seeds of the initial weights. Sizes are averaged over them.

    Returns:
        The sizes.

    Raises:
        ConfigError: if the run is invalid.
    """
    run = replace(run, out=None, eval_data=None, sample=None, save_every=0)
    prepared = prepare(run)
    first = as_arrays(prepared.batches(0))
    examples = map_rows(lambda leaf: np.asarray(leaf)[:NUM_EXAMPLES], first)
    model = abstract_model(run)
    closed, arguments = trace_loss_of(run, model, examples)
    record = jax.jit(recorded(closed, *input_numbers(arguments)))
    key = jax.random.key(0)

    def activations(state: TrainState) -> Recorded:
        parts = (state.params, state.other, state.frozen, examples, key)
        return record(*jax.tree.leaves(parts))

    squares: list[tuple[dict[str, float], dict[str, float]]] = []
    losses: list[float] = []
    for seed in seeds:
        state = init_state(prepared.spec, seed)
        before = activations(state)
        for number in range(steps):
            batch = prepared.step.place(prepared.batches(number))
            state, metrics = prepared.step(state, batch)
        after = activations(state)
        losses.append(float(metrics["loss"]))
        squares.append(_squares(before, after))
    names = squares[0][0]

    def size(part: int, name: str) -> float:
        return math.sqrt(np.mean([found[part][name] for found in squares]))

    return Coordinates(
        {name: size(0, name) for name in names},
        {name: size(1, name) for name in names},
        float(np.mean(losses)),
    )


def _squares(
    before: Recorded, after: Recorded
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean squares of activations and of their changes."""

    def mean_square(array: jax.Array) -> float:
        return float(jnp.mean(jnp.square(array.astype(jnp.float32))))

    sizes = {name: mean_square(array) for name, array in after.items()}
    changes = {
        name: mean_square(array.astype(jnp.float32) - before[name])
        for name, array in after.items()
    }
    return sizes, changes
