"""Train a small byte-level mixture of experts on the source code of the Python standard library.

    shardwise train recipes/stdlib_moe.py
    shardwise train recipes/stdlib_moe.py --experts 0
    shardwise train recipes/stdlib_moe.py --mesh data=2,expert=4 --cpu-devices 8

The second command trains the dense model with the same number of FLOPs per byte: the hidden width
of its MLPs is that of the two experts which each byte passes through. A step processes
batch_size x length = 16 x 128 = 2,048 bytes.
"""

from functools import partial
from pathlib import Path

import jax

from shardwise import Batches, Mean, Run, Tokens, optim, stdlib_bytes
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.models.llama import Llama, LlamaConfig

# The experts that each byte passes through.
TOP_K = 2


def loss(
    model: Llama, batch: dict[str, jax.Array], balance: float
) -> tuple[Mean, dict[str, Mean]]:
    """Return the loss of each byte in nats, and how evenly the experts are used.

    Args:
        model: the model.
        batch: `inputs` and `labels`, both (B, T).
        balance: the weight of the balancing loss.
    """
    if not model.config.num_experts:
        nats = cross_entropy(model(batch["inputs"]), batch["labels"])
        return Mean(nats), {"nats": Mean(nats)}
    features, routing = model.features_and_routing(batch["inputs"])
    nats = cross_entropy(features @ model.output(), batch["labels"])
    metrics = {
        "nats": Mean(nats),
        "balance": Mean(routing.balance),
        # Of the expert that is used most, where 1 is an equal share.
        "load": Mean(routing.load.max(-1) * model.config.num_experts),
    }
    return Mean(nats + balance * routing.balance[:, None]), metrics


def recipe(
    steps: int = 1000,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    experts: int = 8,
    batch_size: int = 16,
    length: int = 128,
    accumulate: int = 1,
    lr: float = 4e-3,
    clip: float = 1.0,
    balance: float = 0.01,
    compute_dtype: str | None = None,
    eval_every: int = 250,
    save_every: int = 0,
) -> Run:
    """Train a small byte-level mixture of experts on the source code of the standard library.

    Args:
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights and the data order.
        experts: Number of experts per layer. 0 trains the dense model of equal FLOPs.
        batch_size: Sequences per step.
        length: Bytes per sequence.
        accumulate: Number of micro-batches per step.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        balance: Weight of the loss that distributes bytes over experts.
        compute_dtype: Dtype of the computation, such as bfloat16. None uses that of the parameters.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    train, validation = stdlib_bytes()
    hidden = 256
    config = LlamaConfig(
        vocab_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        width=128,
        mlp_width=hidden // TOP_K if experts else hidden,
        rope_theta=1e4,
        max_length=length,
        scan_layers=False,
        num_experts=experts,
        top_k=TOP_K if experts else 0,
    )
    schedule = optim.cosine(lr, steps, warmup=0.05, end=lr / 10)
    return Run(
        model=lambda rngs: Llama(config, rngs),
        loss=partial(loss, balance=balance),
        optimizer=optim.adamw(schedule, b2=0.99, weight_decay=0.1, clip=clip or None),
        data=Batches(Tokens(train, length), batch_size, seed=seed),
        eval_data=Batches(Tokens(validation[: 64 * 1024], length), batch_size),
        steps=steps,
        mesh=mesh,
        seed=seed,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
