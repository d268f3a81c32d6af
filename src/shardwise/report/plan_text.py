"""Parts of a plan as short texts, the same on all pages."""

from collections.abc import Mapping, Sequence


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as "[64, 256]"."""
    return f"[{', '.join(map(str, shape))}]"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return a mesh as "data=2,fsdp=4"."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def options_text(options: Mapping[str, object]) -> str:
    """Return options as "accumulate 1, remat dots"."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def bound_text(bound: str) -> str:
    """Return what bounds a step, from `Times.bound`."""
    return "memory bandwidth" if bound == "memory" else bound
