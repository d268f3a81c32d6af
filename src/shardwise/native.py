"""What C++ code prints: JAX's libraries tell much that is no news, and the rest as dumps."""

import os
import re
import sys
import threading

NOISE = re.compile(
    rb"^$|.*(is connected to|peer ranks\. Expected number of connected)|^(\[Gloo\] Rank )+$"  # gloo's threads write into each other's lines
    rb"|^[WE]\d{4} .*(coordination_service|recoverable task)"  # what becomes of processes is told by shardwise
    rb"|^F\d{4} .*JAX distributed service detected fatal errors"
    rb"|^(Additional GRPC error information|:UNKNOWN:|:UNAVAILABLE:|RPC: /xla|The tasks have crashed|\d+$)"
    rb"|^\*\*\* Check failure stack trace"
    rb"|^    @ +0x[0-9a-f]+ "
)


def filter_native_output() -> None:
    """From now on what C++ code prints passes a filter; `sys.stdout` and `sys.stderr` print as before."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        real = os.dup(number)
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        threading.Thread(target=_relay, args=(reading, real), daemon=True, name=f"shardwise-{name}").start()


def _relay(reading: int, real: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not NOISE.match(line):
                os.write(real, line)
