"""Fail points: named places in the code where a test can make a run fail."""

import errno
import os
import signal
import time

# How often each fail point was reached in this process.
_VISITS: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Fail here if the environment variable `SHARDWISE_FAILPOINT` asks for it.

    The variable has the form `name:count:action`. `count` is the visit that fails, or a range such
    as `2-4`. `action` is `kill` (SIGKILL to this process), `hang` (sleep forever), `enospc` or
    `eio` (raise that OSError). Without the variable this function does nothing.

    Args:
        name: the name of this place in the code, such as `"checkpoint.rename"`.

    Raises:
        OSError: if the action is `enospc` or `eio`.
    """
    point, _, rest = os.environ.get("SHARDWISE_FAILPOINT", "").partition(":")
    if point != name:
        return
    _VISITS[name] = _VISITS.get(name, 0) + 1
    count, _, action = rest.partition(":")
    first, _, last = count.partition("-")
    if not int(first) <= _VISITS[name] <= int(last or first):
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        while True:
            time.sleep(1)
    else:
        number = {"enospc": errno.ENOSPC, "eio": errno.EIO}[action]
        raise OSError(number, f"{os.strerror(number)} (fail point {name})")
