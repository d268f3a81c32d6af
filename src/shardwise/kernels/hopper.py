"""Kernels for Hopper GPUs (H100, H200) in which arithmetic and memory work at the same time, written in Mosaic GPU.

Passes over large arrays are saved that XLA and Triton make. A product becomes its GELU (or is multiplied by the slope of it, in the
backward pass, or becomes the shares of a softmax) before it leaves the chip: of the four warpgroups of a program two multiply, one
loads, and one works on the tile that is done. Where the logits exist already, the loss holds a row of them on chip while it sums and
divides: read once, written once. In jax before 0.11 Mosaic GPU has other names; there, and for shapes that do not fit, the callers have
other kernels.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.kernels.partitioning import gpu, pl

Array = jax.Array
ROOT, CUBIC = 0.7978845608028654, 0.044715  # of the GELU: the root of 2 / pi
LOG2E = 1.4426950408889634
LANES = 128  # a row of logits is worked on in lines of so many
LINES = 64  # at a time
ON_CHIP = 227 * 1024  # bytes that the programs on one multiprocessor share
ROWS, COLUMNS, DEPTH = (
    128,
    128,
    64,
)  # of the tile of a warpgroup that multiplies; columns of its factors at a time
STAGES = 3  # pieces of the factors that are loaded ahead
PIECE, HEIGHT = (
    64,
    32,
)  # columns and rows of the part of a tile that the last warpgroup works on at once
SLOPES = 2  # parts whose slopes are on their way from memory
REGISTERS = 168, 24, 152  # of a thread that multiplies, loads, and ends; 128 on average
TOGETHER = 16  # tiles above each other that are worked on at a time: what they share is read once
CEILING = 60.0  # of what becomes a share: exp(60) times as many words as there are, and its inverse over all tokens, are numbers in float32


def is_here() -> bool:
    device = jax.devices()[0]
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    return (
        device.platform == "gpu"
        and getattr(device, "compute_capability", "") == "9.0"
        and version >= (0, 11)
    )


def multiprocessors() -> int:
    return int(jax.devices()[0].core_count)


def holds_row(logits: Array) -> bool:
    """Whether two programs on a multiprocessor, one of which computes while the other loads, can each hold a row of (N, V)."""
    width = logits.shape[1]
    return (
        logits.dtype in (jnp.bfloat16, jnp.float16)
        and width % LANES == 0
        and 2 * (2 * width + 2048) <= ON_CHIP
    )


@jax.jit
def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Logits (N, V) and labels (N,) -> the gradient of the sum of the losses, in the place of the logits, and the losses (N,)."""
    rows, width = logits.shape
    programs = 2 * multiprocessors()
    body = partial(_cross_entropy, programs=programs)
    place = jax.new_ref(logits.reshape(rows, width // LANES, LANES))
    nats = gpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(programs,),
        grid_names=("program",),
        num_threads=1,
        thread_name="wg",
        kernel_name="cross_entropy",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )(place, labels)
    gradient = jax.freeze(place).reshape(rows, width)
    return gradient.at[jnp.arange(rows), labels].set(jnp.expm1(-nats).astype(gradient.dtype)), nats


def _cross_entropy(x_ref: Any, label_ref: Any, nats_ref: Any, *, programs: int) -> None:
    """Leaves exp(x - log of the sum) for x. That of the label, less 1 before it is rounded, is left to the caller."""
    rows, height, lanes = x_ref.shape
    parts = [(start, min(LINES, height - start)) for start in range(0, height, LINES)]
    program = lax.axis_index("program")

    def row_of(row: Array, held: Any, loaded: Any) -> None:
        def part(start: int, size: int) -> Array:
            layout = gpu.Layout.WG_STRIDED((size, lanes), 8 if size % 8 == 0 else 1)
            return gpu.load(held.at[pl.ds(start, size)], layout=layout).astype(jnp.float32) * LOG2E

        for i, (start, size) in enumerate(parts):
            gpu.copy_gmem_to_smem(
                x_ref.at[row, pl.ds(start, size)], held.at[pl.ds(start, size)], loaded.at[i]
            )

        label = label_ref[row]
        top, total = jnp.float32(-jnp.inf), jnp.float32(0)
        for i, (start, size) in enumerate(parts):
            gpu.barrier_wait(loaded.at[i])
            x = part(start, size)
            higher = jnp.maximum(top, jnp.max(x))
            total = total * jnp.exp2(top - higher) + jnp.sum(jnp.exp2(x - higher))
            top = higher
        log_total = top + jnp.log(total) * LOG2E
        picked = x_ref[
            row, lax.div(label, jnp.int32(lanes)), lax.rem(label, jnp.int32(lanes))
        ].astype(jnp.float32)
        nats_ref[row] = log_total / LOG2E - picked
        for start, size in parts:
            held[pl.ds(start, size)] = jnp.exp2(part(start, size) - log_total).astype(x_ref.dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(held.at[pl.ds(start, size)], x_ref.at[row, pl.ds(start, size)])
        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def scope(held: Any, loaded: Any) -> None:
        count = lax.div(rows - program + programs - 1, jnp.int32(programs))
        lax.fori_loop(0, count, lambda i, _: row_of(program + i * programs, held, loaded), None)
        gpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        scope,
        held=gpu.SMEM((height, lanes), x_ref.dtype),
        loaded=gpu.Barrier(num_barriers=len(parts)),
        collective_axes="wg",
    )


def can_multiply(x: Array, columns: int) -> bool:
    """Whether tiles divide the product of x (N, D) and a matrix of so many columns."""
    rows, inner = x.shape
    return (
        x.dtype in (jnp.bfloat16, jnp.float16)
        and rows % (2 * ROWS) == 0
        and inner % DEPTH == 0
        and columns % COLUMNS == 0
    )


@jax.jit
def product_gelu(x: Array, kernel: Array, bias: Array) -> tuple[Array, Array]:
    """x (N, D), kernel (D, F), bias (F,) -> gelu(x @ kernel + bias), and the slope of the GELU there."""
    out = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    return tuple(_product("gelu", out, out)(x, kernel, bias))


@jax.jit
def product_slope(g: Array, kernel: Array, slope: Array) -> tuple[Array, Array]:
    """g (N, D), kernel (F, D), slope (N, F) -> (g @ kernel.T) * slope, and the sum of its rows (F,)."""
    rows, columns = slope.shape
    sums = jax.ShapeDtypeStruct((rows // (2 * ROWS), columns), jnp.float32)
    gradient, parts = _product("slope", jax.ShapeDtypeStruct(slope.shape, g.dtype), sums)(
        g, kernel, slope
    )
    return gradient, parts.sum(0)


@jax.jit
def product_exp(x: Array, table: Array, less: Array) -> tuple[Array, Array]:
    """x (N, D), table (V, D), less (N,) -> exp(x @ table.T - less), at most that of CEILING, and the sum of each row (N,), float32."""
    rows, columns = x.shape[0], table.shape[0]
    sums = jax.ShapeDtypeStruct((columns // COLUMNS, rows), jnp.float32)
    shares, parts = _product("exp", jax.ShapeDtypeStruct((rows, columns), x.dtype), sums)(
        x, table, less
    )
    return shares, parts.sum(0)


def _product(end: str, *out_type: jax.ShapeDtypeStruct) -> Any:
    return gpu.kernel(
        partial(_product_kernel, end=end),
        out_type=out_type,
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=4,
        thread_name="wg",
        kernel_name=f"product_{end}",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the kernel has a barrier wherever one warpgroup hands something to another
        ),
    )


def lines() -> Any:
    """How a warpgroup holds part of a tile: what a warp reads or writes at once is two whole lines of 128 bytes. By count, shared memory is
    the busiest part here (the tensor cores alone want three quarters of its speed): this warpgroup goes past it to the memory."""
    return gpu.Layout.TILED(
        gpu.Tiling(((8, PIECE), (2, PIECE), (4,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _product_kernel(a: Any, b: Any, beside: Any, *outs: Any, end: str) -> None:
    """Tiles of the product of a (N, D) and b, and what they become: product_gelu, product_slope, product_exp."""
    (rows, inner), transposed = a.shape, end != "gelu"
    columns = b.shape[0 if transposed else 1]
    pieces, blocks, dtype = inner // DEPTH, COLUMNS // PIECE, a.dtype
    down, across = rows // (2 * ROWS), columns // COLUMNS
    count, together = down * across, math.gcd(down, TOGETHER)
    wg = lax.axis_index("wg")
    number = partial(jnp.array, dtype=jnp.int32)

    def corner(index: Array) -> tuple[Array, Array]:
        """The first row and the first column of a tile."""
        group, within = (
            lax.div(index, number(together * across)),
            lax.rem(index, number(together * across)),
        )
        return (group * together + lax.rem(within, number(together))) * (2 * ROWS), lax.div(
            within, number(together)
        ) * COLUMNS

    def scope(
        a_held: Any, b_held: Any, tile: Any, loaded: Any, used: Any, finished: Any, free: Any
    ) -> None:
        def load(mine: Array, index: Array) -> None:
            row, column = corner(index)

            def one(i: Array, _: None) -> None:
                at = mine * pieces + i
                slot = lax.rem(at, number(STAGES))
                pl.when(at >= STAGES)(lambda: gpu.barrier_wait(used.at[slot]))
                deep, wide = pl.ds(i * DEPTH, DEPTH), pl.ds(column, COLUMNS)
                gpu.copy_gmem_to_smem(
                    a.at[pl.ds(row, 2 * ROWS), deep], a_held.at[slot], loaded.at[slot]
                )
                gpu.copy_gmem_to_smem(
                    b.at[wide, deep] if transposed else b.at[deep, wide],
                    b_held.at[slot],
                    loaded.at[slot],
                )

            lax.fori_loop(0, pieces, one, None)

        def multiply(mine: Array, index: Array) -> None:
            def sum_up(total: Any) -> Array:
                def one(i: Array, _: None) -> None:
                    at = mine * pieces + i
                    slot = lax.rem(at, number(STAGES))
                    gpu.barrier_wait(loaded.at[slot])
                    right = b_held.at[slot]
                    gpu.wgmma(
                        total,
                        a_held.at[slot, pl.ds(wg * ROWS, ROWS)],
                        right.transpose((1, 0)) if transposed else right,
                    )
                    gpu.wgmma_wait(1)
                    pl.when(i > 0)(
                        lambda: gpu.barrier_arrive(
                            used.at[lax.rem(at + STAGES - 1, number(STAGES))]
                        )
                    )

                lax.fori_loop(0, pieces, one, None)
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(used.at[lax.rem(mine * pieces + pieces - 1, number(STAGES))])
                return total[...]

            if end == "exp":
                at = beside.at[pl.ds(corner(index)[0] + wg * ROWS, ROWS)]
                less = gpu.load(at, layout=gpu.Layout.WGMMA.reduce(1), optimized=False)
            total = pl.run_scoped(sum_up, gpu.ACC((ROWS, COLUMNS), jnp.float32))
            pl.when(mine > 0)(lambda: gpu.barrier_wait(free.at[wg]))
            for c in range(blocks):
                x = total[:, c * PIECE : (c + 1) * PIECE]
                tile[wg, c] = (
                    x - lax.broadcast_in_dim(less, x.shape, [0]) if end == "exp" else x
                ).astype(dtype)
            gpu.barrier_arrive(finished.at[wg])

        parts = list(
            itertools.product((0, 1), range(0, ROWS, HEIGHT), range(blocks))
        )  # of a tile: half, first row and columns of it

        def place(index: Array, half: int, r: int, c: int) -> Any:
            row, column = corner(index)
            return pl.ds(row + half * ROWS + r, HEIGHT), pl.ds(column + c * PIECE, PIECE)

        def ahead(fetch: Callable[..., Array], parts_ahead: int) -> Iterator[Array]:
            """What is fetched of each part of a tile, while that of the parts behind it is on its way."""
            fetched = [fetch(*part) for part in parts[:parts_ahead]]
            for i in range(len(parts)):
                fetched += [fetch(*part) for part in parts[i + parts_ahead : i + parts_ahead + 1]]
                yield fetched[i].astype(jnp.float32)

        def product(half: int, r: int, c: int) -> Array:
            """From the place that the multiplying warpgroup left it in, which is free after the last part."""
            if (r, c) == parts[0][1:]:
                gpu.barrier_wait(finished.at[half])
            part = gpu.load(tile.at[half, c, pl.ds(r, HEIGHT)], layout=lines())
            if (r, c) == parts[-1][1:]:
                gpu.barrier_arrive(free.at[half])
            return part

        def end_gelu(mine: Array, index: Array) -> None:
            _, column = corner(index)
            at = [beside.at[pl.ds(column + c * PIECE, PIECE)] for c in range(blocks)]
            vectors = [
                gpu.load(ref, layout=lines().reduce(0), optimized=False).astype(jnp.float32)
                for ref in at
            ]
            biases = [
                gpu.layout_cast(lax.broadcast_in_dim(vector, (HEIGHT, PIECE), [1]), lines())
                for vector in vectors
            ]
            for part, x in zip(parts, ahead(product, 1), strict=True):
                for out, value in zip(outs, gelu_and_slope(x + biases[part[2]]), strict=True):
                    out.at[place(index, *part)][...] = value.astype(dtype)

        def end_slope(mine: Array, index: Array) -> None:
            def slope(*part: int) -> Array:
                return gpu.load(beside.at[place(index, *part)], layout=lines(), optimized=False)

            totals = [jnp.float32(0)] * blocks
            for part, factor, x in zip(parts, ahead(slope, SLOPES), ahead(product, 1), strict=True):
                gradient = x * factor
                outs[0].at[place(index, *part)][...] = gradient.astype(dtype)
                totals[part[2]] += gradient
            row, column = corner(index)
            for c, total in enumerate(totals):
                outs[1].at[lax.div(row, number(2 * ROWS)), pl.ds(column + c * PIECE, PIECE)][
                    ...
                ] = jnp.sum(total, axis=0)

        def end_exp(mine: Array, index: Array) -> None:
            row, column = corner(index)
            total: Any = 0.0
            for part, x in zip(parts, ahead(product, 1), strict=True):
                half, r, c = part
                share = jnp.exp2(jnp.minimum(x, CEILING) * LOG2E)
                outs[0].at[place(index, *part)][...] = share.astype(dtype)
                total = total + share
                if c == blocks - 1:
                    outs[1].at[
                        lax.div(column, number(COLUMNS)), pl.ds(row + half * ROWS + r, HEIGHT)
                    ][...] = jnp.sum(total, axis=1)
                    total = 0.0

        ends = {"gelu": end_gelu, "slope": end_slope, "exp": end_exp}
        for who, registers, work in (
            (wg < 2, REGISTERS[0], multiply),
            (wg == 2, REGISTERS[1], load),
            (wg == 3, REGISTERS[2], ends[end]),
        ):

            @pl.when(who)  # type: ignore[untyped-decorator]
            def _(registers: int = registers, work: Any = work) -> None:
                gpu.set_max_registers(
                    registers, action="increase" if registers > 128 else "decrease"
                )
                gpu.nd_loop((count,), collective_axes="program")(
                    lambda info: work(info.local_index, info.index[0])
                )

    def held(*shape: int, across: int) -> Any:
        """Shared memory, in the order in which the tensor cores and the copies want it."""
        return gpu.SMEM(
            shape,
            dtype,
            transforms=(gpu.TilingTransform((8, across)), gpu.SwizzleTransform(2 * across)),
        )

    pl.run_scoped(
        scope,
        a_held=held(STAGES, 2 * ROWS, DEPTH, across=DEPTH),
        b_held=held(
            *((STAGES, COLUMNS, DEPTH) if transposed else (STAGES, DEPTH, COLUMNS)), across=DEPTH
        ),
        tile=held(2, blocks, ROWS, PIECE, across=PIECE),
        loaded=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        used=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        finished=gpu.Barrier(num_barriers=2),
        free=gpu.Barrier(num_barriers=2),
        collective_axes="wg",
    )


def gelu_and_slope(x: Array, tanh: Callable[[Array], Array] = jnp.tanh) -> tuple[Array, Array]:
    """By the tanh of the hardware: here `approx_math` makes it that, elsewhere the caller does. Compilers leave out what is not used."""
    square = x * x
    share = 0.5 + 0.5 * tanh(
        x * (ROOT + (ROOT * CUBIC) * square)
    )  # its slope: 2 * share * (1 - share) * that of what tanh is of
    y = x * share
    return y, share + (y - y * share) * (2 * ROOT + (6 * ROOT * CUBIC) * square)
