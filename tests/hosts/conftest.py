"""Hosts that are network namespaces of this machine, connected by a switch.

Each has its own address and host name. Needs root on Linux.
"""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import harness

COUNT = 4
# Sets the host name; the process keeps its id.
IN_HOST = 'hostname "$0" && exec "$@"'


def run(*words: object) -> str:
    """Run a command that must succeed, and return its output."""
    ended = subprocess.run(
        [str(word) for word in words], text=True, capture_output=True
    )
    assert ended.returncode == 0, (
        f"{' '.join(map(str, words))}: {ended.stdout}{ended.stderr}(these tests need root on Linux)"
    )
    return ended.stdout


@dataclass(frozen=True)
class Network:
    """The hosts PREFIX-0, PREFIX-1 and so on, and the switch between them.

    The switch is in a namespace without an address.

    Attributes:
        prefix: the beginning of all names.
        count: the number of hosts.
        port: the port of the coordinator; nobody else is in this network.
    """

    prefix: str
    count: int
    port: int = 6789

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    def name(self, index: int) -> str:
        return f"{self.prefix}-{index}"

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def make(self) -> None:
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "switch", "up")
        for index in range(self.count):
            name, cable = (
                self.name(index),
                ("name", "eth0", "address", self.hardware(index)),
            )
            run("ip", "netns", "add", name)
            run(
                "ip",
                "-n",
                name,
                "link",
                "add",
                *cable,
                "type",
                "veth",
                "peer",
                "name",
                f"port{index}",
                "netns",
                self.switch,
            )
            run(
                "ip",
                "-n",
                self.switch,
                "link",
                "set",
                f"port{index}",
                "master",
                "switch",
                "up",
            )
            run(
                "ip",
                "-n",
                name,
                "address",
                "add",
                f"{self.address(index)}/24",
                "dev",
                "eth0",
            )
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            # All addresses are known from the start, so that an unanswered ARP request does not
            # reveal a cut link.
            for other in set(range(self.count)) - {index}:
                entry = (
                    self.address(other),
                    "lladdr",
                    self.hardware(other),
                    "dev",
                    "eth0",
                )
                run("ip", "-n", name, "neighbour", "add", *entry, "nud", "permanent")

    def hardware(self, index: int) -> str:
        return f"02:00:00:00:00:{index + 1:02x}"

    def remove(self) -> None:
        for name in (*map(self.name, range(self.count)), self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def inside(self, index: int, *command: object) -> tuple[object, ...]:
        """Return the command that starts `command` on this host."""
        name = self.name(index)
        namespace = ("ip", "netns", "exec", name, "unshare", "--uts")
        return (*namespace, "sh", "-c", IN_HOST, name, *command)

    def cut(self, *indices: int) -> None:
        """Make the switch drop what these hosts send each other; no socket closes."""
        for index in indices:
            run(
                "bridge",
                "-n",
                self.switch,
                "link",
                "set",
                "dev",
                f"port{index}",
                "isolated",
                "on",
            )

    def mend(self) -> None:
        """Undo `cut`."""
        for index in range(self.count):
            run(
                "bridge",
                "-n",
                self.switch,
                "link",
                "set",
                "dev",
                f"port{index}",
                "isolated",
                "off",
            )


@dataclass(frozen=True)
class Hosts:
    """Starts commands on the hosts, which share a directory and a compilation cache."""

    network: Network
    bench: harness.Bench
    started: list[harness.Started] = field(default_factory=list)

    def start(
        self, index: int, out: str, *command: object, **environment: str
    ) -> harness.Started:
        process = self.bench.popen(
            self.network.inside(index, *command), out, **environment
        )
        self.started.append(process)
        return process

    def start_train(
        self,
        out: str,
        *args: object,
        hosts: int = 2,
        devices: int = 2,
        only: dict[int, dict] | None = None,
        command: tuple[object, ...] = ("-m", "shardwise.cli"),
    ) -> "Running":
        """Start the same `shardwise train` on each host.

        Args:
            out: the name of the run directory.
            *args: arguments of the recipe.
            hosts: the number of hosts.
            devices: CPU devices per host.
            only: additional environment variables, by host.
            command: what Python runs.
        """
        where = (
            "--coordinator",
            f"{self.network.address(0)}:{self.network.port}",
            "--num-processes",
            hosts,
        )
        recipe = ("train", harness.RECIPE, "--out", self.bench.folder / out, *args)
        processes = []
        for index in range(hosts):
            words = (
                sys.executable,
                *command,
                *where,
                "--process-id",
                index,
                "--cpu-devices",
                devices,
                *recipe,
            )
            processes.append(
                self.start(index, out, *words, **(only or {}).get(index, {}))
            )
        return Running(processes)

    def train(self, out: str, *args: object, hosts: int = 2, devices: int = 2) -> Path:
        """Train to the end, and return the run directory."""
        for ended in self.start_train(out, *args, hosts=hosts, devices=devices).end():
            harness.check_done(ended)
        return self.bench.folder / out

    def within(self, folder: Path) -> "Hosts":
        return Hosts(self.network, harness.Bench(folder, self.bench.cache))

    def kill(self) -> None:
        for process in self.started:
            process.kill()


@dataclass(frozen=True)
class Running:
    """The processes of a run, one per host."""

    processes: list[harness.Started]

    def __getitem__(self, index: int) -> harness.Started:
        return self.processes[index]

    def wait_for_step(self, step: int) -> None:
        self[0].wait_for_step(step)

    def end(self) -> list[harness.Ended]:
        return [process.end() for process in self.processes]

    def end_within(self, seconds: float, but: tuple[int, ...] = ()) -> dict[int, float]:
        """Return the seconds until each process ends; all except `but` must end in time."""
        began = time.monotonic()
        waiting = set(range(len(self.processes))) - set(but)
        took = {}
        while waiting:
            for index in list(waiting):
                if self[index].process.poll() is not None:
                    took[index] = time.monotonic() - began
                    waiting.discard(index)
            output = "\n".join(
                f"process {index}: {self[index].err[-800:]}" for index in waiting
            )
            assert time.monotonic() - began < seconds, (
                f"still running after {seconds} s: {output}"
            )
            time.sleep(0.02)
        return took


@pytest.fixture(scope="session")
def network():
    """Create the namespaces, and remove those that killed tests have left behind."""
    for line in run("ip", "netns", "list").splitlines():
        leftover = re.match(r"(sw(\d+)-\w+)", line)
        if leftover and not Path(f"/proc/{leftover[2]}").exists():
            run("ip", "netns", "delete", leftover[1])
    made = Network(f"sw{os.getpid()}", COUNT)
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="session")
def all_hosts(network, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    cache.chmod(0o700)
    return Hosts(network, harness.Bench(tmp_path_factory.mktemp("undisturbed"), cache))


@pytest.fixture
def hosts(all_hosts, tmp_path):
    """Return the hosts, connected and idle before and after each test."""
    made = all_hosts.within(tmp_path)
    try:
        yield made
    finally:
        made.kill()
        made.network.mend()


@pytest.fixture(scope="session")
def undisturbed(all_hosts):
    """Return a function that trains on two hosts without faults.

    `undisturbed(mesh, *arguments)` returns the run directory. Results are cached.
    """
    made = {}

    def get(*args):
        if args not in made:
            try:
                made[args] = all_hosts.train(f"run{len(made)}", *args)
            finally:
                all_hosts.kill()
        return made[args]

    return get
