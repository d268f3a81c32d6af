"""Compiled programs are kept in the user's own cache folder, so that the next start of a run need not compile them again."""

import os
import stat
from pathlib import Path

import jax

from shardwise.files import cache_folder

LIMIT = 8 * 2**30  # bytes that the folder may hold; the longest unused go first


def use_program_cache() -> str | None:
    """Lets JAX keep its programs. Returns why not, where it cannot.

    What is in there is run by whoever finds it: so nobody else may be able to write to it. A folder that was given to JAX
    otherwise (JAX_COMPILATION_CACHE_DIR) is left alone.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return None
    folder = cache_folder("programs")
    if folder is None:
        return "there is no home directory to keep compiled programs in"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            return f"{folder} may be written by others, so no compiled programs are taken from there; chmod 700 it, or remove it"
        _prune(folder)
    except OSError as error:
        return f"compiled programs are not kept: {error}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a start compiles several small ones, 20 ms each
    return None


def _prune(folder: Path) -> None:
    """Removes what was not used for longest, down to `LIMIT`."""
    files = sorted(((path.stat().st_atime, path.stat().st_size, path) for path in folder.iterdir() if path.is_file()), reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > LIMIT:
            path.unlink(missing_ok=True)
