"""Means that add up, the metrics log, and facts that are read from a trace."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from shardwise.flops import calls_function, count_flops
from shardwise.metrics import Mean, MetricsLog, read_metrics
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.module import build_module

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


def test_convolutions_count_every_multiplication():
    conv = nnx.Conv(3, 8, kernel_size=(5, 5), padding="SAME", rngs=nnx.Rngs(0))
    images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
    assert count_flops(conv, images) == 2 * (2 * 16 * 16 * 8) * 5 * 5 * 3


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
