"""Checkpoints of a state: plain Orbax, one directory for each step, readable without shardwise."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from shardwise.errors import CheckpointError
from shardwise.state import StateSpec, TrainState
from shardwise.tree import named_leaves


class Checkpoints:
    """The checkpoints below a directory. Saving is asynchronous; `close` waits for the last one."""

    def __init__(self, directory: Path, keep: int = 3):
        policy = ocp.checkpoint_managers.preservation_policy.LatestN(keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True)
        self.directory = directory.resolve()
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, metadata: dict[str, Any]) -> None:
        args = ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), meta=ocp.args.JsonSave(metadata))
        self._manager.save(int(state.step), args=args, force=True)

    def metadata(self, step: int) -> dict[str, Any]:
        """The JSON that was saved beside a state."""
        return dict(self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"])

    def restore(self, spec: StateSpec, step: int) -> TrainState:
        """The state of a step in the layout of `spec`, whatever mesh it was written on."""
        self._manager.wait_until_finished()
        wanted = _tree(spec.abstract)
        problems = _differences(self._manager.item_metadata(step)["state"], wanted)
        if problems:
            raise CheckpointError(f"checkpoint {self.directory / str(step)} does not fit this run:\n" + "\n".join(problems))
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
        # Buffers that Orbax made cannot be donated; copies can, and the first step then needs no second state.
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, wanted))
        return TrainState(**copy(restored))

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _tree(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "other": state.other, "opt_state": state.opt_state}


def _differences(saved: Any, wanted: Any) -> list[str]:
    """Leaves that are missing, unexpected, or of another shape or dtype; Orbax would cast the last without a word."""
    have, want = named_leaves(dict(saved)), named_leaves(wanted)
    lines = [f"  {path}: only in the checkpoint" for path in have if path not in want]
    lines += [f"  {path}: not in the checkpoint" for path in want if path not in have]
    for path in have.keys() & want.keys():
        a, b = have[path], want[path]
        if (tuple(a.shape), str(a.dtype)) != (tuple(b.shape), str(b.dtype)):
            lines.append(f"  {path}: saved {a.dtype}{list(a.shape)}, wanted {b.dtype}{list(b.shape)}")
    return sorted(lines)
