"""`fit` carries out a run. This is the glue, and nothing but glue."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise.bookkeeping import Bookkeeper, Saver, headline, is_due, progress, summary, warn, working
from shardwise.checkpoint import Checkpoints
from shardwise.data import Prefetch, part_of
from shardwise.errors import CheckpointError, ConfigError, DataError, NumericsError, Stopped
from shardwise.files import check_links, check_writable, fail_point, lock_directory, text_digest, write_whole
from shardwise.group import Group, current_group, wait_for
from shardwise.initial import load_initial
from shardwise.loop import evaluate, steps
from shardwise.optim.parts import evaluation_params
from shardwise.optim.read import sample_rates
from shardwise.pace import Pace
from shardwise.planning import check_fits, compile_run
from shardwise.resume import check_accepted, compare, report
from shardwise.run import Prepared, Run, describe_run, prepare
from shardwise.signals import stop_on_signals
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.watch import Watch


@dataclass(frozen=True)
class Result:
    """The state at the end, the metrics of the last step and of the last evaluation, and where the time went."""

    spec: StateSpec
    state: TrainState
    metrics: dict[str, float]
    eval_metrics: dict[str, float]
    sample: str | None
    seconds: dict[str, float]


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
            watch = stack.enter_context(Watch(current_group(), stack.enter_context(stop_on_signals())))
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
            stack.callback(watch.stop.before_exit.remove, unlock)  # before the lock is closed, and its number another file's
        watch.group.share("directory", None)
        if not wait_for((run.out / "lock").exists, 10):
            where = f"{watch.group.name(watch.group.index)} does not see {run.out.resolve()}, which process 0 has made."
            raise ConfigError(f"{where} A run directory must be on a file system that all processes share.")
        watch.folder = run.out
        checkpoints = stack.enter_context(Checkpoints(run.out / "checkpoints", run.keep, watch.group))
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
    about = {**{key: value for key, value in describe.items() if key != "source"}, **describe_run(run, prepared)}
    if "source" in describe:
        about["source_digest"] = text_digest(describe["source"])
    watch.phase("verifying the newest checkpoint")
    saved = _find_saved(run, spec, checkpoints, about, console) if checkpoints is not None else None
    start = saved or 0
    plan = None
    watch.phase("compiling the step")
    if plan_first and start < run.steps:
        with working(console, "compiling the step"):
            plan, prepared = compile_run(run, prepared)
        check_fits(plan)
        console.print(f"plan: {plan.line()}", highlight=False, soft_wrap=True)
    watch.phase("loading the state")
    if checkpoints is not None and saved is not None:
        with working(console, f"loading step {saved}"):
            state = checkpoints.restore(spec, saved)
    else:
        state = _begin(run, spec, console)
    saver = Saver(run, checkpoints, about, console, start, watch)
    if run.out is not None and group.is_first:
        write_whole(run.out / "run.json", json.dumps({**describe, **about, "steps": run.steps}, indent=2, default=str) + "\n")
    if start >= run.steps:
        console.print(f"nothing to do: {run.out} has finished its {start} steps. Ask for more with --steps.")

    eval_metrics: dict[str, float] = {}
    is_stopped = False
    workers = {"threads": run.data_threads, "processes": run.data_processes}
    batches = part_of(prepared.batches, prepared.step.layout.ranges)
    feed = Prefetch(batches, start, run.steps, place=prepared.step.place, is_stopped=watch.is_stopping, **workers)
    with Bookkeeper(run, prepared, start, plan, group, watch.start) as book, feed, progress(console, run, start) as show:

        def evaluated(n: int) -> dict[str, float]:
            assert prepared.eval_step is not None
            assert run.eval_data is not None
            book.finish()
            watch.phase(f"evaluating after step {n}")
            found = evaluate(prepared.eval_step, state, run.eval_data, before=lambda: _at_batch(watch))
            book.evaluated(n, found)
            return found

        try:
            pace = Pace(group)
            watch.phase("waiting for all to be ready")
            group.union("ready", None)
            if book.owes_evaluation(start):
                eval_metrics = evaluated(start)
            watch.phase(f"step {start + 1}")
            for n, state, metrics in steps(prepared.step, state, feed, until=run.steps):
                stop.at_once = False  # from here on there is something to lose
                watch.tick(f"step {n}")
                book.record(n, metrics, feed.waited)
                if run.eval_data is not None and is_due(n, run.eval_every, n == run.steps):
                    eval_metrics = evaluated(n)
                    watch.tick(f"step {n}")
                if saver.is_due(n):
                    book.finish()
                    watch.phase(f"saving step {n}")
                    saver.save(state, book.of_step)
                    book.clock.lap("save")
                    watch.tick(f"step {n}")
                if book.last:
                    show(book.last, eval_metrics)
                for name, why in book.newly_skipped():  # each process tells of its own
                    warn(console if group.is_first else Console(stderr=True), f"{name} is left out, and another row takes its place: {why}")
                for words in pace.look(feed.waited):
                    warn(console, words)
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
        except Stopped:  # while waiting for data, or in an evaluation, which the resumed run makes up for
            book.finish()
            is_stopped = True
        except NumericsError as error:
            raise NumericsError(f"{error}{saver.newest()}") from error
        watch.phase("saving the last step")
        saver.finish(state, book.of_step)
        book.clock.lap("save")
    if is_stopped:
        where = f"; the same command resumes {run.out} there." if run.out else ", and not saved: the run has no directory (out)."
        raise Stopped(f"stopped by a signal after step {int(state.step)}{where}")

    stop.at_once, stop.last_words = True, "stopped by a signal after the last step, which is saved."
    watch.phase("the end")
    text = _sample(run, spec, state, group) if run.sample is not None else None
    if group.is_first:
        summary(console, run, book, eval_metrics, text)
    return Result(spec, state, book.last, eval_metrics, text, book.clock.seconds)


def _begin(run: Run, spec: StateSpec, console: Console) -> TrainState:
    """The state of step 0."""
    if run.init_from is None:
        return init_state(spec, run.seed)
    state, loaded = load_initial(run.init_from, spec, run.seed)
    console.print(loaded.table(), highlight=False)
    return state


def _find_saved(run: Run, spec: StateSpec, checkpoints: Checkpoints, about: dict[str, Any], console: Console) -> int | None:
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
        raise CheckpointError(f"{checkpoints.path(step) / 'meta.json'} does not describe the learning rates of a run: {error}") from error
    points = np.array(sorted({int(at) for values in rates.values() for at in values}), int)
    rates_now = sample_rates(run.optimizer, spec.abstract.params, points) if len(points) else {}
    differences = compare({**saved, "lr": _by_update(rates)}, {**about, "lr": _by_update(rates_now)})
    check_accepted(differences, run.accept, f"checkpoint {checkpoints.path(step)}")
    console.print(report(differences, run.accept, f"resuming {run.out} at step {step}"), highlight=False, soft_wrap=True)
    return step


def _from_update(step: int, rates: dict[str, float]) -> dict[str, float]:
    """The samples of a schedule from the update before `step` on: what was before that is done."""
    past = max((int(at) for at in rates if int(at) < step), default=0)
    return {at: float(rate) for at, rate in rates.items() if int(at) >= past}


def _by_update(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    return {f"of group '{group}' at update {at}": rate for group, values in rates.items() for at, rate in values.items()}


def _at_batch(watch: Watch) -> None:
    """Before each batch of an evaluation."""
    fail_point("evaluate")
    watch.phase("evaluating")
    if watch.is_stopping():
        raise Stopped("stopped by a signal during an evaluation")


def _sample(run: Run, spec: StateSpec, state: TrainState, group: Group) -> str:
    """Made by one process, from weights that are whole there."""
    assert run.sample is not None
    weights = evaluation_params(state.opt_state, state.params)
    state = replace(state, params=weights)
    if group.count > 1:
        whole = jax.jit(lambda tree: tree, out_shardings=spec.sharding(PartitionSpec()))((state.params, state.other))
        if not group.is_first:
            return ""
        params, other = jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)
        state = replace(state, params=params, other=other)
    model = spec.module(state, jax.random.key(run.seed))
    model.eval()
    return run.sample(model)
