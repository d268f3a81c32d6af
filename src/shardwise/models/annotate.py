"""Logical names for the dims of parameters."""

from flax import nnx
from jax.nn.initializers import Initializer


def annotated(init: Initializer, names: tuple[str | None, ...]) -> Initializer:
    """Return an initializer whose parameter has a logical name for each dim.

    The names are for `Rules`. With `eager_sharding`, NNX would look them up in the mesh that is set
    when the model is built, and raise if there is none: a model could not be built outside of a
    run.

    Args:
        init: the initializer.
        names: a logical name or None for each dim.

    Example:
        >>> init = annotated(nnx.initializers.normal(0.02), ("vocab", "embed"))
        >>> table = nnx.Param(init(rngs.params(), (256, 64)))  # doctest: +SKIP
    """
    return nnx.with_partitioning(init, names, eager_sharding=False)
