"""Train any Flax NNX model on any device mesh.

The public names are listed in `__init__.pyi`. Each is imported on first use, so that the
command line can answer without waiting for JAX.
"""

import sys

# `python -m shardwise.cli` has the current directory first on the import path. A file there that
# is called json.py must not be executed.
if (
    sys.argv[:1] == ["-m"]
    and "shardwise.cli" in sys.orig_argv
    and not sys.flags.safe_path
):
    del sys.path[0]

import lazy_loader

_get, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    # The version is written in one place, pyproject.toml.
    if name == "__version__":
        from importlib.metadata import version

        return version("shardwise")
    return _get(name)
