"""FSDP that deserves the name, for a model that knows nothing of it: compiled for eight TPU v5e chips, none of which is here."""

import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import topologies

from shardwise import Mean, abstract_state, make_mesh, make_train_step

WIDTH, VOCAB, LENGTH, ROWS = 1024, 16384, 1024, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(16, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class PlainGPT(nnx.Module):
    """Ordinary NNX layers, without a word about meshes."""

    def __init__(self, layers, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss(model, batch):
    return Mean(optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"]))


def compile_for(mesh, layers):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    spec = abstract_state(lambda rngs: PlainGPT(layers, rngs), optax.adamw(1e-3), make_mesh(mesh, devices))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    program = make_train_step(spec, loss, {"inputs": tokens, "labels": tokens}).lower().compile()
    return program.memory_analysis(), program.cost_analysis()["flops"]


@pytest.mark.parametrize("layers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp_costs_an_eighth_of_the_state_and_hardly_more_temporary_memory(layers):
    plain, plain_flops = compile_for("data=8", layers)
    cut, cut_flops = compile_for("fsdp=8", layers)
    temporary = cut.temp_size_in_bytes / plain.temp_size_in_bytes
    arguments = cut.argument_size_in_bytes / plain.argument_size_in_bytes
    print(
        f"temporary memory {temporary:.3f}, arguments {arguments:.4f}, arithmetic {cut_flops / plain_flops:.3f} of plain data parallelism"
    )
    assert temporary <= 1.3
    assert arguments <= 0.14
    assert cut_flops <= 1.05 * plain_flops
