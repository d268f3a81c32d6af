"""`python -m shardwise.cli` is the same as the `shardwise` command."""

from shardwise.cli import entry

entry()
