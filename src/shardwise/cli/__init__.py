"""The command line: `shardwise VERB ...`, one module per command."""

from shardwise.cli.dispatch import entry as entry
from shardwise.cli.dispatch import main as main
