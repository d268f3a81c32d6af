"""shardwise trains any Flax NNX model on any device mesh.

Names are imported when they are first used, so that the command line can answer without waiting for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoints as Checkpoints
    from shardwise.checkpoint import Keep as Keep
    from shardwise.data import Arrays as Arrays
    from shardwise.data import BadRecord as BadRecord
    from shardwise.data import Batches as Batches
    from shardwise.data import Mix as Mix
    from shardwise.data import Packed as Packed
    from shardwise.data import Prefetch as Prefetch
    from shardwise.data import Tokens as Tokens
    from shardwise.data import array_records as array_records
    from shardwise.data import json_lines as json_lines
    from shardwise.data import keep as keep
    from shardwise.data import open_tokens as open_tokens
    from shardwise.data import parquet as parquet
    from shardwise.data import split as split
    from shardwise.data import stdlib_bytes as stdlib_bytes
    from shardwise.data import text_lines as text_lines
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.explanation import Explanation as Explanation
    from shardwise.explanation import explain as explain
    from shardwise.finetune import freeze as freeze
    from shardwise.finetune import lora as lora
    from shardwise.fitting import Result as Result
    from shardwise.fitting import fit as fit
    from shardwise.initial import InitFrom as InitFrom
    from shardwise.initial import load_initial as load_initial
    from shardwise.loop import evaluate as evaluate
    from shardwise.loop import steps as steps
    from shardwise.mesh import make_mesh as make_mesh
    from shardwise.mesh import mesh_text as mesh_text
    from shardwise.mesh import use_cpu_devices as use_cpu_devices
    from shardwise.metrics import Mean as Mean
    from shardwise.planning import Plan as Plan
    from shardwise.planning import plan_run as plan_run
    from shardwise.run import Run as Run
    from shardwise.sharding import Rules as Rules
    from shardwise.sharding import constrain as constrain
    from shardwise.sharding import placement_table as placement_table
    from shardwise.state import TrainState as TrainState
    from shardwise.state import abstract_state as abstract_state
    from shardwise.state import init_state as init_state
    from shardwise.step import make_eval_step as make_eval_step
    from shardwise.step import make_train_step as make_train_step
    from shardwise.stopping import EarlyStop as EarlyStop
    from shardwise.target import find_target as find_target
    from shardwise.trackers import MLflow as MLflow
    from shardwise.trackers import TensorBoard as TensorBoard
    from shardwise.trackers import Trackio as Trackio
    from shardwise.trackers import WandB as WandB
    from shardwise.verification import Verification as Verification
    from shardwise.verification import verify as verify

    __version__: str

_HOMES = {
    "checkpoint": ("Checkpoints", "Keep"),
    "data": (
        "Arrays",
        "BadRecord",
        "Batches",
        "Mix",
        "Packed",
        "Prefetch",
        "Tokens",
        "array_records",
        "json_lines",
        "keep",
        "open_tokens",
        "parquet",
        "split",
        "stdlib_bytes",
        "text_lines",
    ),
    "errors": ("ShardwiseError",),
    "explanation": ("Explanation", "explain"),
    "initial": ("InitFrom", "load_initial"),
    "fitting": ("Result", "fit"),
    "loop": ("evaluate", "steps"),
    "finetune": ("freeze", "lora"),
    "mesh": ("make_mesh", "mesh_text", "use_cpu_devices"),
    "metrics": ("Mean",),
    "planning": ("Plan", "plan_run"),
    "run": ("Run",),
    "sharding": ("Rules", "constrain", "placement_table"),
    "state": ("TrainState", "abstract_state", "init_state"),
    "step": ("make_eval_step", "make_train_step"),
    "stopping": ("EarlyStop",),
    "target": ("find_target",),
    "trackers": ("MLflow", "TensorBoard", "Trackio", "WandB"),
    "verification": ("Verification", "verify"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # said in one place, pyproject.toml
        return importlib.import_module("importlib.metadata").version("shardwise")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
    return getattr(importlib.import_module(f"shardwise.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
