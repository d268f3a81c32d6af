"""Runs the device check in a separate process, and explains what it found or why it failed."""

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

from shardwise.doctor.check import CheckResult, has_gpu, has_tpu, ok, problem, warning
from shardwise.doctor.probe import STAGES
from shardwise.text import Json, show_bytes, show_short_time

# Bytes of the probe's output that are kept.
MAX_OUTPUT = 2**16
# Messages of libraries that fail, and what helps.
CAUSES = (
    (r"Unknown flags? in XLA_FLAGS: (.*)", "Correct the flag, or unset XLA_FLAGS."),
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
        "Another program may hold the GPU's memory; otherwise update driver and plugin together.",
    ),
    (
        r"CUDA_ERROR_NO_DEVICE|no CUDA-capable device|CUDA driver version is insufficient",
        "Check the driver with `nvidia-smi`, and CUDA_VISIBLE_DEVICES.",
    ),
    (
        r"RESOURCE_EXHAUSTED|out of memory",
        "Another program holds the memory: see above.",
    ),
    (
        r"libtpu.*lockfile|already in use by process|TPU is already in use",
        "Another process uses the TPU: end it, or wait.",
    ),
    (
        r"Unable to initialize backend '(\w+)'|Unknown backend",
        "Correct or unset JAX_PLATFORMS, or reinstall the plugin of that platform.",
    ),
    (
        r"jax_num_cpu_devices|force_host_platform_device_count",
        "Set JAX_NUM_CPU_DEVICES or --xla_force_host_platform_device_count, not both.",
    ),
)
REINSTALL = (
    "pip install -U --force-reinstall jax jaxlib flax optax orbax-checkpoint grain"
)
SIGNAL_REMEDIES = {
    signal.SIGKILL: "Probably out of memory: end other programs.",
    signal.SIGILL: "The processor lacks instructions of jaxlib: use another machine.",
}
COMPLAINT = (
    r"error|unknown|fail|not compatible|unable|insufficient|cannot|compiled with"
)


@dataclass
class DeviceProbe:
    """What the process that checks the devices has reported.

    Attributes:
        found: the fields of each finished stage.
        stage: the last stage that has begun.
        error: the exception that ended it, with its place.
        hangs: a stage took too long.
        code: the exit code; None if the process had to be killed.
        output: the end of what it printed.
    """

    found: dict[str, Json] = field(default_factory=dict)
    stage: str = ""
    error: str = ""
    hangs: bool = False
    code: int | None = None
    output: str = ""

    @property
    def stage_name(self) -> str:
        """The last stage, for people."""
        return STAGES[self.stage][0] if self.stage else "starting Python"

    def take(self, message: Json) -> None:
        """Handle a line of the probe."""
        stage = message.pop("stage")
        if stage == "error":
            self.error = f"{message['error']} ({message['where']})"
        elif message.pop("begun", False):
            self.stage = stage
        else:
            self.found[stage] = message


def run_probe(
    timeout: float, report: Callable[[str], object], cpu_devices: int | None = None
) -> DeviceProbe:
    """Check the devices in a separate process, which may hang or die.

    Args:
        timeout: seconds that one stage may take; then the process is killed.
        report: receives the current stage.
        cpu_devices: use the CPU as this many devices.
    """
    environment = {
        **os.environ,
        # A GPU may be in use, so only the memory that is needed is taken.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if cpu_devices is not None:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
        environment["PJRT_NPROC"] = str(8 * cpu_devices)
    reading, writing = os.pipe()
    script = Path(__file__).with_name("probe.py")
    # -P: the modules next to the script must not shadow others.
    child = subprocess.Popen(
        [sys.executable, "-P", str(script), str(writing)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    try:
        return _listen(child, reading, timeout, report)
    finally:
        os.close(reading)
        # A process that waits inside a driver does not die from SIGKILL. Then it is left behind.
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        if child.stdout is not None:
            child.stdout.close()


def _listen(
    child: subprocess.Popen[bytes],
    reading: int,
    timeout: float,
    report: Callable[[str], object],
) -> DeviceProbe:
    """Read the messages and the output of the probe until it ends or a stage takes too long."""
    assert child.stdout is not None
    probe = DeviceProbe()
    messages = output = b""
    last_message = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for source in (reading, child.stdout.fileno()):
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map() and not probe.hangs:
            report(f"checking: {probe.stage_name}")
            for key, _ in selector.select(0.2):
                block = os.read(key.fd, MAX_OUTPUT)
                if not block:
                    selector.unregister(key.fd)
                elif key.fd == reading:
                    last_message = time.monotonic()
                    *lines, messages = (messages + block).split(b"\n")
                    for line in lines:
                        probe.take(json.loads(line))
                else:
                    output = (output + block)[-MAX_OUTPUT:]
            probe.hangs = time.monotonic() - last_message > timeout
    if not probe.hangs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            probe.code = child.wait(timeout)
    probe.output = output.decode(errors="replace")
    return probe


def probe_results(probe: DeviceProbe, timeout: float) -> Iterator[CheckResult]:
    """Return the results of a device check, and why it failed if it did."""
    found = probe.found
    if "jax" in found:
        seconds = show_short_time(found["jax"]["total"])
        yield ok("jax", f"{found['jax']['version']} imported in {seconds}")
    if "devices" in found:
        yield from _device_results(found["devices"]["devices"], probe.output)
    for kind in found.get("compute", {}).get("kinds", []):
        if kind["is_right"]:
            seconds = show_short_time(kind["seconds"])
            yield ok("arithmetic", f"{kind['kind']}: compiled and run in {seconds}")
        else:
            text = f"{kind['kind']} computes wrong results"
            yield problem(
                "arithmetic", text, "This device is defective: use another one."
            )
    for name, error in found.get("libraries", {}).get("failed", {}).items():
        text = f"cannot be imported: {_one_line(error)}"
        yield problem(name, text, f"pip install -U {name.split('.')[0]}")
    if "step" not in found:
        yield _failure(probe, timeout)
        return
    step = found["step"]
    text = (
        f"on {step['count']} device{'s' * (step['count'] > 1)}: first "
        f"{show_short_time(step['first'])} with compilation, second "
        f"{show_short_time(step['second'])}"
    )
    first, second = step["losses"]
    if second < first:
        yield ok("training step", text)
    else:
        yield problem(
            "training step", text, f"The loss does not decrease ({first}, {second})."
        )


def _device_results(devices: list[Json], output: str) -> Iterator[CheckResult]:
    """Report the devices of each kind; warn if an accelerator is not among them."""
    kinds: dict[tuple[str, str], list[Json]] = {}
    for device in devices:
        kinds.setdefault((device["platform"], device["kind"]), []).append(device)
    for (platform, kind), members in kinds.items():
        text = f"{len(members)} {platform} ({kind})"
        memory = [device["memory"] for device in members if device["memory"]]
        if memory:
            text += f", {show_bytes(min(memory))} of memory each"
        wants_cpu = "cpu" in os.environ.get("JAX_PLATFORMS", "")
        if platform == "cpu" and (has_gpu() or has_tpu()) and not wants_cpu:
            text += f", although the machine has an accelerator: {_complaint(output)}"
            remedy = _known_cause(output) or "Check the plugins above."
            yield warning("found by JAX", _one_line(text), remedy)
        else:
            yield ok("found by JAX", text)


def _failure(probe: DeviceProbe, timeout: float) -> CheckResult:
    """Explain why the device check did not finish."""
    name = "device check"
    if probe.hangs:
        text = (
            f"{probe.stage_name}: no answer for {timeout:.0f} s; the process was killed"
        )
        remedy = "If the machine is only slow: --timeout 600."
        if probe.stage == "devices" and (has_gpu() or has_tpu()):
            remedy = "The driver hangs: check `dmesg`, restart the machine, or JAX_PLATFORMS=cpu."
        elif probe.stage == "step":
            remedy = "The devices cannot communicate: try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1."
        return problem(name, text, remedy)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    is_assertion = probe.stage == "devices" and probe.error.startswith(
        "AssertionError: "
    )
    if is_assertion and platforms not in ("", "cpu"):
        # JAX fails here without a message.
        text = f"no installed plugin provides the devices of JAX_PLATFORMS={platforms}"
        remedy = (
            'unset JAX_PLATFORMS, or install the plugin: pip install -U "jax[cuda13]"'
        )
        return problem(name, f"{probe.stage_name}: {text}", remedy)
    # A library that exits by itself has printed why.
    error = "" if probe.error.startswith("SystemExit") else probe.error
    reason = error or _complaint(probe.output) or probe.error
    remedy = _known_cause(f"{probe.error}\n{probe.output}")
    if probe.code is not None and probe.code < 0:
        number = signal.Signals(-probe.code)
        reason = f"ended by {number.name}" + (f": {reason}" if reason else "")
        remedy = remedy or SIGNAL_REMEDIES.get(number, "")
    text = f"{probe.stage_name}: {_one_line(reason)}"
    return problem(name, text, remedy or f"Reinstall: {REINSTALL}")


def _known_cause(output: str) -> str:
    """Return the remedy for a known message of a library, or ""."""
    matches = (
        remedy for cause, remedy in CAUSES if re.search(cause, output, re.IGNORECASE)
    )
    return next(matches, "")


def _complaint(output: str) -> str:
    """Return the last line that says what is wrong, of all that libraries print."""
    lines = [
        line
        for line in output.splitlines()
        if not line.startswith(("***", "  File ", "    "))
    ]
    lines = [line.strip() for line in lines if line.strip()]
    complaints = [line for line in lines if re.search(COMPLAINT, line, re.IGNORECASE)]
    return (complaints or lines or [""])[-1]


def _one_line(text: str, max_length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."
