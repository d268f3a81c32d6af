"""Read the text of a compiled XLA program: what it computes, what it moves, and how often.

No API reports the trip count of a loop, the mesh axes of a collective or the bytes of a fusion, so
they are read from the text. All compilers print the same syntax, with differences: TPU programs
write matmuls as convolutions and keep small arrays in on-chip memory, GPU programs call libraries,
and some results are named `%x#1` instead of by their own instruction. Only this module knows about
them. The rest of shardwise sees `Program`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

# Bits of the dtypes whose name does not end in them.
BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "c64": 64,
    "c128": 128,
}
# JAX gives this channel to all collectives inside of `shard_map`.
SHARD_MAP_CHANNEL = "1"
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Instructions that neither compute nor move anything.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "opt-barrier",
    "add-dependency",
    "copy-done",
    "bitcast-convert",
    "reshape",
    "domain",
}
# A `fusion-start` runs in parallel with the instructions after it, until its `fusion-done`.
FUSIONS = ("fusion", "fusion-start")
SLICES = ("dynamic-slice", "slice", "gather")
# Custom calls that only inform the compiler or reserve memory.
FREE_CALL = re.compile(
    r'custom_call_target="(Allocate|AsyncCollective|Assume|Sharding|Pin)'
)
# The kernel of a TPU compiler for `jax.lax.ragged_dot`, and the one that prepares it.
RAGGED_DOT = "ragged-dot-none"
COMPILERS_OWN = (RAGGED_DOT, "ragged-dot-metadata")
# A custom call to one of these runs a Pallas kernel.
KERNEL_TARGETS = ("tpu_custom_call", "triton", "mosaic")
# Where their attributes have the name of the kernel. On a mesh, `op_name` only has the name of the
# function that partitions them.
MOSAIC_NAME = r"\\00(?!stable_)(\w+)_mosaic_gpu\\00"
TRITON_NAME = r'\bname = "([^"]+)"'
# Kernels with this prefix multiply their first two operands. See `kernels.hopper`.
MATMUL_KERNEL = "product_"

# Devices that communicate with each other, by number. () means all devices.
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Array:
    """One array of a result.

    Attributes:
        dtype: XLA's name of the dtype, such as "bf16".
        dims: shape.
        on_chip: whether the array is in on-chip memory instead of the device's main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.dims) * _bits(self.dtype) // 8


@dataclass(frozen=True)
class Op:
    """One instruction.

    Attributes:
        name: its name, which is unique in the program.
        opcode: what it does, such as "dot" or "all-gather-start".
        arrays: arrays of its result, with tuples flattened.
        operands: names of its operands. "x#1" is the second array of x.
        attributes: the text after the operands.
        is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """Where it comes from: "jit(step)/jvp()/dot_general", or the path of an argument."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    def called(self, key: str) -> str | None:
        """Return the computation that an attribute such as `body` names, or None."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None


@dataclass(frozen=True)
class Computation:
    """A list of instructions: the entry of a program, the body of a loop, or a fusion.

    Attributes:
        name: its name.
        ops: its instructions, in the order in which they run.
    """

    name: str
    ops: tuple[Op, ...]

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """The instructions by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def root(self) -> Op:
        """The instruction whose result is that of the computation."""
        return next((op for op in self.ops if op.is_root), self.ops[-1])

    @cached_property
    def users(self) -> dict[str, list[Op]]:
        """For each instruction, those that have it as an operand."""
        users: dict[str, list[Op]] = {}
        for op in self.ops:
            for operand in op.operands:
                users.setdefault(operand.partition("#")[0], []).append(op)
        return users

    @cached_property
    def parameters(self) -> dict[int, Op]:
        """The parameters of the computation, by number."""
        return {int(op.operands[0]): op for op in self.ops if op.opcode == "parameter"}

    def source(self, operand: str) -> Op | None:
        """Return the instruction that an operand names, or None if it is not here."""
        return self.by_name.get(operand.partition("#")[0])

    def arrays(self, operand: str) -> tuple[Array, ...]:
        """Return the arrays of an operand such as "x" or "x#1"."""
        op = self.source(operand)
        if op is None:
            return ()
        index = operand.partition("#")[2]
        if index and int(index) < len(op.arrays):
            return (op.arrays[int(index)],)
        return op.arrays

    def operand_arrays(self, op: Op) -> list[Array]:
        """Return the arrays of all operands of an instruction."""
        return [array for operand in op.operands for array in self.arrays(operand)]


@dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: one of `COLLECTIVES`.
        bytes: bytes of the complete array of one group.
        groups: devices that communicate with each other.
        op_name: where it comes from.
        channel: identifies it among the collectives of a computation.
        across_slices: whether it connects TPU slices through their hosts. Such programs name no
            groups.
    """

    kind: str
    bytes: int
    groups: Groups
    op_name: str
    channel: str
    across_slices: bool = False


@dataclass(frozen=True)
class Work:
    """What one run of an instruction costs.

    Attributes:
        flops: floating point operations.
        bytes: bytes to and from the device's main memory.
        kernel: name of a custom kernel that XLA cannot look into, or "".
        is_known: whether the FLOP of that kernel are known.
        attends: number of keys that each query of a fused attention sees, or 0.
        operands: dtype of the operands of its matmul, such as "bf16", or "".
        is_exact: whether that matmul has the precision of float32.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernel: str = ""
    is_known: bool = True
    attends: int = 0
    operands: str = ""
    is_exact: bool = False


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: its computations by name.
        entry: the computation that runs first.
        kernels: FLOP of one call of each custom kernel.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    kernels: Mapping[str, float] = field(default_factory=dict)

    def work(self, computation: Computation, op: Op) -> Work:
        """Return the work of an instruction that is neither a loop nor a collective."""
        if op.opcode in FREE or op.opcode.endswith("-done"):
            return Work()
        kernel = _kernel(op)
        is_attention = kernel.startswith("attention_") or (
            op.opcode == "custom-call" and "__cudnn$fmha" in op.attributes
        )
        # The keys have shape (batch, keys, heads, head_dim).
        attends = computation.arrays(op.operands[1])[0].dims[1] if is_attention else 0
        matmul = self._matmul(computation, op)
        operands = "" if matmul is None else _operand_dtype(*matmul)
        return Work(
            flops=self._flops(computation, op),
            bytes=self._bytes(computation, op),
            kernel=kernel,
            is_known=not kernel
            or kernel in (*self.kernels, *COMPILERS_OWN)
            or kernel.startswith(MATMUL_KERNEL),
            attends=attends,
            operands=operands,
            is_exact=matmul is not None and _is_exact(matmul[1]),
        )

    def trips(self, op: Op) -> int:
        """Return how often the body of a loop runs.

        If the compiler does not print it, this is the number in the name of a scope around the
        loop, for example `jax.named_scope("trips_4")`, or else the largest integer constant in the
        condition.
        """
        known = re.search(r'known_trip_count[^0-9]*"?n"?[^0-9]*(\d+)', op.attributes)
        if known:
            return int(known[1])
        if expected := re.search(r"/trips_(\d+)/", op.op_name):
            return int(expected[1])
        condition = self.computations[op.called("condition") or ""]
        return max(self._integer_constants(condition), default=1)

    def _integer_constants(self, computation: Computation) -> Iterator[int]:
        for op in computation.ops:
            if op.opcode == "constant" and op.operands and op.arrays:
                is_integer = op.arrays[0].dims == () and op.arrays[0].dtype[0] in "su"
                if is_integer and re.match(r"(\d+)$", op.operands[0]):
                    yield int(op.operands[0])
            for inner in self.inner(op):
                yield from self._integer_constants(inner)

    def inner(self, op: Op) -> Iterator[Computation]:
        """Yield the computations that a fusion or a call consists of."""
        if op.opcode not in (*FUSIONS, "call", "async-start", "custom-call"):
            return
        for key in ("calls", "to_apply"):
            name = op.called(key)
            if name is not None and name in self.computations:
                yield self.computations[name]

    def collective(self, op: Op, computation: Computation) -> Collective | None:
        """Return the collective that an instruction is, starts or contains.

        A TPU program may run one collective in pieces inside several fusions. All of them return
        it.
        """
        found = self._collective(op, computation)
        is_alone = op.opcode.removesuffix("-start") in COLLECTIVES
        if found is not None and is_alone and found.channel == SHARD_MAP_CHANNEL:
            return replace(found, channel=op.name)
        return found

    def _collective(self, op: Op, computation: Computation) -> Collective | None:
        if op.opcode.removesuffix("-start") in COLLECTIVES:
            return self._plain_collective(op, computation)
        if op.opcode in ("send", "recv"):
            transfer = _attribute(op, "_xla_megascale_transfer_type")
            if transfer:
                return Collective(
                    kind=transfer.lower().replace("_", "-"),
                    bytes=op.arrays[0].bytes,
                    groups=(),
                    op_name=op.op_name,
                    channel=_attribute(op, "_xla_host_transfer_rendezvous"),
                    across_slices=True,
                )
        for inner in self.inner(op):
            for other in inner.ops:
                collective = self._collective(other, inner)
                if collective is not None:
                    kind = collective.kind
                    # TPU compilers write a reduce-scatter as a fusion of this name.
                    if kind == "all-reduce" and "all-reduce-scatter" in inner.name:
                        kind = "reduce-scatter"
                    op_name = collective.op_name or op.op_name
                    return replace(collective, kind=kind, op_name=op_name)
        return None

    def _plain_collective(self, op: Op, computation: Computation) -> Collective:
        is_start = op.opcode.endswith("-start")
        operand_bytes = _total_bytes(computation.operand_arrays(op))
        # The result of a `-start` instruction contains its operands.
        result_bytes = _total_bytes(op.arrays) - (operand_bytes if is_start else 0)
        channel = re.search(r"channel_id=(\d+)", op.attributes)
        return Collective(
            kind=op.opcode.removesuffix("-start"),
            bytes=max(operand_bytes, result_bytes),
            groups=_groups(op.attributes),
            op_name=op.op_name,
            channel=channel[1] if channel else op.name,
        )

    def _flops(self, computation: Computation, op: Op) -> float:
        if op.opcode == "dot":
            left = computation.arrays(op.operands[0])[0]
            contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
            return _matmul_flops(op.arrays[0], left, contracted)
        if op.opcode == "convolution":
            return _convolution_flops(op, computation)
        if op.opcode == "custom-call":
            return self._call_flops(computation, op)
        return sum(
            self._flops(inner, other) for inner in self.inner(op) for other in inner.ops
        )

    def _matmul(
        self, computation: Computation, op: Op
    ) -> tuple[Computation, Op] | None:
        """Return the first matmul that an instruction is or contains, and where it is."""
        if op.opcode in ("dot", "convolution") or "__cublas$" in op.attributes:
            return computation, op
        found = (self._matmul(x, other) for x in self.inner(op) for other in x.ops)
        return next((matmul for matmul in found if matmul is not None), None)

    def _call_flops(self, computation: Computation, op: Op) -> float:
        operands = [computation.arrays(operand) for operand in op.operands]
        arrays = [operand[0] for operand in operands if operand]
        if "__cublas$" in op.attributes:
            contracted = _numbers(
                r'"lhs_contracting_dimensions":\[([\d",]*)\]', op.attributes
            )
            return _matmul_flops(op.arrays[0], arrays[0], contracted)
        if "__cudnn$fmha" in op.attributes:
            # Shapes (batch, queries, heads, head_dim) and (batch, keys, heads, head_dim).
            queries, keys = arrays[0].dims, arrays[1].dims
            num_matmuls = 5 if "Backward" in op.attributes else 2
            share = 0.5 if "CAUSAL" in op.attributes else 1.0
            return num_matmuls * 2.0 * math.prod(queries) * keys[1] * share
        kernel = _kernel(op)
        if kernel.startswith(MATMUL_KERNEL):
            # The traced kernel has the shapes of the complete arrays.
            return _matmul_flops(op.arrays[0], arrays[0], [1])
        if kernel == RAGGED_DOT:
            # From (rows, k) to (rows, n), or for a gradient from (rows, k) and (rows, n) to
            # (groups, k, n). Not all rows are in use.
            rows = arrays[-2]
            part = re.search(r"/one_of_(\d+)/", op.op_name)
            used = 1 / int(part[1]) if part else 1.0
            return 2.0 * math.prod(rows.dims) * op.arrays[0].dims[-1] * used
        # A kernel called within `jax.named_scope("causal")` skips half of its blocks.
        share = 0.5 if "causal" in op.op_name else 1.0
        return self.kernels.get(kernel, 0.0) * share

    def _bytes(self, computation: Computation, op: Op) -> float:
        if op.opcode in FUSIONS:
            return self._fusion_bytes(computation, op)
        if op.opcode in (*SLICES, "slice-start", "dynamic-slice-start"):
            return 2.0 * _main_bytes(op.arrays[-1:])
        if (update := _update_in_place(op)) is not None:
            return 2.0 * _main_bytes(computation.arrays(update))
        if op.opcode == "custom-call" and FREE_CALL.search(op.attributes):
            return 0.0
        if op.opcode == "copy-start":
            return float(_main_bytes(op.arrays[:2]))
        if op.opcode in ("async-start", "call"):
            total = 0.0
            for inner in self.inner(op):
                total += sum(self.work(inner, other).bytes for other in inner.ops)
            return total
        return float(
            _main_bytes(computation.operand_arrays(op)) + _main_bytes(op.arrays)
        )

    def _fusion_bytes(self, computation: Computation, op: Op) -> float:
        inner = next(self.inner(op))
        read = 0.0
        for index, operand in enumerate(op.operands):
            size = float(_main_bytes(computation.arrays(operand)))
            parameter = inner.parameters.get(index)
            if parameter is not None:
                size = min(size, self._read_bytes(inner, parameter.name, size))
            read += size
        return read + self._written_bytes(inner, inner.root, op)

    def _read_bytes(self, inner: Computation, name: str, size: float) -> float:
        """Return the bytes that a fusion reads of a parameter of `size` bytes.

        If the fusion only slices the parameter, these are the bytes of the slices. This is how
        scanned layers read their weights from the stack of all layers.
        """
        total = 0.0
        for user in inner.users.get(name, []):
            is_sliced = user.operands[0] == name
            if user.opcode in SLICES and is_sliced:
                total += _total_bytes(user.arrays)
            elif user.opcode in ("bitcast", "reshape", "get-tuple-element"):
                total += self._read_bytes(inner, user.name, size)
            elif user.opcode == "fusion":
                deeper = next(self.inner(user))
                for index, operand in enumerate(user.operands):
                    if operand == name and index in deeper.parameters:
                        total += self._read_bytes(
                            deeper, deeper.parameters[index].name, size
                        )
            # An update in place does not read the array that it updates.
            elif user.opcode != "tuple" and not (
                _update_in_place(user) is not None and is_sliced
            ):
                return size
        return total

    def _written_bytes(self, inner: Computation, root: Op, fusion: Op) -> float:
        """Return the bytes that a fusion writes. An array updated in place counts as its update."""
        if root.opcode == "tuple" and len(root.operands) == len(fusion.arrays):
            total = 0.0
            for operand, array in zip(root.operands, fusion.arrays, strict=True):
                total += self._result_bytes(inner, inner.source(operand), array)
            return total
        if len(fusion.arrays) == 1:
            return self._result_bytes(inner, root, fusion.arrays[0])
        return float(_main_bytes(fusion.arrays))

    def _result_bytes(self, inner: Computation, op: Op | None, array: Array) -> float:
        if array.on_chip:
            return 0.0
        while op is not None and op.opcode in ("bitcast", "reshape", "copy"):
            op = inner.source(op.operands[0])
        if op is not None and (update := _update_in_place(op)) is not None:
            return float(_total_bytes(inner.arrays(update)))
        if op is not None and op.opcode == "fusion":
            deeper = next(self.inner(op))
            return self._result_bytes(deeper, deeper.root, array)
        return float(array.bytes)


def parse(text: str, kernels: Mapping[str, float] | None = None) -> Program:
    """Return the program that a compiler printed after all optimizations.

    Args:
        text: the HLO text.
        kernels: FLOP of one call of each custom kernel, from `shardwise.flops.count_kernels`.
    """
    computations: dict[str, Computation] = {}
    entry = name = ""
    ops: list[Op] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            assert header is not None
            name = header[1]
            if line.startswith("ENTRY"):
                entry = name
            ops = []
        elif line == "}" and name:
            computations[name] = Computation(name, tuple(ops))
            name = ""
        elif name and (op := _parse_op(line)) is not None:
            ops.append(op)
        elif name and ops:
            # Attributes may continue on further lines.
            ops[-1] = replace(ops[-1], attributes=f"{ops[-1].attributes}\n{line}")
    return Program(computations, computations[entry], kernels or {})


def cycles(op: Op) -> float:
    """Return the compiler's own estimate of the cycles of an instruction, or 0. TPU only."""
    match = re.search(r'"estimated_cycles":"(\d+)"', op.attributes)
    return float(match[1]) if match else 0.0


def _parse_op(line: str) -> Op | None:
    """Parse "ROOT %name = f32[2,3]{1,0} opcode(%a, %b), attributes"."""
    match = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    open_at = rest.index("(")
    close_at = _closing(rest, open_at)
    opcode = rest[:open_at]
    inside = rest[open_at + 1 : close_at]
    operands: tuple[str, ...]
    if opcode in ("parameter", "constant"):
        operands = (inside[:40],)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", inside))
    arrays = tuple(_arrays(shape))
    if opcode == "fusion-start":
        # Its shape lists the operands, then the results, then a context.
        arrays = arrays[len(operands) : -1]
    return Op(
        name=match[2],
        opcode=opcode,
        arrays=arrays,
        operands=operands,
        attributes=rest[close_at + 1 :],
        is_root=bool(match[1]),
    )


def _update_in_place(op: Op) -> str | None:
    """Return the operand that replaces a part of the first operand; None if the op does not update.

    The compiler copies the first operand before, if its old value is needed later.
    """
    match op.opcode:
        case "dynamic-update-slice":
            return op.operands[1]
        case "scatter":
            return op.operands[-1]
    return None


def _operand_dtype(computation: Computation, matmul: Op) -> str:
    """Return the dtype of the left operand of a matmul, "" if that is not known."""
    arrays = computation.arrays(matmul.operands[0])
    return arrays[0].dtype if arrays else ""


def _is_exact(matmul: Op) -> bool:
    """Return whether a matmul was traced with `jax.lax.Precision.HIGHEST`."""
    # The second form is that of cuBLAS.
    precisions = "operand_precision={highest", '"operand_precision":["HIGHEST"'
    return any(text in matmul.attributes for text in precisions)


def _closing(text: str, at: int) -> int:
    """Return the index of the parenthesis that closes the one at `at`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, at):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _arrays(shape: str) -> Iterator[Array]:
    """Yield the arrays of a shape such as "(f32[2,3]{1,0}, bf16[8]{0:S(1)})"."""
    for match in re.finditer(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape):
        dims = tuple(int(dim.lstrip("<=")) for dim in match[2].split(",") if dim)
        space = re.search(r"S\((\d+)\)", match[3] or "")
        # Memory space 5 is the host's. All other numbered spaces are on the chip.
        yield Array(match[1], dims, space is not None and space[1] != "5")


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 32


def _total_bytes(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays)


def _main_bytes(arrays: Iterable[Array]) -> int:
    """Return the bytes of the arrays that are in the device's main memory."""
    return sum(array.bytes for array in arrays if not array.on_chip)


def _attribute(op: Op, name: str) -> str:
    match = re.search(rf'{name}="([^"]*)"', op.attributes)
    return match[1] if match else ""


def _numbers(pattern: str, text: str) -> list[int]:
    """Return the numbers in the first group of a pattern, or none if it does not occur."""
    match = re.search(pattern, text)
    return _integers(match[1]) if match else []


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _kernel(op: Op) -> str:
    """Return the name that `pallas_call` gave to a custom kernel, or "" for other instructions."""
    if (
        op.opcode != "custom-call"
        or "__cublas$" in op.attributes
        or "__cudnn$" in op.attributes
    ):
        return ""
    target = _attribute(op, "custom_call_target")
    if not any(name in target for name in KERNEL_TARGETS):
        return ""
    pattern = MOSAIC_NAME if "mosaic_gpu" in target else TRITON_NAME
    match = re.search(pattern, op.attributes)
    if match:
        return match[1]
    parts = [
        part
        for part in op.op_name.split("/")
        if part not in ("pallas_call", "mpmd_map")
    ]
    return parts[-1] if parts else op.name


def _matmul_flops(result: Array, left: Array, contracted: Iterable[int]) -> float:
    """Return the FLOP of a matmul: 2 for each multiply and add."""
    return (
        2.0 * math.prod(result.dims) * math.prod(left.dims[dim] for dim in contracted)
    )


def _convolution_flops(op: Op, computation: Computation) -> float:
    """Return the FLOP of a convolution: 2 for each multiply and add.

    Multiplications with padding and with the gaps of a dilation do not count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    left = computation.arrays(op.operands[0])[0].dims
    right = computation.arrays(op.operands[1])[0].dims
    out = op.arrays[0].dims
    spatial = sorted(label for label in out_labels if label.isdigit())
    window = _window(op)
    num_valid = 1.0
    for i, label in enumerate(spatial):
        in_length = left[left_labels.index(label)]
        out_length = out[out_labels.index(label)]
        num_valid *= _valid_positions(window, i, in_length, out_length)
    in_features = right[right_labels.index("i")]
    out_features = out[out_labels.index("f")]
    return 2.0 * out[out_labels.index("b")] * out_features * in_features * num_valid


def _window(op: Op) -> dict[str, list[str]]:
    """Return the attributes of a convolution's window for each spatial dim.

    "window={size=3x3 pad=1_1x1_1}" gives {"size": ["3", "3"], "pad": ["1_1", "1_1"]}.
    """
    match = re.search(r"window=\{([^}]*)\}", op.attributes)
    entries = re.findall(r"(\w+)=([\dx_\-]+)", match[1] if match else "")
    return {key: value.split("x") for key, value in entries}


def _valid_positions(
    window: Mapping[str, Sequence[str]], dim: int, in_length: int, out_length: int
) -> int:
    """Return how many (output, kernel) positions along a dim read a real input entry."""

    def setting(key: str) -> int:
        return int(window[key][dim]) if key in window else 1

    size, stride = setting("size"), setting("stride")
    lhs_dilate, rhs_dilate = setting("lhs_dilate"), setting("rhs_dilate")
    pad = int(window["pad"][dim].split("_")[0]) if "pad" in window else 0
    count = 0
    for output in range(out_length):
        for offset in range(size):
            position = output * stride - pad + offset * rhs_dilate
            count += (
                position % lhs_dilate == 0 and 0 <= position // lhs_dilate < in_length
            )
    return count


def _groups(attributes: str) -> Groups:
    """Return the groups of devices that communicate, from any of XLA's notations for them."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return tuple(
            (int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])
        )
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return tuple(
            tuple(_integers(g)) for g in re.findall(r"\{([\d,]*)\}", listed[1])
        )
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota:
        shape, dims, order = (_integers(part) for part in iota.groups())
        return _split(_transposed(dims, order), shape[-1])
    named = re.search(
        r"replica_groups=@?\w*mesh\[([^\]]*)\](?:, *device_ids=\((.*?)\)(?= *\{))? *\{([^}]*)\}",
        attributes,
    )
    if named:
        sizes = {
            name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])
        }
        groups = _mesh_groups(
            sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[3])
        )
        devices = _device_ids(named[2] or "")
        if not devices:
            return groups
        return tuple(tuple(devices[number] for number in group) for group in groups)
    return ()


def _device_ids(text: str) -> list[int]:
    """Return the devices of a mesh from "[4,2]T(1,0)" or a list, or [] if they are in order."""
    match = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match:
        dims, order = (_integers(part) for part in match.groups())
        return _transposed(dims, order)
    return _integers(text)


def _mesh_groups(
    sizes: Mapping[str, int], chosen: Sequence[tuple[str, str, str]]
) -> Groups:
    """Return the groups along axes of a mesh.

    Args:
        sizes: size of each axis of the mesh.
        chosen: the axes that a group spans. ("x", "2", "4") is written "x:(2)4": the part of axis x
            that has size 4 after a major part of size 2.
    """
    dims: list[int] = []
    is_chosen: list[bool] = []
    for name, size in sizes.items():
        entries = [entry for entry in chosen if entry[0] == name]
        parts = [(int(major), int(length)) for _, major, length in entries if major]
        if parts:
            major, length = parts[0]
            dims += [major, length, size // major // length]
            is_chosen += [False, True, False]
        else:
            dims.append(size)
            is_chosen.append(bool(entries))
    # Groups are consecutive once the chosen dims are innermost.
    order = sorted(range(len(dims)), key=lambda dim: is_chosen[dim])
    group_size = math.prod(dims[dim] for dim in order if is_chosen[dim])
    return _split(_transposed(dims, order), group_size)


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return 0, 1, 2 ... as an array of shape `dims`, transposed by `order` if given, flattened."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    numbers = [0]
    for dim in order or range(len(dims)):
        numbers = [n + k * strides[dim] for n in numbers for k in range(dims[dim])]
    return numbers


def _split(numbers: Sequence[int], size: int) -> Groups:
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))
