"""Write one data-parallel step by hand, in three correct ways and in several wrong ways.

    python examples/data_parallel_by_hand.py
    shardwise verify examples/data_parallel_by_hand.py      # the last way, with 60 examples

Data parallelism promises that eight devices, each with an eighth of the batch, make exactly the
update that one device would make with the complete batch. Every way below starts from the same
linear model and makes one SGD step on the same examples. It is compared with one device: the
length of its update relative to the correct one, and the largest error of a parameter. Most of
the mistakes raise no error, and the loss may still go down. `data_parallel_step` is the loop over
shards as one function.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import (
    Batches,
    Mean,
    Run,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
    use_cpu_devices,
)

INPUTS = 5
OUTPUTS = 3
SGD = optax.sgd(0.05)
MOMENTUM = optax.sgd(0.05, momentum=0.9)

# The inputs and targets of each device.
Shards: TypeAlias = list[tuple[jax.Array, jax.Array]]
# A function that combines the gradients of all devices.
Combine: TypeAlias = Callable[..., jax.Array]
Optimizer: TypeAlias = nnx.Optimizer[nnx.Linear]


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    """Return the model."""
    return nnx.Linear(INPUTS, OUTPUTS, rngs=rngs)


def model_and_optimizer(
    tx: optax.GradientTransformation = SGD,
) -> tuple[nnx.Linear, Optimizer]:
    """Return a new model, always with the same weights, and its optimizer."""
    model = linear(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss(model: nnx.Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean over the given examples: the complete batch, or the shard of one device."""
    return jnp.mean((model(x) - y) ** 2)


def one_device(x: jax.Array, y: jax.Array) -> nnx.Linear:
    """Make the step that all other ways must reproduce."""
    model, optimizer = model_and_optimizer()
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    return model


# ---------------------------------------------------------------- three correct ways


def global_view(mesh: Mesh, x: jax.Array, y: jax.Array) -> nnx.Linear:
    """Write the step for the global batch, shard the data, and let XLA add the communication.

    No line of the step mentions devices, so no line can average over them in a wrong way. shardwise
    uses this way.
    """
    definition, state = nnx.split(model_and_optimizer())

    @jax.jit
    def step(state: nnx.State, x: jax.Array, y: jax.Array) -> nnx.State:  # type: ignore[type-arg]
        # NNX objects exist inside the step only. Arrays go in and out.
        model, optimizer = nnx.merge(definition, state)
        optimizer.update(model, nnx.grad(loss)(model, x, y))
        return nnx.state((model, optimizer))

    # Each device has a copy of the state, and 8 of the 64 examples.
    state = jax.device_put(state, NamedSharding(mesh, P()))
    x, y = jax.device_put((x, y), NamedSharding(mesh, P("data")))
    return nnx.merge(definition, step(state, x, y))[0]


def shard_mapped(
    mesh: Mesh,
    x: jax.Array,
    y: jax.Array,
    *,
    average: Literal["loss", "gradients"],
    check_vma: bool = True,
) -> nnx.Linear:
    """Write what one device does with its examples. Now you write the reduction yourself.

    With `check_vma=True`, the default, JAX knows that the parameters are the same on all devices,
    and sums their gradient over the devices. So you must average the loss before the gradient is
    taken. If you average the gradients afterwards, they are equal already, nothing changes, and
    the sum remains: the update is 8 times too large. With `check_vma=False` nothing is summed,
    and you must average the gradients.
    """
    definition, state = nnx.split(model_and_optimizer())

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def step(state: nnx.State, x: jax.Array, y: jax.Array) -> nnx.State:  # type: ignore[type-arg]
        # Here x is (8, 5) and y is (8, 3).
        def objective(model: nnx.Linear) -> jax.Array:
            local = loss(model, x, y)
            return jax.lax.pmean(local, "data") if average == "loss" else local

        model, optimizer = nnx.merge(definition, state)
        grads = nnx.grad(objective)(model)
        if average == "gradients":
            grads = jax.lax.pmean(grads, "data")
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return nnx.merge(definition, step(state, x, y))[0]


def step_over_shards(
    model: nnx.Linear, optimizer: Optimizer, shards: Shards, combine: Combine
) -> jax.Array:
    """Make one step in a loop that stands for the devices, and return the mean of their losses.

    All gradients are taken at the same parameters. They are combined, and the model is updated
    once.
    """
    losses, grads = zip(
        *[nnx.value_and_grad(loss)(model, x, y) for x, y in shards], strict=True
    )
    optimizer.update(model, jax.tree.map(combine, *grads))
    return jnp.mean(jnp.stack(losses))


def loop_over_shards(shards: Shards, combine: Combine) -> nnx.Linear:
    """Make one step in a loop over shards, and return the model."""
    model, optimizer = model_and_optimizer()
    step_over_shards(model, optimizer, shards, combine)
    return model


def mean(*grads: jax.Array) -> jax.Array:
    """Return the mean of the gradients of all shards."""
    return total(*grads) / len(grads)


def equal_shards(x: jax.Array, y: jax.Array, num_devices: int) -> Shards:
    """Return one shard of the batch for each device, all of the same size.

    Raises:
        ValueError: if `num_devices` does not divide the batch. Plain slices would drop the rest.
    """
    size, rest = divmod(len(x), num_devices)
    if rest:
        raise ValueError(
            f"a batch of {len(x)} examples is not divisible by {num_devices} devices. Pass a "
            f"multiple of {num_devices}, or weight the shards as `weighted_mean` does."
        )
    starts = range(0, len(x), size)
    return [(x[i : i + size], y[i : i + size]) for i in starts]


def data_parallel_step(
    seed: float, x_batch: jax.Array, y_batch: jax.Array, num_devices: float, lr: float
) -> jax.Array:
    """Make one data-parallel SGD step of a new linear model, on simulated devices.

    Args:
        seed: the seed of the model, cast to int.
        x_batch: inputs (N, D_in).
        y_batch: targets (N, D_out).
        num_devices: the number of devices, cast to int. It must divide N.
        lr: the learning rate.

    Returns:
        The mean loss of the devices before the update, shape (1,).
    """
    seed, num_devices, lr = int(seed), int(num_devices), float(lr)
    model = nnx.Linear(x_batch.shape[-1], y_batch.shape[-1], rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.sgd(lr), wrt=nnx.Param)
    shards = equal_shards(x_batch, y_batch, num_devices)
    mean_loss = step_over_shards(model, optimizer, shards, mean)
    return jnp.array([float(mean_loss)])


# ---------------------------------------------------------------- wrong ways


def total(*grads: jax.Array) -> jax.Array:
    """Return the sum of the gradients: each is a mean already, so it is 8 times too large."""
    return reduce(add, grads)


def update_for_each_shard(shards: Shards) -> nnx.Linear:
    """Make eight complete steps on small batches."""
    model, optimizer = model_and_optimizer()
    for x, y in shards:
        optimizer.update(model, nnx.grad(loss)(model, x, y))
    return model


def jit_of_objects(x: jax.Array, y: jax.Array) -> nnx.Linear:
    """Pass NNX objects to `jax.jit`, which updates copies of them. (`nnx.jit` would work.)"""
    model, optimizer = model_and_optimizer()

    @jax.jit
    def step(
        model: nnx.Linear, optimizer: Optimizer, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        value: jax.Array
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return value

    step(model, optimizer, x, y)
    return model


# ---------------------------------------------------------------- several steps


def several_steps(
    tx: optax.GradientTransformation,
    shards: Shards,
    num_steps: int,
    *,
    rebuild: bool = False,
) -> tuple[nnx.Linear, Optimizer]:
    """Make several steps on the same shards.

    With `rebuild=True`, every step creates a new optimizer, as code does that builds it inside the
    step function. Its momentum and its count of steps start at zero each time. No error is raised.
    """
    model, optimizer = model_and_optimizer(tx)
    for _ in range(num_steps):
        if rebuild:
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step_over_shards(model, optimizer, shards, mean)
    return model, optimizer


# ---------------------------------------------------------------- shards of unequal size


def weighted_mean(shards: Shards) -> Combine:
    """Return a mean in which every example counts the same, so a shard counts by its size."""
    sizes = [len(x) for x, _ in shards]

    def combine(*grads: jax.Array) -> jax.Array:
        weighted = [size * grad for size, grad in zip(sizes, grads, strict=True)]
        return total(*weighted) / sum(sizes)

    return combine


def mean_loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> Mean:
    """Return the loss as a `Mean`, which keeps the total and the weight of each example.

    So shardwise can pad the batch and ignore the padding.
    """
    squares = (model(batch["x"]) - batch["y"]) ** 2  # (B, 3)
    return Mean(squares, jnp.ones_like(squares))


def shardwise_step(mesh: Mesh, x: jax.Array, y: jax.Array) -> nnx.Linear:
    """Make the step with shardwise."""
    batch = {"x": np.asarray(x), "y": np.asarray(y)}
    spec = abstract_state(linear, SGD, mesh)
    step = make_train_step(spec, mean_loss, batch)
    state, _ = step(init_state(spec, seed=0), step.place(batch))
    return cast(
        nnx.Linear, spec.definition.merge(state.params, state.other, jax.random.key(0))
    )


def recipe(mesh: str = "data=-1") -> Run:
    """Train the same model in a complete run, with 60 examples per batch on any number of devices.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
    """
    x, y = make_data()
    return Run(
        model=linear,
        loss=mean_loss,
        optimizer=SGD,
        data=Batches({"x": x, "y": y}, batch_size=60),
        steps=20,
        mesh=mesh,
    )


# ---------------------------------------------------------------- the table


def error_of(mistake: Callable[[], object]) -> str:
    """Return the error that a mistake raises."""
    try:
        mistake()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def flatten(model: nnx.Linear) -> np.ndarray:
    """Return all parameters as one vector."""
    return np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    )


def make_data() -> tuple[jax.Array, jax.Array]:
    """Return random inputs (64, 5) and targets (64, 3)."""
    keys = jax.random.split(jax.random.key(1), 2)
    return jax.random.normal(keys[0], (64, INPUTS)), jax.random.normal(
        keys[1], (64, OUTPUTS)
    )


Figures: TypeAlias = dict[str, tuple[float, float]]


def compare(expected: nnx.Linear, ways: dict[str, nnx.Linear]) -> Figures:
    """Print and return the relative length of each update and its largest error."""
    start = flatten(model_and_optimizer()[0])
    figures: Figures = {}
    for name, model in ways.items():
        update = flatten(model) - start
        length = np.linalg.norm(update) / np.linalg.norm(flatten(expected) - start)
        error = np.abs(flatten(model) - flatten(expected)).max()
        figures[name] = float(length), float(error)
        print(f"  {name:52} {length:8.4f}x {error:10.1e}")
    return figures


def compare_equal_shards(mesh: Mesh, x: jax.Array, y: jax.Array) -> Figures:
    """Compare all ways on 64 examples."""
    shards = equal_shards(x, y, 8)
    print(f"{'64 examples, 8 on each of 8 devices':54} {'update':>9} {'error':>10}")
    correct = {
        "jax.jit of the global view": global_view(mesh, x, y),
        "shard_map, gradient of pmean(loss)": shard_mapped(mesh, x, y, average="loss"),
        "shard_map unchecked, pmean(gradients)": shard_mapped(
            mesh, x, y, average="gradients", check_vma=False
        ),
        "loop over shards, mean of gradients": loop_over_shards(shards, mean),
    }
    wrong = {
        "WRONG: shard_map, pmean(gradients)": shard_mapped(
            mesh, x, y, average="gradients"
        ),
        "WRONG: shard_map unchecked, gradient of pmean(loss)": shard_mapped(
            mesh, x, y, average="loss", check_vma=False
        ),
        "WRONG: loop over shards, sum of gradients": loop_over_shards(shards, total),
        "WRONG: loop over shards, an update for each": update_for_each_shard(shards),
        "WRONG: jax.jit of NNX objects": jit_of_objects(x, y),
    }
    return compare(one_device(x, y), correct | wrong)


def compare_unequal_shards(mesh: Mesh, x: jax.Array, y: jax.Array) -> Figures:
    """Compare three ways on 60 examples, which 8 devices do not divide."""
    shards = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 60, 8)]
    print("60 examples, 4 on the last device")
    ways = {
        "weighted mean of gradients": loop_over_shards(shards, weighted_mean(shards)),
        "shardwise, padded": shardwise_step(mesh, x, y),
        "WRONG: mean of means": loop_over_shards(shards, mean),
    }
    return compare(one_device(x, y), ways)


def compare_several_steps(x: jax.Array, y: jax.Array, num_steps: int = 10) -> Figures:
    """Compare one optimizer for the entire training with a new one in each step."""
    everything, shards = equal_shards(x, y, 1), equal_shards(x, y, 8)
    expected, _ = several_steps(MOMENTUM, everything, num_steps)
    kept, kept_optimizer = several_steps(MOMENTUM, shards, num_steps)
    rebuilt, new_optimizer = several_steps(MOMENTUM, shards, num_steps, rebuild=True)
    plain, _ = several_steps(SGD, shards, num_steps)
    print(f"{num_steps} steps with momentum 0.9")
    figures = compare(
        expected,
        {
            "one optimizer for all steps": kept,
            "WRONG: a new optimizer in each step": rebuilt,
            "WRONG: no momentum (the same as a new optimizer)": plain,
        },
    )
    losses = [float(loss(model, x, y)) for model in (kept, rebuilt)]
    counts = [int(optimizer.step[...]) for optimizer in (kept_optimizer, new_optimizer)]
    print(
        f"  loss {losses[0]:.4f} with one optimizer, which has counted {counts[0]} steps; "
        f"{losses[1]:.4f} with a new one each time, which has counted {counts[1]}"
    )
    return figures


def main() -> dict[str, tuple[float, float] | str]:
    """Print a table of all ways.

    Returns:
        For each way, the length of its update relative to the correct one and its largest error;
        for each mistake that is reported, the message.
    """
    mesh = make_mesh("data=8", jax.devices()[:8])
    x, y = make_data()
    figures = compare_equal_shards(mesh, x, y)
    figures |= compare_several_steps(x, y)
    x, y = x[:60], y[:60]
    figures |= compare_unequal_shards(mesh, x, y)
    print("mistakes that raise an error")
    errors = {
        "no wrt": error_of(
            lambda: nnx.Optimizer(linear(nnx.Rngs(0)), SGD)  # type: ignore[call-arg]
        ),
        "60 examples over 8 devices": error_of(
            lambda: shard_mapped(mesh, x, y, average="loss")
        ),
    }
    for name, error in errors.items():
        print(f"  {name}: {error.splitlines()[0]}")
    return {**figures, **errors}


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
