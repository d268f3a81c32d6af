"""The usual hand-written loop with plain NNX, Optax, Orbax and Grain, without shardwise."""

import argparse
import json
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model import Model, corpus, entries, note, poison, wait_for_data


class Windows:
    """A source for Grain: windows of one long sequence."""

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        window = self.tokens[
            index * self.length : (index + 1) * self.length + 1
        ].astype(np.int32)
        return {"inputs": window[:-1], "labels": window[1:]}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    # For several processes, with --count and --index.
    parser.add_argument("--coordinator")
    parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
    for name, default in {"optimizer": "adamw", "dtype": "float32"}.items():
        parser.add_argument(f"--{name}", default=default)
    for name, default in {"lr": 3e-3, "dropout": 0.2, "pause": 0.02}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    sizes = {
        "steps": 40,
        "seed": 0,
        "batch-size": 8,
        "length": 16,
        "records": 100,
        "width": 48,
        "depth": 3,
        "vocabulary": 128,
    }
    for name, default in {
        **sizes,
        "save-every": 5,
        "nan-at": -1,
        "stall-at": -1,
        "count": 1,
        "index": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


@jax.jit
def train_step(graph, state, batch):
    """Return the loss of a batch and the updated state."""
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda model: entries(model, batch).mean())(model)
    optimizer.update(model, grads)
    return loss, nnx.state((model, optimizer))


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    args = parse()
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.count, args.index)
    replicated = NamedSharding(
        jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)),
        PartitionSpec(),
    )
    by_example = NamedSharding(replicated.mesh, PartitionSpec("data"))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.lr, args.steps // 10, args.steps
    )
    transformation = optax.chain(
        optax.clip_by_global_norm(1.0), getattr(optax, args.optimizer)(schedule)
    )

    def create():
        model = Model(
            args.vocabulary,
            args.width,
            args.depth,
            args.dropout,
            args.dtype,
            False,
            nnx.Rngs(args.seed),
        )
        return nnx.split((model, nnx.Optimizer(model, transformation, wrt=nnx.Param)))

    graph, state = create()
    if args.coordinator:
        state = jax.jit(lambda: create()[1], out_shardings=replicated)()

    tokens = (
        np.load(args.data, mmap_mode="r")
        if args.data
        else corpus(args.records, args.length, args.vocabulary)
    )
    dataset = grain.MapDataset.source(Windows(tokens, args.length)).seed(args.seed)
    dataset = (
        (dataset.shuffle() if args.shuffle else dataset).repeat().batch(args.batch_size)
    )
    iterator = iter(dataset.to_iter_dataset())

    args.out.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=args.save_every, max_to_keep=3, cleanup_tmp_directories=True
    )
    manager = ocp.CheckpointManager(
        (args.out / "checkpoints").resolve(), options=options
    )
    start = manager.latest_step() or 0
    if start:
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(
                jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            ),
            data=grain.checkpoint.CheckpointRestore(iterator),
        )
        restored = manager.restore(start, args=wanted)
        state, iterator = restored["state"], restored["data"]
        print(f"resuming at step {start}", file=sys.stderr)

    with (args.out / "metrics.jsonl").open("a", buffering=1) as log:
        for step in range(start, args.steps):
            wait_for_data(step, args.pause, args.stall_at)
            batch = poison(next(iterator), step == args.nan_at, False)
            note(step, batch)
            if args.coordinator:
                batch = jax.tree.map(
                    lambda x: jax.make_array_from_callback(
                        x.shape, by_example, lambda index, x=x: x[index]
                    ),
                    batch,
                )
            loss, state = train_step(graph, state, batch)
            if args.index == 0:
                log.write(json.dumps({"step": step + 1, "loss": float(loss)}) + "\n")
            manager.save(
                step + 1,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=grain.checkpoint.CheckpointSave(iterator),
                ),
            )
    manager.wait_until_finished()
    manager.close()


if __name__ == "__main__":
    main()
