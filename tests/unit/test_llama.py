"""Llama against that of `transformers` with the same weights (tests/fixtures/make_llama_fixture.py), and against itself."""

import json
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise import init_state, make_mesh
from shardwise.module import build_module, split_module
from shardwise.recipe import load_recipe
from shardwise.run import prepare

ROOT = Path(__file__).parents[2]
recipe = load_recipe(ROOT / "recipes" / "llama.py", "recipe")
llama = sys.modules["llama"]

PUBLISHED = {"7b": 6_738_415_616, "70b-llama2": 68_976_648_192, "8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800}
PARTS = {
    "norm1/scale": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "norm2/scale": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
VARIANTS = [(1, {}), (23, {"remat": "dots"}), (1, {"remat": "block", "keep": ("qkv", "down"), "scan_layers": False})]


@cache
def fixture():
    with np.load(ROOT / "tests" / "fixtures" / "llama_tiny.npz", allow_pickle=False) as file:
        return dict(file)


def tiny(**changes):
    hf = json.loads(fixture()["config"].tobytes())
    names = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
    return replace(llama.LlamaConfig(*(hf[name] for name in names), rope_theta=hf["rope_parameters"]["rope_theta"]), **changes)


def abstract(config):
    """(definition, shapes of the parameters); nothing is allocated or computed."""
    found = []

    def build():
        definition, params, _ = split_module(build_module(lambda rngs: llama.Llama(config, rngs), 0))
        found.append(definition)
        return params

    params = jax.eval_shape(build)
    return found[0], params


def params_of(config):
    """The weights of `transformers`, transposed and shaped as this model has them."""
    weights = {name.removeprefix("weights/"): value for name, value in fixture().items() if name.startswith("weights/")}
    _, shapes = abstract(config)

    def find(path, leaf):
        name = "/".join(key.key for key in path)
        top = {"tokens": "model.embed_tokens", "norm/scale": "model.norm", "head": "lm_head"}
        if name in top:
            value = weights[f"{top[name]}.weight"]
            return jnp.array(value.T if name == "head" else value).reshape(leaf.shape)
        layer, _, part = name.removeprefix("blocks/").partition("/")
        if not layer.isdigit():
            layer, part = None, name.removeprefix("blocks/")
        layers = range(config.num_layers) if layer is None else [layer]
        values = [weights[f"model.layers.{n}.{PARTS[part]}.weight"].T for n in layers]
        return jnp.array(values).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(find, shapes)


def loss_of(config, params, chunks=1):
    """(mean loss, logits) of the tokens of the fixture."""
    tokens = jnp.array(fixture()["tokens"])
    model = abstract(config)[0].merge(params, {}, jax.random.key(0))
    nats = llama.loss(model, {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}, chunks)
    return nats.total.mean(), model(tokens)


@pytest.mark.parametrize(("chunks", "changes"), VARIANTS, ids=str)
def test_logits_loss_and_gradient_are_those_of_transformers(chunks, changes):
    config = tiny(**changes)
    value_and_grad = jax.jit(jax.value_and_grad(lambda params: loss_of(config, params, chunks), has_aux=True))
    (loss, logits), grads = value_and_grad(params_of(config))
    np.testing.assert_allclose(logits, fixture()["logits"], atol=2e-5)
    np.testing.assert_allclose(loss, fixture()["loss"], rtol=1e-6)
    np.testing.assert_allclose(grads["tokens"], fixture()["gradient"], atol=1e-6)


def test_rows_that_cannot_be_cut_are_refused():
    config = tiny()
    with pytest.raises(ValueError, match="rows of 23 tokens cannot be cut into 4 chunks"):
        jax.eval_shape(lambda params: loss_of(config, params, chunks=4), abstract(config)[1])


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_size_has_its_published_number_of_parameters(size):
    _, params = abstract(llama.SIZES[size])
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == PUBLISHED[size]


def first_loss(mesh, **arguments):
    prepared = prepare(recipe(mesh=mesh, batch_size=4, length=32, **arguments))
    _, metrics = prepared.step(init_state(prepared.spec, 0), prepared.step.place(prepared.batches(0)))
    return float(metrics["loss"]), float(metrics["grad_norm"])


@pytest.mark.slow
def test_a_mesh_of_rows_and_heads_gives_the_loss_of_one_device():
    one = first_loss(make_mesh("data=1", jax.devices()[:1]), compute_dtype=None)
    cut = first_loss(make_mesh("fsdp=2,model=2", jax.devices()[:4]), compute_dtype=None, remat="block", loss_chunks=2, accumulate=2)
    np.testing.assert_allclose(cut, one, rtol=2e-5)


def test_parameters_may_be_kept_in_half_precision():
    prepared = prepare(recipe(param_dtype="bfloat16", tied=True))
    assert {leaf.dtype for leaf in jax.tree.leaves(prepared.spec.abstract.params)} == {jnp.dtype("bfloat16")}


def test_keeping_without_recomputing_is_refused():
    with pytest.raises(ValueError, match="keep and offload say what remat='block' spares; remat is 'none'"):
        abstract(replace(llama.SIZES["tiny"], keep=("qkv",)))


def test_rows_of_random_tokens_depend_on_their_index_alone():
    source = llama.RandomTokens(256, 16)
    np.testing.assert_array_equal(source.rows(np.array([3, 5]))["labels"][1], source.rows(np.array([5]))["labels"][0])
