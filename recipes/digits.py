"""Classify scikit-learn's handwritten digits with a convolutional net.

    shardwise train recipes/digits.py --out runs/digits
    shardwise verify recipes/digits.py     # the same results on every mesh, leaf by leaf

The model is plain NNX. It has two layers that data parallelism often breaks: BatchNorm, whose
statistics must be those of the global batch, and Dropout, whose masks must not depend on the
number of devices. Nothing in the model mentions devices. The mesh is one string: "data=8"
replicates the model and shards the batch; "fsdp=8" also shards the model and the optimizer state.
Both train to the same result.

The data come with scikit-learn (pip install scikit-learn). `examples/pictures.py` draws what the
model gets wrong.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shardwise import Batches, Keep, Mean, Run, optim

Images = dict[str, np.ndarray]


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


def read_digits() -> tuple[Images, Images]:
    """Return 1,347 training and 450 validation images (8, 8, 1), from 0 to 1, with labels."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    train, validation, train_label, validation_label = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return (
        {"image": train, "label": train_label},
        {"image": validation, "label": validation_label},
    )


def confusion(label: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return how often each digit (row) was taken for each digit (column), (10, 10)."""
    counts = np.zeros((10, 10), int)
    np.add.at(counts, (label, predicted), 1)
    return counts


def recipe(
    mesh: str = "data=-1",
    steps: int = 200,
    out: Path | None = None,
    seed: int = 0,
    batch_size: int = 128,
    lr: float = 3e-3,
    clip: float = 1.0,
    eval_every: int = 50,
    save_every: int = 50,
) -> Run:
    """Train a convolutional net on handwritten digits.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        steps: Number of training steps.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights, the data order and dropout.
        batch_size: Images per step. 200 steps of 128 images are 19 epochs.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    train, validation = read_digits()

    def sample(model: nnx.Module) -> str:
        """Return the confusion matrix of the validation images, as text."""
        assert isinstance(model, ConvNet)
        predicted = np.asarray(model(jnp.asarray(validation["image"]))).argmax(-1)
        table = [["", *map(str, range(10))]]
        for digit, row in enumerate(confusion(validation["label"], predicted)):
            table.append([str(digit), *(str(count) if count else "." for count in row)])
        lines = ["".join(f"{cell:>4s}" for cell in row) for row in table]
        return "Digits (rows), taken for (columns):\n" + "\n".join(lines)

    schedule = optax.cosine_decay_schedule(lr, steps)
    return Run(
        # Any function from rngs to a module.
        model=ConvNet,
        loss=loss,
        optimizer=optim.adamw(schedule, weight_decay=0.05, clip=clip or None),
        data=Batches(train, batch_size, seed=seed),
        # 128 does not divide the 450 validation images. Each of them still counts once.
        eval_data=Batches(validation, batch_size=128),
        steps=steps,
        mesh=mesh,
        seed=seed,
        eval_every=eval_every,
        save_every=save_every,
        keep=Keep(last=1, best=1, metric="eval_accuracy", largest=True),
        out=out,
        sample=sample,
        unit="images",
    )
