"""The training step: pure functions, jitted, with explicit shardings.

`make_train_step` builds the step from four parts, which are written below in this order:

1. `objective`: merge the arrays into the NNX model and call the user's loss.
2. `gradients`: differentiate the objective, over the whole batch or summed over micro-batches.
3. `update`: apply the Optax update, unless a value is non-finite.
4. `jax.jit`, with the state donated; `TrainStep.compile` compiles it before the first batch.

The step is written for the global batch, and XLA's partitioner distributes it. It uses
neither `shard_map` nor `pmean`, so no reduction can be wrong. Three shardings are explicit,
because the partitioner does not choose them reliably: parameters are gathered where the model uses
them, so that activations stay sharded over the batch axes; gradients are reduced directly into the
sharding of their parameter; and the state is returned with the shardings that it came with.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from shardwise.data.layout import BatchLayout, num_rows
from shardwise.errors import CheckError, ConfigError, where
from shardwise.kernels.float8 import with_float8_matmuls
from shardwise.loss import Loss, LossValue, TracedLoss, as_means, call_loss, settle_loss
from shardwise.metrics import Mask, Mean
from shardwise.module import AccessHook, Pure
from shardwise.optim.finite import all_finite, representative_leaves, stays_finite
from shardwise.optim.matrices import parameters_stored_as
from shardwise.optim.parts import compute_updates, leaf_changes, live_values, norm
from shardwise.optim.read import read_chains
from shardwise.precision import OwnSum, sums_in_float32
from shardwise.state import StateSpec, TrainState
from shardwise.step.access import access_hooks
from shardwise.step.accumulate import accumulated
from shardwise.step.checks import (
    CoupledExamples,
    MatmulDtype,
    check_accumulate,
    check_matmul_dtype,
    check_pipeline,
    train_layout,
)
from shardwise.step.deterministic import (
    OPTIONS,
    DeterministicJit,
    adapt,
    deterministic_jit,
    explained,
    needs_options,
    sum_rows_in_order,
)
from shardwise.step.fsdp import scatter_gradients
from shardwise.tracing.assertions import (
    NOT_FUNCTIONALIZED,
    Failure,
    describe_failure,
    failure_as_aux,
)
from shardwise.tree import Batch, Params, PyTree, named_leaves

Metrics: TypeAlias = dict[str, jax.Array]
Means: TypeAlias = dict[str, Mean]
# Gradients like the parameters, the summed means of the loss, and the new variables that are not
# parameters (batch statistics).
Gradients: TypeAlias = tuple[Params, Means, Pure]
# The new state, its metrics, and the failed check if the loss has checks.
StepResult: TypeAlias = tuple[TrainState, Metrics, Failure | None]


@dataclass(frozen=True)
class TrainStep:
    """A training step: `step(state, batch)` returns the new state and its metrics.

    The state argument is donated: its arrays are deleted. To keep a state, copy it first with
    `jax.tree.map(jnp.copy, state)`.

    `step.update(state, *step.gradients(state, batch))` computes the same in two halves, which are
    jitted separately and donate nothing. `shardwise verify` compares meshes half by half.

    If the model or the loss has checks (`checkify.check`, value assertions of chex), a call waits
    for the step and raises `CheckError` if one failed. Then the update is not applied.

    Attributes:
        function: the function that a call runs: the jitted step, or after `compile` the compiled
            program. It also returns which check failed; None for a loss without checks.
        layout: size and sharding of the batches.
        spec: the state that the step takes and returns.
        batch: shapes, dtypes and shardings of a batch on the mesh.
        gradients: the first half, from state and batch to gradients, means of the loss, and new
            variables that are not parameters.
        update: the second half, from state and the results of `gradients` to new state and metrics.
        traced: facts about the loss.
        program: the compiled program; None before `compile`.

    Example:
        >>> step = make_train_step(spec, loss, batches(0))
        >>> state, metrics = step(init_state(spec, seed=0), step.place(batches(0)))
    """

    function: Callable[[TrainState, Batch], StepResult]
    layout: BatchLayout
    spec: StateSpec
    batch: Batch
    gradients: Callable[[TrainState, Batch], Gradients]
    update: Callable[[TrainState, Params, Means, Pure], tuple[TrainState, Metrics]]
    traced: TracedLoss
    program: jax.stages.Compiled | None = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one step. `batch` is on the mesh already, see `place`.

        It raises `CheckError` if a check in the model or the loss failed.
        """
        state, metrics, failure = _call(self.function, state, batch)
        if failure is not None:
            _raise_failed(failure, state, metrics)
        return state, metrics

    def place(self, batch: Batch) -> Batch:
        """Start the transfer of a host batch to the devices and return at once."""
        return self.layout.place(batch)

    def trace(self) -> jax.stages.Traced:
        """Trace the step for its abstract state and batch; not available after `compile`."""
        jitted = cast(jax.stages.Wrapped | DeterministicJit, self.function)
        with _clear_errors():
            return jitted.trace(self.spec.abstract, self.batch)

    def lower(self, traced: jax.stages.Traced | None = None) -> jax.stages.Lowered:
        """Trace and lower the step; not available after `compile`.

        Args:
            traced: the result of `trace`, if the caller has it already.
        """
        with _clear_errors():
            lowered: jax.stages.Lowered = (traced or self.trace()).lower()
        return adapt(self.function, lowered)

    def compile(self, lowered: jax.stages.Lowered | None = None) -> "TrainStep":
        """Compile the step ahead of time.

        Args:
            lowered: the result of `lower`, if the caller has it already.

        Returns:
            The step with `program` set. It runs the program, and falls back to the jitted function,
            which compiles again, for a batch of another shape.
        """
        jitted = self.function
        with explained(jitted):
            program = (lowered or self.lower()).compile()

        def run_program(state: TrainState, batch: Batch) -> StepResult:
            try:
                result: StepResult = program(state, batch)
            except TypeError:
                # The program refuses arguments of other shapes before it donates anything.
                return jitted(state, batch)
            return result

        return replace(self, function=run_program, program=program)


@dataclass(frozen=True, eq=False)
class _StepFunctions:
    """The pure functions of a training step, in the order in which they are composed.

    Attributes:
        optimizer: the optimizer of `spec`, with support for extra arguments of `update`.
        hooks: functions that parameters pass through where the model reads them, by name.
        groups: the optimizer groups of each parameter, outermost first; None to omit norms.
        sums: the scalars of the loss that are sums over the examples.
        checked: parameters whose updates are checked for non-finite values; None for all.
        is_separate: whether each micro-batch counts as a batch, see `Run.coupled_examples`.
        has_checks: whether the model or the loss has value assertions.
        own_sum: computes sums in a fixed order on a GPU; None leaves all sums to XLA.
        matmul_dtype: see `Run.matmul_dtype`.
    """

    spec: StateSpec
    loss: Loss
    layout: BatchLayout
    optimizer: optax.GradientTransformationExtraArgs
    hooks: Mapping[str, AccessHook]
    seed: int
    accumulate: int
    groups: Mapping[str, tuple[str, ...]] | None
    sums: tuple[str, ...]
    checked: tuple[str, ...] | None
    is_separate: bool
    has_checks: bool
    own_sum: OwnSum | None
    matmul_dtype: MatmulDtype | None

    def objective(
        self,
        params: Params,
        frozen: Params,
        other: Pure,
        batch: Batch,
        mask: Mask | None,
        key: jax.Array,
        step: jax.Array,
        is_part: bool = False,
    ) -> tuple[jax.Array, tuple[Means, Pure]]:
        """Return what is differentiated, and the rest as auxiliary output.

        Args:
            params: the trained parameters.
            frozen: the frozen parameters.
            other: all other variables.
            batch: the batch, or a micro-batch.
            mask: False for padding.
            key: the root key of the random streams.
            step: the number of steps before this one.
            is_part: whether this is a part of the batch. Then it is the total that is
                differentiated, because micro-batches must add up before they are divided by the
                weight of all of them. Otherwise it is the loss.
        """

        def forward(
            model: nnx.Module, other: Pure, *args: PyTree
        ) -> tuple[LossValue, Pure]:
            output = call_loss(self.loss, model, *args)
            return output, self.spec.definition.read_other(model, other)

        args = ((params, frozen, other), batch, key, step)
        output, new_other = self.spec.call(forward, *args, hooks=self.hooks)
        parts = self.accumulate
        means = as_means(output, num_rows(batch), mask, sums=self.sums, parts=parts)
        loss = means["loss"]
        if is_part:
            objective = jnp.asarray(loss.total)
        else:
            # The gradient of total / weight, also if the weight depends on the parameters. The
            # division comes first, because custom gradients may not be linear (clipping).
            weight = jax.lax.stop_gradient(loss.weight)
            value = jax.lax.stop_gradient(loss.value)
            objective = jnp.asarray((loss.total - value * loss.weight) / weight)
        return objective, (means, new_other)

    def gradients(
        self, state: TrainState, batch: Batch
    ) -> tuple[Gradients, Failure | None]:
        """Return the gradients of the mean loss, sharded like the parameters.

        The second result is the failed check; None for a loss without checks.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        is_part = self.accumulate > 1 and not self.is_separate
        objective: Callable[..., PyTree] = partial(self.objective, is_part=is_part)
        if self.matmul_dtype is not None:
            # The arguments `params` and `frozen`.
            objective = with_float8_matmuls(objective, weights=(0, 1))
        checked = failure_as_aux(objective, self.has_checks)
        gradient = scatter_gradients(jax.grad(checked, has_aux=True), self.spec)
        gradient = sums_in_float32(gradient, self.own_sum)
        if self.accumulate > 1:
            gradient = accumulated(
                gradient, self.spec, self.layout, self.accumulate, self.is_separate
            )
        mask = self.layout.mask()
        grads, ((means, other), failure) = gradient(
            state.params, state.frozen, state.other, batch, mask, key, state.step
        )
        grads = with_sharding_constraint(grads, self.spec.shardings.params)
        return (grads, means, other), failure

    def update(
        self,
        state: TrainState,
        grads: Params,
        means: Means,
        other: Pure,
        failed: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Apply the optimizer, and return the new state and the metrics of the step.

        If anything that would enter the state is non-finite, or the loss is, or a check has failed,
        then parameters, optimizer state and other variables stay as they are. The step still
        counts, because its batch is consumed: `state.step` is the position in the data.
        """
        grad_norm = norm(grads)
        value = means["loss"].value
        with parameters_stored_as(self.spec.shardings.params):
            updates, opt_state = compute_updates(
                self.optimizer, grads, state.opt_state, state.params, value
            )
        _check_opt_state(state.opt_state, opt_state)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        finite &= all_finite(updates, self.checked) & stays_finite(state.other, other)
        if self.checked is None:
            finite &= stays_finite(state.opt_state, opt_state)
        is_good = finite if failed is None else finite & ~failed
        new_state = TrainState(
            state.step + 1,
            _select(is_good, params, state.params),
            _select(is_good, other, state.other),
            _select(is_good, opt_state, state.opt_state),
            state.frozen,
        )
        metrics = {name: mean.value for name, mean in means.items()}
        metrics["weight"] = jnp.asarray(means["loss"].weight)
        metrics["grad_norm"] = grad_norm
        metrics["finite"] = finite
        metrics |= live_values(opt_state)
        if self.groups is not None:
            # Of the new parameters: if the old ones were read too, XLA could not update them in
            # place.
            metrics |= _group_norms(grads, updates, params, self.groups)
        return new_state, metrics

    def step(self, state: TrainState, batch: Batch) -> StepResult:
        """Run one training step: gradients, then update."""
        gradients, failure = self.gradients(state, batch)
        failed = None if failure is None else failure[0]
        return (*self.update(state, *gradients, failed), failure)


# XLA options of the training step, by platform.
#
# gpu: XLA's Triton kernels cannot fuse the epilogues of cuBLAS, which add biases and residuals to
# the output of a matmul. Once XLA has considered a Triton kernel, even the cuBLAS matmul that wins
# has no epilogue. Dynamic-slice fusion is off because XLA would compute a matmul twice that a scan
# over layers saves: once for the layer, and once into the stack of all layers.
#
# cpu: the pass `cse_barrier_expander` removes `optimization_barrier` before XLA fuses. XLA then
# computes everything before the barrier again in each fusion that reads it, and the work of a GPT
# grows with the square of its layers (see `kernels.norm.stream_barrier`). The option is used only
# for a loss that calls that function: other models, also with barriers of their own, are compiled
# exactly as plain JAX compiles them. XLA for CPUs (jax 0.12.0) cannot compile a barrier that it
# keeps inside a small loop ("Unhandled opcode for elemental IR emission: opt-barrier").
COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    "gpu": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_dynamic_slice_fusion": False,
    },
    "cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"},
}


def compiler_options(
    platform: str, traced: TracedLoss, deterministic: bool = False
) -> dict[str, bool | str] | None:
    """Return the XLA options for a step with this loss, or None."""
    options = dict(COMPILER_OPTIONS.get(platform, {}))
    if platform == "cpu" and not traced.has_barrier:
        options = {}
    if deterministic:
        options |= OPTIONS
    return options or None


def make_train_step(
    spec: StateSpec,
    loss: Loss,
    batch: Batch,
    *,
    seed: int = 0,
    accumulate: int = 1,
    coupled_examples: CoupledExamples = "exact",
    microbatches: int | None = None,
    rounds: int = 1,
    compute_dtype: DTypeLike | None = None,
    matmul_dtype: MatmulDtype | None = None,
    norms: bool = False,
    deterministic: bool = True,
) -> TrainStep:
    """Build the training step. The loss is traced and checked; nothing is compiled.

    Args:
        spec: the abstract state, see `abstract_state`.
        loss: `loss(model, batch)`, see `LossValue` for what it may return.
        batch: a batch, as arrays or shapes. All batches of the run have these shapes.
        seed: the root of all random streams. A stream of step n depends on (seed, path of the
            stream, n).
        accumulate: the number of micro-batches that a batch is split into, to save memory.
        coupled_examples: see `Run.coupled_examples`.
        microbatches: see `Run.microbatches`. None chooses it.
        rounds: see `Run.rounds`.
        compute_dtype: the dtype in which the model computes, for example "bfloat16", see
            `precision.compute_in`. Batch, parameters and optimizer state keep their own dtypes.
        matmul_dtype: the dtype of the operands of large matmuls, see `Run.matmul_dtype`.
        norms: add norms of updates and parameters to the metrics, also for each parameter group.
        deterministic: compute the same bits every time on a GPU too, see `step.deterministic`.

    Raises:
        ConfigError: if the loss fails, or if the batch size does not fit the mesh and cannot be
            padded.

    Example:
        >>> spec = abstract_state(model, optax.adamw(1e-3), make_mesh("data=8"))
        >>> step = make_train_step(spec, loss, batches(0), accumulate=4, compute_dtype="bfloat16")
    """
    spec = spec.computing_in(compute_dtype)
    spec, traced = settle_loss(spec, loss, batch)
    check_pipeline(spec, loss, traced, coupled_examples)
    traced = check_matmul_dtype(spec, loss, traced, matmul_dtype)
    spec, layout = train_layout(spec, loss, traced, accumulate, microbatches, rounds)
    traced, sums = check_accumulate(spec, loss, traced, accumulate, coupled_examples)
    platform = spec.mesh.devices.flat[0].platform
    is_deterministic = needs_options(spec.mesh, deterministic)
    functions = _StepFunctions(
        spec=spec,
        loss=loss,
        layout=layout,
        optimizer=optax.with_extra_args_support(spec.optimizer),
        hooks=access_hooks(spec, compute_dtype),
        seed=seed,
        accumulate=accumulate,
        groups=_parameter_groups(spec) if norms else None,
        sums=sums,
        is_separate=coupled_examples == "separate",
        has_checks=traced.has_checks,
        own_sum=sum_rows_in_order if is_deterministic else None,
        matmul_dtype=matmul_dtype,
        checked=representative_leaves(
            spec.optimizer, spec.abstract.params, spec.abstract.opt_state
        ),
    )
    stored = spec.shardings
    replicated = spec.sharding(PartitionSpec())
    halves = (stored.params, replicated, stored.other)
    make_jit: Callable[..., Callable[..., PyTree]] = (
        deterministic_jit if is_deterministic else jax.jit
    )
    jit = partial(
        make_jit,
        in_shardings=(stored, layout.shardings(batch)),
        compiler_options=compiler_options(platform, traced, is_deterministic),
    )
    return TrainStep(
        function=jit(
            functions.step,
            donate_argnums=0,
            out_shardings=(stored, replicated, replicated),
        ),
        layout=layout,
        spec=spec,
        batch=layout.abstract(batch),
        gradients=_raising(
            jit(functions.gradients, out_shardings=(halves, replicated))
        ),
        update=jax.jit(
            functions.update,
            in_shardings=(stored, *halves),
            out_shardings=(stored, replicated),
        ),
        traced=traced,
    )


def _call(
    function: Callable[[TrainState, Batch], StepResult], state: TrainState, batch: Batch
) -> StepResult:
    """Run a step, and raise the error that a user should see for some of JAX's."""
    # Not with `_clear_errors`: a context costs microseconds of every step.
    try:
        return function(state, batch)
    except (NotImplementedError, ValueError) as error:
        _raise_clear(error)
        raise


def _raising(
    gradients: Callable[[TrainState, Batch], tuple[Gradients, Failure | None]],
) -> Callable[[TrainState, Batch], Gradients]:
    """Return the first half of a step with a failed check as an exception."""

    def raising(state: TrainState, batch: Batch) -> Gradients:
        result, failure = gradients(state, batch)
        if failure is not None:
            after = replace(state, step=state.step + 1)
            _raise_failed(failure, after, {"loss": result[1]["loss"].value})
        return result

    return raising


def _raise_failed(failure: Failure, state: TrainState, metrics: Metrics) -> None:
    """Wait for a step, and raise if one of its checks failed.

    Args:
        failure: the check that failed, if any.
        state: the state after the step.
        metrics: the metrics of the step.
    """
    failed, error = failure
    if failed:
        raise CheckError(
            f"step {int(state.step)}: check failed: {describe_failure(error)}. The update was not "
            "applied.",
            state,
            metrics,
        )


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Raise the error that a user should see for some of JAX's."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        _raise_clear(error)
        raise


def _raise_clear(error: Exception) -> None:
    """Raise the error that a user should see instead of `error`, if there is one."""
    clear = _as_config_error(error)
    if clear is not None:
        raise clear from error


def _as_config_error(error: Exception) -> ConfigError | None:
    if NOT_FUNCTIONALIZED in str(error):
        return ConfigError(
            "a check (checkify.check, or a value assertion of chex) is in the optimizer, or in a "
            "function with a custom gradient (jax.custom_vjp). Move it to the model or the loss."
        )
    if "custom_lin" not in str(error):
        return None
    return ConfigError(
        "the loss takes a forward-mode derivative along the parameters (jax.jvp, jax.jacfwd or "
        "jax.hessian). Parameters of a step have a reverse-mode derivative only. Use jax.grad of "
        f"jax.grad, or derivatives along the inputs. ({where(error)})"
    )


def _select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _check_opt_state(old: PyTree, new: PyTree) -> None:
    """Raise while tracing if an update changes shapes or dtypes of the optimizer state."""
    changes = leaf_changes(old, new)
    if changes:
        raise ConfigError(
            "an update changes shapes or dtypes of the optimizer state, so the step cannot be "
            "compiled once and the state cannot be saved:\n  "
            + "\n  ".join(changes[:5])
            + "\nUse float32 parameters, or wrap the optimizer: "
            "shardwise.optim.with_master(optimizer)."
        )


def _parameter_groups(spec: StateSpec) -> dict[str, tuple[str, ...]]:
    chains = read_chains(spec.optimizer, spec.abstract.params)
    return {path: chain.groups for path, chain in chains.items()}


def _group_norms(
    grads: Params,
    updates: Params,
    params: Params,
    groups: Mapping[str, tuple[str, ...]],
) -> dict[str, jax.Array]:
    """Return the norm of each tree and of each group of its leaves, by `name/group/subgroup`."""
    trees = {"grad_norm": grads, "update_norm": updates, "param_norm": params}
    norms = {}
    for name, tree in trees.items():
        leaves = named_leaves(tree)
        prefixes = set()
        for path in leaves:
            prefixes |= {groups[path][:depth] for depth in range(len(groups[path]) + 1)}
        for prefix in sorted(prefixes):
            members = {
                path: leaf
                for path, leaf in leaves.items()
                if groups[path][: len(prefix)] == prefix
            }
            norms["/".join([name, *prefix])] = norm(members)
    return norms
