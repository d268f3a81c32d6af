"""A window of steps, traced by JAX's profiler into files that Perfetto and TensorBoard open. No server, no port."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from shardwise.step import TrainStep


class Profile:
    """Begins before its first step, and ends when its last one is computed."""

    def __init__(
        self,
        window: tuple[int, int] | None,
        directory: Path | None,
        start: int,
        say: Callable[[str], None],
    ):
        self.directory, self.say = directory and directory / "profile", say
        self.first, self.last = window if window is not None and directory is not None else (0, -1)
        self.first = max(self.first, start + 1)
        self.is_on = False
        if window is not None and self.last <= start and directory is not None:
            say(
                f"nothing is profiled: the run stands at step {start}, after {window[0]}:{window[1]}."
            )

    def annotated(self, step: TrainStep) -> TrainStep:
        """The step with its number, by which viewers tell steps apart."""
        if self.last < self.first:
            return step
        number = self.first - 1

        def call(state: Any, batch: Any) -> Any:
            nonlocal number
            with jax.profiler.StepTraceAnnotation("step", step_num=number + 1 if self.is_on else 0):
                number += self.is_on
                return step.function(state, batch)

        return replace(step, function=call)

    def is_due(self, n: int) -> bool:
        """Whether there is something to do between step n and the next."""
        return n + 1 == self.first <= self.last or (self.is_on and n == self.last)

    def turn(self, n: int, metrics: Any) -> None:
        """After step n, when it is due. `metrics`: of step n, whose end is waited for."""
        jax.block_until_ready(metrics)
        if self.is_on:
            self.end()
        if n + 1 == self.first:
            assert self.directory is not None
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = (
                0  # every call of Python would be most of the trace, and slow what it measures
            )
            try:
                jax.profiler.start_trace(
                    self.directory, create_perfetto_trace=True, profiler_options=options
                )
                self.is_on = True
            except (RuntimeError, OSError) as error:
                self.say(f"nothing is profiled: {error}")

    def end(self) -> None:
        """Writes what was traced, if something is."""
        if not self.is_on:
            return
        self.is_on = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:
            self.say(f"the profile could not be written: {error}")
            return
        assert self.directory is not None
        found = max(
            self.directory.glob("plugins/profile/*/perfetto_trace.json.gz"),
            key=lambda path: path.stat().st_mtime,
            default=None,
        )
        viewer = (
            f"open {found} at https://ui.perfetto.dev, or" if found is not None else "see it with"
        )
        steps = f"profile of steps {self.first} to {self.last}"
        self.say(
            f"{steps}: {viewer} tensorboard --logdir {self.directory} (with its plugin: pip install xprof)"
        )
