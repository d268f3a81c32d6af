"""`fit` carries out a run: it prepares, trains and finishes.

`starting.py` has what happens before the first step, `session.py` the operations after each step.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console

from shardwise.checkpoint.store import Checkpoints
from shardwise.cluster.group import ProcessGroup, current_group
from shardwise.cluster.signals import stop_on_signals
from shardwise.cluster.stragglers import Stragglers
from shardwise.cluster.watch import Watch
from shardwise.console import warn, working
from shardwise.data import Prefetch, Stream, part_of
from shardwise.data.batches import BatchFunction, LocalBatches
from shardwise.data.contract import (
    EVERY_PROCESS,
    DataCheck,
    batch_digest,
    check_same_data,
    check_summaries,
)
from shardwise.data.evaluation import Once
from shardwise.data.reuse import owned
from shardwise.errors import (
    CheckpointError,
    CorruptionError,
    DataError,
    NumericsError,
    ShardwiseError,
    Stopped,
)
from shardwise.loop import steps
from shardwise.plan.compile import check_divided, check_fits, compile_run
from shardwise.plan.plan import Plan
from shardwise.run import Prepared, Run, prepare
from shardwise.rundir.phases import Phase
from shardwise.state import StateSpec, TrainState
from shardwise.text import Json
from shardwise.trackers.base import TrackedRun, Tracking
from shardwise.training import starting
from shardwise.training.audit import Auditor, check_auditable
from shardwise.training.bad_steps import BadSteps
from shardwise.training.log import RunLog
from shardwise.training.profile import Profile
from shardwise.training.progress import Show, headline, print_summary, progress
from shardwise.training.sampler import Sampler
from shardwise.training.saver import Saver
from shardwise.training.session import Session

# Parts of the description of a run that trackers do not receive: they are long.
NOT_TRACKED = (
    "source",
    "source_digest",
    "model",
    "loss",
    "data",
    "lr",
    "optimizer",
    "frozen",
)


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        spec: the abstract state.
        state: the state at the end.
        metrics: the record of the last step; empty if no step was made.
        eval_metrics: the metrics of the last evaluation; empty if there was none.
        sample: the sample of the last state, or None if the run has no `sample`.
        seconds: where the time went, by name.
        stopped_early: why the run stopped before its last step (`Run.stop_when`), or None.
    """

    spec: StateSpec
    state: TrainState
    metrics: dict[str, float]
    eval_metrics: dict[str, float]
    sample: str | None
    seconds: dict[str, float]
    stopped_early: str | None = None


def fit(
    run: Run,
    *,
    describe: Mapping[str, object] | None = None,
    console: Console | None = None,
    watch: Watch | None = None,
    force_unlock: bool = False,
    plan: bool = True,
) -> Result:
    """Train from the newest undamaged checkpoint in `run.out`, or from the start.

    With several processes all of them call this; the first one prints, writes files and decides.

    Args:
        run: the run.
        describe: further entries for `run.json`, such as the recipe and its arguments.
        console: where to print; by default stderr.
        watch: receives signals and coordinates the processes. By default SIGINT and SIGTERM are
            handled while this function runs.
        force_unlock: take over a directory that a run on another machine did not release.
        plan: compile the step before anything is allocated, and refuse it if it needs more memory
            than a device has.

    Returns:
        The state and the metrics at the end.

    Raises:
        ConfigError: the configuration is invalid, or the step does not fit into memory.
        DataError: a batch cannot be read. The state before it is saved.
        NumericsError: the loss or the gradient is non-finite, see `Run.on_nonfinite`; or a check
            in the model or the loss failed.
        CheckpointError: a checkpoint cannot be read, or the last one cannot be written.
        Stopped: a signal has stopped the run. The state is saved; the same call resumes.

    Example:
        >>> result = fit(Run(model=model, loss=loss, optimizer=optax.adamw(1e-3),
        ...                  data=Batches(data, 32), steps=1000, out=Path("runs/a")))
        >>> result.metrics["loss"]
    """
    with ExitStack() as stack:
        if watch is None:
            stop = stack.enter_context(stop_on_signals())
            watch = stack.enter_context(Watch(current_group(), stop))
        if not watch.group.is_first:
            console = Console(quiet=True)
        elif console is None:
            console = Console(stderr=True)
        watch.phase(Phase.PREPARING)
        prepared = prepare(run)
        check_auditable(run, prepared.spec)
        if isinstance(prepared.batches, Stream):
            stack.callback(prepared.batches.close)
        headline(console, prepared)
        starting.check_findings(run, prepared, console)
        checkpoints = None
        if run.out is not None:
            starting.claim_directory(stack, run.out, watch, force_unlock)
            store = Checkpoints(run.out / "checkpoints", run.keep, watch.group)
            checkpoints = stack.enter_context(store)
            checkpoints.clean()
        session = _open_session(
            run, prepared, checkpoints, describe or {}, console, watch, plan
        )
        return _run_session(session)


def _open_session(
    run: Run,
    prepared: Prepared,
    checkpoints: Checkpoints | None,
    extra: Mapping[str, object],
    console: Console,
    watch: Watch,
    is_planned: bool,
) -> Session:
    """Find the checkpoint to resume from, compile the step, load the state, and open the logs."""
    group = watch.group
    prepared = _compare_first_batch(prepared, group)
    about = starting.describe(run, prepared, extra)
    _compare_data(run, prepared, about, group)
    watch.phase(Phase.VERIFYING)
    saved = None
    if checkpoints is not None:
        saved = starting.find_checkpoint(run, prepared, checkpoints, about, console)
    start = saved or 0
    evaluations = starting.read_evaluations(run, start, group)
    stop_reason = run.stop_when.why(evaluations) if run.stop_when is not None else None
    until = run.steps if stop_reason is None else start
    position = None
    if checkpoints is not None and saved is not None and start < until:
        position = starting.find_position(run, prepared, checkpoints, saved)
        starting.resume_data(prepared, saved, position, group)

    watch.phase(Phase.COMPILING)
    plan = None
    if is_planned and start < until:
        plan, prepared = _compile(run, prepared, console)
    watch.phase(Phase.LOADING)
    state = starting.load_state(run, prepared.spec, checkpoints, saved, about, console)

    saver = Saver(run, checkpoints, about, console, start, watch)
    description = {**extra, **about}
    if run.out is not None and group.is_first:
        starting.write_run_json(run, description, stop_reason)
    if start >= until:
        _print(console, _nothing_to_do(run, start, stop_reason))
    prepared, batches = _own_batches(run, prepared)
    log = RunLog(run, prepared, start, plan, group, watch.start, saver.began)
    feed = _open_feed(run, prepared, batches, start, until, watch, position)
    return Session(
        run=run,
        prepared=prepared,
        watch=watch,
        console=console,
        description=description,
        start=start,
        until=until,
        state=state,
        feed=feed,
        log=log,
        saver=saver,
        sampler=Sampler(run, prepared.spec, group, console),
        profiler=Profile(
            run.profile if group.is_first and start < until else None,
            run.out,
            start,
            partial(_print, console),
        ),
        bad_steps=BadSteps(run, prepared, batches, group, console),
        auditor=Auditor(run, prepared, watch, console, log, start),
        evaluations=evaluations,
        stop_reason=stop_reason,
    )


def _open_feed(
    run: Run,
    prepared: Prepared,
    batches: BatchFunction,
    start: int,
    until: int,
    watch: Watch,
    position: str | None,
) -> Prefetch:
    """Return what reads and places batches in the background, from `start` on."""
    layout = prepared.step.layout
    check = DataCheck(watch.group.within("data"), layout, start)
    return Prefetch(
        batches,
        start,
        until,
        # A `Prefetch` owns its batches already.
        place=partial(layout.place, copy=False),
        inspect=check.inspect if prepared.first_batch else None,
        agree=check.agree if prepared.first_batch else None,
        is_stopped=watch.is_stopping,
        threads=run.data_threads,
        processes=run.data_processes,
        position=position,
    )


def _compare_first_batch(prepared: Prepared, group: ProcessGroup) -> Prepared:
    """Check that the first batches of all processes fit together, before anything is compiled."""
    if not prepared.first_batch:
        return prepared
    summaries = group.union("first batch", prepared.first_batch[0])
    check_summaries(summaries, 0, group)
    return replace(prepared, first_batch=tuple(summaries))


def _compare_data(
    run: Run, prepared: Prepared, about: Json, group: ProcessGroup
) -> None:
    """Check that all processes have the same data; describe that of the first one."""
    if group.count == 1:
        return
    if run.data_scope == "process":
        about["data"] = group.share("data", about["data"])
    elif isinstance(about["data"], dict):
        check_same_data(group, "data", about["data"])
    data = prepared.eval_batches
    if isinstance(data, Once):
        first = {"first_batch": batch_digest(data.first[0])}
        check_same_data(group, "eval_data", first, EVERY_PROCESS)
    elif data is not None:
        check_same_data(group, "eval_data", data.fingerprint())


def _own_batches(run: Run, prepared: Prepared) -> tuple[Prepared, BatchFunction]:
    """Return the function that this process reads batches with, and the step that places them."""
    if run.data_scope == "process":
        batches = prepared.batches
    else:
        # Each process reads only the examples that its devices need.
        batches = part_of(prepared.batches, prepared.step.layout.ranges)
    if isinstance(batches, LocalBatches):
        layout = prepared.step.layout.per_process()
        prepared = replace(prepared, step=replace(prepared.step, layout=layout))
    if run.data_processes == 0:
        batches = owned(batches, run.data_threads)
    return prepared, batches


def _compile(run: Run, prepared: Prepared, console: Console) -> tuple[Plan, Prepared]:
    """Compile the step and print its plan; nothing is allocated yet."""
    with working(console, Phase.COMPILING):
        plan, prepared = compile_run(run, prepared)
    check_fits(plan)
    check_divided(plan, run.rules)
    _print(console, f"plan: {plan.line()}")
    return plan, prepared


def _nothing_to_do(run: Run, start: int, stop_reason: str | None) -> str:
    if stop_reason is not None:
        return f"nothing to do: {run.out} was stopped early after step {start}: {stop_reason}."
    return f"nothing to do: {run.out} has finished its {start} steps. Use --steps for more."


def _run_session(session: Session) -> Result:
    """Train, save the last state, and print the summary."""
    with _tracked(session), session.log:
        _train_and_save(session)
        sample = _finish(session)
    if session.group.is_first:
        if session.has_stopped_early:
            n = int(session.state.step)
            _print(
                session.console, f"stopped early after step {n}: {session.stop_reason}"
            )
        print_summary(
            session.console, session.run, session.log, session.eval_metrics, sample
        )
    return Result(
        spec=session.prepared.spec,
        state=session.state,
        metrics=session.log.last,
        eval_metrics=session.eval_metrics,
        sample=sample,
        seconds=session.log.clock.seconds,
        stopped_early=session.stop_reason,
    )


@contextmanager
def _tracked(session: Session) -> Iterator[None]:
    """Pass all records on to the trackers of the run while it trains."""
    run, log = session.run, session.log
    if (
        not run.trackers
        or run.out is None
        or log.metrics is None
        or session.start >= session.until
    ):
        yield
        return
    description = session.description
    config = {
        key: value for key, value in description.items() if key not in NOT_TRACKED
    }
    directory = run.out.resolve()
    tracked = TrackedRun(
        directory.name, directory, {**config, "steps": run.steps}, session.start
    )
    warn_user = partial(warn, session.console)
    log.tracking = Tracking(run.trackers, tracked, log.metrics.seen, warn_user)
    exit_code = 1
    try:
        yield
        exit_code = 0
    except ShardwiseError as error:
        exit_code = error.exit_code
        raise
    finally:
        log.tracking.close(exit_code)


def _train_and_save(session: Session) -> None:
    """Train, and save the last state however the training ends, if it can be saved."""
    with session.feed, progress(session.console, session.run, session.start) as show:
        try:
            with session.inspect_failed_check():
                _train(session, show)
        except DataError:
            # The other processes are at a step that this one cannot join, so nobody can save.
            if session.group.count == 1:
                session.log.finish()
                session.save_last()
            raise
        except Stopped:
            # While waiting for data, or in an evaluation, which the resumed run makes up for.
            session.log.finish()
            session.is_stopped = True
        except NumericsError as error:
            is_corrupt = isinstance(error, CorruptionError)
            kind = CorruptionError if is_corrupt else NumericsError
            raise kind(f"{error}{session.saver.describe_newest()}") from error
        finally:
            session.profiler.end()
        session.watch.phase(Phase.SAVING_LAST)
        session.save_last()
        session.log.clock.lap("save")


def _train(session: Session, show: Show) -> None:
    """Run all steps. Nothing in the loop waits for the devices unless it says so."""
    stragglers = Stragglers(session.group)
    session.wait_for_all()
    session.evaluate_if_owed()
    until = session.begin_steps()
    step = session.profiler.annotate(session.prepared.step)
    step = session.auditor.audited(step)
    for n, state, metrics in steps(step, session.state, session.feed, until=until):
        # Step n is running now. Signals no longer end the process at once.
        session.advance(n, state, metrics)
        # Wait for step n - 1, write its record, and stop if its numbers are bad.
        session.record(n)
        # Wait for step n, and compare its bits with those of a second computation.
        session.audit(n)
        # Wait for step n, and compute the validation metrics.
        session.evaluate(n)
        # Copy the state. The files are written in the background.
        session.save(n)
        # Wait for step n, and sample text.
        session.sample(n)
        # Wait for step n, and start or end the trace.
        session.profile(n)
        # Update the progress bar.
        session.show_progress(show)
        # Report bad records of the data, and processes that are slow.
        session.warn(stragglers)
        # Early stopping, or a signal. All processes agree on the step.
        if session.is_over(n):
            break
    if session.log.finish():
        session.show_progress(show)


def _finish(session: Session) -> str | None:
    """Raise if a signal has stopped the run; otherwise return the sample of the last state."""
    run, log, watch = session.run, session.log, session.watch
    last_step = int(session.state.step)
    if session.is_stopped:
        place = ", and not saved: the run has no directory (out)."
        if run.out:
            place = f"; the same command resumes {run.out} there."
        raise Stopped(f"stopped by a signal after step {last_step}{place}")
    log.write_phases()
    if session.has_stopped_early and run.out is not None and session.group.is_first:
        try:
            starting.write_run_json(run, session.description, session.stop_reason)
        except CheckpointError as error:
            warn(session.console, str(error))
    # Everything is saved. A signal may end the process at once again.
    watch.stop.last_words = "stopped by a signal after the last step, which is saved."
    watch.stop.at_once = True
    watch.phase(Phase.FINISHING)
    if run.sample is None:
        return None
    text = session.sampler(session.state)
    log.add_sample(last_step, text)
    return text


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
