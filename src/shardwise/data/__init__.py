"""Random-access data: the batch of a step is a pure function of (seed, step)."""

from shardwise.data.batches import Batches as Batches
from shardwise.data.batches import as_batches as as_batches
from shardwise.data.batches import part_of as part_of
from shardwise.data.combine import Mix as Mix
from shardwise.data.combine import Subset as Subset
from shardwise.data.combine import keep as keep
from shardwise.data.combine import split as split
from shardwise.data.files import BadRecord as BadRecord
from shardwise.data.files import TokenFile as TokenFile
from shardwise.data.files import open_tokens as open_tokens
from shardwise.data.packing import Packed as Packed
from shardwise.data.prefetch import Prefetch as Prefetch
from shardwise.data.records import Records as Records
from shardwise.data.records import array_records as array_records
from shardwise.data.records import json_lines as json_lines
from shardwise.data.records import parquet as parquet
from shardwise.data.records import text_lines as text_lines
from shardwise.data.sources import Arrays as Arrays
from shardwise.data.sources import Source as Source
from shardwise.data.sources import Tokens as Tokens
from shardwise.data.sources import stdlib_bytes as stdlib_bytes
from shardwise.data.stream import Stream as Stream
from shardwise.data.tokenizers import Characters as Characters
