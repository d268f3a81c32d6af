"""The processes of one run: a program in each, started by a scheduler or by `shardwise launch`, joined by JAX's coordinator.

What they tell each other goes through the coordinator's key-value store: a few short texts, no arrays.
"""

import atexit
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax._src import distributed  # the coordinator's client; JAX has no public name for it
from jax._src.clusters import ClusterEnv
from jax._src.lib import _jax  # type: ignore[attr-defined]

from shardwise.cluster.signals import last_words, on_abort
from shardwise.errors import ConfigError, LostError
from shardwise.files.lock import boot_id
from shardwise.runtime import filter_native_output

HEARTBEAT = 8  # seconds; a process that is silent for so long is lost
JOINING = 300  # seconds that the processes have to find each other


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all of a run. Alone it is the first of one, and everything below returns at once."""

    index: int = 0
    count: int = 1
    client: Any = None  # of JAX's coordinator; None: alone
    coordinator: str = ""  # host:port
    hosts: tuple[str, ...] = ("",)  # the name of the machine of each process
    machines: tuple[int, ...] = (0,)  # and its number
    prefix: str = "shardwise/"  # of its keys

    def within(self, name: str) -> "ProcessGroup":
        """The same processes, with keys of their own."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    @property
    def is_first(self) -> bool:
        """The one that prints, writes and decides."""
        return self.index == 0

    def name(self, index: int) -> str:
        host = f" on {self.hosts[index]}" if len(set(self.machines)) > 1 else ""
        return f"process {index}{host}"

    def put(self, key: str, value: Any) -> None:
        """Under this key from now on, in place of what was there."""
        if self.client is not None:
            self.client.key_value_set(self.prefix + key, json.dumps(value), allow_overwrite=True)

    def read(self, folder: str) -> dict[str, Any]:
        """What has been put so far under keys that begin with `folder/`, by the rest of the key."""
        if self.client is None:
            return {}
        start = self.prefix + folder + "/"
        return {
            key.removeprefix(start): json.loads(value)
            for key, value in self.client.key_value_dir_get(start)
        }

    def drop(self, folder: str) -> None:
        """Forgets what was put there; for what all have read."""
        if self.client is not None and self.is_first:
            self.client.key_value_delete(self.prefix + folder)

    def union(self, name: str, value: Any) -> list[Any]:
        """What each process gives, in their order. All must call it with the same name, and a name is used once."""
        if self.client is None:
            return [value]
        self.put(f"{name}/{self.index}", value)
        wait_for(lambda: len(self.read(name)) == self.count)
        found = self.read(name)
        return [found[str(index)] for index in range(self.count)]

    def share(self, name: str, value: Any) -> Any:
        """What the first process gives. All must call it with the same name, and a name is used once."""
        if self.client is None:
            return value
        if self.is_first:
            self.put(f"{name}/0", value)
            return value
        wait_for(lambda: bool(self.read(name)))
        return self.read(name)["0"]


def wait_for(condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
    """Looks again and again, less often with time; whether it came true."""
    pause, end = 0.001, time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return True


def start_group(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    bind: str | None = None,
) -> ProcessGroup:
    """Joins the processes of this run, as told or as JAX recognizes the cluster; alone if there is neither. Before JAX looks for devices.

    The coordinator, which asks nobody who they are, listens on the address it is reached by and on no other, unless `bind` says where.
    """
    given = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    devices: Any = None
    if len(missing) == 3:
        coordinator, num_processes, process_id, devices = _recognize()
        if os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1":
            devices = None  # one task has all devices of its machine; JAX would give it the first
    elif missing:
        raise ConfigError(
            f"{', '.join(missing)} must be given, too: each process of a run is told all three."
        )
    if coordinator is None or num_processes is None or process_id is None or num_processes == 1:
        return ProcessGroup()
    host, port = split_address(coordinator)
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id {process_id} of {num_processes} processes; they count from 0 to {num_processes - 1}."
        )
    filter_native_output()
    jax.config.update(
        "jax_enable_recoverability", True
    )  # a lost process is ours to tell; JAX would abort all others
    jax.config.update("jax_enable_preemption_service", False)  # signals are ours, too
    address = _own_address(host, port)
    _use_gloo_on(address)
    failed = f"process {process_id} of {num_processes} cannot join the others at {coordinator}"
    advice = "Is process 0 started there, on a port that is free, and does --num-processes agree?"

    def never_met() -> None:
        """JAX aborts a process that the others do not join in time, from C++."""
        last_words(f"{failed}: they have not met in {JOINING} s. {advice}")
        os._exit(LostError.exit_code)

    on_abort(never_met)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=devices,
            coordinator_bind_address=bind
            or f"{_show(address)}:{port}",  # of process 0; the others do not listen
            initialization_timeout=JOINING,
            heartbeat_timeout_seconds=HEARTBEAT,
            cluster_detection_method="deactivate",
        )
    except Exception as error:
        fact = str(error).strip().split("\n")[0]
        raise LostError(f"{failed}: {fact}. {advice}") from error
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    atexit.register(_part)
    return current_group()


def _part() -> None:
    """At the end of Python: the first process, which coordinates, goes last, or JAX would abort the others."""
    group = current_group()
    try:
        group.put(f"parted/{group.index}", None)
        if group.is_first:
            wait_for(lambda: len(group.read("parted")) == group.count, HEARTBEAT)
        else:
            group.client.shutdown()
    except Exception:
        return  # there is nobody to tell


def _recognize() -> tuple[Any, Any, Any, Any]:
    """(coordinator, number of processes, this one, its devices) as JAX finds them in the environment; all None if there is no cluster."""
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if (
        is_pod
        and not {"JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "SLURM_PROCID"} & os.environ.keys()
    ):
        return (
            None,
            None,
            None,
            None,
        )  # a pod of its own; JAX would ask Kubernetes, and fail without the right to
    try:
        return ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, JOINING
        )
    except Exception as error:
        fact = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"the cluster is not understood: {fact}. Say it by --coordinator, --num-processes and --process-id."
        ) from error


def current_group() -> ProcessGroup:
    """The group that JAX's distributed runtime has been started for, by `start_group` or by the user."""
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return ProcessGroup()
    group = ProcessGroup(
        state.process_id, state.num_processes, state.client, state.coordinator_address or ""
    )
    found = [tuple(one) for one in group.union("machines", [socket.gethostname(), boot_id()])]
    machines = list(dict.fromkeys(found))
    return replace(
        group,
        hosts=tuple(name for name, _ in found),
        machines=tuple(machines.index(one) for one in found),
    )


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--coordinator '{address}': write it as host:port, such as 10.0.0.1:6789."
        )
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to the coordinator. Nothing is sent for it; the name may come up while others still start."""
    end = time.monotonic() + JOINING
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > end:
                raise LostError(
                    f"the coordinator {host}:{port} cannot be found from here: {error}."
                ) from error
            time.sleep(1.0)


def _show(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _use_gloo_on(address: str) -> None:
    """XLA's exchange between CPUs listens where the name of this machine leads, which is often elsewhere; JAX has no option for it."""
    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = partial(getattr(make, "func", make), hostname=address)
