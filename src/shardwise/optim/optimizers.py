"""Optimizers: functions that chain Optax parts into one plain `optax.GradientTransformation`.

All of them are assembled in the same order, and parts that are not requested are absent:

    skip spikes (master copy (average of the weights (clip, then for each group:
        direction, weight decay, learning rate)))

Only the direction differs, such as that of Adam or Lion. `lr` is a number or a schedule. Weight
decay is decoupled, multiplied by the learning rate, and applies to kernels and embedding tables
only, unless `decay` says otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from shardwise.errors import ConfigError
from shardwise.optim.eigenbasis import scale_by_soap
from shardwise.optim.groups import (
    Decays,
    Group,
    decays_matrices,
    label_fn,
    map_with_path,
    mask_fn,
    param_path,
)
from shardwise.optim.matrices import normalize_neurons, orthogonalize
from shardwise.optim.parts import (
    Mask,
    clip_by_norm,
    keep_average,
    norm,
    record,
    scale_by_lr,
    skip_spikes,
    with_master,
)
from shardwise.optim.schedules import Schedule, as_schedule, cosine, scaled
from shardwise.text import did_you_mean
from shardwise.tree import Leaf, OptState, Params, PyTree, matches

Transformation: TypeAlias = optax.GradientTransformation
# (learning rate, weight decay as a transformation) -> the optimizer of one group.
Build: TypeAlias = Callable[[Schedule, Transformation], Transformation]
# The largest global norm, or a transformation such as `optax.clip(1.0)`.
Clip: TypeAlias = float | Transformation | None


class Common(TypedDict, total=False):
    """Options of every optimizer. `assemble` documents them.

    Attributes:
        decay: a function `(path, array) -> bool`: whether weight decay applies to a parameter.
        groups: parameter groups, each with its settings.
        ema: the decay of an average of the weights, which evaluation uses.
        master: whether to keep and update float32 copies of half-precision parameters.
        spikes: skip an update whose gradient norm exceeds this multiple of its recent mean.
    """

    decay: Decays
    groups: Sequence[Group]
    ema: float | None
    master: bool
    spikes: float | None


class AdamOptions(Common, total=False):
    """Options of AdamW that the recipes based on it pass on.

    Attributes:
        b1: the decay of the first moment.
        eps: a small number that is added to the denominator.
        moment_dtype: the dtype of the first moment.
    """

    b1: float
    eps: float
    moment_dtype: DTypeLike | None


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return stochastic gradient descent with momentum.

    Weight decay is added to the gradient and passes through the momentum, as in PyTorch.

    Args:
        lr: the learning rate, a number or a schedule.
        momentum: the decay of the momentum. 0 is plain gradient descent.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = sgd(cosine(0.1, 1000), nesterov=True, weight_decay=1e-4, clip=1.0)
    """

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        return optax.chain(
            decay, optax.trace(momentum, nesterov, moment_dtype), scale_by_lr(lr)
        )

    return assemble(build, lr, weight_decay=weight_decay, clip=clip, **options)


def adam(
    lr: float | Schedule,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.0,
    clip: Clip = None,
    **options: Unpack[AdamOptions],
) -> Transformation:
    """Return AdamW without weight decay by default.

    Args:
        lr: the learning rate, a number or a schedule.
        b2: the decay of the second moment.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        **options: `b1`, `eps` and `moment_dtype`, see `adamw`; `decay`, `groups`, `ema`,
            `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = adam(1e-3)
    """
    return adamw(lr, b2=b2, weight_decay=weight_decay, clip=clip, **options)


def adamw(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return AdamW: Adam with decoupled weight decay.

    Args:
        lr: the learning rate, a number or a schedule.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: a small number that is added to the denominator.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the first moment. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> schedule = cosine(3e-4, 10_000, warmup=0.05, end=3e-5)
        >>> optimizer = adamw(schedule, b2=0.95, weight_decay=0.1, clip=1.0)
    """
    direction = partial(optax.scale_by_adam, b1, b2, eps, mu_dtype=moment_dtype)
    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


def lion(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return Lion, whose update has the same size in every coordinate.

    Use a learning rate about 5 times smaller than for AdamW, and a weight decay about 5 times
    larger.

    Args:
        lr: the learning rate, a number or a schedule.
        b1: the weight of the momentum in the update.
        b2: the decay of the momentum.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = lion(cosine(6e-5, 10_000), weight_decay=0.5, clip=1.0)
    """
    direction = partial(optax.scale_by_lion, b1, b2, moment_dtype)
    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


def adafactor(
    lr: float | Schedule,
    *,
    momentum: float | None = None,
    relative: bool = True,
    weight_decay: float = 0.0,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return Adafactor, which keeps row and column means of the second moment of a matrix.

    Args:
        lr: the learning rate, a number or a schedule.
        momentum: the decay of the momentum. None keeps no momentum.
        relative: whether to multiply each update by the root mean square of its parameter.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = adafactor(cosine(1e-2, 10_000), clip=1.0)
    """

    def direction() -> Transformation:
        parts = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
        if relative:
            parts.append(optax.scale_by_param_block_rms())
        if momentum is not None:
            parts.append(
                optax.ema(momentum, debias=False, accumulator_dtype=moment_dtype)
            )
        return optax.chain(*parts)

    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


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
    iterate_in: DTypeLike = "float32",
    weight_decay: float = 0.0,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return Muon: orthogonalized momentum for matrices, Adam for all other parameters.

    Args:
        lr: the learning rate, a number or a schedule.
        momentum: the decay of the momentum.
        nesterov: whether to use Nesterov momentum.
        rms: the root mean square of the update of a matrix. 0.2 is that of AdamW, so that one
            learning rate suits both. None uses the original scaling.
        adam: patterns of matrices that use Adam too, such as embedding tables.
        adam_lr_scale: a factor for the learning rate of Adam.
        b1: the decay of Adam's first moment.
        b2: the decay of Adam's second moment.
        eps: a small number that is added to Adam's denominator.
        stacked: patterns of parameters whose first dim counts layers.
        iterate_in: the dtype of the Newton-Schulz iterations. bfloat16 is faster, but its
            rounding differs between meshes.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum and of Adam's first moment. By default that of the
            parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> tables = ("tokens", "positions")
        >>> optimizer = muon(cosine(3e-3, 10_000), adam=tables, weight_decay=0.1, clip=1.0)
    """

    matrices = optax.chain(
        optax.trace(momentum, nesterov, moment_dtype),
        orthogonalize(rms=rms, stacked=tuple(stacked), dtype=iterate_in),
    )
    others = _adam_part(b1, b2, eps, moment_dtype, adam_lr_scale)
    direction = partial(
        _by_shape, "muon", matrices, others, tuple(adam), tuple(stacked)
    )
    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


def normuon(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    neuron_b2: float = 0.95,
    rms: float = 0.2,
    adam: Sequence[str] = (),
    adam_lr_scale: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    stacked: Sequence[str] = (),
    iterate_in: DTypeLike = "float32",
    weight_decay: float = 0.0,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return NorMuon: Muon whose updates have one size for all outputs of a matrix.

    Orthogonalized matrices have outputs (neurons) of different sizes. NorMuon divides each by the
    root mean square of its recent updates, which is one number per output to keep.

    Args:
        lr: the learning rate, a number or a schedule.
        momentum: the decay of the momentum.
        nesterov: whether to use Nesterov momentum.
        neuron_b2: the decay of the mean square of each output.
        rms: the root mean square of the update of a matrix. 0.2 is that of AdamW, so that one
            learning rate suits both.
        adam: patterns of matrices that use Adam too, such as embedding tables.
        adam_lr_scale: a factor for the learning rate of Adam.
        b1: the decay of Adam's first moment.
        b2: the decay of Adam's second moment.
        eps: a small number that is added to the denominators.
        stacked: patterns of parameters whose first dim counts layers.
        iterate_in: the dtype of the Newton-Schulz iterations, see `muon`.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum and of Adam's first moment. By default that of the
            parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> tables = ("tokens", "positions")
        >>> optimizer = normuon(cosine(3e-3, 10_000), adam=tables, weight_decay=0.1, clip=1.0)
    """
    matrices = optax.chain(
        optax.trace(momentum, nesterov, moment_dtype),
        orthogonalize(stacked=tuple(stacked), dtype=iterate_in),
        normalize_neurons(neuron_b2, rms, tuple(stacked), eps),
    )
    others = _adam_part(b1, b2, eps, moment_dtype, adam_lr_scale)
    direction = partial(
        _by_shape, "normuon", matrices, others, tuple(adam), tuple(stacked)
    )
    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


def soap(
    lr: float | Schedule,
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    every: int = 10,
    largest: int = 8192,
    adam: Sequence[str] = (),
    stacked: Sequence[str] = (),
    weight_decay: float = 0.01,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return SOAP: Adam in the eigenbasis of Shampoo for matrices, Adam for all other parameters.

    It keeps two covariances and two bases of each matrix. Compared with AdamW, these are 4 more
    values per parameter for a square matrix, and 8.5 more if one side is 4 times as long as the
    other. Directions whose gradients are rounding error are not updated, so that meshes agree.

    Args:
        lr: the learning rate, a number or a schedule. Rates of AdamW are a good start.
        b1: the decay of the first moments.
        b2: the decay of the second moments and of the covariances.
        eps: a small number that is added to Adam's denominator.
        every: the number of updates after which the bases are updated.
        largest: a side of a matrix that is longer keeps its own basis.
        adam: patterns of matrices that use Adam too, such as embedding tables.
        stacked: patterns of parameters whose first dim counts layers.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the first moments. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> tables = ("tokens", "positions")
        >>> optimizer = soap(cosine(3e-3, 10_000, warmup=0.05), adam=tables, clip=1.0)
    """
    matrices = scale_by_soap(b1, b2, every, largest, tuple(stacked), moment_dtype)
    others = _adam_part(b1, b2, eps, moment_dtype, 1.0)
    direction = partial(
        _by_shape, "soap", matrices, others, tuple(adam), tuple(stacked)
    )
    return assemble(
        _descend(direction), lr, weight_decay=weight_decay, clip=clip, **options
    )


def schedule_free(
    lr: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: Clip = None,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return schedule-free AdamW, which needs no decay of the learning rate.

    Use a constant learning rate after a warm-up. Evaluation uses an average of the weights that
    the method keeps anyway.

    Args:
        lr: the learning rate, a number or a schedule.
        b1: the weight of the average in the point at which gradients are computed.
        b2: the decay of the second moment.
        eps: a small number that is added to the denominator.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the extra copy of the weights. By default that of the
            parameters.
        **options: `decay`, `groups`, `master` and `spikes`, see `assemble`.

    Raises:
        ConfigError: if `ema` is set. It would average the average.

    Example:
        >>> from shardwise.optim import constant
        >>> optimizer = schedule_free(constant(1e-3, 10_000, warmup=0.05))
    """
    if options.get("ema"):
        raise ConfigError(
            "schedule_free evaluates an average of the weights already. "
            f"Remove ema={options['ema']}."
        )

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        rms = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)

        def earlier(n: jax.Array) -> float | jax.Array:
            # Optax calls the outer schedule with a count that is one ahead of the inner one.
            return lr(n - 1)

        return optax.contrib.schedule_free(
            optax.chain(rms, decay, scale_by_lr(lr)),
            earlier,
            b1,
            state_dtype=moment_dtype,
        )

    return assemble(build, lr, weight_decay=weight_decay, clip=clip, **options)


class Prodigy(NamedTuple):
    """State of `prodigy`.

    Attributes:
        inner: the state of `optax.contrib.prodigy`.
        learning_rate: the learning rate of the latest update, a float32 scalar.
    """

    inner: OptState
    learning_rate: jax.Array


def prodigy(
    lr: float | Schedule = 1.0,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    d0: float = 1e-6,
    weight_decay: float = 0.0,
    clip: Clip = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return Prodigy, which finds the learning rate itself. Each group finds its own.

    Args:
        lr: a factor for the learning rate that is found. Best a schedule with peak 1.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        d0: the first estimate of the learning rate.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = prodigy(cosine(1.0, 10_000), weight_decay=0.1)
    """

    def build(lr: Schedule, decay: Transformation) -> Transformation:
        inner = optax.contrib.prodigy(
            lr, betas=(b1, b2), estim_lr0=d0, safeguard_warmup=True
        )

        def init(params: Params) -> Prodigy:
            return Prodigy(inner.init(params), jnp.zeros([], jnp.float32))

        def update(
            updates: PyTree, state: Prodigy, params: Params = None
        ) -> tuple[PyTree, Prodigy]:
            rate = jnp.asarray(
                state.inner.estim_lr * lr(state.inner.count), jnp.float32
            )
            zeros = jax.tree.map(jnp.zeros_like, updates)
            decayed, _ = decay.update(zeros, decay.init(params), params)
            # Without any gradient the estimate of Optax would be 0 / 0, and remain NaN.
            is_still = norm(updates) == 0
            updates, inner_state = inner.update(updates, state.inner, params)
            inner_state = jax.tree.map(
                lambda new, old: jnp.where(is_still, old, new), inner_state, state.inner
            )
            updates = jax.tree.map(
                lambda u, d: jnp.where(is_still, 0, u) - rate * d, updates, decayed
            )
            return updates, Prodigy(inner_state, rate)

        return optax.GradientTransformation(init, update)

    return assemble(build, lr, weight_decay=weight_decay, clip=clip, **options)


def standard(
    steps: int,
    lr: float = 1e-3,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.01,
    clip: Clip = None,
    **options: Unpack[AdamOptions],
) -> Transformation:
    """Return an optimizer for most models: AdamW with a cosine schedule to zero.

    Args:
        steps: the length of the run.
        lr: the peak of the learning rate.
        b2: the decay of the second moment.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        **options: `b1`, `eps` and `moment_dtype`, see `adamw`; `decay`, `groups`, `ema`,
            `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = standard(steps=1000, lr=3e-3)
    """
    return adamw(
        cosine(lr, steps), b2=b2, weight_decay=weight_decay, clip=clip, **options
    )


def transformer(
    steps: int,
    lr: float = 3e-4,
    *,
    warmup: float = 0.05,
    b2: float = 0.95,
    weight_decay: float = 0.1,
    clip: Clip = 1.0,
    **options: Unpack[AdamOptions],
) -> Transformation:
    """Return an optimizer for transformers.

    It is AdamW with clipping, a warm-up, a cosine schedule to a tenth of the peak, a shorter second
    moment and a stronger weight decay.

    Args:
        steps: the length of the run.
        lr: the peak of the learning rate.
        warmup: the length of the warm-up, in steps or as a fraction of the run.
        b2: the decay of the second moment.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        **options: `b1`, `eps` and `moment_dtype`, see `adamw`; `decay`, `groups`, `ema`,
            `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = transformer(steps=10_000, ema=0.999)
    """
    schedule = cosine(lr, steps, warmup=warmup, end=lr / 10)
    return adamw(schedule, b2=b2, weight_decay=weight_decay, clip=clip, **options)


def fine_tuning(
    steps: int,
    lr: float = 2e-5,
    *,
    b2: float = 0.999,
    weight_decay: float = 0.01,
    clip: Clip = 1.0,
    **options: Unpack[AdamOptions],
) -> Transformation:
    """Return an optimizer for fine-tuning: AdamW with a small learning rate and no warm-up.

    Gradients are clipped, since the first batches of a new task differ from those of the old one.

    Args:
        steps: the length of the run.
        lr: the learning rate at the start.
        b2: the decay of the second moment.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        **options: `b1`, `eps` and `moment_dtype`, see `adamw`; `decay`, `groups`, `ema`,
            `master` and `spikes`, see `assemble`.

    Example:
        >>> groups = [Group("backbone/*", frozen=True), Group("*", name="rest")]
        >>> optimizer = fine_tuning(steps=1000, groups=groups)
    """
    return adamw(
        cosine(lr, steps), b2=b2, weight_decay=weight_decay, clip=clip, **options
    )


def unstable(
    steps: int,
    lr: float = 0.01,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: Clip = 0.5,
    moment_dtype: DTypeLike | None = None,
    **options: Unpack[Common],
) -> Transformation:
    """Return an optimizer for training that diverges with other optimizers.

    It is SGD with tight clipping and a warm-up of 10 % of the run. Gradient spikes are skipped:
    `spikes` is 10 by default.

    Args:
        steps: the length of the run.
        lr: the peak of the learning rate.
        momentum: the decay of the momentum.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the weight decay, multiplied by the learning rate.
        clip: the largest global norm of the gradients, or a transformation that clips them.
        moment_dtype: the dtype of the momentum. By default that of the parameters.
        **options: `decay`, `groups`, `ema`, `master` and `spikes`, see `assemble`.

    Example:
        >>> optimizer = unstable(steps=1000)
    """
    with_spikes: Common = {"spikes": 10.0, **options}
    return sgd(
        cosine(lr, steps, warmup=0.1),
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        clip=clip,
        moment_dtype=moment_dtype,
        **with_spikes,
    )


def assemble(
    build: Build,
    lr: float | Schedule,
    *,
    weight_decay: float = 0.0,
    decay: Decays = decays_matrices,
    clip: Clip = None,
    groups: Sequence[Group] = (),
    ema: float | None = None,
    master: bool = False,
    spikes: float | None = None,
) -> Transformation:
    """Assemble an optimizer from a direction and the options that all optimizers share.

    All optimizers of `shardwise.optim` are built with it. Use it for a custom direction.

    Args:
        build: a function `(schedule, decay) -> transformation` that returns the optimizer of one
            group. `decay` is weight decay as a transformation, or `optax.identity()`.
        lr: the learning rate, a number or a schedule.
        weight_decay: the weight decay, multiplied by the learning rate.
        decay: a function `(path, array) -> bool`: whether weight decay applies to a parameter. By
            default it applies to kernels and embedding tables, not to biases and norms.
        clip: the largest global norm of the gradients, or a transformation that clips them, such
            as `optax.clip(1.0)` or `optax.adaptive_grad_clip(0.01)`.
        groups: parameter groups. The first one that matches a parameter claims it, and each
            parameter needs one. Frozen parameters do not count in the gradient norm.
        ema: the decay of an exponential moving average of the weights. Evaluation uses the
            average.
        master: whether to keep and update float32 copies of the parameters. For parameters in
            half precision, where small updates would be lost.
        spikes: skip an update whose gradient norm exceeds this multiple of its recent mean.

    Returns:
        An Optax transformation. `live_values` reads its learning rates from its state.

    Raises:
        ConfigError: if two groups have the same name. Groups that do not fit the parameters are
            reported when the optimizer state is created.

    Example:
        The sign of the gradient as a direction:

        >>> import optax
        >>> from shardwise.optim import scale_by_lr
        >>> def build(schedule, decay):
        ...     return optax.chain(optax.scale_by_sign(), decay, scale_by_lr(schedule))
        >>> optimizer = assemble(build, 1e-4, weight_decay=0.1, clip=1.0)
    """
    lr = as_schedule(lr)

    def build_one(lr: Schedule, weight_decay: float) -> Transformation:
        if not weight_decay:
            return build(lr, optax.identity())
        return build(lr, optax.add_decayed_weights(weight_decay, mask_fn(decay)))

    def build_group(group: Group) -> Transformation:
        if group.frozen:
            return optax.set_to_zero()
        tx = group.tx
        if tx is not None:
            _check_settings_of_tx(group)
        if tx is None:
            rate = lr if group.lr is None else as_schedule(group.lr)
            strength = (
                weight_decay if group.weight_decay is None else group.weight_decay
            )
            tx = build_one(scaled(rate, group.lr_scale), strength)
        return tx if group.clip is None else optax.chain(clip_by_norm(group.clip), tx)

    parts = []
    moves: Mask | None = None
    if any(group.frozen for group in groups):
        # Zero the gradients of frozen parameters first, so that they do not count in the norm.
        moves = _is_in([group.label for group in groups if not group.frozen], groups)
        is_frozen = _is_in([group.label for group in groups if group.frozen], groups)
        parts.append(optax.masked(optax.set_to_zero(), is_frozen))
    if isinstance(clip, optax.GradientTransformation):
        parts += [clip, record(clipped_norm=lambda updates, _: norm(updates))]
    elif clip is not None:
        parts.append(clip_by_norm(clip))
    if groups:
        by_label = {group.label: build_group(group) for group in groups}
        parts.append(optax.partition(by_label, label_fn(groups)))
    else:
        parts.append(build_one(lr, weight_decay))
    tx: Transformation = optax.chain(*parts)
    if ema is not None:
        tx = keep_average(tx, ema, moves)
    if master:
        tx = with_master(tx, moves)
    if spikes is not None:
        tx = skip_spikes(tx, spikes)
    return tx


def _check_settings_of_tx(group: Group) -> None:
    """Raise if a group has settings that its own transformation would ignore."""
    settings = {
        "lr": group.lr is not None,
        "lr_scale": group.lr_scale != 1,
        "weight_decay": group.weight_decay is not None,
    }
    ignored = [name for name, is_set in settings.items() if is_set]
    if ignored:
        raise ConfigError(
            f"group '{group.label}' has {', '.join(ignored)} and tx=. These settings are those of "
            "the optimizer that tx replaces. Set them in tx."
        )


def _is_in(labels: Sequence[str], groups: Sequence[Group]) -> Mask:
    """Return a mask function that selects the parameters of the groups with these labels."""
    label_params = label_fn(groups)
    return lambda params: jax.tree.map(
        lambda label: label in labels, label_params(params)
    )


def _descend(direction: Callable[[], Transformation]) -> Build:
    """Return the usual order of one group: direction, weight decay, learning rate."""
    return lambda lr, decay: optax.chain(direction(), decay, scale_by_lr(lr))


def _adam_part(
    b1: float,
    b2: float,
    eps: float,
    moment_dtype: DTypeLike | None,
    lr_scale: float,
) -> Transformation:
    """Return the direction of parameters that are not matrices."""
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps, mu_dtype=moment_dtype), optax.scale(lr_scale)
    )


def _by_shape(
    name: str,
    matrices: Transformation,
    others: Transformation,
    adam: tuple[str, ...],
    stacked: tuple[str, ...],
) -> Transformation:
    """Return a direction for matrices, and another for all other parameters.

    Args:
        name: the name of the group of matrices.
        matrices: the direction of matrices.
        others: the direction of the group "adam".
        adam: patterns of matrices that belong to that group too.
        stacked: patterns of parameters whose first dim counts layers.
    """

    def label(path: str, leaf: Leaf) -> str:
        is_matrix = decays_matrices(path, leaf)
        uses_adam = not is_matrix or any(matches(pattern, path) for pattern in adam)
        return "adam" if uses_adam else name

    def label_all(params: Params) -> PyTree:
        _check_patterns({"adam": adam, "stacked": stacked}, params)
        return map_with_path(label, params)

    return optax.partition({name: matrices, "adam": others}, label_all)


def _check_patterns(patterns: Mapping[str, tuple[str, ...]], params: Params) -> None:
    """Raise if a pattern of an argument matches no parameter."""
    masked = jax.tree.leaves(
        params, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode)
    )
    if any(isinstance(leaf, optax.MaskedNode) for leaf in masked):
        # Only the parameters of one group are here. The pattern may match others.
        return
    paths = [
        param_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    for name, found in patterns.items():
        for pattern in found:
            if not any(matches(pattern, path) for path in paths):
                raise ConfigError(
                    f"pattern '{pattern}' in {name}= matches no parameter."
                    f"{did_you_mean(pattern, paths)}"
                )


RECIPES: dict[str, Callable[..., Transformation]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "normuon": normuon,
    "soap": soap,
    "schedule_free": schedule_free,
    "prodigy": prodigy,
    "standard": standard,
    "transformer": transformer,
    "fine_tuning": fine_tuning,
    "unstable": unstable,
}
"""All optimizers by name. The last four take the number of steps first, the others `lr`."""
