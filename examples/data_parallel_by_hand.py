"""One data-parallel step written by hand in three right ways, and the ways in which it goes wrong, in numbers.

    python examples/data_parallel_by_hand.py
    shardwise verify examples/data_parallel_by_hand.py      # the last way, with 60 rows, on every mesh

Data parallelism promises that eight devices with an eighth of the batch each make the very update that one device
would make with all of it. So every way below starts from the same linear model, makes one SGD step on the same rows, and
is compared with one device: how long its update is beside the true one, and how far off its parameters are.
Most of the mistakes raise nothing, and the loss may fall all the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

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

INPUTS, OUTPUTS = 5, 3
SGD = optax.sgd(0.05)
Shards = list[tuple[jax.Array, jax.Array]]  # (x, y) of each device


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(INPUTS, OUTPUTS, rngs=rngs)


def fresh() -> tuple[nnx.Linear, nnx.Optimizer]:
    model = linear(nnx.Rngs(0))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def loss(model: nnx.Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(
        (model(x) - y) ** 2
    )  # over the rows it is given: all of them, or those of one device


def one_device(x: jax.Array, y: jax.Array) -> nnx.Linear:
    """What the others must reproduce."""
    model, optimizer = fresh()
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    return model


# ---------------------------------------------------------------- three ways that are right


def global_view(mesh: Mesh, x: jax.Array, y: jax.Array) -> nnx.Linear:
    """Write the step for the whole batch, split the data, and let XLA add what communication that takes.

    No line of the step mentions devices, so no line can average over them wrongly. shardwise goes this way.
    """
    definition, state = nnx.split(fresh())

    @jax.jit
    def step(state: nnx.State, x: jax.Array, y: jax.Array) -> nnx.State:
        model, optimizer = nnx.merge(
            definition, state
        )  # objects live inside the step only; arrays go in and out
        optimizer.update(model, nnx.grad(loss)(model, x, y))
        return nnx.state((model, optimizer))

    state = jax.device_put(state, NamedSharding(mesh, P()))  # a copy on each device
    x, y = jax.device_put(
        (x, y), NamedSharding(mesh, P("data"))
    )  # (64, ...) as eight times (8, ...)
    return nnx.merge(definition, step(state, x, y))[0]


def shard_mapped(
    mesh: Mesh, x: jax.Array, y: jax.Array, *, average: str, check_vma: bool = True
) -> nnx.Linear:
    """Write what one device does with its rows. Now the reduction is yours, and all depends on where it stands.

    With check_vma, the default, JAX knows that the parameters are the same on all devices, and sums their gradient over
    the devices itself. So average the loss before the gradient is taken. To average the gradients afterwards changes
    nothing, for they are equal by then, and the sum stands: eight times too much. Without check_vma nothing is summed,
    and it is the gradients that must be averaged.
    """
    definition, state = nnx.split(fresh())

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def step(state: nnx.State, x: jax.Array, y: jax.Array) -> nnx.State:  # x (8, 5), y (8, 3)
        def objective(model: nnx.Linear) -> jax.Array:
            local = loss(model, x, y)
            return jax.lax.pmean(local, "data") if average == "loss" else local

        model, optimizer = nnx.merge(definition, state)
        grads = nnx.grad(objective)(model)
        optimizer.update(model, jax.lax.pmean(grads, "data") if average == "gradients" else grads)
        return nnx.state((model, optimizer))

    return nnx.merge(definition, step(state, x, y))[0]


def loop_over_shards(shards: Shards, combine: Callable[..., jax.Array]) -> nnx.Linear:
    """One device plays all eight: the gradient of each shard at the same parameters, combined, then one update."""
    model, optimizer = fresh()
    grads = [nnx.grad(loss)(model, x, y) for x, y in shards]
    optimizer.update(model, jax.tree.map(combine, *grads))
    return model


def mean(*grads: jax.Array) -> jax.Array:
    return sum(grads) / len(grads)


# ---------------------------------------------------------------- ways that are wrong


def add(*grads: jax.Array) -> jax.Array:
    """Each loss is a mean already; the sum of eight means is a learning rate eight times as high."""
    return sum(grads)


def update_for_each_shard(shards: Shards) -> nnx.Linear:
    """Eight full steps, one after the other, on small batches."""
    model, optimizer = fresh()
    for x, y in shards:
        optimizer.update(model, nnx.grad(loss)(model, x, y))
    return model


def jit_of_objects(x: jax.Array, y: jax.Array) -> nnx.Linear:
    """`jax.jit` accepts NNX objects, but passes copies: it is the copy that learns. (`nnx.jit` would write it back.)"""
    model, optimizer = fresh()

    @jax.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return value

    step(model, optimizer, x, y)
    return model


# ---------------------------------------------------------------- shards of unequal length


def weighted_mean(shards: Shards) -> Callable[..., jax.Array]:
    """Every row counts the same, so a shard counts by its rows."""
    rows = [len(x) for x, _ in shards]
    return lambda *grads: sum(n * g for n, g in zip(rows, grads, strict=True)) / sum(rows)


def row_loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> Mean:
    """`Mean` keeps total and weight of each row apart, so shardwise can pad the batch and leave the padding out."""
    squares = (model(batch["x"]) - batch["y"]) ** 2  # (rows, 3)
    return Mean(squares, jnp.ones_like(squares))


def shardwise_step(mesh: Mesh, x: jax.Array, y: jax.Array) -> nnx.Linear:
    batch = {"x": np.asarray(x), "y": np.asarray(y)}
    spec = abstract_state(linear, SGD, mesh)
    step = make_train_step(spec, row_loss, batch)
    state, _ = step(init_state(spec, seed=0), step.place(batch))
    return spec.definition.merge(state.params, state.other, jax.random.key(0))


def recipe(mesh: str = "data=-1") -> Run:
    """The same step in a whole run: 60 rows a batch, whatever the number of devices."""
    x, y = make_rows()
    return Run(
        model=linear,
        loss=row_loss,
        optimizer=SGD,
        data=Batches({"x": x, "y": y}, batch_size=60),
        steps=20,
        mesh=mesh,
    )


# ---------------------------------------------------------------- the table


def error_of(mistake: Callable[[], Any]) -> str:
    try:
        mistake()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def vector(model: nnx.Linear) -> np.ndarray:
    return np.concatenate([np.ravel(model.kernel[...]), np.ravel(model.bias[...])])


def make_rows() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 2)
    return jax.random.normal(keys[0], (64, INPUTS)), jax.random.normal(keys[1], (64, OUTPUTS))


def main() -> dict[str, Any]:
    """{way: (length of the update beside the true one, largest deviation of a parameter)}, and {mistake: error}."""
    mesh = make_mesh("data=8", jax.devices()[:8])
    x, y = make_rows()
    start, figures = vector(fresh()[0]), {}

    def compare(truth: nnx.Linear, ways: dict[str, nnx.Linear]) -> None:
        for name, model in ways.items():
            length = np.linalg.norm(vector(model) - start) / np.linalg.norm(vector(truth) - start)
            figures[name] = float(length), float(np.abs(vector(model) - vector(truth)).max())
            print(f"  {name:52} {figures[name][0]:8.4f}x {figures[name][1]:10.1e}")

    print(f"{'64 rows, 8 on each of 8 devices':54} {'update':>9} {'deviation':>10}")
    shards = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    right = {
        "jax.jit of the global view": global_view(mesh, x, y),
        "shard_map, gradient of pmean(loss)": shard_mapped(mesh, x, y, average="loss"),
        "shard_map unchecked, pmean(gradients)": shard_mapped(
            mesh, x, y, average="gradients", check_vma=False
        ),
        "loop over shards, mean of gradients": loop_over_shards(shards, mean),
    }
    wrong = {
        "WRONG: shard_map, pmean(gradients)": shard_mapped(mesh, x, y, average="gradients"),
        "WRONG: shard_map unchecked, gradient of pmean(loss)": shard_mapped(
            mesh, x, y, average="loss", check_vma=False
        ),
        "WRONG: loop over shards, sum of gradients": loop_over_shards(shards, add),
        "WRONG: loop over shards, an update for each": update_for_each_shard(shards),
        "WRONG: jax.jit of NNX objects": jit_of_objects(x, y),
    }
    compare(one_device(x, y), right | wrong)

    print("60 rows, 4 on the last device")
    x, y, shards = x[:60], y[:60], [*shards[:7], (x[56:60], y[56:60])]
    unequal = {
        "weighted mean of gradients": loop_over_shards(shards, weighted_mean(shards)),
        "shardwise, padded": shardwise_step(mesh, x, y),
        "WRONG: mean of means": loop_over_shards(shards, mean),
    }
    compare(one_device(x, y), unequal)

    print("mistakes that are reported")
    errors = {
        "no wrt": error_of(lambda: nnx.Optimizer(linear(nnx.Rngs(0)), SGD)),
        "60 rows over 8 devices": error_of(lambda: shard_mapped(mesh, x, y, average="loss")),
    }
    for name, error in errors.items():
        print(f"  {name}: {error.splitlines()[0]}")
    return figures | errors


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
