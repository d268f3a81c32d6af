"""Paths that users pass: a text or a path object, on a file system that this machine mounts."""

import os
import re
from pathlib import Path
from typing import TypeAlias

from shardwise.errors import ConfigError

AnyPath: TypeAlias = str | os.PathLike[str]

# `Path` turns gs://bucket into gs:/bucket. A local directory of such a name is ./gs:/bucket.
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")
# The commands that copy directories from and to object storage.
COPY = {
    "gs": "gcloud storage rsync --recursive",
    "s3": "aws s3 sync",
}


def run_path(path: AnyPath) -> Path:
    """Return the path of a run directory that a user passed.

    Args:
        path: a text or a path object. It need not exist.

    Raises:
        ConfigError: if it is empty, a URL, or not UTF-8. Libraries that write to a run directory
            need a path that is text.
    """
    try:
        os.path.abspath(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise ConfigError(
            f"the path {shown} is not valid UTF-8. Choose another directory with --out."
        ) from None
    return local_path(path)


def local_path(path: AnyPath) -> Path:
    """Return a path that a user passed.

    Args:
        path: a text or a path object. It need not exist.

    Raises:
        ConfigError: if it is empty, or a URL such as `gs://bucket/run`.
    """
    if not os.fspath(path):
        raise ConfigError("a path is empty. Use . for the current directory.")
    url = URL.fullmatch(os.fspath(path))
    if url is None:
        return Path(path)
    scheme, rest = url[1], url[2]
    if scheme == "file":
        raise ConfigError(f"file:///{rest} is a URL. Pass it as a plain path: /{rest}")
    raise ConfigError(
        f"{scheme}://{rest} is not on a file system of this machine. Runs, checkpoints and data "
        "need a file system with locks, atomic renames and flushes. Use a local directory, or a "
        "mounted shared file system such as NFS or Lustre, and copy from and to it with "
        f"`{COPY.get(scheme, 'rclone sync')} SOURCE DESTINATION`."
    )
