"""Flax's own examples as runs of shardwise. The model code is read unchanged from a checkout."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from shardwise import Run
from tests.flax_examples.sources import import_from, read_example

ROWS = 16
MakeRun = Callable[[Path], Run]


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return images, labels.astype(np.int32)


def image_batch(step: int, size: int = 8) -> dict[str, np.ndarray]:
    images, labels = digits()
    index = np.random.default_rng(step).integers(0, len(images), ROWS)
    batch = np.asarray(jax.image.resize(images[index], (ROWS, size, size, 1), "linear"))
    return {"image": batch, "label": labels[index]}


def token_batch(step: int, length: int = 16, vocab: int = 64) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(1, vocab, (ROWS, length + 1))
    tokens = tokens.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def curve_batch(step: int, width: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).uniform(size=(ROWS, width)).astype(np.float32)
    return x, 0.8 * x**2 + 0.1


def squares(model: nnx.Module, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((y - model(x)) ** 2)


def nats(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.astype(jnp.float32).mean()


def make(model: Any, loss: Any, data: Any, mesh: str = "data=8", **options: Any) -> Run:
    return Run(
        model=model,
        loss=loss,
        optimizer=optax.adam(1e-3),
        data=data,
        steps=4,
        mesh=mesh,
        **options,
    )


def toy(flax: Path, name: str) -> Any:
    return read_example(
        flax / "examples" / "nnx_toy_examples" / f"{name}.py", ("mesh_rules",)
    )


def page(flax: Path, name: str) -> Any:
    return read_example(flax / "docs_nnx" / "examples" / f"{name}.md")


def lifted_transforms(flax: Path) -> Run:
    module = toy(flax, "02_lifted_transforms")
    return make(partial(module.MLP, 1, 32, 1), squares, curve_batch)


def vae(flax: Path) -> Run:
    module = toy(flax, "05_vae")

    def loss(model: Any, batch: Any) -> jax.Array:
        logits = model(batch["image"])
        kl_loss = sum(jax.tree.leaves(nnx.pop(model, module.Loss)), 0.0)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch["image"])
        return losses.mean() + 0.1 * kl_loss

    model = partial(module.VAE, 64, 64, 8, (8, 8, 1))
    return make(model, loss, image_batch)


def scan_over_layers(flax: Path) -> Run:
    module = toy(flax, "06_scan_over_layers")
    model = partial(module.ScanMLP, 8, n_layers=4)
    return make(model, squares, partial(curve_batch, width=8))


def array_leaves(flax: Path) -> Run:
    module = toy(flax, "07_array_leaves")
    model = partial(module.MLP, 1, 32, 1)
    return make(model, squares, curve_batch, wrt=module.is_param)


def fsdp_and_optimizer(flax: Path) -> Run:
    module = toy(flax, "10_fsdp_and_optimizer")
    model = partial(module.MLP, 1, 32, 4)
    return make(model, squares, curve_batch, "data=2,model=4")


def mnist(flax: Path) -> Run:
    module = read_example(flax / "examples" / "mnist" / "train.py")

    def loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
        return nats(model(batch["image"], rngs), batch["label"])

    return make(module.CNN, loss, partial(image_batch, size=28))


def gemma(flax: Path, is_sharded: bool = False) -> Run:
    folder = flax / "examples" / "gemma"
    transformer = import_from(folder, "transformer")
    settings = import_from(folder, "transformer_cfg")
    sharding = settings.ShardingConfig
    config = settings.TransformerConfig(
        num_layers=2,
        num_embed=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=4,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=[settings.AttentionType.GLOBAL] * 2,
        dropout_rate=0.1,
        shd_config=sharding.fsdp_tp_sharding()
        if is_sharded
        else sharding.no_sharding(),
    )

    def loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
        inputs = batch["inputs"]
        rows, length = inputs.shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (rows, length, length)
        )
        logits, _ = model(inputs, positions, None, mask, rngs=rngs)
        labels = jax.nn.one_hot(batch["targets"], logits.shape[-1])
        return optax.softmax_cross_entropy(logits, labels).mean()

    mesh = "fsdp=4,tp=2" if is_sharded else "data=8"
    return make(partial(transformer.Transformer, config), loss, token_batch, mesh)


def diffusion(flax: Path) -> Run:
    module = page(flax, "digits_diffusion_model")

    def loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
        x1 = batch["image"]
        t = rngs.uniform((x1.shape[0],))
        x0 = rngs.normal(x1.shape)
        at = t[:, None, None, None]
        velocity = model((1 - at) * x0 + at * x1, t)
        return jnp.mean((velocity - (x1 - x0)) ** 2)

    return make(partial(module.UNet, 1, 1, 4), loss, image_batch)


def minigpt(flax: Path) -> Run:
    module = page(flax, "minigpt")

    def loss(model: Any, batch: Any) -> jax.Array:
        return nats(model(batch["inputs"]), batch["targets"])

    model = partial(module.MiniGPT, 16, 64, 32, 4, 32, 2)
    return make(model, loss, token_batch, "batch=4,model=2")


def vit(flax: Path, is_sharded: bool = False) -> Run:
    module = page(flax, "vit_training")
    sharding = module.ShardingConfig
    config = module.ModelConfig(
        num_classes=10,
        in_channels=1,
        img_size=8,
        patch_size=2,
        num_layers=2,
        num_heads=8,
        mlp_dim=64,
        hidden_size=64,
        use_bfloat16=False,
        sharding=sharding.fsdp_sharding() if is_sharded else sharding.no_sharding(),
    )

    def loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
        return nats(model(batch["image"], rngs), batch["label"])

    mesh = "fsdp=8" if is_sharded else "data=8"
    return make(partial(module.VisionTransformer, config), loss, image_batch, mesh)


def translation(flax: Path) -> Run:
    module = page(flax, "machine_translation")

    def loss(model: Any, batch: Any) -> jax.Array:
        logits = model(batch["targets"], batch["inputs"])
        return nats(logits, batch["targets"])

    model = partial(module.TransformerModel, 16, 64, 32, 64, 4, 0.1)
    return make(model, loss, token_batch)


EXAMPLES: dict[str, MakeRun] = {
    "examples/nnx_toy_examples/02_lifted_transforms": lifted_transforms,
    "examples/nnx_toy_examples/05_vae": vae,
    "examples/nnx_toy_examples/06_scan_over_layers": scan_over_layers,
    "examples/nnx_toy_examples/07_array_leaves": array_leaves,
    "examples/nnx_toy_examples/10_fsdp_and_optimizer": fsdp_and_optimizer,
    "examples/mnist": mnist,
    "examples/gemma": gemma,
    "examples/gemma, fsdp_tp_sharding()": partial(gemma, is_sharded=True),
    "docs_nnx/examples/digits_diffusion_model": diffusion,
    "docs_nnx/examples/minigpt": minigpt,
    "docs_nnx/examples/vit_training": vit,
    "docs_nnx/examples/vit_training, fsdp_sharding()": partial(vit, is_sharded=True),
    "docs_nnx/examples/machine_translation": translation,
}
