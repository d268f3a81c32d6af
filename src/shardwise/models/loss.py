"""Losses of language models, implemented in `shardwise.kernels.cross_entropy`."""

from shardwise.kernels.cross_entropy import (
    chunked_cross_entropy as chunked_cross_entropy,
)
from shardwise.kernels.cross_entropy import cross_entropy as cross_entropy
from shardwise.kernels.cross_entropy import fused_cross_entropy as fused_cross_entropy
from shardwise.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
