"""The programs of the attention kernels for Hopper GPUs, see `kernels.flash`.

All kernels have the same structure. A program works on one tile at a time. The operands of the tile
itself stay in shared memory (queries; or keys and values for their gradients), and those of the
other side stream past it block by block. The last warpgroup loads, the others compute, `ROWS` rows
of the tile each. Programs are persistent: they load the operands of the next tile while they finish
the last one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.kernels.hopper import (
    LOG2_E,
    int32,
    store_unaligned,
)
from shardwise.kernels.mask import MASKED_SCORE, Mask
from shardwise.kernels.partitioning import Ref, gpu, pl
from shardwise.kernels.platform import multiprocessors

Array = jax.Array
State = TypeVar("State")
Carry: TypeAlias = Any

# Rows that one warpgroup works on: the height of the matmul instruction.
ROWS = 64

# Registers per thread of the warpgroup that loads, and of all warpgroups together.
LOAD_REGISTERS = 24
ALL_REGISTERS = 512


class Tiles(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        warpgroups: the number of computing warpgroups; each has `ROWS` tokens of the tile.
        columns: the number of tokens of a streamed block.
        stages: the number of streamed blocks in shared memory.
        buffers: the number of tiles whose own operands are in shared memory.
    """

    warpgroups: int
    columns: int
    stages: int
    buffers: int = 2

    @property
    def rows(self) -> int:
        """The number of tokens of a tile."""
        return self.warpgroups * ROWS

    @property
    def registers(self) -> int:
        """Registers per thread of a computing warpgroup. The hardware gives them out in eights."""
        return (ALL_REGISTERS - LOAD_REGISTERS) // self.warpgroups // 8 * 8


class BlockRange(NamedTuple):
    """The blocks that a warpgroup visits.

    Attributes:
        load_first: the first block that any warpgroup of the tile visits.
        first: the first block that this one visits.
        full_first: the first of the blocks that need no mask.
        full_end: one past the last of these.
        end: one past the last block that this warpgroup visits.
        load_end: one past the last block that any warpgroup of the tile visits.
    """

    load_first: Array
    first: Array
    full_first: Array
    full_end: Array
    end: Array
    load_end: Array


def call(
    kernel: "type[Kernel]",
    tiles: Tiles,
    mask: Mask,
    key_heads: int,
    outs: tuple[jax.ShapeDtypeStruct | Array, ...],
) -> Callable[..., tuple[Array, ...]]:
    """Return a call of a kernel, with one program on each multiprocessor.

    Args:
        kernel: the kernel.
        tiles: the sizes of its tiles.
        mask: which keys a query attends to.
        key_heads: the number of key heads.
        outs: arrays of the shapes and dtypes of the results.
    """

    def run(*refs: Ref) -> None:
        inputs = refs[: -len(outs)]
        results = refs[-len(outs) :]
        kernel.launch(inputs, results, tiles, mask, key_heads)

    call: Callable[..., tuple[Array, ...]] = gpu.kernel(
        run,
        out_type=tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs),
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name=kernel.name,
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True
        ),
    )
    # From this name, a plan knows that the kernel skips the scores above the diagonal.
    return jax.named_scope("causal" if mask.causal else "full")(call)


def _column(vector: Array, shape: tuple[int, ...]) -> Array:
    """Return a matrix that has `vector` in each column."""
    return lax.broadcast_in_dim(vector, shape, [0])


def _row(vector: Array, shape: tuple[int, ...]) -> Array:
    """Return a matrix that has `vector` in each row."""
    return lax.broadcast_in_dim(vector, shape, [1])


def _zeros(*shape: int) -> Array:
    """Return zeros in the layout of a matmul result."""
    layout = gpu.Layout.WGMMA if len(shape) == 2 else gpu.Layout.WGMMA.reduce(1)
    zeros: Array = gpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    return zeros


def _transpose(block: Ref) -> Ref:
    return block.transpose((1, 0))


def accumulate(body: Callable[..., None], *totals: Array) -> list[Array]:
    """Return `totals` plus the products that `body` adds to accumulators, one for each total."""
    state = [gpu.ACC.init(total) for total in totals]
    return list(pl.run_state(lambda refs: body(*refs))(state))


@dataclass(frozen=True)
class Item:
    """A tile of a head that a program works on.

    Attributes:
        batch: the index of the sequence.
        head: the index of the head: of the query heads, or of the key heads in `KeyGradient`.
        start: the first token of the tile.
        buffer: where the operands of the tile are in shared memory.
        blocks: the blocks to visit.
    """

    batch: Array
    head: Array
    start: Array
    buffer: Array
    blocks: BlockRange


# eq=False: instances hold tracers, which cannot be hashed, and JAX hashes the functions it traces.
@dataclass(frozen=True, eq=False)
class Kernel:
    """One program of a kernel.

    Attributes:
        inputs: the arrays that the kernel reads.
        results: the arrays that it writes.
        ranges: see `block_ranges`.
        segment_ids: the document of each token, (B, T), or None.
        tiles: the sizes of tiles.
        mask: which keys a query attends to.
        key_heads: the number of key heads.
        warpgroup: the index of this warpgroup.
        fixed: the operands of tiles in shared memory, (buffers, rows, K) each.
        fixed_vectors: the numbers for each row of a tile, (buffers, rows) each.
        blocks: the streamed operands, (stages, columns, K) each.
        vectors: the numbers for each token of the streamed operands, (stages, columns) each.
        staging: results on their way to global memory, (rows, K) each.
        fixed_loaded: barrier for each buffer: the operands of the tile have arrived.
        fixed_used: barrier for each buffer: all warpgroups have finished with them.
        loaded: barrier for each stage of each streamed operand: it has arrived.
        used: barrier for each stage of each streamed operand: all warpgroups have read it.
        turn: barrier of the computing warpgroups, see `take_turns`.
    """

    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]
    ranges: Ref
    segment_ids: Ref | None
    tiles: Tiles
    mask: Mask
    key_heads: int
    warpgroup: Array
    fixed: list[Ref]
    fixed_vectors: list[Ref]
    blocks: list[Ref]
    vectors: list[Ref]
    staging: list[Ref]
    fixed_loaded: Ref
    fixed_used: Ref
    loaded: list[Ref]
    used: list[Ref]
    turn: Ref

    # Of each kernel: name; the numbers of inputs without those that describe the mask, of fixed
    # and streamed operands and their vectors, and of results that pass through shared memory.
    name = ""
    num_inputs = 3
    num_fixed = 1
    num_fixed_vectors = 0
    num_blocks = 2
    num_vectors = 0
    num_staging = 1
    # Whether the tiles are tiles of keys.
    of_keys = False
    # Whether one warpgroup multiplies while the other one computes exponentials.
    has_turns = False

    @classmethod
    def launch(
        cls,
        inputs: tuple[Ref, ...],
        results: tuple[Ref, ...],
        tiles: Tiles,
        mask: Mask,
        key_heads: int,
    ) -> None:
        """Allocate shared memory, and run the program."""
        ranges, *ids = inputs[cls.num_inputs :]
        dtype = inputs[0].dtype
        width = inputs[0].shape[3]
        transforms = gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)

        def shared(*shape: int) -> object:
            return gpu.SMEM(shape, dtype, transforms=transforms)

        def run(**scratch: Any) -> None:
            cls(
                inputs=inputs[: cls.num_inputs],
                results=results,
                ranges=ranges,
                segment_ids=ids[0] if ids else None,
                tiles=tiles,
                mask=mask,
                key_heads=key_heads,
                warpgroup=lax.axis_index("wg"),
                **scratch,
            ).run()

        # A vector arrives together with the block that it belongs to.
        arrivals = 2 if cls.num_vectors else 1
        pl.run_scoped(
            run,
            fixed=[shared(tiles.buffers, tiles.rows, width)] * cls.num_fixed,
            fixed_vectors=[gpu.SMEM((tiles.buffers, tiles.rows), jnp.float32)]
            * cls.num_fixed_vectors,
            blocks=[shared(tiles.stages, tiles.columns, width)] * cls.num_blocks,
            vectors=[gpu.SMEM((tiles.stages, tiles.columns), jnp.float32)]
            * cls.num_vectors,
            staging=[shared(tiles.rows, width)] * cls.num_staging,
            fixed_loaded=gpu.Barrier(
                num_arrivals=cls.num_fixed + cls.num_fixed_vectors,
                num_barriers=tiles.buffers,
            ),
            fixed_used=gpu.Barrier(
                num_arrivals=tiles.warpgroups, num_barriers=tiles.buffers
            ),
            loaded=[gpu.Barrier(num_arrivals=arrivals, num_barriers=tiles.stages)]
            * cls.num_blocks,
            used=[gpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages)]
            * cls.num_blocks,
            turn=gpu.Barrier(num_arrivals=tiles.warpgroups),
            collective_axes="wg",
        )

    # Shapes

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return int(self.inputs[0].shape[2]) // self.key_heads

    def keys_and_values(
        self, refs: tuple[Ref, ...], where: Any, head: Array
    ) -> list[Ref]:
        """Return the keys and values, or their gradients, of a key head.

        Args:
            refs: the arrays of keys and values, which may be one with the heads of both.
            where: the indices of the first two dims.
            head: the index of the key head.
        """
        keys, values = refs[0], refs[-1]
        value_head = head + (int(values.shape[2]) - self.key_heads)
        return [keys.at[(*where, head)], values.at[(*where, value_head)]]

    @property
    def width(self) -> int:
        """The width of a head."""
        return int(self.inputs[0].shape[3])

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.width**-0.5)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the scores that a warpgroup computes at once."""
        return ROWS, self.tiles.columns

    # The items of a program

    def run(self) -> None:
        """Do the job of this warpgroup for all items of this program."""
        is_computing = self.warpgroup < self.tiles.warpgroups
        pl.when(is_computing)(self._compute_all)
        pl.when(jnp.logical_not(is_computing))(self._load_all)

    def _compute_all(self) -> None:
        action = "increase" if self.tiles.registers > ALL_REGISTERS // 4 else "decrease"
        gpu.set_max_registers(self.tiles.registers, action=action)
        pl.when(self.warpgroup > 0)(self.take_turns)
        self._for_each_item(self.compute)
        pl.when(self.warpgroup == 0)(self.take_turns)
        gpu.wait_smem_to_gmem(0)

    def _load_all(self) -> None:
        gpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        self._for_each_item(self.load)

    def _for_each_item(self, job: Callable[[Item, Array, Array], Array]) -> None:
        """Call `job(item, count, step)` for each item of this program.

        Items come in pairs of an early and a late tile of a head, because a causal mask makes them
        take the same time together.

        Args:
            job: gets the item, the number of items before it, and the number of blocks before it.
                It returns the number of blocks after it.
        """
        batches, length = (int(n) for n in self.inputs[0].shape[:2])
        heads = self.key_heads if self.of_keys else int(self.inputs[0].shape[2])
        num_tiles = length // self.tiles.rows
        total = batches * heads * num_tiles
        programs = multiprocessors()
        program = lax.axis_index("program")
        pairs = (total + 1) // 2
        count = 2 * lax.div(pairs - program + programs - 1, int32(programs))
        last = ((lax.div(count, int32(2)) - 1) * programs + program) * 2 + 1
        count = count - (last >= total).astype(jnp.int32)

        def locate(i: Array) -> tuple[Array, Array, Array]:
            pair = lax.div(i, int32(2)) * programs + program
            index = 2 * pair + lax.rem(i, int32(2))
            place = lax.rem(index, int32(num_tiles))
            row = lax.div(index, int32(num_tiles))
            half = lax.div(place, int32(2))
            is_late = lax.rem(place, int32(2)) == 1
            tile = jnp.where(is_late, num_tiles - 1 - half, half)
            return lax.div(row, int32(heads)), lax.rem(row, int32(heads)), tile

        def read_range(i: Array) -> BlockRange:
            batch, _, tile = locate(i)
            table = batch if self.ranges.shape[0] > 1 else int32(0)
            # The loading warpgroup reads the fields that all warpgroups of the tile share.
            warpgroup = jnp.minimum(self.warpgroup, self.tiles.warpgroups - 1)
            row = tile * self.tiles.warpgroups + warpgroup
            return BlockRange(*(self.ranges[table, row, field] for field in range(6)))

        def do_item(i: Array, carry: tuple[Array, BlockRange]) -> Carry:
            step, blocks = carry
            # Read ahead, so that no item waits for it.
            next_blocks = read_range(jnp.minimum(i + 1, count - 1))
            batch, head, tile = locate(i)
            item = Item(
                batch=batch,
                head=head,
                start=tile * self.tiles.rows,
                buffer=lax.rem(i, int32(self.tiles.buffers)),
                blocks=blocks,
            )
            return job(item, i, step), next_blocks

        def do_items() -> None:
            lax.fori_loop(0, count, do_item, (int32(0), read_range(int32(0))))

        pl.when(count > 0)(do_items)

    # The warpgroup that loads

    def fixed_sources(self, item: Item) -> list[Ref]:
        """Return what is loaded once for an item: operands, and then vectors."""
        raise NotImplementedError

    def block_sources(self, item: Item, head: Array, block: Array) -> list[list[Ref]]:
        """Return what is loaded for a block: operands, each with its vector if it has one."""
        raise NotImplementedError

    def load(self, item: Item, count: Array, step: Array) -> Array:
        """Load the operands of an item."""
        barriers = [x.at[item.buffer] for x in (self.fixed_used, self.fixed_loaded)]
        pl.when(count >= self.tiles.buffers)(partial(gpu.barrier_wait, barriers[0]))
        targets = [*self.fixed, *self.fixed_vectors]
        for source, target in zip(self.fixed_sources(item), targets, strict=True):
            gpu.copy_gmem_to_smem(source, target.at[item.buffer], barriers[1])

        def load_block(head: Array, block: Array, step: Array) -> Array:
            slot = lax.rem(step, int32(self.tiles.stages))
            sources = self.block_sources(item, head, block)
            for i, parts in enumerate(sources):
                used = self.used[i].at[slot]
                loaded = self.loaded[i].at[slot]
                pl.when(step >= self.tiles.stages)(partial(gpu.barrier_wait, used))
                targets = [self.blocks[i], *self.vectors[i : i + 1]]
                for source, target in zip(parts, targets, strict=True):
                    gpu.copy_gmem_to_smem(source, target.at[slot], loaded)
            return step + 1

        def load_blocks(head: Array, step: Array) -> Array:
            first, end = item.blocks.load_first, item.blocks.load_end
            result: Array = lax.fori_loop(first, end, partial(load_block, head), step)
            return result

        return self.for_each_head(load_blocks, step)

    def for_each_head(
        self, body: Callable[[Array, State], State], state: State
    ) -> State:
        """Loop over the streamed heads of an item."""
        return body(int32(0), state)

    # The warpgroups that compute

    def compute(self, item: Item, count: Array, step: Array) -> Array:
        """Compute and store the results of an item."""
        raise NotImplementedError

    @property
    def rows(self) -> Any:
        """The part of the tile that this warpgroup works on."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def wait_fixed(self, item: Item) -> list[Ref]:
        """Wait for the operands of a tile, and return this warpgroup's part of them."""
        gpu.barrier_wait(self.fixed_loaded.at[item.buffer])
        return [x.at[item.buffer, self.rows] for x in self.fixed]

    def my_tokens(self, item: Item) -> Any:
        """Return the tokens of the rows that this warpgroup works on."""
        return pl.ds(item.start + self.warpgroup * ROWS, ROWS)

    def for_each_block(
        self,
        item: Item,
        body: Callable[[Array, Array, bool, Carry], Carry],
        step: Array,
        carry: Carry,
    ) -> tuple[Array, Carry]:
        """Loop over the blocks of an item.

        Args:
            item: the item.
            body: gets the block, its slot in shared memory, whether it needs a mask, and the carry.
            step: the number of blocks before.
            carry: what `body` returns.

        Returns:
            The number of blocks after, and the last carry.
        """

        def do_block(
            is_masked: bool, block: Array, state: tuple[Array, Carry]
        ) -> tuple[Array, Carry]:
            step, carry = state
            slot = lax.rem(step, int32(self.tiles.stages))
            return step + 1, body(block, slot, is_masked, carry)

        def skip_block(_: Array, step: Array) -> Array:
            slot = lax.rem(step, int32(self.tiles.stages))
            for operand in range(self.num_blocks):
                gpu.barrier_wait(self.loaded[operand].at[slot])
                self.release(operand, slot)
                # Two turns per block, as many as a warpgroup takes that computes it.
                self.take_turns()
            return step + 1

        blocks = item.blocks
        is_partial = self.segment_ids is not None or self.mask.window is not None
        has_early = is_partial or (self.mask.causal and self.of_keys)
        has_late = is_partial or (self.mask.causal and not self.of_keys)
        masked, unmasked = partial(do_block, True), partial(do_block, False)
        step = lax.fori_loop(blocks.load_first, blocks.first, skip_block, step)
        state = step, carry
        if has_early:
            state = lax.fori_loop(blocks.first, blocks.full_first, masked, state)
        state = lax.fori_loop(blocks.full_first, blocks.full_end, unmasked, state)
        if has_late:
            state = lax.fori_loop(blocks.full_end, blocks.end, masked, state)
        step, carry = state
        step = lax.fori_loop(blocks.end, blocks.load_end, skip_block, step)
        return step, carry

    def visible(self, item: Item, block: Array) -> Array:
        """Return which pairs of this warpgroup's rows and a block's tokens are visible."""
        rows = item.start + self.warpgroup * ROWS
        columns = block * self.tiles.columns
        iota = partial(
            gpu.broadcasted_iota, jnp.int32, self.shape, layout=gpu.Layout.WGMMA
        )
        # The distance of the key before the query.
        distance = (iota(0) - iota(1)) + (rows - columns)
        if self.of_keys:
            distance = -distance
        conditions = []
        if self.mask.causal:
            conditions.append(distance >= 0)
        if self.mask.window is not None:
            conditions.append(distance < self.mask.window)
            if not self.mask.causal:
                conditions.append(distance > -self.mask.window)
        if self.segment_ids is not None:
            ids = [
                gpu.load(
                    self.segment_ids.at[item.batch, tokens],
                    layout=gpu.Layout.WGMMA.reduce(dim),
                    optimized=False,
                )
                for dim, tokens in (
                    (1, self.my_tokens(item)),
                    (0, pl.ds(columns, self.tiles.columns)),
                )
            ]
            conditions.append(_column(ids[0], self.shape) == _row(ids[1], self.shape))
        result: Array = conditions[0]
        for condition in conditions[1:]:
            result &= condition
        return result

    def take_turns(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Let the other warpgroup use the tensor cores, and wait until they are free.

        Args:
            meanwhile: what to do before waiting.
        """
        if self.has_turns:
            gpu.barrier_arrive(self.turn)
        meanwhile()
        if self.has_turns:
            gpu.barrier_wait(self.turn)

    def weights(
        self, item: Item, block: Array, scores: Array, is_masked: bool, log_sums: Array
    ) -> Array:
        """Return the attention weights.

        Args:
            item: the item.
            block: the streamed block.
            scores: the products of queries and keys.
            is_masked: whether some of them are not visible.
            log_sums: the logarithms of the sums of exponentials, as a matrix.
        """
        if is_masked:
            scores = jnp.where(self.visible(item, block), scores, -jnp.inf)
        return jnp.exp2(scores * (self.scale * LOG2_E) - log_sums)

    def release(self, operand: int, slot: Array) -> None:
        """Say that this warpgroup has read a block."""
        gpu.barrier_arrive(self.used[operand].at[slot])

    def store(self, values: list[Array], targets: list[Ref]) -> None:
        """Write results to global memory, while the next item begins."""
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        for buffer, value in zip(self.staging, values, strict=True):
            buffer.at[self.rows][...] = value.astype(buffer.dtype)
        gpu.commit_smem()
        for buffer, target in zip(self.staging, targets, strict=True):
            gpu.copy_smem_to_gmem(buffer.at[self.rows], target)


class QueryTiles(Kernel):
    """A kernel whose tiles are tiles of queries."""

    def block_sources(self, item: Item, head: Array, block: Array) -> list[list[Ref]]:
        """Keys and values."""
        tokens = pl.ds(block * self.tiles.columns, self.tiles.columns)
        head = lax.div(item.head, int32(self.group))
        where = item.batch, tokens
        return [[x] for x in self.keys_and_values(self.inputs[1:3], where, head)]


class Forward(QueryTiles):
    """Outputs, and the logarithms of the sums of exponentials."""

    name = "attention_forward"
    has_turns = True

    def fixed_sources(self, item: Item) -> list[Ref]:
        """Queries."""
        tokens = pl.ds(item.start, self.tiles.rows)
        return [self.inputs[0].at[item.batch, tokens, item.head]]

    def compute(self, item: Item, count: Array, step: Array) -> Array:
        """Compute one tile of outputs."""
        (query,) = self.wait_fixed(item)
        keys, values = self.blocks
        factor = self.scale * LOG2_E

        def attend(
            block: Array,
            slot: Array,
            is_masked: bool,
            carry: tuple[Array, Array, Array],
        ) -> tuple[Array, Array, Array]:
            total, maximum, weighted = carry
            gpu.barrier_wait(self.loaded[0].at[slot])

            def multiply(scores: Ref) -> Array:
                gpu.wgmma(scores, query, _transpose(keys.at[slot]))
                self.take_turns()
                product: Array = scores[...]
                return product

            scores = pl.run_scoped(multiply, gpu.ACC(self.shape, jnp.float32))
            self.release(0, slot)
            if is_masked:
                scores = jnp.where(self.visible(item, block), scores, -jnp.inf)
            new_maximum = jnp.maximum(maximum, scores.max(axis=1) * factor)
            decay = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(scores * factor - _column(new_maximum, self.shape))
            total = total * decay + weights.sum(axis=1)
            weights = weights.astype(query.dtype)
            weighted = weighted * _column(decay, weighted.shape)
            # All of it is done before it is the other warpgroup's turn.
            total, weighted, weights = lax.optimization_barrier(
                (total, weighted, weights)
            )
            self.take_turns(partial(gpu.barrier_wait, self.loaded[1].at[slot]))
            (weighted,) = accumulate(
                lambda ref: gpu.wgmma(ref, weights, values.at[slot]), weighted
            )
            self.release(1, slot)
            return total, new_maximum, weighted

        carry = (
            _zeros(ROWS),
            # Finite, because the first block may have nothing that a row can see.
            _zeros(ROWS) + MASKED_SCORE,
            _zeros(ROWS, self.width),
        )
        step, (total, maximum, weighted) = self.for_each_block(
            item, attend, step, carry
        )
        gpu.barrier_arrive(self.fixed_used.at[item.buffer])
        tokens = self.my_tokens(item)
        out, log_sums = self.results
        inverse = 1 / total
        self.store(
            [weighted * _column(inverse, weighted.shape)],
            [out.at[item.batch, tokens, item.head]],
        )
        store_unaligned(
            log_sums.at[item.batch, item.head, tokens],
            maximum + jnp.log(total) * LOG2_E,
        )
        return step


class QueryGradient(QueryTiles):
    """The gradient of the queries."""

    name = "attention_dq"
    num_inputs = 6
    num_fixed = 2
    num_fixed_vectors = 2

    def fixed_sources(self, item: Item) -> list[Ref]:
        """Queries and the gradients of the outputs, and their vectors."""
        tokens = pl.ds(item.start, self.tiles.rows)
        query, _, _, grad, *vectors = self.inputs
        return [
            *(x.at[item.batch, tokens, item.head] for x in (query, grad)),
            *(x.at[item.batch, item.head, tokens] for x in vectors),
        ]

    def compute(self, item: Item, count: Array, step: Array) -> Array:
        """Compute one tile of gradients of queries."""
        query, grad = self.wait_fixed(item)
        keys, values = self.blocks
        log_sums, dots = (
            gpu.load(x.at[item.buffer, self.rows], layout=gpu.Layout.WGMMA.reduce(1))
            for x in self.fixed_vectors
        )

        def add_block(
            block: Array, slot: Array, is_masked: bool, total: Array
        ) -> Array:
            gpu.barrier_wait(self.loaded[0].at[slot])
            gpu.barrier_wait(self.loaded[1].at[slot])

            def multiply(scores: Ref, dweights: Ref) -> Array:
                gpu.wgmma(scores, query, _transpose(keys.at[slot]))
                gpu.wgmma(dweights, grad, _transpose(values.at[slot]))
                # The second matmul is still running.
                x = gpu.wgmma_accumulator_load(scores, wait_n=1)
                weights = self.weights(
                    item, block, x, is_masked, _column(log_sums, self.shape)
                )
                product: Array = dweights[...]
                return weights * (product - _column(dots, self.shape))

            dscores = pl.run_scoped(multiply, *[gpu.ACC(self.shape, jnp.float32)] * 2)
            self.release(1, slot)
            dscores = dscores.astype(query.dtype)
            (total,) = accumulate(
                lambda total: gpu.wgmma(total, dscores, keys.at[slot]), total
            )
            self.release(0, slot)
            return total

        zeros = _zeros(ROWS, self.width)
        step, total = self.for_each_block(item, add_block, step, zeros)
        gpu.barrier_arrive(self.fixed_used.at[item.buffer])
        (out,) = self.results
        where = item.batch, self.my_tokens(item), item.head
        self.store([total * self.scale], [out.at[where]])
        return step


class KeyGradient(Kernel):
    """The gradients of keys and values."""

    name = "attention_dkv"
    num_inputs = 6
    num_fixed = 2
    num_vectors = 2
    num_staging = 2
    of_keys = True

    def fixed_sources(self, item: Item) -> list[Ref]:
        """Keys and values."""
        where = item.batch, pl.ds(item.start, self.tiles.rows)
        return self.keys_and_values(self.inputs[1:3], where, item.head)

    def block_sources(self, item: Item, head: Array, block: Array) -> list[list[Ref]]:
        """Queries and the gradients of the outputs, with their vectors."""
        tokens = pl.ds(block * self.tiles.columns, self.tiles.columns)
        query, _, _, grad, log_sums, dots = self.inputs
        head = item.head * self.group + head
        return [
            [x.at[item.batch, tokens, head], vector.at[item.batch, head, tokens]]
            for x, vector in ((query, log_sums), (grad, dots))
        ]

    def for_each_head(
        self, body: Callable[[Array, State], State], state: State
    ) -> State:
        """Loop over the query heads that share the key head of an item."""
        if self.group == 1:
            return body(int32(0), state)
        return cast(State, lax.fori_loop(0, self.group, body, state))

    def compute(self, item: Item, count: Array, step: Array) -> Array:
        """Compute one tile of gradients of keys and values."""
        key, value = self.wait_fixed(item)
        queries, grads = self.blocks

        def vector(operand: int, slot: Array) -> Array:
            """Return the streamed numbers for each token of a block, as a matrix."""
            where = self.vectors[operand].at[slot]
            loaded = gpu.load(where, layout=gpu.Layout.WGMMA.reduce(0))
            return _row(loaded, self.shape)

        def add_block(
            block: Array, slot: Array, is_masked: bool, totals: list[Array]
        ) -> list[Array]:
            gpu.barrier_wait(self.loaded[0].at[slot])
            gpu.barrier_wait(self.loaded[1].at[slot])

            def add_products(
                dkey: Ref, dvalue: Ref, scores: Ref, dweights: Ref
            ) -> None:
                # All of these are transposed: a row for each key. The tensor cores always have
                # the next matmul while the other units work on the result of the last one.
                gpu.wgmma(scores, key, _transpose(queries.at[slot]))
                gpu.wgmma(dweights, value, _transpose(grads.at[slot]))
                x = gpu.wgmma_accumulator_load(scores, wait_n=1)
                # Loaded as late as possible: there are no registers to spare.
                weights = self.weights(item, block, x, is_masked, vector(0, slot))
                gpu.wgmma(dvalue, weights.astype(key.dtype), grads.at[slot])
                product = gpu.wgmma_accumulator_load(dweights, wait_n=1)
                dscores = weights * (product - vector(1, slot))
                gpu.wgmma(dkey, dscores.astype(key.dtype), queries.at[slot])
                gpu.wgmma_wait(1)
                self.release(1, slot)

            def multiply(*totals: Ref) -> None:
                products = [gpu.ACC(self.shape, jnp.float32)] * 2
                pl.run_scoped(partial(add_products, *totals), *products)

            totals = accumulate(multiply, *totals)
            self.release(0, slot)
            return totals

        def add_head(
            _: Array, state: tuple[Array, list[Array]]
        ) -> tuple[Array, list[Array]]:
            return self.for_each_block(item, add_block, *state)

        zeros = [_zeros(ROWS, self.width)] * 2
        step, (dkey, dvalue) = self.for_each_head(add_head, (step, zeros))
        gpu.barrier_arrive(self.fixed_used.at[item.buffer])
        where = item.batch, self.my_tokens(item)
        targets = self.keys_and_values(self.results, where, item.head)
        self.store([dkey * self.scale, dvalue], targets)
        return step
