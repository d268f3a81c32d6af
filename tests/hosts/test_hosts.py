"""Several hosts train the same run as one, through a lost host, a cut link and a stuck process.

Each test starts the real command on every host. All need root, so they are not part of `make test`.
"""

import ipaddress
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import (
    RECIPE,
    batches,
    check_clean,
    check_done,
    check_exact,
    last_step,
    leaves,
    read_log,
    steps_of,
)

pytestmark = pytest.mark.faults

SHORT = ("--steps", 20, "--save-every", 5, "--batch-size", 16)
RUN = ("--mesh", "fsdp=4", *SHORT)
RULE = ("--rule", "**/kernel", "model")
# With seed 0 a rounding error makes the gradient of step 6 jump by 1e-5.
SGD = ("--optimizer", "sgd", "--lr", "0.1", "--seed", 1)
# Slow enough that a fault comes between the intended steps.
SLOW = ("--pause", "0.3")
# Seconds until the others must have ended when a process is lost, and when a link is cut.
LOST = 15
CUT = 20
DUMP = re.compile(
    r"Traceback|    @ +0x|Check failure|^[WEF]\d{4} |Fatal Python error|terminate called",
    re.MULTILINE,
)


def logged(out):
    """Return every loss that was logged, by (step, name)."""
    return {
        (record["step"], name): record[name]
        for record in read_log(out)
        for name in record
        if name.endswith("loss")
    }


def check_same_run(out, alone):
    """Check that losses agree within rounding error and that batches are bit-identical.

    All hosts write to the same log of batches.
    """
    ours, theirs = logged(out), logged(alone)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 21
    differences = {key: abs(ours[key] - theirs[key]) / abs(theirs[key]) for key in ours}
    for name in ("loss", "eval_loss"):
        worst = max(
            difference for (_, kind), difference in differences.items() if kind == name
        )
        print(f"  largest relative difference of {name}: {worst:.1e}")
        assert worst <= 2e-6
    assert batches(out) == batches(alone)
    assert leaves(out, 20).keys() == leaves(alone, 20).keys()
    check_clean(out)


def check_ended(process, code, *words):
    """Check the exit code, and that stderr has one line with these words (or none) and no dump."""
    output = process.err
    assert process.process.returncode == code, (
        f"exit code {process.process.returncode} instead of {code}: {output[-800:]}"
    )
    assert not DUMP.search(output), output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("shardwise: ")]
    assert len(lines) == bool(words), output[-800:]
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"does not say {missing}: {lines[0]}"


def check_resumes(hosts, out, straight, *args):
    """Check that the same command resumes, and that the run ends like one without faults."""
    before = steps_of(out)
    assert before, "there is no checkpoint to resume from"
    hosts.train(out.name, *args)
    check_exact(out, straight, 20)
    check_clean(out)
    return before[-1]


def show(what, took):
    """Print how long the processes took to end."""
    parts = [
        f"process {index} ended after {took[index]:.1f} s" for index in sorted(took)
    ]
    print(f"  {what}: {', '.join(parts)}", flush=True)


@pytest.fixture(scope="module")
def alone(all_hosts):
    """Return a function that trains the same run in one process with 4 devices.

    `alone(mesh)` returns the run directory. Results are cached.
    """
    made = {}

    def get(*mesh):
        if mesh not in made:
            name = f"alone{len(made)}"
            recipe = (
                RECIPE,
                "--out",
                all_hosts.bench.folder / name,
                "--mesh",
                *mesh,
                *SHORT,
            )
            process = all_hosts.bench.popen(
                (
                    sys.executable,
                    "-m",
                    "shardwise.cli",
                    "--cpu-devices",
                    4,
                    "train",
                    *recipe,
                ),
                name,
            )
            check_done(process.end())
            made[mesh] = process.out
        return made[mesh]

    return get


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        (("data=4",), 2),
        (("fsdp=4",), 2),
        (("data=2,model=2", *RULE), 2),
        (("data=4",), 4),
        (("data=2,model=2", *RULE), 4),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else f"{value} hosts",
)
def test_hosts_train_the_same_run(hosts, alone, mesh, count):
    """Compare several hosts with one process.

    In this model the gradients of biases before a batch norm are rounding errors. Adam would turn
    them into full steps: on some CPUs one process on 2 and on 4 devices differs by 1e-4, too.
    """
    args = (*mesh, *SGD)
    out = hosts.train("run", "--mesh", *args, *SHORT, hosts=count, devices=4 // count)
    check_same_run(out, alone(*args))


def test_only_data_crosses_hosts(hosts):
    """In whatever order the axes are written, the model axis stays within a host."""
    meshes, script = (
        ("data=2,model=2", "model=2,data=2"),
        Path(__file__).parent / "meshes.py",
    )
    address, files = (
        f"{hosts.network.address(0)}:{hosts.network.port}",
        [hosts.bench.folder / f"{index}.json" for index in range(2)],
    )
    started = [
        hosts.start(
            i, f"mesh{i}", sys.executable, script, address, 2, i, 2, file, *meshes
        )
        for i, file in enumerate(files)
    ]
    for process in started:
        check_done(process.end())
    for file in files:
        found = json.loads(file.read_text())
        assert found["hosts"] == [hosts.network.name(0), hosts.network.name(1)]
        assert found["meshes"]["data=2,model=2"] == [[0, 0], [1, 1]]
        assert found["meshes"]["model=2,data=2"] == [[0, 1], [0, 1]]


def listening(pid):
    """Return every (address, port) on which a process listens, as seen from its host."""
    sockets, found = set(), set()
    # The process may end at any time.
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(
                    os.readlink(link).removeprefix("socket:[").removesuffix("]")
                )
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and rest[5] in sockets:
                    address, _, port = local.partition(":")
                    words = [
                        bytes.fromhex(address[start : start + 8])[::-1]
                        for start in range(0, len(address), 8)
                    ]
                    plain = ipaddress.ip_address(b"".join(words))
                    found.add(
                        (
                            str(getattr(plain, "ipv4_mapped", None) or plain),
                            int(port, 16),
                        )
                    )
    return found


def test_processes_listen_only_on_their_own_address(hosts):
    running = hosts.start_train("run", *RUN)
    found = [set(), set()]
    while any(process.process.poll() is None for process in running.processes):
        for index, process in enumerate(running.processes):
            found[index] |= listening(process.process.pid)
        time.sleep(0.1)
    for ended in running.end():
        check_done(ended)
    print(f"  listened on: {found}")
    for index in range(2):
        assert {address for address, _ in found[index]} == {
            hosts.network.address(index)
        }
    assert (hosts.network.address(0), hosts.network.port) in found[0]


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_host_is_named(hosts, undisturbed, lost):
    running = hosts.start_train("run", *RUN, *SLOW)
    running.wait_for_step(7)
    running[lost].signal(signal.SIGKILL)
    took = running.end_within(LOST, but=(lost,))
    show(f"host {lost} lost", took)
    check_ended(
        running[1 - lost], 6, f"process {lost} on {hosts.network.name(lost)}", "lost"
    )
    check_resumes(hosts, running[0].out, undisturbed(*RUN), *RUN, *SLOW)


def test_a_cut_link_ends_both_sides(hosts, undisturbed):
    running = hosts.start_train("run", *RUN, *SLOW)
    running.wait_for_step(7)
    hosts.network.cut(0, 1)
    took = running.end_within(CUT)
    show("link cut", took)
    for index, process in enumerate(running.processes):
        check_ended(
            process,
            6,
            f"process {1 - index} on {hosts.network.name(1 - index)}",
            "lost",
        )
    hosts.network.mend()
    check_resumes(hosts, running[0].out, undisturbed(*RUN), *RUN, *SLOW)


def test_hosts_that_never_meet_say_so(hosts):
    hosts.network.cut(0, 1)
    running = hosts.start_train(
        "run", *RUN, command=(Path(__file__).parent / "hasty.py", 10)
    )
    show("never joined, with 10 s for it", running.end_within(60))
    for index, process in enumerate(running.processes):
        check_ended(
            process, 6, f"process {index} of 2 cannot join", hosts.network.address(0)
        )


def test_a_cut_between_two_hosts_that_both_reach_the_first(hosts):
    """Nobody is lost and nobody can continue: heartbeats arrive, but a collective does not."""
    running = hosts.start_train(
        "run",
        "--mesh",
        "data=3",
        "--batch-size",
        18,
        *SLOW,
        "--watchdog",
        15,
        hosts=3,
        devices=1,
    )
    running.wait_for_step(7)
    hosts.network.cut(1, 2)
    took = running.end_within(60)
    show("link between the others cut", took)
    for index, process in enumerate(running.processes):
        assert process.process.returncode == 6, process.err[-800:]
        assert not DUMP.search(process.err), process.err[-3000:]
        assert (
            "File" in (running[0].out / "stacks" / f"process-{index}.txt").read_text()
        )
    check_ended(running[0], 6, "stuck")


@pytest.mark.parametrize("asked", [1, 0])
def test_a_signal_to_one_host_stops_all_at_the_same_step(hosts, undisturbed, asked):
    running = hosts.start_train("run", *RUN, *SLOW)
    running.wait_for_step(7)
    running[asked].signal(signal.SIGTERM)
    took = running.end_within(LOST)
    show(f"signal to host {asked}", took)
    out = running[0].out
    stopped = last_step(out)
    assert 7 <= stopped < 20
    assert steps_of(out)[-1] == stopped
    check_ended(running[0], 75, f"after step {stopped}")
    check_ended(running[1], 75)
    check_resumes(hosts, out, undisturbed(*RUN), *RUN, *SLOW)


def test_a_suspended_host_is_named(hosts, undisturbed):
    """It sends no heartbeats. When it continues, it finds that the others have gone."""
    running = hosts.start_train("run", *RUN, *SLOW)
    running.wait_for_step(7)
    running[1].signal(signal.SIGSTOP)
    took = running.end_within(LOST, but=(1,))
    show("host 1 suspended", took)
    check_ended(running[0], 6, f"process 1 on {hosts.network.name(1)}", "lost")
    running[1].signal(signal.SIGCONT)
    show("host 1 continued", running.end_within(LOST))
    check_ended(running[1], 6, f"process 0 on {hosts.network.name(0)}", "lost")
    check_resumes(hosts, running[0].out, undisturbed(*RUN), *RUN, *SLOW)


def test_a_host_whose_data_stalls_is_named(hosts, undisturbed):
    """It is alive and sends heartbeats; only the watchdog sees that it makes no progress."""
    stall = hosts.bench.folder / "stall"
    stall.touch()
    args = (*RUN, *SLOW, "--stall-at", 8, "--watchdog", 15)
    running = hosts.start_train("run", *args, only={1: {"STALL": str(stall)}})
    running[1].wait_for_file(Path(f"{stall}.reached"))
    running.wait_for_step(8)
    took = running.end_within(60)
    show("data of host 1 stalls, --watchdog 15", took)
    check_ended(
        running[0], 6, f"process 1 on {hosts.network.name(1)}", "stuck", "--watchdog"
    )
    assert running[1].process.returncode == 6
    assert not DUMP.search(running[1].err), running[1].err[-3000:]
    for index in range(2):
        assert (
            "File" in (running[0].out / "stacks" / f"process-{index}.txt").read_text()
        )
    assert "wait_for_data" in (running[0].out / "stacks" / "process-1.txt").read_text()
    check_resumes(hosts, running[0].out, undisturbed(*RUN), *args)
