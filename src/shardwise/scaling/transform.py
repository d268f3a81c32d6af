"""The two plain pieces of scaling: a factory of scaled models, and scaled updates."""

from collections.abc import Callable, Collection, Mapping

import jax
import optax
from flax import nnx

from shardwise.module import ModelFactory, call_factory, path_name
from shardwise.optim.groups import map_with_path
from shardwise.tree import OptState, Params, PyTree


def scale_init(
    model: ModelFactory, factors: Mapping[str, float]
) -> Callable[[nnx.Rngs], nnx.Module]:
    """Return a factory whose models have some parameters multiplied by a number.

    Args:
        model: a function from `nnx.Rngs` to the model.
        factors: the factor of each parameter, by path. Others keep their values.

    Example:
        >>> make = scale_init(lambda rngs: nnx.Linear(4, 2, rngs=rngs), {"kernel": 0.5})
    """

    def scaled_model(rngs: nnx.Rngs) -> nnx.Module:
        module = call_factory(model, rngs)
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            factor = factors.get(path_name(path), 1.0)
            if factor != 1.0:
                value = variable.get_value()
                variable.set_value(value * jax.numpy.asarray(factor, value.dtype))
                nnx.update(module, nnx.from_flat_state([(path, variable)]))
        return module

    return scaled_model


def scale_updates(
    inner: optax.GradientTransformation,
    multipliers: Mapping[str, float],
    separable: Collection[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose updates are multiplied by one number per parameter.

    Decoupled weight decay is not multiplied: the optimizer sees weights that are divided by the
    number first. The state is that of the optimizer, so checkpoints do not change.

    Args:
        inner: the optimizer.
        multipliers: a number for each parameter, by path. Others keep their updates.
        separable: the paths of parameters whose update is a function of the gradient plus weight
            decay. The updates of other parameters are multiplied together with their decay.

    Example:
        >>> import optax
        >>> tx = scale_updates(optax.adamw(1e-3), {"hidden/kernel": 0.25}, ["hidden/kernel"])
    """
    inner = optax.with_extra_args_support(inner)

    def seen(path: str, weights: jax.Array) -> jax.Array:
        multiplier = multipliers.get(path, 1.0)
        is_changed = path in separable and multiplier not in (0.0, 1.0)
        return weights / multiplier if is_changed else weights

    def scaled(path: str, update: jax.Array) -> jax.Array:
        multiplier = multipliers.get(path, 1.0)
        return update if multiplier == 1.0 else update * multiplier

    def init(params: Params) -> OptState:
        return inner.init(params)

    def update(
        updates: PyTree, state: OptState, params: Params = None, **extra: object
    ) -> tuple[PyTree, OptState]:
        weights = params if params is None else map_with_path(seen, params)
        updates, state = inner.update(updates, state, weights, **extra)
        return map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
