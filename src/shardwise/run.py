"""A run is a frozen dataclass of real objects; `fit` carries it out. This is the glue, and nothing but glue."""

import json
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shardwise.checkpoint import Checkpoints
from shardwise.data import Batches
from shardwise.errors import ConfigError, NumericsError, ShardwiseError
from shardwise.flops import count_flops
from shardwise.hardware import find_chip
from shardwise.loop import evaluate, steps
from shardwise.mesh import make_mesh, mesh_text
from shardwise.metrics import MetricsLog
from shardwise.module import ModelFactory
from shardwise.report import plot_losses, show_metrics, show_rate, show_seconds
from shardwise.sharding import Rules, show_bytes
from shardwise.state import TrainState, abstract_state, init_state
from shardwise.step import Batch, Loss, TrainStep, as_means, make_eval_step, make_train_step


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines a run. A recipe is a function that returns one."""

    model: ModelFactory  # (rngs) -> nnx.Module
    loss: Loss  # (model, batch) -> scalar, or Mean(total, weight), or one of them with a dict of further metrics
    optimizer: optax.GradientTransformation
    data: Callable[[int], Batch]  # the batch of a step, usually Batches(...)
    steps: int
    mesh: str = "data=-1"
    rules: Rules = field(default_factory=Rules)
    seed: int = 0
    accumulate: int = 1
    compute_dtype: str | None = None  # such as "bfloat16"; parameters and optimizer keep their own
    eval_data: Batches | None = None
    eval_every: int = 0  # steps; 0: at the end only
    save_every: int = 0  # steps; 0: at the end only
    on_nonfinite: Literal["stop", "skip"] = "stop"
    out: Path | None = None  # the run directory; None keeps nothing
    sample: Callable[[nnx.Module], str] | None = None  # text to show at the end, from the trained model
    unit: str = "tokens"  # what the weight of the loss counts


@dataclass(frozen=True)
class Result:
    """The state at the end, the metrics of the last step and of the last evaluation, and the time it took."""

    state: TrainState
    metrics: dict[str, float]
    eval_metrics: dict[str, float]
    sample: str | None
    seconds: dict[str, float]  # "compile" and first step, "steps", "eval"


class Stopped(ShardwiseError):
    """Ended early by a signal, after saving; the same command goes on from there."""

    exit_code = 75


def fit(run: Run, *, describe: dict[str, Any] | None = None, console: Console | None = None) -> Result:
    """Trains from the newest checkpoint in `run.out`, or from the start. `describe` goes into run.json as it is."""
    console = console or Console(stderr=True)
    if run.steps < 1:
        raise ConfigError(f"steps={run.steps}; a run has at least 1.")
    mesh = make_mesh(run.mesh)
    spec = abstract_state(run.model, run.optimizer, mesh, run.rules)
    step = make_train_step(
        spec, run.loss, run.data(0), seed=run.seed, accumulate=run.accumulate, compute_dtype=run.compute_dtype
    )
    eval_step = None
    if run.eval_data is not None:
        example = next(run.eval_data.once())
        eval_step = make_eval_step(spec, run.loss, example, compute_dtype=run.compute_dtype)
    peak, flops = _peak_flops(mesh), 3 * _forward_flops(run, step)
    whole = sum(p.bytes_per_device for group in (spec.params, spec.other, spec.opt_state) for p in group.values())
    console.print(
        f"[bold]{spec.num_params / 1e6:.2f}M parameters[/] on mesh [bold]{mesh_text(mesh)}[/] ({mesh.devices.flat[0].device_kind}), "
        f"{show_bytes(whole)} of state on each device, {flops / 1e9:.3g} GFLOP a step"
    )

    checkpoints = log = None
    state = None
    if run.out is not None:
        run.out.mkdir(parents=True, exist_ok=True)
        checkpoints = Checkpoints(run.out / "checkpoints")
        latest = checkpoints.latest()
        if latest is not None:
            state = checkpoints.restore(spec, latest)
            console.print(f"resuming {run.out} at step {latest}")
        _write_json(run.out / "run.json", {**(describe or {}), "steps": run.steps, "mesh": mesh_text(mesh), **_environment()})
        log = MetricsLog(run.out / "metrics.jsonl", latest or 0)
    if state is None:
        state = init_state(spec, run.seed)
    start = int(state.step)
    if start >= run.steps:
        console.print(f"nothing to do: {run.out} has finished its {start} steps. Ask for more with --steps.")

    clock = _Clock()
    record: dict[str, float] = {}
    eval_metrics: dict[str, float] = {}
    pending: tuple[int, dict[str, jax.Array]] | None = None

    def finish(n: int, metrics: dict[str, jax.Array]) -> dict[str, float]:
        """Fetches the metrics of a step that has been overtaken by the next, writes them down, and applies the policy."""
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        finite, weight = values.pop("finite"), values.pop("weight")
        seconds = clock.lap("compile" if n == start + 1 else "steps")
        rate = weight / seconds
        record = {"step": n, **values, "step_s": seconds, f"{run.unit}_per_s": rate}
        if peak:
            record["mfu"] = flops / seconds / peak
        if log is not None:
            log.write(record if finite else {name: _json_number(value) for name, value in record.items()} | {"skipped": True})
        if not finite and run.on_nonfinite == "stop":
            raise NumericsError(
                f"step {n}: loss {values['loss']}, gradient norm {values['grad_norm']}: not finite, so the update was not applied. "
                f"Lower the learning rate or look at the batch of step {n - 1}; on_nonfinite='skip' would leave such batches out."
            )
        return record

    stop = False
    try:
        with _stop_on_signals() as stopped, _progress(console, run, start) as show:
            for n, new_state, metrics in steps(step, state, run.data, until=run.steps):
                state = new_state
                if pending is not None:
                    record = finish(*pending)
                    show(record, eval_metrics)
                pending = (n, metrics)
                stop = stopped()
                last = n == run.steps or stop
                evaluating = eval_step is not None and (n == run.steps or (run.eval_every and n % run.eval_every == 0))
                saving = checkpoints is not None and (last or (run.save_every and n % run.save_every == 0))
                if last or evaluating or saving:
                    record = finish(*pending)
                    pending = None
                if evaluating and eval_step is not None and run.eval_data is not None:
                    eval_metrics = evaluate(eval_step, state, run.eval_data)
                    if log is not None:
                        log.write({"step": n, **{f"eval_{name}": value for name, value in eval_metrics.items()}})
                    clock.lap("eval")
                if saving and checkpoints is not None:
                    checkpoints.save(state, {"step": n, "mesh": mesh_text(mesh)})
                    clock.lap("save")
                if pending is None:
                    show(record, eval_metrics)
                if stop:
                    break
        if checkpoints is not None:
            checkpoints.close()
            clock.lap("save")
    finally:
        if log is not None:
            log.close()
    if stop:
        raise Stopped(f"stopped by a signal after step {int(state.step)}" + (f"; the same command resumes {run.out} there." if run.out else "."))

    text = _sample(run, step, state) if run.sample is not None else None
    _summary(console, run, record, eval_metrics, clock, text)
    return Result(state, record, eval_metrics, text, clock.seconds)


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


def _status(run: Run, record: dict[str, float], eval_metrics: dict[str, float]) -> str:
    text = f"loss {record['loss']:.4f}"
    if eval_metrics:
        text += f", held out {eval_metrics['loss']:.4f}"
    text += f", {show_rate(record[f'{run.unit}_per_s'])} {run.unit}/s"
    return text + (f", MFU {record['mfu']:.1%}" if "mfu" in record else "")


def _summary(
    console: Console, run: Run, record: dict[str, float], eval_metrics: dict[str, float], clock: _Clock, text: str | None
) -> None:
    if eval_metrics:
        console.print(f"held out: {show_metrics(eval_metrics)}")
    spent = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in clock.seconds.items())
    console.print(f"time: {spent}")
    if text is not None:
        console.rule("a sample")
        console.print(text, markup=False, highlight=False)
        console.rule()
    if run.out is not None:
        picture = run.out / "loss.png"
        if record:
            plot_losses(run.out / "metrics.jsonl", picture)
        console.print(f"run directory: {run.out}\nloss curve:    {picture}", highlight=False, soft_wrap=True)


def _sample(run: Run, step: TrainStep, state: TrainState) -> str:
    assert run.sample is not None
    model = step.spec.definition.merge(state.params, state.other, jax.random.key(run.seed))
    model.eval()
    return run.sample(model)


def _forward_flops(run: Run, step: TrainStep) -> float:
    """Of the loss on one global batch; the backward pass takes twice as much again."""
    spec = step.spec

    def forward(params: Any, other: Any, batch: Batch) -> Any:
        model = spec.definition.merge(params, other, jax.random.key(0))
        return as_means(run.loss(model, batch), 1)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((step.layout.rows, *x.shape[1:]), x.dtype), step.batch)
    return count_flops(forward, spec.abstract.params, spec.abstract.other, shapes)


def _peak_flops(mesh: jax.sharding.Mesh) -> float | None:
    chip = find_chip(mesh.devices.flat[0].device_kind)
    return chip.flops * mesh.devices.size if chip else None


def _environment() -> dict[str, Any]:
    packages = ("shardwise", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "processes": jax.process_count()},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _json_number(value: Any) -> Any:
    return value if not isinstance(value, float) or value == value and abs(value) != float("inf") else str(value)
