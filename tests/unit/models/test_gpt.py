"""Tests of GPT against GPT-2 of `transformers` with the same weights, and against itself.

The fixture is written by tests/fixtures/make_gpt2_fixture.py.
"""

import dataclasses
import json
import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from shardwise import Mean, Run
from shardwise.data import Packed
from shardwise.kernels.attention import QUERY_BLOCKS
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.models.gpt import GPT, PRESETS, GPTConfig
from shardwise.models.sampling import generate
from shardwise.run import prepare
from shardwise.weights.hf import params_from_hf, params_to_hf
from shardwise.weights.hf_config import config_from_hf
from tests.helpers.shapes import definition_and_shapes

VARIANTS = [
    (scan_layers, remat)
    for scan_layers in (False, True)
    for remat in ("none", "block", "dots")
]
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
PUBLISHED_VOCABULARY = 50257


@cache
def fixture() -> dict[str, np.ndarray]:
    with np.load(
        Path(__file__).parents[2] / "fixtures" / "gpt2_tiny.npz", allow_pickle=False
    ) as file:
        return dict(file)


def hf_config() -> dict:
    return json.loads(fixture()["config"].tobytes())


def hf_weights() -> dict[str, np.ndarray]:
    return {
        name.removeprefix("weights/"): value
        for name, value in fixture().items()
        if name.startswith("weights/")
    }


def tiny(**changes) -> GPTConfig:
    return dataclasses.replace(config_from_hf(hf_config()), **changes)


@cache
def abstract(config: GPTConfig):
    return definition_and_shapes(lambda rngs: GPT(config, rngs))


def merged(params, config: GPTConfig):
    return abstract(config)[0].merge(params, {}, jax.random.key(0))


@cache
def forward(config: GPTConfig):
    return jax.jit(lambda params, tokens: merged(params, config)(tokens))


def published_model():
    return merged(
        jax.tree.map(jnp.asarray, params_from_hf(hf_weights(), tiny())), tiny()
    )


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


# Against transformers


QUICK = [(False, "none"), (False, "dots"), (True, "block")]


@pytest.mark.parametrize(
    ("scan_layers", "remat"),
    [
        pytest.param(*variant, marks=[pytest.mark.slow] * (variant not in QUICK))
        for variant in VARIANTS
    ],
)
def test_logits_loss_and_gradients_match_transformers(scan_layers, remat):
    config, tokens = tiny(scan_layers=scan_layers, remat=remat), fixture()["tokens"]
    params = params_from_hf(hf_weights(), config)

    def loss(params):
        logits = merged(params, config)(tokens)
        return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean(), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, fixture()["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, fixture()["loss"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        gradients["tokens"], fixture()["gradients/wte"], rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        gradients["positions"], fixture()["gradients/wpe"], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", hf_weights())
def test_every_tensor_of_the_fixture_affects_the_logits(name):
    weights = hf_weights()
    weights[name] = np.roll(weights[name], 1, axis=-1)
    logits = forward(tiny())(params_from_hf(weights, tiny()), fixture()["tokens"])
    assert np.abs(logits - fixture()["logits"]).max() > 1e-2


def test_fixture_records_the_versions_that_made_it():
    assert set(json.loads(fixture()["versions"].tobytes())) == {
        "torch",
        "transformers",
        "numpy",
    }


# Weights in and out


@pytest.mark.parametrize("scan_layers", [False, True])
def test_weights_are_converted_and_converted_back_unchanged(scan_layers):
    config = tiny(scan_layers=scan_layers)
    params = params_from_hf(hf_weights(), config)
    assert shapes(params) == shapes(abstract(config)[1])
    back = params_to_hf(params, config)
    assert list(back) == list(hf_weights())
    for name, value in hf_weights().items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_names_without_prefix_and_old_buffers_are_accepted():
    weights = {
        name.removeprefix("transformer."): value for name, value in hf_weights().items()
    }
    weights |= {
        "h.0.attn.bias": np.ones((1, 1, 24, 24)),
        "h.1.attn.masked_bias": np.array(-1e4),
    }
    weights |= {"lm_head.weight": weights["wte.weight"]}
    jax.tree.map(
        np.testing.assert_array_equal,
        params_from_hf(weights, tiny()),
        params_from_hf(hf_weights(), tiny()),
    )


def test_vocabulary_is_padded_and_truncated_again():
    config = tiny(vocab_size=128, scan_layers=True)
    params = params_from_hf(hf_weights(), config)
    assert shapes(params) == shapes(abstract(config)[1])
    np.testing.assert_allclose(
        params["tokens"][97:],
        np.tile(params["tokens"][:97].mean(0), (31, 1)),
        rtol=1e-6,
    )
    logits = forward(config)(params, fixture()["tokens"])
    np.testing.assert_allclose(logits[..., :97], fixture()["logits"], rtol=0, atol=1e-5)
    assert params_to_hf(params, config)["transformer.wte.weight"].shape == (128, 32)
    cut = params_to_hf(params, config, vocab_size=97)["transformer.wte.weight"]
    np.testing.assert_array_equal(cut, hf_weights()["transformer.wte.weight"])


@pytest.mark.parametrize("vocab_size", [0, 98])
def test_truncation_outside_the_vocabulary_is_rejected(vocab_size):
    params = params_from_hf(hf_weights(), tiny())
    with pytest.raises(
        ValueError, match=f"vocab_size is {vocab_size}; it must be from 1 to the 97 tok"
    ):
        params_to_hf(params, tiny(), vocab_size=vocab_size)


def test_half_precision_weights_become_float32():
    halves = {name: value.astype(jnp.bfloat16) for name, value in hf_weights().items()}
    params = params_from_hf(halves, tiny())
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(
        params["positions"], halves["transformer.wpe.weight"].astype(np.float32)
    )


def test_all_wrong_tensors_are_listed_at_once():
    weights = hf_weights()
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
    weights["wpe.weight"] = weights["transformer.wpe.weight"]
    del weights["transformer.ln_f.bias"], weights["transformer.h.1.mlp.c_fc.weight"]
    weights["transformer.h.2.ln_1.weight"] = np.ones(32)
    weights["transformer.h.0.attn.c_attn.weight"] = np.ones((96, 32))
    weights["transformer.h.1.ln_2.bias"] = np.ones(31)
    with pytest.raises(ValueError, match="not those of GPT") as caught:
        params_from_hf(weights, tiny())
    assert str(caught.value).splitlines()[1:] == [
        "  twice: 'wpe.weight', with and without the prefix 'transformer.'",
        "  missing: 'h.1.mlp.c_fc.weight' (32, 128)",
        "  missing: 'ln_f.bias' (32,)",
        "  unexpected: 'h.2.ln_1.weight' (32,)",
        "  wrong shape: 'h.0.attn.c_attn.weight' is (96, 32), must be (32, 96)",
        "  wrong shape: 'h.1.ln_2.bias' is (31,), must be (32,)",
        "  untied: 'lm_head.weight' is not equal to 'wte.weight', and GPT uses the embedding as "
        "output layer",
    ]


def test_vocabulary_larger_than_the_model_is_rejected():
    with pytest.raises(
        ValueError, match=r"wrong shape: 'wte.weight' is \(97, 32\), must be \(96, 32\)"
    ):
        params_from_hf(hf_weights(), tiny(vocab_size=96))


def test_all_wrong_parameters_are_listed_at_once():
    params = params_from_hf(hf_weights(), tiny())
    del params["norm"]["bias"]
    params["blocks"]["0"]["extra"] = np.ones(3)
    params["positions"] = np.ones((25, 32))
    with pytest.raises(ValueError, match="not those of GPT") as caught:
        params_to_hf(params, tiny())
    assert str(caught.value).splitlines()[1:] == [
        "  missing: 'norm/bias' (32,)",
        "  unexpected: 'blocks/0/extra' (3,)",
        "  wrong shape: 'positions' is (25, 32), must be (24, 32)",
    ]


def test_preset_matches_the_published_configuration():
    published = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "model_type": "gpt2",
    }
    assert config_from_hf(published) == dataclasses.replace(
        PRESETS["gpt2"], vocab_size=PUBLISHED_VOCABULARY
    )


def test_unsupported_settings_are_listed_at_once():
    wrong = {
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-6,
        "scale_attn_by_inverse_layer_idx": True,
    }
    wrong |= {
        "tie_word_embeddings": False,
        "n_inner": 100,
        "scale_attn_weights": False,
        "add_cross_attention": True,
    }
    with pytest.raises(ValueError, match="does not describe") as caught:
        config_from_hf(
            {
                name: value
                for name, value in (hf_config() | wrong).items()
                if name != "n_head"
            }
        )
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        "n_head",
        "activation_function",
        "layer_norm_epsilon",
        "n_inner",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "tie_word_embeddings",
        "add_cross_attention",
    ]
    assert "activation_function is 'gelu'; only 'gelu_new' is implemented" in str(
        caught.value
    )
    with pytest.raises(
        ValueError, match="of type 'bert'; gpt2, llama, mixtral are implemented"
    ):
        config_from_hf(hf_config() | {"model_type": "bert"})


# The model itself


@pytest.mark.parametrize(
    ("preset", "scan_layers"),
    [("gpt2", False), *((preset, True) for preset in PUBLISHED)],
)
def test_presets_have_the_published_number_of_parameters(preset, scan_layers):
    config = dataclasses.replace(PRESETS[preset], scan_layers=scan_layers)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(config)[1]))
    assert (
        count - (config.vocab_size - PUBLISHED_VOCABULARY) * config.width
        == PUBLISHED[preset]
    )


def test_remat_recomputes_the_matmuls_that_it_should():
    matmuls = {}
    for remat in ("none", "dots", "block"):
        config = tiny(scan_layers=True, remat=remat)
        gradient = jax.jit(
            jax.grad(
                lambda params, config: merged(params, config)(fixture()["tokens"]).sum()
            ),
            static_argnums=1,
        )
        matmuls[remat] = (
            gradient.lower(abstract(config)[1], config)
            .as_text()
            .count("stablehlo.dot_general")
        )
    # The scores of attention are recomputed, but neither the four kernels nor the weighted sums.
    assert matmuls["dots"] == matmuls["none"] + QUERY_BLOCKS
    assert matmuls["block"] > matmuls["dots"]


@pytest.mark.slow
def test_cpu_step_grows_linearly_with_the_number_of_layers():
    """Without a barrier, XLA computes the stream again from the first layer wherever it is read."""

    def instructions(num_layers: int) -> int:
        config = GPTConfig(
            vocab_size=64, max_length=8, num_layers=num_layers, num_heads=2, width=16
        )
        tokens = np.zeros((2, 8), np.int32)
        run = Run(
            model=lambda rngs: GPT(config, rngs),
            loss=lambda model, batch: Mean(
                cross_entropy(model(batch["inputs"]), batch["labels"])
            ),
            optimizer=optax.sgd(0.1),
            data=lambda step: {"inputs": tokens, "labels": tokens},
            steps=1,
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)),
        )
        return prepare(run).step.lower().compile().as_text().count(" = ")

    few, more, most = map(instructions, (2, 4, 8))
    assert most - more < 2.05 * (more - few)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_later_token_does_not_change_earlier_logits(scan_layers):
    config, tokens = tiny(scan_layers=scan_layers), fixture()["tokens"]
    params = params_from_hf(hf_weights(), config)
    before = forward(config)(params, tokens)
    for at in (1, 11, 23):
        changed = tokens.copy()
        changed[:, at] = (changed[:, at] + 1) % config.vocab_size
        after = forward(config)(params, changed)
        np.testing.assert_allclose(after[:, :at], before[:, :at], rtol=0, atol=1e-6)
        assert np.abs(after[:, at:] - before[:, at:]).max(axis=-1).min() > 1e-4


def test_invalid_models_and_sequences_are_rejected():
    with pytest.raises(ValueError, match="width=32 is not divisible by num_heads=5"):
        abstract(tiny(num_heads=5))
    with pytest.raises(ValueError, match="remat='some' is unknown"):
        abstract(tiny(remat="some"))
    with pytest.raises(ValueError, match="a sequence has 25 tokens, but max_length=24"):
        jax.eval_shape(
            forward(tiny()), abstract(tiny())[1], jnp.zeros((1, 25), jnp.int32)
        )


# Cross entropy


def optax_cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )


@partial(jax.jit, static_argnums=0)
def losses_and_gradients(function, logits, labels, weights):
    def total(logits):
        losses = function(logits, labels)
        return (losses * weights).sum(), losses

    gradients, losses = jax.grad(total, has_aux=True)(logits)
    return losses, gradients


def assert_cross_entropy_matches_optax(logits, labels, weights):
    losses, gradients = losses_and_gradients(cross_entropy, logits, labels, weights)
    expected_losses, expected_gradients = losses_and_gradients(
        optax_cross_entropy, logits, labels, weights
    )
    assert (losses.dtype, losses.shape, gradients.dtype) == (
        jnp.float32,
        labels.shape,
        logits.dtype,
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
    # For bfloat16, one unit in the last place.
    rtol = 1e-5 if logits.dtype == jnp.float32 else 2**-7
    finite = np.where(np.isfinite(logits), logits, 0).astype(np.float32)
    # The logarithm of the total is as large as the logits, and rounded.
    atol = 2 * np.finfo(np.float32).eps * (1 + np.abs(finite).max())
    np.testing.assert_allclose(
        gradients.astype(np.float32),
        expected_gradients.astype(np.float32),
        rtol=rtol,
        atol=atol,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    # Only two shapes, because each is compiled.
    shape=st.sampled_from([(5, 1), (2, 3, 17)]),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    # The share of other tokens whose logit is minus infinity.
    forbidden=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_cross_entropy_matches_optax(dtype, shape, scale, forbidden, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, shape[-1], shape[:-1])
    is_forbidden = (rng.random(shape) < forbidden) & (
        np.arange(shape[-1]) != labels[..., None]
    )
    logits = jnp.asarray(
        np.where(is_forbidden, -np.inf, rng.normal(0, scale, shape)), dtype
    )
    assert_cross_entropy_matches_optax(
        logits,
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(rng.normal(size=shape[:-1]), jnp.float32),
    )


# Sampling


def test_generate_keeps_the_prompt_and_depends_only_on_the_key():
    model, prompt = published_model(), jnp.asarray(fixture()["tokens"][:2, :5])
    first, again, other = (
        generate(model, prompt, 8, jax.random.key(seed)) for seed in (1, 1, 2)
    )
    assert first.shape == (2, 13)
    assert first.dtype == prompt.dtype
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:, :5], prompt)
    assert ((first >= 0) & (first < 97)).all()
    assert (first != other).any()


def test_generate_follows_the_logits_of_the_last_tokens_beyond_the_window():
    config, params = tiny(), params_from_hf(hf_weights(), tiny())
    expected = fixture()["tokens"][:2, :20]
    found = generate(
        published_model(), jnp.asarray(expected), 8, jax.random.key(0), temperature=0.0
    )
    for _ in range(8):
        seen = expected[:, -config.max_length :]
        padded = np.pad(seen, ((0, 0), (0, config.max_length - seen.shape[1])))
        choice = forward(config)(params, padded)[:, seen.shape[1] - 1].argmax(-1)
        expected = np.concatenate([expected, choice[:, None]], axis=1)
    np.testing.assert_array_equal(found, expected)


# Packed documents


def packed_loss(params, config, sequence):
    logits = merged(params, config)(
        sequence["inputs"], sequence.get("segment_ids"), sequence.get("positions")
    )
    return (
        cross_entropy(logits, sequence["labels"]) * sequence["weights"]
    ).sum(), logits


@cache
def packed_sequence():
    """Return a sequence of 22 tokens with four documents, of which the last continues after it."""
    tokens = np.random.default_rng(1).integers(0, 97, 23)
    return Packed(tokens, 22, np.array([0, 7, 8, 15, 23])).rows(np.array([0]))


@cache
def documents_alone():
    """Return logits, summed losses and summed gradients of the documents, each in a sequence."""
    gradient = jax.jit(
        jax.value_and_grad(
            lambda params, sequence: packed_loss(params, tiny(), sequence), has_aux=True
        )
    )
    params = params_from_hf(hf_weights(), tiny())
    parts = []
    for start, end in ((0, 7), (7, 8), (8, 15), (15, 22)):
        parts.append(
            gradient(
                params,
                {
                    name: packed_sequence()[name][:, start:end]
                    for name in ("inputs", "labels", "weights")
                },
            )
        )
    logits = np.concatenate([logits for (_, logits), _ in parts], axis=1)
    gradients = jax.tree.map(
        lambda *leaves: np.asarray(sum(leaves)), *(gradients for _, gradients in parts)
    )
    return (
        logits,
        sum(value for (value, _), _ in parts),
        params_to_hf(gradients, tiny()),
    )


@pytest.mark.parametrize(("scan_layers", "remat"), [(False, "none"), (True, "block")])
def test_packed_documents_do_not_affect_each_other(scan_layers, remat):
    config = tiny(scan_layers=scan_layers, remat=remat)
    gradient = jax.jit(
        jax.value_and_grad(
            lambda params, sequence: packed_loss(params, config, sequence), has_aux=True
        )
    )
    (total, logits), gradients = gradient(
        params_from_hf(hf_weights(), config), packed_sequence()
    )
    expected_logits, expected_total, expected = documents_alone()
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    found = params_to_hf(jax.tree.map(np.asarray, gradients), config)
    for name in expected:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_one_document_per_sequence_is_the_same_as_no_packing(scan_layers):
    config, tokens = tiny(scan_layers=scan_layers), fixture()["tokens"]
    params = params_from_hf(hf_weights(), config)
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    packed = jax.jit(
        lambda params: merged(params, config)(tokens, np.ones_like(tokens), places)
    )(params)
    np.testing.assert_allclose(
        packed, forward(config)(params, tokens), rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_a_model_is_an_ordinary_module_outside_of_a_run():
    """It is built, called, split and jitted without a mesh, and with any mesh."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    model = GPT(PRESETS["byte"], nnx.Rngs(0))
    logits = model(tokens)
    jitted = nnx.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(jitted(model, tokens), logits, atol=1e-5)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        model = nnx.merge(*nnx.split(GPT(PRESETS["byte"], nnx.Rngs(0))))
        np.testing.assert_allclose(jitted(model, tokens), logits, atol=1e-5)
