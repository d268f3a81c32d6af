"""Numbers, durations and tables as text."""

import math

import pytest

from shardwise.text import (
    columns,
    did_you_mean,
    show_bytes,
    show_count,
    show_number,
    show_seconds,
    show_short_time,
    smoothed,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0125, "0.0125"),
        (1e-4, "1e-4"),
        (9999, "9999"),
        # With four digits and no prefix these would be 1e+04.
        (9999.5, "9.999k"),
        (9999.6, "10k"),
        (9999.99, "10k"),
        (12_500, "12.5k"),
        (999_950, "1M"),
        (-2.5e6, "\N{MINUS SIGN}2.5M"),
        (3e15, "3e15"),
        (math.inf, "∞"),
        (-math.inf, "\N{MINUS SIGN}∞"),
        (math.nan, "not a number"),
    ],
)
def test_numbers(value, text):
    assert show_number(value) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_bytes, 512, "512 B"),
        (show_bytes, 1536, "1.5 KiB"),
        (show_bytes, 2**45, "32.0 TiB"),
        (show_count, 844_000, "844k"),
        (show_count, 999.6, "1k"),
        (show_count, 1.56e18, "1.56e+03P"),
        (show_seconds, 59.94, "59.9 s"),
        (show_seconds, 3661, "1:01:01"),
        (show_short_time, 0.119, "119 ms"),
        (show_short_time, 2.5e-5, "25.0 µs"),
        (show_short_time, 1.25, "1.25 s"),
    ],
)
def test_sizes_and_durations(show, value, text):
    assert show(value) == text


def test_columns_are_aligned_without_trailing_spaces():
    assert columns([("a", "bb", "c"), ("aaa", "b", "")]) == "  a    bb  c\n  aaa  b"


def test_closest_name_is_suggested():
    assert did_you_mean("modle", ["model", "data"]) == " Did you mean 'model'?"
    assert did_you_mean("zzz", ["model", "data"]) == ""


def test_average_of_a_constant_curve_is_the_constant_from_the_start():
    assert smoothed([2.0] * 5, 0.5) == pytest.approx([2.0] * 5)
    assert smoothed([], 0.5) == []


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        ([0.0, 0.5, 1.0], {}, "▁▅█"),
        ([0.0, 0.5, 1.0], {"peak": 2.0}, "▁▃▅"),
        # The first and the last value are always among the drawn ones.
        (list(range(101)), {"width": 3}, "▁▅█"),
        ([-1.0, math.nan, math.inf, 1.0], {}, "▁▁▁█"),
        ([1.0], {}, "█"),
        ([0.0, 0.0], {"width": 2}, "▁▁"),
        ([], {"width": 2}, "▁▁"),
    ],
)
def test_curves_as_text(values, options, text):
    assert sparkline(values, **options) == text
