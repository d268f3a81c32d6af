"""Generate handwritten digits with a flow model (flow matching, also called rectified flow).

    shardwise train recipes/flow.py --out runs/flow
    python examples/pictures.py flow runs/flow flow.png

A network learns the velocity that carries noise to images along straight lines. At time t from 0
to 1, a point of a line is `x = (1 - t) * noise + t * image`, and its velocity `image - noise`. To
generate an image, start from noise and follow the velocity that the network predicts.

Time and noise are drawn in the loss, from streams that depend on the seed and the step alone. So
every mesh, and a run that was stopped and resumed, draws the same numbers.

The data are the 8 x 8 digits of scikit-learn (pip install scikit-learn).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shardwise import Batches, Mean, Run, optim

NUM_PIXELS = 64
NUM_DIGITS = 10
# Sines and cosines that represent the time.
NUM_FREQUENCIES = 16
# Steps from noise to an image.
EULER_STEPS = 50
# Brightness as text, from dark to bright.
SHADES = " .:-=+*#%@"


class Block(nnx.Module):
    """A residual block with two linear layers. The condition is added between them."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        """Create the parameters."""
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.condition = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(
            width, width, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """Return the residual stream (B, width) after this block."""
        hidden = self.up(self.norm(x)) + self.condition(condition)
        return x + self.down(nnx.silu(hidden))


class Flow(nnx.Module):
    """The velocity of images of a digit at a time."""

    def __init__(self, width: int, num_blocks: int, rngs: nnx.Rngs):
        """Create the parameters.

        Args:
            width: the width of the residual stream.
            num_blocks: the number of residual blocks.
            rngs: random number generators.
        """
        self.pixels = nnx.Linear(NUM_PIXELS, width, rngs=rngs)
        self.digit = nnx.Embed(NUM_DIGITS, width, rngs=rngs)
        self.time = nnx.Linear(2 * NUM_FREQUENCIES, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, NUM_PIXELS, rngs=rngs)

    def __call__(self, x: jax.Array, time: jax.Array, digit: jax.Array) -> jax.Array:
        """Return velocities (B, 64).

        Args:
            x: images mixed with noise, (B, 64).
            time: (B,), from 0 (noise) to 1 (image).
            digit: (B,), the digit to draw.
        """
        angles = jnp.pi * time[:, None] * jnp.arange(1, NUM_FREQUENCIES + 1)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        condition = nnx.silu(self.time(waves) + self.digit(digit))
        hidden = self.pixels(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.out(self.norm(hidden))


def loss(model: Flow, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> Mean:
    """Return the squared error of the velocity of each image, a mean over its pixels."""
    image, digit = batch["image"], batch["label"]
    time = jax.random.uniform(rngs.time(), (len(image),))
    noise = jax.random.normal(rngs.noise(), image.shape)
    x = (1 - time[:, None]) * noise + time[:, None] * image
    error = model(x, time, digit) - (image - noise)
    return Mean((error**2).mean(-1))


@nnx.jit
def draw(model: Flow, digit: jax.Array, key: jax.Array) -> jax.Array:
    """Return generated images (B, 8, 8), from 0 to 1, of digits (B,)."""

    def step(number: int, x: jax.Array) -> jax.Array:
        time = jnp.full(len(x), number / EULER_STEPS)
        return x + model(x, time, digit) / EULER_STEPS

    noise = jax.random.normal(key, (len(digit), NUM_PIXELS))
    x: jax.Array = jax.lax.fori_loop(0, EULER_STEPS, step, noise)
    return jnp.clip((x + 1) / 2, 0, 1).reshape(-1, 8, 8)


def as_text(images: np.ndarray) -> str:
    """Return images (B, 8, 8), side by side, as text. A pixel is two characters wide."""
    shades = np.array(list(SHADES))[(images * (len(SHADES) - 1)).round().astype(int)]
    rows = np.repeat(shades, 2, axis=-1).transpose(1, 0, 2)
    return "\n".join("  ".join("".join(part) for part in row) for row in rows)


def sample(model: nnx.Module) -> str:
    """Return one generated image of each digit, as text."""
    assert isinstance(model, Flow)
    images = np.asarray(draw(model, jnp.arange(NUM_DIGITS), jax.random.key(0)))
    return f"{as_text(images[:5])}\n\n{as_text(images[5:])}"


def recipe(
    steps: int = 3000,
    mesh: str = "data=-1",
    out: Path | None = None,
    seed: int = 0,
    batch_size: int = 128,
    width: int = 256,
    num_blocks: int = 4,
    lr: float = 2e-3,
    clip: float = 1.0,
    ema: float = 0.998,
    eval_every: int = 500,
    save_every: int = 500,
) -> Run:
    """Train a flow model that generates handwritten digits.

    Args:
        steps: Number of training steps.
        mesh: Mesh axes and sizes. -1 stands for all remaining devices.
        out: Run directory. None writes no files.
        seed: Seed of the initial weights, the data order, and time and noise.
        batch_size: Images per step.
        width: Width of the residual stream.
        num_blocks: Number of residual blocks.
        lr: Peak learning rate.
        clip: Largest norm of all gradients. 0 does not clip.
        ema: Decay of the average of the weights, which evaluations and samples use.
        eval_every: Steps between evaluations. 0 evaluates only at the end.
        save_every: Steps between checkpoints. 0 saves only at the end.
    """
    pixels, label = load_digits(return_X_y=True)
    # From -1 to 1, with a mean near that of the noise.
    pixels = (pixels / 8 - 1).astype("float32")  # (1797, 64)
    train, validation, train_label, validation_label = train_test_split(
        pixels, label, test_size=0.25, random_state=0, stratify=label
    )
    schedule = optim.cosine(lr, steps, warmup=0.05)
    return Run(
        model=lambda rngs: Flow(width, num_blocks, rngs),
        loss=loss,
        optimizer=optim.adamw(
            schedule, weight_decay=0.01, clip=clip or None, ema=ema or None
        ),
        data=Batches({"image": train, "label": train_label}, batch_size, seed=seed),
        eval_data=Batches(
            {"image": validation, "label": validation_label}, batch_size=128
        ),
        steps=steps,
        mesh=mesh,
        seed=seed,
        eval_every=eval_every,
        save_every=save_every,
        out=out,
        sample=sample,
        unit="images",
    )
