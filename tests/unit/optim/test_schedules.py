"""Every schedule, for any length: the first update moves, the peak is where it should be, and the end is the end."""

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
    "exponential": lambda steps, warmup: optim.exponential(PEAK, steps, warmup=warmup, end=END),
    "polynomial": lambda steps, warmup: optim.polynomial(
        PEAK, steps, warmup=warmup, end=END, power=3
    ),
    "inverse_sqrt": lambda steps, warmup: optim.inverse_sqrt(PEAK, steps, warmup=warmup),
    "wsd": lambda steps, warmup: optim.wsd(PEAK, steps, warmup=warmup, decay=0.25, end=END),
}
FORMULAS = {  # of the share x of the way from the end of the warm-up to the end of the run
    "constant": lambda x: PEAK,
    "linear": lambda x: PEAK + x * (END - PEAK),
    "cosine": lambda x: END + (PEAK - END) * 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: PEAK * (END / PEAK) ** x,
    "polynomial": lambda x: END + (PEAK - END) * (1 - x) ** 3,
}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=5)
@given(steps=st.integers(8, LONGEST), share=st.floats(0.13, 0.6))
def test_contract(name, steps, share):
    warmup = round(share * steps)
    by_number, by_share = (SCHEDULES[name](steps, value) for value in (warmup, share))
    # Always the same shape, so that little is compiled.
    values, by_share = (
        np.asarray(jax.vmap(schedule)(jnp.arange(LONGEST + 1)))[: steps + 1]
        for schedule in (by_number, by_share)
    )
    np.testing.assert_allclose(values, by_share, rtol=1e-4)
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


def test_inverse_sqrt_and_wsd():
    falling = optim.inverse_sqrt(PEAK, 1000, warmup=100)
    assert float(falling(400)) == pytest.approx(PEAK / 2, rel=1e-5)
    stable = optim.wsd(PEAK, 1000, warmup=100, decay=200)
    assert [float(stable(n)) for n in (100, 500, 800)] == pytest.approx([PEAK] * 3, rel=1e-5)
    assert float(stable(900)) == pytest.approx(PEAK / 2, rel=1e-5)


def test_the_exercise_in_one_line():
    lr = 1e-2
    schedule = optim.join((1000, lr), (4000, lr / 10), (5000, optim.linear(lr / 10, 5000)))
    values = [float(schedule(n)) for n in (0, 999, 1000, 4999, 5000, 7500, 9999, 10000, 20000)]
    assert values == pytest.approx(
        [lr, lr, lr / 10, lr / 10, lr / 10, lr / 20, lr / 50000, 0.0, 0.0], rel=1e-3, abs=1e-9
    )


def test_piecewise():
    schedule = optim.piecewise(1.0, {5000: 0.1, 8000: 0.01})
    assert [float(schedule(n)) for n in (4999, 5000, 7999, 8000)] == pytest.approx(
        [1.0, 0.1, 0.1, 0.01]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.cosine(1e-3, 100, warmup=100),
            "warmup=100 takes 100 steps, and the run has 100",
        ),
        (lambda: optim.cosine(1e-3, 100, warmup=1.5), "neither a number of steps nor a fraction"),
        (
            lambda: optim.constant(1e-3, warmup=0.1),
            "is a fraction of the steps of the run, and steps=0",
        ),
        (lambda: optim.cosine(0.0, 100), "must be above 0"),
        (lambda: optim.exponential(1e-3, 100, end=0.0), "never reaches end=0.0"),
        (lambda: optim.wsd(1e-3, 100, warmup=50, decay=60), "longer than the run of 100 steps"),
        (lambda: optim.inverse_sqrt(1e-3, 100, warmup=0), "is none"),
        (lambda: optim.join(), "at least one step"),
        (lambda: optim.piecewise(1e-3, {0: 0.1}), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
