"""The training step and the evaluation step."""

from shardwise.data.layout import BatchLayout as BatchLayout
from shardwise.data.layout import num_rows as num_rows
from shardwise.loss import Loss as Loss
from shardwise.loss import LossValue as LossValue
from shardwise.loss import TracedLoss as TracedLoss
from shardwise.loss import as_means as as_means
from shardwise.step.evaluate import EvalStep as EvalStep
from shardwise.step.evaluate import make_eval_step as make_eval_step
from shardwise.step.train import COMPILER_OPTIONS as COMPILER_OPTIONS
from shardwise.step.train import Gradients as Gradients
from shardwise.step.train import Metrics as Metrics
from shardwise.step.train import StepResult as StepResult
from shardwise.step.train import TrainStep as TrainStep
from shardwise.step.train import make_train_step as make_train_step
from shardwise.tree import Batch as Batch
