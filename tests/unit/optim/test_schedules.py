"""Every schedule, for any length: first update above zero, peak after the warm-up, end value."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import optim
from shardwise.errors import ConfigError

PEAK, END, LONGEST = 3e-3, 3e-4, 3000
SCHEDULES = {
    "constant": lambda steps, warmup: optim.constant(PEAK, steps, warmup=warmup),
    "linear": lambda steps, warmup: optim.linear(PEAK, steps, warmup=warmup, end=END),
    "cosine": lambda steps, warmup: optim.cosine(PEAK, steps, warmup=warmup, end=END),
    "exponential": lambda steps, warmup: optim.exponential(
        PEAK, steps, warmup=warmup, end=END
    ),
    "polynomial": lambda steps, warmup: optim.polynomial(
        PEAK, steps, warmup=warmup, end=END, power=3
    ),
    "inverse_sqrt": lambda steps, warmup: optim.inverse_sqrt(
        PEAK, steps, warmup=warmup
    ),
    "wsd": lambda steps, warmup: optim.wsd(
        PEAK, steps, warmup=warmup, decay=0.25, end=END
    ),
}
# Functions of the fraction of the way from the end of the warm-up to the end of the run.
FORMULAS = {
    "constant": lambda x: PEAK,
    "linear": lambda x: PEAK + x * (END - PEAK),
    "cosine": lambda x: END + (PEAK - END) * 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: PEAK * (END / PEAK) ** x,
    "polynomial": lambda x: END + (PEAK - END) * (1 - x) ** 3,
}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=5)
@given(steps=st.integers(8, LONGEST), fraction=st.floats(0.13, 0.6))
def test_every_schedule_keeps_its_contract(name, steps, fraction):
    warmup = round(fraction * steps)
    by_number = SCHEDULES[name](steps, warmup)
    by_fraction = SCHEDULES[name](steps, fraction)
    # Always the same shape, so that little is compiled.
    counts = jnp.arange(LONGEST + 1)
    values = np.asarray(jax.vmap(by_number)(counts))[: steps + 1]
    np.testing.assert_allclose(
        values, np.asarray(jax.vmap(by_fraction)(counts))[: steps + 1], rtol=1e-4
    )
    assert 0 < values[0] < PEAK
    assert values.max() == pytest.approx(PEAK, rel=1e-5)
    assert values[warmup] == pytest.approx(PEAK, rel=1e-5)
    np.testing.assert_allclose(
        values[: warmup + 1], PEAK * np.arange(1, warmup + 2) / (warmup + 1), rtol=1e-4
    )
    assert np.all(np.diff(values[warmup:]) <= 1e-5 * PEAK)
    if name not in ("constant", "inverse_sqrt"):
        assert values[-1] == pytest.approx(END, rel=1e-4)
        assert float(by_number(10 * steps)) == pytest.approx(END, rel=1e-4)
    for n in {warmup, (warmup + steps) // 2, steps}:
        if name in FORMULAS:
            assert values[n] == pytest.approx(
                FORMULAS[name]((n - warmup) / (steps - warmup)), rel=1e-4
            )


def test_values_of_inverse_sqrt_and_wsd():
    falling = optim.inverse_sqrt(PEAK, 1000, warmup=100)
    assert float(falling(400)) == pytest.approx(PEAK / 2, rel=1e-5)
    stable = optim.wsd(PEAK, 1000, warmup=100, decay=200)
    assert [float(stable(n)) for n in (100, 500, 800)] == pytest.approx(
        [PEAK] * 3, rel=1e-5
    )
    assert float(stable(900)) == pytest.approx(PEAK / 2, rel=1e-5)


def test_join_runs_schedules_one_after_the_other():
    lr = 1e-2
    schedule = optim.join(
        (1000, lr), (4000, lr / 10), (5000, optim.linear(lr / 10, 5000))
    )
    values = [
        float(schedule(n)) for n in (0, 999, 1000, 4999, 5000, 7500, 9999, 10000, 20000)
    ]
    assert values == pytest.approx(
        [lr, lr, lr / 10, lr / 10, lr / 10, lr / 20, lr / 50000, 0.0, 0.0],
        rel=1e-3,
        abs=1e-9,
    )


def test_piecewise_drops_to_multiples_of_the_peak():
    schedule = optim.piecewise(1.0, {5000: 0.1, 8000: 0.01})
    assert [float(schedule(n)) for n in (4999, 5000, 7999, 8000)] == pytest.approx(
        [1.0, 0.1, 0.1, 0.01]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.cosine(1e-3, 100, warmup=100),
            "warmup=100 takes 100 steps, but the run has 100 steps",
        ),
        (
            lambda: optim.cosine(1e-3, 100, warmup=1.5),
            "neither a number of steps nor a fraction",
        ),
        (
            lambda: optim.constant(1e-3, warmup=0.1),
            "is a fraction of the run, but steps=0",
        ),
        (lambda: optim.cosine(0.0, 100), "must be above 0"),
        (lambda: optim.exponential(1e-3, 100, end=0.0), "never reaches end=0.0"),
        (
            lambda: optim.wsd(1e-3, 100, warmup=50, decay=60),
            "longer than the run of 100 steps",
        ),
        (
            lambda: optim.inverse_sqrt(1e-3, 100, warmup=0),
            "needs a warm-up of at least one step",
        ),
        (lambda: optim.join(), "at least one step"),
        (lambda: optim.piecewise(1e-3, {0: 0.1}), "drops at update 1 or later"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
