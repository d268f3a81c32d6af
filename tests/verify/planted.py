"""Runs that are wrong on more than one device, each by one common mistake. The `good` are right.

The step of shardwise has no explicit reduction, so the mistakes are where a user can make them:
in a loss, a layer or an optimizer with `jax.shard_map`, and in data or weights made for a mesh.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardwise import Batches, Mean, Rules, Run, make_mesh

ROWS, WIDTH = 40, 32
ADAM = optax.adam(1e-2)
SMALL = Rules(fsdp_min_size=64)


def per_device(function, in_specs, out_specs, axis="data"):
    """Map `function` over the shards of a batch along an axis, if the mesh has that axis."""
    mesh = jax.sharding.get_abstract_mesh()
    mesh = (
        mesh
        if axis in mesh.shape
        else AbstractMesh((1,), (axis,), axis_types=(AxisType.Auto,))
    )
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={axis}
    )


def transformation(mesh, function, specs):
    """Return an optimizer part that maps `function` over the shards of the updates on a mesh."""
    devices = make_mesh(mesh, jax.devices()[: int(mesh.partition("=")[2])])

    def update(updates, state, params=None):
        return jax.shard_map(
            function, mesh=devices, in_specs=(specs,), out_specs=specs, check_vma=False
        )(updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Net(nnx.Module):
    def __init__(self, rngs, norm=None, dropout=None, scale=1.0):
        self.hidden = nnx.Linear(
            8, WIDTH, kernel_init=nnx.initializers.normal(scale), rngs=rngs
        )
        self.norm = norm(rngs) if norm is not None else None
        self.dropout = dropout(rngs) if dropout is not None else None
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.hidden(x))
        x = self.norm(x) if self.norm is not None else x
        x = self.dropout(x) if self.dropout is not None else x
        return self.out(x)[:, 0]


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def plain_loss(model, batch):
    return Mean(squares(model, batch), batch["w"])


def make(loss=plain_loss, model=Net, optimizer=ADAM, seed=0, mesh="data=-1"):
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 8)).astype("float32")
    data = {
        "x": x,
        "y": np.sin(3 * x).sum(1),
        "w": random.integers(1, 3, 400).astype("float32"),
    }
    return Run(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=Batches(data, ROWS, seed=seed),
        steps=100,
        mesh=mesh,
        rules=SMALL,
    )


def good() -> Run:
    """Right: with batch statistics, dropout, and a weight for each example."""
    norm, dropout = (
        lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs),
        lambda rngs: nnx.Dropout(0.2, rngs=rngs),
    )
    return make(model=lambda rngs: Net(rngs, norm, dropout))


def good_by_hand() -> Run:
    """Right: every device sums over its examples, and the sums over all devices are divided."""

    def loss(model, batch):
        def local(values, weights):
            return jax.lax.psum((values * weights).sum(), "data") / jax.lax.psum(
                weights.sum(), "data"
            )

        return per_device(local, (P("data"), P("data")), P())(
            squares(model, batch), batch["w"]
        )

    return make(loss)


def summed_loss() -> Run:
    """Wrong: the means of the devices are summed."""

    def loss(model, batch):
        return per_device(
            lambda values: jax.lax.psum(values.mean(), "data"), P("data"), P()
        )(squares(model, batch))

    return make(loss)


def summed_gradients() -> Run:
    """Wrong: the gradient of the (right) loss is summed over the devices."""

    def loss(model, batch):
        def local(values):
            total = jax.lax.psum(values.mean(), "data")
            return total - jax.lax.stop_gradient(
                total - jax.lax.pmean(values.mean(), "data")
            )

        return per_device(local, P("data"), P())(squares(model, batch))

    return make(loss)


def slightly_scaled() -> Run:
    """Wrong: on several devices the loss and every gradient are 0.05 % larger."""

    def loss(model, batch):
        devices = jax.sharding.get_abstract_mesh().shape.get("data", 1)
        return squares(model, batch).mean() * (1.0 if devices == 1 else 1.0005)

    return make(loss)


def summed_updates(mesh: str = "data=8") -> Run:
    """Wrong: the optimizer sums gradients that are those of the complete batch already."""
    add = transformation(mesh, lambda updates: jax.lax.psum(updates, "data"), P())
    return make(optimizer=optax.chain(add, optax.sgd(1e-2)), mesh=mesh)


class LocalNorm(nnx.Module):
    """BatchNorm over the examples of one device."""

    def __init__(self, rngs):
        self.scale, self.bias = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.zeros(WIDTH))
        self.mean, self.var = (
            nnx.BatchStat(jnp.zeros(WIDTH)),
            nnx.BatchStat(jnp.ones(WIDTH)),
        )
        self.use_running_average = False

    def __call__(self, x):
        def local(x):
            mean, var = x.mean(0), x.var(0)
            return (
                (x - mean) / jnp.sqrt(var + 1e-5),
                jax.lax.pmean(mean, "data"),
                jax.lax.pmean(var, "data"),
            )

        if self.use_running_average:
            x = (x - self.mean[...]) / jnp.sqrt(self.var[...] + 1e-5)
        else:
            x, mean, var = per_device(local, P("data"), (P("data"), P(), P()))(x)
            self.mean[...], self.var[...] = (
                0.9 * self.mean[...] + 0.1 * mean,
                0.9 * self.var[...] + 0.1 * var,
            )
        return x * self.scale + self.bias


class Counter(nnx.Module):
    """Counts batches, each once for every device."""

    def __init__(self, rngs):
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] += per_device(
            lambda x: jax.lax.psum(1.0 + 0 * x[0, 0], "data"), P("data"), P()
        )(x)
        return x


def counts_devices() -> Run:
    return make(model=lambda rngs: Net(rngs, norm=Counter))


def per_device_batch_norm() -> Run:
    return make(model=lambda rngs: Net(rngs, norm=LocalNorm))


class LocalDropout(nnx.Module):
    """Dropout for which every device draws its own mask."""

    def __init__(self, rngs):
        self.rngs = rngs.dropout.fork() if hasattr(rngs, "dropout") else rngs.fork()
        self.deterministic = False

    def __call__(self, x):
        if self.deterministic:
            return x

        def local(x, key):
            mask = jax.random.bernoulli(
                jax.random.fold_in(key, jax.lax.axis_index("data")), 0.8, x.shape
            )
            return jnp.where(mask, x / 0.8, 0)

        return per_device(local, (P("data"), P()), P("data"))(x, self.rngs())


def mesh_dropout() -> Run:
    return make(model=lambda rngs: Net(rngs, dropout=LocalDropout))


def mean_of_means() -> Run:
    """Wrong: a weighted mean on each device, then the mean of these, whatever their weights."""

    def loss(model, batch):
        def local(values, weights):
            return jax.lax.pmean((values * weights).sum() / weights.sum(), "data")

        return per_device(local, (P("data"), P("data")), P())(
            squares(model, batch), batch["w"]
        )

    return make(loss)


def lost_row() -> Run:
    """Wrong: every device drops the examples after its last block of four. 40 have none."""

    def loss(model, batch):
        def local(values):
            blocks = values[: len(values) // 4 * 4].reshape(-1, 4)
            return jax.lax.pmean(blocks.mean(), "data")

        return per_device(local, P("data"), P())(squares(model, batch))

    return make(loss)


def one_shard(mesh: str = "data=8") -> Run:
    """Wrong: only the first device applies its updates."""
    first = transformation(
        mesh,
        lambda updates: jax.tree.map(
            lambda u: u * (jax.lax.axis_index("data") == 0), updates
        ),
        P(),
    )
    return make(optimizer=optax.chain(ADAM, first), mesh=mesh)


def local_clipping(mesh: str = "fsdp=8") -> Run:
    """Wrong: gradients are clipped by the norm of the shard of a device."""
    cut = {
        "hidden": {"bias": P(), "kernel": P(None, "fsdp")},
        "out": {"bias": P(), "kernel": P()},
    }
    cut = cut if "fsdp" in mesh else P()

    def clip(updates):
        return jax.tree.map(
            lambda u: u * jnp.minimum(1.0, 1e-2 / optax.tree.norm(updates)), updates
        )

    return make(
        optimizer=optax.chain(transformation(mesh, clip, cut), optax.sgd(1.0)),
        mesh=mesh,
    )


def size_of_batch(accumulate: int = 1, rows: int = ROWS, last: int = 0) -> Run:
    """Wrong: the loss of an example is multiplied by the number of examples in the batch.

    Micro-batches and padded batches have another number.

    Args:
        accumulate: the number of micro-batches.
        rows: the number of examples in a batch.
        last: the number of examples in the last batch of an evaluation; 0 for no evaluation.
    """

    def loss(model, batch):
        values = squares(model, batch)
        return Mean(values * len(values) / ROWS)

    run = make(loss)
    source = run.data.source
    evaluation = jax.tree.map(lambda x: x[: ROWS + last], source.arrays)
    return replace(
        run,
        data=Batches(source, rows),
        accumulate=accumulate,
        eval_data=Batches(evaluation, ROWS) if last else None,
    )


def mesh_data(mesh: str = "data=1") -> Run:
    """Wrong: the seed of the shuffle depends on the mesh."""
    return make(seed=int(mesh.partition("=")[2]), mesh=mesh)


def mesh_weights(mesh: str = "data=1") -> Run:
    """Wrong: the scale of the initial weights depends on the number of devices."""
    devices = int(mesh.partition("=")[2])
    return make(model=lambda rngs: Net(rngs, scale=1 / devices), mesh=mesh)


class Reader(nnx.Module):
    """Adds position embeddings to tokens. Each shard of a sequence counts its own positions."""

    def __init__(self, rngs, shift):
        self.tokens = nnx.Embed(16, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(32, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.shift = shift

    def __call__(self, tokens):
        def positions(tokens):
            size = tokens.shape[1]
            first = jax.lax.axis_index("context") * (size - self.shift)
            return first + jnp.arange(size)

        at = per_device(positions, P(None, "context"), P("context"), "context")(tokens)
        return self.out(nnx.tanh(self.tokens(tokens) + self.positions(at)))


def reads(shift: int) -> Run:
    tokens = np.random.default_rng(0).integers(0, 16, (64, 33)).astype("int32")

    def loss(model, batch):
        logits = model(batch["inputs"])
        return Mean(
            optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        )

    return Run(
        model=lambda rngs: Reader(rngs, shift),
        loss=loss,
        optimizer=ADAM,
        data=Batches({"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}, 8),
        steps=100,
        rules=SMALL,
    )


def good_positions() -> Run:
    """Right: the positions of a shard follow those of the shard before it."""
    return reads(shift=0)


def shifted_positions() -> Run:
    """Wrong: the positions of a shard begin at the last one of the shard before it."""
    return reads(shift=1)
