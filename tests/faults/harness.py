"""Start the real command, break it from outside, and compare it with an undisturbed run."""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import orbax.checkpoint as ocp
from blake3 import blake3

HERE = Path(__file__).parent
RECIPE = HERE / "recipe.py"
DEVICES = ("--cpu-devices", "2", "--mesh", "fsdp=2")
# Arguments of each of two processes.
PAIR = ("--cpu-devices", "1", "--mesh", "fsdp=2")
SHORT = ("--steps", "20", "--save-every", "4", "--eval-every", "10")
PLAIN_SHORT = ("--steps", "20", "--save-every", "4")
# Seconds until a command counts as hung. A busy machine needs far less.
LIMIT = 240


# Processes


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, its output and its run time in seconds."""

    code: int
    err: str
    seconds: float

    @property
    def message(self) -> str:
        """Return the end of the output: the final message, or the last lines of a traceback."""
        return self.err.strip()[-450:]


@dataclass
class Started:
    """A running command in a separate process group. Its output goes to the file `log`."""

    process: subprocess.Popen
    out: Path
    log: Path
    began: float

    @property
    def err(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Fail if the command ends first or LIMIT passes."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}: {self.err[-800:]}"
            )
            assert time.monotonic() < deadline, (
                f"{what} not reached within {LIMIT} s: {self.err[-800:]}"
            )
            time.sleep(0.01)

    def wait_for_line(self, text: str) -> None:
        """Wait until the output contains `text`."""
        self.wait_for(lambda: text in self.err, f"the line '{text}'")

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is logged."""
        self.wait_for(lambda: last_step(self.out) >= step, f"step {step}")

    def wait_for_file(self, path: Path) -> None:
        """Wait until the file exists."""
        self.wait_for(path.exists, str(path))

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its group."""
        self.process.send_signal(number)

    def watch(self) -> tuple[int, set[str]]:
        """Watch the process until it ends.

        Returns:
            Its peak memory in bytes, and the addresses on which it listened.
        """
        peak, addresses = 0, set()
        while self.process.poll() is None:
            found = re.search(
                r"VmHWM:\s+(\d+) kB",
                Path(f"/proc/{self.process.pid}/status").read_text(),
            )
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            addresses |= listening(self.process.pid)
            if time.monotonic() - self.began > LIMIT / 2:
                self.kill()
                raise AssertionError(f"still running after {LIMIT / 2:.0f} s")
            time.sleep(0.05)
        return peak, addresses

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for the end, and check that no process of the group is left."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"still running after {limit} s: {self.err[-800:]}"
            ) from None
        seconds = time.monotonic() - self.began
        assert not self.is_group_alive(), "a process of the command is still running"
        return Ended(self.process.returncode, self.err, seconds)

    def is_group_alive(self) -> bool:
        """Return whether a process of the group is still alive after 1 s."""
        for _ in range(50):
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> Ended:
        """Send SIGKILL to the process group, and wait for its end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT)
        return Ended(self.process.returncode, self.err, time.monotonic() - self.began)


@dataclass
class Processes:
    """The processes of one run."""

    started: list[Started]

    def wait_for_step(self, step: int) -> None:
        """Wait until process 0 has logged `step`."""
        self.started[0].wait_for_step(step)

    def signal(self, index: int, number: int) -> None:
        """Send a signal to one process."""
        self.started[index].signal(number)

    def end(self, limit: float = LIMIT) -> list[Ended]:
        """Wait for the end of all processes. Kill the rest if one exceeds the limit."""
        try:
            return [one.end(limit) for one in self.started]
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes."""
        for one in self.started:
            one.kill()


@dataclass(frozen=True)
class Bench:
    """A folder for runs, and the cache of compiled steps that they share."""

    folder: Path
    cache: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a command, without settings of the current process."""
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("JAX_", "XLA_", "SHARDWISE_", "PYTEST_"))
        }
        return {
            **inherited,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **more,
        }

    def start(
        self,
        out: str | Path,
        *args: object,
        wrap: tuple[str, ...] = (),
        **environment: str,
    ) -> Started:
        """Start `shardwise train` on the recipe of the experiments, with `wrap` before it."""
        command = (
            *wrap,
            sys.executable,
            "-m",
            "shardwise.cli",
            "train",
            RECIPE,
            "--out",
            self.folder / out,
            *DEVICES,
            *args,
        )
        return self.popen(command, out, **environment)

    def train(self, out: str | Path, *args: object, **environment: str) -> Ended:
        """Run `shardwise train` to its end."""
        return self.start(out, *args, **environment).end()

    def start_plain(
        self, out: str | Path, *args: object, **environment: str
    ) -> Started:
        """Start the plain loop."""
        return self.popen(
            (sys.executable, HERE / "plain.py", "--out", self.folder / out, *args),
            out,
            **environment,
        )

    def plain(self, out: str | Path, *args: object, **environment: str) -> Ended:
        """Run the plain loop to its end."""
        return self.start_plain(out, *args, **environment).end()

    def start_group(
        self,
        out: str | Path,
        *args: object,
        each: dict[int, dict[str, str]] | None = None,
        count: int = 2,
        layout: tuple[str, ...] = PAIR,
    ) -> "Processes":
        """Start `shardwise train` in several processes. `each` sets the environment of some."""
        address = _free_address()
        started = []
        for index in range(count):
            where = (
                "--coordinator",
                address,
                "--num-processes",
                count,
                "--process-id",
                index,
            )
            command = (
                sys.executable,
                "-m",
                "shardwise.cli",
                *where,
                "train",
                RECIPE,
                "--out",
                self.folder / out,
                *layout,
                *args,
            )
            started.append(self.popen(command, out, **(each or {}).get(index, {})))
        return Processes(started)

    def start_plain_group(
        self,
        out: str | Path,
        *args: object,
        each: dict[int, dict[str, str]] | None = None,
    ) -> "Processes":
        """Start the plain loop in two processes with one device each."""
        address, script = _free_address(), HERE / "plain.py"
        started = []
        for index in range(2):
            where = ("--coordinator", address, "--count", 2, "--index", index)
            command = (
                sys.executable,
                script,
                "--out",
                self.folder / out,
                *where,
                *args,
            )
            started.append(
                self.popen(
                    command, out, JAX_NUM_CPU_DEVICES="1", **(each or {}).get(index, {})
                )
            )
        return Processes(started)

    def launch(
        self,
        out: str | Path,
        *args: object,
        count: int = 2,
        restarts: int = 0,
        layout: tuple[str, ...] = PAIR,
        wrap: tuple[str, ...] = (),
    ) -> Started:
        """Start `shardwise launch` with `count` processes of `shardwise train`."""
        options = ("--processes", count, "--restarts", restarts)
        train = ("train", RECIPE, "--out", self.folder / out, *layout, *args)
        command = (sys.executable, "-m", "shardwise.cli", "launch", *options)
        return self.popen((*wrap, *command, "--", *train), out)

    def command(self, *args: object, **environment: str) -> Ended:
        """Run `shardwise` with any arguments to its end."""
        return self.popen(
            (sys.executable, "-m", "shardwise.cli", *args), "command", **environment
        ).end()

    def popen(
        self, command: tuple[object, ...], out: str | Path, **environment: str
    ) -> Started:
        """Start any command, with a log of the batches next to `out`."""
        out = self.folder / out
        log = self.folder / f"{out.name}.{time.monotonic_ns()}.err"
        environment = self.environment(BATCH_LOG=str(batch_log(out)), **environment)
        with log.open("w") as file:
            began = time.monotonic()
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Started(process, out, log, began)


def fresh(bench: Bench, name: object) -> Bench:
    """Return a bench in a new folder below that of another."""
    folder = bench.folder / f"trial-{name}".replace(" ", "-")
    folder.mkdir()
    return Bench(folder, bench.cache)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def batch_log(out: Path) -> Path:
    """Return the file with the digests of the batches of a run."""
    return out.with_name(out.name + ".batches")


# Contents of a run directory


def read_log(out: Path) -> list[dict]:
    """Return the records of metrics.jsonl, without a partial last line."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(out: Path) -> int:
    """Return the last logged step, or 0."""
    path = out / "metrics.jsonl"
    try:
        return max(
            (json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]),
            default=0,
        )
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def bits(value: object) -> str:
    """Return a text that is equal only for bit-identical values."""
    return struct.pack("<d", value).hex() if isinstance(value, float) else str(value)


TIMES = ("time", "step_s", "tokens_per_s", "mfu", "data_s", "wait_s")


def losses(out: Path, merged: bool = False) -> dict[tuple[int, str], str]:
    """Return the bits of every logged number except times, by step and name.

    Args:
        out: the run directory.
        merged: whether a step may be logged twice. Its numbers must then be identical.
    """
    found: dict[tuple[int, str], str] = {}
    for record in read_log(out):
        for name, value in record.items():
            if (
                name == "step"
                or name in TIMES
                or "_per_s" in name
                or name.endswith("_s")
            ):
                continue
            key = record["step"], name
            if merged and found.get(key, bits(value)) != bits(value):
                raise Silent(
                    f"{name} of step {record['step']} changed when the step was repeated"
                )
            assert merged or key not in found, (
                f"{name} of step {record['step']} is logged twice"
            )
            found[key] = bits(value)
    return found


def batches(out: Path) -> dict[int, str]:
    """Return the digest of each batch that the run read. A batch read twice must be identical."""
    found: dict[int, str] = {}
    for line in batch_log(out).read_text().splitlines():
        step, digest = line.split()
        assert found.setdefault(int(step), digest) == digest, (
            f"batch {step} has changed"
        )
    return found


def leaves(out: Path, step: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return (dtype, shape, bytes) of every leaf of a checkpoint, read with Orbax alone."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def note(path: str, leaf: object) -> None:
        array = np.asarray(leaf)
        found[path] = (str(array.dtype), array.shape, array.tobytes())

    _map(_read((out / "checkpoints" / str(step) / "state").resolve()), note)
    assert found, f"checkpoint {step} is empty"
    return found


def _read(directory: Path) -> object:
    reader = ocp.PyTreeCheckpointer()
    arguments = _map(
        reader.metadata(directory).item_metadata.tree,
        lambda *_: ocp.RestoreArgs(restore_type=np.ndarray),
    )
    return reader.restore(
        directory, args=ocp.args.PyTreeRestore(restore_args=arguments)
    )


def _map(
    tree: object, function: Callable[[str, object], object], path: str = ""
) -> object:
    if isinstance(tree, dict):
        return {
            key: _map(child, function, f"{path}/{key}") for key, child in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [
            _map(child, function, f"{path}/{index}") for index, child in enumerate(tree)
        ]
    return None if tree is None else function(path, tree)


def steps_of(out: Path) -> list[int]:
    """Return the steps of the listed checkpoints."""
    folder = out / "checkpoints"
    return (
        sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        if folder.exists()
        else []
    )


def is_complete(directory: Path) -> bool:
    """Return whether a checkpoint has exactly the files and digests of its manifest."""
    manifest = directory / "MANIFEST"
    if not manifest.exists():
        return False
    expected = dict(
        reversed(line.split("  ", 1)) for line in manifest.read_text().splitlines()
    )
    found = {
        str(path.relative_to(directory)): path
        for path in files_of(directory)
        if path != manifest
    }
    return expected == {
        name: blake3(path.read_bytes()).hexdigest() for name, path in found.items()
    }


def files_of(directory: Path) -> list[Path]:
    """Return all files below a directory."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def leftovers(out: Path) -> list[str]:
    """Return temporary files and directories, which a run should remove."""
    return sorted(
        str(path.relative_to(out))
        for path in out.rglob("*")
        if "tmp" in path.name or path.name.startswith(".write-test")
    )


def check_exact(out: Path, straight: Path, steps: int, merged: bool = False) -> None:
    """Check that losses, batches and the last checkpoint match the undisturbed run bit by bit."""
    ours, theirs = losses(out, merged), losses(straight)
    differing = sorted(
        key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
    )
    if differing:
        raise Silent(f"{len(differing)} numbers differ, first {differing[0]}")
    seen, wanted = batches(out), batches(straight)
    differing = [step for step in wanted if seen.get(step) != wanted[step]]
    if differing:
        raise Silent(f"{len(differing)} batches differ, first {differing[0]}")
    ours, theirs = leaves(out, steps), leaves(straight, steps)
    differing = sorted(
        path
        for path in ours.keys() | theirs.keys()
        if ours.get(path) != theirs.get(path)
    )
    if differing:
        raise Silent(f"{len(differing)} leaves differ: {', '.join(differing[:3])}")


def check_clean(out: Path) -> None:
    """Check that there are no temporary files and that every listed checkpoint is complete."""
    assert leftovers(out) == [], f"left behind: {leftovers(out)}"
    broken = [
        step
        for step in steps_of(out)
        if not is_complete(out / "checkpoints" / str(step))
    ]
    assert broken == [], f"steps {broken} are listed but not complete"


def check_refused(ended: Ended, code: int, *words: str) -> None:
    """Check that a command refused to run.

    It must end with this exit code and print one message, which begins with the name of the
    command and contains these words. There must be no traceback.
    """
    if ended.code == 0:
        raise Silent(f"accepted, expected exit code {code}: {ended.message}")
    assert ended.code == code, (
        f"exit code {ended.code}, expected {code}: {ended.message}"
    )
    assert "Traceback" not in ended.err, ended.message
    assert ended.err.count("shardwise: ") == 1 or "╭" in ended.err, ended.message
    missing = [word for word in words if word not in ended.err]
    assert not missing, f"the message lacks {missing}: {ended.message}"


def child_of(pid: int, index: int) -> int:
    """Return the pid of process `index` of a launcher."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == pid
                and words[words.index(b"--process-id") + 1] == str(index).encode()
            ):
                return int(path.name)
    raise AssertionError(f"the launcher {pid} has no process {index}")


def redirected(redirection: str) -> tuple[str, ...]:
    """Return the words before a command that run it with its output redirected by a shell."""
    return "bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash"


def check_stopped(ended: Ended) -> None:
    """Check that a command stopped after a signal, with exit code 75."""
    assert ended.code == 75, f"exit code {ended.code}: {ended.message}"
    assert "Traceback" not in ended.err, ended.message


def check_done(ended: Ended) -> None:
    """Check that a command succeeded."""
    assert ended.code == 0, f"exit code {ended.code}: {ended.message}"
    assert "Traceback" not in ended.err, ended.message


# Faults


def copy_of(run: Path, bench: Bench, name: str, without: tuple[int, ...] = ()) -> Path:
    """Copy a run directory and the log of its batches, without the checkpoints of some steps."""
    out = bench.folder / name.replace(" ", "-")
    shutil.copytree(run, out)
    shutil.copy(batch_log(run), batch_log(out))
    for step in without:
        shutil.rmtree(out / "checkpoints" / str(step))
    return out


def seeded(seed: int) -> Random:
    """Return a random generator."""
    return Random(seed)  # noqa: S311


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def pick_bit(directory: Path, random: Random) -> tuple[Path, int]:
    """Return a file and a bit of it, uniform over all bits of all files."""
    files = [path for path in files_of(directory) if path.stat().st_size]
    path = random.choices(files, [path.stat().st_size for path in files])[0]
    return path, random.randrange(path.stat().st_size * 8)


def write_manifest(directory: Path) -> None:
    """Write a manifest for the present files, as someone would who forges a checkpoint."""
    files = [path for path in files_of(directory) if path.name != "MANIFEST"]
    lines = [
        f"{blake3(path.read_bytes()).hexdigest()}  {path.relative_to(directory)}\n"
        for path in files
    ]
    (directory / "MANIFEST").write_text("".join(lines))


def rewrite(
    directory: Path, change: Callable[[str, np.ndarray], np.ndarray], **meta: object
) -> None:
    """Replace the arrays and the metadata of a checkpoint, with Orbax alone.

    Args:
        directory: the checkpoint.
        change: returns the new array for (path, array).
        meta: entries of meta.json to replace.
    """
    state = (directory / "state").resolve()
    tree = _map(_read(state), lambda path, leaf: change(path, np.asarray(leaf)))
    shutil.rmtree(state)
    with ocp.StandardCheckpointer() as writer:
        writer.save(state, tree)
    saved = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**saved, **meta}))
    write_manifest(directory)


def truncate(path: Path) -> None:
    """Remove the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest_file(directory: Path) -> Path:
    """Return the largest file below a directory."""
    return max(files_of(directory), key=lambda path: path.stat().st_size)


def listening(pid: int) -> set[str]:
    """Return the addresses other than loopback on which a process listens."""
    inodes = set()
    # The process may end at any time.
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            is_loopback = address.startswith(
                (
                    "0100007F",
                    "00000000000000000000000001000000",
                    "0000000000000000FFFF00000100007F",
                )
            )
            if state == "0A" and rest[5] in inodes and not is_loopback:
                found.add(address)
    return found


def can_mount(folder: Path) -> bool:
    """Return whether this user may mount a file system in this container."""
    try:
        with mounted(folder, "size=1m"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount an in-memory file system. This needs root."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, capture_output=True)


# The table


class Silent(AssertionError):
    """State was wrong or lost, the exit code was 0 and there was no message."""


@dataclass
class Tally:
    """Counts of the trials of one experiment, and the messages of those that failed."""

    trials: int = 0
    passed: int = 0
    silent: int = 0
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def trial(self, what: str, quiet: bool = False) -> Iterator[None]:
        """Count a trial. A failure is recorded, and the experiment continues."""
        self.trials += 1
        began = time.monotonic()
        try:
            yield
            self.passed += 1
            verdict = "passed"
        except (AssertionError, OSError, ValueError, KeyError) as error:
            self.silent += isinstance(error, Silent)
            kind = "SILENT" if isinstance(error, Silent) else "failed"
            verdict = f"{kind}: {str(error) or type(error).__name__}"
            self.failures.append(f"{what}: {verdict}")
        if verdict != "passed" or not quiet:
            print(
                f"  {what}: {verdict[:700]} ({time.monotonic() - began:.1f} s)",
                flush=True,
            )


@dataclass
class Row:
    """A row of the table."""

    id: str
    name: str
    ours: Tally = field(default_factory=Tally)
    plain: Tally = field(default_factory=Tally)
    note: str = ""


ROWS: list[Row] = []


@contextmanager
def experiment(id: str, name: str, note: str = "") -> Iterator[Row]:
    """Add a row to the table. Failures of the plain loop are recorded and do not fail the test."""
    row = Row(id, name, note=note)
    print(f"\n{id} {name}", flush=True)
    try:
        yield row
    finally:
        ROWS.append(row)
    assert not row.ours.failures, "\n".join(
        [
            f"{len(row.ours.failures)} of {row.ours.trials} trials failed:",
            *row.ours.failures,
        ]
    )


def table() -> str:
    """Return the table in Markdown, with one row per experiment id."""
    merged: dict[str, Row] = {}
    for row in ROWS:
        into = merged.setdefault(row.id, Row(row.id, row.name))
        into.note = row.note or into.note
        for to, tally in ((into.ours, row.ours), (into.plain, row.plain)):
            to.trials, to.passed, to.silent = (
                to.trials + tally.trials,
                to.passed + tally.passed,
                to.silent + tally.silent,
            )
    lines = [
        "| fault | | shardwise: trials | passed | silent "
        "| plain loop: trials | passed | silent | note |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for id in sorted(merged):
        row = merged[id]
        plain = (
            f"{row.plain.trials} | {row.plain.passed} | {row.plain.silent}"
            if row.plain.trials
            else "- | - | -"
        )
        lines.append(
            f"| {id} | {row.name} | {row.ours.trials} | {row.ours.passed} "
            f"| {row.ours.silent} | {plain} | {row.note} |"
        )
    return "\n".join(lines)
