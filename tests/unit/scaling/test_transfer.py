"""The best rates of several widths, and the prediction of larger runs."""

import math

import pytest
from rich.console import Console

from shardwise.errors import ConfigError
from shardwise.scaling.transfer import (
    NOISE,
    Best,
    best_rates,
    fit_power_law,
    loss_table,
    parse_rates,
    plot_rates,
    predict,
    relative_error,
)

COMPUTE = [1e15, 4e15, 1.6e16, 6.4e16]


def law(compute):
    return 1.7 + 2.0 * (compute / 1e15) ** -0.3


def test_rates():
    assert parse_rates("1e-3:1e-1:3") == [0.001, 0.01, 0.1]
    for text in ("", "1e-3", "1:2", "0:1:3", "2:1:3", "1:2:1", "a:b:c"):
        with pytest.raises(ConfigError, match="not a range of learning rates"):
            parse_rates(text)


def test_best_rates():
    losses = {
        64: {0.1: 3.0, 0.2: 2.0, 0.4: math.nan},
        32: {0.1: 4.0, 0.2: 5.0, 0.4: None},
        16: {0.1: None, 0.2: math.inf},
    }
    found = best_rates(losses)
    assert [(best.width, best.rate, best.is_edge) for best in found] == [
        (32, 0.1, True),
        (64, 0.2, False),
    ]


def test_a_power_law_is_found():
    found = fit_power_law(COMPUTE, [law(value) for value in COMPUTE])
    assert found.limit == pytest.approx(1.7, rel=0.01)
    assert found.exponent == pytest.approx(0.3, abs=0.011)
    assert found(1e18) == pytest.approx(law(1e18), rel=0.01)
    with pytest.raises(ConfigError, match="3 widths, and there are 2"):
        fit_power_law(COMPUTE[:2], [2.0, 1.0])


def test_the_largest_run_is_predicted_within_one_percent():
    losses = [law(value) for value in COMPUTE]
    found = predict(COMPUTE[:3], losses[:3], COMPUTE[3])
    assert found.loss == pytest.approx(losses[3], rel=0.01)
    assert found.low < losses[3] < found.high


def best(width, *seeds):
    return Best(width, 0.1, sum(seeds) / len(seeds), is_edge=False, seeds=seeds)


def test_the_interval_follows_from_the_seeds():
    # Relative standard deviations of 0.01 and 0: pooled 0.01 / sqrt(2), of means of two / 2.
    spread = 0.01 / math.sqrt(2)
    pair = best(32, 1 - spread, 1 + spread), best(64, 2.0, 2.0)
    assert relative_error(pair) == pytest.approx(0.005)
    assert relative_error([best(32, 1.0)]) == NOISE
    losses = [law(value) for value in COMPUTE]

    def width(error):
        found = predict(COMPUTE, losses, 1e18, error)
        return found.high - found.low

    assert width(0.001) < width(0.003) < width(0.01)


def test_the_table_shows_seeds(capsys):
    losses = {32: {0.1: 3.0, 0.2: None}, 64: {0.1: None, 0.2: None}}
    Console(width=100).print(loss_table(losses, [best(32, 3.0, 3.2)], "loss"))
    out = capsys.readouterr().out
    assert "3.1000 ± 0.1414" in out
    assert "mean of its seeds" in out
    Console(width=100).print(loss_table(losses, best_rates(losses), "loss"))
    assert "seeds" not in capsys.readouterr().out


def test_the_picture(tmp_path):
    losses = {64: {0.1: 3.0, 0.2: 2.0}, 32: {0.1: 4.0, 0.2: None}}
    plot_rates(losses, tmp_path / "a.png", "test")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
