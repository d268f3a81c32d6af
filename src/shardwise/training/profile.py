"""Trace a range of steps with JAX's profiler into files that Perfetto and TensorBoard open.

Nothing is served and no port is opened.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from shardwise.state import TrainState
from shardwise.step import Batch, Metrics, StepResult, TrainStep


class Profile:
    """A trace of some steps of a run.

    It starts before its first step, and ends when the last one is computed. A problem with the
    profiler is printed and does not stop the run.

    Args:
        window: the first and the last step to trace, or None for no trace.
        directory: the run directory; the trace is written to `profile` in it.
        start: the step that the run starts from.
        say: prints a line.
    """

    def __init__(
        self,
        window: tuple[int, int] | None,
        directory: Path | None,
        start: int,
        say: Callable[[str], None],
    ):
        self._say = say
        self._directory = None
        # An empty range is never due.
        self._first, self._last = 0, -1
        self._is_tracing = False
        if window is None or directory is None:
            return
        self._directory = directory / "profile"
        self._first, self._last = max(window[0], start + 1), window[1]
        if self._last <= start:
            say(
                f"no profile: the run is at step {start}, "
                f"after the steps {window[0]}:{window[1]} to trace."
            )

    def annotate(self, step: TrainStep) -> TrainStep:
        """Return the step with its number in the trace, so that viewers can separate steps."""
        if self._last < self._first:
            return step
        number = self._first - 1

        def numbered(state: TrainState, batch: Batch) -> StepResult:
            nonlocal number
            number += self._is_tracing
            shown = number if self._is_tracing else 0
            with jax.profiler.StepTraceAnnotation("step", step_num=shown):
                return step.function(state, batch)

        return replace(step, function=numbered)

    def is_due(self, n: int) -> bool:
        """Return whether the trace starts or ends between step `n` and the next one."""
        is_before_first = n + 1 == self._first <= self._last
        return is_before_first or (self._is_tracing and n == self._last)

    def toggle(self, n: int, metrics: Metrics | None) -> None:
        """Start or end the trace after step `n`, when `is_due(n)`.

        Args:
            n: the step.
            metrics: its metrics, or None before the first step. The trace includes their
                computation, so this waits for it.
        """
        jax.block_until_ready(metrics)
        if self._is_tracing:
            self.end()
        if n + 1 == self._first:
            self._begin()

    def _begin(self) -> None:
        assert self._directory is not None
        if _has_unused_libtpu():
            self._say(
                "no profile: libtpu is loaded in this process without a TPU, as after a plan for"
                " TPUs, and JAX's profiler would crash. Profile the run in another process."
            )
            return
        options = jax.profiler.ProfileOptions()
        # Python calls would fill most of the trace, and slow down what it measures.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(
                self._directory, create_perfetto_trace=True, profiler_options=options
            )
            self._is_tracing = True
        except (RuntimeError, OSError) as error:
            self._say(f"no profile: {error}")

    def end(self) -> None:
        """Write the trace, if one is running."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:
            self._say(f"the profile could not be written: {error}")
            return
        assert self._directory is not None
        traces = self._directory.glob("plugins/profile/*/perfetto_trace.json.gz")
        newest = max(traces, key=lambda path: path.stat().st_mtime, default=None)
        perfetto = (
            f"open {newest} at https://ui.perfetto.dev, or "
            if newest is not None
            else ""
        )
        self._say(
            f"profile of steps {self._first} to {self._last}: {perfetto}run tensorboard --logdir "
            f"{self._directory} (with its plugin: pip install xprof)"
        )


def _has_unused_libtpu() -> bool:
    """Return whether libtpu is loaded although the devices are not TPUs.

    Starting a trace then ends the process with a segmentation fault (jax 0.10.2, libtpu 0.0.51).
    """
    maps = Path("/proc/self/maps")
    if jax.default_backend() == "tpu" or not maps.exists():
        return False
    return "libtpu" in maps.read_text()
