"""Factors of initial weights and updates against the published tables, and scaled runs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import fit, init_state, optim, scaled
from shardwise.errors import ConfigError
from shardwise.run import prepare
from shardwise.scaling.probe import small_shapes
from shardwise.scaling.scaled import find_scaling
from shardwise.scaling.size import Size
from shardwise.scaling.transform import scale_init, scale_updates
from shardwise.tree import named_leaves
from tests.helpers.sizes import (
    Perceptron,
    gpt_run,
    image_run,
    one_device,
    perceptron_run,
)

BASE, WIDTH = 32, 128
M = WIDTH / BASE


def scaling_of(make_run, optimizer=None, size=None, base=None):
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    size = Size(WIDTH) if size is None else size
    base = Size(BASE) if base is None else base

    def at_size(size):
        return replace(make_run(size), optimizer=optimizer)

    return find_scaling(at_size, size, base)


def perceptron(size):
    return perceptron_run(size.width)


def rates(scaling):
    return {path: found.rate for path, found in scaling.parameters.items()}


def inits(scaling):
    return {path: found.init for path, found in scaling.parameters.items()}


# Tensor Programs V, tables 3 and 8: the rates of SGD and Adam. Biases are like input weights.
# Muon with updates of a fixed RMS has a spectral norm that grows like the square root of the width.
TABLE = {
    "sgd": (optax.sgd(0.1), {"first": M, "hidden": 1, "head": 1 / M, "bias": M}),
    "momentum": (
        optim.sgd(0.1, momentum=0.9),
        {"first": M, "hidden": 1, "head": 1 / M, "bias": M},
    ),
    "adam": (
        optax.adam(1e-3),
        {"first": 1, "hidden": 1 / M, "head": 1 / M, "bias": 1},
    ),
    "adamw": (
        optim.adamw(optim.cosine(1e-3, 100, warmup=0.1), clip=1.0),
        {"first": 1, "hidden": 1 / M, "head": 1 / M, "bias": 1},
    ),
    "lion": (optim.lion(1e-4), {"first": 1, "hidden": 1 / M, "head": 1 / M, "bias": 1}),
    "muon, fixed RMS": (
        optim.muon(1e-3, adam=("first/*", "head/*")),
        {"first": 1, "hidden": M**-0.5, "head": 1 / M, "bias": 1},
    ),
    "muon, original": (
        optim.muon(1e-3, rms=None, adam=("first/*", "head/*")),
        {"first": 1, "hidden": 1, "head": 1 / M, "bias": 1},
    ),
    "accumulated": (
        optax.MultiSteps(optax.adam(1e-3), 16).gradient_transformation(),
        {"first": 1, "hidden": 1 / M, "head": 1 / M, "bias": 1},
    ),
}


SLOW = ("momentum", "lion", "muon, original", "accumulated")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TABLE],
)
def test_rates_against_the_table(name):
    optimizer, expected = TABLE[name]
    found = rates(scaling_of(perceptron, optimizer))
    for part in ("first", "hidden", "head"):
        assert found[f"{part}/kernel"] == expected[part]
    assert found["first/bias"] == found["hidden/bias"] == expected["bias"]
    assert found["head/bias"] == 1


class Normal(Perceptron):
    """All kernels have the same standard deviation, whatever the width."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        for layer in (self.first, self.hidden, self.head):
            key, shape = rngs.params(), layer.kernel[...].shape
            layer.kernel[...] = 0.02 * jax.random.normal(key, shape)


@pytest.mark.slow
def test_factors_of_initial_weights():
    # Flax divides by the square root of the number of inputs.
    found = inits(scaling_of(perceptron))
    assert found["first/kernel"] == found["hidden/kernel"] == 1
    assert found["head/kernel"] == M**-0.5

    def normal(size):
        run = perceptron_run(size.width)
        return replace(run, model=lambda rngs: Normal(size.width, rngs))

    found = inits(scaling_of(normal))
    assert found["first/kernel"] == 1
    assert found["hidden/kernel"] == M**-0.5
    assert found["head/kernel"] == 1 / M
    # Parameters that start at zero stay there.
    assert found["hidden/bias"] == 1


@pytest.mark.slow
def test_depth_scales_residual_branches():
    def make_run(size):
        return gpt_run(size.width, size.depth)

    found = scaling_of(make_run, size=Size(BASE, 8), base=Size(BASE, 2))
    factors = {path: rate for path, rate in rates(found).items() if rate != 1}
    branches = ("attn/out/kernel", "attn/out/bias", "mlp/down/kernel", "mlp/down/bias")
    expected = {f"blocks/{layer}/{name}" for layer in range(8) for name in branches}
    assert factors == dict.fromkeys(expected, 2 / 8)
    # The GPT divides by the square root of the depth already.
    assert inits(found)["blocks/3/mlp/down/kernel"] == 0.5


def test_a_model_without_branches_has_no_depth():
    with pytest.raises(ConfigError, match="no residual branches"):
        scaling_of(perceptron, size=Size(BASE, 4), base=Size(BASE, 2))


def test_a_branch_that_cannot_be_scaled_keeps_its_depth():
    class Squashed(nnx.Module):
        def __init__(self, width, rngs):
            self.inner = nnx.Linear(64, 64, rngs=rngs)
            self.head = nnx.Linear(64, width, rngs=rngs)
            self.out = nnx.Linear(width, 10, rngs=rngs)

        def __call__(self, x):
            x = x.reshape(len(x), -1)
            return self.out(self.head(x + jnp.tanh(self.inner(x))))

    def make_run(size):
        return image_run(lambda rngs: Squashed(size.width, rngs))

    with pytest.raises(ConfigError, match=r"the residual branch .* test_scaled\.py:"):
        scaling_of(make_run, size=Size(BASE, 4), base=Size(BASE, 2))


@pytest.mark.slow
def test_the_folded_multiplier_equals_an_explicit_one():
    """A tied GPT: factors of the last norm do what a factor of the logits does, with Adam."""
    scaling = scaling_of(lambda size: gpt_run(size.width))
    folds = ("norm/scale", "norm/bias")
    optimizer = optax.adam(1e-3, eps=0)
    run = replace(gpt_run(WIDTH), optimizer=optimizer, steps=4)
    multiplier = BASE / WIDTH

    def explicit_loss(model, batch):
        features, table = model.features(batch["inputs"])
        logits = multiplier * features @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    def plain_loss(model, batch):
        features, table = model.features(batch["inputs"])
        logits = features @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        ).mean()

    init, rate = inits(scaling), rates(scaling)
    folded = replace(scaling.apply(run), loss=plain_loss)
    others_init = {path: factor for path, factor in init.items() if path not in folds}
    others_rate = {path: factor for path, factor in rate.items() if path not in folds}
    explicit = replace(
        run,
        model=scale_init(run.model, others_init),
        optimizer=scale_updates(optimizer, others_rate),
        loss=explicit_loss,
    )
    np.testing.assert_allclose(losses_of(folded), losses_of(explicit), rtol=2e-5)


def losses_of(run):
    prepared = prepare(run)
    state = init_state(prepared.spec, run.seed)
    losses = []
    for number in range(run.steps):
        batch = prepared.step.place(prepared.batches(number))
        state, metrics = prepared.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def test_decoupled_weight_decay_keeps_its_size():
    params = {"kernel": jnp.full((4, 4), 2.0)}
    grads = {"kernel": jnp.ones((4, 4))}
    tx = scale_updates(optax.adamw(0.1, weight_decay=0.5), {"kernel": 0.25}, ["kernel"])
    updates, _ = tx.update(grads, tx.init(params), params)
    # Adam moves by the rate; decay by rate * decay * weight.
    expected = -0.25 * 0.1 - 0.1 * 0.5 * 2.0
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-5)


def test_which_decay_is_separable():
    found = scaling_of(perceptron, optax.adamw(1e-3, weight_decay=0.1))
    assert found.separable == set(found.parameters)
    coupled = optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3))
    assert "hidden/kernel" not in scaling_of(perceptron, coupled).separable


@pytest.mark.parametrize("options", [{"ema": 0.99}, {"schedule_free": True}])
def test_optimizers_that_copy_weights_are_refused(options):
    optimizer = (
        optim.schedule_free(1e-3)
        if "schedule_free" in options
        else optim.adamw(1e-3, **options)
    )
    with pytest.raises(ConfigError, match="keeps a copy of the weights"):
        scaling_of(perceptron, optimizer)


def recipe(width=BASE, lr=1e-2, out=None, mesh=None, steps=4):
    mesh = one_device() if mesh is None else mesh
    run = gpt_run(width, optimizer=optim.adamw(lr), mesh=mesh, steps=steps)
    return replace(run, out=out)


def test_the_decorator_changes_nothing_at_the_base():
    run = recipe()
    scaled_recipe = scaled(width=BASE)(lambda width=BASE: run)
    assert scaled_recipe() is run


def test_the_decorator_refuses_unknown_arguments():
    with pytest.raises(ConfigError, match=r"no argument 'widht'.*Did you mean 'width'"):
        scaled(width=BASE, width_name="widht")(recipe)
    with pytest.raises(ConfigError, match="no argument 'depth'"):
        scaled(width=BASE, depth=2)(recipe)


@pytest.mark.slow
def test_a_scaled_run_is_the_same_on_a_mesh():
    scaled_recipe = scaled(width=BASE)(recipe)
    one = losses_of(scaled_recipe(width=WIDTH))
    for mesh in ("fsdp=8", "data=2,model=4"):
        other = losses_of(scaled_recipe(width=WIDTH, mesh=mesh))
        np.testing.assert_allclose(other, one, rtol=1e-4)


@pytest.mark.slow
def test_initial_weights_have_the_same_bits_on_a_mesh():
    scaled_recipe = scaled(width=BASE)(recipe)
    states = []
    for mesh in (None, "fsdp=8"):
        run = scaled_recipe(width=WIDTH, mesh=mesh)
        states.append(init_state(prepare(run).spec, 0).params)
    one, other = map(named_leaves, states)
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path])


@pytest.mark.slow
def test_a_scaled_run_resumes(tmp_path):
    scaled_recipe = scaled(width=BASE)(recipe)
    whole = fit(scaled_recipe(width=WIDTH, out=tmp_path / "whole"))
    fit(replace(scaled_recipe(width=WIDTH, out=tmp_path / "parts"), steps=2))
    parts = fit(scaled_recipe(width=WIDTH, out=tmp_path / "parts"))
    one, other = named_leaves(whole.state.params), named_leaves(parts.state.params)
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path])


def test_the_state_stays_plain():
    optimizer = optax.adam(1e-3)
    params = {"kernel": jnp.ones((2, 2))}
    state = scale_updates(optimizer, {"kernel": 0.5}).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))


def test_scale_init_keeps_metadata():
    def make(rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"))
        return nnx.Linear(4, 2, kernel_init=init, rngs=rngs)

    with nnx.use_eager_sharding(False):
        layer = scale_init(make, {"kernel": 0.5})(nnx.Rngs(0))
        plain = make(nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel[...], 0.5)
    assert layer.kernel.get_metadata() == plain.kernel.get_metadata()


@pytest.mark.parametrize(
    ("base", "shape"),
    [((64, 256), (1024, 4096)), ((8,), (8,)), ((50304, 64), (50304, 8192)), ((), ())],
)
def test_small_shapes_keep_ratios(base, shape):
    small, large = small_shapes(base, shape)
    ratios = [after / before for before, after in zip(base, shape, strict=True)]
    assert [b / a for a, b in zip(small, large, strict=True)] == ratios


def test_another_name_of_the_width_is_explained():
    def recipe(hidden=32):
        return perceptron_run(hidden)

    with pytest.raises(ConfigError, match=r"arguments are hidden. .*width_name='NAME'"):
        scaled(width=32)(recipe)
    assert scaled(width=32, width_name="hidden")(recipe)(hidden=64)
