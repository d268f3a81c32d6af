"""All checks of this machine, in the order of the table."""

import os
from collections.abc import Callable

from shardwise.doctor import packages, system
from shardwise.doctor.check import Check, CheckResult, run_check
from shardwise.doctor.devices import DeviceProbe, probe_results, run_probe
from shardwise.doctor.environment import check_environment
from shardwise.doctor.gpus import check_gpus


def check_machine(
    timeout: float | None,
    report: Callable[[str], object],
    cpu_devices: int | None = None,
) -> list[CheckResult]:
    """Check whether training can work on this machine.

    Args:
        timeout: seconds that one stage of the device check may take; None skips the device check.
        report: receives the name of what is being checked.
        cpu_devices: use the CPU as this many devices.
    """
    probe = DeviceProbe()
    device_checks: list[Check] = [check_gpus]
    if timeout is not None:
        probe = run_probe(timeout, report, cpu_devices)
        device_checks.append(lambda: probe_results(probe, timeout))
    settings = probe.found.get("jax", {}).get("settings")
    groups: dict[str, list[Check]] = {
        "packages": [*packages.CHECKS],
        "devices": device_checks,
        "environment": [lambda: check_environment(settings, os.environ)],
        "system": [*system.SYSTEM_CHECKS],
        "disk": [*system.DISK_CHECKS],
    }
    return [
        result
        for group, checks in groups.items()
        for check in checks
        for result in run_check(group, check)
    ]
