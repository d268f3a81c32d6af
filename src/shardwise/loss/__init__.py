"""The user's loss: how it is called, what it may return, and what a trace of it reveals."""

from shardwise.loss.contract import Loss as Loss
from shardwise.loss.contract import LossValue as LossValue
from shardwise.loss.contract import Metric as Metric
from shardwise.loss.contract import as_means as as_means
from shardwise.loss.contract import call_loss as call_loss
from shardwise.loss.trace import TracedLoss as TracedLoss
from shardwise.loss.trace import settle_loss as settle_loss
from shardwise.loss.trace import trace_loss as trace_loss
