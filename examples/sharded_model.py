"""A sharded model without shardwise's step or loop: take the state, write the rest in plain JAX.

    python examples/sharded_model.py
    shardwise verify examples/sharded_model.py  # the model in shardwise's own step, on meshes that its annotations know

Annotations say what a dim of a parameter is; the mesh decides what is cut. `abstract_state` makes a layout for each
array of it, and `init_state` creates model and optimizer in that layout, so that no device ever holds a whole array
that is cut. From there on it is `jax.jit` over dictionaries of arrays. The same training with NNX's own optimizer on
one device checks the result.
"""

from functools import partial

import jax
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


class MLP(nnx.Module):
    """Shapes: B rows, D = 64 width, F = 256 hidden, C = 8 classes."""

    def __init__(self, rngs: nnx.Rngs):
        kernel, zeros, cut = (
            nnx.initializers.lecun_normal(),
            nnx.initializers.zeros,
            nnx.with_partitioning,
        )
        # Logical names: `shardwise.Rules` maps "mlp" to the mesh axis "model" and "embed" to "fsdp", where the mesh has
        # them. On data=4,model=2 "up" is cut by columns and "down" by rows: what is between them stays cut.
        self.up = nnx.Linear(
            64,
            256,
            kernel_init=cut(kernel, ("embed", "mlp")),
            bias_init=cut(zeros, ("mlp",)),
            rngs=rngs,
        )  # (D, F)
        self.down = nnx.Linear(
            256, 64, kernel_init=cut(kernel, ("mlp", "embed")), rngs=rngs
        )  # (F, D)
        # A mesh axis can be named directly, too.
        self.head = nnx.Linear(64, 8, kernel_init=cut(kernel, (None, "model")), rngs=rngs)  # (D, C)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x + self.down(nnx.gelu(self.up(x))))  # (B, D) -> (B, C)


def loss(logits: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, label
    ).mean()  # (B, C), (B,) -> ()


def train_sharded(
    optimizer: optax.GradientTransformation, x: np.ndarray, label: np.ndarray, num_steps: int
):
    mesh = make_mesh("data=4,model=2")
    spec = abstract_state(MLP, optimizer, mesh)
    state = init_state(
        spec, seed=0
    )  # .step, .params, .other, .opt_state: dictionaries of arrays, already in pieces
    x, label = jax.device_put(
        (x, label), NamedSharding(mesh, PartitionSpec("data"))
    )  # rows over "data"

    def logits(params: dict, other: dict, x: jax.Array) -> jax.Array:
        model = spec.definition.merge(
            params, other, jax.random.key(0)
        )  # an NNX module again; the key is for dropout and its like
        return model(x)

    # The layouts of the result are said, not guessed: what comes out of a step must fit into the next one.
    @partial(jax.jit, donate_argnums=0, out_shardings=(spec.shardings, None))
    def step(state: TrainState, x: jax.Array, label: jax.Array) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(
            lambda params: loss(logits(params, state.other, x), label)
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(
            state.step + 1, optax.apply_updates(state.params, updates), state.other, opt_state
        ), value

    losses = []
    for _ in range(num_steps):
        state, value = step(state, x, label)
        losses.append(float(value))
    forward = jax.jit(logits).lower(state.params, state.other, x).compile()
    return spec, state, losses, forward(state.params, state.other, x), forward.as_text()


def train_on_one_device(
    optimizer: optax.GradientTransformation, x: np.ndarray, label: np.ndarray, num_steps: int
):
    with nnx.use_eager_sharding(False):  # here the annotations are to be notes, not orders
        model = MLP(nnx.Rngs(0))
        nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        def step(
            model: MLP, nnx_optimizer: nnx.Optimizer, x: jax.Array, label: jax.Array
        ) -> jax.Array:
            value, grads = nnx.value_and_grad(lambda model: loss(model(x), label))(model)
            nnx_optimizer.update(model, grads)
            return value

        losses = [float(step(model, nnx_optimizer, x, label)) for _ in range(num_steps)]
    return model, losses


def make_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(128, 64)).astype("float32"), random.integers(0, 8, 128)


def recipe(mesh: str = "data=-1") -> Run:
    """The same model for shardwise's step and loop."""
    x, label = make_data()
    return Run(
        model=MLP,
        loss=lambda model, batch: loss(model(batch["x"]), batch["label"]),
        optimizer=optax.adamw(1e-2),
        data=Batches({"x": x, "label": label}, batch_size=128),
        steps=20,
        mesh=mesh,
    )


def main(num_steps: int = 20) -> dict[str, float]:
    x, label = make_data()
    optimizer = optax.adamw(1e-2)
    spec, state, losses, logits, compiled = train_sharded(optimizer, x, label, num_steps)
    model, expected_losses = train_on_one_device(optimizer, x, label, num_steps)

    print(
        f"{'parameter':12} {'whole':>10} {'a piece':>10}  layout                    difference from one device"
    )
    differences = []
    for path, placement in spec.params.items():
        layer, name = path.split("/")
        array, expected = state.params[layer][name], getattr(getattr(model, layer), name)[...]
        differences.append(float(abs(np.asarray(array) - np.asarray(expected)).max()))
        piece = array.addressable_shards[0].data.shape
        print(
            f"{path:12} {array.shape!s:>10} {piece!s:>10}  {array.sharding.spec!s:25} {differences[-1]:.1e}  ({placement.reason})"
        )
    arrays = jax.tree.leaves(state)
    figures = {
        "share_of_state": sum(a.addressable_shards[0].data.nbytes for a in arrays)
        / sum(a.nbytes for a in arrays),
        "sums_in_forward": compiled.count(
            " all-reduce("
        ),  # only the output of "down" is summed, over "model"
        "loss": losses[-1],
        "max_loss_difference": float(np.abs(np.subtract(losses, expected_losses)).max()),
        "max_param_difference": max(differences),
        "max_logit_difference": float(abs(np.asarray(logits) - np.asarray(model(x))).max()),
    }
    print(
        f"logits {logits.shape} leave as {logits.sharding.spec}; the optimizer's arrays are cut like their parameters"
    )
    print("\n".join(f"{name:22}{value:.3g}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
