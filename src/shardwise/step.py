"""The one training step, and the evaluation step beside it: pure, jitted, with every layout pinned.

The step is written for the global batch; XLA's partitioner cuts it. Three things are said explicitly, because left
alone they go wrong: parameters are gathered where the model uses them (so activations stay on the batch axes),
gradients are reduced straight into the layout of their parameter, and the state leaves in the layout it came in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.errors import ConfigError, DataError, ShardwiseError, where
from shardwise.flops import count_flops
from shardwise.metrics import Mean
from shardwise.module import AccessHook
from shardwise.optim.parts import evaluation_params, leaf_changes, live_values, norm
from shardwise.optim.read import read_chains
from shardwise.precision import sums_in_float32
from shardwise.sharding import activations_on, batch_spec, num_batch_shards, put
from shardwise.state import StateSpec, TrainState
from shardwise.tree import named_leaves

Batch = Any  # a pytree of arrays whose first dimension is the rows
Loss = Callable[[nnx.Module, Batch], Any]
# XLA's own kernels for products know nothing of the epilogues of cuBLAS, which add biases and residuals on the way. And where a scan
# over layers keeps a product, XLA would compute it twice: once for the layer, once into the stack of all layers.
# On CPUs that pass takes `optimization_barrier` away before XLA fuses: what stands before one would be computed again wherever it is read.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False},
    "cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"},
}
RESERVED = (
    "loss",
    "weight",
    "grad_norm",
    "clipped_norm",
    "update_norm",
    "param_norm",
    "finite",
    "skipped",
    "lr",
    "step",
)


@dataclass(frozen=True)
class BatchLayout:
    """How a host batch becomes arrays on the mesh, padded with copies of its last row where that is needed."""

    rows: int
    padded_rows: int
    sharding: NamedSharding

    def place(self, batch: Batch) -> Batch:
        """Starts the transfer of a batch; returns at once."""
        rows = self.check(batch)
        if rows == self.rows == self.padded_rows:
            return put(batch, self.sharding)
        # Where each row of the padded batch is in what this process has read.
        read = (
            np.arange(self.rows)
            if rows == self.rows
            else np.concatenate([np.arange(first, last) for first, last in self.ranges])
        )
        position = np.searchsorted(read, np.minimum(np.arange(self.padded_rows), self.rows - 1))

        def placed(x: np.ndarray) -> jax.Array:
            shape = (self.padded_rows, *x.shape[1:])

            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                return x[position[index[0]]][(slice(None), *index[1:])]

            return jax.make_array_from_callback(shape, self.sharding, piece)

        return jax.tree.map(placed, batch)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The rows that the devices of this process need, as few ranges as possible; those of padding are copies of the last."""
        needed = np.zeros(self.padded_rows, bool)
        for index in self.sharding.addressable_devices_indices_map((self.padded_rows,)).values():
            needed[index] = True
        needed[self.rows - 1] |= needed[self.rows :].any()
        edges = np.flatnonzero(np.diff(needed[: self.rows], prepend=False, append=False)).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def check(self, batch: Batch) -> int:
        """The number of rows that were read: all of them, or those that are needed here."""
        own = sum(last - first for first, last in self.ranges)
        for rows in (self.rows, own):
            if all(x.shape[0] == rows for x in jax.tree.leaves(batch)):
                return rows
        shapes = {name: leaf.shape for name, leaf in named_leaves(batch).items()}
        raise DataError(
            f"a batch has rows {shapes}; this run was compiled for {self.rows} rows a batch."
        )

    def mask(self) -> jax.Array | None:
        """Which rows count; None when all do."""
        return None if self.padded_rows == self.rows else jnp.arange(self.padded_rows) < self.rows

    def abstract(self, batch: Batch) -> Batch:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.padded_rows, *x.shape[1:]), _device_dtype(x), sharding=self.sharding
            ),
            batch,
        )


@dataclass(frozen=True)
class TrainStep:
    """`step(state, batch) -> (state, metrics)`. The state that goes in is donated: its arrays are gone afterwards.

    To keep a state, copy it before: `jax.tree.map(jnp.copy, state)`.
    """

    function: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]  # jitted
    layout: BatchLayout
    spec: StateSpec
    batch: Batch  # abstract
    # The two halves of the step, each jitted alone and donating nothing: `update(state, *gradients(state, batch))` is the step.
    gradients: Callable[
        [TrainState, Batch], tuple[Any, dict[str, Mean], Any]
    ]  # gradients, means of the loss, other variables
    update: Callable[
        [TrainState, Any, dict[str, Mean], Any], tuple[TrainState, dict[str, jax.Array]]
    ]
    traced: "TracedLoss"

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return self.function(state, batch)

    def place(self, batch: Batch) -> Batch:
        return self.layout.place(batch)

    def trace(self) -> Any:
        """The step traced for its abstract state, ready for `.lower().compile()`; allocates nothing."""
        return self.function.trace(self.spec.abstract, self.batch)  # type: ignore[attr-defined]

    def lower(self) -> Any:
        return self.trace().lower()


def make_train_step(
    spec: StateSpec,
    loss: Loss,
    batch: Batch,
    *,
    seed: int = 0,
    accumulate: int = 1,
    compute_dtype: Any = None,
    norms: bool = False,
) -> TrainStep:
    """Builds the step for batches like `batch` (arrays or shapes). Compiles nothing yet.

    seed: root of every random stream; the streams of step n are those of (seed, path of the stream, n).
    accumulate: the batch is worked off in this many parts, one after the other; the result is that of the whole.
    compute_dtype: the dtype in which the model sees its parameters, such as "bfloat16"; None leaves them alone.
    norms: also measure updates and parameters, and all three for each group of the optimizer; GPT-2 124M is 1 % slower for it.
    """
    traced = _trace_loss(spec, loss, batch)
    layout = _train_layout(spec, traced, accumulate)
    hooks = access_hooks(spec, compute_dtype)
    optimizer = optax.with_extra_args_support(spec.optimizer)
    groups = (
        {
            path: chain.groups
            for path, chain in read_chains(spec.optimizer, spec.abstract.params).items()
        }
        if norms
        else {}
    )
    micro_sharding = spec.sharding(PartitionSpec(None, *layout.sharding.spec))

    def objective(
        params: Any, frozen: Any, other: Any, rows: Batch, mask: Any, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        model = spec.definition.merge(params, other, key, hooks, frozen)
        with activations_on(spec.mesh, spec.rules):
            means = as_means(loss(model, rows), num_rows(rows), mask)
        return means["loss"].total, (means, spec.definition.read_other(model))

    gradient = sums_in_float32(jax.grad(objective, has_aux=True))

    def accumulated(
        params: Any, frozen: Any, other: Any, rows: Batch, mask: Any, key: jax.Array
    ) -> Any:
        """The sums of `gradient` over the parts; row i goes to part i % accumulate, which moves no row off its device."""

        def parts(x: jax.Array) -> jax.Array:
            x = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1)
            return with_sharding_constraint(x, micro_sharding)

        def one(carry: Any, part: Any) -> Any:
            sums, other = carry
            index, (rows, mask) = part
            grads, (means, other) = gradient(
                params, frozen, other, rows, mask, jax.random.fold_in(key, index)
            )
            return (jax.tree.map(jnp.add, sums, (grads, means)), other), None

        split = jax.tree.map(parts, (rows, mask))
        first = jax.tree.map(lambda x: x[0], split)
        grads, (means, _) = jax.eval_shape(gradient, params, frozen, other, *first, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (grads, means))
        zeros = (with_sharding_constraint(zeros[0], spec.shardings.params), zeros[1])
        ((grads, means), other), _ = jax.lax.scan(
            one, (zeros, other), (jnp.arange(accumulate), split)
        )
        return grads, (means, other)

    def gradients(state: TrainState, rows: Batch) -> tuple[Any, dict[str, Mean], Any]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        compute = gradient if accumulate == 1 else accumulated
        grads, (means, other) = compute(
            state.params, state.frozen, state.other, rows, layout.mask(), key
        )
        grads = jax.tree.map(lambda g: g / means["loss"].weight.astype(g.dtype), grads)
        return with_sharding_constraint(grads, spec.shardings.params), means, other

    def update(
        state: TrainState, grads: Any, means: dict[str, Mean], other: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        grad_norm = norm(grads)
        value = means["loss"].value
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, value=value, grad=grads
        )
        if changes := leaf_changes(
            state.opt_state, opt_state
        ):  # while tracing: before anything is compiled
            raise ConfigError(
                "the state of the optimizer changes at an update, so it can be neither compiled once nor saved:\n  "
                + "\n  ".join(changes[:5])
                + "\nKeep float32 parameters, or wrap it: shardwise.optim.with_master(optimizer)."
            )
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
        kept = (
            keep(params, state.params),
            keep(other, state.other),
            keep(opt_state, state.opt_state),
        )
        new_state = TrainState(state.step + 1, *kept, state.frozen)
        metrics = {name: mean.value for name, mean in means.items()}
        metrics |= {
            "weight": means["loss"].weight,
            "grad_norm": grad_norm,
            "finite": finite,
            **live_values(opt_state),
        }
        if norms:
            # Of the new parameters: reading the old ones beside would keep them from being overwritten in place.
            metrics |= _norms(
                {"grad_norm": grads, "update_norm": updates, "param_norm": params}, groups
            )
        return new_state, metrics

    def step(state: TrainState, rows: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return update(state, *gradients(state, rows))

    whole, stored, batch_sharding = spec.sharding(PartitionSpec()), spec.shardings, layout.sharding
    halves = (stored.params, whole, stored.other)
    function = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(stored, batch_sharding),
        out_shardings=(stored, whole),
        compiler_options=COMPILER_OPTIONS.get(spec.mesh.devices.flat[0].platform),
    )
    return TrainStep(
        function,
        layout,
        spec,
        layout.abstract(batch),
        gradients=jax.jit(gradients, in_shardings=(stored, batch_sharding), out_shardings=halves),
        update=jax.jit(update, in_shardings=(stored, *halves), out_shardings=(stored, whole)),
        traced=traced,
    )


@dataclass(frozen=True)
class EvalStep:
    """`step(state, batch) -> {name: Mean}`, summed over the batch; the model is in evaluation mode."""

    function: Callable[..., dict[str, Mean]]  # jitted
    spec: StateSpec
    pads: bool

    def __call__(self, state: TrainState, batch: Batch, rows: int) -> dict[str, Mean]:
        """A host batch of up to `rows` rows. A shorter one is padded, or compiled for its own size if the loss gives no weights."""
        return self.on(state, batch, self.layout(num_rows(batch), rows))

    def layout(self, size: int, rows: int) -> BatchLayout:
        """How a batch of `size` rows is placed among others of up to `rows`."""
        if size > rows:
            raise DataError(
                f"a batch of {size} rows came after one of {rows}; give evaluate(..., rows={size}) the largest."
            )
        shards = num_batch_shards(self.spec.mesh, self.spec.rules)
        padded = -(-rows // shards) * shards if self.pads else size
        spec = (
            batch_spec(self.spec.mesh, self.spec.rules) if padded % shards == 0 else PartitionSpec()
        )
        return BatchLayout(size, padded, self.spec.sharding(spec))

    def on(self, state: TrainState, batch: Batch, layout: BatchLayout) -> dict[str, Mean]:
        """A host batch, or the rows of it that this process needs, placed like that."""
        mask = (
            put(np.arange(layout.padded_rows) < layout.rows, layout.sharding) if self.pads else None
        )
        return self.function(state, layout.place(batch), mask)


def make_eval_step(
    spec: StateSpec,
    loss: Loss,
    batch: Batch,
    *,
    compute_dtype: Any = None,
    traced: "TracedLoss | None" = None,
) -> EvalStep:
    """Builds the evaluation of `loss` for batches like `batch`, on the average of the weights if the optimizer keeps one.

    Random streams, if any are left, are the same each time.
    traced: what a training step with the same loss has found; for batches of the same shapes the loss is not traced again.
    """
    hooks = access_hooks(spec, compute_dtype)

    def step(state: TrainState, rows: Batch, mask: Any) -> dict[str, Mean]:
        params = evaluation_params(state.opt_state, state.params)
        model = spec.definition.merge(params, state.other, jax.random.key(0), hooks, state.frozen)
        model.eval()
        with activations_on(spec.mesh, spec.rules):
            return as_means(loss(model, rows), num_rows(rows), mask)

    function = jax.jit(step, out_shardings=spec.sharding(PartitionSpec()))
    if traced is None or traced.shapes != _shapes(batch):
        traced = _trace_loss(spec, loss, batch)
    return EvalStep(function, spec, pads=not traced.scalars)


def as_means(output: Any, rows: int, mask: Any = None) -> dict[str, Mean]:
    """What a loss returned, as summed means: the loss itself under "loss", then its further metrics."""
    named = _named(output)
    if clash := [name for name in list(named)[1:] if name in RESERVED]:
        raise ConfigError(
            f"the loss returns metrics named {', '.join(clash)}; these names are taken ({', '.join(RESERVED)})."
        )
    means = {}
    for name, value in named.items():
        if isinstance(value, Mean):
            means[name] = value.summed(mask)
        elif jnp.ndim(value) == 0:
            means[name] = Mean(jnp.asarray(value, jnp.float32) * rows, jnp.float32(rows))
        else:
            raise ConfigError(
                f"the loss returned an array of shape {jnp.shape(value)} for '{name}'. Return a scalar, "
                f"or Mean(total, weight) with an entry for each row."
            )
    return means


def _norms(trees: dict[str, Any], groups: dict[str, tuple[str, ...]]) -> dict[str, jax.Array]:
    """The norm of each tree, and of each group of its leaves, those within groups included."""
    found = {}
    for name, tree in trees.items():
        leaves = named_leaves(tree)
        prefixes = sorted(
            {groups[path][:depth] for path in leaves for depth in range(len(groups[path]) + 1)}
        )
        for prefix in prefixes:
            found["/".join([name, *prefix])] = norm(
                {
                    path: leaf
                    for path, leaf in leaves.items()
                    if groups[path][: len(prefix)] == prefix
                }
            )
    return found


def access_hooks(spec: StateSpec, compute_dtype: Any = None) -> dict[str, AccessHook]:
    """For each variable, the function that its value passes through wherever the model reads it."""
    dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)
    weights = {**spec.params, **spec.frozen}
    hooks = {
        path: _gather_hook(spec, p.shape, p.spec, spec.at_use(path).spec, dtype)
        for path, p in weights.items()
    }
    return hooks | {
        path: _gather_hook(spec, p.shape, p.spec, PartitionSpec(), None)
        for path, p in spec.other.items()
    }


def _gather_hook(
    spec: StateSpec, full: tuple[int, ...], stored: PartitionSpec, used: PartitionSpec, dtype: Any
) -> AccessHook:
    """Forward: cast, then gather. Backward: cast back, and reduce straight into the stored layout."""

    def hook(variable: Any, value: jax.Array) -> jax.Array:
        is_cast = (
            dtype is not None
            and jnp.issubdtype(value.dtype, jnp.floating)
            and not variable.get_metadata("keep_dtype", False)
        )
        cast = dtype if is_cast else value.dtype
        used_here, stored_here = (_sliced(layout, full, value.shape) for layout in (used, stored))

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return with_sharding_constraint(x.astype(cast), spec.sharding(used_here))

        def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
            g = with_sharding_constraint(g.astype(value.dtype), spec.sharding(used_here))
            return (with_sharding_constraint(g, spec.sharding(stored_here)),)

        gather.defvjp(lambda x: (gather(x), None), backward)
        return gather(value)

    return hook


def _sliced(layout: PartitionSpec, full: tuple[int, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """The layout of a variable, for the part of it that a model reads: without the leading dims that a scan over
    layers takes off, and whole along each dim that was sliced to another size."""
    entries = (*layout, *(None,) * (len(full) - len(layout)))
    lost = max(len(full) - len(shape), 0)
    if len(shape) > len(full):
        return PartitionSpec()
    return PartitionSpec(
        *(e if a == b else None for e, a, b in zip(entries[lost:], full[lost:], shape, strict=True))
    )


def _train_layout(spec: StateSpec, traced: "TracedLoss", accumulate: int) -> BatchLayout:
    """Checks the batch against the mesh, and decides whether it must and may be padded."""
    rows = num_rows(traced.shapes)
    shards = num_batch_shards(spec.mesh, spec.rules)
    if accumulate < 1 or accumulate > rows:
        raise ConfigError(
            f"accumulate={accumulate} does not split a batch of {rows} rows; it must be between 1 and {rows}."
        )
    unit = shards * accumulate
    padded = -(-rows // unit) * unit
    scalars = traced.scalars
    if padded != rows:
        what = f"a batch of {rows} rows is not divisible by {unit} ({shards} shards of the batch x accumulate={accumulate})"
        remedy = f"Use a batch of {' or '.join(map(str, sorted({max(padded - unit, unit), padded})))} rows"
        if scalars:
            names = " and ".join(repr(name) for name in scalars)
            raise ConfigError(
                f"{what}. {remedy}, or let the loss return Mean(total, weight) with an entry for each row for {names}: "
                f"then it can be padded."
            )
        if spec.other:
            first = next(iter(spec.other))
            raise ConfigError(
                f"{what}, and padding would enter the statistics that the model keeps ('{first}'). {remedy}."
            )
    return BatchLayout(rows, padded, spec.sharding(batch_spec(spec.mesh, spec.rules)))


@dataclass(frozen=True)
class TracedLoss:
    """What a trace tells of a loss, before anything is compiled."""

    shapes: Batch  # of the batch that it was traced for
    names: tuple[str, ...]  # "loss" and those of further metrics
    scalars: tuple[str, ...]  # those that come without an entry for each row
    flops: float  # of a forward pass
    items: (
        int | None
    )  # what its weights of a batch add up to, masks aside; None if only computing tells


def _trace_loss(spec: StateSpec, loss: Loss, batch: Batch) -> TracedLoss:
    shapes = _shapes(batch)
    rows = num_rows(batch)
    found: list[tuple[list[str], list[str], int | None]] = []

    def forward(state: TrainState, batch: Batch, key: jax.Array) -> Any:
        output = loss(spec.module(state, key), batch)
        means = as_means(output, rows)  # raises for what is no loss
        scalars = [
            name
            for name, value in _named(output).items()
            if not (isinstance(value, Mean) and value.has_rows(rows))
        ]
        value = _named(output)["loss"]
        found.append((list(means), scalars, value.items if isinstance(value, Mean) else rows))
        return means

    try:
        flops = count_flops(forward, spec.abstract, shapes, jax.random.key(0))
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the loss cannot be computed for a batch of {_show_batch(batch)}: {where(error)}"
        ) from error
    names, scalars, items = found[-1]
    return TracedLoss(shapes, tuple(names), tuple(scalars), flops, items)


def _shapes(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _device_dtype(x)), batch)


def _show_batch(batch: Batch) -> str:
    return ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named_leaves(batch).items())


def _named(output: Any) -> dict[str, Any]:
    loss, extra = output if isinstance(output, tuple) else (output, {})
    return {"loss": loss, **extra}


def num_rows(batch: Batch) -> int:
    """The rows that all arrays of a batch have in common."""
    leaves = named_leaves(batch)
    rows = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves.values()}
    if len(rows) != 1 or 0 in rows:
        raise DataError(
            f"the arrays of a batch must have the same number of rows, at least 1: { {n: x.shape for n, x in leaves.items()} }."
        )
    return int(rows.pop())


def _device_dtype(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype)
