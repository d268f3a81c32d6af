"""Kernels for Hopper GPUs (H100, H200) in which arithmetic and memory work at the same time, written in Mosaic GPU.

Two passes over large arrays are saved that XLA and Triton make. The loss holds a row of the logits on chip while it sums
and divides: read once, written once. A product is followed by GELU (or by its slope, in the backward pass) before it leaves
the chip: of the four warpgroups of a program two multiply, one loads, and one works on the tile that is done. In jax before
0.11 Mosaic GPU has other names; there, and for shapes that do not fit, the callers have other kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.models.kernels import gpu, pl

Array = jax.Array
ROOT, CUBIC = 0.7978845608028654, 0.044715  # of the GELU: the root of 2 / pi
LOG2E = 1.4426950408889634
LANES = 128  # a row of logits is worked on in lines of so many
LINES = 64  # at a time
ON_CHIP = 227 * 1024  # bytes that the programs on one multiprocessor share
ROWS, COLUMNS, DEPTH = 128, 128, 64  # of the tile of a warpgroup that multiplies; columns of its factors at a time
STAGES = 3  # pieces of the factors that are loaded ahead
PIECE = 64  # rows and columns that the last warpgroup works on at once
REGISTERS = 168, 24, 152  # of a thread that multiplies, loads, and ends; 128 on average


def is_here() -> bool:
    device = jax.devices()[0]
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0" and version >= (0, 11)


def multiprocessors() -> int:
    return int(jax.devices()[0].core_count)


def holds_row(logits: Array) -> bool:
    """Whether two programs on a multiprocessor, one of which computes while the other loads, can each hold a row of (N, V)."""
    width = logits.shape[1]
    return logits.dtype in (jnp.bfloat16, jnp.float16) and width % LANES == 0 and 2 * (2 * width + 2048) <= ON_CHIP


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
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup, approx_math=True),
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
            gpu.copy_gmem_to_smem(x_ref.at[row, pl.ds(start, size)], held.at[pl.ds(start, size)], loaded.at[i])
        label = label_ref[row]
        top, total = jnp.float32(-jnp.inf), jnp.float32(0)
        for i, (start, size) in enumerate(parts):
            gpu.barrier_wait(loaded.at[i])
            x = part(start, size)
            higher = jnp.maximum(top, jnp.max(x))
            total = total * jnp.exp2(top - higher) + jnp.sum(jnp.exp2(x - higher))
            top = higher
        log_total = top + jnp.log(total) * LOG2E
        picked = x_ref[row, lax.div(label, jnp.int32(lanes)), lax.rem(label, jnp.int32(lanes))].astype(jnp.float32)
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

    pl.run_scoped(scope, held=gpu.SMEM((height, lanes), x_ref.dtype), loaded=gpu.Barrier(num_barriers=len(parts)), collective_axes="wg")


def can_multiply(x: Array, columns: int) -> bool:
    """Whether tiles divide the product of x (N, D) and a matrix of so many columns."""
    rows, inner = x.shape
    return x.dtype in (jnp.bfloat16, jnp.float16) and rows % (2 * ROWS) == 0 and inner % DEPTH == 0 and columns % COLUMNS == 0


@jax.jit
def product_gelu(x: Array, kernel: Array, bias: Array) -> tuple[Array, Array]:
    """x (N, D), kernel (D, F), bias (F,) -> x @ kernel, and gelu(x @ kernel + bias)."""
    out = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), x.dtype)
    return tuple(_product(partial(_product_kernel, back=False), (out, out), "product_gelu")(x, kernel, bias))


@jax.jit
def product_slope(g: Array, kernel: Array, bias: Array, product: Array) -> tuple[Array, Array]:
    """The gradient g (N, D) of gelu(product + bias) @ kernel, with kernel (F, D) -> that of the product (N, F) and of the bias (F,)."""
    rows, columns = product.shape
    sums = jax.ShapeDtypeStruct((rows // (2 * ROWS), columns), jnp.float32)
    kernel_function = partial(_product_kernel, back=True)
    gradient, parts = _product(kernel_function, (jax.ShapeDtypeStruct(product.shape, g.dtype), sums), "product_slope")(
        g, kernel, bias, product
    )
    return gradient, parts.sum(0)


def _product(body: Any, out_type: Any, name: str) -> Any:
    return gpu.kernel(
        body,
        out_type=out_type,
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=4,
        thread_name="wg",
        kernel_name=name,
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True),
    )


def _product_kernel(a: Any, b: Any, bias: Any, *rest: Any, back: bool) -> None:
    """Forward: a (N, D) @ b (D, F) as it is, and its GELU. Back: a (N, D) @ b.T, times the slope of the GELU; b is (F, D)."""
    (rows, inner), columns = a.shape, b.shape[0] if back else b.shape[1]
    pieces, dtype = inner // DEPTH, a.dtype
    wg = lax.axis_index("wg")
    number = partial(jnp.array, dtype=jnp.int32)

    def tiles(body: Any) -> None:
        """`body(which of mine, first row, first column)` for every tile of this program."""

        @gpu.nd_loop((rows // (2 * ROWS) * (columns // COLUMNS),), collective_axes="program")  # type: ignore[untyped-decorator]
        def _(info: Any) -> None:
            across = number(columns // COLUMNS)
            body(info.local_index, lax.div(info.index[0], across) * (2 * ROWS), lax.rem(info.index[0], across) * COLUMNS)

    def scope(a_held: Any, b_held: Any, done: Any, beside: Any, loaded: Any, used: Any, finished: Any, free: Any, arrived: Any) -> None:
        def load(mine: Array, row: Array, column: Array) -> None:
            def one(i: Array, _: None) -> None:
                at = mine * pieces + i
                slot = lax.rem(at, number(STAGES))
                pl.when(at >= STAGES)(lambda: gpu.barrier_wait(used.at[slot]))
                deep, wide = pl.ds(i * DEPTH, DEPTH), pl.ds(column, COLUMNS)
                gpu.copy_gmem_to_smem(a.at[pl.ds(row, 2 * ROWS), deep], a_held.at[slot], loaded.at[slot])
                gpu.copy_gmem_to_smem(b.at[wide, deep] if back else b.at[deep, wide], b_held.at[slot], loaded.at[slot])

            lax.fori_loop(0, pieces, one, None)

        def multiply(mine: Array, row: Array, column: Array) -> None:
            def sum_up(total: Any) -> Array:
                def one(i: Array, _: None) -> None:
                    at = mine * pieces + i
                    slot = lax.rem(at, number(STAGES))
                    gpu.barrier_wait(loaded.at[slot])
                    right = b_held.at[slot]
                    gpu.wgmma(total, a_held.at[slot, pl.ds(wg * ROWS, ROWS)], right.transpose((1, 0)) if back else right)
                    gpu.wgmma_wait(1)
                    pl.when(i > 0)(lambda: gpu.barrier_arrive(used.at[lax.rem(at + STAGES - 1, number(STAGES))]))

                lax.fori_loop(0, pieces, one, None)
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(used.at[lax.rem(mine * pieces + pieces - 1, number(STAGES))])
                return total[...]

            tile = pl.run_scoped(sum_up, gpu.ACC((ROWS, COLUMNS), jnp.float32))
            pl.when(mine > 0)(lambda: gpu.barrier_wait(free.at[wg]))
            for i in range(COLUMNS // PIECE):
                done[wg, i] = tile[:, i * PIECE : (i + 1) * PIECE].astype(dtype)
            gpu.commit_smem()
            gpu.barrier_arrive(finished.at[wg])

        def end(_: Array, row: Array, column: Array) -> None:
            # Columns first: the sums over the rows of both tiles are then finished one after the other.
            work = [(half, r, c) for c in range(COLUMNS // PIECE) for half in (0, 1) for r in range(ROWS // PIECE)]
            biases = [
                gpu.load(bias.at[pl.ds(column + c * PIECE, PIECE)], layout=gpu.Layout.WGMMA.reduce(0), optimized=False)
                for c in range(COLUMNS // PIECE)
            ]

            def place(half: int, r: int, c: int) -> Any:
                return pl.ds(row + half * ROWS + r * PIECE, PIECE), pl.ds(column + c * PIECE, PIECE)

            def fetch(i: int) -> None:
                if back and i < len(work):
                    gpu.copy_gmem_to_smem(rest[0].at[place(*work[i])], beside.at[i % 2], arrived.at[i % 2])

            fetch(0)
            fetch(1)
            total = None
            for i, (half, r, c) in enumerate(work):
                if c == r == 0:
                    gpu.barrier_wait(finished.at[half])
                    for at in range(COLUMNS // PIECE) if not back else ():
                        both = pl.ds(row + half * ROWS, ROWS), pl.ds(column + at * PIECE, PIECE)
                        gpu.copy_smem_to_gmem(done.at[half, at], rest[0].at[both])
                lines = pl.ds(r * PIECE, PIECE)
                x = done[half, c, lines].astype(jnp.float32)
                added = lax.broadcast_in_dim(biases[c].astype(jnp.float32), (PIECE, PIECE), [1])
                if back:
                    gpu.barrier_wait(arrived.at[i % 2])
                    x = x * gelu_slope(beside[i % 2].astype(jnp.float32) + added)
                    done[half, c, lines] = x.astype(dtype)
                    gpu.commit_smem()
                    gpu.copy_smem_to_gmem(done.at[half, c, lines], rest[1].at[place(half, r, c)])
                    fetch(i + 2)
                    total = x if total is None else total + x
                    if (half, r) == work[-1][:2]:
                        rest[2].at[lax.div(row, number(2 * ROWS)), pl.ds(column + c * PIECE, PIECE)][...] = jnp.sum(total, axis=0)
                        total = None
                else:
                    gpu.wait_smem_to_gmem(1, wait_read_only=True)
                    beside[i % 2] = gelu(x + added).astype(dtype)
                    gpu.commit_smem()
                    gpu.copy_smem_to_gmem(beside.at[i % 2], rest[1].at[place(half, r, c)])
                if (c, r) == (work[-1][2], work[-1][1]):
                    gpu.wait_smem_to_gmem(0, wait_read_only=True)
                    gpu.barrier_arrive(free.at[half])

        for who, change, registers, what in (
            (wg < 2, "increase", REGISTERS[0], multiply),
            (wg == 2, "decrease", REGISTERS[1], load),
            (wg == 3, "increase", REGISTERS[2], end),
        ):

            @pl.when(who)  # type: ignore[untyped-decorator]
            def _(change: str = change, registers: int = registers, what: Any = what) -> None:
                gpu.set_max_registers(registers, action=change)
                tiles(what)

    held = partial(gpu.SMEM, dtype=dtype, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)))
    pl.run_scoped(
        scope,
        a_held=held((STAGES, 2 * ROWS, DEPTH)),
        b_held=held((STAGES, COLUMNS, DEPTH) if back else (STAGES, DEPTH, COLUMNS)),
        done=held((2, COLUMNS // PIECE, ROWS, PIECE)),
        beside=held((2, PIECE, PIECE)),
        loaded=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        used=gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        finished=gpu.Barrier(num_barriers=2),
        free=gpu.Barrier(num_barriers=2),
        arrived=gpu.Barrier(num_barriers=2),
        collective_axes="wg",
    )


def gelu(x: Array, tanh: Callable[[Array], Array] = jnp.tanh) -> Array:
    """By the tanh of the hardware: here `approx_math` makes it that, elsewhere the caller does."""
    half = 0.5 * x
    return half + half * tanh(x * (ROOT + (ROOT * CUBIC) * (x * x)))


def gelu_slope(x: Array, tanh: Callable[[Array], Array] = jnp.tanh) -> Array:
    """The derivative of `gelu`."""
    square = x * x
    t = tanh(x * (ROOT + (ROOT * CUBIC) * square))
    return 0.5 + 0.5 * t + (0.5 * x) * (1 - t * t) * (ROOT + (3 * ROOT * CUBIC) * square)
