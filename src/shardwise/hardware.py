"""What accelerators can do, by JAX's name for them. Peak rates are the vendors', dense, bfloat16."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    name: str
    flops: float  # per second, bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes per second to its own memory


CHIPS = {
    "TPU v3": Chip("TPU v3", 61.5e12, 16 * 2**30, 450e9),  # JAX counts each of the chip's two cores as a device
    "TPU v4": Chip("TPU v4", 275e12, 32 * 2**30, 1228e9),
    "TPU v5 lite": Chip("TPU v5e", 197e12, 16 * 2**30, 819e9),
    "TPU v5": Chip("TPU v5p", 459e12, 95 * 2**30, 2765e9),
    "TPU v6 lite": Chip("TPU v6e", 918e12, 32 * 2**30, 1640e9),
    "NVIDIA A100-SXM4-40GB": Chip("A100 40 GB", 312e12, 40 * 2**30, 1555e9),
    "NVIDIA A100-SXM4-80GB": Chip("A100 80 GB", 312e12, 80 * 2**30, 2039e9),
    "NVIDIA H100 80GB HBM3": Chip("H100", 989e12, 80 * 2**30, 3350e9),
    "NVIDIA H200": Chip("H200", 989e12, 141e9, 4800e9),
    "NVIDIA B200": Chip("B200", 2250e12, 180 * 2**30, 8000e9),
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of this name, or None for one that the table does not know (every CPU among them)."""
    return CHIPS.get(device_kind)
