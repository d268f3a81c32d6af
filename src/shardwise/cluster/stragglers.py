"""Detection of stragglers: a step takes as long as its slowest process."""

import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardwise.cluster.group import ProcessGroup
from shardwise.text import Json

# Seconds between two reports of each process, two comparisons, and two speed measurements.
REPORT_INTERVAL = 10.0
COMPARE_INTERVAL = 30.0
MEASURE_INTERVAL = 600.0
# A process is a straggler if it waits for data for this much more of its time than the others,
MAX_EXTRA_WAIT = 0.1
# or computes at less than this fraction of their speed.
MIN_SPEED = 0.7


@dataclass(frozen=True)
class _Pace:
    """What one process reports.

    Attributes:
        waited: seconds spent waiting for data since the run started.
        at: when it was reported, on the monotonic clock of that process.
        speed: FLOP per second of one of its devices; None until it is known.
    """

    waited: float
    at: float
    speed: float | None


class Stragglers:
    """Finds processes that keep the others waiting.

    Every process reports how long it has waited for data and how fast its device multiplies
    matrices. The first process compares the reports. Nothing counts before the first step: a
    process that starts while another one on its machine still compiles would look slow.

    Args:
        group: the processes of the run.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        # When the last report, comparison and measurement were; None before the first step.
        self._reported: float | None = None
        self._compared = self._measured = 0.0
        self._speeds: list[float] = []
        self._previous: dict[int, _Pace] = {}
        self._warned: set[str] = set()

    def look(self, waited: float) -> list[str]:
        """Return new warnings about stragglers; each kind is returned once per process.

        Meant to be called after every step, by every process. Most calls only read the clock.

        Args:
            waited: seconds that this process has waited for data since the run started.
        """
        now = time.monotonic()
        if self._reported is None:
            self._reported = self._compared = now
        if self.group.count == 1 or now - self._reported < REPORT_INTERVAL:
            return []
        self._reported = now
        # One slow measurement may be chance; two in succession are not.
        if len(self._speeds) < 2 or now - self._measured > MEASURE_INTERVAL:
            self._speeds.append(measure_speed())
            self._measured = time.monotonic()
        speed = max(self._speeds[-2:]) if len(self._speeds) > 1 else None
        pace = {"waited": waited, "at": now, "speed": speed}
        self.group.put(f"pace/{self.group.index}", pace)
        if not self.group.is_first or now - self._compared < COMPARE_INTERVAL:
            return []
        self._compared = now
        return self._compare(self.group.read("pace"))

    def _compare(self, reports: Json) -> list[str]:
        paces = {int(index): _Pace(**report) for index, report in reports.items()}
        if len(paces) < self.group.count:
            return []
        warnings = []
        for text in [*self._waiting(paces), *self._slow(paces)]:
            subject = text.partition(":")[0]
            if subject not in self._warned:
                self._warned.add(subject)
                warnings.append(text)
        return warnings

    def _waiting(self, paces: dict[int, _Pace]) -> list[str]:
        """Return a warning for each process that waits for data more than the others do."""
        previous = self._previous or paces
        self._previous = paces
        shares = {}
        for index, pace in paces.items():
            seconds = pace.at - previous[index].at
            if seconds > 0:
                shares[index] = (pace.waited - previous[index].waited) / seconds
        warnings = []
        for index, share in shares.items():
            others = _median_without(index, shares)
            if share > MAX_EXTRA_WAIT + others:
                warnings.append(
                    f"{self.group.name(index)} reads its data too slowly: it waits for data "
                    f"{share:.0%} of the time, and all others wait for it (they wait {others:.0%} "
                    "of the time for their own data). More data_threads or data_processes may "
                    "help; check its disk."
                )
        return warnings

    def _slow(self, paces: dict[int, _Pace]) -> list[str]:
        """Return a warning for each process whose device is slower than the others."""
        speeds = {
            index: pace.speed for index, pace in paces.items() if pace.speed is not None
        }
        if len(speeds) < self.group.count:
            return []
        warnings = []
        for index, speed in speeds.items():
            others = _median_without(index, speeds)
            if speed < MIN_SPEED * others:
                warnings.append(
                    f"{self.group.name(index)} computes slowly: at {speed / others:.0%} of the "
                    "speed of the others, which wait for it. Check its clock rate, its temperature "
                    "and what else runs on it."
                )
        return warnings


def _median_without(index: int, values: dict[int, float]) -> float:
    """Return the median of all values but one; 0 if there are no others."""
    others = [value for other, value in values.items() if other != index]
    return statistics.median(others or [0.0])


def measure_speed() -> float:
    """Return the FLOP per second of one local device, from a few milliseconds of matmuls.

    Blocks until the device has finished its earlier work.
    """
    device = jax.local_devices()[0]
    size, dtype = (
        (512, jnp.float32) if device.platform == "cpu" else (4096, jnp.bfloat16)
    )
    count = 8

    def multiply(x: jax.Array) -> jax.Array:
        result: jax.Array = jax.lax.fori_loop(
            0, count, lambda _, y: (y @ x) * (1 / size), x
        )
        return result

    compiled = jax.jit(multiply)
    ones = jax.device_put(jnp.ones((size, size), dtype), device)
    compiled(ones).block_until_ready()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        compiled(ones).block_until_ready()
        times.append(time.perf_counter() - started)
    return count * 2 * size**3 / min(times)
