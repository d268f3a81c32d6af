"""Run a command on a new terminal, and take the terminal away when a file appears.

Arguments: the file, then the command. The exit code is that of the command.
"""

import os
import pty
import select
import sys
from pathlib import Path

pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
while not Path(sys.argv[1]).exists():
    if select.select([terminal], [], [], 0.1)[0]:
        os.read(terminal, 1 << 16)
os.close(terminal)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(code if code >= 0 else 128 - code)
