"""Models, losses, optimizers and data of a case, as a user of Flax and Optax writes them.

Nothing here uses shardwise, except the optimizers of `shardwise.optim` in `make_optimizer`, which
have a counterpart that is chained from Optax by hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.fuzz.cases import Case

WIDTH, OUT, VOCAB, LENGTH = 8, 4, 12, 4
LR = 0.02
# Uniform numbers compile faster than normal ones.
INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")


# Models.


def make_model(case: Case) -> Callable[[nnx.Rngs], nnx.Module]:
    """Return the model factory of a case."""
    return lambda rngs: Net(case, rngs)


def make_wrt(case: Case) -> Any:
    """Return the filter of the variables that are trained."""
    if case.wrt == "kept":
        return nnx.Any(nnx.Param, nnx.PathContains("average"))
    if case.wrt:
        return nnx.All(nnx.Param, nnx.PathContains(case.wrt))
    return nnx.Param


class Net(nnx.Module):
    """A stem, some blocks and a head."""

    def __init__(self, case: Case, rngs: nnx.Rngs):
        make = partial(_linear, case, rngs)
        dtype = jnp.dtype(case.param_dtype)
        self.kind, self.tied = case.stem, case.tied
        if case.stem == "dense":
            self.stem = make(WIDTH, WIDTH)
        elif case.stem == "image":
            self.stem = nnx.Conv(
                2, WIDTH, (3, 3), kernel_init=INIT, param_dtype=dtype, rngs=rngs
            )
        else:
            self.stem = nnx.Embed(
                VOCAB, WIDTH, embedding_init=INIT, param_dtype=dtype, rngs=rngs
            )
            self.positions = nnx.Param(
                0.1 * jax.random.uniform(rngs.params(), (LENGTH, WIDTH), dtype)
            )
        self.blocks = nnx.List([BLOCKS[name](case, rngs) for name in case.blocks])
        if case.stem != "tokens":
            self.head = make(WIDTH, OUT, names=("mlp", None))
        elif not case.tied:
            self.head = make(WIDTH, VOCAB, names=("embed", "vocab"))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.stem(x)
        if self.kind == "image":
            h = nnx.relu(h).mean((1, 2))
        if self.kind == "tokens":
            h = h + self.positions[...]
        for block in self.blocks:
            h = block(h)
        return self.stem.attend(h) if self.tied else self.head(h)


def _linear(
    case: Case,
    rngs: nnx.Rngs,
    size: int,
    out: int,
    names: tuple[str | None, ...] = ("embed", "mlp"),
) -> nnx.Linear:
    init = INIT
    axes = {"embed": None, "mlp": "model", "vocab": "model", None: None}
    if case.annotate == "mesh":
        init = nnx.with_partitioning(init, tuple(axes[name] for name in names))
    elif case.annotate == "logical":
        init = nnx.with_partitioning(init, names)
    dtype = jnp.dtype(case.param_dtype)
    return nnx.Linear(size, out, kernel_init=init, param_dtype=dtype, rngs=rngs)


class Dense(nnx.Module):
    def __init__(self, case, rngs, activation=nnx.tanh):
        self.linear = _linear(case, rngs, WIDTH, WIDTH)
        self.activation = activation

    def __call__(self, h):
        return h + self.activation(self.linear(h))


class Norm(nnx.Module):
    def __init__(self, case, rngs, make=nnx.LayerNorm, **options):
        self.norm = make(
            WIDTH, param_dtype=jnp.dtype(case.param_dtype), rngs=rngs, **options
        )

    def __call__(self, h):
        return self.norm(h)


class Attention(nnx.Module):
    def __init__(self, case, rngs):
        self.attention = nnx.MultiHeadAttention(
            2,
            WIDTH,
            decode=False,
            kernel_init=INIT,
            param_dtype=jnp.dtype(case.param_dtype),
            rngs=rngs,
        )

    def __call__(self, h):
        mask = nnx.make_causal_mask(jnp.ones(h.shape[:2]))
        return h + self.attention(h, mask=mask)


class Shared(nnx.Module):
    """One layer, used twice."""

    def __init__(self, case, rngs):
        self.once = _linear(case, rngs, WIDTH, WIDTH)
        self.again = self.once

    def __call__(self, h):
        return self.again(nnx.tanh(self.once(h)))


class Scan(nnx.Module):
    """Two stacked layers, run by `nnx.scan`, with or without `nnx.remat`."""

    def __init__(self, case, rngs, remat=False):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs):
            return Dense(case, rngs)

        self.layers = stack(rngs)
        self.remat = remat

    def __call__(self, h):
        def layer(h, block):
            return block(h)

        layer = nnx.remat(layer) if self.remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            h, self.layers
        )


class Remat(Dense):
    def __call__(self, h):
        return nnx.remat(lambda self, h: Dense.__call__(self, h))(self, h)


class Einsum(nnx.Module):
    def __init__(self, case, rngs):
        dtype = jnp.dtype(case.param_dtype)
        self.layer = nnx.Einsum(
            "...d,de->...e",
            (WIDTH, WIDTH),
            (WIDTH,),
            kernel_init=INIT,
            param_dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, h):
        return nnx.tanh(self.layer(h))


class Lora(nnx.Module):
    def __init__(self, case, rngs):
        dtype = jnp.dtype(case.param_dtype)
        self.layer = nnx.LoRALinear(
            WIDTH,
            WIDTH,
            lora_rank=2,
            kernel_init=INIT,
            a_initializer=INIT,
            param_dtype=dtype,
            lora_param_dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, h):
        return h + nnx.tanh(self.layer(h))


class Table(nnx.Module):
    """Scales by an array that is no variable, such as a table of rotary embeddings."""

    def __init__(self, case, rngs):
        self.table = jnp.linspace(0.5, 1.5, WIDTH)

    def __call__(self, h):
        return (h * self.table).astype(h.dtype)


class SpectralNormed(nnx.Module):
    """Flax's layer, which writes the parameter that it normalizes."""

    def __init__(self, case, rngs):
        linear = _linear(case, rngs, WIDTH, WIDTH)
        self.norm = nnx.SpectralNorm(linear, error_on_non_matrix=False, rngs=rngs)

    def __call__(self, h):
        return h + nnx.tanh(self.norm(h, update_stats=True))


class Clipped(nnx.Module):
    """Keeps its weights in a range, by writing them before it uses them."""

    def __init__(self, case, rngs):
        self.scale = nnx.Param(jnp.linspace(-1, 1, WIDTH))

    def __call__(self, h):
        self.scale[...] = jnp.clip(self.scale[...], -0.5, 0.5)
        return h * (1 + self.scale[...]).astype(h.dtype)


class Gate(nnx.Module):
    """Two branches that a learned gate mixes, example by example."""

    def __init__(self, case, rngs):
        self.gate = _linear(case, rngs, WIDTH, 2, ("embed", None))
        self.left, self.right = Dense(case, rngs), Dense(case, rngs, nnx.gelu)

    def __call__(self, h):
        weights = jax.nn.softmax(self.gate(h))
        return weights[..., :1] * self.left(h) + weights[..., 1:] * self.right(h)


class Sow(Dense):
    def __call__(self, h):
        h = super().__call__(h)
        self.sow(nnx.Intermediate, "h", h)
        return h


class Centered(nnx.Module):
    """Subtracts the mean over the batch, without keeping it."""

    def __init__(self, case, rngs):
        self.linear = _linear(case, rngs, WIDTH, WIDTH)

    def __call__(self, h):
        return self.linear(h - h.mean(0))


class AcrossBatch(nnx.Module):
    """Attention between the examples of a batch."""

    def __init__(self, case, rngs):
        self.query = _linear(case, rngs, WIDTH, WIDTH)

    def __call__(self, h):
        flat = h.reshape(len(h), -1)
        query = self.query(h).reshape(len(h), -1)
        return h + (jax.nn.softmax(query @ flat.T) @ flat).reshape(h.shape)


class Moe(nnx.Module):
    """Experts with a capacity: later examples lose their place in a full expert."""

    def __init__(self, case, rngs):
        self.router = _linear(case, rngs, WIDTH, 2, ("embed", None))
        self.experts = nnx.Param(
            jax.random.uniform(rngs.params(), (2, WIDTH, WIDTH), minval=-0.5)
        )

    def __call__(self, h):
        flat = h.reshape(-1, WIDTH)
        gates = jax.nn.softmax(self.router(flat))
        chosen = jax.nn.one_hot(gates.argmax(1), 2)
        places = jnp.cumsum(chosen, 0) * chosen
        chosen = chosen * (places <= len(flat) // 2)
        experts = self.experts[...].astype(h.dtype)
        out = jnp.einsum("nd,kde,nk->ne", flat, experts, chosen * gates)
        return h + out.reshape(h.shape).astype(h.dtype)


class Jitted(Dense):
    def __call__(self, h):
        return nnx.jit(lambda self, h: Dense.__call__(self, h))(self, h)


class Branched(nnx.Module):
    """A branch that a variable decides, by `nnx.cond`."""

    def __init__(self, case, rngs):
        self.left, self.right = Dense(case, rngs), Dense(case, rngs, nnx.gelu)
        self.switch = Kept(jnp.ones(()))

    def __call__(self, h):
        def left(block, h):
            return block.left(h)

        def right(block, h):
            return block.right(h)

        return nnx.cond(self.switch[...] > 0, left, right, self, h)


class Ensemble(nnx.Module):
    """Three layers by `nnx.vmap`, averaged."""

    def __init__(self, case, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs):
            return Dense(case, rngs)

        self.layers = stack(rngs)

    def __call__(self, h):
        return nnx.vmap(lambda layer, h: layer(h), in_axes=(0, None))(
            self.layers, h
        ).mean(0)


class Conv(nnx.Module):
    """A convolution over the features, with padding and a bias."""

    def __init__(self, case, rngs):
        dtype = jnp.dtype(case.param_dtype)
        self.conv = nnx.Conv(1, 2, (3,), kernel_init=INIT, param_dtype=dtype, rngs=rngs)

    def __call__(self, h):
        return h + self.conv(h[..., None]).mean(-1).astype(h.dtype)


class Recurrent(nnx.Module):
    """A GRU over the tokens, or over the features as a sequence."""

    def __init__(self, case, rngs):
        dtype = jnp.dtype(case.param_dtype)
        size = WIDTH if case.stem == "tokens" else 1
        cell = nnx.GRUCell(
            size,
            WIDTH,
            kernel_init=INIT,
            recurrent_kernel_init=INIT,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.rnn = nnx.RNN(cell)

    def __call__(self, h):
        if h.ndim == 3:
            return h + self.rnn(h).astype(h.dtype)
        return h + self.rnn(h[..., None])[:, -1].astype(h.dtype)


class Kept(nnx.Variable):
    """A variable that a model updates by itself."""


class Counter(nnx.Module):
    """Counts the calls of training, and scales by the count."""

    def __init__(self, case, rngs):
        self.calls = Kept(jnp.zeros((), jnp.int32))
        self.training = True

    def set_mode(self, deterministic=None, **modes):
        self.training = not deterministic
        return modes

    def __call__(self, h):
        self.calls[...] = self.calls[...] + 1
        return h * (1 + 0.01 * self.calls[...])


class Ema(nnx.Module):
    """Keeps a moving average of its input over the batch, and subtracts it."""

    def __init__(self, case, rngs):
        self.average = Kept(jnp.zeros(WIDTH))

    def __call__(self, h):
        mean = h.reshape(-1, WIDTH).mean(0).astype(jnp.float32)
        out = h - 0.5 * self.average[...].astype(h.dtype)
        self.average[...] = 0.8 * self.average[...] + 0.2 * mean
        return out


class Codebook(nnx.Module):
    """Vector quantization whose codes are moving averages, with straight-through gradients."""

    def __init__(self, case, rngs):
        self.codes = Kept(jax.random.normal(rngs.params(), (4, WIDTH)))
        self.sizes = Kept(jnp.ones(4))

    def __call__(self, h):
        flat = h.reshape(-1, WIDTH).astype(jnp.float32)
        distances = ((flat[:, None] - self.codes[...]) ** 2).sum(-1)
        chosen = jax.nn.one_hot(distances.argmin(1), 4)
        picked = (chosen @ self.codes[...]).reshape(h.shape).astype(h.dtype)
        flat, chosen = jax.lax.stop_gradient((flat, chosen))
        self.sizes[...] = 0.9 * self.sizes[...] + 0.1 * chosen.sum(0)
        sums = 0.9 * self.codes[...] + 0.1 * chosen.T @ flat
        self.codes[...] = sums / jnp.maximum(self.sizes[...], 0.5)[:, None]
        return h + 0.5 * jax.lax.stop_gradient(picked - h)


class Spectral(nnx.Module):
    """Keeps the estimate of a singular vector, updated once per call."""

    def __init__(self, case, rngs):
        self.linear = _linear(case, rngs, WIDTH, WIDTH)
        self.vector = Kept(jnp.ones(WIDTH))

    def __call__(self, h):
        kernel = self.linear.kernel[...].astype(jnp.float32)
        left = kernel @ self.vector[...]
        vector = kernel.T @ (left / jnp.linalg.norm(left))
        vector = jax.lax.stop_gradient(vector)
        self.vector[...] = vector / jnp.linalg.norm(vector)
        return nnx.tanh(self.linear(h)) / (1 + jnp.linalg.norm(vector)).astype(h.dtype)


class Frequency(nnx.Module):
    """Counts positive activations as integers, over all examples so far."""

    def __init__(self, case, rngs):
        self.counts = Kept(jnp.zeros(WIDTH, jnp.int32))

    def __call__(self, h):
        positive = (h.reshape(-1, WIDTH) > 0).sum(0)
        self.counts[...] = self.counts[...] + positive
        return h


class Slots(nnx.Module):
    """Adds a parameter for each position in the batch."""

    def __init__(self, case, rngs):
        self.slots = nnx.Param(jax.random.uniform(rngs.params(), (64, WIDTH)))

    def __call__(self, h):
        slots = self.slots[...][: len(h)].astype(h.dtype)
        return h + slots.reshape(len(h), *(1,) * (h.ndim - 2), WIDTH)


class Carried(nnx.Module):
    """Keeps a hidden state for each example of the batch, as truncated backpropagation does."""

    def __init__(self, case, rngs):
        self.linear = _linear(case, rngs, WIDTH, WIDTH)
        self.hidden = Kept(jnp.zeros((case.batch_size, WIDTH)))

    def __call__(self, h):
        flat = h.reshape(len(h), -1, WIDTH)
        if len(h) == len(self.hidden[...]):
            hidden = nnx.tanh(self.linear(flat.mean(1) + self.hidden[...]))
            self.hidden[...] = jax.lax.stop_gradient(hidden.astype(jnp.float32))
        else:
            hidden = nnx.tanh(self.linear(flat.mean(1)))
        return (flat + hidden[:, None].astype(h.dtype)).reshape(h.shape)


class MaskBuffer(nnx.Module):
    """Keeps a mask of zeros and minus infinity, as models ported from PyTorch do."""

    def __init__(self, case, rngs):
        self.query = _linear(case, rngs, WIDTH, WIDTH)
        self.mask = Kept(jnp.where(jnp.tri(WIDTH, dtype=bool), 0.0, -jnp.inf))

    def __call__(self, h):
        scores = self.query(h)[..., None] * h[..., None, :] + self.mask[...]
        weights = jax.nn.softmax(scores.astype(jnp.float32))
        return (weights * h[..., None, :]).sum(-1).astype(h.dtype)


class Noise(nnx.Module):
    def __init__(self, case, rngs):
        self.rngs = rngs.fork()

    def __call__(self, h):
        return h + 0.1 * jax.random.normal(self.rngs.default(), h.shape, h.dtype)


class Drop(nnx.Module):
    def __init__(self, case, rngs):
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, h):
        return self.dropout(h)


BLOCKS: dict[str, Callable[[Case, nnx.Rngs], nnx.Module]] = {
    "linear": Dense,
    "relu": partial(Dense, activation=nnx.relu),
    "layernorm": Norm,
    "rmsnorm": partial(Norm, make=nnx.RMSNorm),
    "groupnorm": partial(Norm, make=nnx.GroupNorm, num_groups=2),
    "batchnorm": partial(Norm, make=nnx.BatchNorm, momentum=0.8),
    "attention": Attention,
    "shared": Shared,
    "scan": Scan,
    "remat": Remat,
    "remat_scan": partial(Scan, remat=True),
    "einsum": Einsum,
    "lora": Lora,
    "table": Table,
    "spectralnorm": SpectralNormed,
    "clipped": Clipped,
    "gate": Gate,
    "sow": Sow,
    "jitted": Jitted,
    "branched": Branched,
    "ensemble": Ensemble,
    "conv": Conv,
    "recurrent": Recurrent,
    "centered": Centered,
    "across_batch": AcrossBatch,
    "moe": Moe,
    "counter": Counter,
    "ema": Ema,
    "codebook": Codebook,
    "spectral": Spectral,
    "frequency": Frequency,
    "mask_buffer": MaskBuffer,
    "slots": Slots,
    "carried": Carried,
    "dropout": Drop,
    "noise": Noise,
}


# Losses.


@dataclass(frozen=True)
class Scalar:
    """A loss or a metric that is one number.

    Attributes:
        value: the number.
        is_sum: whether the numbers of parts of a batch add up, instead of being averaged.
    """

    value: Any
    is_sum: bool = False


@dataclass(frozen=True)
class Weighted:
    """A loss or a metric that is a total divided by a weight.

    Attributes:
        total: values of any shape.
        weight: their weights; None for ones.
    """

    total: Any
    weight: Any = None


Term = Scalar | Weighted
Terms = tuple[Term, dict[str, Term]]


@dataclass(frozen=True)
class Facts:
    """What losses are computed from.

    Attributes:
        model: the model.
        errors: errors of each element of each example, (B, K).
        features: the outputs of the model, (B, F).
        w: weights of the examples, (B,).
        m: weights of the elements, (B, K).
        x: the inputs of the model.
        step: the number of steps before this one.
    """

    model: nnx.Module
    errors: jax.Array
    features: jax.Array
    w: jax.Array
    m: jax.Array
    x: jax.Array
    step: jax.Array

    @property
    def rows(self) -> jax.Array:
        return self.errors.mean(1)

    @property
    def penalty(self) -> jax.Array:
        leaves = jax.tree.leaves(nnx.state(self.model, nnx.Param))
        return 0.05 * sum(jnp.square(leaf.astype(jnp.float32)).sum() for leaf in leaves)


def make_terms(case: Case) -> Callable[..., Terms]:
    """Return `terms(model, batch, step)`: the loss and the metrics of a case."""
    # Not created while a loss is traced: its arrays would be tracers.
    _teacher()

    def terms(model: nnx.Module, batch: Any, step: Any = 0) -> Terms:
        x, y, w, m = unpack(case, batch)
        out = model(x)
        if case.stem == "tokens":
            errors = optax.softmax_cross_entropy_with_integer_labels(
                out.astype(jnp.float32), y
            )
        else:
            errors = (out.astype(jnp.float32) - y.astype(jnp.float32)) ** 2
        features = out.reshape(out.shape[0], -1).astype(jnp.float32)
        w, m = w.astype(jnp.float32), m.astype(jnp.float32)
        errors = errors * (1 + 0.1 * step)
        facts = Facts(model, errors, features, w, m, x, step)
        metrics = {f"m_{name}": TERMS[name](facts) for name in case.metrics}
        return TERMS[case.loss](facts), metrics

    return terms


def _contrastive(f: Facts) -> Term:
    z = f.features / (1e-3 + jnp.linalg.norm(f.features, axis=1, keepdims=True))
    scores = z @ z.T / 0.5 - 10 * jnp.eye(len(z))
    nearest = (jnp.arange(len(z)) + 1) % len(z)
    return Scalar(
        optax.softmax_cross_entropy_with_integer_labels(scores, nearest).mean()
    )


def _pairwise(f: Facts) -> Term:
    distances = ((f.features[:, None] - f.features[None]) ** 2).mean(-1)
    return Scalar((distances * jnp.abs(f.w[:, None] - f.w[None])).mean())


def _standardized(f: Facts) -> Term:
    z = f.features
    z = (z - z.mean(0)) / (0.1 + z.std(0))
    return Scalar(f.rows.mean() + (z**3).mean())


def _normalized_rows(f: Facts) -> Term:
    """One entry per example, but each entry depends on the others."""
    return Weighted(f.rows / jax.lax.stop_gradient(0.1 + f.rows.mean()) * f.w)


def _mean_plus_sum(f: Facts) -> Term:
    return Scalar(f.rows.mean() + 0.1 * (f.features**2).sum())


def _gradient_penalty(f: Facts) -> Term:
    """The norm of the gradient at each input, as in the loss of a Wasserstein GAN."""
    if jnp.issubdtype(f.x.dtype, jnp.integer):
        return Scalar(f.errors.mean())
    slopes = jax.grad(lambda x: f.model(x).sum())(f.x.astype(jnp.float32))
    norms = jnp.sqrt(1e-3 + (slopes.reshape(len(slopes), -1) ** 2).sum(1))
    return Weighted(f.rows + (norms - 1) ** 2)


def _by_class(f: Facts) -> Term:
    """The mean over classes of the mean over the examples of a class."""
    classes = jax.nn.one_hot((f.w > 1).astype(jnp.int32), 2)
    sums, counts = classes.T @ f.rows, classes.sum(0)
    return Scalar((sums / jnp.maximum(counts, 1)).mean())


def _segments(f: Facts) -> Term:
    classes = (f.w > 1).astype(jnp.int32)
    return Scalar(0.01 * (jax.ops.segment_sum(f.rows, classes, 2) ** 2).mean())


def _scanned(f: Facts) -> Term:
    """A recurrence over the examples."""

    def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = 0.5 * carry + row
        return carry, carry

    return Scalar(jax.lax.scan(body, jnp.float32(0), f.rows)[1].mean())


def _mapped(f: Facts) -> Term:
    return Weighted(jax.lax.map(lambda row: jnp.tanh(row).sum(), f.errors))


def _looped(f: Facts) -> Term:
    """A sum over the examples as a loop."""

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + f.rows[i]

    return Scalar(jax.lax.fori_loop(0, len(f.rows), add, jnp.float32(0)) / len(f.rows))


def _branched(f: Facts) -> Term:
    """A branch that the whole batch decides."""
    return Scalar(
        jax.lax.cond(
            f.rows.mean() > 1, lambda e: e.mean(), lambda e: 2 * e.mean(), f.errors
        )
    )


@jax.custom_vjp
def _halved_gradient(x: jax.Array) -> jax.Array:
    return x


_halved_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


@jax.custom_vjp
def _normalized_gradient(x: jax.Array) -> jax.Array:
    return x


_normalized_gradient.defvjp(
    lambda x: (x, None), lambda _, g: (g / (1e-3 + jnp.linalg.norm(g)),)
)


@jax.custom_vjp
def _clipped_gradient(x: jax.Array) -> jax.Array:
    return x


_clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.02, 0.02),))


def _alternate(f: Facts) -> Term:
    """Every second example is replaced by the first one."""
    own = jnp.arange(len(f.rows))
    return Weighted(f.rows[jnp.where(own % 2 == 0, own, 0)])


def _lookup(f: Facts) -> Term:
    table = jnp.linspace(0, 3, 64) ** 2
    return Scalar(f.errors.sum() + table[(f.rows > 0.5).sum()])


def _scattered(f: Facts) -> Term:
    backward = jnp.arange(len(f.rows))[::-1]
    return Weighted(f.errors.at[backward].multiply(1 + f.m))


def _sliced_update(f: Facts) -> Term:
    return Weighted(jax.lax.dynamic_update_slice(f.rows, jnp.zeros(1), (0,)))


def _shifted(f: Facts) -> Term:
    """The difference to the next example; the last one has no next."""
    following = f.rows[jnp.arange(len(f.rows)) + 1]
    return Scalar(jnp.abs(f.rows - following).mean() + f.rows.mean())


def _pinn(f: Facts) -> Term:
    """Second derivatives at the inputs, as in the residual of a differential equation."""
    if f.x.ndim != 2 or not jnp.issubdtype(f.x.dtype, jnp.floating):
        return Scalar(f.errors.mean())
    x = f.x.astype(jnp.float32)
    graphdef, state = nnx.split(f.model)

    def slope(x: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return jax.jvp(lambda x: model(x), (x,), (jnp.ones_like(x),))[1]

    curvature = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
    return Weighted(f.rows + (curvature**2).mean(1))


def _maml(f: Facts) -> Term:
    """The loss after one inner step of gradient descent on the same batch."""
    if not jnp.issubdtype(f.x.dtype, jnp.floating):
        return Scalar(f.errors.mean())
    graphdef, params, rest = nnx.split(f.model, nnx.Param, ...)

    def inner(params: Any) -> jax.Array:
        return (nnx.merge(graphdef, params, rest)(f.x) ** 2).mean()

    grads = jax.grad(inner)(params)
    adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    out = nnx.merge(graphdef, adapted, rest)(f.x)
    return Scalar((out.astype(jnp.float32) ** 2).mean() + f.errors.mean())


def _hessian(f: Facts) -> Term:
    """The curvature of the loss along the parameters, forward over reverse."""
    if not jnp.issubdtype(f.x.dtype, jnp.floating):
        return Scalar(f.errors.mean())
    graphdef, params, rest = nnx.split(f.model, nnx.Param, ...)

    def inner(params: Any) -> jax.Array:
        return (nnx.merge(graphdef, params, rest)(f.x) ** 2).mean()

    _, product = jax.jvp(jax.grad(inner), (params,), (params,))
    sizes = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(product)]
    return Scalar(f.errors.mean() + 1e-3 * sum(sizes))


def _sown(f: Facts) -> Term:
    """Add what the model has sown, as auxiliary losses of experts do."""
    leaves = jax.tree.leaves(nnx.state(f.model, nnx.Intermediate))
    return Scalar(f.errors.mean() + 0.1 * sum(jnp.mean(leaf**2) for leaf in leaves))


def _gate(f: Facts) -> jax.Array:
    """Return weights of the examples that the model computes."""
    return jax.nn.sigmoid(f.features[:, 0])


@cache
def _teacher() -> nnx.Module:
    return nnx.Linear(WIDTH, OUT, rngs=nnx.Rngs(7))


def _distilled(f: Facts) -> Term:
    """Follow a module that the loss refers to, and that is no part of the model."""
    if f.x.ndim != 2 or not jnp.issubdtype(f.x.dtype, jnp.floating):
        return Scalar(f.errors.mean())
    goal = jax.lax.stop_gradient(_teacher()(f.x.astype(jnp.float32)))
    return Weighted((f.features - goal) ** 2)


def _positions(f: Facts) -> jax.Array:
    """Return a number for each position in the batch."""
    return jnp.linspace(0.5, 1.5, len(f.rows))


def _above_mean(f: Facts) -> Term:
    """One entry per example, of those that are worse than the mean."""
    is_bad = (f.rows > f.rows.mean()).astype(jnp.float32)
    return Weighted(f.rows * is_bad, is_bad)


def _some_param(f: Facts) -> jax.Array:
    """Return a vector of parameters, which may be as long as the batch."""
    leaves = jax.tree.leaves(nnx.state(f.model.stem, nnx.Param))
    return leaves[0].reshape(-1)[:WIDTH].astype(jnp.float32)


def _pairs(f: Facts) -> Term:
    """One entry per pair of neighbors."""
    rows = jnp.concatenate([f.rows, f.rows[:1]]) if len(f.rows) % 2 else f.rows
    return Weighted(jnp.abs(rows[::2] - rows[1::2]) + f.rows.mean())


TERMS: dict[str, Callable[[Facts], Term]] = {
    "row_max": lambda f: Scalar(f.errors.max(1).mean()),
    "mean_of_columns": lambda f: Scalar(f.errors.mean(0).sum()),
    "mean_times_count": lambda f: Scalar(f.errors.mean() * len(f.rows), is_sum=True),
    "scaled_sum": lambda f: Scalar(f.errors.sum() / 16, is_sum=True),
    "two_means": lambda f: Scalar(f.errors.mean() + 0.1 * (f.features**2).mean()),
    "flat": lambda f: Weighted(f.errors.reshape(-1)),
    "flat_weighted": lambda f: Weighted((f.errors * f.m).reshape(-1), f.m.reshape(-1)),
    "row_weight": lambda f: Weighted(f.errors * f.w[:, None], f.w),
    "dot": lambda f: Scalar(jnp.dot(f.rows, f.w) / len(f.rows)),
    "einsum": lambda f: Scalar(jnp.einsum("bk,bk->", f.errors, f.m) / f.m.size),
    "vmapped": lambda f: Scalar(
        jax.vmap(lambda e, m: (e * m).sum() / m.sum())(f.errors, f.m).mean()
    ),
    "mapped": _mapped,
    "looped": _looped,
    "gradient_penalty": _gradient_penalty,
    "halved": lambda f: Scalar(_halved_gradient(f.errors).mean()),
    "checkpointed": lambda f: Weighted(jax.checkpoint(jnp.tanh)(f.rows)),
    "reversed": lambda f: Weighted(f.rows[::-1] * f.w[::-1], f.w[::-1]),
    "transposed": lambda f: Weighted((f.errors * f.m).T, f.m.T),
    "wrong_weight": lambda f: Weighted(f.rows * f.w[::-1], f.w + 0.5),
    "columns": lambda f: Weighted(f.errors.mean(0)),
    "param_rows": lambda f: Weighted(f.rows.mean() + _some_param(f) ** 2),
    "column_weights": lambda f: Weighted((f.errors * f.m).sum(0), f.m.sum(0)),
    "learned_weight": lambda f: Weighted(f.rows * _gate(f), _gate(f)),
    "learned_scalar_weight": lambda f: Weighted(
        f.rows.sum(), len(f.rows) * (1 + _some_param(f)[0] ** 2)
    ),
    "learned_sums": lambda f: Weighted((f.rows * _gate(f)).sum(), _gate(f).sum()),
    "distilled": _distilled,
    "pinn": _pinn,
    "maml": _maml,
    "hessian": _hessian,
    "sown": _sown,
    "scaled_rows": lambda f: Scalar((f.rows / len(f.rows)).sum()),
    "scaled_row_mean": lambda f: Weighted(f.rows * (8 / len(f.rows))),
    "size_weight": lambda f: Weighted(f.rows, jnp.full(len(f.rows), 1 / len(f.rows))),
    "size_branch": lambda f: Weighted(f.rows * (2.0 if len(f.rows) < 6 else 1.0)),
    "positional": lambda f: Weighted(f.rows * _positions(f)),
    "positional_dot": lambda f: Scalar(jnp.dot(f.rows, _positions(f)) / len(f.rows)),
    "triangle": lambda f: Scalar(
        (jnp.tril(jnp.ones((len(f.rows), len(f.rows)))) @ f.rows).mean()
    ),
    "indexed_half": lambda f: Scalar(f.rows[jnp.arange((len(f.rows) + 1) // 2)].mean()),
    "indexed_four": lambda f: Scalar(f.rows[jnp.arange(4)].mean()),
    "indexed_rows": lambda f: Weighted(f.rows[jnp.arange(2 * len(f.rows))]),
    "first_group": lambda f: Scalar(
        jax.ops.segment_sum(f.rows, jnp.arange(len(f.rows)) // 2, len(f.rows))[0]
    ),
    "random_pairs": lambda f: Scalar(
        jnp.abs(
            f.rows - f.rows[jax.random.permutation(jax.random.key(1), len(f.rows))]
        ).mean()
    ),
    "stacked": lambda f: Weighted(jnp.stack([f.rows, f.w * f.rows], 1).reshape(-1)),
    "outer_weights": lambda f: Weighted(f.errors, jnp.ones((len(f.rows), 1))),
    "shifted": _shifted,
    "alternate": _alternate,
    "sliced_update": _sliced_update,
    "lookup": _lookup,
    "truncated": lambda f: Scalar(f.errors.sum().astype(jnp.int32), is_sum=True),
    "padded_sum": lambda f: Scalar(
        jnp.pad(f.errors.sum(0), 1, constant_values=1.0).sum()
    ),
    "selected_sum": lambda f: Scalar(
        jnp.where(jnp.arange(f.errors.shape[1]) < 2, f.errors.sum(0), 5.0).sum()
    ),
    "param_scale": lambda f: Scalar(
        (1 + _some_param(f)[0] ** 2) / len(f.rows) * f.errors.sum()
    ),
    "param_divided": lambda f: Scalar(
        f.errors.sum() / (len(f.rows) * (1 + _some_param(f)[0] ** 2))
    ),
    "column_scale": lambda f: Scalar(
        (jnp.arange(f.errors.shape[1]) / len(f.rows)) @ f.errors.sum(0)
    ),
    "normalized_gradient": lambda f: Scalar(_normalized_gradient(f.errors).mean()),
    "clipped_gradient": lambda f: Scalar((_clipped_gradient(f.features) ** 2).mean()),
    "scattered": _scattered,
    "accuracy": lambda f: Weighted(f.features.argmax(1) % 2 == 0),
    "sum_over_sqrt": lambda f: Scalar(f.errors.sum() / len(f.rows) ** 0.5),
    "column_max": lambda f: Scalar(f.errors.mean(0).max()),
    "squared_sums": lambda f: Scalar(0.01 * (f.errors.sum(0) ** 2).mean()),
    "abs_mean": lambda f: Scalar(jnp.abs(f.features.mean())),
    "hinge_mean": lambda f: Scalar(jax.nn.relu(f.errors.mean() - 0.5)),
    "product": lambda f: Scalar(f.errors.mean() * f.w.mean()),
    "product_sums": lambda f: Scalar(f.errors.mean() * (1 + f.features.mean() ** 2)),
    "variance": lambda f: Scalar(f.rows.mean() + f.features.var(0).mean()),
    "covariance": lambda f: Scalar((f.features.T @ f.features / f.w.size).mean()),
    "by_class": _by_class,
    "segments": _segments,
    "cumsum": lambda f: Scalar(jnp.cumsum(f.rows).mean()),
    "scanned": _scanned,
    "branched": _branched,
    "top": lambda f: Scalar(jax.lax.top_k(f.rows, 2)[0].mean()),
    "top_rows": lambda f: Weighted(jax.lax.top_k(f.rows, len(f.rows))[0] * f.w),
    "above_mean": _above_mean,
    "below_max": lambda f: Weighted(jnp.where(f.rows < f.rows.max(), f.rows, 0.0)),
    "pairs": _pairs,
    "clipped_rows": lambda f: Weighted(jnp.minimum(f.rows, 1.5 * f.rows.mean())),
    "softmax_rows": lambda f: Weighted(f.rows * jax.nn.softmax(f.rows) * f.w.size),
    "taken": lambda f: Scalar(f.rows[jnp.argsort(f.w)[: (len(f.w) + 1) // 2]].mean()),
    "conv": lambda f: Scalar(jnp.convolve(f.rows, jnp.ones(2) / 2, "same").mean()),
    "fft": lambda f: Scalar(jnp.abs(jnp.fft.fft(f.rows)).mean()),
    "outer": lambda f: Weighted((f.rows[:, None] * f.w[None]).mean(1)),
    "broadcast": lambda f: Weighted((f.rows[:, None] - f.w) ** 2),
    "last": lambda f: Scalar(f.rows[-1] + f.rows.mean()),
    "total_weight": lambda f: Weighted(f.rows * f.w, f.w / f.w.sum()),
    "scalar_weight": lambda f: Weighted(f.rows, f.w.sum()),
    "mean_as_total": lambda f: Weighted(f.errors.mean(), 1.0),
    "repeated": lambda f: Weighted(jnp.repeat(f.rows, 2)),
    "max_weight": lambda f: Weighted(f.rows * f.w / f.w.max(), f.w),
    "mean": lambda f: Scalar(f.errors.mean()),
    "sum": lambda f: Scalar(f.errors.sum(), is_sum=True),
    "rows": lambda f: Weighted(f.rows),
    "rows_weighted": lambda f: Weighted(f.rows * f.w, f.w),
    "row_sums": lambda f: Weighted(f.errors.sum(1), jnp.full(f.w.shape, 2.0)),
    "tokens": lambda f: Weighted(f.errors * f.m, f.m),
    "tokens_plain": lambda f: Weighted(f.errors),
    "summed": lambda f: Weighted((f.errors * f.m).sum(), f.m.sum()),
    "summed_ints": lambda f: Weighted(f.errors.sum(), f.errors.shape[0]),
    "masked_mean": lambda f: Scalar((f.errors * f.m).sum() / f.m.sum()),
    "weighted": lambda f: Scalar((f.rows * f.w).sum() / f.w.sum()),
    "row_means": lambda f: Scalar(
        ((f.errors * f.m).sum(1) / jnp.maximum(f.m.sum(1), 1)).mean()
    ),
    "mean_plus_sum": _mean_plus_sum,
    "half_precision": lambda f: Weighted(f.rows.astype(jnp.bfloat16)),
    "mean_reg": lambda f: Scalar(f.errors.mean() + f.penalty),
    "sum_reg": lambda f: Scalar(f.errors.sum() + f.penalty),
    "rows_reg": lambda f: Weighted(f.rows + f.penalty),
    "summed_reg": lambda f: Weighted(f.rows.sum() + f.penalty, f.w.size),
    "contrastive": _contrastive,
    "pairwise": _pairwise,
    "standardized": _standardized,
    "max": lambda f: Scalar(f.rows.max()),
    "lse": lambda f: Scalar(jax.nn.logsumexp(f.rows)),
    "rms": lambda f: Scalar(jnp.sqrt(f.errors.mean())),
    "first_half": lambda f: Scalar(f.rows[: (len(f.rows) + 1) // 2].mean()),
    "sorted": lambda f: Scalar(jnp.sort(f.rows)[: (len(f.rows) + 1) // 2].mean()),
    "rolled": lambda f: Scalar(
        ((f.features - jnp.roll(f.features, 1, 0)) ** 2).mean() + f.rows.mean()
    ),
    "normalized_rows": _normalized_rows,
    "ratio": lambda f: Scalar(f.rows.sum() / (1 + (f.features**2).sum())),
    "centered": lambda f: Weighted((f.features - f.features.mean(0)) ** 2),
    "constant": lambda f: Scalar(jnp.float32(2.5)),
    "python_float": lambda f: Scalar(1.5),
    "count": lambda f: Scalar(f.errors.shape[0]),
    "int_sum": lambda f: Scalar((f.errors > 0.5).sum(), is_sum=True),
    "bool_rows": lambda f: Weighted(f.rows > 0.5),
    "weight_norm": lambda f: Scalar(jnp.sqrt(f.penalty)),
}


# Optimizers.


def make_optimizer(case: Case) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Return the optimizer for shardwise, the same one by hand, and the weights to evaluate.

    The third one is a function from (state of the optimizer by hand, parameters) to weights.
    """
    from shardwise import optim

    def same(tx: Any) -> tuple[Any, Any, Any]:
        return tx, tx, lambda state, params: params

    def both(ours: Any, by_hand: Any) -> tuple[Any, Any, Any]:
        return ours, by_hand, lambda state, params: params

    adam = partial(optax.scale_by_adam, eps=1e-3)
    decay = optax.add_decayed_weights(0.1, is_kernel)
    cosine = optax.warmup_cosine_decay_schedule(0.0, LR, 2, 6, 0.1 * LR)
    down = optax.scale_by_learning_rate(LR)
    name = case.optimizer
    if name == "sgd":
        return same(optax.sgd(LR))
    if name == "momentum":
        return same(optax.sgd(LR, 0.9, nesterov=True))
    if name == "adamw":
        return same(optax.adamw(LR, eps=1e-3, weight_decay=0.1))
    if name == "adamw_masked":
        return same(optax.adamw(LR, eps=1e-3, weight_decay=0.1, mask=is_kernel))
    if name == "clipped_schedule":
        return same(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(cosine, 0.9)))
    if name == "multisteps":
        return same(optax.MultiSteps(optax.adam(LR, eps=1e-3), 2))
    if name == "adafactor":
        return same(optax.adafactor(LR, min_dim_size_to_factor=4))
    if name == "lion":
        return same(optax.lion(LR / 10))
    if name == "rmsprop":
        return same(optax.rmsprop(LR / 10, eps=1e-3))
    if name == "partition":
        labels = {True: optax.adam(LR, eps=1e-3), False: optax.sgd(LR)}
        return same(optax.partition(labels, is_kernel))
    if name == "inject":
        inject = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)
        return same(inject(learning_rate=cosine, momentum=0.9))
    if name == "polyak":
        return same(optax.polyak_sgd(max_learning_rate=LR))
    if name == "lars":
        return same(optax.lars(LR, eps=1e-3))
    if name == "lamb":
        return same(optax.lamb(LR, eps=1e-3))
    if name == "agc":
        return same(optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(LR)))
    if name == "plateau":
        plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
        return same(optax.chain(optax.sgd(LR), plateau))
    if name == "optax_ema":
        return same(optax.chain(optax.ema(0.9), down))
    if name == "amsgrad":
        return same(optax.amsgrad(LR, eps=1e-3))
    if name == "adagrad":
        return same(optax.adagrad(LR))
    if name == "sw_sgd":
        by_hand = optax.chain(
            optax.clip_by_global_norm(1.0), decay, optax.trace(0.9, True), down
        )
        return both(optim.sgd(LR, nesterov=True, weight_decay=0.1, clip=1.0), by_hand)
    if name == "sw_adamw":
        by_hand = optax.chain(
            optax.clip_by_global_norm(1.0),
            adam(),
            decay,
            optax.scale_by_learning_rate(lambda n: LR / (1 + n)),
        )
        ours = optim.adamw(lambda n: LR / (1 + n), eps=1e-3, weight_decay=0.1, clip=1.0)
        return both(ours, by_hand)
    if name == "sw_adafactor":
        return same(optim.adafactor(LR, momentum=0.9))
    if name == "sw_muon":
        return same(optim.muon(LR, stacked=("*layers/*",)))
    if name == "sw_lion":
        return both(
            optim.lion(LR / 10),
            optax.chain(optax.scale_by_lion(), optax.scale_by_learning_rate(LR / 10)),
        )
    if name == "sw_ema":
        return (*_with_average(optax.chain(adam(), down)),)
    if name == "sw_schedule_free":
        ours = optim.schedule_free(LR, eps=1e-3)
        return ours, ours, _schedule_free_params
    if name == "sw_groups":
        groups = [
            optim.Group("*bias", name="biases", lr_scale=2.0, weight_decay=0.0),
            optim.Group("*", name="rest"),
        ]
        ours = optim.adamw(LR, eps=1e-3, weight_decay=0.1, groups=groups)
        by_hand = optax.partition(
            {
                True: optax.chain(adam(), optax.scale_by_learning_rate(2 * LR)),
                False: optax.chain(adam(), decay, down),
            },
            is_bias,
        )
        return both(ours, by_hand)
    if name == "sw_spikes":
        return both(optim.sgd(LR, spikes=1000.0), optax.sgd(LR, 0.9))
    if name == "sw_master":
        return both(optim.sgd(LR, master=True), optax.sgd(LR, 0.9))
    raise ValueError(name)


def _schedule_free_params(state: Any, params: Any) -> Any:
    """Return the weights to evaluate, wherever the chain keeps the state of the method."""
    is_state = lambda node: hasattr(node, "b1") and hasattr(node, "z")  # noqa: E731
    nodes = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    return optax.contrib.schedule_free_eval_params(next(nodes), params)


def _with_average(tx: Any) -> tuple[Any, Any, Any]:
    """Return `optim.keep_average`, and the same by hand."""
    from shardwise import optim

    def init(params: Any) -> Any:
        return tx.init(params), params, 0

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> Any:
        inner, average, count = state
        updates, inner = tx.update(grads, inner, params)
        keep = jnp.minimum(0.99, (1 + count) / (10 + count))
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, average, new)
        return updates, (inner, average, count + 1)

    by_hand = optax.GradientTransformationExtraArgs(init, update)
    return optim.keep_average(tx, 0.99), by_hand, lambda state, params: state[1]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")[2]


def is_kernel(params: Any) -> Any:
    """Return True for kernels and embedding tables; stacked biases and norms are neither."""
    names = ("bias", "scale")
    return jax.tree_util.tree_map_with_path(
        lambda path, p: p.ndim > 1 and _name(path) not in names, params
    )


def is_bias(params: Any) -> Any:
    """Return True for biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, p: _name(path).endswith("bias"), params
    )


# Data.


def make_arrays(case: Case, count: int, seed: int) -> dict[str, np.ndarray]:
    """Return `count` examples as arrays, by name."""
    rng = np.random.default_rng(1000 * seed + count)
    real, integer = ("f8", "i8") if case.wide else ("f4", "i4")
    size = LENGTH if case.stem == "tokens" else OUT
    if case.stem == "tokens":
        x = rng.integers(0, VOCAB, (count, LENGTH)).astype(integer)
        y = rng.integers(0, VOCAB, (count, LENGTH)).astype(integer)
    else:
        shape = (WIDTH,) if case.stem == "dense" else (4, 4, 2)
        x = rng.normal(size=(count, *shape)).astype(real)
        y = rng.normal(size=(count, OUT)).astype(real)
    w = rng.uniform(0.1, 2, count).astype(real)
    w[rng.uniform(size=count) < 0.2] = 0
    w[0] = 1
    m = rng.uniform(size=(count, size)) < 0.7
    m[:, 0] = True
    return {"x": x, "y": y, "w": w, "m": m if seed % 2 else m.astype(integer)}


def pack(case: Case, arrays: dict[str, Any]) -> Any:
    """Return the arrays as a batch of the structure of the case."""
    if case.structure == "tuple":
        return arrays["x"], arrays["y"], arrays["w"], arrays["m"]
    if case.structure == "nested":
        return {
            "input": {"x": arrays["x"]},
            "rest": [arrays["y"], (arrays["w"], arrays["m"])],
        }
    return arrays


def unpack(case: Case, batch: Any) -> tuple[Any, Any, Any, Any]:
    """Return inputs, targets, weights of examples and weights of elements."""
    if case.structure == "tuple":
        return batch
    if case.structure == "nested":
        y, (w, m) = batch["rest"]
        return batch["input"]["x"], y, w, m
    return batch["x"], batch["y"], batch["w"], batch["m"]


def plain_batches(case: Case) -> list[Any]:
    """Return the batches of a case whose data is not shuffled, for a loop by hand."""
    arrays = make_arrays(case, case.examples, case.seed)
    batches = []
    for step in range(case.steps):
        indices = np.arange(step * case.batch_size, (step + 1) * case.batch_size)
        indices %= case.examples
        batches.append(pack(case, {k: v[indices] for k, v in arrays.items()}))
    return spoiled(case, batches)


def spoiled(case: Case, batches: list[Any]) -> list[Any]:
    """Return the batches with a NaN in that of the bad step."""
    if not case.bad_step or case.stem == "tokens":
        return batches
    batches = list(batches)
    bad = jax.tree.map(np.array, batches[case.bad_step - 1])
    x, *_ = unpack(case, bad)
    x[-1] = np.nan
    batches[case.bad_step - 1] = bad
    return batches


def make_data(case: Case) -> Any:
    """Return the training data of a case, as a user passes it to shardwise."""
    from shardwise import Batches

    arrays = make_arrays(case, case.examples, case.seed)
    if case.bad_step and case.data in ("batches", "unshuffled", "list"):
        # The NaN is in a batch, not in an example, which comes again in the next epoch.
        data = make_data(replace(case, bad_step=0))
        batches = spoiled(case, [data(step) for step in range(case.steps)])
        return lambda step: batches[step]
    if case.data == "batches":
        return Batches(arrays, case.batch_size, seed=case.seed)
    if case.data == "unshuffled":
        return Batches(arrays, case.batch_size, shuffle=False)
    if case.data == "list":
        items = [
            {name: array[i] for name, array in arrays.items()}
            for i in range(case.examples)
        ]
        return Batches(items, case.batch_size, seed=case.seed)
    batches = plain_batches(case)
    if case.data == "iterator":
        return _Iterable(batches)
    if case.data == "generator":
        return iter(batches)
    if case.data == "jax":
        return lambda step: jax.tree.map(jnp.asarray, batches[step])
    if case.data == "views":
        return lambda step: jax.tree.map(_view, batches[step])
    if case.data == "reuse":
        return _reusing(batches)
    return lambda step: batches[step]


@dataclass(frozen=True)
class _Iterable:
    """Batches that can be read more than once, but not by step."""

    batches: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _view(array: np.ndarray) -> np.ndarray:
    """Return the same values as an array that is not contiguous."""
    return np.repeat(array, 2, axis=0)[::2]


def _reusing(batches: list[Any]) -> Callable[[int], Any]:
    """Return a function that writes every batch to the same arrays."""
    buffer = jax.tree.map(np.empty_like, batches[0])

    def read(step: int) -> Any:
        jax.tree.map(lambda to, new: np.copyto(to, new), buffer, batches[step])
        return buffer

    return read


def eval_batches(case: Case) -> Iterator[Any]:
    """Yield the validation batches of a case; the last one may be smaller."""
    arrays = make_arrays(case, case.eval_examples, case.seed + 1)
    size = min(case.eval_batch, case.eval_examples)
    for first in range(0, case.eval_examples, size):
        part = {k: v[first : first + size] for k, v in arrays.items()}
        yield pack(case, part)
