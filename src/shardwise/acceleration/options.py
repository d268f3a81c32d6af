"""What the rules of the acceleration need to know about the function around a graph."""

from dataclasses import dataclass

from shardwise.acceleration.graph import Atom
from shardwise.kernels.platform import step_mesh
from shardwise.tracing.jaxpr import shape_of


@dataclass(frozen=True)
class Options:
    """What a rule may do in a graph.

    Attributes:
        batch_sizes: the first dims of the arguments of the function.
        saves_matmuls: whether a policy of `jax.checkpoint` decides which values are saved. Then
            matmuls must stay visible.
    """

    batch_sizes: frozenset[int]
    saves_matmuls: bool = False

    def has_rows(self, atom: Atom) -> bool:
        """Return whether the tokens of a variable (B, T, ...) or (N, D) can form a matrix.

        On a mesh of several devices B must be the batch, whose dim is sharded. Merging T and B
        would move tokens between devices.
        """
        shape = shape_of(atom)
        mesh = step_mesh()
        if len(shape) < 3 or mesh is None or mesh.size == 1:
            return len(shape) > 1
        return shape[0] in self.batch_sizes
