"""Places where tests can make a run fail."""

import errno
import os
import signal
import time

_REACHED: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Does nothing, unless SHARDWISE_FAILPOINT=name:count:action names it; then the count-th visit fails, for tests of faults."""
    point, _, rest = os.environ.get("SHARDWISE_FAILPOINT", "").partition(":")
    if point != name:
        return
    _REACHED[name] = _REACHED.get(name, 0) + 1
    count, _, action = rest.partition(":")
    first, _, last = count.partition("-")
    if not int(first) <= _REACHED[name] <= int(last or first):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        while True:
            time.sleep(1)
    else:
        number = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
        raise OSError(number, f"{os.strerror(number)} (fail point {name})")
