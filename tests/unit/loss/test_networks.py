"""Several networks in one run, compared with loops written by hand in Flax and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.transforms import conditionally_mask

from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.sharding import Rules
from shardwise.state import abstract_state, init_state
from shardwise.step import make_train_step
from shardwise.tree import named_leaves

MESHES = ["data=1", "data=4,fsdp=2"]
RATE = 0.25
X = np.random.default_rng(0).normal(size=(16, 4)).astype("f4")


def spec_on(mesh, factory, optimizer, wrt=nnx.Param):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    rules = Rules(fsdp_min_size=5)
    return abstract_state(factory, optimizer, make_mesh(mesh, devices), rules, wrt)


def trained(spec, loss, batch, steps, **options):
    step = make_train_step(spec, loss, batch, **options)
    state, losses = init_state(spec, 0), []
    for _ in range(steps):
        state, metrics = step(state, step.place(batch))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_equal_leaves(found, expected):
    found, expected = named_leaves(found), named_leaves(expected)
    assert list(found) == list(expected)
    for name, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=2e-5, atol=1e-6)


class Student(nnx.Module):
    def __init__(self, rngs):
        self.online = nnx.Linear(4, 4, rngs=rngs)
        self.target = nnx.Linear(4, 4, rngs=rngs)


def follow(target, online):
    new, old = nnx.state(online, nnx.Param), nnx.state(target, nnx.Param)
    nnx.update(target, jax.tree.map(lambda t, o: t + RATE * (o - t), old, new))


def distill(model, batch):
    goal = jax.lax.stop_gradient(model.target(batch["x"]))
    values = ((model.online(batch["x"]) - goal) ** 2).sum(-1)
    follow(model.target, model.online)
    return Mean(values)


ONLINE = nnx.All(nnx.Param, nnx.PathContains("online"))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_target_network_follows_by_a_moving_average(mesh):
    spec = spec_on(mesh, Student, optax.adam(0.1), ONLINE)
    state, losses = trained(spec, distill, {"x": X}, 4)

    one = spec_on("data=1", Student, optax.adam(0.1), ONLINE)
    model = one.module(init_state(one, 0))
    optimizer = nnx.Optimizer(model.online, optax.adam(0.1), wrt=nnx.Param)
    expected = []
    for _ in range(4):

        def loss(online, target=model.target):
            goal = jax.lax.stop_gradient(target(X))
            return ((online(X) - goal) ** 2).sum(-1).mean()

        value, grads = nnx.value_and_grad(loss)(model.online)
        follow(model.target, model.online)
        optimizer.update(model.online, grads)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for part, found in (("online", state.params), ("target", state.other)):
        module = getattr(model, part)
        values = {"kernel": module.kernel[...], "bias": module.bias[...]}
        assert_equal_leaves(found, {part: values})


def test_what_is_not_trained_has_no_optimizer_state():
    spec = spec_on("data=1", Student, optax.adam(0.1), ONLINE)
    assert list(spec.params) == ["online/bias", "online/kernel"]
    assert sorted(spec.other) == ["target/bias", "target/kernel"]
    assert not [name for name in spec.opt_state if "target" in name]


def test_a_filter_that_fits_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"no variable that fits wrt="):
        spec_on("data=1", Student, optax.sgd(0.1), nnx.PathContains("teacher"))


class Gan(nnx.Module):
    def __init__(self, rngs):
        self.generator = nnx.Linear(2, 4, rngs=rngs)
        self.discriminator = nnx.Linear(4, 1, rngs=rngs)


def generator_loss(generator, discriminator, noise):
    return nnx.softplus(-discriminator(generator(noise))[:, 0])


def discriminator_loss(discriminator, fake, real):
    on_real, on_fake = discriminator(real)[:, 0], discriminator(fake)[:, 0]
    return nnx.softplus(-on_real) + nnx.softplus(on_fake)


def alternating(model, batch, step):
    fake = model.generator(batch["noise"])
    generator = generator_loss(model.generator, model.discriminator, batch["noise"])
    discriminator = discriminator_loss(model.discriminator, fake, batch["x"])
    return Mean(jnp.where(step % 2 == 0, generator, discriminator))


def network(path, _):
    return path[0].key


def in_turns():
    turns = {"generator": 0, "discriminator": 1}

    def on_turn(turn):
        return conditionally_mask(optax.adam(0.1), lambda step: step % 2 == turn)

    return optax.partition(
        {name: on_turn(turn) for name, turn in turns.items()},
        lambda params: jax.tree_util.tree_map_with_path(network, params),
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_two_optimizers_that_alternate(mesh):
    noise = np.random.default_rng(1).normal(size=(16, 2)).astype("f4")
    spec = spec_on(mesh, Gan, in_turns())
    state, losses = trained(spec, alternating, {"x": X, "noise": noise}, 6)

    one = spec_on("data=1", Gan, in_turns())
    model = one.module(init_state(one, 0))
    generator, discriminator = model.generator, model.discriminator
    optimizers = [
        nnx.Optimizer(part, optax.adam(0.1), wrt=nnx.Param)
        for part in (generator, discriminator)
    ]
    expected = []
    for n in range(6):
        if n % 2 == 0:
            value, grads = nnx.value_and_grad(
                lambda g: generator_loss(g, discriminator, noise).mean()
            )(generator)
            optimizers[0].update(generator, grads)
        else:
            fake = generator(noise)
            value, grads = nnx.value_and_grad(
                lambda d, fake=fake: discriminator_loss(d, fake, X).mean()
            )(discriminator)
            optimizers[1].update(discriminator, grads)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    values = {
        name: {"kernel": part.kernel[...], "bias": part.bias[...]}
        for name, part in (
            ("discriminator", discriminator),
            ("generator", generator),
        )
    }
    assert_equal_leaves(state.params, values)


def test_a_target_network_in_bfloat16_keeps_float32_averages():
    spec = spec_on("data=1", Student, optax.sgd(0.0), ONLINE)
    before = init_state(spec, 0)
    start = jax.tree.map(np.asarray, (before.params["online"], before.other["target"]))
    state, _ = trained(spec, distill, {"x": X}, 1, compute_dtype="bfloat16")
    expected = jax.tree.map(lambda o, t: t + RATE * (o - t), *start)
    for name, leaf in state.other["target"].items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6)
