"""Train a convolutional net on scikit-learn's handwritten digits, on all devices.

    python examples/digits.py
    shardwise verify examples/digits.py     # the same results on every mesh, leaf by leaf

The model is plain NNX. It has two layers that data parallelism often breaks: BatchNorm, whose
statistics must be those of the global batch, and Dropout, whose masks must not depend on the
number of devices. Nothing in the model mentions devices. The mesh is one string: "data=8"
replicates the model and shards the batch; "fsdp=8" also shards the model and the optimizer state.
Both train to the same result.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shardwise import Batches, Mean, Run, fit, optim, use_cpu_devices


class ConvNet(nnx.Module):
    """Two convolutions with BatchNorm, Dropout and a linear layer."""

    def __init__(self, rngs: nnx.Rngs):
        """Create the parameters."""
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits (B, 10) of images (B, 8, 8, 1)."""
        x = nnx.relu(self.norm1(self.conv1(x)))  # (B, 8, 8, 32)
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))  # (B, 4, 4, 32)
        x = nnx.relu(self.norm2(self.conv2(x)))  # (B, 4, 4, 64)
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))


def loss(model: ConvNet, batch: dict[str, jax.Array]) -> tuple[Mean, dict[str, Mean]]:
    """Return the loss and the accuracy, with one entry and one weight per image.

    From these, shardwise computes exact means over devices and batches.
    """
    logits = model(batch["image"])
    nats = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    )  # (B,)
    is_correct = logits.argmax(-1) == batch["label"]  # (B,)
    weights = jnp.ones_like(nats)
    return Mean(nats, weights), {"accuracy": Mean(is_correct, weights)}


def recipe(
    mesh: str = "data=-1",
    steps: int = 200,
    out: Path | None = None,
    clip: float = 0.0,
) -> Run:
    """Train a convolutional net on handwritten digits.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        steps: Number of training steps.
        out: Run directory. None writes no files.
        clip: Largest norm of all gradients. 0 does not clip.
    """
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(
        "float32"
    )  # (1797, 8, 8, 1), from 0 to 1
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    return Run(
        # Any function from rngs to a module.
        model=ConvNet,
        loss=loss,
        optimizer=optim.adamw(schedule, weight_decay=0.05, clip=clip or None),
        # 200 steps of 128 images are 19 epochs.
        data=Batches({"image": x, "label": y}, batch_size=128),
        # 128 does not divide the 450 test images. Each of them still counts once.
        eval_data=Batches({"image": x_test, "label": y_test}, batch_size=128),
        steps=steps,
        mesh=mesh,
        out=out,
        unit="images",
    )


def main(mesh: str = "data=-1", steps: int = 200) -> dict[str, float]:
    """Train, and return the validation loss and accuracy."""
    metrics = fit(recipe(mesh, steps)).eval_metrics
    accuracy, validation_loss = metrics["accuracy"], metrics["loss"]
    print(
        f"mesh {mesh}: validation accuracy {accuracy:.2%}, loss {validation_loss:.4f}"
    )
    return metrics


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
