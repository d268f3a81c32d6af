"""The command `shardwise` with less time for the processes to find each other.

python hasty.py SECONDS ARGUMENTS...
"""

import sys

from shardwise import cli
from shardwise.cluster import group

if __name__ == "__main__":
    group.JOIN_TIMEOUT = int(sys.argv.pop(1))
    cli.entry()
