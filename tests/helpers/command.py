"""The real command in a process of its own, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path


def start(
    *words: object, cwd: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise.cli", *map(str, words)]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *words: object, cwd: Path | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    with start(*words, cwd=cwd, **environment) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
