"""`explain` finds the mistake in each of many hand-written optimizers, and none in good ones."""

import io

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from rich.console import Console

from shardwise import abstract_state, explain, make_mesh, optim
from shardwise.errors import ConfigError
from shardwise.explanation.explain import predict_findings
from shardwise.optim import Group
from shardwise.tree import leaf_name

STEPS = 200


class Net(nnx.Module):
    dtype = jnp.float32

    def __init__(self, rngs):
        self.backbone = nnx.Linear(6, 8, param_dtype=self.dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(8, param_dtype=self.dtype, rngs=rngs)
        self.head = nnx.Linear(8, 3, param_dtype=self.dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.backbone(x)))


class HalfNet(Net):
    dtype = jnp.bfloat16


def kernels(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def in_head(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaf_name(path).startswith("head"), params
    )


def false_mask(params):
    """Return False for every leaf, because it compares text with key objects."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in path, params)


def by_hand(update):
    """Return an optimizer that neither Optax nor shardwise knows."""
    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update)


def steepest(sign):
    def update(updates, count, params=None):
        return jax.tree.map(
            lambda g: sign * 0.1 * g / (1 + 0.001 * count), updates
        ), count + 1

    return by_hand(update)


clip, adamw, chain = optax.clip_by_global_norm, optax.adamw, optax.chain
cosine = optax.cosine_decay_schedule
HEAD_ONLY = {"backbone": True, "norm": True, "head": False}
# head/bias has no label.
INCOMPLETE_LABELS = {"backbone": "slow", "norm": "slow", "head": {"kernel": "fast"}}

BAD = {
    "mask that is False everywhere": (
        adamw(1e-3, weight_decay=0.1, mask=false_mask),
        "decay-reaches-nothing",
    ),
    "decay on everything": (adamw(1e-3, weight_decay=0.1), "decay-of-vectors"),
    "decay steps without the warm-up": (
        adamw(
            optax.warmup_cosine_decay_schedule(1e-5, 1e-3, 40, STEPS - 40), mask=kernels
        ),
        "schedule-too-short",
    ),
    "linear that ends early": (
        optax.sgd(optax.linear_schedule(0.1, 0.0, STEPS // 2)),
        "schedule-too-short",
    ),
    "schedule for a longer run": (
        adamw(cosine(1e-3, 3 * STEPS), mask=kernels),
        "schedule-too-long",
    ),
    "schedule counted in micro-batches": (
        optax.MultiSteps(adamw(cosine(1e-3, STEPS), mask=kernels), 4),
        "schedule-too-long",
    ),
    "warm-up from zero": (
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, STEPS)),
        "first-update-idle",
    ),
    "warm-up longer than the run": (
        optax.adam(optax.linear_schedule(1e-6, 1e-3, 10 * STEPS)),
        "warmup-too-long",
    ),
    "no minus sign": (
        chain(clip(1.0), optax.scale_by_adam(), optax.scale(1e-3)),
        "ascends",
    ),
    "schedule without minus sign": (
        chain(optax.scale_by_adam(), optax.scale_by_schedule(cosine(1e-3, STEPS))),
        "ascends",
    ),
    "two minus signs": (chain(optax.adam(1e-3), optax.scale(-1.0)), "ascends"),
    "by hand, uphill": (steepest(+1), "ascends"),
    "clipping after Adam": (
        chain(optax.scale_by_adam(), clip(1.0), optax.scale(-1e-3)),
        "clip-after-adaptive",
    ),
    "frozen by a mask": (optax.masked(optax.adam(1e-3), in_head), "raw-gradient"),
    "frozen, then decayed": (
        chain(
            optax.partition(
                {True: optax.adam(1e-3), False: optax.set_to_zero()}, in_head
            ),
            optax.add_decayed_weights(-1e-4, mask=kernels),
        ),
        "frozen-moves",
    ),
    "hyperparameters in bfloat16": (
        optax.inject_hyperparams(optax.adam)(1e-2),
        "half-hyperparameters",
    ),
    "moments and parameters in bfloat16": (optax.adam(1e-5), "updates-lost"),
    "frozen with state": (
        chain(optax.adam(1e-3), optax.transforms.freeze(HEAD_ONLY)),
        "state-for-frozen",
    ),
    "a long history": (
        chain(optax.scale_by_lbfgs(memory_size=10), optax.scale(-1e-3)),
        "state-too-large",
    ),
    "selective with a function": (
        optax.selective_transform(
            optax.adam(1e-3), freeze_mask=lambda params: in_head(params)
        ),
        "nothing-moves",
    ),
    "decay through Adam": (
        chain(optax.add_decayed_weights(0.1, mask=kernels), optax.adam(1e-3)),
        "decay-not-decoupled",
    ),
    "decay after the sign": (
        chain(optax.adam(1e-3), optax.add_decayed_weights(0.01, mask=kernels)),
        "decay-grows",
    ),
    "decay without learning rate": (
        chain(optax.adam(1e-3), optax.add_decayed_weights(-0.1, mask=kernels)),
        "decay-too-strong",
    ),
    "learning rate twice": (
        chain(adamw(1e-3, mask=kernels), optax.scale(1e-3)),
        "two-learning-rates",
    ),
    "average of the updates": (
        chain(adamw(1e-3, mask=kernels), optax.ema(0.99)),
        "average-of-updates",
    ),
    "injected for bfloat16": (
        optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-2),
        "state-changes",
    ),
    "applies the NaN": (
        optax.apply_if_finite(adamw(1e-3, mask=kernels), 3),
        "applies-nan",
    ),
    "labels that miss a leaf": (
        optax.multi_transform(
            {"slow": optax.adam(1e-4), "fast": optax.adam(1e-3)}, INCOMPLETE_LABELS
        ),
        "not-applicable",
    ),
}
GOOD = {
    "adam": optax.adam(1e-3),
    "adamw": adamw(cosine(1e-3, STEPS), weight_decay=0.1, mask=kernels),
    "warm-up and cosine": chain(
        clip(1.0),
        adamw(optax.warmup_cosine_decay_schedule(1e-5, 1e-3, 20, STEPS), mask=kernels),
    ),
    "sgd with momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd with decay": chain(
        optax.add_decayed_weights(1e-4, mask=kernels), optax.sgd(0.1, momentum=0.9)
    ),
    "chain by hand": chain(
        clip(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, mask=kernels),
        optax.scale_by_learning_rate(1e-3),
    ),
    "lion": optax.lion(1e-4, weight_decay=0.1, mask=kernels),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(0.02),
    "prodigy": optax.contrib.prodigy(cosine(1.0, STEPS)),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
    "frozen backbone": optax.partition(
        {True: optax.adam(1e-3), False: optax.set_to_zero()}, in_head
    ),
    "two rates": optax.partition(
        {True: optax.adam(1e-3), False: optax.adam(1e-5)}, in_head
    ),
    "injected": optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(
        learning_rate=cosine(1e-3, STEPS)
    ),
    "accumulated": optax.MultiSteps(adamw(cosine(1e-3, STEPS // 4), mask=kernels), 4),
    "piecewise": adamw(
        optax.piecewise_constant_schedule(1e-3, {100: 0.1, 150: 0.1}), mask=kernels
    ),
    "constant after warm-up": optax.adam(
        optax.warmup_constant_schedule(1e-5, 1e-3, 20)
    ),
    "exponential": optax.adam(optax.exponential_decay(1e-3, 20, 0.9)),
    "inverse square root": optim.adamw(optim.inverse_sqrt(1e-3, STEPS, warmup=0.1)),
    "stable and decay": optim.adamw(optim.wsd(1e-3, STEPS, warmup=10, decay=0.2)),
    "lamb": optax.lamb(1e-3, weight_decay=0.1, mask=kernels),
    "by hand, downhill": steepest(-1),
    "groups": optim.transformer(
        STEPS,
        groups=(Group("backbone/*", frozen=True), Group("*", name="rest")),
        ema=0.99,
        spikes=10.0,
    ),
    "half with masters": optim.adamw(1e-5, master=True),
    "rmsprop": optax.rmsprop(1e-3),
    "named": optax.named_chain(("clip", clip(1.0)), ("adam", optax.adam(1e-3))),
}


def names(explanation):
    return [finding.name for finding in explanation.findings]


@pytest.mark.parametrize("case", BAD)
def test_the_mistake_is_found(case):
    tx, mistake = BAD[case]
    found = names(explain(tx, HalfNet if "bfloat16" in case else Net, steps=STEPS))
    assert mistake in found, found
    # The mistake, and at most two that follow from it.
    assert len(found) <= 3, found


# They differ from the quick ones in the schedule or the direction only.
SIMILAR = (
    "adam",
    "sgd with decay",
    "lion",
    "two rates",
    "piecewise",
    "constant after warm-up",
    "exponential",
    "inverse square root",
    "stable and decay",
    "lamb",
    "rmsprop",
    "named",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in SIMILAR else case
        for case in GOOD
    ],
)
def test_nothing_is_found_in_a_good_optimizer(case):
    assert (
        names(explain(GOOD[case], HalfNet if "half" in case else Net, steps=STEPS))
        == []
    )


# What only a measurement shows: an optimizer with a part whose effect is not known, and an update
# that changes the type of the state.
MEASURED_ONLY = (
    "schedule counted in micro-batches",
    "by hand, uphill",
    "a long history",
    "injected for bfloat16",
)


def predicted(tx, model):
    mesh = make_mesh("data=1", jax.devices()[:1])
    spec = abstract_state(model, tx, mesh)
    return [finding.name for finding in predict_findings(spec, STEPS)]


@pytest.mark.parametrize(
    "case", [case for case in BAD if BAD[case][1] != "not-applicable"]
)
def test_the_mistake_is_found_without_a_measurement(case):
    tx, mistake = BAD[case]
    found = predicted(tx, HalfNet if "bfloat16" in case else Net)
    assert found == ([] if case in MEASURED_ONLY else [mistake])


@pytest.mark.parametrize("case", GOOD)
def test_nothing_is_predicted_for_a_good_optimizer(case):
    assert predicted(GOOD[case], HalfNet if "half" in case else Net) == []


def test_a_schedule_that_ends_with_the_run_is_accepted():
    """It raises for any update after the end of the run."""
    table = [1e-3] * STEPS
    assert predicted(optax.adam(lambda n: table[int(n)]), Net) == []


def test_weak_decay_of_vectors_is_no_finding():
    assert predicted(optax.adamw(1e-3), Net) == []


def test_hyperparameters_in_bfloat16_give_updates_that_are_not_finite():
    """0.999 is 1 in bfloat16, so Adam divides by zero."""
    assert "not-finite" in names(
        explain(BAD["hyperparameters in bfloat16"][0], HalfNet, steps=STEPS)
    )


def test_the_table_shows_what_each_parameter_gets():
    groups = (
        Group("backbone/*", frozen=True, name="frozen"),
        Group("head/*", lr_scale=10, weight_decay=0.3, name="head"),
        Group("*", name="rest"),
    )
    explanation = explain(
        optim.adamw(
            optim.cosine(1e-3, STEPS), weight_decay=0.1, clip=1.0, groups=groups
        ),
        Net,
        steps=STEPS,
    )
    rows = {row.path: row for row in explanation.rows}
    frozen, head, scale = (
        rows["backbone/kernel"],
        rows["head/kernel"],
        rows["norm/scale"],
    )
    assert (frozen.group, frozen.moves) == ("frozen", False)
    assert (frozen.state_bytes, frozen.peak_lr) == (0, 0.0)
    assert (head.group, head.state_bytes) == ("head", 2 * 8 * 3 * 4)
    assert head.peak_lr == pytest.approx(1e-2, rel=1e-4)
    assert head.peak_update == pytest.approx(1e-2, rel=0.05)
    assert head.decay == pytest.approx(0.3, rel=1e-3)
    assert (scale.group, scale.decay) == ("rest", 0.0)
    assert [part.partition("(")[0] for part in head.transformations] == [
        "clip_by_norm",
        "scale_by_adam",
        "add_decayed_weights",
        "scale_by_lr",
    ]
    assert list(explanation.curves) == ["head", "rest"]
    console = Console(file=io.StringIO(), width=200)
    console.print(explanation.table())
    assert "backbone/kernel" in console.file.getvalue()
    assert explanation.as_json()["parameters"][0]["path"] == "backbone/bias"


def test_an_opaque_optimizer_is_measured():
    row = explain(steepest(-1), Net, steps=STEPS).rows[0]
    assert row.peak_lr == pytest.approx(0.1, rel=1e-3)
    assert row.transformations == ("steepest(sign=-1)",)


def test_a_mistake_in_the_groups_is_an_error_that_lists_the_paths():
    with pytest.raises(
        ConfigError, match=r"pattern 'haed/\*' of group 'haed/\*' matches no parameter"
    ):
        explain(optim.adamw(1e-3, groups=(Group("haed/*"), Group("*"))), Net)


def test_plot(tmp_path):
    explanation = explain(optim.transformer(STEPS), Net, steps=STEPS)
    explanation.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert "peak 0.0003" in next(explanation.lines())
