"""Programs for devices that are not attached are compiled anew."""

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache


@pytest.fixture(autouse=True)
def _without_compilation_cache():
    """Keep these programs out of the cache: JAX writes them, but fails to read them."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # Without this, JAX keeps the setting of the first compilation of the process.
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    reset_cache()
