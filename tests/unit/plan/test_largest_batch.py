"""The largest batch that fits, for any way in which memory may grow."""

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
def test_no_more_rows_would_fit(unit, first, limit, fixed, slopes, jump):
    compiled = []

    def peak(rows):
        return fixed + slopes[0] * rows + slopes[1] * rows * rows + jump * (rows // (3 * unit))

    def compile_rows(rows):
        assert rows % unit == 0
        compiled.append(rows)
        return SimpleNamespace(
            fits=peak(rows) <= limit,
            limit=limit,
            memory=SimpleNamespace(peak=peak(rows), state=fixed),
        )

    rows, plan = largest_batch(compile_rows, unit, first)
    if plan is None:
        assert rows == unit
        assert peak(unit) > limit
    else:
        assert peak(rows) <= limit < peak(rows + unit)
    assert len(set(compiled)) == len(compiled) <= 14


def test_even_growth_needs_few_compilations():
    compiled = []

    def compile_rows(rows):
        compiled.append(rows)
        peak = 20 + 1.7 * rows
        return SimpleNamespace(
            fits=peak <= 140, limit=140, memory=SimpleNamespace(peak=peak, state=18)
        )

    assert largest_batch(compile_rows, 1, 32)[0] == 70
    assert len(compiled) <= 4
