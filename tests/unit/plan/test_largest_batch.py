"""The largest batch that fits, however memory grows with its size."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.largest_batch import largest_batch


@given(
    unit=st.integers(1, 16),
    first=st.integers(1, 200),
    limit=st.integers(1, 5000),
    fixed=st.floats(0, 500),
    slopes=st.tuples(st.floats(0.5, 20), st.floats(0, 0.01)),
    jump=st.floats(0, 30),
)
def test_no_larger_batch_fits(unit, first, limit, fixed, slopes, jump):
    compiled = []

    def peak(size):
        return (
            fixed
            + slopes[0] * size
            + slopes[1] * size * size
            + jump * (size // (3 * unit))
        )

    def compile_size(size):
        assert size % unit == 0
        compiled.append(size)
        return SimpleNamespace(
            fits=peak(size) <= limit,
            limit=limit,
            memory=SimpleNamespace(peak=peak(size), state=fixed),
        )

    size, plan = largest_batch(compile_size, unit, first)
    if plan is None:
        assert size == unit
        assert peak(unit) > limit
    else:
        assert peak(size) <= limit < peak(size + unit)
    assert len(set(compiled)) == len(compiled) <= 14


def test_linear_growth_needs_few_compilations():
    compiled = []

    def compile_size(size):
        compiled.append(size)
        peak = 20 + 1.7 * size
        return SimpleNamespace(
            fits=peak <= 140, limit=140, memory=SimpleNamespace(peak=peak, state=18)
        )

    assert largest_batch(compile_size, 1, 32)[0] == 70
    assert len(compiled) <= 4
