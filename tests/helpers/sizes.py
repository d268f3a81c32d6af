"""Runs whose models have a width, for the tests of scaling."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwise import Batches, Mean, Run, make_mesh
from shardwise.kernels.cross_entropy import linear_cross_entropy
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.llama import SIZES, Llama

Array = jax.Array
Batch: TypeAlias = dict[str, Array]
Factory: TypeAlias = Callable[[nnx.Rngs], nnx.Module]

LENGTH = 16
VOCAB = 32
CLASSES = 10


def one_device() -> jax.sharding.Mesh:
    """Return the mesh of one device."""
    return make_mesh("data=1", jax.devices()[:1])


def tokens(batch_size: int = 8) -> Batches:
    """Return sequences in which the next token depends on the present one."""
    rng = np.random.default_rng(0)
    table = rng.permutation(VOCAB)
    rows = [rng.integers(VOCAB, size=64)]
    for _ in range(LENGTH):
        noise = rng.integers(VOCAB, size=64)
        keep = rng.random(64) < 0.8
        rows.append(np.where(keep, table[rows[-1]], noise))
    text = np.stack(rows, axis=1).astype("int32")
    data = {"inputs": text[:, :-1], "labels": text[:, 1:]}
    return Batches(data, batch_size=batch_size)


def token_loss(model: Callable[[Array], Array], batch: Batch) -> Mean:
    logits = model(batch["inputs"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return Mean(nats)


def gpt_loss(model: GPT, batch: Batch) -> Mean:
    features, table = model.features(batch["inputs"])
    return Mean(linear_cross_entropy(features, table, batch["labels"]))


def token_run(
    model: Factory,
    optimizer: optax.GradientTransformation | None = None,
    loss: Callable[..., Mean] = token_loss,
    **settings: Any,
) -> Run:
    optimizer = optax.adam(4e-3) if optimizer is None else optimizer
    settings = {"data": tokens(), "steps": 3, "mesh": one_device(), **settings}
    return Run(model=model, loss=loss, optimizer=optimizer, **settings)


def gpt_run(
    width: int,
    depth: int = 2,
    scan_layers: bool = False,
    head_width: int = 16,
    **settings: Any,
) -> Run:
    config = replace(
        PRESETS["byte"],
        vocab_size=VOCAB,
        max_length=LENGTH,
        width=width,
        num_heads=width // head_width,
        num_layers=depth,
        scan_layers=scan_layers,
    )
    return token_run(lambda rngs: GPT(config, rngs), loss=gpt_loss, **settings)


def llama_run(
    width: int,
    tied: bool = False,
    num_experts: int = 0,
    scan_layers: bool = True,
    **settings: Any,
) -> Run:
    config = replace(
        SIZES["tiny"],
        vocab_size=VOCAB,
        width=width,
        num_heads=width // 16,
        num_kv_heads=width // 16,
        mlp_width=3 * width,
        tied=tied,
        num_experts=num_experts,
        top_k=2 if num_experts else 0,
        scan_layers=scan_layers,
    )
    return token_run(lambda rngs: Llama(config, rngs), **settings)


def images(batch_size: int = 8) -> Batches:
    rng = np.random.default_rng(0)
    label = rng.integers(CLASSES, size=64).astype("int32")
    patterns = rng.normal(size=(CLASSES, 8, 8, 1))
    image = patterns[label] + 0.3 * rng.normal(size=(64, 8, 8, 1))
    data = {"image": image.astype("float32"), "label": label}
    return Batches(data, batch_size=batch_size)


def image_loss(model: Callable[[Array], Array], batch: Batch) -> Mean:
    logits = model(batch["image"])
    return Mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def image_run(
    model: Factory,
    optimizer: optax.GradientTransformation | None = None,
    **settings: Any,
) -> Run:
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    settings = {"data": images(), "steps": 3, "mesh": one_device(), **settings}
    return Run(model=model, loss=image_loss, optimizer=optimizer, **settings)


class DigitsNet(nnx.Module):
    """The net of recipes/digits.py, with a width."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, width, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 2 * width, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


class Perceptron(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x.reshape(len(x), -1)
        return self.head(nnx.relu(self.hidden(nnx.relu(self.first(x)))))


def perceptron_run(width: int, **settings: Any) -> Run:
    return image_run(lambda rngs: Perceptron(width, rngs), **settings)


class Mixer(nnx.Module):
    """An MLP-mixer: one MLP over patches, one over channels."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.patches = nnx.Linear(16, 16, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.depthwise = nnx.Conv(
            width, width, (3,), feature_group_count=width, rngs=rngs
        )
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = self.stem(x).reshape(len(x), 16, -1)
        x = x + self.patches(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        x = x + self.depthwise(x)
        return self.head(x.mean(axis=1))


class Transformer(nnx.Module):
    """A transformer of plain Flax layers with a class token."""

    def __init__(self, width: int, rngs: nnx.Rngs, head_width: int = 16):
        heads = width // head_width
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.start = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.final = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        x = self.embed(inputs)
        start = jnp.broadcast_to(self.start[...], (len(x), 1, x.shape[2]))
        x = jnp.concatenate([start, x[:, 1:]], axis=1)
        mask = nnx.make_causal_mask(inputs)
        x = x + self.attention(self.norm(x), mask=mask)
        return self.head(self.final(x))


class Recurrent(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(width, width, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, inputs: Array) -> Array:
        return self.head(self.rnn(self.embed(inputs)))
