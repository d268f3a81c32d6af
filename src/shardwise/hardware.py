"""Peak rates, memory and links of accelerators, for `shardwise plan` and MFU.

Where the numbers come from:

* `flops`, `memory` and `bandwidth` of TPUs: Google's Cloud TPU pages ("System architecture"). JAX
  treats each core of a TPU v3, and each half of a TPU7x chip, as one device, which has half the
  numbers of the chip.
* `link` and `wrap` of TPUs: "How to Scale Your Model" (jax-ml.github.io/scaling-book), one way per
  link. The book also has `network` for v5e, v5p, v6e and TPU7x.
* All numbers of GPUs up to `link`: NVIDIA's data sheets of the SXM modules; dense, without
  sparsity; NVLink one way, which is half of the bidirectional number. `network` is one card of 200
  Gbit/s (A100) or 400 Gbit/s (newer) per GPU, as in NVIDIA's own machines. `memory` of the H200 is
  what CUDA reported, 1 % less than on the data sheet.
* `products`, `attention` and `copies`: measured on an H200 with `benchmarks/plan.py`, and assumed
  for the other GPUs. For TPUs they matter only where the compiler does not report cycles.
* `wide` and `exact` of GPUs: the rates of TF32 and FP32 on the data sheets.
* `architecture` of GPUs: NVIDIA's white papers, and the descriptions in XLA's compiler for GPUs.
* No source is recorded for `clock`, `reserved` and `launch`, the `link` of TPU v3 (the book has
  100e9), and the `network` of TPU v3 and v4. Measure before you rely on them.
"""

from dataclasses import dataclass, replace

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Architecture:
    """What XLA needs to know about a GPU in order to compile for it.

    Attributes:
        capability: the compute capability.
        multiprocessors: the number of streaming multiprocessors.
        lanes: float32 operations of one multiprocessor per cycle.
        shared_memory: bytes of shared memory of one multiprocessor.
        cache: bytes of level-2 cache.
        clock: cycles per second.
    """

    capability: str
    multiprocessors: int
    lanes: int
    shared_memory: int
    cache: int
    clock: float


@dataclass(frozen=True)
class Chip:
    """One device as JAX counts devices.

    Attributes:
        name: the name that people use.
        flops: peak floating-point operations per second, dense bfloat16.
        memory: bytes of device memory.
        bandwidth: bytes per second between the device and its memory.
        link: bytes per second one way. For a TPU, of one link to a neighbor; for a GPU, of all its
            links to the switch within a machine.
        network: bytes per second one way of one device to other machines (GPU) or slices (TPU).
        group: the number of GPUs in a machine, all connected to each other; 0 for a torus of TPUs.
        wrap: a dimension of a TPU torus has wrap-around links if its size is a multiple of this.
        clock: cycles per second, for compilers that report cycles; otherwise 0.
        reserved: bytes of device memory that programs cannot use.
        products: the share of `flops` that large matmuls reach.
        attention: the share of `flops` that fused attention reaches for long sequences.
        copies: the share of `bandwidth` that element-wise operations reach.
        launch: seconds between the start of one kernel and the next.
        wide: the rate of float32 matmuls relative to bfloat16 ones.
        exact: the same with `jax.lax.Precision.HIGHEST`.
        narrow: the rate of matmuls of 8 bits relative to bfloat16 ones.
        architecture: for a GPU, what its compiler needs to know.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float = 0.0
    network: float = 0.0
    group: int = 0
    wrap: int = 0
    clock: float = 0.0
    reserved: float = 0.0
    products: float = 0.76
    attention: float = 0.55
    copies: float = 0.65
    launch: float = 0.0
    wide: float = 1.0
    exact: float = 1 / 16
    narrow: float = 1.0
    architecture: Architecture | None = None


# What all TPUs, and all GPUs in machines of 8, have in common. A TPU rounds the operands of float32
# matmuls to bfloat16, and needs 6 passes where it must not. A GPU rounds them to TF32.
_TPU = Chip(
    name="",
    flops=0,
    memory=0,
    bandwidth=0,
    reserved=GIB / 4,
    attention=0.5,
    exact=1 / 6,
)
_GPU = Chip(name="", flops=0, memory=0, bandwidth=0, group=8, launch=1e-6, wide=1 / 2)
# Six matmuls of GPT-2 took 1.46 to 1.88 times as long with 16 bits on an H200 at its power limit.
_NARROW = 1.7
_AMPERE = Architecture("8.0", 108, 64, 164 * 1024, 40 * MIB, 1.41e9)
_HOPPER = Architecture("9.0", 132, 128, 228 * 1024, 50 * MIB, 1.98e9)
_BLACKWELL = Architecture("10.0", 148, 128, 228 * 1024, 126 * MIB, 1.965e9)

# Keys are the names of JAX (`device.device_kind`).
CHIPS = {
    "TPU v3": replace(
        _TPU,
        name="TPU v3",
        flops=61.5e12,
        memory=16 * GIB,
        bandwidth=450e9,
        link=70e9,
        network=1.5e9,
        wrap=16,
        clock=0.94e9,
    ),
    "TPU v4": replace(
        _TPU,
        name="TPU v4",
        flops=275e12,
        memory=32 * GIB,
        bandwidth=1228e9,
        link=45e9,
        network=3.1e9,
        wrap=4,
        clock=1.05e9,
    ),
    "TPU v5 lite": replace(
        _TPU,
        name="TPU v5e",
        flops=197e12,
        memory=16 * GIB,
        bandwidth=819e9,
        link=45e9,
        network=3.1e9,
        wrap=16,
        clock=1.5e9,
    ),
    "TPU v5": replace(
        _TPU,
        name="TPU v5p",
        flops=459e12,
        memory=96 * GIB,
        bandwidth=2765e9,
        link=90e9,
        network=6.2e9,
        wrap=4,
        clock=1.75e9,
    ),
    "TPU v6 lite": replace(
        _TPU,
        name="TPU v6e",
        flops=918e12,
        memory=32 * GIB,
        bandwidth=1640e9,
        link=90e9,
        network=12.5e9,
        wrap=16,
        clock=1.75e9,
    ),
    "TPU7x": replace(
        _TPU,
        name="TPU7x",
        flops=1153e12,
        memory=96 * GIB,
        bandwidth=3690e9,
        link=90e9,
        network=12.5e9,
        wrap=4,
        clock=2.2e9,
    ),
    "NVIDIA A100-SXM4-40GB": replace(
        _GPU,
        name="A100 40 GB",
        flops=312e12,
        memory=40 * GIB,
        bandwidth=1555e9,
        link=300e9,
        network=25e9,
        architecture=_AMPERE,
    ),
    "NVIDIA A100-SXM4-80GB": replace(
        _GPU,
        name="A100 80 GB",
        flops=312e12,
        memory=80 * GIB,
        bandwidth=2039e9,
        link=300e9,
        network=25e9,
        architecture=_AMPERE,
    ),
    "NVIDIA H100 80GB HBM3": replace(
        _GPU,
        name="H100",
        flops=989e12,
        memory=80 * GIB,
        bandwidth=3350e9,
        link=450e9,
        network=50e9,
        narrow=_NARROW,
        architecture=_HOPPER,
    ),
    "NVIDIA H200": replace(
        _GPU,
        name="H200",
        flops=989e12,
        memory=139 * GIB,
        bandwidth=4800e9,
        link=450e9,
        network=50e9,
        narrow=_NARROW,
        architecture=_HOPPER,
    ),
    "NVIDIA B200": replace(
        _GPU,
        name="B200",
        flops=2250e12,
        memory=180 * GIB,
        bandwidth=8000e9,
        link=900e9,
        network=50e9,
        narrow=_NARROW,
        architecture=_BLACKWELL,
    ),
}
# The names of GPUs in targets such as `h200:8`, and JAX's names for them.
GPU_NAMES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
# The names of TPUs in targets such as `v5e:4x4`, and JAX's names for them.
TPU_NAMES = {
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip with JAX's name `device_kind`, or None if it is not in the table.

    CPUs are not in the table: their rates depend on the machine.
    """
    return CHIPS.get(device_kind)
