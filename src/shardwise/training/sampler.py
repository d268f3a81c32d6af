"""Text from the model while it trains."""

from dataclasses import replace

import jax
from jax.sharding import PartitionSpec
from rich.console import Console

from shardwise.cluster.group import ProcessGroup
from shardwise.console import warn
from shardwise.errors import where
from shardwise.optim.parts import evaluation_params
from shardwise.run import Run
from shardwise.state import StateSpec, TrainState
from shardwise.training.due import is_due, is_evaluation_due


class Sampler:
    """Calls `Run.sample`, on the first process, with a model whose weights are all local.

    An exception in `Run.sample` is printed as a warning, and the run continues.

    Args:
        run: the run.
        spec: its abstract state.
        group: the processes of the run; all of them must call the sampler.
        console: where to print warnings.
    """

    def __init__(
        self, run: Run, spec: StateSpec, group: ProcessGroup, console: Console
    ):
        self.run = run
        self.spec = spec
        self.group = group
        self.console = console
        # The step of the last sample, and its text.
        self._last: tuple[int, str] = (-1, "")

    def is_due(self, n: int) -> bool:
        """Return whether to sample after step `n`; the last step is sampled at the end of a run."""
        if self.run.sample is None or n >= self.run.steps:
            return False
        if self.run.sample_every:
            return is_due(n, self.run.sample_every)
        return is_evaluation_due(self.run, n)

    def __call__(self, state: TrainState) -> str:
        """Return the sample of this state, or "" if there is none or on other processes."""
        n = int(state.step)
        if self._last[0] != n:
            self._last = (n, self._sample(state))
        return self._last[1]

    def _sample(self, state: TrainState) -> str:
        assert self.run.sample is not None
        state = replace(state, params=evaluation_params(state.opt_state, state.params))
        if self.group.count > 1:
            state = self._local(state)
            if not self.group.is_first:
                return ""
        model = self.spec.module(state, jax.random.key(self.run.seed))
        model.eval()
        try:
            return self.run.sample(model)
        except Exception as error:
            warn(self.console, f"no sample: {where(error)}")
            return ""

    def _local(self, state: TrainState) -> TrainState:
        """Return the state with complete arrays on one device of this process."""
        replicate = jax.jit(
            lambda tree: tree, out_shardings=self.spec.sharding(PartitionSpec())
        )
        replicated = replicate((state.params, state.other, state.frozen))
        local = jax.tree.map(lambda leaf: leaf.addressable_data(0), replicated)
        params, other, frozen = local
        return replace(state, params=params, other=other, frozen=frozen)
