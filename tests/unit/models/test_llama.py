"""Tests of Llama against `transformers` with the same weights, and against itself.

The fixture is written by tests/fixtures/make_llama_fixture.py.
"""

import json
import math
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import init_state, make_mesh
from shardwise.models.llama import SIZES, Llama, LlamaConfig, RopeScaling
from shardwise.models.sampling import generate
from shardwise.recipe import load_recipe
from shardwise.run import prepare
from shardwise.tree import named_leaves
from shardwise.weights.families import family_of_tensors
from shardwise.weights.hf import params_from_hf, params_to_hf
from shardwise.weights.hf_config import config_from_hf, config_from_shapes, config_to_hf
from tests.helpers.shapes import definition_and_shapes

ROOT = Path(__file__).parents[3]
recipe = load_recipe(ROOT / "recipes" / "llama.py", "recipe")
llama = sys.modules["llama"]

PUBLISHED = {
    "7b": 6_738_415_616,
    "70b-llama2": 68_976_648_192,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
    "8x7b": 46_702_792_704,
}
VARIANTS = [
    (1, {}),
    pytest.param(23, {"remat": "dots"}, marks=pytest.mark.slow),
    (1, {"remat": "block", "keep": ("qkv", "down"), "scan_layers": False}),
]


@cache
def fixture(name="llama_tiny"):
    with np.load(
        ROOT / "tests" / "fixtures" / f"{name}.npz", allow_pickle=False
    ) as file:
        return dict(file)


def hf_config(name="llama_tiny"):
    return json.loads(fixture(name)["config"].tobytes())


def hf_weights(name="llama_tiny"):
    return {
        part.removeprefix("weights/"): value
        for part, value in fixture(name).items()
        if part.startswith("weights/")
    }


def tiny(**changes):
    return replace(config_from_hf(hf_config()), **changes)


def abstract(config):
    return definition_and_shapes(lambda rngs: Llama(config, rngs))


def params_of(config):
    return jax.tree.map(jnp.asarray, params_from_hf(hf_weights(), config))


def loss_of(config, params, chunks=1):
    """Return the mean loss and the logits of the tokens of the fixture."""
    tokens = jnp.array(fixture()["tokens"])
    model = abstract(config)[0].merge(params, {}, jax.random.key(0))
    nats = llama.loss(
        model, {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}, chunks
    )
    return nats.total.mean(), model(tokens)


@pytest.mark.parametrize(("chunks", "changes"), VARIANTS, ids=str)
def test_logits_loss_and_gradient_match_transformers(chunks, changes):
    config = tiny(**changes)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda params: loss_of(config, params, chunks), has_aux=True)
    )
    (loss, logits), grads = value_and_grad(params_of(config))
    np.testing.assert_allclose(logits, fixture()["logits"], atol=2e-5)
    np.testing.assert_allclose(loss, fixture()["loss"], rtol=1e-6)
    np.testing.assert_allclose(grads["tokens"], fixture()["gradient"], atol=1e-6)


@pytest.mark.slow
def test_a_mixtral_is_sampled_from_its_logits():
    name = "mixtral_tiny"
    config = config_from_hf(hf_config(name))
    params = params_from_hf(hf_weights(name), config)
    model = abstract(config)[0].merge(params, {}, jax.random.key(0))
    expected = jnp.asarray(fixture(name)["tokens"])[:2, :6]
    sampled = generate(model, expected, 6, jax.random.key(0), temperature=0.0)
    for _ in range(6):
        choice = model(expected)[:, -1].argmax(-1)
        expected = jnp.concatenate([expected, choice[:, None]], axis=1)
    np.testing.assert_array_equal(sampled, expected)


@pytest.mark.parametrize(
    "scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_mixtral_matches_transformers(scan_layers):
    name = "mixtral_tiny"
    published = config_from_hf(hf_config(name))
    assert (published.num_experts, published.top_k) == (4, 2)
    config = replace(published, scan_layers=scan_layers)
    weights = hf_weights(name)
    assert family_of_tensors(weights).config_class is LlamaConfig
    params = jax.tree.map(jnp.asarray, params_from_hf(weights, config))
    tokens = jnp.array(fixture(name)["tokens"])

    def loss_of(params):
        model = abstract(config)[0].merge(params, {}, jax.random.key(0))
        batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
        nats = llama.loss(model, batch, balance=0.0)
        return nats.total.mean(), model(tokens)

    value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, logits), grads = value_and_grad(params)
    np.testing.assert_allclose(logits, fixture(name)["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, fixture(name)["loss"], rtol=1e-6)
    np.testing.assert_allclose(grads["tokens"], fixture(name)["gradient"], atol=5e-6)
    # Back to the published names, and to a configuration from the shapes alone.
    exported = params_to_hf(params, config)
    assert {key: value.shape for key, value in exported.items()} == {
        key: value.shape for key, value in weights.items()
    }
    for key, value in exported.items():
        np.testing.assert_array_equal(value, weights[key], err_msg=key)
    again = config_from_hf(config_to_hf(config))
    assert replace(again, scan_layers=scan_layers) == config
    shapes = {path: leaf.shape for path, leaf in named_leaves(params).items()}
    found = config_from_shapes(
        shapes, {"class": "Llama", "config": {**asdict(config), "top_k": 3}}
    )
    assert (found.num_experts, found.top_k, found.mlp_width) == (4, 3, 48)


def test_rope_scaling_and_tied_output_match_transformers():
    config = config_from_hf(hf_config("llama31_tiny"))
    assert (config.rope_scaling, config.tied, config.norm_epsilon) == (
        RopeScaling(4.0, 1.0, 4.0, 64),
        True,
        1e-6,
    )
    params = params_from_hf(hf_weights("llama31_tiny"), config)
    tokens, expected = (
        fixture("llama31_tiny")["tokens"],
        fixture("llama31_tiny")["logits"],
    )
    logits, unstretched = (
        abstract(other)[0].merge(
            jax.tree.map(jnp.asarray, params), {}, jax.random.key(0)
        )(tokens)
        for other in (config, replace(config, rope_scaling=None))
    )
    # The angles of 96 positions are rounded to 1e-5.
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(unstretched - expected).max() > 1


# Weights and configurations in and out


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("name", ["llama_tiny", "llama31_tiny"])
def test_weights_are_converted_and_converted_back_unchanged(name, scan_layers):
    config = replace(config_from_hf(hf_config(name)), scan_layers=scan_layers)
    params = params_from_hf(hf_weights(name), config)
    shapes = [
        {k: (v.shape, v.dtype) for k, v in named_leaves(tree).items()}
        for tree in (params, abstract(config)[1])
    ]
    assert shapes[0] == shapes[1]
    back = params_to_hf(params, config)
    assert list(back) == list(hf_weights(name))
    for part, value in hf_weights(name).items():
        np.testing.assert_array_equal(back[part], value, err_msg=part)
    assert family_of_tensors(hf_weights(name)).config_class is LlamaConfig


def test_vocabulary_in_half_precision_is_padded_and_truncated_again():
    config = tiny(vocab_size=128, param_dtype="bfloat16")
    params = params_from_hf(hf_weights(), config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert (params["tokens"].shape, params["head"].shape) == ((128, 32), (32, 128))
    rows = params["head"].T.astype(np.float32)
    np.testing.assert_allclose(
        rows[97:], np.tile(rows[:97].mean(0), (31, 1)), rtol=1e-2, atol=1e-3
    )
    cut = params_to_hf(params, config, vocab_size=97)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(
            cut[name], hf_weights()[name].astype(jnp.bfloat16)
        )


def test_wrong_tensors_are_listed_and_an_untied_head_is_rejected():
    weights = hf_weights()
    weights["model.layers.0.self_attn.k_proj.weight"] = np.ones((32, 32))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(
        4
    )  # older versions saved it
    with pytest.raises(ValueError, match="not those of Llama") as caught:
        params_from_hf(weights, tiny())
    assert str(caught.value).splitlines()[1:] == [
        "  wrong shape: 'layers.0.self_attn.k_proj.weight' is (32, 32), must be (16, 32)"
    ]
    with pytest.raises(
        ValueError,
        match=r"untied: 'lm_head.weight' is not equal to 'embed_tokens.weight', and Llama uses",
    ):
        params_from_hf(hf_weights(), tiny(tied=True))


@pytest.mark.parametrize(
    "config", [*SIZES.values(), config_from_hf(hf_config("llama31_tiny"))], ids=str
)
def test_configuration_is_recovered_from_config_json_and_from_shapes(config):
    assert config_from_hf(config_to_hf(config)) == replace(
        config, scan_layers=LlamaConfig.scan_layers
    )
    shapes = {
        name: leaf.shape for name, leaf in named_leaves(abstract(config)[1]).items()
    }
    said = json.loads(json.dumps({"class": "Llama", "config": asdict(config)}))
    assert config_from_shapes(shapes, said) == config
    lies = {
        "class": "Llama",
        "config": {
            "num_heads": 3,
            "rope_theta": "1",
            "rope_scaling": {"factor": 2},
            "param_dtype": "object",
            "x": 1,
        },
    }
    plain = replace(
        config, rope_theta=5e5, rope_scaling=None, max_length=8192, norm_epsilon=1e-5
    )
    assert config_from_shapes(shapes, lies) == config_from_shapes(shapes) == plain


def test_published_llama_31_is_our_size_with_rope_scaling():
    rope = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    published = {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    published |= {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    published |= {
        "rope_theta": 500000.0,
        "rope_scaling": rope,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    expected = replace(
        SIZES["8b"], max_length=131072, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)
    )
    assert config_from_hf(published) == expected


def test_unsupported_settings_are_listed_at_once():
    wrong = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 9,
        "pretraining_tp": 2,
        "quantization_config": {},
    }
    wrong |= {
        "rope_parameters": {"rope_type": "yarn"},
        "hidden_size": "32",
        "num_hidden_layers": None,
    }
    with pytest.raises(
        ValueError, match="does not describe a model that Llama computes"
    ) as caught:
        config_from_hf(hf_config() | wrong)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        "num_hidden_layers",
        "hidden_size",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "head_dim",
        "pretraining_tp",
        "quantization_config",
        "rope",
    ]
    for rope in (
        {"rope_type": "llama3"},
        {
            "rope_type": "llama3",
            **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), 1.0),
        },
    ):
        with pytest.raises(
            ValueError,
            match="rope scaling 'llama3' has no original_max_position_embeddings",
        ):
            config_from_hf(
                hf_config() | {"rope_scaling": rope, "rope_parameters": None}
            )


# The model itself


def test_length_that_chunks_do_not_divide_is_rejected():
    config = tiny()
    with pytest.raises(
        ValueError, match="sequences of 23 tokens are not divisible by chunks=4"
    ):
        jax.eval_shape(
            lambda params: loss_of(config, params, chunks=4), abstract(config)[1]
        )


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_size_has_its_published_number_of_parameters(size):
    _, params = abstract(SIZES[size])
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        == PUBLISHED[size]
    )


def first_loss(mesh, **arguments):
    prepared = prepare(recipe(mesh=mesh, batch_size=4, length=32, **arguments))
    _, metrics = prepared.step(
        init_state(prepared.spec, 0), prepared.step.place(prepared.batches(0))
    )
    return float(metrics["loss"]), float(metrics["grad_norm"])


@pytest.mark.slow
def test_mesh_gives_the_loss_of_one_device():
    one = first_loss(make_mesh("data=1", jax.devices()[:1]), compute_dtype=None)
    cut = first_loss(
        make_mesh("fsdp=2,model=2", jax.devices()[:4]),
        compute_dtype=None,
        remat="block",
        loss_chunks=2,
        accumulate=2,
    )
    np.testing.assert_allclose(cut, one, rtol=2e-5)


def test_parameters_can_have_half_precision():
    prepared = prepare(recipe(param_dtype="bfloat16", tied=True))
    assert {leaf.dtype for leaf in jax.tree.leaves(prepared.spec.abstract.params)} == {
        jnp.dtype("bfloat16")
    }


def test_keep_without_remat_is_rejected():
    with pytest.raises(
        ValueError,
        match=r"keep=\('qkv',\) and offload=\(\) have no effect with remat='none'",
    ):
        abstract(replace(SIZES["tiny"], keep=("qkv",)))


def test_random_sequences_depend_only_on_their_index():
    source = llama.RandomTokens(256, 16)
    np.testing.assert_array_equal(
        source.rows(np.array([3, 5]))["labels"][1],
        source.rows(np.array([5]))["labels"][0],
    )
