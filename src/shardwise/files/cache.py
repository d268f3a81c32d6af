"""The cache directory of the current user."""

import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Create a folder that only this user can write to, and its missing parents.

    `Path.mkdir` creates parents with the permissions that the umask leaves, which may let anybody
    replace what is in them.

    Raises:
        OSError: if a folder cannot be created.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        # Another process may create it meanwhile.
        path.mkdir(mode=0o700, exist_ok=True)


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
