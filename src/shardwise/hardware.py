"""What accelerators can do, by JAX's name for them. Peak rates are the vendors', dense, bfloat16.

What part of the peak real programs reach was measured on an H200 (`benchmarks/plan.py`) and is assumed of the other GPUs.
For TPUs the compiler estimates the cycles of each instruction itself; the shares stand in where it does not.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    name: str
    flops: float  # per second, bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes per second to its own memory
    link: float = 0.0  # bytes per second one way: of one TPU link to a neighbour, of one GPU to the switch within a machine
    network: float = (
        0.0  # bytes per second one way, of one chip to other machines (GPU) or other slices (TPU)
    )
    group: int = 0  # GPUs in a machine, all connected to each other; 0: a torus of TPU links
    wrap: int = 0  # a TPU torus closes along a dimension whose length is a multiple of this
    clock: float = 0.0  # cycles per second, where the compiler counts in cycles
    reserved: float = 0.0  # bytes of memory that no program gets
    products: float = 0.76  # of `flops`, that large matrix products reach
    attention: float = 0.55  # of `flops`, that fused attention reaches for very long rows
    copies: float = 0.65  # of `bandwidth`, that element-wise work reaches
    launch: float = 0.0  # seconds from one kernel to the next
    exact: float = 1 / 16  # rate of float32 products beside bfloat16 ones


GIB = 2**30
CHIPS = {
    # A core of TPU v3 is a device of its own for JAX; so is each half of a TPU7x.
    "TPU v3": Chip(
        "TPU v3",
        61.5e12,
        16 * GIB,
        450e9,
        70e9,
        1.5e9,
        wrap=16,
        clock=0.94e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "TPU v4": Chip(
        "TPU v4",
        275e12,
        32 * GIB,
        1228e9,
        45e9,
        3.1e9,
        wrap=4,
        clock=1.05e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "TPU v5 lite": Chip(
        "TPU v5e",
        197e12,
        16 * GIB,
        819e9,
        45e9,
        3.1e9,
        wrap=16,
        clock=1.5e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "TPU v5": Chip(
        "TPU v5p",
        459e12,
        96 * GIB,
        2765e9,
        90e9,
        6.2e9,
        wrap=4,
        clock=1.75e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "TPU v6 lite": Chip(
        "TPU v6e",
        918e12,
        32 * GIB,
        1640e9,
        90e9,
        12.5e9,
        wrap=16,
        clock=1.75e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "TPU7x": Chip(
        "TPU7x",
        1153e12,
        96 * GIB,
        3690e9,
        90e9,
        12.5e9,
        wrap=4,
        clock=2.2e9,
        reserved=GIB / 4,
        attention=0.5,
        exact=1 / 6,
    ),
    "NVIDIA A100-SXM4-40GB": Chip(
        "A100 40 GB", 312e12, 40 * GIB, 1555e9, 300e9, 25e9, group=8, launch=1e-6
    ),
    "NVIDIA A100-SXM4-80GB": Chip(
        "A100 80 GB", 312e12, 80 * GIB, 2039e9, 300e9, 25e9, group=8, launch=1e-6
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        "H100", 989e12, 80 * GIB, 3350e9, 450e9, 50e9, group=8, launch=1e-6
    ),
    "NVIDIA H200": Chip("H200", 989e12, 141e9, 4800e9, 450e9, 50e9, group=8, launch=1e-6),
    "NVIDIA B200": Chip("B200", 2250e12, 180 * GIB, 8000e9, 900e9, 50e9, group=8, launch=1e-6),
}
TPU_NAMES = {
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of this name, or None for one that the table does not know (every CPU among them)."""
    return CHIPS.get(device_kind)
