"""States are described without arrays, and created sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh
from shardwise.module import build_module, split_module
from shardwise.sharding import Rules
from shardwise.state import abstract_state, init_state
from shardwise.tree import named_leaves


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(
            256,
            1024,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(
                nnx.initializers.normal(), ("embed", "mlp")
            ),
        )
        self.down = nnx.Linear(1024, 256, rngs=rngs)


def test_the_trace_that_describes_a_state_also_creates_it():
    built = []

    def model(rngs):
        built.append(rngs)
        return Wide(rngs)

    spec = abstract_state(model, optax.adamw(1e-3), make_mesh("fsdp=4,model=2"))
    init_state(spec, 0)
    init_state(spec, 1)
    assert len(built) == 1


def test_no_device_holds_a_complete_copy_of_a_sharded_parameter():
    spec = abstract_state(Wide, optax.adamw(1e-3), make_mesh("fsdp=4,model=2"))
    state = init_state(spec, 0)
    for name, leaf in named_leaves(state.params).items():
        if name.endswith("kernel"):
            num_shards = 8 if name == "up/kernel" else 4
            sizes = {shard.data.size for shard in leaf.addressable_shards}
            assert sizes == {leaf.size // num_shards}

    def create(key):
        _, params, _ = split_module(build_module(Wide, key))
        return params, spec.optimizer.init(params)

    shardings = (spec.shardings.params, spec.shardings.opt_state)
    program = (
        jax.jit(create, out_shardings=shardings).lower(jax.random.key(0)).compile()
    )
    largest = max(
        np.prod([int(d) for d in dims.split(",")])
        for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())
    )
    assert largest <= 256 * 1024 // 4


def test_same_seed_gives_same_bits_on_every_mesh():
    def bits(text, devices):
        spec = abstract_state(
            Wide, optax.adamw(1e-3), make_mesh(text, jax.devices()[:devices])
        )
        return {
            name: np.asarray(leaf).tobytes()
            for name, leaf in named_leaves(init_state(spec, 7)).items()
        }

    reference = bits("data=1", 1)
    assert len(reference) == 1 + 4 + 8 + 1
    for text in ("data=8", "fsdp=8", "data=2,fsdp=2,model=2", "model=8"):
        assert bits(text, 8) == reference


@pytest.mark.parametrize("shape", [(8, 32), (64, 32), (256, 24), (8, 8), (3, 3, 8, 16)])
@pytest.mark.parametrize(
    "init",
    [
        nnx.initializers.lecun_normal(),
        nnx.initializers.normal(),
        nnx.initializers.xavier_uniform(),
    ],
)
def test_shards_narrower_than_a_vector_register_have_the_same_bits(init, shape):
    class Narrow(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(
                init(rngs.params(), shape),
                out_sharding=(*(None,) * (len(shape) - 1), "model"),
            )

    on_one_device, sharded = (
        init_state(
            abstract_state(
                Narrow, optax.sgd(0.1), make_mesh(f"model={n}", jax.devices()[:n])
            ),
            3,
        ).params["kernel"]
        for n in (1, 8)
    )
    assert np.asarray(on_one_device).tobytes() == np.asarray(sharded).tobytes()


def test_abstract_state_allocates_nothing():
    # 4 TiB of parameters.
    def huge(rngs):
        return nnx.Linear(2**20, 2**20, rngs=rngs)

    spec = abstract_state(huge, optax.adamw(1e-3), make_mesh("fsdp=8"))
    assert spec.num_params == 2**40 + 2**20
    assert spec.params["kernel"].bytes_per_device == 2**42 // 8
    assert (
        spec.abstract.opt_state[0].mu["kernel"].sharding
        == spec.abstract.params["kernel"].sharding
    )


def test_variables_of_every_kind_are_assigned_to_a_part_of_the_state():
    class Counter(nnx.Variable):
        pass

    class Kinds(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.calls = Counter(jnp.zeros((), jnp.int32))
            self.tied = self.linear

    spec = abstract_state(Kinds, optax.sgd(0.1), make_mesh("data=8"))
    assert sorted(spec.params) == [
        "linear/bias",
        "linear/kernel",
        "norm/bias",
        "norm/scale",
    ]
    assert sorted(spec.other) == ["calls", "norm/mean", "norm/var"]
    assert sorted(rng.name for rng in spec.definition.rngs) == [
        "dropout/rngs/count",
        "dropout/rngs/key",
    ]
    state = init_state(spec, 0)
    merged = spec.definition.merge(state.params, state.other, jax.random.key(0))
    assert merged.tied is merged.linear


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "has no nnx.Param"),
        (lambda rngs: None, "returned a NoneType"),
    ],
)
def test_invalid_model_is_refused(factory, message):
    with pytest.raises(ConfigError, match=message):
        abstract_state(factory, optax.sgd(0.1), make_mesh("data=8"), Rules())


def test_modules_without_a_mode_run_in_training_mode():
    """NNX refuses to run a module without a mode. A mode that was set explicitly is kept."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(
                2, 8, decode=False, dropout_rate=0.5, rngs=rngs
            )
            self.frozen = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return self.frozen(self.attention(x))

    x = jnp.ones((2, 3, 8))
    model = build_module(Model, jax.random.key(0))
    assert model.frozen.use_running_average
    first, second = model(x), model(x)
    assert not jnp.allclose(first, second)
    model.eval()
    assert jnp.array_equal(model(x), model(x))
