"""What a run is: a frozen dataclass of real objects, and the checks of all its inputs.

`prepare` checks every input before anything is compiled or allocated.
"""

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from shardwise.checkpoint.init_from import InitFrom
from shardwise.checkpoint.store import Keep
from shardwise.data import Batches, Stream, as_batches
from shardwise.data.batches import is_plain
from shardwise.data.contract import (
    SCOPES,
    UNKNOWN_DATA,
    Scope,
    describe_batch,
    first_batch_digest,
    global_shapes,
)
from shardwise.data.evaluation import EvaluationData, Once, as_evaluation
from shardwise.data.grain import MapBatches, is_dataset, makes_batches
from shardwise.data.layout import as_arrays, check_integers, num_rows, scalar_leaves
from shardwise.errors import ConfigError, DataError, ShardwiseError, where
from shardwise.files.paths import run_path
from shardwise.findings import Finding
from shardwise.hardware import find_chip
from shardwise.mesh import mesh_text
from shardwise.metrics import EarlyStop
from shardwise.module import Filter, ModelFactory, describe_model
from shardwise.optim.read import read_chains, sample_rates
from shardwise.sharding import Rules, batch_spec, num_batch_shards
from shardwise.state import StateSpec, abstract_state
from shardwise.step import (
    Batch,
    EvalStep,
    Loss,
    TrainStep,
    make_eval_step,
    make_train_step,
)
from shardwise.text import Json, any_layer, did_you_mean
from shardwise.trackers.base import Tracker
from shardwise.tree import Params, named_leaves

# The smallest valid value of each numeric field of `Run`.
MINIMUM = {
    "steps": 1,
    "accumulate": 1,
    "microbatches": 0,
    "rounds": 1,
    "digest_every": 0,
    "audit_every": 0,
    "eval_every": 0,
    "sample_every": 0,
    "save_every": 0,
    "save_minutes": 0,
    "max_skips": 0,
    "data_threads": 1,
    "data_processes": 0,
}
# The largest valid value: a state counts its steps in int32.
LARGEST = 2**31 - 1
# Packages whose versions a checkpoint records.
PACKAGES = (
    "shardwise",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines a run. A recipe is a function that returns one.

    Only `model`, `loss`, `optimizer`, `data` and `steps` are required.

    Attributes:
        model: a function from `nnx.Rngs` to the model, for example the class of the model.
        loss: `loss(model, batch)`, also with arguments named `rngs` (random streams of this step,
            an `nnx.Rngs`) and `step` (the number of steps before this one). It returns a scalar or
            `Mean(total, weight)`, or a tuple of one of these and a dictionary of additional
            metrics. Return a `Mean` with one entry per example if the batch may need padding, or if
            examples have different weights.
        optimizer: any Optax optimizer, including those of `shardwise.optim`.
        data: the batches: `Batches(...)`, any function from the step number to a batch, or a
            dataset, iterator or loader of Grain that yields batches. The position of an iterator is
            saved with each checkpoint, if it has `get_state` and `set_state`. A run with any other
            iterable cannot resume.
        steps: the number of training steps, counted from the start of the run, not from a resume.
        mesh: axis names and sizes, for example "data=4,model=2"; -1 means all remaining
            devices. Or a `jax.sharding.Mesh`. The default is data parallelism over all devices.
        rules: how names and paths of parameters map to mesh axes. The default follows the
            annotations of the model, and shards parameters over an axis named "fsdp".
        seed: the root of the initial weights and of all random streams. It does not affect the
            order of the data, see `Batches(seed=...)`.
        accumulate: the number of micro-batches that a batch is split into. Increase it when
            activations do not fit in memory; the result does not change.
        coupled_examples: what accumulation does with a loss that combines examples with each other,
            such as batch statistics or a contrastive loss. "exact" refuses it, because the result
            would change. "separate" computes it within each micro-batch, and averages. Such a loss
            should not be a sum over the batch: return `Mean(total, weight)` instead.
        microbatches: the number of parts that a pipeline divides the batch into, on a mesh with a
            stage axis; a multiple of the stages. More of them leave less idle time and make
            matmuls smaller; the result does not change. 0 chooses up to 4 per stage.
        rounds: how often each microbatch passes through all stages of a pipeline. With 2 rounds, a
            stage holds two groups of layers, and half of the idle time is left. In return,
            activations pass from stage to stage twice as often.
        compute_dtype: the dtype in which the model computes, for example "bfloat16". The model
            reads its parameters in it, and layers of Flax without a `dtype` cast their inputs to
            it. The batch, the parameters and the optimizer state keep their own dtypes. None uses
            those of parameters and inputs.
        matmul_dtype: "float8" computes large matmuls with operands of 8 bits: the forward pass, and
            the gradients of activations. Gradients of weights keep `compute_dtype`. Losses differ
            from those without it, see docs/float8.md. It needs a Hopper GPU or a newer one; CPUs
            emulate it slowly. Evaluations keep `compute_dtype`.
        wrt: the variables that are trained, as an NNX filter, for example
            `nnx.All(nnx.Param, nnx.Not(nnx.PathContains("teacher")))`. All others are part of the
            state, and change only if the loss assigns to them.
        init_from: the weights to start from, for fine-tuning. It has no effect when the run
            resumes. None initializes from `seed`.
        deterministic: compute the same bits every time on GPUs too, as on CPUs. A step of GPT-2
            124M takes about 2 % longer on an H200, see docs/determinism.md. False
            takes faster kernels whose sums have no fixed order: two runs, or a run and its resumed
            copy, then differ by rounding.
        digest_every: the number of steps between digests of the state in `metrics.jsonl`, which
            `shardwise replay` compares. 0 disables them.
        audit_every: the number of steps between audits, which compare the bits of two computations
            to find faulty devices, see docs/determinism.md. An audit takes about as long as a step.
            0 disables them.
        norms: also log the norms of updates and parameters, and all norms for each parameter group
            of the optimizer.
        eval_data: the validation data; every example is used once per evaluation. `Batches(...)`, a
            list of batches, a function that returns an iterable of batches, or a finite dataset or
            loader of Grain. None disables evaluation.
        eval_every: the number of steps between evaluations; 0 evaluates at the end only.
        save_every: the number of steps between checkpoints; 0 saves at the end only.
        save_minutes: also save when this many minutes have passed since the last checkpoint; 0
            disables this. Use it where jobs are killed without notice.
        on_nonfinite: what happens after a step with a non-finite loss or gradient. Its update is
            never applied. "stop" ends the run, "skip" continues with the next batch.
        max_skips: the number of consecutive skipped updates, non-finite or spikes, after which the
            run stops in any case.
        keep: which checkpoints are kept. The default keeps the last 3.
        accept: differences to the checkpoint that are allowed when the run resumes: "lr", "data",
            "optimizer", "loss", "seed", "compute_dtype", "matmul_dtype". All others are refused.
        out: the run directory, for metrics, checkpoints and reports. None writes nothing.
        data_scope: what `data` supplies if several processes run. "global": every process supplies
            the complete batch. "process": every process supplies only the examples for its own
            devices, as a loader does that is sharded by process. Digests of the batches are
            compared, and a contradiction is refused.
        data_threads: the number of threads that read batches in advance. A data function must then
            return new arrays at each call.
        data_processes: the number of processes that read batches in advance, instead of threads.
            Use it if decoding takes much time in Python. 0 uses threads.
        sample: a function from the model to text, for example to generate a continuation. The text
            is logged at each evaluation and at the end.
        sample_every: the number of steps between samples, independent of evaluations; 0 samples at
            each evaluation.
        stop_when: stop before the last step when an evaluation metric stops improving. None never
            does.
        trackers: services that metrics are sent to, in addition to `metrics.jsonl`, for example
            `(TensorBoard(),)`.
        profile: the first and the last step to record with JAX's profiler, counted from 1. None
            records nothing.
        unit: what the weight of the loss counts, for example "tokens" or "images". It names the
            throughput in logs and reports.
        strict: refuse to start if there are findings, which are likely mistakes. By default they
            are printed and the run starts.

    Example:
        >>> run = Run(
        ...     model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        ...     loss=lambda model, batch: Mean((model(batch["x"])[:, 0] - batch["y"]) ** 2),
        ...     optimizer=optax.adamw(1e-2),
        ...     data=Batches({"x": x, "y": y}, batch_size=32),
        ...     steps=500,
        ...     mesh="data=4,fsdp=2",
        ...     out=Path("runs/linear"),
        ... )
        >>> result = fit(run)
    """

    model: ModelFactory
    loss: Loss
    optimizer: optax.GradientTransformation
    data: Callable[[int], Batch] | Iterable[Batch]
    steps: int
    mesh: str | Mesh = "data=-1"
    rules: Rules = field(default_factory=Rules)
    seed: int = 0
    accumulate: int = 1
    coupled_examples: Literal["exact", "separate"] = "exact"
    microbatches: int = 0
    rounds: int = 1
    compute_dtype: str | None = None
    matmul_dtype: Literal["float8"] | None = None
    wrt: Filter = nnx.Param
    init_from: InitFrom | None = None
    deterministic: bool = True
    digest_every: int = 100
    audit_every: int = 0
    norms: bool = False
    eval_data: EvaluationData | None = None
    eval_every: int = 0
    save_every: int = 0
    save_minutes: float = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    keep: Keep = field(default_factory=Keep)
    accept: tuple[str, ...] = ()
    out: Path | None = None
    data_scope: Scope = "global"
    data_threads: int = 1
    data_processes: int = 0
    sample: Callable[[nnx.Module], str] | None = None
    sample_every: int = 0
    stop_when: EarlyStop | None = None
    trackers: tuple[Tracker, ...] = ()
    profile: tuple[int, int] | None = None
    unit: str = "items"
    strict: bool = False

    def __post_init__(self) -> None:
        # Many people pass a string.
        if self.out is not None:
            object.__setattr__(self, "out", run_path(self.out))


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs are all checked. Nothing is compiled or allocated yet.

    Attributes:
        spec: the abstract state on the mesh of the run.
        batches: the function from the step number to a host batch.
        step: the training step.
        eval_step: the evaluation step; None without `Run.eval_data`.
        eval_batches: the validation data that every evaluation reads; None without it.
        rates: the learning rate of each parameter group, sampled over the run, as
            `{group: {update: rate}}`.
        flops: floating-point operations of one step: the forward pass, and twice as many backward.
        peak_flops: the peak of all devices together, in FLOP/s; None for unknown devices.
        first_batch: summaries of the first batch, see `describe_batch`: that of this process, or
            of all processes once `fit` has compared them. Empty for data that each process reads
            in parts.
        findings: likely mistakes in loss, precision and data that `prepare` has seen.
    """

    spec: StateSpec
    batches: Callable[[int], Batch]
    step: TrainStep
    eval_step: EvalStep | None
    eval_batches: Batches | Once | None
    rates: dict[str, dict[str, float]]
    flops: float
    peak_flops: float | None
    first_batch: tuple[Json, ...] = ()
    findings: tuple[Finding, ...] = ()


def prepare(run: Run) -> Prepared:
    """Check all inputs of a run, and build its mesh, abstract state and steps.

    Checks come in the order of their cost, and each relies on those before it:

    1. Numbers that are out of range.
    2. Mesh, model, rules and optimizer: the model is traced and every array gets a sharding.
    3. Learning rates, over the whole run.
    4. Options that need a run directory.
    5. Data: one example is read, and the loss is traced with it. Batch size and mesh must fit.
    6. Names of metrics, which are known once the loss is traced.
    7. Validation data: one example is read, and the loss is traced if its shapes differ.

    Raises:
        ConfigError: for invalid configuration.
        DataError: for data that cannot be read.
    """
    check_numbers(run)
    spec = describe_state(run)
    rates = _sample_rates(run, spec)
    _check_output(run)

    batches = as_batches(run.data)
    example = _example(run, batches)
    step = _train_step(run, spec, example)
    _check_metrics(run, step.traced.names)
    eval_batches = None if run.eval_data is None else as_evaluation(run.eval_data)
    eval_step = _eval_step(run, spec, eval_batches, example)
    chip = find_chip(spec.mesh.devices.flat[0].device_kind)
    return Prepared(
        spec=spec,
        batches=batches,
        step=step,
        eval_step=eval_step,
        eval_batches=eval_batches,
        rates=rates,
        flops=3 * step.traced.flops,
        peak_flops=chip.flops * spec.mesh.size if chip else None,
        first_batch=_first_batch(run, step, example),
        findings=(
            *step.traced.findings,
            *_evaluation_findings(eval_batches, eval_step),
            *_resume_findings(run, batches),
        ),
    )


def example_batch(run: Run) -> Batch:
    """Return the first batch of a run, or arrays like it, without preparing anything else.

    Raises:
        DataError: if the data cannot be read.
    """
    return _example(run, as_batches(run.data))


def _is_read_in_parts(run: Run) -> bool:
    """Whether each process reads only its own examples of global batches."""
    return is_plain(run.data) and run.data_scope == "global"


def _example(run: Run, batches: Callable[[int], Batch]) -> Batch:
    """Return the first batch, or arrays like it if the batches have a cheap example."""
    if is_plain(batches) and _is_read_in_parts(run):
        example: Batch = batches.example()
    else:
        example = as_arrays(batches(0))
        _check_elements(run, batches, example)
    check_integers(example)
    return example


def _check_elements(run: Run, batches: Callable[[int], Batch], example: Batch) -> None:
    """Raise if elements of a Grain dataset are examples, or if its last batch is shorter."""
    if is_dataset(run.data) and not makes_batches(run.data) and scalar_leaves(example):
        raise DataError(
            f"the elements of the Grain {type(run.data).__name__} are examples: "
            f"{', '.join(map(repr, scalar_leaves(example)))} is a single number. Add "
            "batch(batch_size, drop_remainder=True) as its last transformation."
        )
    if not isinstance(batches, MapBatches):
        return
    count = batches.num_batches
    if count is None or run.steps < count:
        return
    rows = num_rows(example)
    last = num_rows(batches(count - 1))
    if last != rows:
        raise DataError(
            f"the last of {count} batches of the Grain MapDataset has {last} examples, and the "
            f"first has {rows}. All batches of a run must have the same size: use "
            f"batch({rows}, drop_remainder=True), or repeat() before batch()."
        )


def _train_step(run: Run, spec: StateSpec, example: Batch) -> TrainStep:
    is_local = run.data_scope == "process"
    sharding = spec.sharding(batch_spec(spec.mesh, spec.rules))
    step = make_train_step(
        spec,
        run.loss,
        global_shapes(example, sharding) if is_local else example,
        seed=run.seed,
        accumulate=run.accumulate,
        coupled_examples=run.coupled_examples,
        microbatches=run.microbatches or None,
        rounds=run.rounds,
        compute_dtype=run.compute_dtype,
        matmul_dtype=run.matmul_dtype,
        norms=run.norms,
        deterministic=run.deterministic,
    )
    if not is_local:
        return step
    layout = step.layout
    if layout.padded_rows != layout.rows:
        multiple = num_batch_shards(spec.mesh, spec.rules) * run.accumulate
        raise DataError(
            f"the processes supply {layout.rows} examples together, which is not a multiple of "
            f"{multiple} (batch shards x accumulate={run.accumulate}). With "
            'data_scope="process" a batch is never padded: change the batch size or accumulate.'
        )
    return replace(step, layout=layout.per_process())


def _first_batch(run: Run, step: TrainStep, example: Batch) -> tuple[Json, ...]:
    if _is_read_in_parts(run):
        return ()
    return (describe_batch(example, step.layout),)


def check_numbers(run: Run) -> None:
    """Check the numbers of a run, which `prepare` does too.

    Raises:
        ConfigError: if a number is out of range.
    """
    problems = [
        f"{name}={getattr(run, name)}; it must be at least {minimum}."
        for name, minimum in MINIMUM.items()
        if not getattr(run, name) >= minimum
    ]
    problems += [
        f"{name}={getattr(run, name)}; it must be at most {LARGEST:,}."
        for name in MINIMUM
        if getattr(run, name) > LARGEST
    ]
    if not -(2**63) <= run.seed < 2**63:
        problems.append(f"seed={run.seed}; it must be an integer of 64 bits.")
    if run.data_scope not in SCOPES:
        problems.append(
            f"data_scope={run.data_scope!r}; it must be {' or '.join(map(repr, SCOPES))}."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _sample_rates(run: Run, spec: StateSpec) -> dict[str, dict[str, float]]:
    """Return the learning rates at 65 updates, evenly spaced over the run; all must be finite."""
    updates = np.linspace(0, run.steps - 1, 65).astype(int)
    rates = sample_rates(run.optimizer, spec.abstract.params, updates)
    for group, values in rates.items():
        for update, rate in values.items():
            if not math.isfinite(rate):
                raise ConfigError(
                    f"the learning rate of group '{group}' is {rate} at update {update}. "
                    "Check the schedule of the optimizer."
                )
    return rates


def _check_output(run: Run) -> None:
    for name in ("trackers", "profile"):
        if getattr(run, name) and run.out is None:
            raise ConfigError(f"{name} needs a run directory. Set Run.out (--out).")
    if run.profile is not None and not 1 <= run.profile[0] <= run.profile[1]:
        raise ConfigError(
            f"profile={run.profile} is not a range of steps. "
            "Give the first and the last step to record, counted from 1."
        )


def _check_metrics(run: Run, names: Sequence[str]) -> None:
    """Raise if checkpoints or early stopping depend on a metric that evaluations do not produce."""
    metrics = [f"eval_{name}" for name in names]
    wanted = {}
    if run.stop_when is not None:
        wanted["stop_when"] = run.stop_when.metric
    # Without the prefix it is a metric of training steps, which every run has.
    if run.keep.best and run.keep.metric.startswith("eval_"):
        wanted["keep"] = run.keep.metric
    for name, metric in wanted.items():
        if run.eval_data is None:
            raise ConfigError(
                f"{name} depends on {metric!r}, but the run has no eval_data. Set Run.eval_data."
            )
        if metric not in metrics:
            raise ConfigError(
                f"{name} depends on {metric!r}, but evaluations produce {', '.join(metrics)}."
                f"{did_you_mean(metric, metrics)}"
            )


def _eval_step(
    run: Run, spec: StateSpec, data: Batches | Once | None, example: Batch
) -> EvalStep | None:
    if data is None:
        return None
    if isinstance(data, Once):
        batch = data.first[0]
        _check_same_dims(batch, example)
    else:
        batch = data.example() if is_plain(data) else next(data.once())
    step = make_eval_step(
        spec,
        run.loss,
        batch,
        compute_dtype=run.compute_dtype,
        deterministic=run.deterministic,
    )
    sizes = _evaluation_sizes(data)
    if sizes:
        step.check_sizes(sizes)
    return step


def _check_same_dims(batch: Batch, example: Batch) -> None:
    """Raise if the elements of validation data are examples, and not batches."""
    expected = named_leaves(example)
    for name, leaf in named_leaves(batch).items():
        shape = np.shape(leaf)
        other = np.shape(expected.get(name, leaf))
        if len(shape) != len(other):
            raise ConfigError(
                f"array '{name}' has shape {shape} in eval_data and {other} in data. If the "
                "elements of eval_data are examples, use Batches(examples, batch_size=...)."
            )


def _evaluation_sizes(data: Batches | Once | None) -> set[int]:
    """Return the different batch sizes of an evaluation; empty if it has a single batch."""
    if isinstance(data, Once):
        return set(data.sizes) if len(data.sizes) > 1 else set()
    if data is None or not is_plain(data):
        return set()
    count, size = len(data.source), data.batch_size
    if count <= size:
        return set()
    return {size, count % size} - {0}


def _evaluation_findings(
    data: Batches | Once | None, step: EvalStep | None
) -> list[Finding]:
    sizes = _evaluation_sizes(data)
    if step is None or not sizes:
        return []
    return [
        Finding(
            "metric-of-batches",
            f"eval_{name} is a mean over batches, not over examples: {reason}",
            "Return Mean(total, weight) to make it exact.",
        )
        for name, reason in step.inexact(sizes).items()
    ]


def _resume_findings(run: Run, batches: Callable[[int], Batch]) -> list[Finding]:
    if run.out is None or not isinstance(batches, Stream) or batches.problem is None:
        return []
    return [
        Finding(
            "cannot-resume",
            f"this run will not be able to resume: {batches.problem}",
            "Use a function of the step, such as Batches(...), or a dataset of Grain.",
        )
    ]


def describe_state(run: Run) -> StateSpec:
    """Return the abstract state of the run on its mesh.

    Raises:
        ConfigError: if mesh, model, rules and optimizer do not fit together.
    """
    try:
        spec = abstract_state(run.model, run.optimizer, run.mesh, run.rules, run.wrt)
        return spec.computing_in(run.compute_dtype)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer cannot be applied to the parameters of the model: {where(error)}"
        ) from error


def describe_run(run: Run, prepared: Prepared) -> Json:
    """Return the description of a run that its checkpoints carry, as JSON.

    `checkpoint.resume` compares the description of a checkpoint with that of the resumed run.
    """
    return {
        "model": _describe_model(prepared.spec),
        "loss": _describe_loss(prepared.step),
        "data": _describe_data(run, prepared),
        "lr": prepared.rates,
        "optimizer": _describe_optimizer(run.optimizer, prepared.spec.abstract.params),
        "seed": run.seed,
        "compute_dtype": run.compute_dtype,
        "matmul_dtype": run.matmul_dtype,
        **_describe_determinism(run, prepared.spec),
        "accumulate": run.accumulate,
        **_describe_pipeline(prepared.step.spec),
        "mesh": mesh_text(prepared.spec.mesh),
        **_environment(),
    }


def _describe_pipeline(spec: StateSpec) -> Json:
    """Return how a pipeline divides its work, which only meshes with a stage axis have."""
    if spec.pipeline is None:
        return {}
    rounds = {"rounds": spec.pipeline.rounds} if spec.pipeline.rounds > 1 else {}
    return {"microbatches": spec.pipeline.microbatches, **rounds}


def _describe_determinism(run: Run, spec: StateSpec) -> Json:
    """Return the choice of `Run.deterministic`, which only GPUs have."""
    is_gpu = spec.mesh.devices.flat[0].platform == "gpu"
    return {"deterministic": run.deterministic} if is_gpu else {}


def _describe_data(run: Run, prepared: Prepared) -> Json | str:
    """Return what identifies the data: its own fingerprint, or a digest of the first batch."""
    fingerprint = getattr(run.data, "fingerprint", None)
    if run.data_scope == "global":
        if fingerprint is not None:
            content: Json = fingerprint()
            return content
        if not _can_resume(prepared.batches):
            return UNKNOWN_DATA
        return _describe_batches(prepared)
    described: Json = {"scope": run.data_scope}
    if _can_resume(prepared.batches):
        described |= _describe_batches(prepared)
    if fingerprint is not None:
        described["batches"] = fingerprint()
    return described


def _describe_batches(prepared: Prepared) -> Json:
    """Return what identifies batches of unknown origin."""
    described: Json = {"first_batch": first_batch_digest(prepared.first_batch)}
    batches = prepared.batches
    if isinstance(batches, Stream | MapBatches):
        described["batch_size"] = prepared.step.layout.rows
    if isinstance(batches, MapBatches):
        described["num_batches"] = batches.num_batches or "endless"
    return described


def _can_resume(batches: Callable[[int], Batch]) -> bool:
    return not isinstance(batches, Stream) or batches.problem is None


def _describe_loss(step: TrainStep) -> Json:
    """Return what identifies the computation of loss and model, and the shapes it is for."""
    batch = {
        name: f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in named_leaves(step.traced.shapes).items()
    }
    return {"fingerprint": step.traced.fingerprint, "batch": batch}


def _describe_model(spec: StateSpec) -> Json:
    description: Json = {}

    def describe() -> None:
        description.update(describe_model(spec.module(spec.abstract)))

    # Traced, because the random streams of the module would otherwise compile programs.
    jax.eval_shape(describe)
    return description


def _describe_optimizer(
    optimizer: optax.GradientTransformation, params: Params
) -> dict[str, str]:
    """Return the transformations of each parameter, with all layers as one entry.

    Learning rates are omitted: they are described separately.
    """
    descriptions: dict[str, set[str]] = {}
    for path, chain in read_chains(optimizer, params).items():
        if path:
            parts = [str(part) for part in chain.parts if part.factor is None]
            descriptions.setdefault(any_layer(path), set()).add(" > ".join(parts))
    return {path: " | ".join(sorted(texts)) for path, texts in descriptions.items()}


def _environment() -> Json:
    devices = jax.devices()
    return {
        "devices": {
            "count": len(devices),
            "kind": devices[0].device_kind,
            "processes": jax.process_count(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in PACKAGES},
        },
    }


def package_version(package: str) -> str:
    """Return the installed version of a package, or a text that says that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
