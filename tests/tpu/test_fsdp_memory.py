"""FSDP of a model without annotations, compiled for eight TPU v5e chips that are not attached."""

import os
from dataclasses import dataclass

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import topologies

from shardwise import Mean, Rules, abstract_state, make_mesh, make_train_step

BATCH_SIZE = 32


@dataclass(frozen=True)
class Size:
    layers: int
    width: int = 1024
    vocab: int = 16384
    length: int = 1024
    rules: Rules = Rules()  # noqa: RUF009


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            width // 64, width, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class PlainGPT(nnx.Module):
    """A GPT of ordinary NNX layers without sharding annotations."""

    def __init__(self, size, rngs):
        self.embed = nnx.Embed(size.vocab, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size.width, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss(model, batch):
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(
            model(batch["inputs"]), batch["labels"]
        )
    )


def compile_for(mesh, size):
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4"
    ).devices
    spec = abstract_state(
        lambda rngs: PlainGPT(size, rngs),
        optax.adamw(1e-3),
        make_mesh(mesh, devices),
        size.rules,
    )
    tokens = jax.ShapeDtypeStruct((BATCH_SIZE, size.length), jnp.int32)
    program = (
        make_train_step(spec, loss, {"inputs": tokens, "labels": tokens})
        .lower()
        .compile()
    )
    return program.memory_analysis(), program.cost_analysis()["flops"]


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(
            Size(1, width=256, vocab=8192, length=512, rules=Rules(fsdp_min_size=256)),
            id="small",
            marks=pytest.mark.slow,
        ),
        pytest.param(Size(1), id="one layer", marks=pytest.mark.slow),
        pytest.param(Size(4), id="four layers", marks=pytest.mark.slow),
    ],
)
def test_fsdp_stores_an_eighth_of_the_state_with_little_more_temporary_memory(size):
    plain, plain_flops = compile_for("data=8", size)
    sharded, sharded_flops = compile_for("fsdp=8", size)
    temporary = sharded.temp_size_in_bytes / plain.temp_size_in_bytes
    arguments = sharded.argument_size_in_bytes / plain.argument_size_in_bytes
    print(
        f"relative to data parallelism: temporary memory {temporary:.3f}, "
        f"arguments {arguments:.4f}, arithmetic {sharded_flops / plain_flops:.3f}"
    )
    assert temporary <= 1.3
    assert arguments <= 0.14
    assert sharded_flops <= 1.05 * plain_flops
