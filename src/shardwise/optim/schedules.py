"""Learning rate schedules: functions from the number of updates made so far to a value.

`steps` is the length of the whole run and includes the warm-up. The warm-up is a number of steps
or a fraction of the run. The value rises linearly to `peak`, reaches it at update number `warmup`,
and reaches `end` after the last update. The first update is never zero. Every schedule here is
composed of Optax schedules.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from shardwise.errors import ConfigError

Schedule: TypeAlias = Callable[[int | jax.Array], float | jax.Array]
"""A function from the number of updates made so far to a value, as Optax defines it.

An array of numbers returns an array of values.
"""


def constant(peak: float, steps: int = 0, *, warmup: float = 0) -> Schedule:
    """Return a schedule that stays at `peak` after the warm-up.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run. Only needed if `warmup` is a fraction.
        warmup: the length of the warm-up, in steps or as a fraction of the run.

    Raises:
        ConfigError: if the peak or the warm-up is out of range.

    Example:
        >>> schedule = constant(1e-3, 1000, warmup=9)
        >>> f"{schedule(0):.1e}, {schedule(500):.1e}"
        '1.0e-04, 1.0e-03'
    """
    return _after_warmup(peak, steps, warmup, lambda _: optax.constant_schedule(peak))


def linear(peak: float, steps: int, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that falls linearly from `peak` to `end`.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run, warm-up included.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        end: the value after the last update.

    Raises:
        ConfigError: if the peak or the warm-up is out of range.

    Example:
        >>> float(linear(1.0, 100)(50))
        0.5
    """
    return _after_warmup(
        peak, steps, warmup, lambda left: optax.linear_schedule(peak, end, left)
    )


def cosine(peak: float, steps: int, *, warmup: float = 0, end: float = 0.0) -> Schedule:
    """Return a schedule that falls from `peak` to `end` along half a cosine.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run, warm-up included.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        end: the value after the last update.

    Raises:
        ConfigError: if the peak or the warm-up is out of range.

    Example:
        >>> schedule = cosine(1e-3, 1000, warmup=0.1, end=1e-4)
        >>> f"{schedule(100):.1e}, {schedule(1000):.1e}"
        '1.0e-03, 1.0e-04'
    """

    def decay(left: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(peak, left, alpha=end / peak)

    return _after_warmup(peak, steps, warmup, decay)


def exponential(peak: float, steps: int, *, warmup: float = 0, end: float) -> Schedule:
    """Return a schedule that is multiplied by the same factor at every update.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run, warm-up included.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        end: the value after the last update, above 0.

    Raises:
        ConfigError: if `end` is not above 0, or the peak or the warm-up is out of range.

    Example:
        >>> f"{exponential(1.0, 100, end=0.01)(50):.2f}"
        '0.10'
    """
    if end <= 0:
        raise ConfigError(
            f"an exponential schedule never reaches end={end}. "
            f"Use a value above 0, such as {peak / 100:g}."
        )

    def decay(left: int) -> optax.Schedule:
        return optax.exponential_decay(peak, left, end / peak, end_value=end)

    return _after_warmup(peak, steps, warmup, decay)


def polynomial(
    peak: float, steps: int, *, power: float = 2.0, warmup: float = 0, end: float = 0.0
) -> Schedule:
    """Return a schedule that falls from `peak` to `end` as a power of the remaining steps.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run, warm-up included.
        power: the exponent. 1 is `linear`.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        end: the value after the last update.

    Raises:
        ConfigError: if the peak or the warm-up is out of range.

    Example:
        >>> float(polynomial(1.0, 100)(50))
        0.25
    """

    def decay(left: int) -> optax.Schedule:
        return optax.polynomial_schedule(peak, end, power, left)

    return _after_warmup(peak, steps, warmup, decay)


def inverse_sqrt(peak: float, steps: int, *, warmup: float) -> Schedule:
    """Return the schedule `peak * sqrt(warmup / n)`, which falls forever.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run. Only needed if `warmup` is a fraction.
        warmup: the length of the warm-up, in steps or as a fraction of the run; at least one step.

    Raises:
        ConfigError: if the warm-up is shorter than one step, or the peak is out of range.

    Example:
        >>> float(inverse_sqrt(1.0, 1000, warmup=100)(400))
        0.5
    """
    rise = num_warmup(warmup, steps)
    if rise < 1:
        raise ConfigError(
            f"inverse_sqrt needs a warm-up of at least one step, "
            f"but warmup={warmup} of {steps} steps is {rise} steps."
        )

    def decay(_: int) -> Schedule:
        return lambda n: peak * jnp.sqrt(rise / (rise + jnp.maximum(n, 0)))

    return _after_warmup(peak, steps, warmup, decay)


def wsd(
    peak: float, steps: int, *, warmup: float = 0, decay: float = 0.2, end: float = 0.0
) -> Schedule:
    """Return a warm-up, stable, decay schedule.

    Args:
        peak: the value after the warm-up, above 0.
        steps: the length of the run, warm-up and decay included.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        decay: the length of the linear decay at the end, in steps or as a fraction of the run.
        end: the value after the last update.

    Raises:
        ConfigError: if warm-up and decay together are longer than the run, or the peak, the
            warm-up or the decay is out of range.

    Example:
        >>> schedule = wsd(1.0, 100, decay=20)
        >>> float(schedule(80)), float(schedule(90))
        (1.0, 0.5)
    """
    fall = num_warmup(decay, steps, "decay")
    if num_warmup(warmup, steps) + fall > steps:
        raise ConfigError(
            f"warmup={warmup} and decay={decay} together are longer than the run of {steps} steps. "
            "Shorten one of them, or train longer."
        )

    def stable_then_decay(left: int) -> optax.Schedule:
        stable = optax.constant_schedule(peak)
        return optax.join_schedules(
            [stable, optax.linear_schedule(peak, end, fall)], [left - fall]
        )

    return _after_warmup(peak, steps, warmup, stable_then_decay)


def join(*parts: tuple[int, float | Schedule]) -> Schedule:
    """Return a schedule that runs several schedules one after the other.

    Args:
        *parts: pairs of a number of steps and a schedule. A number instead of a schedule is a
            constant. Each schedule counts from its own start. The last one never ends.

    Raises:
        ConfigError: if there are no parts, or a part has less than one step.

    Example:
        High for 1,000 steps, a tenth of it for 4,000 steps, then linear to zero:

        >>> schedule = join((1000, 1e-3), (4000, 1e-4), (5000, linear(1e-4, 5000)))
        >>> f"{schedule(0):.1e}, {schedule(1000):.1e}, {schedule(7500):.1e}"
        '1.0e-03, 1.0e-04, 5.0e-05'
    """
    lengths = [length for length, _ in parts]
    if not parts or min(lengths) < 1:
        raise ConfigError(f"join needs parts of at least one step each, not {lengths}.")
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths) - 1)]
    schedule: Schedule = optax.join_schedules(
        [as_schedule(part) for _, part in parts], ends
    )
    return schedule


def piecewise(peak: float, drops: Mapping[int, float]) -> Schedule:
    """Return a schedule that is constant between drops.

    Args:
        peak: the value before the first drop.
        drops: for each update at which the value changes, the new value as a multiple of `peak`.
            `optax.piecewise_constant_schedule` multiplies its scales; these are not multiplied.

    Raises:
        ConfigError: if there are no drops, or one of them comes before update 1.

    Example:
        >>> schedule = piecewise(1.0, {5000: 0.1, 8000: 0.01})
        >>> [round(float(schedule(n)), 2) for n in (4999, 5000, 8000)]
        [1.0, 0.1, 0.01]
    """
    starts = sorted(drops)
    if not starts or starts[0] < 1:
        raise ConfigError(
            f"piecewise needs drops at update 1 or later, not at {starts}."
        )
    scales = [1.0, *(drops[start] for start in starts)]
    constants = [optax.constant_schedule(peak * scale) for scale in scales]
    schedule: Schedule = optax.join_schedules(constants, starts)
    return schedule


def as_schedule(value: float | Schedule) -> Schedule:
    """Return `value` itself if it is a schedule, or a schedule that is always `value`."""
    if callable(value):
        return value
    schedule: Schedule = optax.constant_schedule(value)
    return schedule


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """Return `schedule` multiplied by `factor`."""
    return lambda n: factor * schedule(n)


def num_warmup(warmup: float, steps: int, name: str = "warmup") -> int:
    """Return a length in steps, from a number of steps or a fraction of the run.

    Args:
        warmup: a number of steps, or a float below 1: a fraction of the run.
        steps: the length of the run.
        name: the name of the argument, for the error message.

    Raises:
        ConfigError: if `warmup` is neither a number of steps nor a fraction.
    """
    is_fraction = isinstance(warmup, float) and warmup < 1
    count = round(warmup * steps) if is_fraction else int(warmup)
    if count < 0 or (count != warmup and not 0 <= warmup < 1):
        raise ConfigError(
            f"{name}={warmup} is neither a number of steps nor a fraction of the run. "
            "Use an integer, or a value between 0 and 1."
        )
    return count


def _after_warmup(
    peak: float, steps: int, warmup: float, decay: Callable[[int], Schedule]
) -> Schedule:
    """Return a linear warm-up to `peak`, then `decay(left)` for the `left` remaining steps."""
    if peak <= 0:
        raise ConfigError(f"the peak of a schedule must be above 0, but it is {peak}.")
    if 0 < warmup < 1 and not steps:
        raise ConfigError(
            f"warmup={warmup} is a fraction of the run, but steps={steps}. "
            "Pass the number of steps of the run."
        )
    rise = num_warmup(warmup, steps)
    if rise and rise >= steps > 0:
        raise ConfigError(
            f"warmup={warmup} takes {rise} steps, but the run has {steps} steps: "
            "the peak would never be used. Shorten the warm-up, or train longer."
        )
    after = decay(steps - rise)
    if not rise:
        return after
    # The first update is number 0 and must not be zero, so the rise starts one step above zero.
    warm_up = optax.linear_schedule(peak / (rise + 1), peak, rise)
    schedule: Schedule = optax.join_schedules([warm_up, after], [rise])
    return schedule
