"""A run is a frozen dataclass of real objects. Preparing it checks every input before anything is compiled or allocated."""

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from shardwise.checkpoint.init_from import InitFrom
from shardwise.checkpoint.store import Keep
from shardwise.data import Batches, as_batches
from shardwise.data.batches import is_plain
from shardwise.early_stop import EarlyStop
from shardwise.errors import ConfigError, ShardwiseError, where
from shardwise.hardware import find_chip
from shardwise.mesh import mesh_text
from shardwise.module import ModelFactory, describe_model
from shardwise.optim.read import read_chains, sample_rates
from shardwise.sharding import Rules
from shardwise.state import StateSpec, abstract_state
from shardwise.step import Batch, EvalStep, Loss, TrainStep, make_eval_step, make_train_step
from shardwise.text import did_you_mean
from shardwise.trackers.base import Tracker
from shardwise.tree import any_layer


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines a run. A recipe is a function that returns one."""

    model: ModelFactory  # (rngs) -> nnx.Module
    loss: Loss  # (model, batch) -> scalar, or Mean(total, weight), or one of them with a dict of further metrics
    optimizer: optax.GradientTransformation
    data: (
        Callable[[int], Batch] | Iterable[Batch]
    )  # the batch of a step, usually Batches(...); a plain iterable cannot resume
    steps: int
    mesh: str | Mesh = "data=-1"
    rules: Rules = field(default_factory=Rules)
    seed: int = 0
    accumulate: int = 1
    compute_dtype: str | None = None  # such as "bfloat16"; parameters and optimizer keep their own
    init_from: InitFrom | None = None  # the weights to begin with; of no effect on resume
    norms: bool = (
        False  # also log the norms of updates and parameters, and of each group of the optimizer
    )
    eval_data: Batches | None = None
    eval_every: int = 0  # steps; 0: at the end only
    save_every: int = 0  # steps; 0: at the end only
    save_minutes: float = (
        0  # also when so many minutes have gone since the last save; 0: never for that reason
    )
    on_nonfinite: Literal["stop", "skip"] = (
        "stop"  # what follows a step that was not applied; it never is
    )
    max_skips: int = (
        10  # updates skipped in a row, not finite or spikes, before the run stops in any case
    )
    keep: Keep = field(default_factory=Keep)  # which checkpoints outlive the next one
    accept: tuple[
        str, ...
    ] = ()  # what may differ from the run that is resumed: "lr", "data", "optimizer", "seed", "compute_dtype"
    out: Path | None = None  # the run directory; None keeps nothing
    data_threads: int = 1  # that read batches ahead of need
    data_processes: int = 0  # or processes, for data that takes Python long to decode
    sample: Callable[[nnx.Module], str] | None = (
        None  # text from the model, at each evaluation and at the end
    )
    sample_every: int = 0  # steps, in place of evaluations; 0: with these
    stop_when: EarlyStop | None = None  # ends the run before its last step, by what evaluations say
    trackers: tuple[Tracker, ...] = ()  # TensorBoard(), WandB() ... beside metrics.jsonl
    profile: tuple[int, int] | None = None  # the first and the last step to trace
    unit: str = "items"  # what the weight of the loss counts: tokens, images ...


@dataclass(frozen=True)
class Prepared:
    """A run whose every input has been checked, with nothing compiled and nothing allocated yet."""

    spec: StateSpec
    batches: Callable[[int], Batch]
    step: TrainStep
    eval_step: EvalStep | None
    rates: dict[str, dict[str, float]]  # learning rates by group, sampled over the run
    flops: float  # of one step: forward, and twice as much backward
    peak_flops: float | None  # of all devices together, a second


def prepare(run: Run) -> Prepared:
    """Mesh, description of the state, and steps. What cannot work is refused here."""
    least = {
        "steps": 1,
        "accumulate": 1,
        "eval_every": 0,
        "sample_every": 0,
        "save_every": 0,
        "save_minutes": 0,
        "max_skips": 0,
        "data_threads": 1,
        "data_processes": 0,
    }
    wrong = [
        f"{name}={getattr(run, name)}; it must be at least {value}."
        for name, value in least.items()
        if getattr(run, name) < value
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    spec = describe_state(run)
    rates = sample_rates(
        run.optimizer, spec.abstract.params, np.linspace(0, run.steps - 1, 65).astype(int)
    )
    for group, values in rates.items():
        if wrong := [
            f"{rate} at update {at}" for at, rate in values.items() if not math.isfinite(rate)
        ]:
            raise ConfigError(f"the learning rate of group '{group}' is {wrong[0]}.")
    for name in ("trackers", "profile"):
        if getattr(run, name) and run.out is None:
            raise ConfigError(f"{name}: the run needs a directory for that; give it one (out).")
    if run.profile is not None and not 1 <= run.profile[0] <= run.profile[1]:
        raise ConfigError(
            f"profile={run.profile}: give the first and the last step to trace, counted from 1."
        )
    batches = as_batches(run.data)
    options = {"compute_dtype": run.compute_dtype}
    batch = batches.example() if is_plain(batches) else batches(0)
    step = make_train_step(
        spec, run.loss, batch, seed=run.seed, accumulate=run.accumulate, norms=run.norms, **options
    )
    _check_metrics(run, step.traced.names)
    eval_step = None
    if run.eval_data is not None:
        batch = run.eval_data.example() if is_plain(run.eval_data) else next(run.eval_data.once())
        eval_step = make_eval_step(spec, run.loss, batch, traced=step.traced, **options)
    chip = find_chip(spec.mesh.devices.flat[0].device_kind)
    peak = chip.flops * spec.mesh.size if chip else None
    return Prepared(spec, batches, step, eval_step, rates, 3 * step.traced.flops, peak)


def _check_metrics(run: Run, names: Sequence[str]) -> None:
    """Refuses to choose checkpoints, or the end, by something that is not measured."""
    known = [f"eval_{name}" for name in names]
    wanted = {"stop_when": run.stop_when.metric if run.stop_when is not None else None}
    wanted["keep"] = (
        run.keep.metric if run.keep.best and run.keep.metric.startswith("eval_") else None
    )
    for name, metric in wanted.items():
        if metric is not None and run.eval_data is None:
            raise ConfigError(
                f"{name} goes by {metric!r}, and the run has no eval_data to measure it."
            )
        if metric is not None and metric not in known:
            raise ConfigError(
                f"{name} goes by {metric!r}; evaluations give {', '.join(known)}.{did_you_mean(metric, known)}"
            )


def describe_state(run: Run) -> StateSpec:
    """The state of the run on its mesh, without arrays."""
    try:
        return abstract_state(run.model, run.optimizer, run.mesh, run.rules)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer cannot be applied to the parameters of the model: {where(error)}"
        ) from error


def describe_run(run: Run, prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it, as JSON. `resume.compare` sets two of them side by side."""
    params = prepared.spec.abstract.params
    fingerprint = getattr(run.data, "fingerprint", None)
    return {
        "model": _describe_model(prepared.spec),
        "data": fingerprint()
        if fingerprint is not None
        else "a function or an iterator, whose content is not known",
        "lr": prepared.rates,
        "optimizer": _describe_optimizer(run.optimizer, params),
        "seed": run.seed,
        "compute_dtype": run.compute_dtype,
        "accumulate": run.accumulate,
        "mesh": mesh_text(prepared.spec.mesh),
        **_environment(),
    }


def _describe_model(spec: StateSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    jax.eval_shape(
        lambda: found.update(describe_model(spec.module(spec.abstract)))
    )  # its random streams would compile programs
    return found


def _describe_optimizer(optimizer: Any, params: Any) -> dict[str, Any]:
    """For each parameter, layers taken together, what it goes through; learning rates are described apart."""
    described: dict[str, set[str]] = {}
    for path, chain in read_chains(optimizer, params).items():
        if path:
            described.setdefault(any_layer(path), set()).add(
                " > ".join(str(part) for part in chain.parts if part.factor is None)
            )
    return {path: " | ".join(sorted(texts)) for path, texts in described.items()}


def _environment() -> dict[str, Any]:
    packages = ("shardwise", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = jax.devices()
    return {
        "devices": {
            "count": len(devices),
            "kind": devices[0].device_kind,
            "processes": jax.process_count(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in packages},
        },
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
