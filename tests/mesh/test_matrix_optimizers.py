"""Optimizers of matrices: each device receives complete matrices, and a mesh changes no result."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import (
    Mean,
    Rules,
    abstract_state,
    init_state,
    make_mesh,
    make_train_step,
    optim,
)
from shardwise.optim.matrices import _as_matrices, _moves, parameters_stored_as
from shardwise.tree import named_leaves

LAYERS, WIDTH = 3, 32
RULES = Rules(fsdp_min_size=64)
OPTIMIZERS = {
    "muon": lambda **options: optim.muon(0.02, clip=1.0, **options),
    "normuon": lambda **options: optim.normuon(0.02, clip=1.0, **options),
    "soap": lambda **options: optim.soap(0.01, every=2, clip=1.0, **options),
}


def kernel(rngs, shape, axes):
    value = jax.random.normal(rngs.params(), shape) / np.sqrt(WIDTH)
    return nnx.Param(value, out_sharding=axes)


class Layer(nnx.Module):
    """A kernel with heads, and two of one shape."""

    def __init__(self, rngs):
        self.heads = kernel(rngs, (WIDTH, 3, 4, 8), (None, None, "model", None))
        self.up = kernel(rngs, (3 * WIDTH, WIDTH), (None, "model"))
        self.gate = kernel(rngs, (3 * WIDTH, WIDTH), (None, "model"))

    def __call__(self, x):
        y = jnp.einsum("bi,ijkl->bjkl", x, self.heads[...]).reshape(len(x), -1)
        return x + jnp.tanh(y @ self.up[...]) * jax.nn.sigmoid(y @ self.gate[...])


class Unrolled(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.out = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Scanned(nnx.Module):
    """The layers of `Unrolled` with a leading dim for layers, which is not sharded."""

    def __init__(self, rngs):
        layers = [Layer(rngs) for _ in range(LAYERS)]
        for name in ("heads", "up", "gate"):
            kernels = [getattr(layer, name) for layer in layers]
            axes = (None, *kernels[0].get_metadata("out_sharding"))
            stack = jnp.stack([kernel[...] for kernel in kernels])
            setattr(self, name, nnx.Param(stack, out_sharding=axes))
        self.out = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        for i in range(LAYERS):
            y = jnp.einsum("bi,ijkl->bjkl", x, self.heads[i]).reshape(len(x), -1)
            x = x + jnp.tanh(y @ self.up[i]) * jax.nn.sigmoid(y @ self.gate[i])
        return self.out(x)


# The model, and the patterns of its parameters that are stacks.
MODELS = {"unrolled": (Unrolled, ()), "scanned": (Scanned, ("heads", "up", "gate"))}
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, WIDTH)).astype("f4")}
BATCH["y"] = np.sin(BATCH["x"][:, :8])


def loss(model, batch):
    return Mean(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


def describe(optimizer, model, mesh):
    factory, stacked = MODELS[model]
    devices = jax.devices()[:1] if mesh == "data=1" else None
    tx = OPTIMIZERS[optimizer](stacked=stacked)
    return abstract_state(factory, tx, make_mesh(mesh, devices), RULES)


def train(optimizer, model, mesh):
    spec = describe(optimizer, model, mesh)
    step = make_train_step(spec, loss, BATCH, norms=True)
    state, metrics = init_state(spec, 0), []
    for _ in range(8):
        state, values = step(state, step.place(BATCH))
        metrics.append([float(values[name]) for name in ("loss", "update_norm")])
    return metrics, named_leaves(state.params)


def compiled_update(spec):
    """Return the text of the update alone, compiled for the mesh of a state."""
    layout = spec.shardings

    def update(grads, state, params):
        with parameters_stored_as(layout.params):
            return spec.optimizer.update(grads, state, params)

    jitted = jax.jit(update, out_shardings=(layout.params, layout.opt_state))
    params = spec.abstract.params
    program = jitted.lower(params, spec.abstract.opt_state, params).compile()
    return program.as_text()


def collectives(text):
    """Yield kind and number of elements of each collective, all its operands together."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for line in text.splitlines():
        found = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
        if found:
            shapes = re.findall(r"\w+\[([\d,]*)\]", found[1])
            sizes = [np.prod([int(n) for n in s.split(",") if n]) for s in shapes]
            yield found[2], int(sum(sizes))


@pytest.fixture(scope="module")
def on_one_device():
    results = {}

    def get(optimizer, model):
        if (optimizer, model) not in results:
            results[optimizer, model] = train(optimizer, model, "data=1")
        return results[optimizer, model]

    return get


MESHES = ["fsdp=8", "data=2,fsdp=4", "fsdp=4,model=2"]
CASES = [(mesh, model) for mesh in MESHES for model in MODELS]
QUICK = [("muon", "fsdp=4,model=2", "unrolled")]


def unless_quick(optimizer, *case):
    is_quick = (optimizer, *case[-2:]) in QUICK
    return pytest.param(*case, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("optimizer", "mesh", "model"),
    [unless_quick(name, name, *case) for name in OPTIMIZERS for case in CASES],
)
def test_a_mesh_trains_like_one_device(optimizer, mesh, model, on_one_device):
    expected, params_there = on_one_device(optimizer, model)
    actual, params_here = train(optimizer, model, mesh)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for path, leaf in params_here.items():
        np.testing.assert_allclose(leaf, params_there[path], atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("mesh", "model"), [unless_quick("muon", *case) for case in CASES]
)
def test_muon_exchanges_each_stack_once_in_and_once_out(mesh, model):
    num_axes = 2 if "model" in mesh else 1
    spec = describe("muon", model, mesh)
    found = list(collectives(compiled_update(spec)))
    exchanges = [size for kind, size in found if kind == "all-to-all"]
    # The heads are one stack; `up` and `gate` of all layers are another. The output kernel is not
    # sharded over `model`.
    out_axes = 1
    assert len(exchanges) == 2 * (2 * num_axes + out_axes)
    # All others are sums for the gradient norm: smaller than any matrix.
    others = [size for kind, size in found if kind != "all-to-all"]
    assert max(others) < WIDTH


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_muon_is_the_momentum_and_adam_for_the_rest(model):
    spec = describe("muon", model, "fsdp=8")
    moments = [path for path in spec.opt_state if not path.endswith("count")]
    for path, param in spec.params.items():
        own = [p for p in moments if p.endswith(f"/{path}")]
        assert len(own) == (2 if path == "out/bias" else 1), path
        assert {spec.opt_state[p].shape for p in own} == {param.shape}
        assert {spec.opt_state[p].spec for p in own} == {param.spec}


def test_one_mesh_axis_moves_at_a_time_and_the_last_of_a_dim_first():
    mesh = make_mesh("stage=2,fsdp=2,context=2", jax.devices())
    layout = NamedSharding(mesh, P("stage", ("fsdp", "context")))
    part = _as_matrices((6, 16, 32), layout, is_stacked=True)
    assert part.shape == (2, 3, 16, 32)
    assert _moves(part, layers=3) == [
        (("stage",), (), ("fsdp", "context"), ()),
        (("stage",), ("context",), ("fsdp",), ()),
        (("stage",), ("context", "fsdp"), (), ()),
    ]


@pytest.mark.parametrize(
    ("layers", "shape", "gathers"),
    # Half as many matrices as devices are shared; a third, or small ones, are not.
    [(2, (512, 640), True), (1, (512, 640), False), (2, (256, 640), False)],
)
def test_replicas_share_the_work_on_large_matrices(layers, shape, gathers):
    mesh = make_mesh("data=4", jax.devices()[:4])
    layout = NamedSharding(mesh, P())
    x = {f"w{i}": jax.random.normal(jax.random.key(i), shape) for i in range(layers)}
    tx = optim.orthogonalize()
    expected = jax.jit(lambda x: tx.update(x, tx.init(x))[0])(x)

    def update(x):
        with parameters_stored_as(jax.tree.map(lambda _: layout, x)):
            return tx.update(x, tx.init(x))[0]

    jitted = jax.jit(update, in_shardings=layout, out_shardings=layout)
    program = jitted.lower(x).compile()
    actual = program(jax.device_put(x, layout))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected
    )
    kinds = [kind for kind, _ in collectives(program.as_text())]
    assert kinds == ["all-gather"] * gathers


def test_layers_that_are_sharded_stay_where_they_are():
    """A stack whose layer dim is sharded over stages exchanges within each stage only."""
    mesh = make_mesh("stage=2,fsdp=4")
    x = jax.random.normal(jax.random.key(0), (6, 16, 32))
    sharding = NamedSharding(mesh, P("stage", None, "fsdp"))
    tx = optim.orthogonalize(stacked=("*",))
    expected, _ = tx.update({"x": x}, tx.init({"x": x}))

    def update(x):
        with parameters_stored_as({"x": sharding}):
            return tx.update({"x": x}, tx.init({"x": x}))[0]["x"]

    program = jax.jit(update, in_shardings=sharding, out_shardings=sharding).lower(x)
    compiled = program.compile()
    np.testing.assert_allclose(
        compiled(jax.device_put(x, sharding)), expected["x"], atol=1e-5
    )
    assert [kind for kind, _ in collectives(compiled.as_text())] == ["all-to-all"] * 2
