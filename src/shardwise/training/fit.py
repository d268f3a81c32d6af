"""`fit` carries out a run. This is the glue, and nothing but glue."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise.checkpoint.resume import check_accepted, compare, report
from shardwise.checkpoint.store import Checkpoints
from shardwise.cluster.group import ProcessGroup, current_group, wait_for
from shardwise.cluster.signals import stop_on_signals
from shardwise.cluster.stragglers import Stragglers
from shardwise.cluster.watch import Watch
from shardwise.data import Prefetch, part_of
from shardwise.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    ShardwiseError,
    Stopped,
    where,
)
from shardwise.files.durable import check_links, check_writable, text_digest, write_atomically
from shardwise.files.failpoints import fail_point
from shardwise.files.lock import lock_directory
from shardwise.loop import evaluate, steps
from shardwise.metrics import read_metrics
from shardwise.optim.parts import evaluation_params
from shardwise.optim.read import sample_rates
from shardwise.plan.compile import check_fits, compile_run
from shardwise.run import Prepared, Run, describe_run, prepare
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.trackers.base import TrackedRun, Tracking
from shardwise.training.bad_steps import BadSteps
from shardwise.training.log import Bookkeeper, summary
from shardwise.training.profile import Profile
from shardwise.training.progress import headline, progress, warn, working
from shardwise.training.saver import Saver, is_due
from shardwise.weights.load import check_frozen, describe_frozen, load_initial


@dataclass(frozen=True)
class Result:
    """The state at the end, the metrics of the last step and of the last evaluation, and where the time went."""

    spec: StateSpec
    state: TrainState
    metrics: dict[str, float]
    eval_metrics: dict[str, float]
    sample: str | None
    seconds: dict[str, float]
    stopped_early: str | None = None  # why, if it was before the last step (`Run.stop_when`)


def fit(
    run: Run,
    *,
    describe: dict[str, Any] | None = None,
    console: Console | None = None,
    watch: Watch | None = None,
    force_unlock: bool = False,
    plan: bool = True,
) -> Result:
    """Trains from the newest whole checkpoint in `run.out`, or from the start. `describe` is kept with the run as it is.

    The step is compiled before anything is allocated, and refused if it needs more memory than there is, unless `plan` is False.

    With several processes all of them call this; one prints, writes and decides. `watch` hears signals and looks after the
    processes; without one, SIGINT and SIGTERM are taken while this runs. `force_unlock` takes over a directory that a run on another
    machine has not left in order.
    """
    with ExitStack() as stack:
        if watch is None:
            watch = stack.enter_context(
                Watch(current_group(), stack.enter_context(stop_on_signals()))
            )
        is_first = watch.group.is_first
        console = (console or Console(stderr=True)) if is_first else Console(quiet=True)
        watch.phase("preparing")
        prepared = prepare(run)
        headline(console, prepared)
        if run.out is None:
            return _fit(run, prepared, None, describe or {}, console, watch, plan)
        if is_first:
            check_writable(run.out)
            run.out.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_links(run.out)
            unlock = stack.enter_context(lock_directory(run.out, force_unlock))
            watch.stop.before_exit.insert(0, unlock)
            stack.callback(
                watch.stop.before_exit.remove, unlock
            )  # before the lock is closed, and its number another file's
        watch.group.share("directory", None)
        if not wait_for((run.out / "lock").exists, 10):
            fact = f"{watch.group.name(watch.group.index)} does not see {run.out.resolve()}, which process 0 has made."
            raise ConfigError(
                f"{fact} A run directory must be on a file system that all processes share."
            )
        watch.folder = run.out
        checkpoints = stack.enter_context(
            Checkpoints(run.out / "checkpoints", run.keep, watch.group)
        )
        checkpoints.clean()
        return _fit(run, prepared, checkpoints, describe or {}, console, watch, plan)


def _fit(
    run: Run,
    prepared: Prepared,
    checkpoints: Checkpoints | None,
    describe: dict[str, Any],
    console: Console,
    watch: Watch,
    plan_first: bool,
) -> Result:
    spec, stop, group = prepared.spec, watch.stop, watch.group
    about = {
        **{key: value for key, value in describe.items() if key != "source"},
        **describe_run(run, prepared),
    }
    if "source" in describe:
        about["source_digest"] = text_digest(describe["source"])
    watch.phase("verifying the newest checkpoint")
    saved = _find_saved(run, spec, checkpoints, about, console) if checkpoints is not None else None
    start = saved or 0
    evaluations = _evaluations(run, start, group)
    ended = run.stop_when.why(evaluations) if run.stop_when is not None else None
    until = run.steps if ended is None else start
    plan = None
    watch.phase("compiling the step")
    if plan_first and start < until:
        with working(console, "compiling the step"):
            plan, prepared = compile_run(run, prepared)
        check_fits(plan)
        console.print(f"plan: {plan.line()}", highlight=False, soft_wrap=True)
    watch.phase("loading the state")
    if checkpoints is not None and saved is not None:
        with working(console, f"loading step {saved}"):
            state = checkpoints.restore(spec, saved)
        if spec.frozen:
            frozen = _begin(run, spec, about, console).frozen
            check_frozen(checkpoints.metadata(saved), about["frozen"], checkpoints.path(saved))
            state = replace(state, frozen=frozen)
    else:
        state = _begin(run, spec, about, console)
    saver = Saver(run, checkpoints, about, console, start, watch)
    if run.out is not None and group.is_first:
        _write_about(run, {**describe, **about}, ended)
    if start >= until:
        early = f"was stopped early after step {start}: {ended}"
        done = (
            f"has finished its {start} steps. Ask for more with --steps" if ended is None else early
        )
        console.print(f"nothing to do: {run.out} {done}.", highlight=False, soft_wrap=True)

    eval_metrics: dict[str, float] = {}
    metrics: dict[str, Any] = {}
    text: str | None = None
    is_stopped = False
    workers = {"threads": run.data_threads, "processes": run.data_processes}
    batches = part_of(prepared.batches, prepared.step.layout.ranges)
    feed = Prefetch(
        batches, start, until, place=prepared.step.place, is_stopped=watch.is_stopping, **workers
    )
    book = Bookkeeper(run, prepared, start, plan, group, watch.start, saver.began)
    bad = BadSteps(run, prepared, batches, group, console)
    profile = Profile(
        run.profile if group.is_first and start < until else None,
        run.out,
        start,
        partial(console.print, highlight=False, soft_wrap=True),
    )
    step = profile.annotated(prepared.step)
    sampler = _Sampler(run, spec, group, console)

    def evaluated(n: int) -> dict[str, float]:
        assert prepared.eval_step is not None
        assert run.eval_data is not None
        book.finish()
        watch.phase(f"evaluating after step {n}")
        found = evaluate(prepared.eval_step, state, run.eval_data, before=lambda: _at_batch(watch))
        book.evaluated(n, found)
        if run.stop_when is not None:
            evaluations.append((n, found[run.stop_when.metric.removeprefix("eval_")]))
        return found

    def look(n: int, why: str, values: dict[str, Any]) -> None:
        """At a step that was not applied. The next one may be under way already: what it did is part of the state."""
        watch.phase(f"looking into step {n}")
        is_untouched = (
            int(state.step) == n
            or not bool(metrics["finite"])
            or bool(metrics.get("skipped", False))
        )
        bad.look(n, why, values, state, is_untouched)

    book.on_bad = look
    with _tracked(run, book, about, start, until, console), book:
        with feed, progress(console, run, start) as show:
            try:
                pace = Stragglers(group)
                watch.phase("waiting for all to be ready")
                group.union("ready", None)
                if book.owes_evaluation(start):
                    eval_metrics = evaluated(start)
                    ended = run.stop_when.why(evaluations) if run.stop_when is not None else None
                if profile.is_due(start):
                    profile.turn(start, None)
                watch.phase(f"step {start + 1}")
                for n, state, metrics in steps(
                    step, state, feed, until=until if ended is None else start
                ):
                    stop.at_once = False  # from here on there is something to lose
                    watch.tick(f"step {n}")
                    book.record(n, metrics, feed.waited)
                    is_evaluated = run.eval_data is not None and is_due(
                        n, run.eval_every, n == run.steps
                    )
                    if is_evaluated:
                        eval_metrics = evaluated(n)
                        saver.evaluated(eval_metrics)
                        ended = (
                            run.stop_when.why(evaluations) if run.stop_when is not None else None
                        )
                        watch.tick(f"step {n}")
                    if saver.is_due(n):
                        book.finish()
                        watch.phase(f"saving step {n}")
                        saver.save(state, book.of_step)
                        book.clock.lap("save")
                        watch.tick(f"step {n}")
                    if (
                        run.sample is not None
                        and n < run.steps
                        and (
                            is_due(n, run.sample_every, False) if run.sample_every else is_evaluated
                        )
                    ):
                        book.finish()
                        watch.phase(f"a sample after step {n}")
                        book.sampled(n, sampler(state))
                        watch.tick(f"step {n}")
                    if profile.is_due(n):
                        book.finish()
                        watch.phase(f"profiling after step {n}")
                        profile.turn(n, metrics)
                        book.clock.lap("profile")
                        watch.tick(f"step {n}")
                    if book.last:
                        show(book.last, eval_metrics)
                    for name, why in book.newly_skipped():  # each process tells of its own
                        own = console if group.is_first else Console(stderr=True)
                        warn(own, f"{name} is left out, and another row takes its place: {why}")
                    for words in pace.look(feed.waited):
                        warn(console, words)
                    if ended is not None:
                        break
                    if watch.is_stopping() and n < run.steps:
                        is_stopped = True
                        break
                if book.finish():
                    show(book.last, eval_metrics)
            except DataError:
                if group.count > 1:  # the others are at a step that this process cannot join
                    raise
                book.finish()
                saver.finish(state, book.of_step)
                raise
            except (
                Stopped
            ):  # while waiting for data, or in an evaluation, which the resumed run makes up for
                book.finish()
                is_stopped = True
            except NumericsError as error:
                raise NumericsError(f"{error}{saver.newest()}") from error
            finally:
                profile.end()
            watch.phase("saving the last step")
            saver.finish(state, book.of_step)
            book.clock.lap("save")
        if is_stopped:
            place = (
                f"; the same command resumes {run.out} there."
                if run.out
                else ", and not saved: the run has no directory (out)."
            )
            raise Stopped(f"stopped by a signal after step {int(state.step)}{place}")
        book.note_phases()
        if ended is not None and start < until and run.out is not None and group.is_first:
            _write_about(run, {**describe, **about}, ended)
        stop.at_once, stop.last_words = (
            True,
            "stopped by a signal after the last step, which is saved.",
        )
        watch.phase("the end")
        if run.sample is not None:
            text = sampler(state)
            book.sampled(int(state.step), text)
    if group.is_first:
        if ended is not None and start < until:
            console.print(
                f"stopped early after step {int(state.step)}: {ended}",
                highlight=False,
                soft_wrap=True,
            )
        summary(console, run, book, eval_metrics, text)
    return Result(spec, state, book.last, eval_metrics, text, book.clock.seconds, ended)


def _write_about(run: Run, about: dict[str, Any], ended: str | None) -> None:
    """`run.json`: what the run is, and why it ended if that was early."""
    assert run.out is not None
    keep = {
        name: value
        for name, value in asdict(run.keep).items()
        if name in ("best", "metric", "largest")
    }
    early = {} if ended is None else {"stopped_early": ended}
    write_atomically(
        run.out / "run.json",
        json.dumps({**about, "steps": run.steps, "keep": keep, **early}, indent=2, default=str)
        + "\n",
    )


def _evaluations(run: Run, start: int, group: ProcessGroup) -> list[tuple[int, float]]:
    """(step, value) of the evaluations that early stopping goes by, up to the step that the run begins from."""
    if run.stop_when is None or run.out is None:
        return []
    found: list[list[Any]] = []
    if group.is_first and start and (path := run.out / "metrics.jsonl").exists():
        found = [
            [r["step"], r[run.stop_when.metric]]
            for r in read_metrics(path)
            if run.stop_when.metric in r and r["step"] <= start
        ]
    return [(int(step), float(value)) for step, value in group.share("evaluations", found)]


@contextmanager
def _tracked(
    run: Run, book: Bookkeeper, about: dict[str, Any], start: int, until: int, console: Console
) -> Iterator[None]:
    """While the run goes on, the book tells its trackers too."""
    if not run.trackers or run.out is None or book.log is None or start >= until:
        yield
        return
    short = {
        key: value
        for key, value in about.items()
        if key not in ("model", "data", "lr", "optimizer", "source_digest", "frozen")
    }
    told = TrackedRun(
        run.out.resolve().name, run.out.resolve(), {**short, "steps": run.steps}, start
    )
    book.tracking = Tracking(run.trackers, told, book.log.seen, lambda text: warn(console, text))
    code = 1
    try:
        yield
        code = 0
    except ShardwiseError as error:
        code = error.exit_code
        raise
    finally:
        book.tracking.close(code)


def _begin(run: Run, spec: StateSpec, about: dict[str, Any], console: Console) -> TrainState:
    """The state of step 0; notes what is frozen in it, which no checkpoint will hold."""
    loaded = None
    if run.init_from is None:
        state = init_state(spec, run.seed)
    else:
        state, loaded = load_initial(run.init_from, spec, run.seed)
        console.print(loaded.table(), highlight=False)
    if spec.frozen:
        about["frozen"] = describe_frozen(spec, state.frozen, loaded)
    return state


def _find_saved(
    run: Run, spec: StateSpec, checkpoints: Checkpoints, about: dict[str, Any], console: Console
) -> int | None:
    """The newest whole step in the run directory, if there is one, after telling what differs from the run that saved it."""
    with console.status(f"verifying the newest checkpoint of {run.out}"):
        step = checkpoints.newest_good(lambda text: warn(console, text))
    if step is None:
        return None
    checkpoints.check_fits(spec, step)
    saved = {key: value for key, value in checkpoints.metadata(step).items() if key in about}
    try:
        rates = {group: _from_update(step, values) for group, values in saved.get("lr", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoints.path(step) / 'meta.json'} does not describe the learning rates of a run: {error}"
        ) from error
    points = np.array(sorted({int(at) for values in rates.values() for at in values}), int)
    rates_now = sample_rates(run.optimizer, spec.abstract.params, points) if len(points) else {}
    differences = compare(
        {**saved, "lr": _by_update(rates)}, {**about, "lr": _by_update(rates_now)}
    )
    check_accepted(differences, run.accept, f"checkpoint {checkpoints.path(step)}")
    console.print(
        report(differences, run.accept, f"resuming {run.out} at step {step}"),
        highlight=False,
        soft_wrap=True,
    )
    return step


def _from_update(step: int, rates: dict[str, float]) -> dict[str, float]:
    """The samples of a schedule from the update before `step` on: what was before that is done."""
    past = max((int(at) for at in rates if int(at) < step), default=0)
    return {at: float(rate) for at, rate in rates.items() if int(at) >= past}


def _by_update(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"of group '{group}' at update {at}": rate
        for group, values in rates.items()
        for at, rate in values.items()
    }


def _at_batch(watch: Watch) -> None:
    """Before each batch of an evaluation."""
    fail_point("evaluate")
    watch.phase("evaluating")
    if watch.is_stopping():
        raise Stopped("stopped by a signal during an evaluation")


class _Sampler:
    """Text from the model, made by one process from weights that are whole there. A mistake in `Run.sample` is told, and costs no more."""

    def __init__(self, run: Run, spec: StateSpec, group: ProcessGroup, console: Console):
        self.run, self.spec, self.group, self.console = run, spec, group, console
        self.last: tuple[int, str] = (-1, "")

    def is_due(self, n: int, is_evaluated: bool) -> bool:
        """Whether there is a sample after step n, but for the last."""
        if self.run.sample is None or n == self.run.steps:
            return False
        return n % self.run.sample_every == 0 if self.run.sample_every else is_evaluated

    def __call__(self, state: TrainState) -> str:
        n = int(state.step)
        if self.last[0] != n:
            self.last = (n, self._make(state))
        return self.last[1]

    def _make(self, state: TrainState) -> str:
        assert self.run.sample is not None
        state = replace(state, params=evaluation_params(state.opt_state, state.params))
        if self.group.count > 1:
            whole = jax.jit(lambda tree: tree, out_shardings=self.spec.sharding(PartitionSpec()))(
                (state.params, state.other, state.frozen)
            )
            if not self.group.is_first:
                return ""
            params, other, frozen = jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
            state = replace(state, params=params, other=other, frozen=frozen)
        model = self.spec.module(state, jax.random.key(self.run.seed))
        model.eval()
        try:
            return self.run.sample(model)
        except Exception as error:
            warn(self.console, f"there is no sample: {where(error)}")
            return ""
