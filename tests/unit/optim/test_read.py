"""Reading Optax transformations, and what happens when Optax renames what is read."""

import json
import types
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Batches, Mean, Run, explain, fit, optim
from shardwise.optim.read import (
    ANY,
    calls_per_update,
    read_chains,
    sample_rates,
    schedule_values,
)
from shardwise.scaling.transform import scale_updates

STEPS = 20
PARAMS = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
SCHEDULE = optax.cosine_decay_schedule(1e-2, STEPS)


def rename_variables(function):
    """Return a function that works the same, but whose closure variables have other names."""
    code = function.__code__
    names = tuple(f"renamed_{name}" for name in code.co_freevars)
    renamed = types.FunctionType(
        code.replace(co_freevars=names),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    renamed.__kwdefaults__ = function.__kwdefaults__
    renamed.__qualname__ = function.__qualname__
    renamed.__module__ = function.__module__
    return renamed


def rename_all(tx):
    """Return a transformation as an Optax release with other variable names would make it."""
    return type(tx)(rename_variables(tx.init), rename_variables(tx.update))


def rename_maker(tx, name):
    """Return a transformation as an Optax release in which its function has another name."""
    for function in tx:
        function.__qualname__ = f"{name}.<locals>.{function.__name__}"
    return tx


def recorded(function, *arguments, **options):
    """Return the result of a call, and the warnings that Python would show."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result = function(*arguments, **options)
    return result, [str(warning.message) for warning in caught]


def two_groups():
    return optax.partition(
        {"slow": optax.adam(1e-3), "fast": optax.adam(SCHEDULE)},
        {"dense": {"kernel": "fast", "bias": "slow"}},
    )


UNREADABLE = {
    "chain": lambda: rename_all(optax.adam(SCHEDULE)),
    "chain of recipe": lambda: rename_all(optim.adam(SCHEDULE)),
    "schedule": lambda: optax.chain(
        optax.scale_by_adam(),
        rename_all(optax.scale_by_schedule(lambda n: -SCHEDULE(n))),
    ),
    "extra arguments": lambda: rename_all(
        optax.with_extra_args_support(optax.adam(SCHEDULE))
    ),
    "named chain": lambda: rename_all(
        optax.named_chain(("adam", optax.adam(SCHEDULE)))
    ),
    "mask": lambda: rename_all(optax.masked(optax.adam(SCHEDULE), True)),
    "injected": lambda: rename_all(
        optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(SCHEDULE)
    ),
    "other function name": lambda: rename_maker(optax.adam(SCHEDULE), "sequence"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_optimizer_is_measured_with_one_warning(name):
    steps = np.arange(STEPS)
    rates, messages = recorded(sample_rates, UNREADABLE[name](), PARAMS, steps)
    assert list(rates) == ["all"]
    assert list(rates["all"]) == [str(step) for step in steps]
    expected = schedule_values(SCHEDULE, steps)
    np.testing.assert_allclose(
        list(rates["all"].values()), expected, rtol=1e-3, atol=1e-8
    )
    assert len(messages) == 1
    assert (
        f"of Optax {optax.__version__}. Learning rates are measured instead"
        in messages[0]
    )


def test_only_the_unreadable_part_is_unknown():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), rename_all(optax.scale_by_schedule(SCHEDULE))
    )
    chains, messages = recorded(read_chains, tx, PARAMS)
    parts = chains["dense/kernel"].parts
    assert list(map(str, parts)) == [
        "clip_by_global_norm(max_norm=1)",
        "scale_by_schedule(unknown)",
    ]
    assert [part.is_unread for part in parts] == [False, True]
    assert not chains["dense/kernel"].is_readable
    assert chains["dense/kernel"].learning_rate(np.arange(3)) is None
    assert messages[0].startswith(
        "cannot read scale_by_schedule (_Unreadable: no variable 'step_size_fn') of Optax"
    )


def test_groups_are_unknown_if_the_partition_is_unreadable():
    readable = sample_rates(two_groups(), PARAMS, np.arange(STEPS))
    assert set(readable) == {"slow", "fast"}
    rates, messages = recorded(
        sample_rates, rename_all(two_groups()), PARAMS, np.arange(STEPS)
    )
    assert set(rates) == {"all"}
    assert len(messages) == 1
    # The largest of both: the fast group at the start, the slow group at the end.
    larger = [
        max(readable["slow"][str(n)], readable["fast"][str(n)]) for n in range(STEPS)
    ]
    np.testing.assert_allclose(list(rates["all"].values()), larger, rtol=1e-3)


def test_a_group_with_an_unreadable_optimizer_is_measured_and_others_are_read():
    tx = optax.partition(
        {"slow": optax.adam(1e-3), "fast": rename_all(optax.adam(SCHEDULE))},
        {"dense": {"kernel": "fast", "bias": "slow"}},
    )
    rates, _ = recorded(sample_rates, tx, PARAMS, np.arange(STEPS))
    np.testing.assert_allclose(list(rates["slow"].values()), 1e-3, rtol=1e-6)
    expected = schedule_values(SCHEDULE, np.arange(STEPS))
    np.testing.assert_allclose(list(rates["fast"].values()), expected, rtol=1e-3)


def test_an_unreadable_multi_steps_does_not_raise(monkeypatch):
    monkeypatch.delattr(optax.MultiSteps, "inner_opt", raising=False)
    tx = optax.MultiSteps(optax.adam(1e-3), 2)
    monkeypatch.delattr(tx, "_every_k_schedule")
    chains, messages = recorded(read_chains, tx, PARAMS)
    assert str(chains[ANY].parts[0]) == "MultiSteps(unknown)"
    assert calls_per_update(chains) == 1
    assert len(messages) == 1


def test_rates_are_absent_if_measuring_fails_too():
    """A transformation that needs the real shapes cannot run on small copies."""

    def update(updates, state, params=None):
        assert updates["dense"]["kernel"].shape == (40, 30)
        return updates, state

    needs_shapes = optax.GradientTransformation(lambda params: (), update)
    tx = rename_all(optax.chain(needs_shapes, optax.scale(-1e-3)))
    rates, messages = recorded(
        sample_rates, tx, {"dense": {"kernel": jnp.ones((40, 30))}}, np.arange(STEPS)
    )
    assert rates == {}
    assert len(messages) == 1


def scale(rate):
    """Return an optimizer of the user, in a function with the name of one of Optax."""

    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(lambda params: rate, update)


def test_a_user_function_with_the_name_of_an_optax_function_is_opaque():
    chains = read_chains(scale(0.1), PARAMS)
    assert [(part.name, part.is_known) for part in chains[ANY].parts] == [
        ("scale", False)
    ]
    assert chains[ANY].parts[0].factor is None
    assert sample_rates(scale(0.1), PARAMS, np.arange(3)) == {}


def test_an_error_in_a_schedule_is_reported():
    def broken(count):
        raise ZeroDivisionError("a mistake in the schedule")

    with pytest.raises(ZeroDivisionError, match="a mistake in the schedule"):
        sample_rates(optax.sgd(broken), PARAMS, np.arange(STEPS))


def test_a_schedule_in_plain_python_is_read():
    rates = sample_rates(
        optax.sgd(lambda n: 0.1 if n < 2 else 0.01), PARAMS, np.arange(4)
    )
    np.testing.assert_allclose(list(rates["all"].values()), [0.1, 0.1, 0.01, 0.01])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 3, rngs=rngs)
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.dense(x)))[:, 0]


def test_explain_measures_an_unreadable_optimizer():
    readable = explain(optax.adam(SCHEDULE), Net, steps=STEPS)
    explanation, messages = recorded(
        explain, rename_all(optax.adam(SCHEDULE)), Net, steps=STEPS
    )
    assert len(messages) == 1
    assert explanation.findings == readable.findings == ()
    for row, expected in zip(explanation.rows, readable.rows, strict=True):
        assert row.transformations == ("chain(unknown)",)
        assert row.peak_lr == pytest.approx(expected.peak_lr, rel=1e-3)
        assert (row.moves, row.decay, row.state_bytes) == (
            True,
            0.0,
            expected.state_bytes,
        )
    curve, wanted = explanation.curves["all"][1], readable.curves["all"][1]
    np.testing.assert_allclose(curve, wanted, rtol=1e-3, atol=1e-8)


def test_a_run_with_an_unreadable_optimizer_trains_and_resumes(tmp_path):
    """The run has the same losses, notes the measured rates, and resumes with one warning."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(64, 4)).astype("f4"),
        "y": rng.normal(size=64).astype("f4"),
    }

    def run(optimizer, out, steps=6):
        return Run(
            model=Net,
            loss=lambda model, batch: Mean((model(batch["x"]) - batch["y"]) ** 2),
            optimizer=optimizer,
            data=Batches(data, 16),
            steps=steps,
            norms=True,
            out=out,
        )

    readable = fit(run(optax.adam(SCHEDULE), None))
    result, messages = recorded(
        fit, run(rename_all(optax.adam(SCHEDULE)), tmp_path / "run")
    )
    assert [text for text in messages if "cannot read" in text] == messages
    assert len(messages) == 1
    assert result.metrics["loss"] == pytest.approx(readable.metrics["loss"], rel=1e-6)

    checkpoint = tmp_path / "run" / "checkpoints" / "6" / "meta.json"
    rates = _find(json.loads(checkpoint.read_text()), "lr")["all"]
    expected = schedule_values(SCHEDULE, np.arange(6))
    for step, rate in rates.items():
        assert rate == pytest.approx(expected[int(step)], rel=1e-3)

    resumed, _ = recorded(
        fit, run(rename_all(optax.adam(SCHEDULE)), tmp_path / "run", 10)
    )
    assert int(resumed.state.step) == 10


def _find(tree, key):
    """Return the first value of `key` in nested dictionaries."""
    if key in tree:
        return tree[key]
    nested = (_find(value, key) for value in tree.values() if isinstance(value, dict))
    return next((value for value in nested if value is not None), None)


def test_scaled_updates():
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros((2, 2)), "c": jnp.zeros((2, 2))}
    tx = scale_updates(optax.adam(1e-2), {"a": 0.25, "b": 1.0})
    chains = read_chains(tx, params)
    assert [str(part) for part in chains["a"].parts][2:] == [
        "scale_updates(multiplier=0.25)"
    ]
    assert len(chains["b"].parts) == len(chains["c"].parts) == 2
    # The rate that is logged is that of the optimizer.
    rates = sample_rates(tx, params, np.array([0]))
    assert rates == {"all": {"0": pytest.approx(1e-2)}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9, nesterov=True)),
        (optax.adam(0.1), optax.adam(0.1, nesterov=True)),
        (optax.adam(0.1, b1=jnp.float32(0.5)), optax.adam(0.1, b1=jnp.float32(0.75))),
        (optax.ema(0.99996), optax.ema(0.99999)),
    ],
)
def test_descriptions_show_every_setting(one, other):
    parts = [
        [str(part) for part in read_chains(tx, {"w": jnp.ones(2)})["w"].parts]
        for tx in (one, other)
    ]
    assert parts[0] != parts[1]
