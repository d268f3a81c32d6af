"""A run while it trains: its state, its services, and the operations after each step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import jax
from rich.console import Console

from shardwise.cluster.group import ProcessGroup
from shardwise.cluster.stragglers import Stragglers
from shardwise.cluster.watch import Watch
from shardwise.console import warn
from shardwise.data import Batches, Prefetch
from shardwise.data.contract import same_in_all
from shardwise.data.evaluation import Once
from shardwise.errors import CheckError, Stopped
from shardwise.files.failpoints import fail_point
from shardwise.loop import evaluate
from shardwise.run import Prepared, Run
from shardwise.rundir.phases import Phase
from shardwise.state import TrainState
from shardwise.step import Batch, Metrics
from shardwise.step.digests import tree_digests
from shardwise.text import Json
from shardwise.training.audit import Auditor
from shardwise.training.bad_steps import BadSteps
from shardwise.training.due import is_due, is_evaluation_due
from shardwise.training.log import DIGESTS, RunLog
from shardwise.training.profile import Profile
from shardwise.training.progress import Show
from shardwise.training.sampler import Sampler
from shardwise.training.saver import Saver


@dataclass
class Session:
    """A run while it trains.

    The methods from `record` to `warn` are the operations after a step, in this order. Each
    decides itself whether it is due. Operations that take long announce their phase to the watch,
    so that a process is not considered stuck. They first call `log.finish`, so that their time
    does not count as step time.

    Attributes:
        run: the run.
        prepared: the same run, prepared.
        watch: coordinates the processes of the run.
        console: prints on the first process only.
        description: the content of `run.json`.
        start: the step that the run starts from.
        until: its last step: `run.steps`, or `start` if nothing is left to do.
        state: the newest state.
        feed: supplies batches.
        log: records steps, evaluations and samples.
        saver: saves checkpoints.
        sampler: samples text.
        profiler: traces a range of steps.
        bad_steps: inspects steps whose update was not applied.
        auditor: compares two computations of the same step.
        evaluations: `(step, value)` of the metric that early stopping depends on.
        stop_reason: why the run stops early, or None.
        has_evaluated: whether this start has completed an evaluation.
        has_digests: whether this start has computed digests of a state.
        is_stopped: whether a signal has stopped the run before its last step.
        metrics: the metrics of the newest step; they may still be computed.
        eval_metrics: the metrics of the last evaluation.
    """

    run: Run
    prepared: Prepared
    watch: Watch
    console: Console
    description: Json
    start: int
    until: int
    state: TrainState
    feed: Prefetch
    log: RunLog
    saver: Saver
    sampler: Sampler
    profiler: Profile
    bad_steps: BadSteps
    auditor: Auditor
    evaluations: list[tuple[int, float]]
    stop_reason: str | None
    has_evaluated: bool = False
    has_digests: bool = False
    is_stopped: bool = False
    metrics: Metrics = field(default_factory=dict)
    eval_metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have the log report steps whose update was not applied, and its own problems."""
        self.log.on_bad_step = self._inspect
        self.log.warn = partial(warn, self.console)

    @property
    def group(self) -> ProcessGroup:
        """The processes of the run."""
        return self.watch.group

    @property
    def has_stopped_early(self) -> bool:
        """Whether this start, and not an earlier one, has stopped the run early."""
        return self.stop_reason is not None and self.start < self.until

    # Before the first step.

    def wait_for_all(self) -> None:
        """Wait until all processes are ready for the first step."""
        self.watch.phase(Phase.WAITING_TO_START)
        self.group.union("ready", None)

    def evaluate_if_owed(self) -> None:
        """Make the evaluation that was due when the run was stopped."""
        if self.log.owes_evaluation(self.start):
            self._evaluate(self.start)

    def begin_steps(self) -> int:
        """Start the profile if it begins with the first step; return the step to train up to."""
        if self.profiler.is_due(self.start):
            self.profiler.toggle(self.start, None)
        self.watch.phase(Phase.STEP.at(self.start + 1))
        return self.until if self.stop_reason is None else self.start

    # After each step.

    def advance(self, n: int, state: TrainState, metrics: Metrics) -> None:
        """Take the results of step `n`, which the devices are still computing."""
        self.state = state
        self.metrics = metrics
        if self.run.digest_every and is_due(n, self.run.digest_every, self.run.steps):
            # Computed before the next step, which takes over the arrays of the state.
            self.metrics = {**metrics, DIGESTS: self._digests()}
        # From here on there are updates to lose: a signal waits for the end of the step.
        self.watch.stop.at_once = False
        self._tick(n)

    def record(self, n: int) -> None:
        """Write the record of the step before `n`, which ends meanwhile."""
        self.log.record(n, self.metrics, self.feed.waited)

    def audit(self, n: int) -> None:
        """Compare the bits of two computations of this step, if due."""
        if not self.auditor.is_due(n):
            return
        self._enter(Phase.AUDITING.at(n))
        self.auditor.after(self.state)
        self._tick(n)

    def evaluate(self, n: int) -> None:
        """Evaluate on the validation data, if due."""
        if not is_evaluation_due(self.run, n):
            return
        self._evaluate(n)
        self.saver.add_evaluation(self.eval_metrics)
        self._tick(n)

    def save(self, n: int) -> None:
        """Start to save a checkpoint, if due."""
        if not self.saver.is_due(n):
            return
        self._enter(Phase.SAVING.at(n))
        self.saver.save(self.state, self.log.checkpoint_metrics, self.feed.position)
        self.log.clock.lap("save")
        self._tick(n)

    def sample(self, n: int) -> None:
        """Sample text from the model, if due."""
        if not self.sampler.is_due(n):
            return
        self._enter(Phase.SAMPLING.after(n))
        self.log.add_sample(n, self.sampler(self.state))
        self._tick(n)

    def profile(self, n: int) -> None:
        """Start or end the profile, if due."""
        if not self.profiler.is_due(n):
            return
        self._enter(Phase.PROFILING.after(n))
        self.profiler.toggle(n, self.metrics)
        self.log.clock.lap("profile")
        self._tick(n)

    def show_progress(self, show: Show) -> None:
        """Show the last finished step."""
        if self.log.last:
            show(self.log.last, self.eval_metrics)

    def warn(self, stragglers: Stragglers) -> None:
        """Print new warnings about the data and about slow processes."""
        for name, reason in self.log.new_bad_records():
            # Each process reads other records and reports its own.
            console = self.console if self.group.is_first else Console(stderr=True)
            warn(console, f"skipped {name}, another record replaces it: {reason}")
        for text in stragglers.look(self.feed.waited):
            warn(self.console, text)

    def is_over(self, n: int) -> bool:
        """Return whether to stop after step `n`: early stopping, or a signal."""
        if self.stop_reason is not None:
            return True
        self.is_stopped = self.watch.is_stopping() and n < self.run.steps
        return self.is_stopped

    # After the last step.

    def save_last(self) -> None:
        """Save and verify the last state."""
        self.saver.finish(self.state, self.log.checkpoint_metrics, self.feed.position)

    def _enter(self, phase: str) -> None:
        """Finish the pending step and enter a phase of unknown length."""
        self.log.finish()
        self.watch.phase(phase)

    def _tick(self, n: int) -> None:
        self.watch.tick(Phase.STEP.at(n))

    def _digests(self) -> jax.Array:
        """Return the digests of the newest state, which the devices may still be computing."""
        if self.has_digests:
            return tree_digests(self.state)
        # The first call compiles. That is not part of this step, nor of the pending one.
        self.has_digests = True
        self.log.finish()
        jax.block_until_ready(self.metrics)
        with self.log.clock.counting_as("compile"):
            return tree_digests(self.state)

    def _evaluate(self, n: int) -> None:
        assert self.prepared.eval_step is not None
        self._enter(Phase.EVALUATING.after(n))
        self.eval_metrics = evaluate(
            self.prepared.eval_step,
            self.state,
            self._evaluation_batches(),
            rows=self._evaluation_rows(),
            before=self._before_eval_batch,
        )
        self.has_evaluated = True
        self.log.add_evaluation(n, self.eval_metrics)
        early_stop = self.run.stop_when
        if early_stop is not None:
            value = self.eval_metrics[early_stop.metric.removeprefix("eval_")]
            self.evaluations.append((n, value))
            self.stop_reason = early_stop.why(self.evaluations)

    def _evaluation_batches(self) -> Batches | Iterable[Batch]:
        """Return the validation data. All processes compare it in the first evaluation."""
        data = self.prepared.eval_batches
        assert data is not None
        if isinstance(data, Batches) or self.group.count == 1 or self.has_evaluated:
            return data
        return same_in_all(data, self.group.within("evaluation"), "eval_data")

    def _evaluation_rows(self) -> int | None:
        data = self.prepared.eval_batches
        return max(data.sizes) if isinstance(data, Once) else None

    def _before_eval_batch(self) -> None:
        fail_point("evaluate")
        self.watch.phase(Phase.EVALUATING)
        if self.watch.is_stopping():
            raise Stopped("stopped by a signal during an evaluation")

    @contextmanager
    def inspect_failed_check(self) -> Iterator[None]:
        """Inspect the step whose check failed in this context, if any.

        No later step has started, so the state of the error is that of the step.
        """
        try:
            yield
        except CheckError as error:
            # Write the record of the step before.
            self.log.finish()
            if isinstance(error.state, TrainState):
                n = int(error.state.step)
                self.watch.phase(Phase.INSPECTING.at(n))
                values = jax.tree.map(float, dict(error.metrics))
                self.bad_steps.inspect(
                    n, "failed check", values, error.state, True, check=str(error)
                )
            raise

    def _inspect(self, n: int, why: str, values: Json) -> None:
        """Inspect step `n`, whose update was not applied.

        The numbers of a step are read while the next one runs, so the state may be one update
        later. Waiting for the numbers would slow down every good step.
        """
        self.watch.phase(Phase.INSPECTING.at(n))
        is_untouched = (
            int(self.state.step) == n
            or not bool(self.metrics["finite"])
            or bool(self.metrics.get("skipped", False))
        )
        self.bad_steps.inspect(n, why, values, self.state, is_untouched)
