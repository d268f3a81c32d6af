"""Predict what a known optimizer does, without carrying it out.

`shardwise.optim.probe` compiles and runs an optimizer, which takes seconds. The effect of most
Optax transformations on a constant gradient is known: they keep its direction, reduce it to its
sign, multiply it by a number, or add a multiple of the weights. This module applies these effects
with NumPy, in milliseconds, so that every start of a run can check its optimizer.
"""

from collections.abc import Mapping

import numpy as np

from shardwise.optim.probe import (
    GRADIENT_NORM,
    GRADIENT_SCALES,
    WEIGHT_SCALES,
    Probe,
)
from shardwise.optim.read import SELF_TUNED, Chain, ChainPart, SampledUpdates

# Transformations that keep the direction of a constant gradient, and about its size.
KEEPS_DIRECTION = frozenset(
    {
        "adaptive_grad_clip",
        "apply_if_finite",
        "clip",
        "clip_by_block_rms",
        "clip_by_global_norm",
        "clip_by_norm",
        "ema",
        "keep_average",
        "scale_by_param_block_rms",
        "scale_by_shape",
        "scale_by_trust_ratio",
        "skip_spikes",
        "trace",
        "with_master",
        "zero_nans",
    }
)
# Transformations that divide a constant gradient by its size.
NORMALIZES = frozenset(
    {
        "scale_by_adam",
        "scale_by_adamax",
        "scale_by_adan",
        "scale_by_amsgrad",
        "scale_by_belief",
        "scale_by_factored_rms",
        "scale_by_lion",
        "scale_by_muon",
        "scale_by_novograd",
        "scale_by_radam",
        "scale_by_rms",
        "scale_by_sign",
        "scale_by_yogi",
    }
)
NUM_ELEMENTS = 16


def predict(
    chains: Mapping[str, Chain],
    dtypes: Mapping[str, np.dtype],
    updates: SampledUpdates,
    seed: int = 0,
) -> Probe | None:
    """Return what `probe` would approximately measure.

    The weights do not move: every update is that of the initial weights.

    Args:
        chains: the transformations that each parameter passes through, by path.
        dtypes: the dtype of each parameter, by path.
        updates: the updates to predict.
        seed: the seed of the random weights and gradients.

    Returns:
        The prediction, or None if the effect of a transformation is not known.
    """
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=NUM_ELEMENTS).astype("f4") * np.float32(0.1)
    gradient = rng.normal(size=NUM_ELEMENTS).astype("f4")
    gradient *= np.float32(GRADIENT_NORM) / np.linalg.norm(gradient)
    columns = []
    for path, chain in chains.items():
        update = _update(chain, weights, gradient, updates.numbers)
        if update is None:
            return None
        columns.append(_measure(update, weights, gradient, dtypes[path]))
    size, along, shrink, lost = np.moveaxis(np.array(columns), 0, -1)
    return Probe(
        paths=tuple(chains),
        steps=updates.numbers,
        num_within=updates.num_within,
        gradient_rms=np.full(len(chains), np.sqrt(np.mean(gradient**2))),
        size=size,
        along=along,
        shrink=shrink,
        is_raw=np.array([not chain.parts for chain in chains.values()]),
        lost=lost,
    )


def _start(weights: np.ndarray) -> np.ndarray:
    """Return the weights of the four runs, shape (run, 1, element)."""
    start: np.ndarray = np.array(WEIGHT_SCALES, "f4")[:, None, None] * weights
    return start


def _update(
    chain: Chain, weights: np.ndarray, gradient: np.ndarray, numbers: np.ndarray
) -> np.ndarray | None:
    """Return the updates of one parameter, shape (run, update, element).

    None if the effect of a part is not known.
    """
    scales = np.array(GRADIENT_SCALES, "f4")[:, None, None]
    # All updates are the same until a part depends on the number of the update.
    update = np.broadcast_to(
        scales * gradient, (len(scales), len(numbers), len(gradient))
    )
    for part in chain.parts:
        changed = _apply(part, update, weights, numbers)
        if changed is None:
            return None
        update = changed
    return update


def _apply(
    part: ChainPart, update: np.ndarray, weights: np.ndarray, numbers: np.ndarray
) -> np.ndarray | None:
    """Return the updates after one transformation; None if its effect is not known."""
    if part.is_unread or not part.is_known:
        return None
    if part.name in KEEPS_DIRECTION:
        return update
    if part.name in NORMALIZES:
        signs: np.ndarray = np.sign(update)
        return signs
    if part.name == "set_to_zero":
        return np.zeros_like(update)
    if part.name == "add_decayed_weights":
        strength = part.settings.get("weight_decay")
        if isinstance(strength, int | float):
            return update + np.float32(strength) * _start(weights)
        return None
    # The learning rate of a self-tuned optimizer is not known in advance.
    factors = None if part.name in SELF_TUNED else part.factors(numbers)
    return None if factors is None else update * factors[:, None]


def _measure(
    update: np.ndarray, weights: np.ndarray, gradient: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Return what `Probe` has of one parameter, shape (measurement, run, update)."""
    start = _start(weights)
    size = np.sqrt(np.mean(update**2, axis=-1))
    along = update @ gradient / (gradient @ gradient)
    shrink = -np.sum(update * start, axis=-1) / np.sum(start**2, axis=-1)
    before = start.astype(dtype)
    is_lost = (update != 0) & ((before + update.astype(dtype)) == before)
    return np.stack([size, along, shrink, np.mean(is_lost, axis=-1)])
