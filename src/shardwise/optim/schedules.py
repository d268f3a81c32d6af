"""Schedules: functions from the number of updates made to a value, in steps of the whole run.

`steps` is the length of the run and includes the warm-up, which is a number of steps or a fraction of them. The value
rises linearly to `peak`, which it has at update number `warmup`, and is `end` after the last update. The first
update is never a no-op. Every schedule here is made of Optax's.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from shardwise.errors import ConfigError

Schedule = Callable[[Any], Any]


def constant(peak: float, steps: int = 0, *, warmup: float = 0) -> Schedule:
    return _after_warmup(peak, steps, warmup, lambda _: optax.constant_schedule(peak))


def linear(peak: float, steps: int, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    return _after_warmup(peak, steps, warmup, lambda left: optax.linear_schedule(peak, end, left))


def cosine(peak: float, steps: int, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    return _after_warmup(
        peak, steps, warmup, lambda left: optax.cosine_decay_schedule(peak, left, alpha=end / peak)
    )


def exponential(peak: float, steps: int, *, warmup: float = 0, end: float) -> Schedule:
    """The same factor at every step, so that `end` (above 0) is reached after the last."""
    if end <= 0:
        raise ConfigError(
            f"an exponential schedule never reaches end={end}; give a value above 0, such as {peak / 100:g}."
        )
    return _after_warmup(
        peak,
        steps,
        warmup,
        lambda left: optax.exponential_decay(peak, left, end / peak, end_value=end),
    )


def polynomial(
    peak: float, steps: int, *, power: float = 2.0, warmup: float = 0, end: float = 0.0
) -> Schedule:
    return _after_warmup(
        peak, steps, warmup, lambda left: optax.polynomial_schedule(peak, end, power, left)
    )


def inverse_sqrt(peak: float, steps: int, *, warmup: float) -> Schedule:
    """`peak * sqrt(warmup / n)` after the warm-up; it has no end."""
    rise = num_warmup(warmup, steps)
    if rise < 1:
        raise ConfigError(
            f"inverse_sqrt falls from the end of its warm-up; warmup={warmup} of {steps} steps is none."
        )
    return _after_warmup(
        peak, steps, warmup, lambda _: lambda n: peak * jnp.sqrt(rise / (rise + jnp.maximum(n, 0)))
    )


def wsd(
    peak: float, steps: int, *, warmup: float = 0, decay: float = 0.2, end: float = 0.0
) -> Schedule:
    """Warm-up, stable, and a linear decay over the last `decay` steps (or fraction)."""
    fall = num_warmup(decay, steps, "decay")
    if num_warmup(warmup, steps) + fall > steps:
        raise ConfigError(
            f"warmup={warmup} and decay={decay} together are longer than the run of {steps} steps."
        )
    return _after_warmup(
        peak,
        steps,
        warmup,
        lambda left: optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, end, fall)], [left - fall]
        ),
    )


def join(*parts: tuple[int, float | Schedule]) -> Schedule:
    """One after the other, each for its number of steps; a number holds still. The last goes on for ever.

    High for 1000 steps, a tenth for 4000, then linear to zero: `join((1000, lr), (4000, lr / 10), (5000, linear(lr / 10, 5000)))`.
    """
    lengths = [length for length, _ in parts]
    if not parts or min(lengths) < 1:
        raise ConfigError(f"join needs parts of at least one step each; it got lengths {lengths}.")
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths) - 1)]
    return optax.join_schedules([as_schedule(part) for _, part in parts], ends)


def piecewise(peak: float, drops: dict[int, float]) -> Schedule:
    """`peak`, and from each step of `drops` on that multiple of it: `piecewise(1e-3, {5000: 0.1, 8000: 0.01})`."""
    starts = sorted(drops)
    if not starts or starts[0] < 1:
        raise ConfigError(f"piecewise needs steps of at least 1 to drop at; it got {starts}.")
    return optax.join_schedules(
        [optax.constant_schedule(peak * scale) for scale in (1.0, *(drops[n] for n in starts))],
        starts,
    )


def as_schedule(value: float | Schedule) -> Schedule:
    return value if callable(value) else optax.constant_schedule(value)


def scaled(schedule: Schedule, factor: float) -> Schedule:
    return lambda n: factor * schedule(n)


def num_warmup(warmup: float, steps: int, name: str = "warmup") -> int:
    """Steps, from a number of them or a fraction of the run."""
    count = round(warmup * steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)
    if count < 0 or (count != warmup and not 0 <= warmup < 1):
        raise ConfigError(f"{name}={warmup} is neither a number of steps nor a fraction of them.")
    return count


def _after_warmup(
    peak: float, steps: int, warmup: float, decay: Callable[[int], Schedule]
) -> Schedule:
    if peak <= 0:
        raise ConfigError(f"the peak of a schedule must be above 0; it is {peak}.")
    if 0 < warmup < 1 and not steps:
        raise ConfigError(
            f"warmup={warmup} is a fraction of the steps of the run, and steps={steps}; give at least 1."
        )
    rise = num_warmup(warmup, steps)
    if rise and rise >= steps > 0:
        raise ConfigError(
            f"warmup={warmup} takes {rise} steps, and the run has {steps}: the peak would never be used."
        )
    after = decay(steps - rise)
    if not rise:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / (rise + 1), peak, rise), after], [rise]
    )
