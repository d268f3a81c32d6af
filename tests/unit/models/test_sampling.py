"""Tests of sampling against `transformers`, against the definitions, and with and without a cache.

The fixture is written by tests/fixtures/make_sampling_fixture.py.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import abstract_state, make_mesh
from shardwise.models import sampling
from shardwise.models.sampling import (
    Sampling,
    _programs,
    choose,
    generate,
    padded,
    stream,
    warp,
)
from shardwise.module import build_module, split_module
from shardwise.weights.hf import params_from_hf
from shardwise.weights.hf_config import config_from_hf, model_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
KEY = jax.random.key(0)
GREEDY = Sampling(0.0)


@cache
def fixture(name):
    with np.load(FIXTURES / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


@cache
def config_and_params(name, scan_layers):
    found = fixture(name)
    config = replace(
        config_from_hf(json.loads(found["config"].tobytes())), scan_layers=scan_layers
    )
    weights = {
        n.removeprefix("weights/"): value
        for n, value in found.items()
        if n.startswith("weights/")
    }
    return config, params_from_hf(weights, config)


@cache
def model(name, scan_layers=False):
    config, params = config_and_params(name, scan_layers)
    definitions = []

    def build():
        definition, shapes, _ = split_module(
            build_module(lambda rngs: model_of(config, rngs), 0)
        )
        definitions.append(definition)
        return shapes

    jax.eval_shape(build)
    return definitions[0].merge(jax.tree.map(jnp.asarray, params), {}, KEY)


def tokens_of(*args, **options):
    return np.stack(list(stream(*args, **options)), axis=1)


# Logits


@pytest.mark.parametrize("number", range(len(fixture("sampling")["settings"])))
def test_warped_logits_match_transformers(number):
    temperature, top_k, top_p = fixture("sampling")["settings"][number]
    found = warp(
        jnp.asarray(fixture("sampling")["logits"]),
        Sampling(float(temperature), int(top_k) or None, float(top_p) or None),
    )
    expected = fixture("sampling")[f"warped/{number}"]
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    # With integers, many tokens are equally likely.
    decimals=st.sampled_from([0, 6]),
    temperature=st.floats(0.1, 10),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.01, 1),
    vocab_size=st.none() | st.integers(1, 40),
)
def test_kept_tokens_follow_the_definitions(
    seed, decimals, temperature, top_k, top_p, vocab_size
):
    logits = (
        np.random.default_rng(seed).normal(0, 3, 31).round(decimals).astype(np.float32)
    )
    found = np.asarray(
        warp(jnp.asarray(logits), Sampling(temperature, top_k, top_p, vocab_size)),
        np.float64,
    )
    kept = np.isfinite(found)
    np.testing.assert_allclose(
        found[kept], (logits / np.float32(temperature))[kept], rtol=1e-5
    )
    allowed = np.arange(31) < (vocab_size or 31)
    assert kept.any()
    assert not (kept & ~allowed).any()
    order = np.sort(logits[allowed])[::-1].astype(np.float64)
    if top_k is not None:
        order = order[order >= order[min(top_k, len(order)) - 1]]
    if top_p is not None and top_p < 1:
        shares = np.exp((order - order[0]) / temperature)
        before = np.cumsum(shares / shares.sum()) - shares / shares.sum()
        sure, perhaps = order[before < top_p - 1e-5], order[before < top_p + 1e-5]
        assert (kept >= (allowed & (logits >= sure[-1]))).all()
        assert (kept <= (allowed & (logits >= perhaps[-1]))).all()
    else:
        np.testing.assert_array_equal(kept, allowed & (logits >= order[-1]))


def test_draws_follow_the_probabilities_and_do_not_depend_on_other_sequences():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05, 1e-9]))
    three = Sampling(1.0, top_k=3)
    draw = jax.jit(choose, static_argnums=2)
    draws = np.asarray(draw(jnp.tile(logits, (5000, 1)), KEY, three))
    np.testing.assert_allclose(
        np.bincount(draws, minlength=5) / 5000,
        np.array([0.5, 0.3, 0.15, 0, 0]) / 0.95,
        atol=0.03,
    )
    np.testing.assert_array_equal(
        draw(jnp.tile(logits, (50, 1)), KEY, three), draws[:50]
    )
    np.testing.assert_array_equal(
        draw(
            jnp.array([[0.0, 3, 2], [1, jnp.nan, 0]]), KEY, Sampling(0.0, vocab_size=1)
        ),
        [0, -1],
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; it must be"):
        Sampling(**wrong)


# Models


@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [
        ("gpt2_tiny", False),
        ("gpt2_tiny", True),
        ("llama_tiny", True),
        ("llama31_tiny", False),
    ],
)
def test_greedy_text_matches_transformers_and_prompts_share_programs(name, scan_layers):
    # Another test may have used the same model.
    _programs.cache_clear()
    for length in (1, 4):
        expected = fixture("sampling")[f"greedy/{name}/{length}"]
        found = tokens_of(
            model(name, scan_layers), expected[:, :length], 20, KEY, GREEDY
        )
        np.testing.assert_array_equal(found, expected[:, length:])
    graphdef, state = nnx.split(model(name, scan_layers))
    decode, extend = _programs(
        graphdef, jax.tree.structure(state), 32 if name == "llama31_tiny" else 24
    )
    # One for prompts and one for single tokens.
    assert (decode._cache_size(), extend._cache_size()) == (2, 0)


def assert_cache_changes_nothing(name, length, new, seed, temperature=0.0):
    assert model(name).config.max_length == 24
    prompt = np.random.default_rng(seed).integers(0, 97, (2, length))
    with_cache, without = (
        tokens_of(
            model(name),
            prompt,
            new,
            jax.random.key(seed),
            Sampling(temperature),
            cached=cached,
        )
        for cached in (True, False)
    )
    np.testing.assert_array_equal(with_cache, without)


@pytest.mark.parametrize(
    "name", ["gpt2_tiny", pytest.param("llama_tiny", marks=pytest.mark.slow)]
)
def test_cache_changes_no_token_also_beyond_the_window(name):
    # From a few tokens to a prompt that does not fit into the window.
    for seed, length in enumerate((3, 17, 20, 24, 25)):
        assert_cache_changes_nothing(name, length, 28 - length, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
@settings(max_examples=150)
@given(
    length=st.integers(1, 30),
    new=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_cache_changes_no_token_for_any_prompt(name, length, new, seed, temperature):
    assert_cache_changes_nothing(name, length, new, seed, temperature)


@pytest.mark.parametrize(
    "name", [pytest.param("gpt2_tiny", marks=pytest.mark.slow), "llama31_tiny"]
)
def test_sharded_model_generates_the_same_text(name):
    config, params = config_and_params(name, True)
    if name == "llama31_tiny":
        # Its single key head cannot be sharded.
        config = replace(config, num_kv_heads=2)
        params = {
            **params,
            "blocks": {
                k: np.repeat(v, 2, axis=2) if k in ("key", "value") else v
                for k, v in params["blocks"].items()
            },
        }
    config, params = (
        replace(config, vocab_size=98),
        {**params, "tokens": np.pad(params["tokens"], ((0, 1), (0, 0)))},
    )
    spec = abstract_state(
        lambda rngs: model_of(config, rngs),
        optax.identity(),
        make_mesh("data=4,model=2"),
    )
    placed = jax.device_put(params, spec.shardings.params)
    cut = spec.definition.merge(placed, {}, KEY)
    expected = fixture("sampling")[f"greedy/{name}/4"]
    np.testing.assert_array_equal(
        tokens_of(cut, expected[:, :4], 20, KEY, Sampling(0.0, vocab_size=97)),
        expected[:, 4:],
    )


def test_long_prompts_are_processed_in_chunks(monkeypatch):
    assert [padded(n) for n in (1, 16, 17, 255, 256, 257)] == [
        16,
        16,
        32,
        256,
        256,
        512,
    ]
    monkeypatch.setattr(sampling, "CHUNK", 16)
    found = tokens_of(
        model("llama31_tiny"), fixture("llama31_tiny")["tokens"][:, :50], 1, KEY, GREEDY
    )
    np.testing.assert_array_equal(
        found[:, 0], fixture("llama31_tiny")["logits"][:, 49].argmax(-1)
    )


class Plain(nnx.Module):
    """A model without cache or maximum length. The next token is the sum of the last two."""

    def __init__(self, rngs, dims=3):
        self.scale = nnx.Param(jnp.ones(()))
        self.dims = dims

    def __call__(self, tokens):
        total = tokens + jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        logits = self.scale[...] * jax.nn.one_hot(total % 10, 10)
        return logits if self.dims == 3 else logits[:, -1]


def test_any_language_model_can_be_sampled():
    found = generate(Plain(nnx.Rngs(0)), jnp.array([[1, 1]]), 30, KEY, temperature=0.0)
    series = [1, 1]
    while len(series) < 32:
        series.append(sum(series[-2:]) % 10)
    assert found.tolist() == [series]
    assert tokens_of(
        Plain(nnx.Rngs(0)), [[1, 1]], 4, KEY, GREEDY, window=1
    ).tolist() == [[1, 1, 1, 1]]


def test_models_with_attributes_without_a_hash_can_be_sampled():
    prompt = jnp.array([[1, 2]])
    expected = generate(Plain(nnx.Rngs(0)), prompt, 4, KEY, temperature=0.0)
    model = Plain(nnx.Rngs(0))
    model.settings = {"a": 1}
    found = generate(model, prompt, 4, KEY, temperature=0.0)
    np.testing.assert_array_equal(found, expected)


def test_other_models_are_rejected():
    with pytest.raises(
        ValueError,
        match=r"the model returns \(1, 10\) for tokens \(1, 16\); to be sampled, it must return "
        r"logits \(B, T, V\)",
    ):
        tokens_of(Plain(nnx.Rngs(0), dims=2), [[1, 1]], 2, KEY)
    with pytest.raises(
        ValueError,
        match=r"must have shape \(B, T\) with at least one token, not \(2, 0\)",
    ):
        tokens_of(Plain(nnx.Rngs(0)), np.zeros((2, 0)), 2, KEY)
    broken = Plain(nnx.Rngs(0))
    broken.scale[...] = jnp.array(jnp.nan)
    with pytest.raises(
        ValueError, match="the logits after 2 tokens are not finite numbers"
    ):
        tokens_of(broken, [[1, 1]], 2, KEY)
