"""Means that add up, the log that is cut back, and arithmetic counted from a trace."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from shardwise.flops import count_flops
from shardwise.metrics import Mean, MetricsLog, read_metrics
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.module import build_module

floats = st.floats(-100, 100, width=32)


@given(
    st.lists(st.tuples(floats, st.floats(0.125, 10, width=32)), min_size=2, max_size=20), st.data()
)
def test_parts_of_a_mean_add_up_to_the_whole(pairs, data):
    totals, weights = (np.array(x, "f4") for x in zip(*pairs, strict=True))
    cut = data.draw(st.integers(1, len(pairs) - 1))
    whole = Mean(totals, weights).summed()
    parts = Mean(totals[:cut], weights[:cut]).summed() + Mean(totals[cut:], weights[cut:]).summed()
    np.testing.assert_allclose(parts.value, whole.value, rtol=1e-4, atol=1e-4)
    mask = np.arange(len(pairs)) < cut
    np.testing.assert_allclose(
        Mean(totals, weights).summed(mask).total, totals[:cut].sum(dtype="f8"), rtol=1e-4, atol=1e-4
    )


def test_what_a_mean_counts_is_known_before_it_is_computed():
    known = []

    def trace(nats, mask):
        known.extend(
            mean.items
            for mean in (Mean(nats), Mean(nats, mask), Mean(nats, 0.5), Mean(nats.sum(), nats.size))
        )
        known.append(Mean(nats.sum(), mask.sum()).items)
        known.append(Mean(nats, np.arange(4)).items)

    jax.eval_shape(trace, jnp.zeros((4, 6)), jnp.zeros((4, 6)))
    assert known == [24, 24, 12, 24, None, 36]


def test_the_log_is_cut_back_to_the_step_it_resumes_at_and_survives_a_torn_line(tmp_path):
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


def test_the_arithmetic_of_a_gpt_is_what_the_textbook_says():
    tokens, width, layers, length, vocab = 2 * 64, 32, 3, 64, 512
    want = (
        2 * tokens * (12 * width**2 * layers + vocab * width) + layers * 4 * tokens * length * width
    )
    want += 2 * width**2 * layers  # the bias of the values, seen through the output layer
    assert gpt_flops() == want
    assert gpt_flops(scan_layers=True) == want  # the body of a scan counts as often as it runs
    assert gpt_flops(remat="block") == want


def test_convolutions_count_every_multiplication():
    conv = nnx.Conv(3, 8, kernel_size=(5, 5), padding="SAME", rngs=nnx.Rngs(0))
    assert (
        count_flops(conv, jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32))
        == 2 * (2 * 16 * 16 * 8) * 5 * 5 * 3
    )


def test_lines_of_a_log_that_are_no_records_are_left_out(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(
        b'{"step": 1, "loss": 2.0}\n3\n[]\n{"step": "x"}\n'
        + b"[" * 100_000
        + b'\n\xff\n{"step": 2}\n{"step": 3, "lo'
    )
    assert [record["step"] for record in read_metrics(log)] == [1, 2]
