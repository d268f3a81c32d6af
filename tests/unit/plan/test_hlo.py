"""Compiled programs: counted FLOP, bytes and collectives match the trace, loops included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.flops import count_flops
from shardwise.plan.compile import NO_CHIP
from shardwise.plan.hlo import _groups, parse
from shardwise.plan.roofline import estimate


def compiled(function, *args, **options):
    return parse(jax.jit(function, **options).lower(*args).compile().as_text())


def counted(program, mesh="data=8"):
    return estimate(program, NO_CHIP, make_mesh(mesh))


# XLA writes smaller matmuls as element-wise operations.
sizes = st.integers(8, 24)


@settings(max_examples=15)
@given(sizes, sizes, sizes, st.integers(1, 5))
def test_matmuls_in_loops_count_for_each_iteration(rows, inner, columns, trips):
    def function(x, w):
        def body(x, _):
            return jnp.tanh(x @ w @ w.T), None

        return jax.lax.scan(body, x, None, length=trips)[0]

    x, w = np.ones((rows, inner), "f4"), np.ones((inner, columns), "f4")
    program = compiled(function, x, w)
    expected = trips * 4 * rows * inner * columns
    assert counted(program).flops == count_flops(function, x, w) == expected


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, "SAME", 1), (2, "VALID", 1), (1, "SAME", 2)]
)
def test_a_convolution_does_not_count_padding(stride, padding, dilation):
    """In a convolution of ones, each multiplication adds 1 to the sum of all outputs."""

    def convolve(x, k):
        return jax.lax.conv_general_dilated(
            x,
            k,
            (stride, stride),
            padding,
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    x, k = np.ones((2, 7, 6, 3), "f4"), np.ones((3, 3, 3, 4), "f4")
    assert counted(compiled(convolve, x, k)).flops == 2 * float(convolve(x, k).sum())


COLLECTIVES = [
    (P("data"), P(), "all-gather", "data", 64 * 16 * 4),
    (P("model"), P(), "all-gather", "model", 64 * 16 * 4),
    (P(("data", "model")), P(), "all-gather", "data*model", 64 * 16 * 4),
    (P("data", None), P(None, "data"), "all-to-all", "data", None),
]


@pytest.mark.parametrize(("before", "after", "kind", "axes", "size"), COLLECTIVES)
def test_a_collective_has_its_kind_axes_and_bytes(before, after, kind, axes, size):
    mesh = make_mesh("data=4,model=2")
    x = jax.ShapeDtypeStruct(
        (64, 16), jnp.float32, sharding=NamedSharding(mesh, before)
    )
    program = compiled(lambda x: x * 2, x, out_shardings=NamedSharding(mesh, after))
    (traffic,) = estimate(program, NO_CHIP, mesh).traffic.values()
    assert (traffic.kind, traffic.axes, traffic.count) == (kind, axes, 1)
    assert size is None or traffic.bytes == size


def test_a_reduction_in_a_loop_counts_for_each_iteration():
    mesh = make_mesh("data=4,model=2")
    x = jax.ShapeDtypeStruct(
        (6, 8, 32), jnp.float32, sharding=NamedSharding(mesh, P(None, None, "model"))
    )
    w = jax.ShapeDtypeStruct(
        (32, 32), jnp.float32, sharding=NamedSharding(mesh, P("model", None))
    )

    def function(x, w):
        def one(total, row):
            out = jax.lax.with_sharding_constraint(row @ w, NamedSharding(mesh, P()))
            return total + jnp.tanh(out), None

        return jax.lax.scan(one, jnp.zeros((8, 32)), x)[0]

    traffic = estimate(compiled(function, x, w), NO_CHIP, mesh).traffic
    ((key, reduced),) = traffic.items()
    assert key[:2] == ("all-reduce", "model")
    assert (reduced.count, reduced.bytes) == (6, 6 * 8 * 32 * 4)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, x", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}, x",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}, x",
            ((3, 2), (1, 0)),
        ),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("channel_id=1", ()),
    ],
)
def test_replica_groups_are_read_in_every_notation(text, groups):
    assert _groups(text) == groups


def test_attributes_of_an_instruction_may_span_several_lines():
    text = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %k = f32[4,4]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", frontend={metadata={
"block":"{}"
}}, metadata={op_name="jit(step)/causal/kernel/pallas_call"}
  ROOT %d = f32[4,4]{1,0} dot(%k, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    program = parse(text, {"kernel": 1000.0})
    assert [op.opcode for op in program.entry.ops] == [
        "parameter",
        "custom-call",
        "dot",
    ]
    assert program.entry.ops[0].op_name == "state.params['w']"
    assert program.entry.ops[0].arrays[0].on_chip
    # A causal kernel skips half of the blocks that its trace counts.
    assert counted(program).flops == 2 * 64 + 500


def test_rows_in_use_and_expected_trips_are_read_from_scopes():
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[64,8], w: bf16[4,8,16]) -> bf16[64,16] {
  %x = bf16[64,8]{1,0} parameter(0)
  %w = bf16[4,8,16]{2,1,0} parameter(1)
  ROOT %k = bf16[64,16]{1,0} custom-call(%x, %x, %w), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/one_of_4/ragged_dot_general/ragged-dot-none"}
}
"""
    assert counted(parse(text)).flops == 2 * 64 * 8 * 16 / 4

    def function(count, x):
        with jax.named_scope("trips_7"):
            return jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)

    program = compiled(function, np.int32(3), np.ones((16, 16), "f4"))
    assert counted(program).flops == 7 * 2 * 16**3


def test_a_slice_of_a_large_array_counts_as_the_slice():
    """Each iteration over scanned layers reads the weights of its layer, not the stack."""
    layers, width = 16, 64

    def function(stack, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x * w), None), x, stack)[0]

    program = compiled(
        function, np.ones((layers, width, width), "f4"), np.ones((width, width), "f4")
    )
    one = width * width * 4
    # Reading the stack for each layer would be layers * layers * one.
    assert layers * 2 * one <= counted(program).bytes <= layers * 6 * one


def test_a_fusion_in_the_background_counts_the_bytes_it_moves():
    """GPU programs write the activations of a layer into the stack of all layers this way."""
    text = """HloModule m, is_scheduled=true

%put (p: f32[12,64,8], i: s32[], x: f32[64,8]) -> f32[12,64,8] {
  %p = f32[12,64,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[64,8]{1,0} parameter(2)
  %b = f32[1,64,8]{2,1,0} bitcast(%x)
  %zero = s32[] constant(0)
  ROOT %u = f32[12,64,8]{2,1,0} dynamic-update-slice(%p, %b, %i, %zero, %zero)
}

ENTRY %main (stack: f32[12,64,8], at: s32[], x: f32[64,8]) -> f32[12,64,8] {
  %stack = f32[12,64,8]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %x = f32[64,8]{1,0} parameter(2)
  %s = ((f32[12,64,8], s32[], f32[64,8]), f32[12,64,8], u32[]) fusion-start(%stack, %at, %x),
      kind=kLoop, calls=%put
  ROOT %d = f32[12,64,8]{2,1,0} fusion-done(%s)
}
"""
    found = counted(parse(text))
    # One layer is read, one is written, and the index of the layer is read.
    assert found.bytes == 2 * 64 * 8 * 4 + 4


def test_a_fusion_that_replaces_some_entries_does_not_move_all_of_them():
    """GPU programs write the gradient of the logits at the labels this way."""
    text = """HloModule m, is_scheduled=true

%set (p: f32[64,1000], i: s32[64,2], x: f32[64]) -> f32[64,1000] {
  %p = f32[64,1000]{1,0} parameter(0)
  %i = s32[64,2]{1,0} parameter(1)
  %x = f32[64]{0} parameter(2)
  %two = f32[] constant(2)
  %twos = f32[64]{0} broadcast(%two), dimensions={}
  %y = f32[64]{0} multiply(%x, %twos)
  ROOT %s = f32[64,1000]{1,0} scatter(%p, %i, %y), to_apply=%second
}

ENTRY %main (logits: f32[64,1000], at: s32[64,2], x: f32[64]) -> f32[64,1000] {
  %logits = f32[64,1000]{1,0} parameter(0)
  %at = s32[64,2]{1,0} parameter(1)
  %x = f32[64]{0} parameter(2)
  ROOT %f = f32[64,1000]{1,0} fusion(%logits, %at, %x), kind=kInput, calls=%set
}
"""
    # Indices and new entries are read, and new entries are written.
    assert counted(parse(text)).bytes == 64 * (2 * 4 + 4 + 4)


def test_a_convolution_with_batch_groups_counts_every_multiplication():
    """TPU programs write the gradient of a depthwise convolution this way."""
    text = """HloModule m

ENTRY %main (x: f32[8,5,5,4], g: f32[3,3,4,8]) -> f32[1,3,3,8] {
  %x = f32[8,5,5,4]{3,2,1,0} parameter(0)
  %g = f32[3,3,4,8]{3,2,1,0} parameter(1)
  ROOT %c = f32[1,3,3,8]{3,2,1,0} convolution(%x, %g), window={size=3x3},
      dim_labels=b01f_01io->b01f, batch_group_count=8
}
"""
    assert counted(parse(text)).flops == 2 * 8 * 4 * (3 * 3) * (3 * 3)
