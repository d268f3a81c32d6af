"""The coordinate check passes for a scaled model, and fails for the standard parametrization."""

import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import optim, scaled
from shardwise.errors import ConfigError
from shardwise.scaling.check import (
    Check,
    Coordinates,
    check_coordinates,
    measure,
    plot_checks,
)
from shardwise.scaling.record import recorded
from shardwise.scaling.trace import abstract_model, input_numbers, trace_loss_of
from tests.helpers.sizes import Perceptron, gpt_run, perceptron_run, tokens

WIDTHS = (64, 128, 256)


def quiet(text):
    del text


def test_recorded_activations():
    run = perceptron_run(16, optimizer=optax.sgd(0.1))
    found = measure(run, 1)
    assert set(found.activations) == {
        "first/kernel",
        "hidden/kernel",
        "head/kernel",
        "loss",
    }
    assert all(size > 0 for size in found.updates.values())


@pytest.mark.parametrize(
    "scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_activations_of_scanned_layers(scan_layers):
    found = measure(gpt_run(32, scan_layers=scan_layers), 1)
    prefix = "blocks" if scan_layers else "blocks/0"
    assert f"{prefix}/mlp/up/kernel" in found.activations
    # Queries, keys and values.
    assert f"{prefix}/attn/qkv/kernel #3" in found.activations
    # The lookup and the logits.
    assert {"tokens", "tokens #2"} <= set(found.activations)


def test_the_recorded_values():
    run = perceptron_run(16)
    model = abstract_model(run)
    batch = run.data(0)
    closed, arguments = trace_loss_of(run, model, batch)
    net = Perceptron(16, nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    inputs = jax.tree.leaves((params, {}, {}, batch, jax.random.key(0)))
    found = recorded(closed, *input_numbers(arguments), {})(*inputs)
    x = batch["image"].reshape(len(batch["image"]), -1)
    first = x @ net.first.kernel[...]
    hidden = nnx.relu(first + net.first.bias[...]) @ net.hidden.kernel[...]
    np.testing.assert_allclose(found["first/kernel"], first, rtol=1e-5)
    np.testing.assert_allclose(found["hidden/kernel"], hidden, rtol=1e-4)
    assert found["loss"].shape == (len(x),)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optim.adamw(2e-3), optim.sgd(0.1)])
def test_slopes_of_a_scaled_gpt(optimizer):
    def recipe(width=128):
        return gpt_run(width, depth=1, optimizer=optimizer, data=tokens(64))

    # The part of an update that is noise shrinks, which shows in narrower models.
    widths = (128, 256, 512)
    make_run = scaled(width=128)(recipe)
    check = check_coordinates(make_run, widths, 2, 3, "scaled", quiet, ["tokens"])
    assert abs(check.worst) <= 0.1
    assert check.is_ok
    standard = check_coordinates(recipe, widths, 2, 1, "standard", quiet)
    assert abs(standard.worst) > 0.3
    assert not standard.is_ok


def coordinates(size, change):
    return Coordinates({"a": size}, {"a": change}, 1.0)


def test_slopes():
    points = tuple(coordinates(width**0.5, 1.0) for width in WIDTHS)
    check = Check(WIDTHS, points, "test")
    assert check.slopes[0].activation == pytest.approx(0.5)
    assert check.slopes[0].update == pytest.approx(0, abs=1e-9)
    assert not check.is_ok


def test_outputs_may_shrink():
    points = tuple(coordinates(width**-0.5, width**-0.5) for width in WIDTHS)
    assert not Check(WIDTHS, points, "test").is_ok
    assert Check(WIDTHS, points, "test", frozenset("a")).is_ok


@pytest.mark.parametrize(
    ("size", "change", "may_be_noise"),
    [(0, -0.2, True), (0, -0.4, False), (0, 0.2, False), (-0.5, -0.2, False)],
)
def test_updates_may_shrink_because_they_are_noise(size, change, may_be_noise):
    points = tuple(coordinates(width**size, width**change) for width in WIDTHS)
    check = Check(WIDTHS, points, "test")
    assert not check.is_ok
    assert check.may_be_noise == may_be_noise


def test_sizes_that_are_not_finite_fail():
    points = tuple(coordinates(math.nan, 1.0) for _ in WIDTHS)
    assert not Check(WIDTHS, points, "test").is_ok


def test_the_picture(tmp_path):
    points = tuple(coordinates(1.0, 2.0) for _ in WIDTHS)
    check = Check(WIDTHS, points, "test")
    plot_checks([check, replace(check, title="other")], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_one_width_is_refused():
    with pytest.raises(ConfigError, match="Use at least 2"):
        check_coordinates(perceptron_run, [64, 64], 1, 1, "test", quiet)
