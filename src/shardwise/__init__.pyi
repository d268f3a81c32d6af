# The public names of shardwise, each written once. `__init__.py` reads this file, and so do
# type checkers and editors.

from . import data as data
from . import models as models
from . import optim as optim
from .checkpoint.init_from import InitFrom as InitFrom
from .checkpoint.store import Checkpoints as Checkpoints
from .checkpoint.store import Keep as Keep
from .data import Arrays as Arrays
from .data import BadRecord as BadRecord
from .data import Batches as Batches
from .data import Mix as Mix
from .data import Packed as Packed
from .data import Prefetch as Prefetch
from .data import Tokens as Tokens
from .data import array_records as array_records
from .data import json_lines as json_lines
from .data import keep as keep
from .data import open_tokens as open_tokens
from .data import parquet as parquet
from .data import split as split
from .data import stdlib_bytes as stdlib_bytes
from .data import text_lines as text_lines
from .errors import ShardwiseError as ShardwiseError
from .explanation.explain import Explanation as Explanation
from .explanation.explain import explain as explain
from .kernels.attention import attention as attention
from .kernels.attention import attention_fn as attention_fn
from .loop import evaluate as evaluate
from .loop import steps as steps
from .mesh import make_mesh as make_mesh
from .mesh import mesh_text as mesh_text
from .mesh import use_cpu_devices as use_cpu_devices
from .metrics import EarlyStop as EarlyStop
from .metrics import Mean as Mean
from .models.stack import Stack as Stack
from .plan.compile import plan_run as plan_run
from .plan.plan import Plan as Plan
from .plan.target import find_target as find_target
from .run import Run as Run
from .sharding import Rules as Rules
from .sharding import constrain as constrain
from .sharding import placement_table as placement_table
from .state import TrainState as TrainState
from .state import abstract_state as abstract_state
from .state import init_state as init_state
from .step.evaluate import make_eval_step as make_eval_step
from .step.train import make_train_step as make_train_step
from .trackers.mlflow import MLflow as MLflow
from .trackers.tensorboard import TensorBoard as TensorBoard
from .trackers.trackio import Trackio as Trackio
from .trackers.wandb import WandB as WandB
from .training.fit import Result as Result
from .training.fit import fit as fit
from .training.replay import Replay as Replay
from .training.replay import replay as replay
from .verification.verify import Verification as Verification
from .verification.verify import verify as verify
from .weights.adapters import freeze as freeze
from .weights.adapters import lora as lora
from .weights.load import load_initial as load_initial

__all__: list[str]
__version__: str
