"""Means that add up, the metrics log, and facts that are read from a trace."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from shardwise.flops import count_flops, count_step_flops, matmul_dtypes
from shardwise.kernels.attention import causal_attention
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean, MetricsLog, read_metrics
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama, LlamaConfig
from shardwise.module import build_module
from shardwise.tracing.jaxpr import calls_function

floats = st.floats(-100, 100, width=32)


@given(
    st.lists(
        st.tuples(floats, st.floats(0.125, 10, width=32)), min_size=2, max_size=20
    ),
    st.data(),
)
def test_parts_of_a_mean_add_up(pairs, data):
    totals, weights = (np.array(x, "f4") for x in zip(*pairs, strict=True))
    middle = data.draw(st.integers(1, len(pairs) - 1))
    complete = Mean(totals, weights).summed()
    first = Mean(totals[:middle], weights[:middle]).summed()
    second = Mean(totals[middle:], weights[middle:]).summed()
    np.testing.assert_allclose(
        (first + second).value, complete.value, rtol=1e-4, atol=1e-4
    )
    masked = Mean(totals, weights).summed(np.arange(len(pairs)) < middle)
    want = totals[:middle].sum(dtype="f8")
    np.testing.assert_allclose(masked.total, want, rtol=1e-4, atol=1e-4)


def test_weight_of_a_mean_is_known_while_tracing():
    known = []

    def trace(nats, mask):
        known.extend(
            mean.items
            for mean in (
                Mean(nats),
                Mean(nats, mask),
                Mean(nats, 0.5),
                Mean(nats.sum(), nats.size),
            )
        )
        known.append(Mean(nats.sum(), mask.sum()).items)
        known.append(Mean(nats, np.arange(4)).items)

    jax.eval_shape(trace, jnp.zeros((4, 6)), jnp.zeros((4, 6)))
    assert known == [24, 24, 12, 24, None, 36]


def test_log_drops_records_after_the_resumed_step_and_ignores_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1 / step})
    log.close()
    path.write_text(path.read_text() + '{"step": 6, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    log = MetricsLog(path, step=3)
    log.write({"step": 4, "loss": 9.0})
    log.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(path)][-2:] == [
        (3, 1 / 3),
        (4, 9.0),
    ]


def gpt_flops(**changes):
    config = GPTConfig(
        vocab_size=512, max_length=64, num_layers=3, num_heads=4, width=32, **changes
    )

    def forward(tokens):
        return build_module(lambda rngs: GPT(config, rngs), jax.random.key(0))(tokens)

    return count_flops(forward, jax.ShapeDtypeStruct((2, 64), jnp.int32))


def test_flops_of_a_gpt_match_the_formula():
    tokens, width, layers, length, vocab = 2 * 64, 32, 3, 64, 512
    want = (
        2 * tokens * (12 * width**2 * layers + vocab * width)
        + layers * 4 * tokens * length * width
    )
    # The bias of the values, multiplied by the output projection.
    want += 2 * width**2 * layers
    assert gpt_flops() == want
    # The body of a scan counts once per iteration.
    assert gpt_flops(scan_layers=True) == want
    assert gpt_flops(remat="block") == want


def test_flops_of_experts_are_those_that_a_token_passes_through():
    """With and without recomputation; either way JAX divides the function of the experts."""
    rows, length, width, hidden, layers = 2, 16, 32, 48, 2
    tokens = jnp.zeros((rows, length), jnp.int32)
    for remat in ("none", "block"):
        config = LlamaConfig(
            64, layers, 4, 4, width, hidden, num_experts=8, top_k=2, remat=remat
        )
        graph, params = nnx.split(Llama(config, nnx.Rngs(0)))

        def loss(params, graph=graph):
            return nnx.merge(graph, params)(tokens).sum()

        attention = 4 * width**2 + 2 * length * width
        per_layer = attention + 8 * width + 2 * 3 * width * hidden
        forward = 2 * rows * length * (layers * per_layer + width * 64)
        assert count_flops(loss, params) == forward
        step = jax.value_and_grad(loss)
        assert count_flops(step, params) >= 3 * forward
        # With 64 choices of 8 experts, blocks of 64 rows are nearly empty: 320 rows are expected.
        experts = 2 * rows * length * layers * 2 * 3 * width * hidden
        padded = count_step_flops(jax.make_jaxpr(step)(params).jaxpr)
        assert padded > 3 * 5 * experts + 2 * (forward - experts)


def test_convolutions_count_every_multiplication():
    conv = nnx.Conv(3, 8, kernel_size=(5, 5), padding="SAME", rngs=nnx.Rngs(0))
    images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    assert count_flops(conv, images) == 2 * (2 * 16 * 16 * 8) * 5 * 5 * 3


def test_a_shard_map_counts_the_work_of_all_its_devices():
    def multiply(x, w):
        return x @ w

    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    w = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    sharded = jax.shard_map(
        multiply,
        mesh=make_mesh("data=4,model=2"),
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
    )
    assert count_flops(jax.jit(sharded), x, w) == count_flops(multiply, x, w)


def test_calls_are_found_in_nested_functions():
    def function(x):
        def body(x, _):
            return jax.jit(jnp.sin)(x), None

        return jax.lax.scan(body, x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(function)(1.0).jaxpr
    assert calls_function(jaxpr, "sin")
    assert not calls_function(jaxpr, "cos")


def test_lines_of_a_log_that_are_not_records_are_skipped(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(
        b'{"step": 1, "loss": 2.0}\n3\n[]\n{"step": "x"}\n'
        + b"[" * 100_000
        + b'\n\xff\n{"step": 2}\n{"step": 3, "lo'
    )
    assert [record["step"] for record in read_metrics(log)] == [1, 2]


class MixedModel(nnx.Module):
    """A layer in bfloat16, one that asks for float32, and matmuls of raw arrays."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=rngs)
        self.router = nnx.Linear(8, 4, dtype=jnp.float32, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        hidden = self.layer(x)
        kernel = self.kernel[...].astype(jnp.bfloat16)
        hidden, _ = jax.lax.scan(lambda h, _: (h @ kernel, None), hidden, length=3)
        return self.router(hidden).sum() + (x @ self.kernel[...]).sum()


def test_matmuls_are_counted_by_the_dtype_of_their_operands():
    def forward(x):
        return MixedModel(nnx.Rngs(0))(x)

    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    closed = jax.make_jaxpr(forward)(x)
    found = matmul_dtypes(closed.jaxpr)
    square = 2 * 2 * 8 * 8
    assert found.flops == {"bfloat16": 4 * square, "float32": 1.5 * square}
    assert sum(found.flops.values()) == count_flops(forward, x)
    # The router is not counted: its layer says float32.
    assert found.unasked["float32"] == square
    first = MixedModel.__call__.__code__.co_firstlineno
    assert found.lines["bfloat16"] == f"test_metrics_and_flops.py:{first + 3}"
    assert found.unasked_lines["float32"] == f"test_metrics_and_flops.py:{first + 4}"
    assert str(found) == (
        f"matmuls: 72.7 % bfloat16, 27.3 % float32 ({found.lines['float32']})"
    )


def test_matmul_of_a_shared_function_of_jax_has_the_line_of_its_caller():
    def first(x):
        return jnp.linalg.matrix_power(x, 2)

    def second(x):
        return jnp.linalg.matrix_power(x, 2)

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    for function in (first, second):
        found = matmul_dtypes(jax.make_jaxpr(function)(x).jaxpr)
        line = function.__code__.co_firstlineno + 1
        assert found.lines == {"float32": f"test_metrics_and_flops.py:{line}"}
        assert str(found) == "matmuls in float32"


def test_a_kernel_has_a_dtype_and_a_function_without_matmuls_has_none():
    def attend(x):
        return causal_attention(x, x, x)

    x = jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)
    found = matmul_dtypes(jax.make_jaxpr(attend)(x).jaxpr)
    assert found.flops == {"bfloat16": 4 * 2 * 64 * 64 * 4 * 8}
    line = attend.__code__.co_firstlineno + 1
    # A kernel computes in the dtype of its arguments, so nobody asked for it by a layer.
    assert found.unasked_lines == {"bfloat16": f"test_metrics_and_flops.py:{line}"}
    assert str(matmul_dtypes(jax.make_jaxpr(jnp.sin)(1.0).jaxpr)) == "no matmuls"
