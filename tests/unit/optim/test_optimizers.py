"""Unit tests of parameter groups, averages, master copies, spikes and Muon's matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from shardwise import optim
from shardwise.errors import ConfigError
from shardwise.optim import Group
from shardwise.optim.matrices import matrix_shape
from shardwise.optim.parts import compute_updates, keep_average, norm, with_master

PARAMS = {
    "a": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
    "b": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)},
}
GRADS = jax.tree.map(lambda p: 0.1 * p, PARAMS)


def after(tx, count, grads=GRADS, params=PARAMS):
    """Return parameters and state after `count` updates."""
    state = tx.init(params)
    for _ in range(count):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_the_first_group_that_matches_wins():
    groups = (
        Group("*/bias", lr=1e-1, name="biases"),
        Group("a/*", lr_scale=2.0),
        Group("*", name="rest"),
    )
    params, state = after(optim.adam(1e-2, groups=groups), 1)
    moved = jax.tree.map(lambda new, old: float((old - new).mean()), params, PARAMS)
    assert moved["a"]["bias"] == pytest.approx(0.1, rel=1e-4)
    assert moved["a"]["kernel"] == pytest.approx(0.02, rel=1e-4)
    assert moved["b"]["kernel"] == pytest.approx(0.01, rel=1e-4)
    values = optim.live_values(state)
    assert [
        float(values[f"lr/{group}"]) for group in ("biases", "a/*", "rest")
    ] == pytest.approx([0.1, 0.02, 0.01])


def test_mistakes_in_groups_are_all_listed_with_the_closest_match():
    with pytest.raises(ConfigError) as caught:
        optim.adam(1e-2, groups=(Group("a/kernal"), Group("b/*", frozen=True))).init(
            PARAMS
        )
    text = str(caught.value)
    assert (
        "pattern 'a/kernal' of group 'a/kernal' matches no parameter. Did you mean 'a/kernel'?"
        in text
    )
    assert "no group claims these parameters" in text
    assert "  a/bias" in text
    with pytest.raises(
        ConfigError, match=r"'b/\*' claims no parameter: .* 'rest' before"
    ):
        optim.adam(1e-2, groups=(Group("*", name="rest"), Group("b/*"))).init(PARAMS)
    # The rest may be empty.
    optim.adam(1e-2, groups=(Group("a/*"), Group("b/*"), Group("*"))).init(PARAMS)
    both = Group("a/*", tx=optax.sgd(1.0), lr=0.1, weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"'a/\*' has lr, weight_decay and tx="):
        optim.adam(1e-2, groups=(both, Group("*")))
    with pytest.raises(ConfigError, match="two parameter groups have the same name"):
        optim.adam(1e-2, groups=(Group("a/*", name="x"), Group("*", name="x"))).init(
            PARAMS
        )


@pytest.mark.parametrize("recipe", [optim.muon, optim.normuon, optim.soap])
@pytest.mark.parametrize("argument", ["adam", "stacked"])
def test_patterns_of_matrices_that_match_nothing_are_refused(recipe, argument):
    with pytest.raises(ConfigError, match=rf"'c/kernal' in {argument}= matches no"):
        recipe(1e-2, **{argument: ("c/kernal",)}).init(PARAMS)
    # Below a group, the other parameters are not known.
    groups = (Group("a/*"), Group("*"))
    recipe(1e-2, adam=("b/kernel",), groups=groups).init(PARAMS)


def test_optimizers_that_read_the_loss_and_others_that_do_not():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2)
    state = sam.init(PARAMS)
    expected = sam.update(GRADS, state, PARAMS)
    found = compute_updates(sam, GRADS, state, PARAMS, jnp.float32(1))
    for left, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(left, right)
    polyak = optax.polyak_sgd()
    updates, _ = compute_updates(
        polyak, GRADS, polyak.init(PARAMS), PARAMS, jnp.float32(0.2)
    )
    # The loss over the squared norm of the gradients, times the gradients.
    squares = sum(float((g**2).sum()) for g in jax.tree.leaves(GRADS))
    np.testing.assert_allclose(updates["a"]["bias"], -0.2 / squares * 0.1, rtol=1e-4)


def test_schedule_free_refuses_a_second_average():
    with pytest.raises(ConfigError, match=r"evaluates an average .* Remove ema=0.9"):
        optim.schedule_free(1e-3, ema=0.9)


def test_a_group_can_have_a_custom_optimizer_and_clipping():
    groups = (Group("a/*", tx=optax.sgd(1.0)), Group("b/*", clip=1e-3))
    params, state = after(optim.sgd(1.0, momentum=0.0, groups=groups), 1)
    np.testing.assert_allclose(params["a"]["kernel"], 0.9, rtol=1e-6)
    moved = jax.tree.map(jnp.subtract, params["b"], PARAMS["b"])
    assert float(norm(moved)) == pytest.approx(1e-3, rel=1e-3)
    assert float(optim.live_values(state)["clipped_norm/b/*"]) == pytest.approx(
        1e-3, rel=1e-4
    )


def test_labels_and_masks_work_on_nnx_states():
    """The leaves are variables at creation and arrays at updates."""
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    tx = optim.adamw(
        0.1,
        weight_decay=0.1,
        groups=(Group("bias", frozen=True), Group("*", name="rest")),
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel, bias = np.asarray(model.kernel[...]), np.asarray(model.bias[...])
    grads = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.kernel[...], kernel * (1 - 0.1 * 0.1), rtol=1e-6)
    np.testing.assert_array_equal(model.bias[...], bias)
    assert float(optim.live_values(optimizer.opt_state)["lr/rest"]) == pytest.approx(
        0.1
    )


def test_layerwise_decay_scales_the_rate_of_each_layer():
    params = {
        "tokens": jnp.ones((2, 2)),
        "blocks": {str(i): {"kernel": jnp.ones((2, 2))} for i in range(3)},
        "head": jnp.ones((2, 2)),
    }
    tx = optim.adam(
        1.0,
        groups=optim.layerwise_decay(
            0.5, [f"blocks/{i}/*" for i in range(3)], below="tokens"
        ),
    )
    updates, _ = tx.update(params, tx.init(params), params)
    sizes = [
        -float(leaf.mean())
        for leaf in (
            updates["tokens"],
            *(updates["blocks"][str(i)]["kernel"] for i in range(3)),
            updates["head"],
        )
    ]
    assert sizes == pytest.approx([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0], rel=1e-4)


def test_frozen_parameters_do_not_count_in_the_norm():
    groups = (Group("a/*", frozen=True), Group("*", name="rest"))
    _, state = after(optim.sgd(1.0, clip=1.0, groups=groups), 1)
    assert float(optim.live_values(state)["clipped_norm"]) == pytest.approx(
        float(norm(GRADS["b"])), rel=1e-5
    )


@pytest.mark.parametrize(
    "clip", [optax.clip(0.01), optax.adaptive_grad_clip(0.01), 0.01]
)
def test_clip_accepts_any_transformation(clip):
    _, state = after(optim.sgd(1.0, momentum=0.0, clip=clip), 1)
    assert 0 < float(optim.live_values(state)["clipped_norm"]) < float(norm(GRADS))


def test_the_average_is_of_the_weights_and_skips_frozen_parameters():
    groups = (Group("a/*", frozen=True), Group("*", name="rest"))
    tx = optim.sgd(0.1, momentum=0.0, ema=0.5, groups=groups)
    params, state = PARAMS, tx.init(PARAMS)
    average = np.asarray(PARAMS["b"]["kernel"], "f8")
    for n in range(20):
        updates, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
        keep = min(0.5, (1 + n) / (10 + n))
        average = keep * average + (1 - keep) * np.asarray(params["b"]["kernel"], "f8")
    actual = optim.evaluation_params(state, params)
    np.testing.assert_allclose(actual["b"]["kernel"], average, rtol=1e-6)
    np.testing.assert_array_equal(actual["a"]["kernel"], PARAMS["a"]["kernel"])
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < sum(
        leaf.size for leaf in jax.tree.leaves(PARAMS)
    )


def test_schedule_free_is_evaluated_as_in_optax():
    tx = optim.schedule_free(0.1, weight_decay=0.0)
    params, state = after(tx, 10)
    free = next(
        n
        for n in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "z"))
        if hasattr(n, "z")
    )
    expected = optax.contrib.schedule_free_eval_params(free, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        optim.evaluation_params(state, params),
        expected,
    )
    by_optax, _ = after(optax.contrib.schedule_free_adamw(0.1), 10)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, by_optax
    )


def test_master_copies_lose_no_update():
    """Near 1, bfloat16 numbers are 0.004 apart, so 1000 updates of 1e-5 are lost without copies."""
    half = {"kernel": jnp.ones((4, 4), jnp.bfloat16)}
    grads = {"kernel": jnp.ones((4, 4), jnp.bfloat16)}
    for master, expected in ((True, 0.99), (False, 1.0)):
        tx = optim.adam(1e-5, master=master)
        update = jax.jit(tx.update)
        params, state = half, tx.init(half)
        for _ in range(1000):
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        assert params["kernel"].dtype == jnp.bfloat16
        np.testing.assert_allclose(params["kernel"].astype("f4"), expected, atol=2e-3)


@pytest.mark.parametrize("bad", [100.0, jnp.inf, jnp.nan])
def test_a_spike_changes_nothing_and_is_recorded(bad):
    tx = optim.skip_spikes(optim.adam(optim.linear(1e-2, 100)), factor=5.0, window=3)
    params, state = after(tx, 5)
    updates, after_spike = tx.update(
        jax.tree.map(lambda g: bad * g, GRADS), state, params
    )
    assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after_spike.inner, state.inner)
    assert (
        float(optim.live_values(after_spike)["skipped"]),
        int(after_spike.count),
    ) == (1.0, 5)
    _, ordinary = tx.update(GRADS, after_spike, params)
    assert (float(optim.live_values(ordinary)["skipped"]), int(ordinary.count)) == (
        0.0,
        6,
    )


@given(st.lists(st.integers(1, 64), min_size=2, max_size=4))
def test_a_matrix_has_the_split_nearest_to_a_square(shape):
    inputs, outputs = matrix_shape(tuple(shape))
    assert inputs * outputs == np.prod(shape)
    ratios = [
        max(a, b) / min(a, b)
        for i in range(1, len(shape))
        for a, b in [(np.prod(shape[:i]), np.prod(shape[i:]))]
    ]
    assert max(inputs, outputs) / min(inputs, outputs) == pytest.approx(min(ratios))


def test_matrix_shapes_of_common_layers():
    fused_qkv, attention_output, convolution = (
        (768, 3, 12, 64),
        (12, 64, 768),
        (3, 3, 64, 128),
    )
    assert matrix_shape(fused_qkv) == (768, 2304)
    assert matrix_shape(attention_output) == (768, 768)
    assert matrix_shape(convolution) == (576, 128)


def test_matrices_become_nearly_orthogonal_and_stacked_layers_are_separate():
    x = jax.random.normal(jax.random.key(0), (3, 32, 16))
    stacked = optim.orthogonalize(stacked=("*",))
    together, _ = stacked.update({"x": x}, stacked.init({"x": x}))
    single = optim.orthogonalize()
    for i in range(3):
        alone, _ = single.update({"x": x[i]}, single.init({"x": x[i]}))
        np.testing.assert_allclose(together["x"][i], alone["x"], atol=2e-6)
        values = np.linalg.svd(alone["x"], compute_uv=False)
        assert values.min() > 0.6
        assert values.max() < 1.3


@pytest.mark.parametrize("moment_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon", "schedule_free"])
def test_moments_have_the_requested_dtype(name, moment_dtype):
    state = optim.RECIPES[name](1e-3, moment_dtype=moment_dtype).init(PARAMS)
    dtypes = {
        str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.shape == (4, 3)
    }
    assert moment_dtype in dtypes


def test_the_norm_equals_that_of_optax_whatever_the_names_of_layers():
    rng = np.random.default_rng(0)
    shapes = {
        "blocks": {str(i): {"kernel": (3, 4 + i % 2), "bias": (4,)} for i in range(5)},
        "0": (3, 4),
        "1": (3, 4),
        "head": (2,),
    }
    tree = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    assert float(norm(tree)) == pytest.approx(float(optax.tree.norm(tree)), rel=1e-6)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    assert norm(half).dtype == jnp.float32
    assert float(norm(half)) == pytest.approx(
        float(optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), half))),
        rel=1e-6,
    )
    assert float(norm({})) == 0.0


def test_imaginary_parts_are_kept():
    params = {"phase": jnp.array([3 + 4j, 0], jnp.complex64)}
    assert norm(params) == 5.0
    update = {"phase": jnp.array([1j, 1], jnp.complex64)}
    for tx in (keep_average(optax.sgd(1.0), 0.0), with_master(optax.sgd(1.0))):
        updates, state = tx.update(update, tx.init(params), params)
        moved = optax.apply_updates(params, updates)["phase"]
        assert moved.tolist() == [3 + 3j, -1]
        (copy,) = (leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2,))
        assert copy.tolist() == moved.tolist()


def test_a_line_search_is_refused_with_what_it_needs():
    lbfgs = optax.lbfgs()
    with pytest.raises(ConfigError, match=r"value_fn.*use optax.lbfgs\(linesearch=No"):
        compute_updates(lbfgs, GRADS, lbfgs.init(PARAMS), PARAMS, jnp.float32(1))
