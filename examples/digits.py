"""A convolutional net learns scikit-learn's handwritten digits, on every device there is.

    python examples/digits.py
    shardwise verify examples/digits.py     # the same numbers on every mesh, leaf by leaf

The model is plain NNX, with the two layers that data parallelism usually spoils: BatchNorm (its statistics must be
those of the whole batch, not of one device's rows) and Dropout (its masks must not depend on the number of devices).
Nothing in it mentions devices; the mesh is one line of text: "data=8" copies the model and splits the batch,
"fsdp=8" splits the batch and cuts model and optimizer into pieces as well. Both train to the same result.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shardwise import Batches, Mean, Run, fit, use_cpu_devices


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(x)))  # (B, 8, 8, 1) -> (B, 8, 8, 32)
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))  # (B, 4, 4, 32)
        x = nnx.relu(self.norm2(self.conv2(x)))  # (B, 4, 4, 64)
        return self.out(self.dropout(x.reshape(x.shape[0], -1)))  # (B, 10)


def loss(model: ConvNet, batch: dict[str, jax.Array]) -> tuple[Mean, dict[str, Mean]]:
    """An entry for each row, and its weight: what is left to average over devices and batches is then exact."""
    logits = model(batch["image"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])  # (B,)
    correct, one = logits.argmax(-1) == batch["label"], jnp.ones_like(nats)  # (B,)
    return Mean(nats, one), {"accuracy": Mean(correct, one)}


def recipe(mesh: str = "data=-1", steps: int = 200) -> Run:
    """A size of -1 takes all the devices that are left."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")  # (1797, 8, 8, 1), from 0 to 1
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return Run(
        model=ConvNet,  # anything that makes a module from rngs
        loss=loss,
        optimizer=optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=0.05),
        data=Batches({"image": x, "label": y}, batch_size=128),  # 128 x 200 rows are 19 epochs
        eval_data=Batches(
            {"image": x_test, "label": y_test}, batch_size=128
        ),  # 450 rows, each counted once
        steps=steps,
        mesh=mesh,
        unit="images",
    )


def main(mesh: str = "data=-1", steps: int = 200) -> dict[str, float]:
    """Held-out loss and accuracy."""
    result = fit(recipe(mesh, steps))
    print(
        f"mesh {mesh}: held-out accuracy {result.eval_metrics['accuracy']:.2%}, loss {result.eval_metrics['loss']:.4f}"
    )
    return result.eval_metrics


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
