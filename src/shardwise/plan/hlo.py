"""Reads the text of a compiled XLA program: what it computes, what it moves, and how often.

Compilers print programs in one syntax, with differences: TPU programs write matrix products as convolutions and keep small
arrays in on-chip memory, GPU programs call libraries, some results are named `%x#1` instead of by an instruction of their own.
All of it is read here; the rest of shardwise sees `Program`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

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
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "opt-barrier", "add-dependency", "copy-done", "bitcast-convert", "reshape", "domain",
}  # fmt: skip
FUSIONS = (
    "fusion",
    "fusion-start",
)  # the second goes on beside what follows, up to its fusion-done


@dataclass(frozen=True)
class Array:
    """One array of a result. `on_chip`: it lives in memory beside the arithmetic units, not in the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * _bits(self.dtype) // 8


@dataclass(frozen=True)
class Op:
    """One instruction."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result, tuples flattened
    operands: tuple[str, ...]  # names; "x#1" is the second array of x
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """Where it comes from: "jit(step)/jvp()/dot_general", or the path of an argument."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


@dataclass(frozen=True)
class Computation:
    name: str
    ops: tuple[Op, ...]  # in the order in which they run

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def root(self) -> Op:
        return next((op for op in self.ops if op.is_root), self.ops[-1])

    @cached_property
    def users(self) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for operand in op.operands:
                found.setdefault(operand.partition("#")[0], []).append(op)
        return found

    @cached_property
    def parameters(self) -> dict[int, Op]:
        return {int(op.operands[0]): op for op in self.ops if op.opcode == "parameter"}

    def arrays(self, operand: str) -> tuple[Array, ...]:
        name, _, index = operand.partition("#")
        if name not in self.by_name:
            return ()
        found = self.by_name[name].arrays
        return (found[int(index)],) if index and int(index) < len(found) else found


@dataclass(frozen=True)
class Collective:
    """One exchange between devices: `groups` of devices that exchange with each other, by number; `bytes`: the whole array of one group."""

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    op_name: str
    channel: str
    across_slices: bool = (
        False  # between TPU slices, by way of their hosts; such programs name no groups
    )


@dataclass(frozen=True)
class Work:
    """What one run of an instruction takes."""

    flops: float = 0.0
    bytes: float = 0.0  # to and from the device's main memory
    kernel: str = ""  # of a call whose inside XLA cannot see
    is_known: bool = True  # whether the arithmetic of the kernel is
    attends: int = 0  # tokens that each token of a fused attention may see


@dataclass(frozen=True)
class Program:
    computations: Mapping[str, Computation]
    entry: Computation
    kernels: Mapping[str, float] = field(
        default_factory=dict
    )  # arithmetic of one call of each kernel that was written by hand

    def work(self, computation: Computation, op: Op) -> Work:
        """Of one run of an instruction that is neither a loop nor an exchange."""
        if op.opcode in FREE or op.opcode.endswith("-done"):
            return Work()
        is_attention = op.opcode == "custom-call" and "__cudnn$fmha" in op.attributes
        attends = computation.arrays(op.operands[1])[0].dims[1] if is_attention else 0
        kernel = _kernel(op)
        is_known = not kernel or kernel in self.kernels
        return Work(
            self._flops(computation, op), self._bytes(computation, op), kernel, is_known, attends
        )

    def trips(self, op: Op) -> int:
        """How often the body of a loop runs."""
        known = re.search(r'known_trip_count[^0-9]*"?n"?[^0-9]*(\d+)', op.attributes)
        if known:
            return int(known[1])
        condition = self.computations[op.called("condition") or ""]
        constants = [
            int(found[1])
            for found in (re.match(r"(\d+)$", c.operands[0]) for c in self._constants(condition))
            if found
        ]
        return max(constants, default=1)

    def _constants(self, computation: Computation) -> Iterator[Op]:
        for op in computation.ops:
            if (
                op.opcode == "constant"
                and op.operands
                and op.arrays
                and op.arrays[0].dims == ()
                and op.arrays[0].dtype[0] in "su"
            ):
                yield op
            for inner in self.inner(op):
                yield from self._constants(inner)

    def inner(self, op: Op) -> Iterator[Computation]:
        """What a fusion or a call consists of."""
        for key in (
            ("calls", "to_apply")
            if op.opcode in (*FUSIONS, "call", "async-start", "custom-call")
            else ()
        ):
            if (name := op.called(key)) is not None and name in self.computations:
                yield self.computations[name]

    def collective(self, op: Op, computation: Computation) -> Collective | None:
        """The exchange that an instruction is, begins or contains; one that runs piecewise within others stands in each of them."""
        kind = op.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            operands = sum(
                array.bytes for operand in op.operands for array in computation.arrays(operand)
            )
            out = sum(array.bytes for array in op.arrays) - (
                operands if op.opcode.endswith("-start") else 0
            )
            channel = re.search(r"channel_id=(\d+)", op.attributes)
            return Collective(
                kind,
                max(operands, out),
                _groups(op.attributes),
                op.op_name,
                channel[1] if channel else op.name,
            )
        if op.opcode in ("send", "recv") and (
            kind := _attribute(op, "_xla_megascale_transfer_type")
        ):
            name = kind.lower().replace("_", "-")
            return Collective(
                name,
                op.arrays[0].bytes,
                (),
                op.op_name,
                _attribute(op, "_xla_host_transfer_rendezvous"),
                True,
            )
        for inner in self.inner(op):
            for other in inner.ops:
                if (found := self.collective(other, inner)) is not None:
                    cuts = (
                        found.kind == "all-reduce" and "all-reduce-scatter" in inner.name
                    )  # TPU's name for a reduce-scatter
                    return replace(
                        found,
                        kind="reduce-scatter" if cuts else found.kind,
                        op_name=found.op_name or op.op_name,
                    )
        return None

    def _flops(self, computation: Computation, op: Op) -> float:
        if op.opcode == "dot":
            left = computation.arrays(op.operands[0])[0]
            contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
            return (
                2.0 * math.prod(op.arrays[0].dims) * math.prod(left.dims[dim] for dim in contracted)
            )
        if op.opcode == "convolution":
            return _convolution_flops(op, computation)
        if op.opcode == "custom-call":
            return self._call_flops(computation, op)
        return sum(self._flops(inner, other) for inner in self.inner(op) for other in inner.ops)

    def _call_flops(self, computation: Computation, op: Op) -> float:
        arrays = [
            computation.arrays(operand)[0] for operand in op.operands if computation.arrays(operand)
        ]
        if "__cublas$" in op.attributes:
            contracted = _numbers(r'"lhs_contracting_dimensions":\[([\d",]*)\]', op.attributes)
            return (
                2.0
                * math.prod(op.arrays[0].dims)
                * math.prod(arrays[0].dims[dim] for dim in contracted)
            )
        if "__cudnn$fmha" in op.attributes:
            q, k = arrays[0].dims, arrays[1].dims  # (B, T, H, K), (B, S, H, K)
            products = 5 if "Backward" in op.attributes else 2
            return (
                products * 2.0 * math.prod(q) * k[1] * (0.5 if "CAUSAL" in op.attributes else 1.0)
            )
        causal = (
            0.5 if "causal" in op.op_name else 1.0
        )  # a kernel called within `jax.named_scope("causal")`
        return self.kernels.get(_kernel(op), 0.0) * causal

    def _bytes(self, computation: Computation, op: Op) -> float:
        if op.opcode in FUSIONS:
            inner = next(self.inner(op))
            read = 0.0
            for index, operand in enumerate(op.operands):
                whole = sum(
                    array.bytes for array in computation.arrays(operand) if not array.on_chip
                )
                parameter = inner.parameters.get(index)
                read += (
                    whole
                    if parameter is None
                    else min(whole, self._read(inner, parameter.name, whole))
                )
            return read + self._written(inner, inner.root, op)
        if op.opcode in ("dynamic-slice", "slice", "gather", "slice-start", "dynamic-slice-start"):
            return 2.0 * _main(op.arrays[-1:])
        if op.opcode in ("dynamic-update-slice", "scatter"):
            update = computation.arrays(
                op.operands[1 if op.opcode == "dynamic-update-slice" else -1]
            )
            return 2.0 * _main(update)
        if op.opcode == "custom-call" and re.search(
            r'custom_call_target="(Allocate|AsyncCollective|Assume|Sharding|Pin)', op.attributes
        ):
            return 0.0
        if op.opcode == "copy-start":
            return float(_main(op.arrays[:2]))
        if op.opcode in ("async-start", "call"):
            return sum(
                self.work(inner, other).bytes for inner in self.inner(op) for other in inner.ops
            )
        operands = [array for operand in op.operands for array in computation.arrays(operand)]
        return float(_main(operands) + _main(op.arrays))

    def _read(self, inner: Computation, name: str, whole: float) -> float:
        """Bytes that a fusion reads of a parameter: of one that it only cuts pieces from, the pieces."""
        total = 0.0
        for user in inner.users.get(name, []):
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += sum(array.bytes for array in user.arrays)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                total += 0
            elif user.opcode in ("bitcast", "reshape", "get-tuple-element"):
                total += self._read(inner, user.name, whole)
            elif user.opcode == "fusion":
                deeper = next(self.inner(user))
                for index, operand in enumerate(user.operands):
                    if operand == name and index in deeper.parameters:
                        total += self._read(deeper, deeper.parameters[index].name, whole)
            elif user.opcode not in ("tuple",):
                return whole
        return total

    def _written(self, inner: Computation, root: Op, fusion: Op) -> float:
        """Bytes that a fusion writes: of an array that it updates in place, the piece."""
        if root.opcode == "tuple" and len(root.operands) == len(fusion.arrays):
            pairs = zip(root.operands, fusion.arrays, strict=True)
            return sum(
                self._piece(inner, inner.by_name.get(name.partition("#")[0]), array)
                for name, array in pairs
            )
        if len(fusion.arrays) == 1:
            return self._piece(inner, root, fusion.arrays[0])
        return float(_main(fusion.arrays))

    def _piece(self, inner: Computation, op: Op | None, array: Array) -> float:
        if array.on_chip:
            return 0.0
        while op is not None and op.opcode in ("bitcast", "reshape", "copy"):
            op = inner.by_name.get(op.operands[0].partition("#")[0])
        if op is not None and op.opcode == "dynamic-update-slice":
            return float(sum(a.bytes for a in inner.arrays(op.operands[1])))
        if op is not None and op.opcode == "fusion":
            deeper = next(self.inner(op))
            return self._piece(deeper, deeper.root, array)
        return float(array.bytes)


def parse(text: str, kernels: Mapping[str, float] | None = None) -> Program:
    """The program that a compiler printed after all its optimizations."""
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    ops: list[Op] = []
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)[1]  # type: ignore[index]
            entry = name if line.startswith("ENTRY") else entry
            ops = []
        elif line == "}" and name:
            computations[name] = Computation(name, tuple(ops))
            name = ""
        elif name and (op := _parse_op(line)) is not None:
            ops.append(op)
        elif name and ops:  # attributes may go on over several lines
            ops[-1] = replace(ops[-1], attributes=f"{ops[-1].attributes}\n{line}")
    return Program(computations, computations[entry], kernels or {})


def _parse_op(line: str) -> Op | None:
    found = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        return None
    rest = line[found.end() :]
    end = _matching(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    open_at = rest.index("(")
    close_at = _matching(rest, open_at)
    opcode, inside = rest[:open_at], rest[open_at + 1 : close_at]
    if opcode in ("parameter", "constant"):
        operands: tuple[str, ...] = (inside[:40],)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", inside))
    arrays = tuple(_arrays(shape))
    if opcode == "fusion-start":  # its results stand between its operands and a number
        arrays = arrays[len(operands) : -1]
    return Op(found[2], opcode, arrays, operands, rest[close_at + 1 :], bool(found[1]))


def _matching(text: str, at: int) -> int:
    """Where the parenthesis at `at` is closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, at):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def _arrays(shape: str) -> Iterator[Array]:
    for found in re.finditer(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape):
        dims = tuple(int(dim.lstrip("<=")) for dim in found[2].split(",") if dim)
        space = re.search(r"S\((\d+)\)", found[3] or "")
        yield Array(found[1], dims, space is not None and space[1] != "5")  # 5 is the host's


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 32


def _main(arrays: tuple[Array, ...] | list[Array]) -> int:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _attribute(op: Op, name: str) -> str:
    found = re.search(rf'{name}="([^"]*)"', op.attributes)
    return found[1] if found else ""


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


def _kernel(op: Op) -> str:
    """The name of a kernel written by hand (Pallas), as `pallas_call` was given it."""
    if op.opcode != "custom-call" or "__cublas$" in op.attributes or "__cudnn$" in op.attributes:
        return ""
    target = re.search(r'custom_call_target="([^"]*)"', op.attributes)
    if target is None or not (
        "tpu_custom_call" in target[1] or "triton" in target[1] or "mosaic" in target[1]
    ):
        return ""
    found = None if "mosaic_gpu" in target[1] else re.search(r'\bname = "([^"]+)"', op.attributes)
    parts = [part for part in op.op_name.split("/") if part not in ("pallas_call", "mpmd_map")]
    return found[1] if found else parts[-1] if parts else op.name


def _convolution_flops(op: Op, computation: Computation) -> float:
    """Two for each multiply and add. Products whose factor is padding or lies between dilated elements do not count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return 0.0
    left, right = (computation.arrays(operand)[0].dims for operand in op.operands[:2])
    out = op.arrays[0].dims
    window = dict(
        re.findall(
            r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", op.attributes) or [""])[0]
        )
    )
    spatial = [label for label in labels[3] if label.isdigit()]

    def numbers(key: str, default: int) -> list[int]:
        return (
            [int(n) for n in window[key].split("x")] if key in window else [default] * len(spatial)
        )

    pads = (
        [tuple(map(int, p.split("_"))) for p in window["pad"].split("x")]
        if "pad" in window
        else [(0, 0)] * len(spatial)
    )
    valid = 1.0
    for i, label in enumerate(sorted(spatial)):
        size, stride = numbers("size", 1)[i], numbers("stride", 1)[i]
        lhs_dilate, rhs_dilate = numbers("lhs_dilate", 1)[i], numbers("rhs_dilate", 1)[i]
        length = left[labels[1].index(label)]
        count = 0
        for at in range(out[labels[3].index(label)]):
            for k in range(size):
                place = at * stride - pads[i][0] + k * rhs_dilate
                count += place % lhs_dilate == 0 and 0 <= place // lhs_dilate < length
        valid *= count
    ins = right[labels[2].index("i")]
    return 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * ins * valid


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Which devices exchange with each other, by number; () where the program does not say, which means all."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return tuple(
            tuple(int(n) for n in group.split(",") if n)
            for group in re.findall(r"\{([\d,]*)\}", listed[1])
        )
    if iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        shape, dims, order = (
            [int(n) for n in (part or "").split(",") if n] for part in iota.groups()
        )
        return _as_groups(_transposed(dims, order or list(range(len(dims)))), shape[-1])
    if named := re.search(
        r"replica_groups=@?\w*mesh\[([^\]]*)\](?:, *device_ids=\((.*?)\)(?= *\{))? *\{([^}]*)\}",
        attributes,
    ):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        groups = _mesh_groups(sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named[3]))
        devices = _device_ids(named[2] or "")
        return tuple(tuple(devices[n] for n in group) for group in groups) if devices else groups
    return ()


def _device_ids(text: str) -> list[int]:
    """The devices of a mesh in its order, from "[4,2]T(1,0)" or a list; [] where they are in their own."""
    if found := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        dims, order = ([int(n) for n in (part or "").split(",") if n] for part in found.groups())
        return _transposed(dims, order or list(range(len(dims))))
    return [int(n) for n in re.findall(r"\d+", text)]


def _mesh_groups(
    sizes: dict[str, int], chosen: list[tuple[str, str, str]]
) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh; "x:(2)4" is the part of axis x of size 4 whose major part has size 2."""
    dims, mine = [], []
    for name, size in sizes.items():
        parts = [
            (name, int(before), int(length))
            for other, before, length in chosen
            if other == name and before
        ]
        whole = any(other == name and not before for other, before, _ in chosen)
        if parts:
            _, before, length = parts[0]
            split = [(before, False), (length, True), (size // before // length, False)]
        else:
            split = [(size, whole)]
        for length, is_mine in split:
            dims.append(length)
            mine.append(is_mine)
    order = [i for i, m in enumerate(mine) if not m] + [i for i, m in enumerate(mine) if m]
    return _as_groups(
        _transposed(dims, order), math.prod(d for d, m in zip(dims, mine, strict=True) if m)
    )


def _transposed(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2 ... as an array of `dims`, its dims put into `order`, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    numbers = [0]
    for dim in order:
        numbers = [n + k * strides[dim] for n in numbers for k in range(dims[dim])]
    return numbers


def _as_groups(numbers: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def cycles(op: Op) -> float:
    """The compiler's own estimate, where it prints one (TPU)."""
    found = re.search(r'"estimated_cycles":"(\d+)"', op.attributes)
    return float(found[1]) if found else 0.0
