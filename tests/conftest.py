"""Eight virtual CPU devices for every test. Too few is a failure, never a skip."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

from shardwise import use_cpu_devices

use_cpu_devices(8)
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True)  # compiling takes its time
hypothesis.settings.load_profile("shardwise")


def pytest_sessionstart(session):
    assert jax.device_count() == 8, f"the tests need 8 CPU devices and found {jax.device_count()}"
