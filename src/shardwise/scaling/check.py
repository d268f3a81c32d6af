"""The coordinate check: how the sizes of activations and of their changes depend on the width."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from shardwise.data.layout import as_arrays, map_rows
from shardwise.errors import ConfigError
from shardwise.run import Run, prepare
from shardwise.scaling.record import Recorded, recorded
from shardwise.scaling.roles import growing_dims
from shardwise.scaling.trace import abstract_model, input_numbers, trace_loss_of
from shardwise.state import TrainState, init_state
from shardwise.text import Json

# A slope of log size against log width up to this passes.
LIMIT = 0.1
# Outputs may shrink: what initial weights contribute to them vanishes like 1 / sqrt(width).
OUTPUT_LIMIT = -0.6
# Updates of narrow models may shrink this much: where a batch has more tokens than the model has
# channels, a part of them is noise, which vanishes like 1 / sqrt(width).
NOISE_LIMIT = -0.3
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


def measure(
    run: Run,
    steps: int,
    seeds: Sequence[int] = (0,),
    growing: Mapping[str, Collection[int]] | None = None,
) -> Coordinates:
    """Train a few steps, and measure the activations of a few examples before and after.

    Args:
        run: the run. It writes nothing.
        steps: the number of steps.
        seeds: seeds of the initial weights. Sizes are averaged over them.
        growing: the dims of each parameter that grow with the width. It shows which parameters
            take the place of activations.

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
    record = jax.jit(recorded(closed, *input_numbers(arguments), growing or {}))
    key = jax.random.key(0)

    def activations(state: TrainState) -> Recorded:
        parts = (state.params, state.other, state.frozen, examples, key)
        found: Recorded = record(*jax.tree.leaves(parts))
        return found

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


@dataclass(frozen=True)
class Slopes:
    """How one activation depends on the width.

    Attributes:
        name: the parameter that it is computed with.
        activation: the slope of the logarithm of its size against that of the width.
        update: the slope for its change.
        is_output: whether it is an output of the model, or the loss.
    """

    name: str
    activation: float
    update: float
    is_output: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether both slopes are within the limits."""
        lowest = OUTPUT_LIMIT if self.is_output else -LIMIT
        slopes = self.activation, self.update
        return all(lowest <= slope <= LIMIT for slope in slopes)

    @property
    def worst(self) -> float:
        """The slope that is farther from zero."""
        return max(self.activation, self.update, key=abs)


@dataclass(frozen=True)
class Check:
    """The result of a coordinate check.

    Attributes:
        widths: the widths, in ascending order.
        coordinates: the sizes of activations, for each width.
        title: what was checked.
        outputs: the parameters whose results are outputs of the model.
    """

    widths: tuple[int, ...]
    coordinates: tuple[Coordinates, ...]
    title: str
    outputs: frozenset[str] = frozenset()

    @property
    def slopes(self) -> list[Slopes]:
        """The slopes of all activations, those outside of the limits first.

        Activations of size zero are omitted. A slope is infinite if a size is not finite.
        """
        found = []
        for name in self.coordinates[0].activations:
            sizes = [point.activations[name] for point in self.coordinates]
            changes = [point.updates[name] for point in self.coordinates]
            values = (*sizes, *changes)
            if not all(map(math.isfinite, values)):
                found.append(Slopes(name, math.inf, math.inf))
            elif min(values) > 0:
                slopes = self._slope(sizes), self._slope(changes)
                path = name.partition(" #")[0]
                is_output = path in self.outputs or name == "loss"
                found.append(Slopes(name, *slopes, is_output))
        return sorted(found, key=lambda slopes: (slopes.is_ok, -abs(slopes.worst)))

    def _slope(self, sizes: Sequence[float]) -> float:
        x, y = np.log2(self.widths), np.log2(sizes)
        return float(np.polyfit(x, y, 1)[0])

    @property
    def worst(self) -> float:
        """The slope that is farthest from zero, of an output only if it exceeds the limits."""
        first = [
            found for found in self.slopes if not (found.is_ok and found.is_output)
        ]
        return first[0].worst if first else 0.0

    @property
    def is_ok(self) -> bool:
        """Whether all slopes are within the limit."""
        return bool(self.slopes) and all(found.is_ok for found in self.slopes)

    @property
    def may_be_noise(self) -> bool:
        """Whether all activations outside of the limits change less with the width, slowly."""
        failed = [found for found in self.slopes if not found.is_ok]
        return bool(failed) and all(
            NOISE_LIMIT <= found.activation <= LIMIT and NOISE_LIMIT <= found.update < 0
            for found in failed
        )

    def table(self, most: int = 12) -> Table:
        """Return a table of the worst slopes.

        Args:
            most: the largest number of lines.
        """
        columns = ("output of", "slope of its size", "slope of its change")
        table = Table(*columns, title=self.title, title_justify="left")
        for found in self.slopes[:most]:
            slopes = f"{found.activation:+.3f}", f"{found.update:+.3f}"
            note = " (output)" if found.is_output else ""
            table.add_row(f"{found.name}{note}", *slopes)
        return table

    def as_json(self) -> Json:
        """Return the check as JSON."""
        return {
            "title": self.title,
            "ok": self.is_ok,
            "worst": self.worst,
            "limit": LIMIT,
            "widths": list(self.widths),
            "losses": [point.loss for point in self.coordinates],
            "slopes": [asdict(found) for found in self.slopes],
            "activations": [dict(point.activations) for point in self.coordinates],
            "updates": [dict(point.updates) for point in self.coordinates],
        }


def check_coordinates(
    make_run: Callable[[int], Run],
    widths: Sequence[int],
    steps: int,
    seeds: int,
    title: str,
    report: Callable[[str], None],
    outputs: Collection[str] = (),
) -> Check:
    """Carry out a coordinate check.

    Args:
        make_run: returns the run for a width.
        widths: the widths, at least two of them.
        steps: the number of training steps.
        seeds: the number of models to average over.
        title: what is checked.
        report: called with a text before each width.
        outputs: the parameters whose results are outputs of the model. They may shrink.

    Returns:
        The check.

    Raises:
        ConfigError: if there are fewer than two widths, or if the activations differ.
    """
    ordered = tuple(sorted(set(widths)))
    if len(ordered) < 2:
        raise ConfigError(
            f"a coordinate check compares widths, and --sizes has {len(ordered)}. Use at least 2."
        )
    small, large = (abstract_model(make_run(width)) for width in ordered[:2])
    growing = growing_dims(small, large, (ordered[0], ordered[1]))
    found = []
    for width in ordered:
        report(f"{title}: width {width}")
        found.append(measure(make_run(width), steps, range(seeds), growing))
    names = [set(point.activations) for point in found]
    if any(other != names[0] for other in names):
        raise ConfigError(
            "the models of different widths compute different activations, so their sizes cannot "
            "be compared. The width may change the sizes of layers, not their number."
        )
    return Check(
        widths=ordered,
        coordinates=tuple(found),
        title=title,
        outputs=frozenset(outputs),
    )


def plot_checks(checks: Sequence[Check], picture: Path) -> None:
    """Plot sizes of activations and of their changes against the width.

    Args:
        checks: the checks, one row each.
        picture: the PNG file to write.
    """
    # Here, because matplotlib takes most of a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (10, 3.6 * len(checks))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(checks), 2, squeeze=False, sharey="col")
    for axes, check in zip(rows, checks, strict=True):
        shown = check.slopes
        for found in shown:
            color = "#1f4e8c" if found.is_ok else "#d1495b"
            for place, part in zip(axes, ("activations", "updates"), strict=True):
                points = [getattr(point, part) for point in check.coordinates]
                sizes = [point[found.name] for point in points]
                style = {"color": color, "alpha": 0.6, "marker": "o", "markersize": 3}
                place.plot(check.widths, sizes, linewidth=1, **style)
        names = ("size of activations", "change since initialization")
        for place, name in zip(axes, names, strict=True):
            place.set(xscale="log", yscale="log", xlabel="width", ylabel=name)
            place.set_title(f"{check.title}: worst slope {check.worst:+.2f}")
            place.set_xticks(check.widths, [str(width) for width in check.widths])
            place.minorticks_off()
            place.grid(alpha=0.3)
            place.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
