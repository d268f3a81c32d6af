"""Optuna searches, shardwise trains: Optuna's own study, storage, sampler and pruner around the loop.

    pip install optuna scikit-learn
    python examples/optuna_sweep.py            # 12 trials; the same command adds 12 more to the study in digits.db

A trial is an ordinary training loop. Its held-out loss is reported while it goes on, and a trial that does worse than others did at
the same step is given up. The study is in a SQLite file: kill the program whenever you like, several can work on one study at once,
and Optuna's own tools read it (optuna-dashboard sqlite:///digits.db).
"""

import argparse

import jax
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

STEPS, EVAL_EVERY = 100, 20


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> Mean:
    logits = model(batch["pixels"])  # (B, 10)
    return Mean(-jax.nn.log_softmax(logits)[jax.numpy.arange(len(logits)), batch["label"]])


def objective(trial: optuna.Trial) -> float:
    """The held-out loss at the end. What is suggested here is what Optuna searches."""
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    width = trial.suggest_categorical("width", [32, 128])
    weight_decay = trial.suggest_float("weight_decay", 0.0, 0.3)

    digits = load_digits()
    pixels, label = (digits.data / 16).astype("float32"), digits.target  # (1797, 64) and (1797,)
    train = Batches(
        {"pixels": pixels[:1200], "label": label[:1200]}, batch_size=64, seed=trial.number
    )
    held_out = Batches({"pixels": pixels[1200:], "label": label[1200:]}, batch_size=512)

    def mlp(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            nnx.Linear(64, width, rngs=rngs), nnx.relu, nnx.Linear(width, 10, rngs=rngs)
        )

    optimizer = optim.adamw(optim.cosine(lr, STEPS, warmup=0.1), weight_decay=weight_decay)
    spec = abstract_state(mlp, optimizer, make_mesh("data=-1"))
    train_step, eval_step = (
        make_train_step(spec, loss, train(0)),
        make_eval_step(spec, loss, held_out(0)),
    )
    for n, state, _ in steps(train_step, init_state(spec, seed=trial.number), train, until=STEPS):
        if n % EVAL_EVERY == 0:
            score = evaluate(eval_step, state, held_out)["loss"]
            trial.report(score, n)
            if trial.should_prune():
                raise optuna.TrialPruned(f"held-out loss {score:.3f} after step {n}")
    return score


def main(trials: int = 12, storage: str = "sqlite:///digits.db") -> optuna.Study:
    study = optuna.create_study(
        study_name="digits",
        storage=storage,
        load_if_exists=True,  # a killed search goes on
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=EVAL_EVERY),
    )
    study.optimize(objective, n_trials=trials)
    states = [trial.state.name.lower() for trial in study.trials]
    print(
        f"{len(states)} trials: {states.count('complete')} complete, {states.count('pruned')} given up early"
    )
    print(f"best: held-out loss {study.best_value:.4f} with {study.best_params}")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--storage", default="sqlite:///digits.db")
    chosen = parser.parse_args()
    main(chosen.trials, chosen.storage)
