"""Random-access data: the batch of a step is a pure function of (seed, step)."""

from shardwise.data.batches import Batches as Batches
from shardwise.data.batches import as_batches as as_batches
from shardwise.data.prefetch import Prefetch as Prefetch
from shardwise.data.sources import Arrays as Arrays
from shardwise.data.sources import Source as Source
from shardwise.data.sources import Tokens as Tokens
from shardwise.data.sources import stdlib_bytes as stdlib_bytes
