"""Which keys a query may attend to, by positions and by documents."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

Array = jax.Array

# The score of a key that a query must not attend to.
MASKED_SCORE = -1e30


def same_document(query_segments: Array, key_segments: Array) -> Array:
    """Return which keys are in the document of each query, (B, 1, queries, keys).

    Args:
        query_segments: the document of each query, (B, queries).
        key_segments: the document of each key, (B, keys).
    """
    return query_segments[:, None, :, None] == key_segments[:, None, None, :]


@dataclass(frozen=True)
class Mask:
    """A mask of attention that depends on positions only.

    Attributes:
        causal: whether a query attends to keys up to its own position only.
        window: the largest distance of a key plus 1: a query attends to itself and to `window - 1`
            keys before it, and after it if the mask is not causal. None does not limit it.
    """

    causal: bool = True
    window: int | None = None

    def visible(self, queries: Array, keys: Array) -> Array:
        """Return which keys each query attends to, (queries, keys).

        Args:
            queries: positions of the queries.
            keys: positions of the keys.
        """
        distance = queries[:, None] - keys
        if self.window is None:
            return distance >= 0 if self.causal else jnp.ones_like(distance, bool)
        is_near = jnp.abs(distance) < self.window
        return is_near & (distance >= 0) if self.causal else is_near

    @property
    def local_window(self) -> tuple[int, int] | None:
        """The window as `jax.nn.dot_product_attention` takes it."""
        if self.window is None:
            return None
        return self.window - 1, 0 if self.causal else self.window - 1
