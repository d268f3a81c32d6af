"""Search hyperparameters with Optuna around a shardwise training loop.

    pip install optuna scikit-learn
    python examples/optuna_sweep.py     # 12 trials; run it again to add 12 more

A trial is an ordinary training loop. It reports its validation loss during training, and Optuna
stops trials that do worse than others did at the same step. The study is stored in a SQLite file:
you can kill the program at any time, several processes can work on one study, and Optuna's own
tools can read it (`optuna-dashboard sqlite:///digits.db`).
"""

import argparse

import jax
import jax.numpy as jnp
import optuna
from flax import nnx
from sklearn.datasets import load_digits

from shardwise import (
    Batches,
    Mean,
    abstract_state,
    evaluate,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    optim,
    steps,
)

STEPS = 100
EVAL_EVERY = 20


def loss(model: nnx.Sequential, batch: dict[str, jax.Array]) -> Mean:
    """Return the cross entropy of each image."""
    log_probabilities = jax.nn.log_softmax(model(batch["pixels"]))  # (B, 10)
    label = batch["label"]
    return Mean(-log_probabilities[jnp.arange(len(label)), label])


def objective(trial: optuna.Trial) -> float:
    """Train with the hyperparameters that Optuna suggests, and return the validation loss."""
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    width = trial.suggest_categorical("width", [32, 128])
    weight_decay = trial.suggest_float("weight_decay", 0.0, 0.3)

    digits = load_digits()
    pixels = (digits.data / 16).astype("float32")  # (1797, 64)
    label = digits.target  # (1797,)
    train = Batches(
        {"pixels": pixels[:1200], "label": label[:1200]},
        batch_size=64,
        seed=trial.number,
    )
    validation = Batches(
        {"pixels": pixels[1200:], "label": label[1200:]}, batch_size=512
    )

    def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
        return nnx.Sequential(
            nnx.Linear(64, width, rngs=rngs), nnx.relu, nnx.Linear(width, 10, rngs=rngs)
        )

    optimizer = optim.adamw(
        optim.cosine(lr, STEPS, warmup=0.1), weight_decay=weight_decay
    )
    spec = abstract_state(mlp, optimizer, make_mesh("data=-1"))
    train_step = make_train_step(spec, loss, train(0))
    eval_step = make_eval_step(spec, loss, validation(0))
    score = float("inf")
    for n, state, _ in steps(
        train_step, init_state(spec, seed=trial.number), train, until=STEPS
    ):
        if n % EVAL_EVERY == 0:
            score = evaluate(eval_step, state, validation)["loss"]
            trial.report(score, n)
            if trial.should_prune():
                raise optuna.TrialPruned(f"validation loss {score:.3f} after step {n}")
    return score


def main(trials: int = 12, storage: str = "sqlite:///digits.db") -> optuna.Study:
    """Run trials, print the best one, and return the study.

    Args:
        trials: the number of trials to add to the study.
        storage: the database of the study.
    """
    study = optuna.create_study(
        study_name="digits",
        storage=storage,
        # Continue a study that exists already.
        load_if_exists=True,
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=4, n_warmup_steps=EVAL_EVERY
        ),
    )
    study.optimize(objective, n_trials=trials)
    states = [trial.state.name for trial in study.trials]
    complete, pruned = states.count("COMPLETE"), states.count("PRUNED")
    print(f"{len(states)} trials: {complete} complete, {pruned} stopped early")
    print(f"best: validation loss {study.best_value:.4f} with {study.best_params}")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Search hyperparameters with Optuna.")
    parser.add_argument(
        "--trials", type=int, default=12, help="number of trials to add"
    )
    parser.add_argument(
        "--storage", default="sqlite:///digits.db", help="database of the study"
    )
    options = parser.parse_args()
    main(options.trials, options.storage)
