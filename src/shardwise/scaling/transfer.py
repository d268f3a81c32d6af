"""Best learning rates of several widths, and the loss of larger models predicted from them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.text import NONE

# Exponents of the power law that are tried.
EXPONENTS = np.linspace(0.01, 1.0, 100)
# Resampled fits, from which the uncertainty follows.
NUM_RESAMPLED = 200
# Losses of two seeds differ by about this fraction, unless several seeds were measured.
NOISE = 0.003
# The interval that is shown contains this fraction of the predictions.
INTERVAL = 0.9
# Losses at the best rate of each width and at all other rates, by width and rate.
Losses = Mapping[int, Mapping[float, float | None]]


def parse_rates(text: str) -> list[float]:
    """Parse "1e-4:1e-1:7" as rates that are evenly spaced on a log scale.

    Raises:
        ConfigError: for anything else.

    Example:
        >>> parse_rates("1e-3:1e-1:3")
        [0.001, 0.01, 0.1]
    """
    try:
        low, high, number = text.split(":")
        first, last, count = float(low), float(high), int(number)
        is_valid = 0 < first < last and count > 1
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"--rates '{text}' is not a range of learning rates. Example: 1e-4:1e-1:7."
        )
    return [float(f"{rate:.3g}") for rate in np.geomspace(first, last, count)]


@dataclass(frozen=True)
class Best:
    """The best learning rate of one width.

    Attributes:
        width: the width.
        rate: the rate with the smallest loss.
        loss: this loss.
        is_edge: whether it is the smallest or the largest rate that was tried.
        seeds: the losses of all seeds with this rate, if there are several. Then `loss` is their
            mean.
    """

    width: int
    rate: float
    loss: float
    is_edge: bool
    seeds: tuple[float, ...] = ()


def best_rates(losses: Losses) -> list[Best]:
    """Return the best rate of each width, without widths whose runs have all failed."""
    found = []
    for width, by_rate in sorted(losses.items()):
        finite = {
            rate: loss
            for rate, loss in by_rate.items()
            if loss is not None and math.isfinite(loss)
        }
        if not finite:
            continue
        rate = min(finite, key=lambda rate: finite[rate])
        is_edge = rate in (min(by_rate), max(by_rate))
        found.append(Best(width=width, rate=rate, loss=finite[rate], is_edge=is_edge))
    return found


def loss_table(losses: Losses, best: Sequence[Best], title: str) -> Table:
    """Return a table with the losses of all runs, and the best rates.

    Args:
        losses: the losses of the grid.
        best: the best rates, perhaps with several seeds.
        title: the title.
    """
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    columns = ["width", *(f"{rate:g}" for rate in rates), "best rate"]
    has_seeds = any(found.seeds for found in best)
    if has_seeds:
        columns.append("mean of its seeds")
    table = Table(*columns, title=title, title_justify="left")
    by_width = {found.width: found for found in best}
    for width, by_rate in sorted(losses.items()):
        values = [by_rate.get(rate) for rate in rates]
        cells = [NONE if value is None else f"{value:.4f}" for value in values]
        found = by_width.get(width)
        cells.append(f"{found.rate:g}" if found else NONE)
        if has_seeds:
            cells.append(_show_seeds(found) if found else NONE)
        table.add_row(str(width), *cells)
    return table


def _show_seeds(best: Best) -> str:
    """Return the mean of several seeds and their standard deviation."""
    if len(best.seeds) < 2:
        return NONE
    return f"{best.loss:.4f} ± {statistics.stdev(best.seeds):.4f}"


@dataclass(frozen=True)
class PowerLaw:
    """The loss as a function of compute: `limit + factor * compute ** -exponent`.

    Attributes:
        limit: the loss with unlimited compute.
        factor: the factor of the power.
        exponent: its exponent.
        unit: the compute that counts as 1.
    """

    limit: float
    factor: float
    exponent: float
    unit: float

    def __call__(self, compute: float) -> float:
        """Return the loss for some compute, in FLOP."""
        power = (compute / self.unit) ** -self.exponent
        return float(self.limit + self.factor * power)


def fit_power_law(compute: Sequence[float], losses: Sequence[float]) -> PowerLaw:
    """Fit a power law to at least three losses by least squares.

    Raises:
        ConfigError: with fewer than three losses.
    """
    if len(compute) < 3:
        raise ConfigError(
            f"a power law needs the losses of 3 widths, and there are {len(compute)}. Add --sizes."
        )
    unit = min(compute)
    x, y = np.asarray(compute) / unit, np.asarray(losses)
    best: tuple[float, PowerLaw] | None = None
    for exponent in EXPONENTS:
        powers = x**-exponent
        limit, factor = _least_squares(powers, y)
        error = float(np.sum((limit + factor * powers - y) ** 2))
        if best is None or error < best[0]:
            best = (
                error,
                PowerLaw(
                    limit=limit, factor=factor, exponent=float(exponent), unit=unit
                ),
            )
    assert best is not None
    return best[1]


def _least_squares(powers: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return limit and factor, neither of them negative unless losses are."""
    columns = np.stack([np.ones_like(powers), powers], axis=1)
    limit, factor = np.linalg.lstsq(columns, y, rcond=None)[0]
    if limit < 0 < y.min():
        return 0.0, float(powers @ y / (powers @ powers))
    if factor < 0:
        return float(y.mean()), 0.0
    return float(limit), float(factor)


@dataclass(frozen=True)
class Prediction:
    """A predicted loss.

    Attributes:
        loss: the loss.
        low: the lower end of the interval.
        high: its upper end.
        law: the power law.
    """

    loss: float
    low: float
    high: float
    law: PowerLaw


def relative_error(best: Sequence[Best]) -> float:
    """Return the relative standard error of the losses, from the seeds of all widths.

    Without several seeds it is `NOISE`.

    Example:
        >>> best = Best(64, 0.1, 2.0, False, seeds=(1.98, 2.0, 2.02))
        >>> round(relative_error([best]), 4)
        0.0058
    """
    several = [found for found in best if len(found.seeds) > 1]
    if not several:
        return NOISE
    variances = [
        statistics.variance(found.seeds) / found.loss**2 / len(found.seeds)
        for found in several
    ]
    return math.sqrt(statistics.mean(variances))


def predict(
    compute: Sequence[float],
    losses: Sequence[float],
    target: float,
    error: float = NOISE,
) -> Prediction:
    """Predict the loss of a larger run, with a 90 % interval from resampled losses.

    Args:
        compute: the compute of the runs, in FLOP.
        losses: their losses.
        target: the compute of the larger run.
        error: the relative standard error of the losses.
    """
    law = fit_power_law(compute, losses)
    fitted = np.array([law(value) for value in compute])
    residuals = np.asarray(losses) - fitted
    freedom = max(1, len(losses) - 3)
    spread = math.sqrt(float(residuals @ residuals) / freedom)
    spread = max(spread, error * min(map(abs, losses)))
    random = np.random.default_rng(0)
    predictions = []
    for _ in range(NUM_RESAMPLED):
        resampled = fitted + spread * random.standard_normal(len(fitted))
        predictions.append(fit_power_law(compute, resampled.tolist())(target))
    tail = (1 - INTERVAL) / 2
    low, high = np.quantile(predictions, [tail, 1 - tail])
    return Prediction(loss=law(target), low=float(low), high=float(high), law=law)


def plot_rates(losses: Losses, picture: Path, title: str) -> None:
    """Plot the loss against the learning rate, one line for each width.

    Args:
        losses: the losses.
        picture: the PNG file to write.
        title: the title.
    """
    from shardwise.console import line_picture

    labels = {"xlabel": "learning rate", "ylabel": "loss", "title": title}
    best = {found.width: found for found in best_rates(losses)}
    finite = [found.loss for found in best.values()]
    if not finite:
        return
    # Diverged runs would hide the others.
    limits = min(finite) * 0.98, max(finite) * 1.5
    with line_picture(picture, xscale="log", ylim=limits, **labels) as axes:
        for number, (width, by_rate) in enumerate(sorted(losses.items())):
            shade = 0.25 + 0.75 * (number + 1) / len(losses)
            color = (0.12, 0.31, 0.55, shade)
            rates = sorted(by_rate)
            values = [by_rate[rate] for rate in rates]
            shown = [math.nan if value is None else value for value in values]
            axes.plot(rates, shown, color=color, marker="o", label=f"width {width}")
            if width in best:
                found = best[width]
                axes.plot([found.rate], [found.loss], "*", color="#d1495b", ms=12)
