"""Write your own training loop: shardwise provides the state and the step.

    python examples/own_loop.py
    shardwise verify examples/own_loop.py   # the same results on every mesh, leaf by leaf

There are no callbacks to learn: logging, evaluation and early stopping are the body of a `for`
loop. This example trains a net that is too large for its 300 digits. It stops when the validation
loss has not improved for a while, and keeps the best parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from sklearn.datasets import load_digits

from shardwise import (
    Batches,
    Mean,
    Run,
    abstract_state,
    evaluate,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    placement_table,
    steps,
    use_cpu_devices,
)

# The first images are for training, the others for validation.
NUM_TRAIN = 300
MAX_STEPS = 2000


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    """Return a model without sharding annotations.

    A mesh axis named "fsdp" shards large arrays automatically.
    """
    return nnx.Sequential(
        nnx.Linear(64, 512, rngs=rngs),
        nnx.relu,
        nnx.Linear(512, 512, rngs=rngs),
        nnx.relu,
        nnx.Linear(512, 10, rngs=rngs),
    )


def loss(
    model: nnx.Sequential, batch: dict[str, jax.Array]
) -> tuple[Mean, dict[str, Mean]]:
    """Return the loss and the accuracy, with one entry and one weight per image."""
    logits = model(batch["pixels"])  # (B, 10)
    nats = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    )  # (B,)
    is_correct = logits.argmax(-1) == batch["label"]  # (B,)
    weights = jnp.ones_like(nats)
    return Mean(nats, weights), {"accuracy": Mean(is_correct, weights)}


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 64) and labels (1797,)."""
    digits = load_digits()
    return (digits.data / 16).astype("float32"), digits.target


def train_batches(pixels: np.ndarray, label: np.ndarray) -> Batches:
    """Return the training data."""
    return Batches(
        {"pixels": pixels[:NUM_TRAIN], "label": label[:NUM_TRAIN]}, batch_size=64
    )


def recipe(mesh: str = "fsdp=-1") -> Run:
    """Train the same model with the loop of shardwise, for example for `shardwise verify`.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
    """
    return Run(
        model=mlp,
        loss=loss,
        optimizer=optax.adamw(1e-3),
        data=train_batches(*load_data()),
        steps=MAX_STEPS,
        mesh=mesh,
    )


def main(
    mesh: str = "fsdp=-1", eval_every: int = 10, patience: int = 5
) -> dict[str, float]:
    """Train until the validation loss stops improving.

    Args:
        mesh: mesh axes and sizes.
        eval_every: the number of steps between evaluations.
        patience: stop after this many evaluations without improvement.

    Returns:
        The metrics of the best step.
    """
    pixels, label = load_data()
    train = train_batches(pixels, label)
    test_pixels, test_label = pixels[NUM_TRAIN:], label[NUM_TRAIN:]
    validation = Batches({"pixels": test_pixels, "label": test_label}, batch_size=512)

    # First a description of the state: shapes, dtypes and shardings, but no arrays. You can inspect
    # it before anything is allocated.
    spec = abstract_state(mlp, optax.adamw(1e-3), make_mesh(mesh))
    title = f"parameters on {dict(spec.mesh.shape)}"
    Console().print(placement_table(spec.params.values(), title=title))

    # Then the two steps, for batches of this shape. They are compiled when they are first called.
    train_step = make_train_step(spec, loss, train(0))
    eval_step = make_eval_step(spec, loss, validation(0))
    best: dict[str, float] = {"loss": float("inf")}
    for n, state, metrics in steps(
        train_step, init_state(spec, seed=0), train, until=MAX_STEPS
    ):
        # Reading the metrics waits for the devices. If you skip it, they work ahead.
        if n % eval_every:
            continue
        # 512 does not divide the 1497 images. The means are exact anyway.
        scores = evaluate(eval_step, state, validation)
        print(
            f"step {n:4d}: loss {metrics['loss']:.4f}, validation loss {scores['loss']:.4f}, "
            f"accuracy {scores['accuracy']:.2%}"
        )
        if scores["loss"] < best["loss"]:
            best = {"step": n, **scores}
            # Copied, because the next step reuses the memory of this state.
            best_params = jax.tree.map(jnp.copy, state.params)
        elif n >= best["step"] + patience * eval_every:
            break

    # The results are dictionaries of arrays. `merge` makes an ordinary NNX module from them.
    trained = spec.definition.merge(best_params, state.other, jax.random.key(0))
    trained.eval()
    accuracy = float(np.mean(trained(test_pixels).argmax(-1) == test_label))
    print(
        f"stopped after step {n}; the best was step {best['step']}: "
        f"validation loss {best['loss']:.4f}, accuracy {accuracy:.2%}"
    )
    return {**best, "stopped": n, "accuracy_of_module": accuracy}


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
