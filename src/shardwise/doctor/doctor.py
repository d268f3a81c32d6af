"""`shardwise doctor`: whether training can work here, and what to do where it cannot; or how a run stands."""

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.doctor.environment import environment_findings
from shardwise.doctor.finding import Finding, State, has_gpu, has_tpu
from shardwise.doctor.packages import gpu_findings, package_findings
from shardwise.doctor.probe import STAGES
from shardwise.doctor.system import disk_findings, memory_findings, system_findings
from shardwise.errors import ConfigError, Parser
from shardwise.text import show_bytes, show_short_time

USAGE = """\
shardwise doctor [RUN] [--timeout S] [--no-devices]

  RUN              look at this run directory instead: who uses it, its checkpoints, its last errors, what to do next
  --timeout S      seconds that one stage of trying out the devices may take (90)
  --no-devices     do not try out the devices
  --json FILE      the same for programs
Exit code 0, also with warnings; 2 if something keeps training from working.
"""
QUIET = 2.0  # seconds after which a stage is told
SEEN = 2**16  # bytes of what the probe prints that are kept
MARKS: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
CAUSES = (  # what libraries say when they fail, and what helps
    (
        r"Unknown flags? in XLA_FLAGS: (.*)",
        "A flag in XLA_FLAGS that this XLA does not know: correct it, or unset XLA_FLAGS.",
    ),
    (
        r"jaxlib version \S+ is newer than|requires jaxlib|jaxlib is version",
        "pip install -U jax jaxlib, so that both have the same version.",
    ),
    (r"No module named '?(jax|jaxlib)\b", 'pip install "jax>=0.10.2"'),
    (
        r"CuDNN library: \S+ but source was compiled with",
        "unset LD_LIBRARY_PATH; or pip install -U the nvidia-cudnn package of the plugin.",
    ),
    (
        r"DNN library initialization failed",
        "Another program may hold the GPU's memory; else renew driver and plugin together.",
    ),
    (
        r"CUDA_ERROR_NO_DEVICE|no CUDA-capable device|CUDA driver version is insufficient",
        "Look at `nvidia-smi`: driver, CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"RESOURCE_EXHAUSTED|out of memory",
        "Another program holds the memory: see the processes above.",
    ),
    (
        r"libtpu.*lockfile|already in use by process|TPU is already in use",
        "Another process uses the TPU: end it, or wait.",
    ),
    (
        r"Unable to initialize backend '(\w+)'|Unknown backend",
        "Correct or unset JAX_PLATFORMS, or mend the plugin of that platform.",
    ),
    (
        r"jax_num_cpu_devices|force_host_platform_device_count",
        "Set JAX_NUM_CPU_DEVICES or --xla_force_host_platform_device_count, not both.",
    ),
)


def main(args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    parser = Parser(
        prog="shardwise doctor", usage=USAGE, add_help=False, allow_abbrev=False, help_text=USAGE
    )
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--timeout", type=float, default=90.0)
    parser.add_argument("--no-devices", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    mine = parser.parse_args(args)
    if mine.help:
        print(USAGE, end="")
        return {}, 0
    if not 1 <= mine.timeout <= 3600:
        raise ConfigError(f"--timeout {mine.timeout:g}: it must be from 1 to 3600 seconds.")
    console = Console(stderr=True, highlight=False)
    if mine.run is not None:
        from shardwise.doctor.run import run_findings  # needs NumPy, which may be what is broken

        with _telling(console) as tell:
            findings = list(run_findings(mine.run, tell))
    else:
        findings = machine_findings(
            console, None if mine.no_devices else mine.timeout, options.cpu_devices
        )
    _show(findings)
    problems = [finding for finding in findings if finding.state == "problem"]
    count: dict[str, int] = {
        state: sum(finding.state == state for finding in findings) for state in MARKS
    }
    return {"findings": [finding.as_json() for finding in findings], **count}, 2 if problems else 0


def machine_findings(
    console: Console, timeout: float | None, cpu_devices: int | None = None
) -> list[Finding]:
    """All that is known of this machine; the devices are tried out by a process that may take `timeout` seconds a stage."""
    findings = [*_guarded("packages", package_findings), *_guarded("devices", gpu_findings)]
    probe = Probed()
    if timeout is not None:
        with _telling(console) as tell:
            probe = run_probe(timeout, tell, cpu_devices)
        findings += probe_findings(probe, timeout)
    settings = probe.found.get("jax", {}).get("settings")
    findings += _guarded("environment", lambda: environment_findings(settings, os.environ))
    if not any(finding.group == "environment" for finding in findings):
        findings.append(
            Finding("environment", "variables", "ok", "none that changes what JAX or shardwise do")
        )
    for group, check in (
        ("system", memory_findings),
        ("system", system_findings),
        ("disk", disk_findings),
    ):
        findings += _guarded(group, check)
    order = ["packages", "devices", "environment", "system", "disk"]
    return sorted(findings, key=lambda finding: order.index(finding.group))


def _guarded(group: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that fails says so, and the others go on."""
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(finding)
    except Exception as error:
        text = f"could not be looked at: {type(error).__name__}: {error}"
        found.append(
            Finding(
                group,
                group,
                "warning",
                text,
                "If shardwise works nevertheless, leave it; else reinstall it.",
            )
        )
    return found


@contextlib.contextmanager
def _telling(console: Console) -> Iterator[Callable[[str], None]]:
    """What goes on: on a terminal at once, elsewhere a line for what takes longer than `QUIET`."""
    if console.is_terminal:
        with console.status("looking") as status:
            yield status.update
        return
    since: list[Any] = ["", 0.0]

    def tell(text: str) -> None:
        if text != since[0]:
            since[:] = [text, time.monotonic()]
        elif since[1] and time.monotonic() - since[1] > QUIET:
            since[1] = 0.0
            console.print(f"{text} ...")

    yield tell


# The probe


@dataclass
class Probed:
    """What the process that tries out the devices has told."""

    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage
    stage: str = ""  # the last that was begun
    error: str = ""
    hangs: bool = False
    code: int | None = None
    printed: str = ""


def run_probe(
    timeout: float, tell: Callable[[str], None], cpu_devices: int | None = None
) -> Probed:
    """Tries out the devices in a process of its own, which is ended if a stage takes longer than `timeout` seconds."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU may be in use; what is taken is given back at once
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if cpu_devices is not None:
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(cpu_devices),
            "PJRT_NPROC": str(8 * cpu_devices),
        }
    reading, writing = os.pipe()
    script = Path(__file__).with_name("probe.py")
    child = subprocess.Popen(
        [
            sys.executable,
            "-P",
            str(script),
            str(writing),
        ],  # -P: the modules beside the script are shardwise's, not the world's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    try:
        return _listen(child, reading, timeout, tell)
    finally:
        os.close(reading)
        _end(child)


def _listen(
    child: subprocess.Popen[bytes], reading: int, timeout: float, tell: Callable[[str], None]
) -> Probed:
    assert child.stdout is not None
    probed, told, printed, since = Probed(), b"", b"", time.monotonic()
    with selectors.DefaultSelector() as selector:
        for source in (reading, child.stdout.fileno()):
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            tell(f"trying out: {STAGES.get(probed.stage, 'starting Python')}")
            for key, _ in selector.select(0.2):
                block = os.read(key.fd, SEEN)
                if not block:
                    selector.unregister(key.fd)
                elif key.fd == reading:
                    told, since = told + block, time.monotonic()
                    *lines, told = told.split(b"\n")
                    for line in lines:
                        _take(probed, json.loads(line))
                else:
                    printed = (printed + block)[-SEEN:]
            if time.monotonic() - since > timeout:
                probed.hangs = True
                break
    if not probed.hangs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            probed.code = child.wait(timeout)
    probed.printed = printed.decode(errors="replace")
    return probed


def _take(probed: Probed, message: dict[str, Any]) -> None:
    stage = message.pop("stage")
    if stage == "error":
        probed.error = f"{message['error']} ({message['where']})"
    elif message.pop("begun", False):
        probed.stage = stage
    else:
        probed.found[stage] = message


def _end(child: subprocess.Popen[bytes]) -> None:
    """A process that waits in a driver does not die of SIGKILL; then it is left behind."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5.0)
    if child.stdout is not None:
        child.stdout.close()


def probe_findings(probed: Probed, timeout: float) -> Iterator[Finding]:
    found = probed.found
    if "jax" in found:
        yield Finding(
            "devices",
            "jax",
            "ok",
            f"{found['jax']['version']} imported in {show_short_time(found['jax']['seconds'])}",
        )
    if "devices" in found:
        yield from _devices(found["devices"]["devices"], probed.printed)
    for kind in found.get("compute", {}).get("kinds", []):
        text = f"{kind['kind']}: compiled and run in {show_short_time(kind['seconds'])}"
        if not kind["is_right"]:
            yield Finding(
                "devices",
                "product",
                "problem",
                f"{kind['kind']} computes wrongly",
                "Try another device: this one is broken.",
            )
        else:
            yield Finding("devices", "product", "ok", text)
    for name, error in found.get("libraries", {}).get("failed", {}).items():
        yield Finding(
            "packages",
            name,
            "problem",
            f"cannot be imported: {_one_line(error)}",
            f"pip install -U {name.split('.')[0]}",
        )
    if "step" in found:
        step = found["step"]
        text = f"on {step['count']} device{'s' * (step['count'] > 1)}: first {show_short_time(step['first'])}"
        text += f" with compiling, second {show_short_time(step['second'])}"
        state: State = "ok" if step["falls"] else "problem"
        yield Finding(
            "devices",
            "training step",
            state,
            text,
            "" if step["falls"] else f"The loss does not fall ({step['losses']}).",
        )
        return
    yield _failure(probed, timeout)


def _failure(probed: Probed, timeout: float) -> Finding:
    """Why the probe did not come to its end."""
    name = STAGES.get(probed.stage, "starting Python")
    if probed.hangs:
        text = f"{name}: no answer for {timeout:.0f} s; the process was ended"
        if probed.stage == "devices" and (has_gpu() or has_tpu()):
            return Finding(
                "devices",
                "trying out",
                "problem",
                text,
                "The driver hangs: look at `dmesg`; restart the machine. CPUs: JAX_PLATFORMS=cpu.",
            )
        if probed.stage == "step":
            return Finding(
                "devices",
                "trying out",
                "problem",
                text,
                "Devices do not exchange: try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1.",
            )
        return Finding(
            "devices", "trying out", "problem", text, "If the machine is only slow: --timeout 600."
        )
    ended = probed.error.startswith("SystemExit")  # by itself, after saying why
    said = (not ended and probed.error) or _last_words(probed.printed) or probed.error
    if probed.code is not None and probed.code < 0:
        said = f"ended by {signal.Signals(-probed.code).name}" + (f": {said}" if said else "")
    where = f"{probed.error}\n{probed.printed}"
    remedy = ""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if (
        probed.stage == "devices"
        and probed.error.startswith("AssertionError: ")
        and wanted not in ("", "cpu")
    ):
        said = f"JAX_PLATFORMS={wanted} asks for devices that no installed plugin has"  # JAX fails there without a word
        remedy = 'unset JAX_PLATFORMS, or install the plugin: pip install -U "jax[cuda13]"'
    remedy = remedy or next(
        (remedy for pattern, remedy in CAUSES if re.search(pattern, where, re.IGNORECASE)), ""
    )
    if not remedy and probed.code == -signal.SIGKILL:
        remedy = "Too little memory, most likely: end other programs."
    if not remedy and probed.code == -signal.SIGILL:
        remedy = "The processor lacks instructions that jaxlib is built with: use another machine."
    remedy = (
        remedy
        or "Reinstall: pip install -U --force-reinstall jax jaxlib flax optax orbax-checkpoint grain"
    )
    return Finding("devices", "trying out", "problem", f"{name}: {_one_line(said)}", remedy)


def _devices(devices: list[dict[str, Any]], printed: str) -> Iterator[Finding]:
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for device in devices:
        kinds.setdefault((device["platform"], device["kind"]), []).append(device)
    for (platform, kind), those in kinds.items():
        memory = min((device["memory"] for device in those if device["memory"]), default=None)
        text = f"{len(those)} {platform} ({kind})" + (
            f", {show_bytes(memory)} of memory each for programs" if memory else ""
        )
        is_left_out = (
            platform == "cpu"
            and (has_gpu() or has_tpu())
            and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
        )
        if is_left_out:
            why = _last_words(printed)
            text += ", though the machine has an accelerator" + (
                f": {_one_line(why)}" if why else ""
            )
            remedy = next(
                (
                    remedy
                    for pattern, remedy in CAUSES
                    if re.search(pattern, printed, re.IGNORECASE)
                ),
                "See the plugins above.",
            )
            yield Finding("devices", "found by JAX", "warning", text, remedy)
        else:
            yield Finding("devices", "found by JAX", "ok", text)


def _last_words(printed: str) -> str:
    """The last line that says what is wrong, of all that libraries print."""
    lines = [
        line.strip()
        for line in printed.splitlines()
        if line.strip() and not line.startswith(("***", "  File ", "    "))
    ]
    told = [
        line
        for line in lines
        if re.search(
            r"error|unknown|fail|not compatible|unable|insufficient|cannot|compiled with",
            line,
            re.IGNORECASE,
        )
    ]
    return (told or lines or [""])[-1]


def _one_line(text: str, most: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


# The table


def _show(findings: list[Finding]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    table = Table("", "", "what", "found", box=None, pad_edge=False)
    group = ""
    for finding in findings:
        text = Text(_plain(finding.text))
        if finding.remedy:
            text.append(f"\n-> {_plain(finding.remedy)}", style="bold")
        table.add_row(
            finding.group if finding.group != group else "",
            Text(finding.state, style=MARKS[finding.state]),
            _plain(finding.name),
            text,
        )
        group = finding.group
    console.print(table)
    problems, warnings = (
        sum(finding.state == state for finding in findings) for state in ("problem", "warning")
    )
    if problems:
        console.print(
            f"{problems} problem{'s' * (problems > 1)} to mend first"
            + (f", {warnings} warnings" if warnings else "")
        )
    else:
        console.print(
            "nothing in the way"
            + (f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else "")
        )


def _plain(text: str) -> str:
    """Without what would move the cursor, from names and files of strangers."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
