"""Optimizers to start from: plain functions that chain Optax parts into one plain `optax.GradientTransformation`.

Each is put together in the same order:

    skip spikes ( master copy ( average of the weights ( clip -> for each group: direction -> decay -> learning rate )))

where the direction (Adam's, Lion's ...) is what tells the recipes apart, and what is not asked for is not there. `lr` is a
number or a schedule. Weight decay is decoupled, multiplied by the learning rate, and reaches kernels and tables
only, unless `decay` says otherwise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from shardwise.errors import ConfigError
from shardwise.optim.groups import Decays, Group, decays_matrices, label_fn, map_with_path, mask_fn
from shardwise.optim.parts import (
    clip_by_norm,
    keep_average,
    norm,
    orthogonalize,
    record,
    scale_by_lr,
    skip_spikes,
    with_master,
)
from shardwise.optim.schedules import Schedule, as_schedule, cosine, scaled
from shardwise.tree import matches

Transformation: TypeAlias = optax.GradientTransformation
Build: TypeAlias = Callable[
    [Schedule, Transformation], Transformation
]  # (learning rate, weight decay as a part) -> all of it


class Common(TypedDict, total=False):
    """What every recipe takes."""

    weight_decay: float
    decay: Decays  # (path, array) -> whether it decays
    clip: (
        float | Transformation | None
    )  # by global norm; or optax.clip(...), optax.adaptive_grad_clip(...)
    groups: Sequence[Group]
    ema: float | None  # keep an average of the weights with this decay, and evaluate on it
    master: bool  # parameters in half precision: keep and update float32 copies
    spikes: float | None  # skip an update whose gradient norm is over this many times its mean


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    moment_dtype: Any = None,
    **common: Unpack[Common],
) -> Transformation:
    """Weight decay goes through the momentum, as it always has."""

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        return optax.chain(decay, optax.trace(momentum, nesterov, moment_dtype), scale_by_lr(lr))

    return assemble(build, lr, **common)


def adam(lr: float | Schedule, **options: Any) -> Transformation:
    """AdamW without the decay."""
    return adamw(lr, **{"weight_decay": 0.0, **options})


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    moment_dtype: Any = None,
    **common: Unpack[Common],
) -> Transformation:
    return assemble(
        _descend(partial(optax.scale_by_adam, b1, b2, eps, mu_dtype=moment_dtype)),
        lr,
        **_decaying(common, 0.01),
    )


def lion(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    moment_dtype: Any = None,
    **common: Unpack[Common],
) -> Transformation:
    """Steps of one size in every coordinate: a learning rate some 5 times smaller than AdamW's, a decay as much larger."""
    return assemble(_descend(partial(optax.scale_by_lion, b1, b2, moment_dtype)), lr, **common)


def adafactor(
    lr: float | Schedule,
    *,
    momentum: float | None = None,
    moment_dtype: Any = None,
    relative: bool = True,
    **common: Unpack[Common],
) -> Transformation:
    """Second moments by rows and columns; `relative` multiplies each step by the RMS of the parameter."""

    def direction() -> Transformation:
        parts = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
        if relative:
            parts.append(optax.scale_by_param_block_rms())
        if momentum is not None:
            parts.append(optax.ema(momentum, debias=False, accumulator_dtype=moment_dtype))
        return optax.chain(*parts)

    return assemble(_descend(direction), lr, **common)


def muon(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    rms: float | None = 0.2,
    adam: Sequence[str] = (),
    adam_lr_scale: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    stacked: Sequence[str] = (),
    iterate_in: Any = "float32",
    moment_dtype: Any = None,
    **common: Unpack[Common],
) -> Transformation:
    """Orthogonalized momentum for matrices; AdamW for what is none, and for the paths that fit a pattern of `adam`.

    `rms` is the size of an update; 0.2 is that of AdamW, so that one learning rate serves both. None is the original scaling.
    `stacked`: patterns of leaves whose first dim counts layers. `iterate_in`: the dtype of the iterations; bfloat16 is faster.
    """

    def labels(params: Any) -> Any:
        def one(path: str, leaf: Any) -> str:
            of_adam = not decays_matrices(path, leaf) or any(
                matches(pattern, path) for pattern in adam
            )
            return "adam" if of_adam else "muon"

        return map_with_path(one, params)

    def direction() -> Transformation:
        orthogonal = optax.chain(
            optax.trace(momentum, nesterov, moment_dtype),
            orthogonalize(rms=rms, stacked=tuple(stacked), dtype=iterate_in),
        )
        return optax.partition(
            {
                "muon": orthogonal,
                "adam": optax.chain(
                    optax.scale_by_adam(b1, b2, eps, mu_dtype=moment_dtype),
                    optax.scale(adam_lr_scale),
                ),
            },
            labels,
        )

    return assemble(_descend(direction), lr, **common)


def schedule_free(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    moment_dtype: Any = None,
    **common: Unpack[Common],
) -> Transformation:
    """Schedule-free AdamW: a constant rate after the warm-up, evaluation on an average that the method keeps anyway."""
    if common.get("ema"):
        raise ConfigError("schedule-free keeps an average of its own to evaluate; leave ema out.")

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        rms = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
        # Optax asks the outer schedule one update later than the inner one.
        earlier = lambda n: lr(n - 1)  # noqa: E731
        return optax.contrib.schedule_free(
            optax.chain(rms, decay, scale_by_lr(lr)), earlier, b1, state_dtype=moment_dtype
        )

    return assemble(build, lr, **_decaying(common, 0.01))


class Prodigy(NamedTuple):
    inner: Any
    learning_rate: jax.Array


def prodigy(
    lr: float | Schedule = 1.0,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    d0: float = 1e-6,
    **common: Unpack[Common],
) -> Transformation:
    """Finds the learning rate itself; `lr` is a multiple of it, best a schedule with peak 1. Each group finds its own."""

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        inner = optax.contrib.prodigy(lr, betas=(b1, b2), estim_lr0=d0, safeguard_warmup=True)

        def init(params: Any) -> Prodigy:
            return Prodigy(inner.init(params), jnp.zeros([], jnp.float32))

        def update(updates: Any, state: Prodigy, params: Any = None) -> tuple[Any, Prodigy]:
            rate = jnp.asarray(state.inner.estim_lr * lr(state.inner.count), jnp.float32)
            decayed, _ = decay.update(
                jax.tree.map(jnp.zeros_like, updates), decay.init(params), params
            )
            is_still = norm(updates) == 0  # Optax's estimate would be 0 / 0, and stay so
            updates, inner_state = inner.update(updates, state.inner, params)
            inner_state = jax.tree.map(
                lambda new, old: jnp.where(is_still, old, new), inner_state, state.inner
            )
            return jax.tree.map(
                lambda u, d: jnp.where(is_still, 0, u) - rate * d, updates, decayed
            ), Prodigy(inner_state, rate)

        return optax.GradientTransformation(init, update)

    return assemble(build, lr, **common)


def standard(steps: int, lr: float = 1e-3, **options: Any) -> Transformation:
    """For most models: AdamW, cosine to zero over the run."""
    return adamw(cosine(lr, steps), **{"weight_decay": 0.01, **options})


def transformer(
    steps: int, lr: float = 3e-4, *, warmup: float = 0.05, **options: Any
) -> Transformation:
    """Clipping, warm-up, cosine to a tenth, a shorter second moment and a stronger decay."""
    return adamw(
        cosine(lr, steps, warmup=warmup, end=lr / 10),
        **{"b2": 0.95, "weight_decay": 0.1, "clip": 1.0, **options},
    )


def fine_tuning(steps: int, lr: float = 2e-5, **options: Any) -> Transformation:
    """A small rate that only falls, and clipping, since the first batches of a new task are unlike the old ones."""
    return adamw(cosine(lr, steps), **{"weight_decay": 0.01, "clip": 1.0, **options})


def unstable(steps: int, lr: float = 0.01, **options: Any) -> Transformation:
    """When nothing else holds: tight clipping, momentum without adaptive steps, spikes left out."""
    return sgd(
        cosine(lr, steps, warmup=0.1), **{"momentum": 0.9, "clip": 0.5, "spikes": 10.0, **options}
    )


def assemble(
    build: Build,
    lr: float | Schedule,
    *,
    weight_decay: float = 0.0,
    decay: Decays = decays_matrices,
    clip: float | Transformation | None = None,
    groups: Sequence[Group] = (),
    ema: float | None = None,
    master: bool = False,
    spikes: float | None = None,
) -> Transformation:
    """The one order in which the parts of a recipe stand; use it for a direction of your own."""
    lr = as_schedule(lr)

    def one(lr: Schedule, weight_decay: float) -> Transformation:
        part = (
            optax.add_decayed_weights(weight_decay, mask_fn(decay))
            if weight_decay
            else optax.identity()
        )
        return build(lr, part)

    def of_group(group: Group) -> Transformation:
        if group.frozen:
            return optax.set_to_zero()
        own = group.tx
        if own is None:
            rate = lr if group.lr is None else as_schedule(group.lr)
            own = one(
                scaled(rate, group.lr_scale),
                weight_decay if group.weight_decay is None else group.weight_decay,
            )
        return own if group.clip is None else optax.chain(clip_by_norm(group.clip), own)

    parts, moves = [], None
    labels = label_fn(groups) if groups else None
    frozen = {group.label for group in groups if group.frozen}
    if labels is not None and frozen:  # first, so that they do not count in the norm
        moves = lambda params: jax.tree.map(lambda label: label not in frozen, labels(params))  # noqa: E731
        parts.append(
            optax.masked(
                optax.set_to_zero(),
                lambda params: jax.tree.map(lambda label: label in frozen, labels(params)),
            )
        )
    if isinstance(clip, optax.GradientTransformation):
        parts += [clip, record(clipped_norm=lambda updates, _: norm(updates))]
    elif clip is not None:
        parts.append(clip_by_norm(clip))
    parts.append(
        optax.partition({group.label: of_group(group) for group in groups}, labels)
        if labels
        else one(lr, weight_decay)
    )
    tx: Transformation = optax.chain(*parts)
    if ema is not None:
        tx = keep_average(tx, ema, moves)
    if master:
        tx = with_master(tx, moves)
    if spikes is not None:
        tx = skip_spikes(tx, spikes)
    return tx


def _descend(direction: Callable[[], Transformation]) -> Build:
    return lambda lr, decay: optax.chain(direction(), decay, scale_by_lr(lr))


def _decaying(common: Common, weight_decay: float) -> Common:
    return {"weight_decay": weight_decay, **common}


RECIPES: dict[str, Callable[..., Transformation]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "schedule_free": schedule_free,
    "prodigy": prodigy,
    "standard": standard,
    "transformer": transformer,
    "fine_tuning": fine_tuning,
    "unstable": unstable,
}
