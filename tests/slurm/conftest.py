"""A Slurm cluster on this machine, from Debian's packages: one node with two CPUs.

Its daemons are started for the tests and ended with them.
"""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Seconds after which anything counts as hung.
TIMEOUT = 240

CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its old credentials have expired, by default 120 s.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=3600
# JAX derives the coordinator's port from the job id; two pytest workers have a Slurm each.
FirstJobId={first}
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=tests Nodes=localhost Default=YES MaxTime=INFINITE
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    folder: Path
    environment: dict[str, str]

    def call(self, *words: object, cwd: Path | None = None) -> str:
        """Run a command of Slurm and return its output."""
        ended = subprocess.run(
            [str(word) for word in words],
            env=self.environment,
            cwd=cwd,
            text=True,
            capture_output=True,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout + ended.stderr

    def submit(self, script: str, folder: Path, *options: str) -> "Submitted":
        path = folder / "job.sbatch"
        path.write_text(script)
        found = re.search(
            r"Submitted batch job (\d+)",
            self.call("sbatch", *options, path, cwd=folder),
        )
        assert found
        return Submitted(self, int(found[1]), folder)


@dataclass(frozen=True)
class Submitted:
    """A job that `sbatch` has accepted."""

    slurm: Slurm
    number: int
    folder: Path

    @property
    def log(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")
            for path in self.folder.glob(f"*-{self.number}.log")
        )

    def show(self, field: str) -> str:
        """Return a field of `scontrol show job`, such as JobState, Restarts or ExitCode."""
        found = re.search(
            rf"\b{field}=(\S+)", self.slurm.call("scontrol", "show", "job", self.number)
        )
        assert found, field
        return found[1]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not happen within {TIMEOUT} s; {self.show('JobState')}: "
                f"{self.log[-3000:]}"
            )
            time.sleep(0.2)

    def end(self) -> str:
        """Wait for the end of the job and return its state."""
        unfinished = (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
            "REQUEUED",
            "SUSPENDED",
        )
        self.wait_for(
            lambda: self.show("JobState") not in unfinished, "the end of the job"
        )
        return self.show("JobState")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    missing = [
        name
        for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
        if not _found(name)
    ]
    assert not missing, (
        f"{', '.join(missing)} not found: `make slurm` installs Debian's packages of Slurm"
    )
    folder = tmp_path_factory.mktemp("slurm")
    # munge requires that its socket can be reached.
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    config = folder / "slurm.conf"
    controller, node = _free_ports(2)
    host = socket.gethostname().partition(".")[0]
    first = secrets.randbelow(50_000) + 1
    config.write_text(
        CONF.format(
            host=host,
            user=getpass.getuser(),
            folder=folder,
            controller=controller,
            node=node,
            first=first,
        )
    )
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(
            ("JAX_", "XLA_", "SHARDWISE_", "PYTEST_", "SLURM_", "SBATCH_")
        )
    }
    environment = inherited | {
        "SLURM_CONF": str(config),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {
        "key": key,
        "socket": folder / "munge.socket",
        "pid": folder / "munged.pid",
        "log": folder / "munged.log",
        "seed": folder / "seed",
    }
    files = [
        f"--{name}{'' if name == 'socket' else '-file'}={path}"
        for name, path in names.items()
    ]
    made = Slurm(folder, environment)
    running: list[subprocess.Popen] = []
    try:
        running.append(_start(made, "munged", "--foreground", "--force", *files))
        _wait(names["socket"].exists, running, folder)
        running.append(_start(made, "slurmctld", "-D", "-i"))
        running.append(_start(made, "slurmd", "-D"))
        _wait(
            lambda: "idle" in _answer(made, "sinfo", "--noheader", "--format=%T"),
            running,
            folder,
        )
        yield made
        made.call("scancel", "--quiet", "--user", getpass.getuser())
        _wait(lambda: not _answer(made, "squeue", "--noheader"), running, folder)
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def _start(made: Slurm, *words: str) -> subprocess.Popen:
    with (made.folder / f"{words[0]}.out").open("wb") as out:
        command = [_found(words[0]) or words[0], *words[1:]]
        return subprocess.Popen(
            command,
            env=made.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _answer(made: Slurm, *words: str) -> str:
    return subprocess.run(
        words, env=made.environment, text=True, capture_output=True
    ).stdout.strip()


def _wait(
    condition: Callable[[], object], running: list[subprocess.Popen], folder: Path
) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        alive = all(process.poll() is None for process in running)
        output = "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(folder.glob("*.out"))
        )
        assert alive, f"a daemon has ended:\n{output}"
        assert time.monotonic() < deadline, f"Slurm is not ready after 60 s:\n{output}"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
