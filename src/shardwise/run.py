"""A run is a frozen dataclass of real objects; `fit` carries it out. This is the glue, and nothing but glue."""

import json
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shardwise.checkpoint import Checkpoints
from shardwise.data import Batches, as_batches
from shardwise.errors import ConfigError, NumericsError, ShardwiseError
from shardwise.flops import count_flops
from shardwise.hardware import find_chip
from shardwise.loop import evaluate, steps
from shardwise.mesh import mesh_text
from shardwise.metrics import MetricsLog
from shardwise.module import ModelFactory
from shardwise.optim.parts import evaluation_params
from shardwise.optim.read import sample_rates
from shardwise.report import plot_losses, show_count, show_metrics, show_seconds
from shardwise.sharding import Rules, show_bytes
from shardwise.state import StateSpec, TrainState, abstract_state, init_state
from shardwise.step import Batch, EvalStep, Loss, TrainStep, as_means, make_eval_step, make_train_step


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines a run. A recipe is a function that returns one."""

    model: ModelFactory  # (rngs) -> nnx.Module
    loss: Loss  # (model, batch) -> scalar, or Mean(total, weight), or one of them with a dict of further metrics
    optimizer: optax.GradientTransformation
    data: Callable[[int], Batch] | Iterable[Batch]  # the batch of a step, usually Batches(...); a plain iterable cannot resume
    steps: int
    mesh: str | Mesh = "data=-1"
    rules: Rules = field(default_factory=Rules)
    seed: int = 0
    accumulate: int = 1
    compute_dtype: str | None = None  # such as "bfloat16"; parameters and optimizer keep their own
    norms: bool = False  # also log the norms of updates and parameters, and of each group of the optimizer
    eval_data: Batches | None = None
    eval_every: int = 0  # steps; 0: at the end only
    save_every: int = 0  # steps; 0: at the end only
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what follows a step that was not applied; it never is
    max_skips: int = 10  # updates skipped in a row, not finite or spikes, before the run stops in any case
    accept: tuple[str, ...] = ()  # what may differ from the run that is resumed: "lr"
    out: Path | None = None  # the run directory; None keeps nothing
    sample: Callable[[nnx.Module], str] | None = None  # text to show at the end, from the trained model
    unit: str = "items"  # what the weight of the loss counts: tokens, images ...


@dataclass(frozen=True)
class Prepared:
    """A run whose every input has been checked, with nothing compiled and nothing allocated yet."""

    spec: StateSpec
    batches: Callable[[int], Batch]
    step: TrainStep
    eval_step: EvalStep | None
    flops: float  # of one step: forward, and twice as much backward
    peak_flops: float | None  # of all devices together, a second


@dataclass(frozen=True)
class Result:
    """The state at the end, the metrics of the last step and of the last evaluation, and where the time went."""

    spec: StateSpec
    state: TrainState
    metrics: dict[str, float]
    eval_metrics: dict[str, float]
    sample: str | None
    seconds: dict[str, float]


class Stopped(ShardwiseError):
    """Ended early by a signal, after saving; the same command goes on from there."""

    exit_code = 75


def prepare(run: Run) -> Prepared:
    """Mesh, description of the state, and steps. What cannot work is refused here."""
    for name in ("steps", "accumulate"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{name}={getattr(run, name)}; it must be at least 1.")
    spec = abstract_state(run.model, run.optimizer, run.mesh, run.rules)
    batches = as_batches(run.data)
    options = {"compute_dtype": run.compute_dtype}
    step = make_train_step(spec, run.loss, batches(0), seed=run.seed, accumulate=run.accumulate, norms=run.norms, **options)
    eval_step = make_eval_step(spec, run.loss, next(run.eval_data.once()), **options) if run.eval_data is not None else None
    chip = find_chip(spec.mesh.devices.flat[0].device_kind)
    peak = chip.flops * spec.mesh.size if chip else None
    return Prepared(spec, batches, step, eval_step, 3 * _forward_flops(run, step), peak)


def fit(run: Run, *, describe: dict[str, Any] | None = None, console: Console | None = None) -> Result:
    """Trains from the newest checkpoint in `run.out`, or from the start. `describe` goes into run.json as it is."""
    console = console or Console(stderr=True)
    prepared = prepare(run)
    spec = prepared.spec
    _headline(console, prepared)
    state, checkpoints = _restore(run, spec, console)
    if state is None:
        state = init_state(spec, run.seed)
    start = int(state.step)
    rates = sample_rates(run.optimizer, spec.abstract.params, np.linspace(0, run.steps - 1, 65).astype(int))
    book = _Bookkeeper(run, prepared, start)
    if run.out is not None:
        _write_json(run.out / "run.json", {**(describe or {}), "steps": run.steps, "mesh": mesh_text(spec.mesh), **_environment()})
    if start >= run.steps:
        console.print(f"nothing to do: {run.out} has finished its {start} steps. Ask for more with --steps.")

    eval_metrics: dict[str, float] = {}
    stopping = False
    with book, _stop_on_signals() as stopped, _progress(console, run, start) as show:
        for n, state, metrics in steps(prepared.step, state, prepared.batches, until=run.steps):
            book.record(n, metrics)
            stopping = stopped()
            last = n == run.steps or stopping
            if prepared.eval_step is not None and run.eval_data is not None and _is_due(n, run.eval_every, n == run.steps):
                book.finish()
                eval_metrics = evaluate(prepared.eval_step, state, run.eval_data)
                book.write({"step": n, **{f"eval_{name}": value for name, value in eval_metrics.items()}}, "eval")
            if checkpoints is not None and _is_due(n, run.save_every, last):
                book.finish()
                checkpoints.save(state, {"step": n, "mesh": mesh_text(spec.mesh), "lr": rates})
                book.clock.lap("save")
            if last:
                book.finish()
            if book.last:
                show(book.last, eval_metrics)
            if stopping:
                break
        if checkpoints is not None:
            checkpoints.close()
            book.clock.lap("save")
    if stopping:
        raise Stopped(
            f"stopped by a signal after step {int(state.step)}" + (f"; the same command resumes {run.out} there." if run.out else ".")
        )

    text = _sample(run, spec, state) if run.sample is not None else None
    _summary(console, run, book, eval_metrics, text)
    return Result(spec, state, book.last, eval_metrics, text, book.clock.seconds)


def _restore(run: Run, spec: StateSpec, console: Console) -> tuple[TrainState | None, Checkpoints | None]:
    """The newest state in the run directory, if there is one, and the checkpoints there, if there is a directory."""
    if run.out is None:
        return None, None
    run.out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run.out / "checkpoints")
    latest = checkpoints.latest()
    if latest is None:
        return None, checkpoints
    if "lr" not in run.accept:
        _check_rates(run, spec, checkpoints.metadata(latest).get("lr", {}), latest)
    console.print(f"resuming {run.out} at step {latest}")
    return checkpoints.restore(spec, latest), checkpoints


def _check_rates(run: Run, spec: StateSpec, saved: dict[str, dict[str, float]], step: int) -> None:
    """Refuses a learning rate that is not that of the checkpoint, from the update before `step` on."""
    for group, rates in saved.items():
        past = max((int(at) for at in rates if int(at) < step), default=0)
        points = sorted(int(at) for at in rates if int(at) >= past)
        now = sample_rates(run.optimizer, spec.abstract.params, np.array(points)).get(group, {})
        for at in map(str, points):
            if abs(now.get(at, 0.0) - rates[at]) > 1e-5 * abs(rates[at]):
                raise ConfigError(
                    f"{run.out} has a learning rate of {rates[at]:.4g} at update {at} (group '{group}'), and this run would have "
                    f"{now.get(at, 0.0):.4g}: the schedule or its length has changed. If that is meant, say --accept lr "
                    f"(in Python: Run(accept=('lr',)))."
                )


def _is_due(n: int, every: int, last: bool) -> bool:
    return last or bool(every and n % every == 0)


class _Bookkeeper:
    """Writes down each step once the next one is under way, so that reading its metrics never leaves the devices idle."""

    def __init__(self, run: Run, prepared: Prepared, start: int):
        self.run, self.prepared, self.first = run, prepared, start + 1
        self.log = MetricsLog(run.out / "metrics.jsonl", start) if run.out is not None else None
        self.clock = _Clock()
        self.last: dict[str, Any] = {}
        self.skips = 0  # in a row
        self._pending: tuple[int, dict[str, jax.Array]] | None = None

    def __enter__(self) -> "_Bookkeeper":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.log is not None:
            self.log.close()

    def record(self, n: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of step n, and finishes the step before it."""
        self.finish()
        self._pending = (n, metrics)

    def finish(self) -> None:
        """Waits for the step that is pending, if any; applies the policy for numbers that are not finite."""
        if self._pending is None:
            return
        (n, metrics), self._pending = self._pending, None
        values = {name: value.item() for name, value in metrics.items()}
        finite, weight = values.pop("finite"), values.pop("weight")
        seconds = self.clock.lap("compile" if n == self.first else "steps")
        self.last = {"step": n, **values, "step_s": seconds, f"{self.run.unit}_per_s": weight / seconds}
        if self.prepared.peak_flops:
            self.last["mfu"] = self.prepared.flops / seconds / self.prepared.peak_flops
        skipped = not finite or bool(values.get("skipped"))
        self.last = {k: v for k, v in self.last.items() if k != "skipped"} | ({"skipped": True} if skipped else {})
        self.write(self.last)
        self.skips = self.skips + 1 if skipped else 0
        if self.skips > self.run.max_skips:
            raise NumericsError(
                f"step {n}: {self.skips} updates in a row were skipped, the last with loss {values['loss']} and gradient norm "
                f"{values['grad_norm']}; max_skips={self.run.max_skips}. The run has diverged: go back to a checkpoint with a lower "
                f"learning rate."
            )
        if not finite and self.run.on_nonfinite == "stop":
            raise NumericsError(
                f"step {n}: loss {values['loss']}, gradient norm {values['grad_norm']}: not finite, so the update was not applied. "
                f"Lower the learning rate or look at the batch of step {n - 1}; on_nonfinite='skip' would leave such batches out."
            )

    def write(self, record: dict[str, Any], lap: str | None = None) -> None:
        if lap is not None:
            self.clock.lap(lap)
        if self.log is not None:
            self.log.write(record)


class _Clock:
    """Where the time went, in named laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + lap
        return lap


@contextmanager
def _stop_on_signals() -> Iterator[Callable[[], bool]]:
    """The first SIGINT or SIGTERM asks the loop to save and stop; a second one acts as usual."""
    received: list[int] = []

    def handler(number: int, _: Any) -> None:
        received.append(number)
        for each in previous:
            signal.signal(each, previous[each])

    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        previous = {}
    try:
        yield lambda: bool(received)
    finally:
        for number in previous:
            signal.signal(number, previous[number])


@contextmanager
def _progress(console: Console, run: Run, start: int) -> Iterator[Callable[[dict[str, float], dict[str, float]], None]]:
    """A live bar on a terminal; elsewhere a line now and then."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("compiling", total=run.steps, completed=start, status="")

            def show(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
                bar.update(task, description="training", completed=int(record["step"]), status=_status(run, record, eval_metrics))

            yield show
        return
    console.print("compiling the step")
    shown = [time.monotonic()]

    def show_line(record: dict[str, float], eval_metrics: dict[str, float]) -> None:
        if time.monotonic() - shown[0] > 10 or record["step"] in (start + 1, run.steps):
            shown[0] = time.monotonic()
            console.print(f"step {record['step']:.0f} of {run.steps}: {_status(run, record, eval_metrics)}")

    yield show_line


def _status(run: Run, record: dict[str, Any], eval_metrics: dict[str, float]) -> str:
    text = f"loss {record['loss']:.4f}"
    if eval_metrics:
        text += f", held out {show_metrics(eval_metrics)}"
    text += f", {show_count(record[f'{run.unit}_per_s'])} {run.unit}/s"
    return text + (f", MFU {record['mfu']:.1%}" if "mfu" in record else "")


def _headline(console: Console, prepared: Prepared) -> None:
    spec = prepared.spec
    held = sum(p.bytes_per_device for group in (spec.params, spec.other, spec.opt_state) for p in group.values())
    console.print(
        f"[bold]{show_count(spec.num_params)} parameters[/] on mesh [bold]{mesh_text(spec.mesh)}[/] "
        f"({spec.mesh.devices.flat[0].device_kind}), {show_bytes(held)} of state on each device, "
        f"{show_count(prepared.flops, ' ')}FLOP a step",
        soft_wrap=True,
    )


def _summary(console: Console, run: Run, book: _Bookkeeper, eval_metrics: dict[str, float], text: str | None) -> None:
    if eval_metrics:
        console.print(f"held out: {show_metrics(eval_metrics)}")
    console.print("time: " + ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in book.clock.seconds.items()))
    if text is not None:
        console.rule("a sample")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.rule()
    if run.out is not None and book.last:
        picture = run.out / "loss.png"
        plot_losses(run.out / "metrics.jsonl", picture)
        console.print(f"run directory: {run.out}\nloss curve:    {picture}", highlight=False, soft_wrap=True)


def _sample(run: Run, spec: StateSpec, state: TrainState) -> str:
    assert run.sample is not None
    weights = evaluation_params(state.opt_state, state.params)
    model = spec.module(replace(state, params=weights), jax.random.key(run.seed))
    model.eval()
    return run.sample(model)


def _forward_flops(run: Run, step: TrainStep) -> float:
    """Of the loss on one global batch."""
    spec = step.spec

    def forward(params: Any, other: Any, batch: Batch) -> Any:
        model = spec.definition.merge(params, other, jax.random.key(0))
        return as_means(run.loss(model, batch), 1)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((step.layout.rows, *x.shape[1:]), x.dtype), step.batch)
    return count_flops(forward, spec.abstract.params, spec.abstract.other, shapes)


def _environment() -> dict[str, Any]:
    packages = ("shardwise", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "processes": jax.process_count()},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
