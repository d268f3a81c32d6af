"""The attention kernels for Hopper GPUs, in the interpreter of Mosaic GPU.

`python -m benchmarks.attention` compares them with plain JAX on a GPU. Before jax 0.12 the
interpreter cannot run them, so only the parts around the kernels are tested.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardwise import make_mesh
from shardwise.flops import count_flops, count_kernels
from shardwise.kernels import attention, flash, flash_kernels
from shardwise.kernels.flash import ROWS, BlockRange, Tiles, block_ranges
from shardwise.kernels.mask import Mask
from shardwise.models import gpt
from shardwise.models.gpt import GPTConfig

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
needs_interpreter = pytest.mark.skipif(
    VERSION < (0, 12), reason="the interpreter came with jax 0.12"
)

LENGTH = 512
MASKS = (Mask(), Mask(False), Mask(True, 100), Mask(False, 100), Mask(True, 1))


def documents(mean: int, in_order: bool = True) -> np.ndarray:
    """Return segment ids (2, T) of documents of random lengths."""
    ends = np.random.default_rng(0).random((2, LENGTH)) < 1 / mean
    ids = np.cumsum(ends, axis=1).astype(np.int32)
    return ids if in_order else ids % 3


IDS = {
    "one document": None,
    "long documents": documents(150),
    "short documents": documents(5),
    "equal ids apart": documents(60, in_order=False),
}


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ranges_cover_what_is_visible(mask, ids, of_keys):
    """All visible pairs are visited, and blocks without a mask are visible completely."""
    tiles = Tiles(2, 64, 2)
    table = block_ranges(
        tiles, mask, LENGTH, None if ids is None else jnp.asarray(ids), of_keys=of_keys
    )
    position = jnp.arange(LENGTH)
    visible = np.asarray(mask.visible(position, position))[None]
    if ids is not None:
        visible = visible & (ids[:, :, None] == ids[:, None])
    if of_keys:
        visible = visible.swapaxes(1, 2)
    assert table.shape == (len(visible), LENGTH // ROWS, 6)
    for batch, row in itertools.product(range(len(visible)), range(LENGTH // ROWS)):
        blocks = BlockRange(*np.asarray(table[batch, row]).tolist())
        assert list(blocks[1:5]) == sorted(blocks[1:5])
        rows = visible[batch, row * ROWS : (row + 1) * ROWS]
        columns = np.flatnonzero(rows.any(0)) // tiles.columns
        assert blocks.first <= columns.min()
        assert columns.max() < blocks.end
        if mask.window is None and (ids is None or ids is not IDS["equal ids apart"]):
            # Nothing is visited in vain.
            assert (blocks.first, blocks.end) == (columns.min(), columns.max() + 1)
        full = slice(blocks.full_first * tiles.columns, blocks.full_end * tiles.columns)
        assert rows[:, full].all()
        pair = table[batch, row // 2 * 2 : row // 2 * 2 + 2]
        assert blocks.load_first == pair[:, 1].min()
        assert blocks.load_end == pair[:, 4].max()


@pytest.mark.parametrize("of_keys", [False, True])
def test_only_the_side_with_a_mask_has_masked_blocks(of_keys):
    """The kernels leave out the loop over masked blocks before, or after, the unmasked ones."""
    table = block_ranges(Tiles(2, 64, 2), Mask(), LENGTH, of_keys=of_keys)[0]
    blocks = BlockRange(*table.T)
    if of_keys:
        assert (blocks.full_end == blocks.end).all()
        assert (blocks.full_first - blocks.first == 1).all()
    else:
        assert (blocks.full_first == blocks.first).all()
        assert (blocks.end - blocks.full_end == 1).all()


def test_registers_of_all_warpgroups_fit():
    """A multiprocessor has 512 registers for each of 128 threads, and divides them by 8."""
    for tiles in itertools.chain(*flash.TILES.values()):
        assert tiles.registers % 8 == 0
        used = tiles.warpgroups * tiles.registers + flash_kernels.LOAD_REGISTERS
        assert used <= flash_kernels.ALL_REGISTERS


@pytest.fixture
def interpreted(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    multiply = callbacks.wgmma

    def accumulate(body, *totals):
        """Add to zeros instead of to the totals, which the interpreter cannot (jax 0.12.0)."""

        def run(*refs):
            body(*refs)
            return [total + ref[...] for total, ref in zip(totals, refs, strict=True)]

        zeros = [mosaic_gpu.ACC(total.shape, jnp.float32) for total in totals]
        return pallas.run_scoped(run, *zeros)

    def wgmma(*, a_allocation_key_as_array, **args):
        """Multiply an operand in registers too, which the interpreter cannot (jax 0.12.0)."""
        left = a_allocation_key_as_array
        if left.ndim == 1:
            return multiply(a_allocation_key_as_array=left, **args)
        memory = callbacks._get_shared_memory()

        def locate(name):
            array = args[f"{name}_allocation_key_as_array"]
            key = callbacks.HostAllocationKey.from_array(array)
            transforms = callbacks._remove_noop_transforms(args[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        right, total = (
            memory.get_buffer_content(*locate(name), args["thread"])[0]
            for name in ("b", "acc")
        )
        total = total + np.matmul(np.asarray(left), right, dtype=total.dtype)
        memory.store_buffer_content(*locate("acc"), total, args["thread"])
        return args["token"]

    monkeypatch.setattr(callbacks, "wgmma", wgmma)
    monkeypatch.setattr(flash_kernels, "accumulate", accumulate)
    monkeypatch.setattr(flash_kernels, "multiprocessors", lambda: 2)
    jax.clear_caches()
    with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams()):
        yield
    jax.clear_caches()


def plain_attention(q, k, v, ids, mask):
    """Attention in float32, with all scores in memory."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[3] ** -0.5
    position = jnp.arange(q.shape[1])
    visible = mask.visible(position, position)[None, None]
    if ids is not None:
        visible &= ids[:, None, :, None] == ids[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


@needs_interpreter
@pytest.mark.parametrize(
    ("mask", "mean", "group", "width", "length", "joined"),
    [
        # Three tiles: the second pair of tiles of the first head is in two heads.
        (Mask(), None, 1, 64, 384, False),
        (Mask(), 40, 2, 64, 256, True),
        (Mask(False, 70), 90, 1, 128, 256, False),
    ],
)
def test_like_plain_jax(interpreted, mask, mean, group, width, length, joined):
    """Outputs and gradients differ by the rounding of bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = 2
    q, k, v, grad = (
        jax.random.normal(key, (1, length, count, width), jnp.bfloat16)
        for key, count in zip(
            keys, (heads, heads // group, heads // group, heads), strict=True
        )
    )
    ids = None if mean is None else jnp.asarray(documents(mean)[:1, :length])

    def attend(q, k, v):
        kv = (jnp.concatenate([k, v], axis=2),) if joined else (k, v)
        return flash.flash_attention(q, kv, ids, mask)

    found = jax.vjp(attend, q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    want = jax.vjp(lambda *x: plain_attention(*x, ids, mask), *wide)
    np.testing.assert_allclose(found[0].astype(jnp.float32), want[0], atol=0.02)
    pairs = zip(found[1](grad), want[1](grad.astype(jnp.float32)), strict=True)
    for gradient, expected in pairs:
        error = jnp.abs(gradient.astype(jnp.float32) - expected).max()
        assert error < 0.01 * jnp.abs(expected).max()


def test_flops_and_names(monkeypatch):
    """FLOPs are counted as those of other implementations, and for each kernel."""
    monkeypatch.setattr(flash_kernels, "multiprocessors", lambda: 2)
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)

    def run(q, k, v):
        return flash.flash_attention(q, (k, v), None, Mask())

    if VERSION < (0, 11):
        pytest.skip("Mosaic GPU had other names before jax 0.11")
    one = 2.0 * 2 * 256 * 4 * 64 * 256
    assert count_flops(run, q, k, k) == 2 * one
    loss = jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    assert count_kernels(jax.make_jaxpr(loss)(q, k, k).jaxpr) == {
        "attention_forward": 2 * one,
        "attention_dq": 3 * one,
        "attention_dkv": 4 * one,
    }


def test_other_shapes_use_other_kernels(monkeypatch):
    """Shapes that the tiles do not divide, float32, and other GPUs are not for these kernels."""
    monkeypatch.setattr(flash, "is_available", lambda: True)
    good = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    assert flash.supports(good, good)
    for shape, dtype in (
        ((2, 192, 4, 64), "bfloat16"),
        ((2, 256, 4, 80), "bfloat16"),
        ((2, 256, 4, 64), "float32"),
    ):
        x = jax.ShapeDtypeStruct(shape, dtype)
        assert not flash.supports(x, x)
    monkeypatch.setattr(flash, "is_available", lambda: False)
    assert not flash.supports(good, good)


@pytest.mark.parametrize(
    ("mesh", "is_supported"),
    [
        ("data=8", True),
        ("fsdp=8", True),
        ("replica=2,fsdp=4", True),
        ("data=4,model=2", False),
        ("data=2,context=4", False),
    ],
)
def test_where_keys_and_values_may_be_one_array(monkeypatch, mesh, is_supported):
    """Each device needs all heads and tokens of its sequences."""
    monkeypatch.setattr(attention, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(flash, "is_available", lambda: True)
    queries = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16)
    # Without a mesh, XLA may shard them over the 8 devices in any way.
    assert not attention.supports_joined_kv(queries)
    with jax.sharding.use_abstract_mesh(make_mesh(mesh).abstract_mesh):
        assert attention.supports_joined_kv(queries) == is_supported


@needs_interpreter
def test_a_gpt_with_keys_and_values_in_one_array(interpreted, monkeypatch):
    """The loss and its gradients are those of three arrays."""
    config = GPTConfig(
        vocab_size=64, max_length=128, num_layers=1, num_heads=2, width=128
    )
    graph, params, rest = nnx.split(gpt.GPT(config, nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = jax.random.randint(jax.random.key(1), (1, 128), 0, 64)

    def loss(params):
        logits = nnx.merge(graph, params, rest)(tokens).astype(jnp.float32)
        return (jax.nn.log_softmax(logits) ** 2).mean()

    want, wants = jax.value_and_grad(loss)(params)
    monkeypatch.setattr(
        gpt, "supports_joined_kv", lambda queries: queries.shape[1] == 128
    )
    found, founds = jax.value_and_grad(loss)(params)
    assert "attention_dkv" in count_kernels(
        jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    )
    np.testing.assert_allclose(found, want, rtol=1e-3)
    for x, y in zip(jax.tree.leaves(founds), jax.tree.leaves(wants), strict=True):
        error = jnp.linalg.norm((x - y).astype(jnp.float32))
        assert error <= 0.02 * jnp.linalg.norm(y.astype(jnp.float32))
