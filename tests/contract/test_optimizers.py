"""Every Optax optimizer passes one suite: sharded like its parameters, and compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardwise import (
    Mean,
    Rules,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
)
from shardwise.sharding import ModelLeaf, place_model, place_optimizer
from shardwise.tree import named_leaves

contrib = optax.contrib
LABELS = {
    "hidden": {"kernel": "train", "bias": "freeze"},
    "out": {"kernel": "train", "bias": "train"},
}

OPTIMIZERS = {
    **{
        name: getattr(optax, name)(1e-3)
        for name in [
            "adabelief",
            "adadelta",
            "adafactor",
            "adagrad",
            "adam",
            "adamax",
            "adamaxw",
            "adamw",
            "adan",
            "amsgrad",
            "fromage",
            "lamb",
            "lars",
            "lion",
            "nadam",
            "nadamw",
            "novograd",
            "optimistic_gradient_descent",
            "radam",
            "rmsprop",
            "rprop",
            "sgd",
            "sign_sgd",
            "sm3",
            "yogi",
        ]
    },
    **{
        name: getattr(contrib, name)(1e-3)
        for name in [
            "acprop",
            "ademamix",
            "adopt",
            "dowg",
            "madgrad",
            "muon",
            "prodigy",
            "simplified_ademamix",
        ]
    },
    "noisy_sgd": optax.noisy_sgd(1e-3, key=0),
    "polyak_sgd": optax.polyak_sgd(),
    "dog": contrib.dog(1e-3),
    "cocob": contrib.cocob(),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "momo": contrib.momo(),
    "schedule_free_adamw": contrib.schedule_free_adamw(1e-3),
    "mechanize": contrib.mechanize(optax.adam(1e-3)),
    "momentum": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "reduce_on_plateau": optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau()),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "clipped": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    ),
    "injected": optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(
        learning_rate=1e-3
    ),
    "masked": optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1),
            lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        ),
        optax.adam(1e-3),
    ),
    "partition": optax.partition(
        {"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()}, LABELS
    ),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
}


class Net(nnx.Module):
    """Wide enough (over 128) for Adafactor to factor the second moment."""

    def __init__(self, rngs):
        tensor_parallel = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), (None, "model")
        )
        self.hidden = nnx.Linear(128, 256, kernel_init=tensor_parallel, rngs=rngs)
        self.out = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def loss(model, batch):
    squares = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
    return Mean(squares, jnp.ones_like(squares))


RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 128)).astype("f4"),
    "y": RNG.normal(size=(16, 8)).astype("f4"),
}


def three_steps(optimizer, mesh, model=Net):
    spec = abstract_state(model, optimizer, mesh, Rules(fsdp_min_size=1024))
    step = make_train_step(spec, loss, BATCH)
    state = init_state(spec, 0)
    first = {
        path: np.asarray(leaf) for path, leaf in named_leaves(state.params).items()
    }
    losses, compiled = [], []
    for _ in range(3):
        state, metrics = step(state, step.place(BATCH))
        losses.append(float(metrics["loss"]))
        # Nothing may be compiled from here on.
        if not compiled:
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, *_, **__: compiled.append(event)
            )
            compiled.append("first step")
    jax.monitoring.clear_event_listeners()
    return (
        spec,
        [event for event in compiled if "backend_compile" in event],
        first,
        state,
        losses,
    )


# One optimizer for each kind of state.
QUICK = (
    "adafactor",
    "adamw",
    "muon",
    "prodigy",
    "momo",
    "schedule_free_adamw",
    "mechanize",
    "reduce_on_plateau",
    "multi_steps",
    "injected",
    "masked",
    "partition",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_contract(name):
    optimizer = OPTIMIZERS[name]
    spec, recompiled, before, state, losses = three_steps(
        optimizer, make_mesh("data=2,fsdp=2,model=2")
    )
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings, (
        "a sharding has changed"
    )
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), spec.abstract
    )
    assert recompiled == []

    # Every leaf that is as large as the large kernel is sharded like it.
    kernel_bytes = 256 * 128 * 4
    for path, leaf in named_leaves(state.opt_state).items():
        if leaf.nbytes >= kernel_bytes and path.endswith("hidden/kernel"):
            shard_bytes = {shard.data.nbytes for shard in leaf.addressable_shards}
            assert shard_bytes == {leaf.nbytes // 4}, path

    *_, on_one_device = three_steps(optimizer, make_mesh("data=1", jax.devices()[:1]))
    np.testing.assert_allclose(losses, on_one_device, rtol=2e-5)
    if name not in ("noisy_sgd",):
        after = named_leaves(state.params)
        moved = {
            path for path in before if not np.array_equal(before[path], after[path])
        }
        assert moved == {
            path
            for path in before
            if not (name == "partition" and path == "hidden/bias")
        }


class Factored(nnx.Module):
    """A square and two rectangular kernels, each large enough for Adafactor to factor it."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "model"))
        self.wide = nnx.Linear(128, 256, kernel_init=init, rngs=rngs)
        self.square = nnx.Linear(256, 256, kernel_init=init, rngs=rngs)
        self.narrow = nnx.Linear(256, 128, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(128, 8, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.tanh(self.square(nnx.tanh(self.wide(x))))
        return self.out(nnx.tanh(self.narrow(hidden)))


@pytest.mark.slow
def test_each_adafactor_factor_follows_the_dim_that_it_keeps():
    """Both factors of a square kernel have the same shape, so only their names tell them apart."""
    optimizer = OPTIMIZERS["adafactor"]
    mesh = make_mesh("fsdp=4,model=2")
    spec, _, _, state, losses = three_steps(optimizer, mesh, Factored)
    expected = {
        "wide": {"v_row": P("fsdp"), "v_col": P("model")},
        "square": {"v_row": P("fsdp"), "v_col": P("model")},
        # Optax calls the largest dim the columns: here the first one.
        "narrow": {"v_row": P("model"), "v_col": P("fsdp")},
    }
    leaves = named_leaves(state.opt_state)
    for layer, factors in expected.items():
        for factor, layout in factors.items():
            path = f"0/{factor}/{layer}/kernel"
            assert spec.opt_state[path].spec == layout, path
            assert leaves[path].sharding.spec == layout, path

    one_device = make_mesh("data=1", jax.devices()[:1])
    *_, on_one_device, losses_on_one_device = three_steps(
        optimizer, one_device, Factored
    )
    np.testing.assert_allclose(losses, losses_on_one_device, rtol=2e-5)
    for path, leaf in named_leaves(on_one_device.opt_state).items():
        np.testing.assert_allclose(
            leaves[path], leaf, rtol=1e-3, atol=1e-9, err_msg=path
        )


@pytest.mark.parametrize(
    ("path", "leaf", "param", "expected"),
    [
        ("v_row/w", (256,), (256, 256), P("fsdp")),
        ("v_col/w", (256,), (256, 256), P("model")),
        ("v_row/w", (4, 256), (4, 256, 256), P(None, "fsdp")),
        ("v_col/w", (4, 256), (4, 256, 256), P(None, "model")),
        # Neither the sizes nor the name tell which dim was kept.
        ("mean/w", (256,), (256, 256), P()),
        ("mean/w", (4, 256), (4, 256, 256), P()),
        ("mean/w", (512,), (256, 512), P("model")),
        # Kept dims, and a history of gradients.
        ("mean/w", (1, 256), (256, 256), P(None, "model")),
        ("history/w", (256, 256, 256), (256, 256), P(None, "fsdp", "model")),
        ("history/w", (512, 10), (256, 512), P("model", None)),
    ],
)
def test_an_optimizer_leaf_of_another_shape_follows_the_dims_that_it_keeps(
    path, leaf, param, expected
):
    mesh = make_mesh("fsdp=4,model=2")
    field, _, name = path.partition("/")
    axes = (None,) * (len(param) - 2) + ("fsdp", "model")
    params = place_model({name: ModelLeaf(param, jnp.dtype("f4"), axes)}, mesh, Rules())
    state = {field: {name: jax.ShapeDtypeStruct(leaf, "f4")}}
    assert place_optimizer(state, params, mesh, Rules())[path].spec == expected
