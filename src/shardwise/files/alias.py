"""Paths that every library reads as plain text.

Orbax lists directories with `glob`, on the complete path: a directory `lr[1e-3]` matches nothing,
so Orbax skips a part of a save without an error. It takes `/gs/runs` for a bucket, and TensorStore
needs UTF-8. A link with a plain name avoids all of this.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.files.regular import error_reason

# Characters without a meaning in patterns, URLs or shells. The first part of the path must not be
# the name of a kind of storage, see `etils.epath`.
PLAIN = re.compile(r"(?!/(?:gs|s3|az|hf)(?:/|$))[A-Za-z0-9_./,=+@ -]*")


@contextmanager
def plain_alias(directory: Path) -> Iterator[Path]:
    """Yield a path of a directory without special characters, for a library that needs one.

    Args:
        directory: the absolute path of an existing directory.

    Yields:
        The same path if it is plain, otherwise a link to it in a temporary directory.

    Raises:
        CheckpointError: if the link cannot be created.
    """
    if PLAIN.fullmatch(os.fspath(directory)):
        yield directory
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        link = Path(folder.name).resolve() / "directory"
        link.symlink_to(directory, target_is_directory=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} has special characters in its path, and needs a link to it in "
            f"{tempfile.gettempdir()}, which cannot be created: {error_reason(error)}. Choose a "
            "directory without special characters, or set TMPDIR."
        ) from error
    with folder:
        if not PLAIN.fullmatch(os.fspath(link)):
            raise CheckpointError(
                f"{directory} and the temporary directory {link.parent} both have special "
                "characters in their paths. Set TMPDIR to a path of letters and digits."
            )
        yield link
