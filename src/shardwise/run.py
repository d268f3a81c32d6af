"""A run is a frozen dataclass of real objects; `fit` carries it out. This is the glue, and nothing but glue."""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shardwise.checkpoint import Checkpoints, Keep
from shardwise.data import Batches, Prefetch, as_batches
from shardwise.errors import CheckpointError, ConfigError, DataError, NumericsError, Stopped
from shardwise.files import check_writable, fail_point, lock_directory, text_digest, write_whole
from shardwise.flops import count_flops
from shardwise.hardware import find_chip
from shardwise.loop import evaluate, steps
from shardwise.mesh import mesh_text
from shardwise.metrics import MetricsLog, read_metrics
from shardwise.module import ModelFactory
from shardwise.optim.parts import evaluation_params
from shardwise.optim.read import read_chains, sample_rates
from shardwise.report import plot_losses, show_count, show_metrics, show_seconds
from shardwise.resume import check_accepted, compare, report
from shardwise.sharding import Rules, show_bytes
from shardwise.signals import Stop, stop_on_signals
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
    keep: Keep = field(default_factory=Keep)  # which checkpoints outlive the next one
    accept: tuple[str, ...] = ()  # what may differ from the run that is resumed: "lr", "data", "optimizer", "seed", "compute_dtype"
    out: Path | None = None  # the run directory; None keeps nothing
    data_threads: int = 1  # that read batches ahead of need
    data_processes: int = 0  # or processes, for data that takes Python long to decode
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


def fit(
    run: Run,
    *,
    describe: dict[str, Any] | None = None,
    console: Console | None = None,
    stop: Stop | None = None,
    force_unlock: bool = False,
) -> Result:
    """Trains from the newest whole checkpoint in `run.out`, or from the start. `describe` is kept with the run as it is.

    A signal is noted in `stop`, if one is given; otherwise SIGINT and SIGTERM are taken while this runs. `force_unlock`
    takes over a directory that a run on another machine has not left in order.
    """
    console = console or Console(stderr=True)
    prepared = prepare(run)
    _headline(console, prepared)
    with ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(stop_on_signals())
        if run.out is None:
            return _fit(run, prepared, None, describe or {}, console, stop)
        check_writable(run.out)
        run.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        stop.before_exit.append(stack.enter_context(lock_directory(run.out, force_unlock)))
        checkpoints = stack.enter_context(Checkpoints(run.out / "checkpoints", run.keep))
        checkpoints.clean()
        return _fit(run, prepared, checkpoints, describe or {}, console, stop)


def _fit(run: Run, prepared: Prepared, checkpoints: Checkpoints | None, describe: dict[str, Any], console: Console, stop: Stop) -> Result:
    spec = prepared.spec
    about = {**{key: value for key, value in describe.items() if key != "source"}, **_describe(run, prepared)}
    if "source" in describe:
        about["source_digest"] = text_digest(describe["source"])
    restored = _restore(run, spec, checkpoints, about, console) if checkpoints is not None else None
    state = restored if restored is not None else init_state(spec, run.seed)
    start = int(state.step)
    saver = _Saver(run, checkpoints, about, console, start)
    if run.out is not None:
        write_whole(run.out / "run.json", json.dumps({**describe, **about, "steps": run.steps}, indent=2, default=str) + "\n")
    if start >= run.steps:
        console.print(f"nothing to do: {run.out} has finished its {start} steps. Ask for more with --steps.")

    eval_metrics: dict[str, float] = {}
    feed = Prefetch(prepared.batches, start, run.steps, place=prepared.step.place, threads=run.data_threads, processes=run.data_processes)
    with _Bookkeeper(run, prepared, start) as book, feed, _progress(console, run, start) as show:

        def evaluated(n: int) -> dict[str, float]:
            assert prepared.eval_step is not None
            assert run.eval_data is not None
            book.finish()
            batches = _until_stopped(run.eval_data.once(), stop)
            found = evaluate(prepared.eval_step, state, batches, rows=run.eval_data.batch_size)
            book.write({"step": n, **{f"eval_{name}": value for name, value in found.items()}}, "eval")
            return found

        try:
            if book.owes_evaluation(start):
                eval_metrics = evaluated(start)
            for n, state, metrics in steps(prepared.step, state, feed, until=run.steps):
                stop.at_once = False  # from here on there is something to lose
                book.record(n, metrics, feed.waited)
                if run.eval_data is not None and is_due(n, run.eval_every, n == run.steps):
                    eval_metrics = evaluated(n)
                if saver.is_due(n):
                    book.finish()
                    saver.save(state, {**book.last, **{f"eval_{name}": value for name, value in eval_metrics.items()}})
                    book.clock.lap("save")
                if book.last:
                    show(book.last, eval_metrics)
                if stop.requested:
                    break
            if book.finish():
                show(book.last, eval_metrics)
        except DataError:
            book.finish()
            saver.finish(state, book.last)
            raise
        except Stopped:  # in an evaluation, which the resumed run makes up for
            pass
        except NumericsError as error:
            raise NumericsError(f"{error}{saver.newest()}") from error
        saver.finish(state, book.last | {f"eval_{name}": value for name, value in eval_metrics.items()})
        book.clock.lap("save")
    if stop.requested and int(state.step) < run.steps:
        where = f"; the same command resumes {run.out} there." if run.out else ", and not saved: the run has no directory (out)."
        raise Stopped(f"stopped by a signal after step {int(state.step)}{where}")

    stop.at_once, stop.last_words = True, "stopped by a signal after the last step, which is saved."
    text = _sample(run, spec, state) if run.sample is not None else None
    _summary(console, run, book, eval_metrics, text)
    return Result(spec, state, book.last, eval_metrics, text, book.clock.seconds)


def _describe(run: Run, prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it, as JSON. `resume.compare` sets two of them side by side."""
    params = prepared.spec.abstract.params
    fingerprint = getattr(run.data, "fingerprint", None)
    return {
        "data": fingerprint() if fingerprint is not None else "a function or an iterator, whose content is not known",
        "lr": sample_rates(run.optimizer, params, np.linspace(0, run.steps - 1, 65).astype(int)),
        "optimizer": _describe_optimizer(run.optimizer, params),
        "seed": run.seed,
        "compute_dtype": run.compute_dtype,
        "accumulate": run.accumulate,
        "mesh": mesh_text(prepared.spec.mesh),
        **_environment(),
    }


def _describe_optimizer(optimizer: Any, params: Any) -> dict[str, Any]:
    """For each parameter, layers taken together, what it goes through; learning rates are described apart."""
    described: dict[str, set[str]] = {}
    for path, chain in read_chains(optimizer, params).items():
        if path:
            alike = "/".join("*" if part.isdigit() else part for part in path.split("/"))
            described.setdefault(alike, set()).add(" > ".join(str(part) for part in chain.parts if part.factor is None))
    return {path: " | ".join(sorted(texts)) for path, texts in described.items()}


def _restore(run: Run, spec: StateSpec, checkpoints: Checkpoints, about: dict[str, Any], console: Console) -> TrainState | None:
    """The newest whole state in the run directory, if there is one, after telling what differs from the run that saved it."""
    step = checkpoints.newest_good(lambda text: console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True))
    if step is None:
        return None
    checkpoints.check_fits(spec, step)
    saved = {key: value for key, value in checkpoints.metadata(step).items() if key in about}
    rates = {group: _from_update(step, values) for group, values in saved.get("lr", {}).items()}
    points = np.array(sorted({int(at) for values in rates.values() for at in values}), int)
    rates_now = sample_rates(run.optimizer, spec.abstract.params, points) if len(points) else {}
    differences = compare({**saved, "lr": _by_update(rates)}, {**about, "lr": _by_update(rates_now)})
    check_accepted(differences, run.accept, f"checkpoint {checkpoints.path(step)}")
    console.print(report(differences, run.accept, f"resuming {run.out} at step {step}"), highlight=False, soft_wrap=True)
    return checkpoints.restore(spec, step)


def _from_update(step: int, rates: dict[str, float]) -> dict[str, float]:
    """The samples of a schedule from the update before `step` on: what was before that is done."""
    past = max((int(at) for at in rates if int(at) < step), default=0)
    return {at: rate for at, rate in rates.items() if int(at) >= past}


def _by_update(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"of group '{group}' at update {at}": rate for group, values in rates.items() for at, rate in values.items()}


def is_due(n: int, every: int, last: bool) -> bool:
    return last or bool(every and n % every == 0)


def _until_stopped(batches: Iterable[Batch], stop: Stop) -> Iterator[Batch]:
    for batch in batches:
        fail_point("evaluate")
        if stop.requested:
            raise Stopped("stopped by a signal during an evaluation")
        yield batch


class _Saver:
    """Saves when it is due. A save that fails is told at the next step and tried again; only the last one must succeed."""

    def __init__(self, run: Run, checkpoints: Checkpoints | None, about: dict[str, Any], console: Console, start: int):
        self.run, self.checkpoints, self.about, self.console = run, checkpoints, about, console
        self.failures = 0  # in a row
        self.retry_at: int | None = None
        if run.out is not None and start < run.steps and _starts_in_a_row(run.out, start) >= 2:
            self.retry_at = start + 1
            self._warn(
                f"this is the third start in a row from step {start}: the run is stopped sooner than a checkpoint is reached. "
                f"Saving after the next step; a smaller save_every than {run.save_every or run.steps} would lose less."
            )

    def is_due(self, n: int) -> bool:
        """Whether step n is to be saved in passing; looks after the save that goes on, too."""
        if self.checkpoints is None:
            return False
        try:
            if self.checkpoints.check():
                self.failures = 0
        except CheckpointError as error:
            self._note(n, error)
        return n != self.run.steps and (n == self.retry_at or is_due(n, self.run.save_every, False))

    def save(self, state: TrainState, metrics: dict[str, Any]) -> None:
        assert self.checkpoints is not None
        try:
            self.checkpoints.save(state, {**self.about, "metrics": metrics})
            self.retry_at = None
        except CheckpointError as error:
            self._note(int(state.step), error)

    def finish(self, state: TrainState, metrics: dict[str, Any], tries: int = 3) -> None:
        """Sees to it that this state is on the disk, verified; waits for it."""
        if self.checkpoints is None or int(state.step) == 0:
            return
        for left in reversed(range(tries)):
            try:
                self.checkpoints.wait()
                if self.checkpoints.latest() != int(state.step):
                    self.checkpoints.save(state, {**self.about, "metrics": metrics})
                    self.checkpoints.wait()
                break
            except CheckpointError as error:
                if not left:
                    raise CheckpointError(f"{error}\nThe run is not saved at step {int(state.step)}{self.newest()}") from error
                self._warn(f"{error}; trying again")
                time.sleep(0.5)
        if problems := self.checkpoints.verify(int(state.step)):
            raise CheckpointError("the last checkpoint is not what was written:\n" + "\n".join(problems))

    def newest(self) -> str:
        """A sentence on where one can go back to."""
        steps = self.checkpoints.steps() if self.checkpoints is not None else []
        return f" The newest checkpoint is step {steps[-1]}." if steps else " There is no checkpoint to go back to."

    def _note(self, n: int, error: CheckpointError) -> None:
        self.failures += 1
        self.retry_at = n + 2 ** min(self.failures - 1, 10)
        self._warn(f"{error}. Training goes on; the next try is after step {self.retry_at}.")

    def _warn(self, text: str) -> None:
        self.console.print(f"[bold yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _starts_in_a_row(directory: Path, step: int) -> int:
    """How often the run was started from this very step before, without another in between; notes this start."""
    path = directory / "starts.jsonl"
    before = read_metrics(path) if path.exists() else []
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "time": time.time()}) + "\n")
    return len(list(takewhile(lambda start: start["step"] == step, reversed(before))))


class _Bookkeeper:
    """Writes down each step once the next one is under way, so that reading its metrics never leaves the devices idle."""

    def __init__(self, run: Run, prepared: Prepared, start: int):
        self.run, self.prepared, self.first = run, prepared, start + 1
        self.log = MetricsLog(run.out / "metrics.jsonl", start) if run.out is not None else None
        self.waited = 0.0  # for data, in all
        self.clock = _Clock()
        self.last: dict[str, Any] = {}
        self.skips = 0  # in a row
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None

    def __enter__(self) -> "_Bookkeeper":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.log is not None:
            self.log.close()

    def owes_evaluation(self, start: int) -> bool:
        """Whether the run was stopped after step `start`, before the evaluation that was due there."""
        if start == 0 or self.run.eval_data is None or not is_due(start, self.run.eval_every, start == self.run.steps):
            return False
        return self.log is not None and not any(r["step"] == start and any(k.startswith("eval_") for k in r) for r in self.log.kept)

    def record(self, n: int, metrics: dict[str, jax.Array], waited: float = 0.0) -> None:
        """Takes the metrics of step n, and the time spent on waiting for data so far; finishes the step before it."""
        self.finish()
        self._pending = (n, metrics, waited - self.waited)
        self.waited = waited

    def finish(self) -> bool:
        """Waits for the step that is pending, if there is one; applies the policy for numbers that are not finite."""
        if self._pending is None:
            return False
        (n, metrics, data_s), self._pending = self._pending, None
        values = {name: value.item() for name, value in metrics.items()}
        finite, weight = values.pop("finite"), values.pop("weight")
        seconds = self.clock.lap("compile" if n == self.first else "steps")
        self.last = {"step": n, **values, "step_s": seconds, "data_s": data_s, f"{self.run.unit}_per_s": weight / seconds}
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
                f"Lower the learning rate, or look at the batch: shardwise data show RECIPE --step {n}. on_nonfinite='skip' would leave "
                f"such batches out."
            )
        return True

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
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "processes": jax.process_count()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
