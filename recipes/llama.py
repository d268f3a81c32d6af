r"""Llama 2 and 3, from a toy to 405 billion parameters, and Mixtral: plan, time, and train.

    shardwise train recipes/llama.py
    shardwise train recipes/llama.py --size 8b --mesh fsdp=-1 --batch-size 64 --length 8192 \
        --remat block
    shardwise train recipes/llama.py --data data --size 8b --mesh fsdp=-1 --remat block \
        --keep qkv --loss-chunks 8

Without --data, the recipe uses random tokens, which is enough to plan and time a run. A step
processes batch_size x length tokens.

With --remat block, the backward pass recomputes each block, except the values that --keep and
--offload name: "input" of the block, "qkv" (after the rotation), "attention" (the outputs of the
heads), "out" (their projection), "up" (both matmuls before the SwiGLU), "down" (the output of the
MLP). Offloaded values wait in host memory.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardwise import (
    Batches,
    InitFrom,
    Mean,
    Run,
    Tokens,
    constrain,
    open_tokens,
    optim,
)
from shardwise.kernels.cross_entropy import cross_entropy
from shardwise.models.llama import SIZES, Kept, Llama, matmul

Array = jax.Array

# The vocabulary is rounded up to a multiple of this, so that meshes and matrix units divide it.
VOCAB_MULTIPLE = 128


def loss(
    model: Llama, batch: dict[str, Array], chunks: int = 1, balance: float = 0.01
) -> Mean:
    """Return the loss of each token, in nats.

    Args:
        model: the model.
        batch: `inputs` and `labels`, both (B, T).
        chunks: with several chunks, the logits of only one of them exist at a time. They are
            recomputed for the gradient.
        balance: for a model with experts, the weight of the balancing loss of each sequence.

    Raises:
        ValueError: if `chunks` does not divide T.
    """
    tokens, labels = batch["inputs"], batch["labels"]
    extra: Array | float = 0.0
    if model.config.num_experts:
        features, routing = model.features_and_routing(tokens)
        extra = balance * routing.balance[:, None]
    else:
        features = model.features(tokens)
    kernel = model.output()
    batch_size, length = tokens.shape
    if length % chunks:
        raise ValueError(
            f"sequences of {length} tokens are not divisible by chunks={chunks}. Use a number of "
            "chunks that divides the length."
        )

    def nats(chunk: tuple[Array, Array]) -> Array:
        features, labels = chunk
        return cross_entropy(
            matmul(constrain(features, "batch", "tokens"), kernel), labels
        )

    def split(x: Array) -> Array:
        """Reshape (B, T, ...) to (chunks, B, T / chunks, ...).

        Token i is in chunk `i % chunks`: each chunk has tokens of every device of a context axis,
        and no token moves.
        """
        parts = x.reshape(batch_size, length // chunks, chunks, *x.shape[2:])
        return jnp.moveaxis(parts, 2, 0)

    if chunks == 1:
        return Mean(nats((features, labels)) + extra)
    losses = jax.lax.map(jax.checkpoint(nats), (split(features), split(labels)))
    return Mean(jnp.moveaxis(losses, 0, 2).reshape(batch_size, length) + extra)


@dataclass(frozen=True)
class RandomTokens:
    """A source of random sequences. Each depends on its index alone.

    Attributes:
        vocab_size: the tokens are below this number.
        length: the number of tokens in a sequence.
        num_examples: the number of sequences.
    """

    vocab_size: int
    length: int
    num_examples: int = 1 << 20

    def __len__(self) -> int:
        return self.num_examples

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs and labels of the sequences at `indices`."""
        windows = np.stack([self._window(int(i)) for i in indices])
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}

    def _window(self, index: int) -> np.ndarray:
        random = np.random.default_rng(index)
        return random.integers(self.vocab_size, size=self.length + 1, dtype=np.int32)

    def fingerprint(self) -> dict[str, list[int]]:
        """Return what identifies these sequences when a run resumes."""
        return {"random": [self.vocab_size, self.length, self.num_examples]}


def recipe(
    steps: int = 20,
    mesh: str = "data=-1",
    out: Path | None = None,
    data: Path | None = None,
    init_from: Path | None = None,
    seed: int = 0,
    size: Literal[
        "tiny", "tiny-moe", "7b", "70b-llama2", "8b", "70b", "405b", "8x7b"
    ] = "tiny",
    vocab: int | None = None,
    mlp_width: int | None = None,
    tied: bool = False,
    batch_size: int = 8,
    length: int = 128,
    accumulate: int = 1,
    microbatches: int = 0,
    rounds: int = 1,
    lr: float = 3e-4,
    clip: float = 1.0,
    compute_dtype: str | None = "bfloat16",
    param_dtype: Literal["float32", "bfloat16"] = "float32",
    remat: Literal["none", "block", "dots"] = "none",
    keep: tuple[Kept, ...] = (),
    offload: tuple[Kept, ...] = (),
    scan_layers: bool = True,
    loss_chunks: int = 1,
    balance: float = 0.01,
    save_every: int = 0,
) -> Run:
    """Train a Llama on prepared tokens, or on random ones.

    Args:
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        data: Directory written by `shardwise data prepare`. None uses random tokens.
        init_from: Start from the weights of another run, or of a Llama as `transformers` saves it.
        seed: Seed of the initial weights and the data order.
        size: Size of the model.
        vocab: Vocabulary size. None uses that of the data, or of the published model.
        mlp_width: Hidden width of the MLP. None uses that of the published model.
        tied: Use the transposed embedding as the output layer.
        batch_size: Sequences per step.
        length: Tokens per sequence.
        accumulate: Number of micro-batches per step.
        microbatches: Parts of a batch in a pipeline (mesh axis `stage`). 0 chooses 4 per stage.
        rounds: How often each of them passes through all stages.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        compute_dtype: Dtype of the computation. None uses that of the parameters.
        param_dtype: Dtype of the parameters.
        remat: What the backward pass recomputes: nothing, blocks, or everything but matmuls.
        keep: Values that --remat block does not recompute.
        offload: Values that --remat block moves to host memory instead of recomputing them.
        scan_layers: Compile one block for all layers: faster to compile, but slower to run on GPUs.
        loss_chunks: Number of chunks in which the logits are computed, to save memory.
        balance: Weight of the loss that distributes tokens over experts.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    base = SIZES[size]
    if data is None:
        vocab_size = vocab or base.vocab_size
        source: RandomTokens | Tokens = RandomTokens(vocab_size, length)
    else:
        tokens = open_tokens(data)
        vocab_size = vocab or tokens.info.get("vocab_size") or base.vocab_size
        source = Tokens(tokens, length)
    config = replace(
        base,
        vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        mlp_width=mlp_width or base.mlp_width,
        max_length=length,
        tied=tied,
        param_dtype=param_dtype,
        scan_layers=scan_layers,
        remat=remat,
        keep=keep,
        offload=offload,
    )
    schedule = optim.cosine(lr, steps, warmup=0.05, end=lr / 10)
    return Run(
        model=lambda rngs: Llama(config, rngs),
        loss=partial(loss, chunks=loss_chunks, balance=balance),
        optimizer=optim.adamw(schedule, b2=0.95, weight_decay=0.1, clip=clip or None),
        data=Batches(source, batch_size, seed=seed),
        steps=steps,
        mesh=mesh,
        init_from=None if init_from is None else InitFrom(init_from, cast=True),
        seed=seed,
        accumulate=accumulate,
        microbatches=microbatches,
        rounds=rounds,
        compute_dtype=compute_dtype,
        save_every=save_every,
        out=out,
        unit="tokens",
    )
