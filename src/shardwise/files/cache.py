"""The user's cache directory."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Where this user keeps what can be made again; None for a user without a home. It need not exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise" / name
    except RuntimeError:
        return None
