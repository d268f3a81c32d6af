"""`python -m shardwise.cli` is the same as the `shardwise` command."""

from shardwise.cli import entry

if __name__ == "__main__":
    entry()
