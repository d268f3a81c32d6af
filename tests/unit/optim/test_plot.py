"""Schedules drawn together: a line of text for each, on one scale, and a picture."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwise import optim
from shardwise.errors import ConfigError


def test_warmups_are_drawn_on_one_scale_without_a_model(tmp_path):
    schedules = {
        f"warm-up {warmup}": optim.cosine(1e-3, 1000, warmup=warmup)
        for warmup in (0, 100, 500)
    }
    text = optim.plot_schedules({**schedules, "half": 5e-4}, 1000, tmp_path / "a.png")
    curves = dict(re.findall(r"^  (\S.*?)  +([▁-█]+)", text, re.MULTILINE))
    assert list(curves) == [*schedules, "half"]
    assert {len(curve) for curve in curves.values()} == {60}
    # The top eighth begins at 7/8 of the warm-up. The constant has half its height.
    assert [curves[name].index("█") for name in schedules] == [0, 6, 26]
    assert curves["half"] == "▅" * 60
    assert re.findall(r"first (\S+)", text) == ["0.001", "9.9e-06", "2e-06", "0.0005"]
    assert re.findall(r"peak (\S+)", text) == ["0.001", "0.001", "0.001", "0.0005"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_every_schedule(tmp_path):
    pictures = []
    for names in (["a"], ["a", "b"]):
        file = tmp_path / f"{len(names)}.png"
        schedules = {name: optim.linear(1.0, 10 * len(name)) for name in names}
        optim.plot_schedules({**schedules, "c": 0.5}, 10, str(file))
        pictures.append(file.read_bytes())
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize(
    "schedule",
    [
        optax.cosine_decay_schedule(1.0, 100),
        optax.constant_schedule(1.0),
        # It accepts one number at a time only.
        lambda n: 1.0 if n < 50 else 0.5,
        lambda n: jnp.where(n < 50, 1.0, 0.5),
    ],
)
def test_any_schedule_can_be_drawn(schedule):
    text = optim.plot_schedules({"it": schedule}, 100)
    values = [float(schedule(n)) for n in (0, 99)]
    assert f"first {values[0]:.3g}  peak 1  last {values[1]:.3g}" in text


def test_a_long_run_is_sampled():
    calls = []

    def schedule(n):
        calls.append(int(n))
        return 1.0

    optim.plot_schedules({"it": schedule}, 1_000_000)
    assert len(np.unique(calls)) == 2001
    assert {0, 999_999} <= set(calls)


@pytest.mark.parametrize(
    ("schedules", "steps", "message"),
    [({}, 10, "there is no schedule"), ({"a": 1.0}, 0, "steps=0 is not the length")],
)
def test_invalid_arguments_are_refused(schedules, steps, message):
    with pytest.raises(ConfigError, match=message):
        optim.plot_schedules(schedules, steps)
