"""Shard a model without the step or the loop of shardwise: use its state, and plain JAX.

    python examples/sharded_model.py
    shardwise verify examples/sharded_model.py  # the same model in the step of shardwise

Annotations name the dimensions of a parameter, and the mesh decides which of them are sharded.
`abstract_state` chooses a sharding for each array, and `init_state` creates model and optimizer
in these shardings, so that no device ever holds a complete array that is sharded. From there on
it is `jax.jit` over dictionaries of arrays. The same training with NNX's own optimizer on one
device checks the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardwise import (
    Batches,
    Run,
    TrainState,
    abstract_state,
    init_state,
    make_mesh,
    use_cpu_devices,
)
from shardwise.sharding import Placement
from shardwise.tree import Params


class MLP(nnx.Module):
    """A residual MLP. Shapes: B examples, D = 64 width, F = 256 hidden width, C = 8 classes."""

    def __init__(self, rngs: nnx.Rngs):
        """Create the parameters with sharding annotations."""
        kernel_init = nnx.initializers.lecun_normal()
        bias_init = nnx.initializers.zeros
        annotate = nnx.with_partitioning
        # Logical names: `shardwise.Rules` maps "mlp" to the mesh axis "model" and "embed" to
        # "fsdp", if the mesh has them. On data=4,model=2, "up" is sharded by columns and "down"
        # by rows, so the values between them stay sharded.
        self.up = nnx.Linear(
            64,
            256,
            kernel_init=annotate(kernel_init, ("embed", "mlp")),
            bias_init=annotate(bias_init, ("mlp",)),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            256, 64, kernel_init=annotate(kernel_init, ("mlp", "embed")), rngs=rngs
        )
        # An annotation can also name a mesh axis directly.
        self.head = nnx.Linear(
            64, 8, kernel_init=annotate(kernel_init, (None, "model")), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits (B, C) of inputs (B, D)."""
        hidden = nnx.gelu(self.up(x))  # (B, F)
        return self.head(x + self.down(hidden))


def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Return the mean cross entropy of logits (B, C) and labels (B,)."""
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
        logits, label
    )  # (B,)
    return losses.mean()


@dataclass(frozen=True)
class Trained:
    """The result of `train_sharded`.

    Attributes:
        params: the trained parameters.
        state: the complete training state.
        placements: the sharding of each parameter, and the reason for it.
        losses: the loss of each step.
        logits: the logits of the training data.
        program: the compiled forward pass as text.
    """

    params: Params
    state: TrainState
    placements: dict[str, Placement]
    losses: list[float]
    logits: jax.Array
    program: str


def train_sharded(
    optimizer: optax.GradientTransformation,
    x: np.ndarray,
    label: np.ndarray,
    num_steps: int,
) -> Trained:
    """Train on 8 devices with a step written in plain JAX."""
    mesh = make_mesh("data=4,model=2")
    spec = abstract_state(MLP, optimizer, mesh)
    # .step, .params, .other and .opt_state are dictionaries of arrays that are already sharded.
    state = init_state(spec, seed=0)
    # Examples are sharded over "data".
    inputs, labels = jax.device_put(
        (x, label), NamedSharding(mesh, PartitionSpec("data"))
    )

    def logits(params: Params, other: Params, x: jax.Array) -> jax.Array:
        # An NNX module again. The key would be used by layers such as dropout.
        model: Callable[[jax.Array], jax.Array] = spec.definition.merge(
            params, other, jax.random.key(0)
        )
        return model(x)

    # The shardings of the result are set explicitly, because the result of one step is the input of
    # the next.
    @partial(jax.jit, donate_argnums=0, out_shardings=(spec.shardings, None))
    def step(
        state: TrainState, x: jax.Array, label: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def objective(params: Params) -> jax.Array:
            return loss(logits(params, state.other, x), label)

        value, grads = jax.value_and_grad(objective)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, state.other, opt_state), value

    losses = []
    for _ in range(num_steps):
        state, value = step(state, inputs, labels)
        losses.append(float(value))
    forward = jax.jit(logits).lower(state.params, state.other, inputs).compile()
    return Trained(
        params=state.params,
        state=state,
        placements=dict(spec.params),
        losses=losses,
        logits=forward(state.params, state.other, inputs),
        program=forward.as_text() or "",
    )


def train_on_one_device(
    optimizer: optax.GradientTransformation,
    x: np.ndarray,
    label: np.ndarray,
    num_steps: int,
) -> tuple[MLP, list[float]]:
    """Train with NNX's own optimizer, and return the model and the loss of each step."""
    # Here the annotations are only metadata. NNX must not shard the arrays.
    with nnx.use_eager_sharding(False):
        model = MLP(nnx.Rngs(0))
        nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        def step(
            model: MLP,
            nnx_optimizer: nnx.Optimizer[MLP],
            x: jax.Array,
            label: jax.Array,
        ) -> jax.Array:
            def objective(model: MLP) -> jax.Array:
                return loss(model(x), label)

            value: jax.Array
            value, grads = nnx.value_and_grad(objective)(model)
            nnx_optimizer.update(model, grads)
            return value

        inputs, labels = jnp.asarray(x), jnp.asarray(label)
        losses = [
            float(step(model, nnx_optimizer, inputs, labels)) for _ in range(num_steps)
        ]
    return model, losses


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs (128, 64) and labels (128,)."""
    random = np.random.default_rng(0)
    return random.normal(size=(128, 64)).astype("float32"), random.integers(0, 8, 128)


def recipe(mesh: str = "data=-1") -> Run:
    """Train the same model with the step and the loop of shardwise.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
    """
    x, label = make_data()
    return Run(
        model=MLP,
        loss=lambda model, batch: loss(model(batch["x"]), batch["label"]),
        optimizer=optax.adamw(1e-2),
        data=Batches({"x": x, "label": label}, batch_size=128),
        steps=20,
        mesh=mesh,
    )


def max_difference(a: jax.Array, b: jax.Array) -> float:
    """Return the largest absolute difference of two arrays."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def print_parameters(trained: Trained, model: MLP) -> float:
    """Print the sharding of each parameter; return the largest difference from one device."""
    print(
        f"{'parameter':12} {'shape':>10} {'shard':>10}  {'sharding':25} difference from one device"
    )
    largest = 0.0
    for path, placement in trained.placements.items():
        layer, name = path.split("/")
        array = trained.params[layer][name]
        difference = max_difference(array, getattr(getattr(model, layer), name)[...])
        largest = max(largest, difference)
        shard = array.addressable_shards[0].data.shape
        print(
            f"{path:12} {array.shape!s:>10} {shard!s:>10}  {array.sharding.spec!s:25} "
            f"{difference:.1e}  ({placement.reason})"
        )
    return largest


def main(num_steps: int = 20) -> dict[str, float]:
    """Train on 8 devices and on one, and return how much the results differ."""
    x, label = make_data()
    optimizer = optax.adamw(1e-2)
    trained = train_sharded(optimizer, x, label, num_steps)
    model, expected_losses = train_on_one_device(optimizer, x, label, num_steps)
    max_param_difference = print_parameters(trained, model)
    arrays = jax.tree.leaves(trained.state)
    bytes_per_device = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    figures = {
        "share_of_state": bytes_per_device / sum(array.nbytes for array in arrays),
        # Only the output of "down" is summed, over "model".
        "sums_in_forward": trained.program.count(" all-reduce("),
        "loss": trained.losses[-1],
        "max_loss_difference": float(
            np.abs(np.subtract(trained.losses, expected_losses)).max()
        ),
        "max_param_difference": max_param_difference,
        "max_logit_difference": max_difference(trained.logits, model(jnp.asarray(x))),
    }
    sharding = trained.logits.sharding
    assert isinstance(sharding, NamedSharding)
    print(
        f"logits {trained.logits.shape} are sharded as {sharding.spec}; "
        "the optimizer state is sharded like the parameters"
    )
    print("\n".join(f"{name:22}{value:.3g}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
