"""Schedules as lines of text and as pictures, without a model or an optimizer."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shardwise.console import line_picture
from shardwise.errors import ConfigError
from shardwise.optim.read import schedule_values
from shardwise.optim.schedules import Schedule, as_schedule
from shardwise.text import columns, sparkline

# More than the pixels of a picture.
MAX_POINTS = 2001


def plot_schedules(
    schedules: Mapping[str, float | Schedule],
    steps: int,
    picture: Path | str | None = None,
) -> str:
    """Draw schedules together, before anything is trained.

    Args:
        schedules: the schedules by name. A number is a constant.
        steps: the length of the run in updates.
        picture: a PNG file to write, with all schedules on the same axes.

    Returns:
        A line of text for each schedule: its name, its curve, and its first value, peak and last
        value. All curves have the same scale, from zero to the largest peak.

    Raises:
        ConfigError: if there is no schedule, or `steps` is below 1.

    Example:
        >>> print(plot_schedules({"linear": linear(1.0, 8), "constant": 0.5}, steps=8))
          linear    ██▇▆▅▄▃▂  first 1    peak 1    last 0.125
          constant  ▅▅▅▅▅▅▅▅  first 0.5  peak 0.5  last 0.5
    """
    if not schedules:
        raise ConfigError("there is no schedule to plot. Pass at least one.")
    if steps < 1:
        raise ConfigError(f"steps={steps} is not the length of a run. Pass 1 or more.")
    numbers = np.unique(np.linspace(0, steps - 1, MAX_POINTS).round().astype(int))
    curves = {
        name: schedule_values(as_schedule(schedule), numbers)
        for name, schedule in schedules.items()
    }
    if picture is not None:
        with line_picture(
            Path(picture), xlabel="update", ylabel="value", ylim=(0, None)
        ) as axes:
            for name, values in curves.items():
                axes.plot(numbers, values, linewidth=2, label=name)
    top = max(float(values.max()) for values in curves.values())
    return columns(
        [
            [
                name,
                sparkline(values.tolist(), peak=top),
                f"first {values[0]:.3g}",
                f"peak {values.max():.3g}",
                f"last {values[-1]:.3g}",
            ]
            for name, values in curves.items()
        ]
    )
