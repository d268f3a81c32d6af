"""A mixture of experts: many MLPs, of which a router chooses a few for each token.

Shapes: B sequences, T tokens, D width, E experts, F hidden width of an expert, k choices per token.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from shardwise.kernels.experts import (
    Activation,
    Kernels,
    apply_experts,
    apply_experts_with_capacity,
)
from shardwise.metrics import BatchMean
from shardwise.models.annotate import annotated

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """How a router has distributed the tokens, for each sequence.

    Every value belongs to one sequence. Losses that are made of them are therefore the same with
    micro-batches, padding and on every mesh.

    Attributes:
        load: the share of the choices of a sequence that each expert got, (B, E). No gradient.
        probability: the mean probability of each expert, (B, E).
        z: the mean square of the logarithm of the sum of exponentials of the logits, (B,).
        dropped: the share of the choices that found no place, (B,). 0 without a capacity.
    """

    load: Array
    probability: Array
    z: Array
    dropped: Array

    @property
    def balance(self) -> Array:
        """The balancing loss of each sequence, (B,): 1 if all experts get the same load."""
        num_experts = self.load.shape[-1]
        return num_experts * (self.load * self.probability).sum(-1)


def empty_routing(batch_size: int, num_experts: int) -> Routing:
    """Return a routing of zeros, to which those of layers are added.

    Args:
        batch_size: the number B of sequences.
        num_experts: the number E of experts.
    """
    per_expert = jnp.zeros((batch_size, num_experts), jnp.float32)
    per_sequence = jnp.zeros(batch_size, jnp.float32)
    return Routing(per_expert, per_expert, per_sequence, per_sequence)


@dataclass(frozen=True)
class Choices:
    """The experts of each token, see `route`.

    Attributes:
        experts: their numbers, (B, T, k).
        weights: their weights, (B, T, k), float32. They add up to 1.
    """

    experts: Array
    weights: Array


def route(
    logits: Array, top_k: int, bias: Array | None = None
) -> tuple[Choices, Routing]:
    """Choose experts for each token.

    The weights are the softmax of the logits of the chosen experts.

    Args:
        logits: the score of each expert, (B, T, E), float32.
        top_k: the number k of experts per token.
        bias: added to the probabilities for the choice only, (E,).
    """
    logits = logits.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    scores = logits if bias is None else probabilities + bias
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores), top_k)
    chosen = jnp.take_along_axis(logits, experts, axis=-1)
    num_experts = logits.shape[-1]
    is_chosen = (experts[..., None] == jnp.arange(num_experts)).any(-2)
    routing = Routing(
        load=is_chosen.mean(1, dtype=jnp.float32) / top_k,
        probability=probabilities.mean(1),
        z=jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(1),
        dropped=jnp.zeros(logits.shape[0], jnp.float32),
    )
    return Choices(experts, jax.nn.softmax(chosen)), routing


def moe(
    x: Array,
    logits: Array,
    kernels: Kernels,
    *,
    top_k: int,
    bias: Array | None = None,
    capacity: float | None = None,
    activation: Activation = jax.nn.silu,
) -> tuple[Array, Routing]:
    """Return the outputs of the chosen experts of each token, and how they were chosen.

    It works outside of a step and on any mesh. An axis named `expert` shards the experts. Annotate
    the kernels with the logical name "experts": `("experts", "embed", "mlp")` for (E, D, F).

    Args:
        x: tokens, (B, T, D).
        logits: the score of each expert, (B, T, E). Compute them in float32.
        kernels: gate (E, D, F) or None, up (E, D, F) and down (E, F, D), see `MoE`.
        top_k: the number k of experts per token.
        bias: added to the probabilities for the choice only, (E,).
        capacity: the number of places of an expert, in relation to an even distribution of the
            tokens of a sequence. Choices without a place are dropped. None drops nothing.
        activation: an element-wise function.

    Returns:
        An array like `x`, and the routing.

    Raises:
        ConfigError: if there is a capacity, and an axis of the mesh shards the tokens.

    Example:
        >>> y, routing = moe(x, x @ router, (gate, up, down), top_k=2)  # doctest: +SKIP
    """
    choices, routing = route(logits, top_k, bias)
    if capacity is None:
        y = apply_experts(x, choices.experts, choices.weights, kernels, activation)
        return y, routing
    y, dropped = apply_experts_with_capacity(
        x, choices.experts, choices.weights, kernels, capacity, activation
    )
    return y, replace(routing, dropped=dropped)


class MoE(nnx.Module):
    """A layer of experts, in place of the MLP of a transformer block.

    Each expert is an MLP: `(activation(x @ gate) * (x @ up)) @ down`, or without gates
    `activation(x @ up) @ down`. The router computes in float32, also in a run with
    `compute_dtype="bfloat16"`.

    Experts must be used evenly. Two means, which can be combined:

    - Add `routing.balance` to the loss of each sequence, times about 0.01.
    - Set `bias_rate`. A bias per expert is added to its probability when experts are chosen. It
      grows while the expert gets less than its share: after each step by `bias_rate` times the
      share that is missing. No gradient changes it.

    Example:
        >>> layer = MoE(64, 128, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
        >>> y, routing = layer(jnp.ones((4, 16, 64)))
        >>> y.shape, routing.balance.shape
        ((4, 16, 64), (4,))
    """

    def __init__(
        self,
        width: int,
        mlp_width: int,
        *,
        num_experts: int,
        top_k: int = 2,
        gated: bool = True,
        activation: Activation = jax.nn.silu,
        bias_rate: float = 0.0,
        capacity: float | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Create the parameters.

        Args:
            width: the width D of a token.
            mlp_width: the hidden width F of an expert.
            num_experts: the number E of experts.
            top_k: the number of experts per token.
            gated: whether experts have gates.
            activation: an element-wise function.
            bias_rate: how fast the biases change; 0 for none.
            capacity: see `moe`.
            param_dtype: the dtype of the parameters.
            rngs: random number generators.

        Raises:
            ValueError: if `top_k` is not between 1 and `num_experts`, or `capacity` or `bias_rate`
                is not positive.
        """
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k={top_k} of num_experts={num_experts}: use a number between 1 and "
                f"{num_experts}."
            )
        if bias_rate < 0 or (capacity is not None and capacity <= 0):
            raise ValueError(
                f"bias_rate={bias_rate} and capacity={capacity} must not be negative."
            )
        self.top_k = top_k
        self.activation = activation
        self.bias_rate = bias_rate
        self.capacity = capacity
        # Whether biases keep their values, as in an evaluation.
        self.deterministic = False

        def weight(
            shape: tuple[int, ...], names: tuple[str | None, ...]
        ) -> nnx.Param[Array]:
            init = annotated(nnx.initializers.normal(0.02), names)
            value = init(rngs.params(), shape, jnp.dtype(param_dtype))
            # `lora` reads which dims are a stack, inputs and outputs.
            return nnx.Param(value, dims="sio"[-len(shape) :])

        router = weight((width, num_experts), ("embed", None))
        router.set_metadata(keep_dtype=True)
        self.router = router
        inner = (num_experts, width, mlp_width)
        names = ("experts", "embed", "mlp")
        self.gate = weight(inner, names) if gated else None
        self.up = weight(inner, names)
        # Without a name for the last dim, FSDP shards the hidden width, which is larger.
        self.down = weight((num_experts, mlp_width, width), ("experts", "mlp", None))
        self.bias = BatchMean(jnp.zeros(num_experts)) if bias_rate else None

    def __call__(self, x: Array) -> tuple[Array, Routing]:
        """Return the outputs for `x` (B, T, D), and how experts were chosen."""
        logits = jnp.matmul(
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            # Other precisions round the operands of a matmul on GPUs and TPUs.
            precision=jax.lax.Precision.HIGHEST,
        )
        gate = None if self.gate is None else self.gate[...]
        y, routing = moe(
            x,
            logits,
            (gate, self.up[...], self.down[...]),
            top_k=self.top_k,
            bias=None if self.bias is None else self.bias[...],
            capacity=self.capacity,
            activation=self.activation,
        )
        if self.bias is not None and not self.deterministic:
            num_experts = routing.load.shape[-1]
            missing = 1 / num_experts - routing.load.mean(0)
            self.bias[...] += self.bias_rate * missing
        return y, routing
