"""Which process keeps the others waiting: a step of all takes as long as the slowest of them."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.cluster.group import ProcessGroup

TELL = 10.0  # seconds between two words of each process
JUDGE = 30.0  # and between two judgements
PROBE = 600.0  # and between two measurements of speed
WAITING = 0.1  # of the time, for data, beside the others
SLOW = 0.7  # of the speed of the others


class Stragglers:
    """Every process tells how long it has waited for data and how fast its device multiplies; the first one compares them."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        now = time.monotonic()
        self._told = self._judged = self._probed = now
        self._speeds: list[float] = [measure_speed()] if group.count > 1 else []
        self._before: dict[str, Any] = {}
        self._said: set[str] = set()

    def look(self, waited: float) -> list[str]:
        """What is to be said of slow processes, each once; `waited` for data in all. Mostly it looks at the clock and no more."""
        now = time.monotonic()
        if self.group.count == 1 or now - self._told < TELL:
            return []
        self._told = now
        if now - self._probed > PROBE:
            self._speeds.append(measure_speed())
            self._probed = time.monotonic()
        speed = max(self._speeds[-2:])  # slow twice in a row, or it was chance
        self.group.put(f"pace/{self.group.index}", {"waited": waited, "at": now, "speed": speed})
        if not self.group.is_first or now - self._judged < JUDGE:
            return []
        self._judged = now
        found = self.group.read("pace")
        if len(found) < self.group.count:
            return []
        said = [
            text
            for text in (*self._waiting(found), *self._slow(found))
            if text.partition(":")[0] not in self._said
        ]
        self._said |= {text.partition(":")[0] for text in said}
        return said

    def _waiting(self, found: dict[str, Any]) -> list[str]:
        before, self._before = self._before or found, found
        passed = {
            i: (now["waited"] - before[i]["waited"], now["at"] - before[i]["at"])
            for i, now in found.items()
        }
        shares = {i: waited / seconds for i, (waited, seconds) in passed.items() if seconds > 0}
        return [
            f"{self.group.name(int(i))} reads its data too slowly: it waits for {share:.0%} of the time, and all others wait for it "
            f"({others:.0%} for data of their own). More data_threads or data_processes may help, or a look at its disk."
            for i, share in shares.items()
            if share
            > WAITING
            + (others := statistics.median([s for j, s in shares.items() if j != i] or [0.0]))
        ]

    def _slow(self, found: dict[str, Any]) -> list[str]:
        return [
            f"{self.group.name(int(i))} computes slowly: at {told['speed'] / others:.0%} of the speed of the others, who wait for it. "
            f"Look at its clock, its temperature and what else runs there."
            for i, told in found.items()
            if told["speed"]
            < SLOW * (others := statistics.median([o["speed"] for j, o in found.items() if j != i]))
        ]


def measure_speed() -> float:
    """FLOP a second of a device of this process, by some matrix products of a few milliseconds, after what it is at."""
    device = jax.local_devices()[0]
    size, dtype = (512, jnp.float32) if device.platform == "cpu" else (4096, jnp.bfloat16)
    ones = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: (y @ x) * (1 / size), x))
    product(ones).block_until_ready()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        product(ones).block_until_ready()
        times.append(time.perf_counter() - begun)
    return 8 * 2 * size**3 / min(times)
