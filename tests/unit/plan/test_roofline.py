"""Estimated times on chips with round numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import make_mesh
from shardwise.hardware import CHIPS, Chip
from shardwise.plan.hlo import parse
from shardwise.plan.roofline import HOP, axis_rate, estimate
from shardwise.plan.target import find_target

CHIP = Chip(
    "round", 1e12, 1e9, 1e9, link=1e9, network=1e8, group=4, products=0.5, copies=0.5
)


def program(function, *args, **options):
    return parse(jax.jit(function, **options).lower(*args).compile().as_text())


def test_a_matmul_is_bound_by_arithmetic_and_a_sum_by_memory():
    mesh = make_mesh("data=8")
    x = np.ones((512, 512), "f4")
    slow = Chip("slow", 1e9, 1e9, 1e12, products=0.5, copies=0.5)
    matmul = estimate(program(lambda x: x @ x, x), slow, mesh)
    assert matmul.bound == "arithmetic"
    assert matmul.seconds == pytest.approx(2 * 512**3 / 0.5e9, rel=1e-3)
    added = estimate(program(lambda x, y: x + y, x, x), CHIP, mesh)
    assert added.bound == "memory"
    assert added.seconds == pytest.approx(3 * x.nbytes / 0.5e9, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "call", "precision", "rate"),
    [
        ("bf16", "__cublas$lt$matmul", "DEFAULT", 1),
        ("f8e4m3fn", "__cublas$lt$matmul$f8", "DEFAULT", 1.7),
        ("f8e4m3fn", "__cublas$lt$matmul$f8", "HIGHEST", 1.7),
        ("f32", "__cublas$lt$matmul", "DEFAULT", 0.5),
        ("f32", "__cublas$lt$matmul", "HIGHEST", 0.1),
    ],
)
def test_a_matmul_runs_at_the_rate_of_its_dtype(dtype, call, precision, rate):
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: {dtype}[512,512], b: {dtype}[512,512]) -> bf16[512,512] {{
  %a = {dtype}[512,512]{{1,0}} parameter(0)
  %b = {dtype}[512,512]{{1,0}} parameter(1)
  ROOT %c = bf16[512,512]{{1,0}} custom-call(%a, %b), custom_call_target="{call}",
      backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":
      {{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}},
      "precision_config":{{"operand_precision":["{precision}","{precision}"]}}}}}}
}}
"""
    chip = Chip("c", 1e9, 1e9, 1e15, products=0.5, narrow=1.7, wide=0.5, exact=0.1)
    seconds = estimate(parse(text), chip, make_mesh("data=8")).seconds
    assert seconds == pytest.approx(2 * 512**3 / 0.5e9 / rate)


def test_float32_matmuls_of_a_gpu_use_tf32():
    x = np.ones((512, 512), "f4")
    chip = replace(CHIPS["NVIDIA H200"], bandwidth=1e18, launch=0)
    precisions = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
    # Larger than any matrix that XLA for CPUs would multiply element by element.
    default, exact = (
        estimate(
            program(lambda x, p=p: jnp.matmul(x, x, precision=p), x),
            chip,
            make_mesh("data=8"),
        ).seconds
        for p in precisions
    )
    assert default == pytest.approx(2 * 512**3 / (chip.flops * chip.products / 2))
    assert exact == pytest.approx(8 * default)


def gathered(mesh, axes):
    x = jax.ShapeDtypeStruct(
        (1024, 1024), jnp.float32, sharding=NamedSharding(mesh, P(axes))
    )
    return program(lambda x: x * 2, x, out_shardings=NamedSharding(mesh, P()))


def test_a_collective_within_a_machine_and_between_machines():
    """A machine has four devices here: `model` (4) stays within one, `data` (2) connects two."""
    mesh = make_mesh("data=2,model=4")
    (within,) = estimate(gathered(mesh, "model"), CHIP, mesh).traffic.values()
    (between,) = estimate(gathered(mesh, "data"), CHIP, mesh).traffic.values()
    assert (within.link, between.link) == ("switch", "network")
    assert within.seconds == pytest.approx(3 / 4 * 2**22 / (1e9 * 0.8) + 2 * HOP)
    assert between.seconds == pytest.approx(1 / 2 * 2**22 / 1e8 + HOP)


@pytest.mark.parametrize(
    ("target", "mesh", "axis", "ways"),
    [
        ("v5e:4x4", "data=4,model=4", "model", 1),  # a line of four
        ("v5e:4x4", "data=16", "data", 2),  # two lines
        ("v5e:16x16", "data=16,model=16", "model", 2),  # a ring
        ("v5p:4x4x4", "data=64", "data", 6),  # three rings
        ("v5p:2x2x2", "data=8", "data", 3),  # three lines
    ],
)
def test_links_of_a_torus(target, mesh, axis, ways):
    found = find_target(target)
    assert (
        axis_rate(make_mesh(mesh, found.devices), found.chip, axis)
        == ways * found.chip.link
    )


def test_slices_are_connected_by_the_network_along_data():
    found = find_target("2*v5e:2x2")
    mesh = make_mesh("model=4,data=2", found.devices)
    assert axis_rate(mesh, found.chip, "data") == found.chip.network
    assert axis_rate(mesh, found.chip, "model") == 2 * found.chip.link


def test_only_the_part_of_a_collective_that_no_computation_hides_counts():
    text = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[1000,1000], q: f32[1000,1000]) -> (f32[8000,1000], f32[1000,1000]) {{
  %p = f32[1000,1000]{{1,0}} parameter(0)
  %q = f32[1000,1000]{{1,0}} parameter(1)
  %s = (f32[1000,1000]{{1,0}}, f32[8000,1000]{{1,0}}) all-gather-start(%p), channel_id=1,
      replica_groups=[1,8]<=[8], dimensions={{0}}
{work}
  %d = f32[8000,1000]{{1,0}} all-gather-done(%s)
  ROOT %t = (f32[8000,1000]{{1,0}}, f32[1000,1000]{{1,0}}) tuple(%d, %q)
}}
"""
    multiply = (
        "  %w{n} = f32[1000,1000]{{1,0}} dot(%q, %q), "
        "lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    )
    chip = Chip("c", 1e12, 1e9, 1e15, link=1e9, group=8, products=1.0)
    mesh = make_mesh("data=8")
    alone = 7 / 8 * 32e6 / 0.8e9 + 3 * HOP
    for products in (0, 5, 100):
        work = "\n".join(multiply.format(n=n) for n in range(products))
        found = estimate(parse(text.format(work=work)), chip, mesh)
        covered = min(alone, products * 2e9 / 1e12)
        assert found.seconds == pytest.approx(
            products * 2e-3 + alone - covered, rel=1e-6
        )
        assert found.network.get("data", 0.0) == pytest.approx(
            alone - covered, abs=1e-9
        )


def test_collectives_of_shard_map_are_counted_one_by_one():
    # All of them have channel 1.
    gather = (
        "  %g{n} = f32[8000,1000]{{1,0}} all-gather(%p), channel_id=1, "
        "replica_groups=[1,8]<=[8], dimensions={{0}}"
    )
    gathers = "\n".join(gather.format(n=n) for n in range(3))
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (p: f32[1000,1000]) -> f32[8000,1000] {{
  %p = f32[1000,1000]{{1,0}} parameter(0)
{gathers}
  ROOT %r = f32[8000,1000]{{1,0}} copy(%g2)
}}
"""
    chip = Chip("c", 1e12, 1e9, 1e15, link=1e9, group=8, products=1.0)
    (traffic,) = estimate(parse(text), chip, make_mesh("data=8")).traffic.values()
    assert (traffic.count, traffic.bytes) == (3, 3 * 32_000_000)


def test_a_transfer_between_slices_counts_along_the_axis_that_connects_them():
    """Between slices, TPU programs send and receive through the hosts, without a collective."""
    transfer = (
        '_xla_host_transfer_rendezvous="all-reduce.1",'
        '_xla_megascale_transfer_type="ALL_REDUCE"'
    )
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (p: f32[1000,1000]) -> f32[1000,1000] {{
  %p = f32[1000,1000]{{1,0}} parameter(0)
  %a = token[] after-all()
  %s = (f32[1000,1000]{{1,0}}, u32[], token[]) send(%p, %a), channel_id=1, is_host_transfer=true,
      frontend_attributes={{{transfer}}}
  %r = (f32[1000,1000]{{1,0}}, u32[], token[]) recv(%a), channel_id=2, is_host_transfer=true,
      frontend_attributes={{{transfer}}}
  %d = token[] send-done(%s), channel_id=1
  %w = f32[1000,1000]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %e = (f32[1000,1000]{{1,0}}, token[]) recv-done(%r), channel_id=2
  ROOT %o = f32[1000,1000]{{1,0}} get-tuple-element(%e), index=0
}}
"""
    target = find_target("2*v5e:2x2")
    mesh = make_mesh("model=2,data=4", target.devices)
    found = estimate(parse(text), target.chip, mesh)
    (traffic,) = found.traffic.values()
    assert (traffic.kind, traffic.axes, traffic.link, traffic.count, traffic.bytes) == (
        "all-reduce",
        "data",
        "network",
        1,
        4e6,
    )
    assert traffic.seconds == pytest.approx(4e6 / target.chip.network + HOP)
    assert 0 < found.network["data"] < traffic.seconds  # the matmul hides a part


def test_every_chip_in_the_table_has_the_figures_that_a_plan_needs():
    for chip in CHIPS.values():
        assert min(chip.flops, chip.memory, chip.bandwidth, chip.link, chip.network) > 0
        assert (chip.group > 0) != (chip.wrap > 0)
        assert (chip.clock > 0) == (chip.wrap > 0)
