"""Your own training loop: shardwise makes the state and the step, the `for` statement stays yours.

    python examples/own_loop.py
    shardwise verify examples/own_loop.py   # the same numbers on every mesh, leaf by leaf

There are no callbacks to learn: logging, evaluation and early stopping are the body of the loop. Here a net that is
too large for its 300 digits is trained until the held-out loss has not improved for a while, and its best parameters
are kept.
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


def mlp(rngs: nnx.Rngs) -> nnx.Module:
    """Not annotated at all: over a mesh axis named "fsdp", large arrays are cut automatically."""
    hidden = nnx.Linear(64, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 512, rngs=rngs), nnx.relu
    return nnx.Sequential(*hidden, nnx.Linear(512, 10, rngs=rngs))


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> tuple[Mean, dict[str, Mean]]:
    logits = model(batch["pixels"])  # (B, 10)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])  # (B,)
    correct, one = logits.argmax(-1) == batch["label"], jnp.ones_like(nats)  # (B,)
    return Mean(nats, one), {"accuracy": Mean(correct, one)}


def load_data() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return (digits.data / 16).astype("float32"), digits.target  # (1797, 64) and (1797,)


def recipe(mesh: str = "fsdp=-1") -> Run:
    """The same training for shardwise's own loop, and for `shardwise verify`."""
    pixels, label = load_data()
    train = Batches({"pixels": pixels[:300], "label": label[:300]}, batch_size=64)
    return Run(model=mlp, loss=loss, optimizer=optax.adamw(1e-3), data=train, steps=2000, mesh=mesh)


def main(mesh: str = "fsdp=-1", eval_every: int = 10, patience: int = 5) -> dict[str, float]:
    """The figures of the best step; training stops when `patience` evaluations in a row have not beaten it."""
    pixels, label = load_data()
    train = Batches({"pixels": pixels[:300], "label": label[:300]}, batch_size=64)
    held_out = Batches({"pixels": pixels[300:], "label": label[300:]}, batch_size=512)

    # First a description: shapes, dtypes and layouts, but no arrays. Look at it before anything is allocated.
    spec = abstract_state(mlp, optax.adamw(1e-3), make_mesh(mesh))
    Console().print(
        placement_table(spec.params.values(), title=f"parameters on {dict(spec.mesh.shape)}")
    )

    # Then the two steps, for batches like these. Nothing is compiled until they are first called.
    train_step = make_train_step(spec, loss, train(0))
    eval_step = make_eval_step(spec, loss, held_out(0))
    best: dict[str, float] = {"loss": float("inf")}
    for n, state, metrics in steps(train_step, init_state(spec, seed=0), train, until=2000):
        if n % eval_every:
            continue  # reading the metrics waits for the devices; leave them alone and they work ahead
        scores = evaluate(
            eval_step, state, held_out
        )  # exact over all 1497 rows, though 512 does not divide them
        print(
            f"step {n:4d}: loss {metrics['loss']:.4f}, held out: loss {scores['loss']:.4f}, accuracy {scores['accuracy']:.2%}"
        )
        if scores["loss"] < best["loss"]:
            best = {"step": n, **scores}
            best_params = jax.tree.map(
                jnp.copy, state.params
            )  # a copy, because the next step reuses this state's memory
        elif n >= best["step"] + patience * eval_every:
            break

    # What came out are dictionaries of arrays; with them the model is an ordinary NNX module again.
    trained = spec.definition.merge(best_params, state.other, jax.random.key(0))
    trained.eval()
    accuracy = float(np.mean(trained(pixels[300:]).argmax(-1) == label[300:]))
    print(
        f"stopped after step {n}; the best was step {best['step']}: held-out loss {best['loss']:.4f}, accuracy {accuracy:.2%}"
    )
    return {**best, "stopped": n, "accuracy_of_module": accuracy}


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
