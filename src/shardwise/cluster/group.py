"""The processes of one run, which find each other through JAX's coordinator.

Each process runs the same program, started by a scheduler or by `shardwise launch`. Processes
exchange short JSON values through the key-value store of the coordinator; arrays never go there.
"""

import atexit
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import jax

# JAX has no public names for the coordinator's client, for cluster detection and for Gloo.
from jax._src import distributed
from jax._src.clusters import ClusterEnv
from jax._src.lib import _jax  # type: ignore[attr-defined]

from shardwise.cluster.signals import on_abort, print_last_words
from shardwise.errors import ConfigError, ExitCode, LostError
from shardwise.files.lock import boot_id
from shardwise.runtime import QUIET_TPU, filter_native_output
from shardwise.text import Json

# Seconds of silence after which the coordinator declares a process lost.
HEARTBEAT_TIMEOUT = 8
# Seconds that the processes have to find each other.
JOIN_TIMEOUT = 300


class CoordinatorClient(Protocol):
    """The part of JAX's coordinator client that shardwise uses."""

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None:
        """Store a text under a key."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return all keys below `key` with their values."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it."""

    def get_live_nodes(self, process_ids: list[int]) -> dict[int, int]:
        """Return the processes that send heartbeats. Blocks until all of them have asked."""

    def shutdown(self) -> None:
        """Disconnect from the coordinator."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all processes of a run.

    A process that runs alone is the first of one; then every method returns at once and contacts
    nobody. With several processes every method except `within`, `name` and `is_first` talks to the
    coordinator. `union` and `share` are collective: all processes must call them, with the same
    names. `put`, `read` and `drop` are not, and any thread may call them.

    A call to a coordinator that no longer exists raises an exception of JAX.

    Attributes:
        index: the index of this process, from 0.
        count: the number of processes.
        client: the client of JAX's coordinator; None if the process is alone.
        coordinator: the address of the coordinator, as "host:port".
        hosts: the host name of each process.
        machines: the index of the machine of each process. Processes with the same index share
            a machine, even if its host name is not unique.
        prefix: the beginning of all keys.
    """

    index: int = 0
    count: int = 1
    client: CoordinatorClient | None = None
    coordinator: str = ""
    hosts: tuple[str, ...] = ("",)
    machines: tuple[int, ...] = (0,)
    prefix: str = "shardwise/"

    def within(self, name: str) -> "ProcessGroup":
        """Return the same processes with keys of a separate namespace.

        Purely local. All processes must derive their namespaces in the same way.
        """
        return replace(self, prefix=f"{self.prefix}{name}/")

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints, writes files and makes decisions."""
        return self.index == 0

    def name(self, index: int) -> str:
        """Return the name of a process for messages: "process 1", or "process 1 on host2"."""
        if len(set(self.machines)) > 1:
            return f"process {index} on {self.hosts[index]}"
        return f"process {index}"

    def put(self, key: str, value: object) -> None:
        """Store a JSON value under a key, replacing the previous one.

        Any process may call this alone. Waits for one reply of the coordinator, never for another
        process.
        """
        if self.client is not None:
            self.client.key_value_set(
                self.prefix + key, json.dumps(value), allow_overwrite=True
            )

    def read(self, folder: str) -> Json:
        """Return the values under all keys that begin with `folder/`, by the rest of the key.

        Any process may call this alone. It returns what exists now, possibly nothing; it waits for
        one reply of the coordinator, never for another process.
        """
        if self.client is None:
            return {}
        start = f"{self.prefix}{folder}/"
        entries = self.client.key_value_dir_get(start)
        return {key.removeprefix(start): json.loads(value) for key, value in entries}

    def drop(self, folder: str) -> None:
        """Delete all keys below `folder`, once every process has read them.

        All processes may call this; only the first one deletes. Does not wait for other processes,
        so the caller must know that none of them still needs the values.
        """
        if self.client is not None and self.is_first:
            self.client.key_value_delete(self.prefix + folder)

    def union(self, name: str, value: object) -> list[Any]:
        """Return the JSON values of all processes, in order of their index.

        Collective: all processes must call it with the same name, and each name only once. Blocks
        until all of them have. If one is lost, it blocks until `Watch` ends this process.

        Args:
            name: identifies this call.
            value: the value of this process.
        """
        if self.client is None:
            return [value]
        self.put(f"{name}/{self.index}", value)
        wait_for(lambda: len(self.read(name)) == self.count)
        values = self.read(name)
        return [values[str(index)] for index in range(self.count)]

    def share(self, name: str, value: object) -> Any:
        """Return the JSON value of the first process.

        Collective: all processes must call it with the same name, and each name only once. The
        first process does not block; the others block until it has called.

        Args:
            name: identifies this call.
            value: the value to send; ignored except in the first process.
        """
        if self.client is None:
            return value
        if self.is_first:
            self.put(f"{name}/0", value)
            return value
        wait_for(lambda: bool(self.read(name)))
        return self.read(name)["0"]


def wait_for(condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
    """Poll until a condition is true.

    The interval grows from 1 ms to 0.1 s.

    Args:
        condition: evaluated at least once.
        seconds: how long to wait at most.

    Returns:
        Whether the condition became true in time.
    """
    pause = 0.001
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return True


class _Membership(NamedTuple):
    """Which process of which group this is; the first three are None for a process alone."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    device_ids: Sequence[int] | None


def start_group(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    bind: str | None = None,
) -> ProcessGroup:
    """Join the processes of this run, before JAX looks for devices.

    Without arguments JAX detects the cluster (Slurm, Open MPI, Kubernetes, Cloud TPU). If there is
    none, the process runs alone. With several processes this blocks until all of them have joined.

    Args:
        coordinator: the address of process 0, as "host:port".
        num_processes: the number of processes.
        process_id: the index of this process, from 0.
        bind: the address on which process 0 listens. By default the one under which the others
            reach it and no other, because the coordinator does not authenticate anybody.

    Returns:
        The group of this process.

    Raises:
        ConfigError: if the arguments are incomplete or inconsistent.
        LostError: if the processes do not find each other within `JOIN_TIMEOUT` seconds.
    """
    member = _find_membership(coordinator, num_processes, process_id)
    if (
        member.coordinator is None
        or member.num_processes is None
        or member.process_id is None
    ):
        return ProcessGroup()
    if member.num_processes == 1:
        return ProcessGroup()
    _join(
        member.coordinator,
        member.num_processes,
        member.process_id,
        member.device_ids,
        bind,
    )
    return current_group()


def _find_membership(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> _Membership:
    """Return the arguments, or what JAX detects if there are none."""
    options = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in options.items() if value is None]
    if not missing:
        return _Membership(coordinator, num_processes, process_id, None)
    if len(missing) < len(options):
        raise ConfigError(
            f"{', '.join(missing)} must be set too: each process needs all three."
        )
    detected = _detect_cluster()
    # With one task per node, that task has all devices of its node. JAX would use only the first.
    if os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1":
        return detected._replace(device_ids=None)
    return detected


def _detect_cluster() -> _Membership:
    """Return what JAX finds in the environment; all fields are None without a cluster."""
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    has_index = not {"JOB_COMPLETION_INDEX", "SLURM_PROCID"}.isdisjoint(os.environ)
    # `quiet_without_tpu` sets this variable on a machine without a TPU.
    name = "TPU_WORKER_HOSTNAMES"
    is_tpu = os.environ.get(name, QUIET_TPU[name]) != QUIET_TPU[name]
    if is_pod and not has_index and not is_tpu:
        # A single pod. JAX would query the Kubernetes API, and fail without permission.
        return _Membership(None, None, None, None)
    try:
        detected = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, JOIN_TIMEOUT
        )
    except Exception as error:
        raise ConfigError(
            f"JAX cannot detect the cluster: {_first_line(error)}. "
            "Set --coordinator, --num-processes and --process-id."
        ) from error
    return _Membership(*detected)


def _join(
    coordinator: str,
    num_processes: int,
    process_id: int,
    device_ids: Sequence[int] | None,
    bind: str | None,
) -> None:
    """Start JAX's distributed runtime in this process."""
    host, port = split_address(coordinator)
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process-id {process_id} is invalid with --num-processes {num_processes}: "
            f"indices run from 0 to {num_processes - 1}."
        )
    filter_native_output()
    # `Watch` reports a lost process. Without this option JAX would abort all others.
    jax.config.update("jax_enable_recoverability", True)
    # `stop_on_signals` handles signals.
    jax.config.update("jax_enable_preemption_service", False)
    address = _own_address(host, port)
    _use_gloo_on(address)

    def failure(fact: str) -> str:
        return (
            f"process {process_id} of {num_processes} cannot join the others at {coordinator}: "
            f"{fact}. Check that process 0 runs there, that its port is free, and that "
            "--num-processes is the same everywhere."
        )

    def exit_unjoined() -> NoReturn:
        print_last_words(failure(f"not all of them arrived within {JOIN_TIMEOUT} s"))
        os._exit(ExitCode.LOST)

    # If the others do not join in time, JAX aborts this process from C++.
    on_abort(exit_unjoined)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=device_ids,
            # Only process 0 listens.
            coordinator_bind_address=bind or f"{_bracketed(address)}:{port}",
            initialization_timeout=JOIN_TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            cluster_detection_method="deactivate",
        )
    except Exception as error:
        raise LostError(failure(_first_line(error))) from error
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    atexit.register(_disconnect)


def _disconnect() -> None:
    """Leave the group when Python exits.

    The first process hosts the coordinator and leaves last; otherwise JAX would abort the others.
    """
    group = current_group()
    try:
        group.put(f"parted/{group.index}", None)
        if group.is_first:
            wait_for(
                lambda: len(group.read("parted")) == group.count, HEARTBEAT_TIMEOUT
            )
        elif group.client is not None:
            group.client.shutdown()
    except Exception:
        # The coordinator is gone, so there is nobody to wait for.
        return


def current_group() -> ProcessGroup:
    """Return the group that JAX's distributed runtime was started for.

    Works for groups that `start_group` or the user started. Collective: with several processes it
    blocks until all of them have called it once. Later calls return at once.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return ProcessGroup()
    group = ProcessGroup(
        state.process_id,
        state.num_processes,
        state.client,
        state.coordinator_address or "",
    )
    # A host name alone does not identify a machine.
    identities = group.union("machines", [socket.gethostname(), boot_id()])
    hosts = [host for host, _ in identities]
    distinct: list[list[str]] = []
    for identity in identities:
        if identity not in distinct:
            distinct.append(identity)
    machines = [distinct.index(identity) for identity in identities]
    return replace(group, hosts=tuple(hosts), machines=tuple(machines))


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port".

    Raises:
        ConfigError: if the address has another form.

    Example:
        >>> split_address("[::1]:6789")
        ('::1', 6789)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--coordinator '{address}' is invalid: use host:port, for example 10.0.0.1:6789."
        )
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine on the route to the coordinator.

    Connecting a datagram socket sends nothing. The host name may become known only after some
    time, while other machines are still starting.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT
    while True:
        try:
            candidates = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = candidates[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostError(
                    f"the coordinator {host}:{port} cannot be reached from this machine: {error}."
                ) from error
            time.sleep(1.0)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _use_gloo_on(address: str) -> None:
    """Make XLA's collectives between CPUs listen on this address.

    By default they listen where the host name of this machine resolves to, which is often another
    interface. JAX has no option for it.
    """
    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = partial(
        getattr(make, "func", make), hostname=address
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
