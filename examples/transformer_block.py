"""Shard a transformer block of NNX's own layers in two ways, on four meshes.

    python examples/transformer_block.py
    shardwise plan examples/transformer_block.py --on cpu:8 --mesh data=4,model=2
    shardwise plan examples/transformer_block.py --on cpu:8 --mesh data=4,model=2 --layout first-dim

The block has `nnx.MultiHeadAttention`, `nnx.LayerNorm`, `nnx.Linear` and `nnx.Dropout`. Its
annotations name the mesh axis "model". Meshes of 4 x 2, 2 x 4, 1 x 8 and 8 x 1 devices change
how much of the 8 devices shards the batch and how much shards the model. The loss is the same on
all of them, and that of one device.

Tutorials often shard the first dim of every array. That is correct, but the first dim of a kernel
is its input: each layer needs its complete input on every device and returns partial sums. In
pairs, the first layer is sharded by its outputs and the second by its inputs. The values between
them stay sharded, and one sum per pair remains. `shardwise plan` counts the collectives of both.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from shardwise import (
    Batches,
    Mean,
    Run,
    Tokens,
    abstract_state,
    init_state,
    make_train_step,
    plan_run,
    stdlib_bytes,
    steps,
    use_cpu_devices,
)

Array = jax.Array
# The mesh axis of each dim. Missing dims are replicated.
Axes: TypeAlias = tuple[str | None, ...]
LayoutName: TypeAlias = Literal["plain", "first-dim", "pairs"]

NUM_HEADS = 8
WIDTH = 64
MLP_WIDTH = 256
LENGTH = 32
VOCAB_SIZE = 256
MESHES = ((4, 2), (2, 4), (1, 8), (8, 1))


@dataclass(frozen=True)
class Layout:
    """How the arrays of a block are sharded; () is replicated.

    Shapes: D width, H heads, K features per head, F width of the MLP.

    Attributes:
        norm: scale and bias of both norms (D,).
        heads: kernels of queries, keys and values (D, H, K).
        heads_bias: their biases (H, K).
        out: kernel of the output of the attention (H, K, D).
        out_bias: its bias (D,).
        up: kernel of the first layer of the MLP (D, F).
        up_bias: its bias (F,).
        down: kernel of the second layer of the MLP (F, D).
        down_bias: its bias (D,).
    """

    norm: Axes = ()
    heads: Axes = ()
    heads_bias: Axes = ()
    out: Axes = ()
    out_bias: Axes = ()
    up: Axes = ()
    up_bias: Axes = ()
    down: Axes = ()
    down_bias: Axes = ()


LAYOUTS: dict[LayoutName, Layout] = {
    "plain": Layout(),
    "first-dim": Layout(*[("model",)] * 9),
    # Heads and the inner features of the MLP are sharded. Norms and the outputs are replicated.
    "pairs": Layout(
        heads=(None, "model"),
        heads_bias=("model",),
        out=("model",),
        up=(None, "model"),
        up_bias=("model",),
        down=("model",),
    ),
}


def annotate(init: nnx.Initializer, axes: Axes) -> nnx.Initializer:
    """Return an initializer whose variables are annotated with mesh axes."""
    annotated: nnx.Initializer = nnx.with_partitioning(init, axes) if axes else init
    return annotated


def layer_norm(layout: Layout, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return a norm with annotations."""
    return nnx.LayerNorm(
        WIDTH,
        epsilon=1e-6,
        scale_init=annotate(nnx.initializers.ones, layout.norm),
        bias_init=annotate(nnx.initializers.zeros, layout.norm),
        rngs=rngs,
    )


class TransformerBlock(nnx.Module):
    """Attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, layout: Layout, dropout: float, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            layout: how the arrays are sharded.
            dropout: the dropout rate.
            rngs: random streams. Dropout needs them too, to train.
        """
        kernel, zeros = nnx.initializers.xavier_uniform(), nnx.initializers.zeros
        self.layer_norm1 = layer_norm(layout, rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=NUM_HEADS,
            in_features=WIDTH,
            kernel_init=annotate(kernel, layout.heads),
            bias_init=annotate(zeros, layout.heads_bias),
            out_kernel_init=annotate(kernel, layout.out),
            out_bias_init=annotate(zeros, layout.out_bias),
            decode=False,
            rngs=rngs,
        )
        self.dropout1 = nnx.Dropout(dropout, rngs=rngs)
        self.layer_norm2 = layer_norm(layout, rngs)
        self.linear1 = nnx.Linear(
            WIDTH,
            MLP_WIDTH,
            kernel_init=annotate(kernel, layout.up),
            bias_init=annotate(zeros, layout.up_bias),
            rngs=rngs,
        )
        self.linear2 = nnx.Linear(
            MLP_WIDTH,
            WIDTH,
            kernel_init=annotate(kernel, layout.down),
            bias_init=annotate(zeros, layout.down_bias),
            rngs=rngs,
        )
        self.dropout2 = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Return the outputs (B, T, D) of inputs (B, T, D).

        There is no argument that switches dropout off: `model.eval()` does, and shardwise calls it
        for evaluation.
        """
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))  # (B, 1, T, T)
        x = x + self.dropout1(self.attention(self.layer_norm1(x), mask=mask))
        hidden = nnx.gelu(self.linear1(self.layer_norm2(x)))  # (B, T, F)
        return x + self.dropout2(self.linear2(hidden))


class LanguageModel(nnx.Module):
    """A block between an embedding and a linear layer, which are replicated."""

    def __init__(self, layout: Layout, dropout: float, rngs: nnx.Rngs):
        """Create the parameters."""
        self.tokens = nnx.Embed(VOCAB_SIZE, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.block = TransformerBlock(layout, dropout, rngs)
        self.head = nnx.Linear(WIDTH, VOCAB_SIZE, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return the logits (B, T, V) of tokens (B, T)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        return self.head(self.block(x))


def loss(model: LanguageModel, batch: dict[str, Array]) -> Mean:
    """Return the loss of each byte, in nats."""
    logits = model(batch["inputs"])
    return Mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def make_batches() -> Batches:
    """Return batches of 16 sequences from the source code of the Python standard library."""
    train, _ = stdlib_bytes(max_bytes=2**20)
    return Batches(Tokens(train, LENGTH), batch_size=16)


def recipe(
    mesh: str = "data=-1",
    layout: LayoutName = "pairs",
    steps: int = 10,
    dropout: float = 0.1,
) -> Run:
    """Train a language model with one transformer block.

    Args:
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        layout: How the arrays of a block are sharded.
        steps: Number of training steps.
        dropout: Dropout rate.
    """
    return Run(
        model=lambda rngs: LanguageModel(LAYOUTS[layout], dropout, rngs),
        loss=loss,
        optimizer=optax.adam(1e-3),
        data=make_batches(),
        steps=steps,
        mesh=mesh,
        unit="tokens",
    )


def device_mesh(batch: int, model: int) -> Mesh:
    """Return a mesh made with JAX alone. "batch" is another name for the role of "data"."""
    devices = mesh_utils.create_device_mesh(
        (batch, model), jax.devices()[: batch * model]
    )
    return Mesh(devices, ("batch", "model"))


def train(
    mesh: Mesh, layout: LayoutName, num_steps: int = 10, dropout: float = 0.1
) -> list[float]:
    """Return the loss of each step."""
    run = recipe(layout=layout, steps=num_steps, dropout=dropout)
    batches = make_batches()
    spec = abstract_state(run.model, run.optimizer, mesh)
    step = make_train_step(spec, run.loss, batches(0))
    state = init_state(spec, seed=0)
    losses = steps(step, state, batches, until=num_steps)
    return [float(metrics["loss"]) for _, _, metrics in losses]


def collectives(layout: LayoutName, axis: str = "model") -> tuple[int, float]:
    """Return how many collectives of a step span a mesh axis, and the bytes of their arrays."""
    plan = plan_run(recipe("data=4,model=2", layout), "cpu:8")
    along = [traffic for traffic in plan.traffic if axis in traffic.axes.split("*")]
    return sum(traffic.count for traffic in along), sum(
        traffic.bytes for traffic in along
    )


def main() -> dict[str, float]:
    """Train on all meshes with both layouts.

    Returns:
        The largest difference of a loss from one device, and the collectives of both layouts.
    """
    expected = train(device_mesh(1, 1), "plain")
    print(f"one device, plain: loss {expected[0]:.6f} to {expected[-1]:.6f}")
    layouts: tuple[LayoutName, ...] = ("first-dim", "pairs")
    figures = {"loss": expected[-1]}
    differences = []
    for layout in layouts:
        for batch, model in MESHES:
            losses = train(device_mesh(batch, model), layout)
            differences.append(float(np.abs(np.subtract(losses, expected)).max()))
            print(
                f"{layout:9} on {batch} x {model}: loss {losses[-1]:.6f}, "
                f"largest difference {differences[-1]:.0e}"
            )
    for layout in layouts:
        count, size = collectives(layout)
        figures |= {f"{layout}_count": count, f"{layout}_bytes": size}
        print(
            f"{layout:9} on 4 x 2: {count} collectives along the model axis, "
            f"{size / 2**10:.0f} KiB per step"
        )
    return {**figures, "max_loss_difference": max(differences)}


if __name__ == "__main__":
    use_cpu_devices(8)
    main()
