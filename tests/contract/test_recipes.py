"""Every optimizer recipe passes one suite, with clipping, decay and groups, one of them frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Checkpoints,
    Mean,
    Rules,
    abstract_state,
    explain,
    init_state,
    make_mesh,
    make_train_step,
    optim,
)
from shardwise.optim import RECIPES, Group
from shardwise.tree import named_leaves

BY_STEPS = ("standard", "transformer", "fine_tuning", "unstable")
LEARNING_RATES = {
    "sgd": 0.02,
    "adam": 0.01,
    "adamw": 0.01,
    "lion": 3e-3,
    "adafactor": 0.03,
    "muon": 0.02,
    "normuon": 0.02,
    "soap": 0.01,
    "schedule_free": 0.02,
    "prodigy": 1.0,
    "standard": 0.01,
    "transformer": 0.01,
    "fine_tuning": 0.01,
    "unstable": 0.05,
}
GROUPS = (
    Group("embed/*", frozen=True, name="frozen"),
    Group("out/*", lr_scale=0.5, name="head"),
    Group("*", name="rest"),
)
STEPS = 60


def make(name, **options):
    arguments = (
        (STEPS, LEARNING_RATES[name]) if name in BY_STEPS else (LEARNING_RATES[name],)
    )
    if name == "prodigy":
        options["d0"] = 1e-3
    return RECIPES[name](*arguments, **options)


class Net(nnx.Module):
    def __init__(self, rngs):
        tensor_parallel = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), (None, "model")
        )
        self.embed = nnx.Linear(8, 16, rngs=rngs)
        self.hidden = nnx.Linear(16, 160, kernel_init=tensor_parallel, rngs=rngs)
        self.norm = nnx.LayerNorm(160, rngs=rngs)
        self.out = nnx.Linear(160, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(nnx.tanh(self.hidden(self.embed(x)))))


def loss(model, batch):
    return Mean(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 8)).astype("f4")}
BATCH["y"] = np.sin(BATCH["x"] @ RNG.normal(size=(8, 8)).astype("f4"))


def train(tx, mesh, count):
    spec = abstract_state(Net, tx, mesh, Rules(fsdp_min_size=1024))
    step = make_train_step(spec, loss, BATCH, norms=True)
    state = init_state(spec, 0)
    first = jax.tree.map(np.asarray, state.params)
    metrics, compiled = [], []
    for n in range(count):
        state, values = step(state, step.place(BATCH))
        metrics.append(jax.tree.map(float, values))
        if n == 0:
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: compiled.append(event)
            )
    jax.monitoring.clear_event_listeners()
    return (
        spec,
        state,
        first,
        metrics,
        [event for event in compiled if "backend_compile" in event],
    )


@pytest.mark.parametrize("name", RECIPES)
def test_descends_on_a_quadratic(name):
    """The first of two targets; the second is `Net`, in `test_contract`."""
    tx, params = make(name), {"a": jnp.full((6, 5), 2.0), "b": jnp.full((5,), -1.0)}

    def value(params):
        return sum(jnp.sum(jnp.square(leaf - 0.3)) for leaf in jax.tree.leaves(params))

    state, start = tx.init(params), float(value(params))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(value)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state)
    assert float(value(optim.evaluation_params(state, params))) < 0.95 * start


# Some have the same parts as "adamw". Every optimizer is in test_optimizers.py too.
SIMILAR = (
    "unstable",
    *("adam", "standard", "transformer", "fine_tuning", "sgd"),
    *("lion", "adafactor", "schedule_free", "prodigy", "muon"),
    *("normuon", "soap"),
)
SOME = [
    pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name
    for name in RECIPES
]


@pytest.mark.parametrize(
    "other", ["data=1", pytest.param("fsdp=8", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", SOME)
def test_contract(name, other, tmp_path):
    tx = make(name, clip=1.0, weight_decay=0.05, groups=GROUPS)
    spec, state, first, metrics, recompiled = train(
        tx, make_mesh("data=2,fsdp=2,model=2"), 10
    )
    assert recompiled == []
    assert metrics[-1]["loss"] < metrics[0]["loss"]

    # The state is sharded like the parameters, and stays so.
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), spec.abstract
    )
    kernels = {
        path: p
        for path, p in spec.opt_state.items()
        if path.endswith("hidden/kernel") and p.shape == (16, 160)
    }
    assert {p.spec for p in kernels.values()} <= {spec.params["hidden/kernel"].spec}
    assert kernels or name == "adafactor"

    # Frozen leaves keep their bits and have no optimizer state.
    for path, leaf in named_leaves(state.params["embed"]).items():
        np.testing.assert_array_equal(leaf, named_leaves(first["embed"])[path])
    assert not [path for path in spec.opt_state if "embed" in path]

    # One device, or another mesh, trains the same.
    elsewhere = train(
        tx, make_mesh(other, jax.devices()[:1] if other == "data=1" else None), 10
    )[3]
    for key in ("loss", "grad_norm", "update_norm", "param_norm", "update_norm/head"):
        np.testing.assert_allclose(
            [m[key] for m in metrics],
            [m[key] for m in elsewhere],
            rtol=1e-4,
            err_msg=f"{key} on {other}",
        )

    # Every group that is trained has live values.
    last = metrics[-1]
    for key in ("lr", "grad_norm", "update_norm", "param_norm"):
        assert {f"{key}/head", f"{key}/rest"} <= last.keys()
    assert last["clipped_norm"] <= 1.0001
    if name != "prodigy":
        assert last["lr/head"] == pytest.approx(0.5 * last["lr/rest"])

    # The state survives a plain Orbax checkpoint.
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, {})
    restored = checkpoints.restore(spec, 10)
    checkpoints.close()
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), restored, state)
    )


@pytest.mark.parametrize("name", SOME)
def test_decay_is_applied_where_explain_reports_it(name):
    tx = make(name, weight_decay=0.05, groups=GROUPS)
    explanation = explain(tx, Net, steps=STEPS)
    spec = abstract_state(Net, tx, make_mesh("data=1", jax.devices()[:1]))
    params = init_state(spec, 0).params
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = jax.jit(
        lambda zeros, params: tx.update(zeros, tx.init(params), params)
    )(zeros, params)
    rates, updates, params = (
        optim.live_values(state),
        named_leaves(updates),
        named_leaves(params),
    )
    for row in explanation.rows:
        assert row.decay == pytest.approx(
            0.05 if row.path in ("hidden/kernel", "out/kernel") else 0.0, rel=0.02
        ), row.path
        if row.decay:
            expected = (
                -float(rates[f"lr/{row.group.split('/')[0]}"])
                * row.decay
                * params[row.path]
            )
            # Schedule-free computes the update as (a - b) + b, which rounds.
            np.testing.assert_allclose(
                updates[row.path], expected, rtol=0.03, atol=1e-7
            )
        else:
            assert np.abs(updates[row.path]).max() < 1e-6
    assert [finding.name for finding in explanation.findings] == []
