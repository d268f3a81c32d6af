"""Kernels for Hopper GPUs (H100, H200), written in Mosaic GPU.

They save passes over large arrays that XLA and Triton make, and overlap arithmetic with memory
traffic:

- `product_gelu`, `product_slope` and `product_exp` are matmuls with an epilogue. The result of the
  matmul becomes its GELU, is multiplied by the slope of the GELU, or becomes exponentials for the
  loss, before it leaves the chip. `product_gelu8`, `product_slope8` and `product_exp8` multiply
  numbers of 8 bits, and write the result a second time in 8 bits for the next matmul.
- `cross_entropy` holds the logits of a token on chip while it sums and divides, so it reads and
  writes each logit once.

The kernels need jax 0.11 or newer, because Mosaic GPU had other names before. There, and for shapes
that the tiles do not divide, the callers use other kernels.

All kernels are jitted, so that layers of the same shape share one. It takes seconds to compile.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.kernels.partitioning import Ref, gpu, pl
from shardwise.kernels.platform import gpu_capability, multiprocessors, platform
from shardwise.tree import DType

Array = jax.Array
# The operands of matmuls of 8 bits: weights and activations, and gradients.
EIGHT_BITS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
Epilogue: TypeAlias = Literal["gelu", "slope", "exp"]

# Constants of the tanh approximation of the GELU.
SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715

LOG2_E = 1.4426950408889634

# `cross_entropy` views the logits of a token as lines of this many values ...
LANES = 128
# ... and works on this many lines at a time.
LINES = 64

# Shared memory of a multiprocessor, in bytes.
SHARED_MEMORY = 227 * 1024

# Each of the two multiplying warpgroups computes a tile half of this many rows and columns.
TILE_ROWS = 128
TILE_COLUMNS = 128

# Bytes of each row of `a` (and of each column of `b`) that are multiplied in one step.
DEPTH_BYTES = 128

# Steps whose operands are in shared memory, or on their way to it.
STAGES = 3

# The epilogue works on parts of a tile of this size.
PART_ROWS = 32
PART_COLUMNS = 64

# Parts whose slopes the epilogue requests ahead of use.
SLOPES = 2

# Registers per thread of the warpgroups that multiply, load, and run the epilogue. The average over
# the four warpgroups must be 128.
REGISTERS = 168, 24, 152

# Programs work on groups of this many tiles above each other, so that their columns are read once.
GROUP_TILES = 16

# `product_exp` clips its exponents here. exp(60), summed over a vocabulary, and its inverse,
# divided by the number of tokens, are still finite in float32.
MAX_EXPONENT = 60.0


def is_available() -> bool:
    """Return whether the trace is for a Hopper GPU, and this JAX can compile these kernels."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    return platform() == "gpu" and gpu_capability() == "9.0" and version >= (0, 11)


def supports_cross_entropy(logits: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether `cross_entropy` can hold the logits (N, V) of a token on chip.

    Two programs have to fit on a multiprocessor, so that one computes while the other one loads.
    """
    width = logits.shape[1]
    return (
        logits.dtype in (jnp.bfloat16, jnp.float16)
        and width % LANES == 0
        and 2 * (2 * width + 2048) <= SHARED_MEMORY
    )


@jax.jit
def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the gradient of the summed loss, and the losses.

    Args:
        logits: (N, V). The gradient is written in their place.
        labels: (N,).

    Returns:
        The gradient of the sum of the losses with respect to the logits, (N, V), and the losses in
        nats, (N,), float32.
    """
    num_tokens, width = logits.shape
    # Two programs share a multiprocessor: one computes while the other one loads.
    programs = 2 * multiprocessors()
    kernel = partial(_cross_entropy_kernel, programs=programs)
    in_place = jax.new_ref(logits.reshape(num_tokens, width // LANES, LANES))
    nats = gpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        grid=(programs,),
        grid_names=("program",),
        num_threads=1,
        thread_name="wg",
        kernel_name="cross_entropy",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )(in_place, labels)
    gradient = jax.freeze(in_place).reshape(num_tokens, width)
    # At the label, the kernel has left the probability p = exp(-nats). The gradient is p - 1.
    tokens = jnp.arange(num_tokens)
    label_gradient = jnp.expm1(-nats).astype(gradient.dtype)
    # Without the promises, XLA would sort the indices in a deterministic step.
    gradient = gradient.at[tokens, labels].set(
        label_gradient, indices_are_sorted=True, unique_indices=True
    )
    return gradient, nats


def _cross_entropy_kernel(
    x_ref: Ref, label_ref: Ref, nats_ref: Ref, *, programs: int
) -> None:
    """Replace logits by their softmax, and write the losses.

    The caller subtracts 1 at the label, before the value is rounded.
    """
    num_tokens, num_lines, lanes = x_ref.shape
    parts = [
        (start, min(LINES, num_lines - start)) for start in range(0, num_lines, LINES)
    ]
    program = lax.axis_index("program")

    def process_token(token: Array, buffer: Ref, loaded: Ref) -> None:
        def read(start: int, size: int) -> Array:
            """Return some lines of logits in units of log 2."""
            layout = gpu.Layout.WG_STRIDED((size, lanes), 8 if size % 8 == 0 else 1)
            lines: Array = gpu.load(buffer.at[pl.ds(start, size)], layout=layout)
            return lines.astype(jnp.float32) * LOG2_E

        for i, (start, size) in enumerate(parts):
            lines = pl.ds(start, size)
            gpu.copy_gmem_to_smem(
                x_ref.at[token, lines], buffer.at[lines], loaded.at[i]
            )

        # The sum of exponentials, relative to the largest logit so far.
        label = label_ref[token]
        maximum = jnp.float32(-jnp.inf)
        total = jnp.float32(0)
        for i, (start, size) in enumerate(parts):
            gpu.barrier_wait(loaded.at[i])
            x = read(start, size)
            new_maximum = jnp.maximum(maximum, jnp.max(x))
            total = total * jnp.exp2(maximum - new_maximum) + jnp.sum(
                jnp.exp2(x - new_maximum)
            )
            maximum = new_maximum
        log_total = maximum + jnp.log(total) * LOG2_E
        line = lax.div(label, jnp.int32(lanes))
        lane = lax.rem(label, jnp.int32(lanes))
        label_logit = x_ref[token, line, lane].astype(jnp.float32)
        nats_ref[token] = log_total / LOG2_E - label_logit

        for start, size in parts:
            lines = pl.ds(start, size)
            buffer[lines] = jnp.exp2(read(start, size) - log_total).astype(x_ref.dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(buffer.at[lines], x_ref.at[token, lines])
        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def process_tokens(buffer: Ref, loaded: Ref) -> None:
        count = lax.div(num_tokens - program + programs - 1, jnp.int32(programs))

        def process(i: Array, _: None) -> None:
            process_token(program + i * programs, buffer, loaded)

        lax.fori_loop(0, count, process, None)
        gpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        process_tokens,
        buffer=gpu.SMEM((num_lines, lanes), x_ref.dtype),
        loaded=gpu.Barrier(num_barriers=len(parts)),
        collective_axes="wg",
    )


def supports_matmul(x: Array | jax.ShapeDtypeStruct, columns: int) -> bool:
    """Return whether the tiles divide the matmul of `x` (N, D) and a matrix (D, `columns`)."""
    num_tokens, depth = x.shape
    return (
        x.dtype in (jnp.bfloat16, jnp.float16, *EIGHT_BITS)
        and num_tokens % (2 * TILE_ROWS) == 0
        and depth % _depth(x.dtype) == 0
        and columns % TILE_COLUMNS == 0
    )


def _depth(dtype: DType) -> int:
    """Return the number of columns of `a` that are multiplied in one step."""
    return DEPTH_BYTES // dtype.itemsize


@jax.jit
def product_gelu(x: Array, kernel: Array, bias: Array) -> tuple[Array, Array]:
    """Return the GELU of a linear layer, and the slope of the GELU there.

    Args:
        x: (N, D).
        kernel: (D, F).
        bias: (F,).

    Returns:
        `gelu(x @ kernel + bias)` and the derivative of the GELU at the same point, both (N, F).
    """
    out = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    y, slope = _matmul_call("gelu", out, out)(x, kernel, bias)
    return y, slope


@jax.jit
def product_slope(g: Array, kernel: Array, slope: Array) -> tuple[Array, Array]:
    """Return the gradient of the input of a GELU, and its sum over tokens.

    Args:
        g: the gradient of the layer after the GELU, (N, D).
        kernel: the weights of this layer, (F, D).
        slope: the slope of the GELU, (N, F).

    Returns:
        `(g @ kernel.T) * slope`, (N, F), and its sum over tokens, (F,), float32.
    """
    num_tokens, columns = slope.shape
    sums = jax.ShapeDtypeStruct((num_tokens // (2 * TILE_ROWS), columns), jnp.float32)
    out = jax.ShapeDtypeStruct(slope.shape, g.dtype)
    gradient, partial_sums = _matmul_call("slope", out, sums)(g, kernel, slope)
    return gradient, partial_sums.sum(0)


@jax.jit
def product_exp(x: Array, table: Array, offset: Array) -> tuple[Array, Array]:
    """Return exponentials of logits, and their sum for each token.

    Args:
        x: the features of the tokens, (N, D).
        table: the weights of the output layer, (V, D).
        offset: a number for each token that is subtracted from its logits, (N,), float32.

    Returns:
        `exp(min(x @ table.T - offset, MAX_EXPONENT))`, (N, V), and its sums, (N,), float32.
    """
    num_tokens, columns = x.shape[0], table.shape[0]
    sums = jax.ShapeDtypeStruct((columns // TILE_COLUMNS, num_tokens), jnp.float32)
    out = jax.ShapeDtypeStruct((num_tokens, columns), x.dtype)
    exponentials, partial_sums = _matmul_call("exp", out, sums)(x, table, offset)
    return exponentials, partial_sums.sum(0)


@jax.jit
def product_gelu8(
    x: Array, kernel: Array, bias: Array, factors: Array
) -> tuple[Array, Array, Array]:
    """Return the GELU of a linear layer of 8 bits, its slope, and the GELU in 8 bits.

    Args:
        x: (N, D), 8 bits.
        kernel: the weights, transposed, (F, D), 8 bits.
        bias: (F,), 16 bits.
        factors: two float32 numbers: the product is multiplied by the first, and the GELU in 8
            bits by the second.

    Returns:
        `y = gelu(x @ kernel.T * factors[0] + bias)` and the derivative of the GELU there, in the
        dtype of the bias, and `y * factors[1]` in the dtype of `x`, all (N, F).
    """
    shape = x.shape[0], kernel.shape[0]
    wide = jax.ShapeDtypeStruct(shape, bias.dtype)
    narrow = jax.ShapeDtypeStruct(shape, x.dtype)
    call = _matmul_call("gelu", wide, wide, narrow)
    y, slope, y8 = call(x, kernel, bias, factors)
    return y, slope, y8


@jax.jit
def product_slope8(
    g: Array, kernel: Array, slope: Array, factors: Array
) -> tuple[Array, Array, Array]:
    """Return the gradient of the input of a GELU, its sum over tokens, and itself in 8 bits.

    Args:
        g: the gradient of the layer after the GELU, (N, D), 8 bits.
        kernel: the weights of this layer, (F, D), 8 bits.
        slope: the slope of the GELU, (N, F), 16 bits.
        factors: two float32 numbers: the product is multiplied by the first, and the gradient in
            8 bits by the second.

    Returns:
        `dx = (g @ kernel.T) * factors[0] * slope`, (N, F), in the dtype of the slope; its sum over
        tokens, (F,), float32; `dx * factors[1]`, (N, F), in the dtype of `g`.
    """
    num_tokens, columns = slope.shape
    sums = jax.ShapeDtypeStruct((num_tokens // (2 * TILE_ROWS), columns), jnp.float32)
    wide = jax.ShapeDtypeStruct(slope.shape, slope.dtype)
    narrow = jax.ShapeDtypeStruct(slope.shape, g.dtype)
    call = _matmul_call("slope", wide, sums, narrow)
    gradient, partial_sums, gradient8 = call(g, kernel, slope, factors)
    return gradient, partial_sums.sum(0), gradient8


@partial(jax.jit, static_argnames=("dtype",))
def product_exp8(
    x: Array, table: Array, offset: Array, factors: Array, dtype: DType
) -> tuple[Array, Array, Array]:
    """Return exponentials of logits, their sums, and a copy of them in 8 bits.

    Args:
        x: the features of the tokens, (N, D).
        table: the weights of the output layer, (V, D).
        offset: a number for each token that is subtracted from its logits, (N,), float32.
        factors: two float32 numbers: the product is multiplied by the first, and the exponentials
            in 8 bits by the second.
        dtype: the dtype of the copy.

    Returns:
        `e = exp(min(x @ table.T * factors[0] - offset, MAX_EXPONENT))`, (N, V), in the dtype of
        `x`; its sum for each token, (N,), float32; `e * factors[1]`, (N, V), saturated.
    """
    num_tokens, columns = x.shape[0], table.shape[0]
    sums = jax.ShapeDtypeStruct((columns // TILE_COLUMNS, num_tokens), jnp.float32)
    wide, narrow = (
        jax.ShapeDtypeStruct((num_tokens, columns), of) for of in (x.dtype, dtype)
    )
    call = _matmul_call("exp", wide, sums, narrow)
    exponentials, partial_sums, exponentials8 = call(x, table, offset, factors)
    return exponentials, partial_sums.sum(0), exponentials8


def _matmul_call(
    epilogue: Epilogue, *out_type: jax.ShapeDtypeStruct
) -> Callable[..., tuple[Array, ...]]:
    """Return a call of the matmul kernel, with one program on each multiprocessor."""
    call: Callable[..., tuple[Array, ...]] = gpu.kernel(
        partial(_matmul_kernel, epilogue=epilogue, num_outs=len(out_type)),
        out_type=out_type,
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=4,
        thread_name="wg",
        # `flops.count_kernels` and plans recognize matmul kernels by the prefix "product_".
        kernel_name=f"product_{epilogue}",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane,
            approx_math=True,
            # The kernel has a barrier wherever one warpgroup hands something to another.
            unsafe_no_auto_barriers=True,
        ),
    )
    return call


def _matmul_kernel(
    a: Ref,
    b: Ref,
    extra: Ref,
    *refs: Ref,
    epilogue: Epilogue,
    num_outs: int,
) -> None:
    """Multiply `a` and `b` tile by tile, and apply the epilogue to each tile."""
    # Kernels with operands or results of 8 bits have one more input, before the results.
    outs = refs[-num_outs:]
    factors = refs[0] if len(refs) > num_outs else None
    warpgroup = lax.axis_index("wg")
    depth = _depth(a.dtype)
    transposed = epilogue != "gelu" or factors is not None
    b_stage = (TILE_COLUMNS, depth) if transposed else (depth, TILE_COLUMNS)

    def shared(*shape: int, dtype: DType, width: int) -> object:
        """Return shared memory in the order that the tensor cores and the copies require."""
        transforms = (
            gpu.TilingTransform((8, width)),
            gpu.SwizzleTransform(dtype.itemsize * width),
        )
        return gpu.SMEM(shape, dtype, transforms=transforms)

    def run(**buffers: Ref) -> None:
        _MatmulKernel(
            a,
            b,
            extra,
            factors,
            outs,
            epilogue,
            transposed,
            warpgroup,
            **buffers,
        ).run()

    part = (TILE_ROWS, PART_COLUMNS)
    pl.run_scoped(
        run,
        a_stages=shared(STAGES, 2 * TILE_ROWS, depth, dtype=a.dtype, width=depth),
        b_stages=shared(STAGES, *b_stage, dtype=b.dtype, width=depth),
        tile=shared(
            2,
            TILE_COLUMNS // PART_COLUMNS,
            *part,
            dtype=outs[0].dtype,
            width=PART_COLUMNS,
        ),
        loaded=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        used=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        finished=gpu.Barrier(num_barriers=2),
        free=gpu.Barrier(num_barriers=2),
        collective_axes="wg",
    )


def int32(value: int) -> Array:
    """Return a number that a kernel can divide another one by."""
    return jnp.array(value, dtype=jnp.int32)


# eq=False: instances hold tracers, which cannot be hashed, and JAX hashes the functions it traces.
@dataclass(frozen=True, eq=False)
class _MatmulKernel:
    """One program of the matmul kernel, which has four warpgroups.

    - Warpgroups 0 and 1 multiply: each computes half of the rows of a tile.
    - Warpgroup 2 loads the operands of the next steps into shared memory.
    - Warpgroup 3 runs the epilogue on the tile that is finished while the next one is multiplied.

    Each method handles one tile. Its argument `index` is the number of the tile in the result, and
    `count` is the number of tiles that this program has worked on before.

    Attributes:
        a: left operand, (N, D).
        b: right operand: (D, F), or (F, D) if `transposed`.
        extra: third input of the epilogue: the bias (F,), the slope (N, F), or the offset (N,).
        factors: two numbers: the matmul is multiplied by the first, and a result of 8 bits by the
            second. None if neither operands nor results have 8 bits.
        outs: results: an array (N, F), the second GELU output (N, F) or partial sums, and if
            there is a third, the first one in 8 bits.
        epilogue: the function that is applied to the matmul.
        transposed: whether `b` is multiplied as its transpose.
        warpgroup: the index of this warpgroup, 0 to 3.
        a_stages: the operands of `STAGES` steps in shared memory, (STAGES, rows, depth).
        b_stages: the same for `b`.
        tile: the finished tile in shared memory, (half, block of columns, row, column).
        loaded: barrier for each stage: both operands have arrived.
        used: barrier for each stage: both multiplying warpgroups have read it.
        finished: barrier for each half: it is in `tile`.
        free: barrier for each half: the epilogue has read it from `tile`.
    """

    a: Ref
    b: Ref
    extra: Ref
    factors: Ref | None
    outs: tuple[Ref, ...]
    epilogue: Epilogue
    transposed: bool
    warpgroup: Array
    a_stages: Ref
    b_stages: Ref
    tile: Ref
    loaded: Ref
    used: Ref
    finished: Ref
    free: Ref

    @property
    def depth(self) -> int:
        """The columns of `a` that are multiplied in one step."""
        return _depth(self.a.dtype)

    @property
    def steps(self) -> int:
        """The number of steps along the depth of the matmul."""
        return int(self.a.shape[1]) // self.depth

    @property
    def tiles_down(self) -> int:
        """The number of tiles above each other."""
        return int(self.a.shape[0]) // (2 * TILE_ROWS)

    @property
    def tiles_across(self) -> int:
        """The number of tiles next to each other."""
        return int(self.b.shape[0 if self.transposed else 1]) // TILE_COLUMNS

    @property
    def column_blocks(self) -> int:
        """The number of parts next to each other in a tile."""
        return TILE_COLUMNS // PART_COLUMNS

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """The parts of a tile: half, first row in this half, and block of columns."""
        rows = range(0, TILE_ROWS, PART_ROWS)
        return list(itertools.product((0, 1), rows, range(self.column_blocks)))

    def run(self) -> None:
        """Do the job of this warpgroup for all tiles of this program."""
        epilogues = {
            "gelu": self.end_gelu,
            "slope": self.end_slope,
            "exp": self.end_exp,
        }
        jobs = (
            (self.warpgroup < 2, REGISTERS[0], self.multiply),
            (self.warpgroup == 2, REGISTERS[1], self.load),
            (self.warpgroup == 3, REGISTERS[2], epilogues[self.epilogue]),
        )
        for is_mine, registers, job in jobs:
            pl.when(is_mine)(partial(self._run_job, registers, job))

    def _run_job(self, registers: int, job: Callable[[Array, Array], None]) -> None:
        action = "increase" if registers > 128 else "decrease"
        gpu.set_max_registers(registers, action=action)
        for_each_tile = gpu.nd_loop(
            (self.tiles_down * self.tiles_across,), collective_axes="program"
        )
        for_each_tile(lambda info: job(info.local_index, info.index[0]))

    def origin(self, index: Array) -> tuple[Array, Array]:
        """Return the first row and the first column of a tile.

        Consecutive tiles are above each other in groups, so that programs that run at the same time
        share the columns of `b` in the cache.
        """
        group_rows = math.gcd(self.tiles_down, GROUP_TILES)
        group_size = group_rows * self.tiles_across
        group = lax.div(index, int32(group_size))
        within = lax.rem(index, int32(group_size))
        row = (group * group_rows + lax.rem(within, int32(group_rows))) * (
            2 * TILE_ROWS
        )
        return row, lax.div(within, int32(group_rows)) * TILE_COLUMNS

    # Warpgroup 2

    def load(self, count: Array, index: Array) -> None:
        """Copy the operands of a tile to shared memory, step by step."""
        row, column = self.origin(index)

        def load_step(i: Array, _: None) -> None:
            step = count * self.steps + i
            stage = lax.rem(step, int32(STAGES))
            pl.when(step >= STAGES)(lambda: gpu.barrier_wait(self.used.at[stage]))
            depth = pl.ds(i * self.depth, self.depth)
            columns = pl.ds(column, TILE_COLUMNS)
            gpu.copy_gmem_to_smem(
                self.a.at[pl.ds(row, 2 * TILE_ROWS), depth],
                self.a_stages.at[stage],
                self.loaded.at[stage],
            )
            gpu.copy_gmem_to_smem(
                self.b.at[columns, depth]
                if self.transposed
                else self.b.at[depth, columns],
                self.b_stages.at[stage],
                self.loaded.at[stage],
            )

        lax.fori_loop(0, self.steps, load_step, None)

    # Warpgroups 0 and 1

    def multiply(self, count: Array, index: Array) -> None:
        """Multiply one half of a tile, and leave it in shared memory for the epilogue."""
        half = self.warpgroup
        if self.epilogue == "exp":
            rows = pl.ds(self.origin(index)[0] + half * TILE_ROWS, TILE_ROWS)
            # Subtracted here, before the logits are rounded.
            layout = gpu.Layout.WGMMA.reduce(1)
            offset = gpu.load(self.extra.at[rows], layout=layout, optimized=False)
        accumulator = gpu.ACC((TILE_ROWS, TILE_COLUMNS), jnp.float32)
        total = pl.run_scoped(partial(self._accumulate, count), accumulator)
        pl.when(count > 0)(lambda: gpu.barrier_wait(self.free.at[half]))
        for block in range(self.column_blocks):
            x = total[:, block * PART_COLUMNS : (block + 1) * PART_COLUMNS]
            if self.factors is not None:
                x = x * self.factors[0]
            if self.epilogue == "exp":
                x = x - lax.broadcast_in_dim(offset, x.shape, [0])
            self.tile[half, block] = x.astype(self.tile.dtype)
        gpu.barrier_arrive(self.finished.at[half])

    def _accumulate(self, count: Array, accumulator: Ref) -> Array:
        """Return the matmul of one half of a tile, (TILE_ROWS, TILE_COLUMNS), float32."""

        def multiply_step(i: Array, _: None) -> None:
            step = count * self.steps + i
            stage = lax.rem(step, int32(STAGES))
            gpu.barrier_wait(self.loaded.at[stage])
            right = self.b_stages.at[stage]
            gpu.wgmma(
                accumulator,
                self.a_stages.at[stage, pl.ds(self.warpgroup * TILE_ROWS, TILE_ROWS)],
                right.transpose((1, 0)) if self.transposed else right,
            )
            # One multiplication stays in flight. The one before it is done with its stage.
            gpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: self._release_stage(step + STAGES - 1))

        lax.fori_loop(0, self.steps, multiply_step, None)
        gpu.wgmma_wait(0)
        self._release_stage(count * self.steps + self.steps - 1)
        result: Array = accumulator[...]
        return result

    def _release_stage(self, step: Array) -> None:
        gpu.barrier_arrive(self.used.at[lax.rem(step, int32(STAGES))])

    # Warpgroup 3

    def end_gelu(self, count: Array, index: Array) -> None:
        """Write the GELU of `tile + bias`, and its slope."""
        _, column = self.origin(index)
        blocks = [
            self.extra.at[pl.ds(column + block * PART_COLUMNS, PART_COLUMNS)]
            for block in range(self.column_blocks)
        ]
        vectors = [
            gpu.load(block, layout=_part_layout().reduce(0), optimized=False).astype(
                jnp.float32
            )
            for block in blocks
        ]
        biases = [
            gpu.layout_cast(
                lax.broadcast_in_dim(vector, (PART_ROWS, PART_COLUMNS), [1]),
                _part_layout(),
            )
            for vector in vectors
        ]
        for part, x in zip(self.parts, self._prefetch(self._load_part, 1), strict=True):
            where = self._locate(index, *part)
            y, slope = gelu_and_slope(x + biases[part[2]])
            self.outs[0].at[where][...] = y.astype(self.outs[0].dtype)
            self.outs[1].at[where][...] = slope.astype(self.outs[1].dtype)
            self._store_narrow(where, y)

    def end_slope(self, count: Array, index: Array) -> None:
        """Write `tile * slope`, and its sum over the rows of the tile."""

        def load_slope(*part: int) -> Array:
            where = self.extra.at[self._locate(index, *part)]
            slope: Array = gpu.load(where, layout=_part_layout(), optimized=False)
            return slope

        gradient_ref, sums_ref = self.outs[:2]
        totals = [jnp.float32(0)] * self.column_blocks
        slopes = self._prefetch(load_slope, SLOPES)
        values = self._prefetch(self._load_part, 1)
        for part, slope, x in zip(self.parts, slopes, values, strict=True):
            where = self._locate(index, *part)
            gradient = x * slope
            gradient_ref.at[where][...] = gradient.astype(gradient_ref.dtype)
            self._store_narrow(where, gradient)
            totals[part[2]] += gradient
        row, column = self.origin(index)
        for block, total in enumerate(totals):
            sums = jnp.sum(total, axis=0)
            tile_row = lax.div(row, int32(2 * TILE_ROWS))
            columns = pl.ds(column + block * PART_COLUMNS, PART_COLUMNS)
            sums_ref.at[tile_row, columns][...] = sums

    def end_exp(self, count: Array, index: Array) -> None:
        """Write `exp(tile)`, and its sums over the columns of the tile."""
        exponentials_ref, sums_ref = self.outs[:2]
        row, column = self.origin(index)
        total: Array | float = 0.0
        for part, x in zip(self.parts, self._prefetch(self._load_part, 1), strict=True):
            half, part_row, block = part
            exponential = jnp.exp2(jnp.minimum(x, MAX_EXPONENT) * LOG2_E)
            where = self._locate(index, *part)
            exponentials_ref.at[where][...] = exponential.astype(exponentials_ref.dtype)
            self._store_narrow(where, exponential)
            total = total + exponential
            if block == self.column_blocks - 1:
                sums = jnp.sum(total, axis=1)
                tile_column = lax.div(column, int32(TILE_COLUMNS))
                rows = pl.ds(row + half * TILE_ROWS + part_row, PART_ROWS)
                store_unaligned(sums_ref.at[tile_column, rows], sums)
                total = 0.0

    def _store_narrow(self, where: tuple[object, object], values: Array) -> None:
        """Write a part of the first result in 8 bits too, if the kernel has such a result."""
        if self.factors is not None and len(self.outs) == 3:
            out = self.outs[2]
            # The conversion on the GPU saturates.
            narrow = (values * self.factors[1]).astype(out.dtype)
            store_unaligned(out.at[where], narrow)

    def _locate(
        self, index: Array, half: int, part_row: int, block: int
    ) -> tuple[object, object]:
        """Return the rows and columns of the result that a part of a tile covers."""
        row, column = self.origin(index)
        rows = pl.ds(row + half * TILE_ROWS + part_row, PART_ROWS)
        return rows, pl.ds(column + block * PART_COLUMNS, PART_COLUMNS)

    def _load_part(self, half: int, part_row: int, block: int) -> Array:
        """Load a part from `tile`: wait for its half before the first, free it after the last."""
        if (part_row, block) == self.parts[0][1:]:
            gpu.barrier_wait(self.finished.at[half])
        part = self.tile.at[half, block, pl.ds(part_row, PART_ROWS)]
        values: Array = gpu.load(part, layout=_part_layout())
        if (part_row, block) == self.parts[-1][1:]:
            gpu.barrier_arrive(self.free.at[half])
        return values

    def _prefetch(self, load: Callable[..., Array], distance: int) -> Iterator[Array]:
        """Yield `load(*part)` in float32 for the parts of a tile, loaded `distance` parts ahead."""
        parts = self.parts
        loaded = [load(*part) for part in parts[:distance]]
        for i in range(len(parts)):
            if i + distance < len(parts):
                loaded.append(load(*parts[i + distance]))
            yield loaded[i].astype(jnp.float32)


def _part_layout() -> Any:
    """Return how the epilogue holds a part of a tile in registers.

    What a warp reads or writes at once is two complete lines of 128 bytes. So the epilogue can
    write from registers to global memory, past shared memory, which is the busiest resource of
    these kernels: the tensor cores alone use three quarters of its bandwidth.
    """
    return gpu.Layout.TILED(
        gpu.Tiling(((8, PART_COLUMNS), (2, PART_COLUMNS), (4,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def store_unaligned(ref: Ref, values: Array) -> None:
    """Store values of which a warp holds no complete lines of 128 bytes.

    For example, one number for each row of a matrix. jax 0.12 refuses such a store unless it is
    told not to optimize it; older versions have no such option, and do not refuse it.
    """
    if hasattr(gpu, "store"):
        gpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def gelu_and_slope(
    x: Array, tanh: Callable[[Array], Array] = jnp.tanh
) -> tuple[Array, Array]:
    """Return the tanh-approximated GELU of `x`, and its derivative.

    Compilers remove whichever of the two is not used.

    Args:
        x: float32 values of any shape.
        tanh: an implementation of tanh. Within the Mosaic kernels, `approx_math` turns `jnp.tanh`
            into an instruction of the GPU.
    """
    square = x * x
    # gelu(x) = x * share. The slope of the share is 2 * share * (1 - share) times the slope of the
    # argument of tanh.
    share = 0.5 + 0.5 * tanh(x * (SQRT_2_OVER_PI + (SQRT_2_OVER_PI * CUBIC) * square))
    y = x * share
    return y, share + (y - y * share) * (
        2 * SQRT_2_OVER_PI + (6 * SQRT_2_OVER_PI * CUBIC) * square
    )
