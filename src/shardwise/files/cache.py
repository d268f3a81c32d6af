"""The cache directory of the current user."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return the folder for cached files of one kind. It may not exist yet.

    Args:
        name: the kind of files, such as `"compilation"`.

    Returns:
        `$XDG_CACHE_HOME/shardwise/<name>`, or the same below `~/.cache`. None for a user without a
        home directory.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return root / "shardwise" / name
