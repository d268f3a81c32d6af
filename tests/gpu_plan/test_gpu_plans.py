"""Plans for GPUs that are not attached, by XLA's compiler for GPUs. `make test-312` installs it.

The kernels of shardwise for Hopper GPUs are compiled to machine code here, but not run.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from textwrap import dedent

import jax
import pytest

from shardwise import make_mesh
from shardwise.errors import ConfigError
from shardwise.plan.compile import ABSENT_GPU, compile_and_read, plan_run
from shardwise.plan.target import find_target
from shardwise.recipe import bind_recipe, load_recipe, make_run
from shardwise.run import prepare
from tests.helpers.command import run
from tests.helpers.pages import ROOT

pytestmark = [
    pytest.mark.gpu_plan,
    # jax 0.12 still has it.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

GIB = 2**30
HAS_HOPPER_KERNELS = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
HAS_CUDNN = find_spec("nvidia") is not None and find_spec("nvidia.cudnn") is not None
needs_hopper_kernels = pytest.mark.skipif(
    not HAS_HOPPER_KERNELS, reason="the kernels for Hopper GPUs need jax 0.11"
)
# Its package is large, so only `make test-slow` installs it.
needs_cudnn = pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")


def gpt2(*words):
    recipe = load_recipe(ROOT / "recipes" / "gpt2.py", "recipe")
    words = ["--no-scan-layers", "--batch-size", "16", *words]
    return make_run(recipe, bind_recipe(recipe, words, prog="plan"))


@cache
def planned(target, *words):
    return plan_run(gpt2(*words), target)


def moved(plan, kind):
    """Return the bytes that all collectives of a kind move."""
    return sum(traffic.bytes for traffic in plan.traffic if traffic.kind == kind)


@pytest.mark.parametrize(("text", "count"), [("h200", 1), ("h200:8", 8), ("b200:3", 3)])
def test_a_named_gpu_need_not_be_attached(text, count):
    target = find_target(text)
    assert len(target.devices) == count
    assert target.platform == "gpu"
    assert not target.is_attached
    assert target.kind == target.devices[0].device_kind == f"NVIDIA {target.chip.name}"


def test_the_limit_is_the_share_that_jax_uses(monkeypatch):
    assert find_target("h200").limit == 0.75 * 139 * GIB
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert find_target("h200").limit == 0.9 * 139 * GIB


@needs_hopper_kernels
def test_one_h200_uses_the_kernels_for_hopper_gpus():
    plan = planned("h200")
    assert plan.chip == "H200"
    assert plan.unknown_kernels == {}
    assert 0.9 < plan.flops / plan.model_flops < 1.1
    # Measured with 16 sequences on an H200: 28.2 ms and 7.92 GiB. See docs/plan.md.
    assert plan.memory.peak / GIB == pytest.approx(7.92, rel=0.03)
    assert plan.times.total == pytest.approx(28.2e-3, rel=0.06)


def kernels(target, run):
    """Return the names of the kernels, and the targets of custom calls, of a compiled step."""
    devices = find_target(target).devices
    prepared = prepare(replace(run, mesh=make_mesh("data=1", devices)))
    lowered = prepared.step.lower(prepared.step.trace())
    program = compile_and_read(lowered, {}, ABSENT_GPU).program
    calls = [
        (program.work(computation, op).kernel, op.attributes)
        for computation in program.computations.values()
        for op in computation.ops
        if op.opcode == "custom-call"
    ]
    targets = {re.search(r'custom_call_target="([^"]*)"', text)[1] for _, text in calls}
    return {name for name, _ in calls if name}, targets


@needs_hopper_kernels
@pytest.mark.parametrize("matmul_dtype", [None, "float8"])
def test_all_kernels_of_gpt_compile_for_a_hopper_gpu(matmul_dtype):
    words = [] if matmul_dtype is None else ["--matmul-dtype", matmul_dtype]
    names, targets = kernels("h200", gpt2(*words))
    assert {"attention_forward", "attention_dq", "attention_dkv"} < names
    assert {"layer_norm_forward", "layer_norm_backward", "product_gelu"} < names
    assert "product_exp" in names
    assert ("__cublas$lt$matmul$f8" in targets) == (matmul_dtype == "float8")


@needs_hopper_kernels
def test_8_bits_are_planned_to_be_faster():
    narrow = planned("h200", "--matmul-dtype", "float8", "--batch-size", "64")
    wide = planned("h200", "--batch-size", "64")
    # Measured: 92.2 and 101.7 ms. See docs/float8.md.
    assert narrow.times.total / wide.times.total == pytest.approx(
        92.2 / 101.7, abs=0.04
    )
    assert {bool(choice.why_not) for choice in narrow.matmul_choices} == {True, False}


@pytest.mark.skipif(
    not HAS_HOPPER_KERNELS and not HAS_CUDNN, reason="there is no fused attention"
)
@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4"])
def test_fsdp_scatters_gradients_and_gathers_parameters_once(mesh):
    plan = planned("h200:8", "--mesh", mesh)
    print(plan.traffic)
    # 16 bits for each parameter, and 32 for a second gradient of the table.
    assert moved(plan, "all-gather") < 1.05 * 2 * plan.num_params
    assert 2 * plan.num_params < moved(plan, "reduce-scatter") < 4 * plan.num_params
    shards = 1 if mesh == "fsdp=8" else 4
    left = 0.02 if shards == 1 else 0.02 + 1 / 2
    assert moved(plan, "all-reduce") < left * 2 * plan.num_params


@pytest.mark.skipif(
    not HAS_HOPPER_KERNELS and not HAS_CUDNN, reason="there is no fused attention"
)
def test_fsdp_scatters_gradients_on_meshes_with_a_tensor_axis():
    plan = planned("h200:8", "--mesh", "fsdp=4,model=2")
    print(plan.traffic)
    # Each device has half of the parameters, and a second gradient of its half of the table.
    assert moved(plan, "all-gather") < 1.05 * plan.num_params
    assert moved(plan, "reduce-scatter") > 0.9 * plan.num_params


@needs_cudnn
@pytest.mark.parametrize(("target", "name"), [("a100:8", "A100"), ("b200", "B200")])
def test_other_gpus_use_cudnn(target, name):
    mesh = ["--mesh", "fsdp=8"] if target.endswith("8") else []
    plan = planned(target, *mesh)
    assert plan.chip.startswith(name)
    assert plan.times is not None
    assert plan.unknown_kernels == {}
    _, targets = kernels(target.split(":")[0], gpt2())
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= targets


@pytest.mark.skipif(HAS_CUDNN, reason="cuDNN is installed")
def test_without_cudnn_the_message_names_the_extra():
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[gpu-plan\]'"):
        plan_run(gpt2(), "a100")


def test_the_compiler_must_be_there_when_jax_starts():
    code = """
    import jax
    jax.devices()
    from shardwise.plan.target import find_target
    find_target("h200")
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TF_", "XLA_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1" in done.stderr


@needs_hopper_kernels
def test_a_command_prints_the_plan_and_nothing_else(tmp_path):
    words = ["--preset", "gpt2", "--batch-size", "8", "--on", "h200"]
    done = run("plan", ROOT / "recipes" / "gpt2.py", *words, cwd=tmp_path)
    assert "1 x H200, mesh data=1: memory per device" in done.stdout
    # The progress, without messages of native libraries.
    assert done.stderr == "compiling for h200, mesh data=1\n"
