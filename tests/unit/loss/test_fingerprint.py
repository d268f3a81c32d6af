"""Tests of the digest of a traced function."""

import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.loss.fingerprint import jaxpr_fingerprint
from shardwise.mesh import make_mesh
from shardwise.metrics import Mean
from shardwise.state import abstract_state

X = jax.ShapeDtypeStruct((8, 4), "float32")
TABLE = np.arange(4, dtype="f4")


def fingerprint(function: Callable[..., object], *args: object) -> str:
    return jaxpr_fingerprint(jax.make_jaxpr(function)(*(args or (X,))))


def norm(x: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def dropout(x: jax.Array, rate: float) -> jax.Array:
    return nnx.Dropout(rate, rngs=nnx.Rngs(0), deterministic=False)(x)


def scanned(x: jax.Array, factor: float) -> jax.Array:
    return jax.lax.scan(lambda c, _: (c * factor, None), x, None, length=3)[0]


DIFFERENT = {
    "factor": (lambda x: x.sum(), lambda x: 100 * x.sum()),
    "activation": (nnx.relu, nnx.gelu),
    "epsilon": (lambda x: norm(x, 1e-5), lambda x: norm(x, 1e-6)),
    "dropout rate": (lambda x: dropout(x, 0.1), lambda x: dropout(x, 0.2)),
    "constant": (lambda x: x + TABLE, lambda x: x + TABLE[::-1]),
    "constant of JAX": (
        lambda x: x + jnp.asarray(TABLE),
        lambda x: x + jnp.asarray(TABLE + 1),
    ),
    "nested function": (lambda x: scanned(x, 0.5), lambda x: scanned(x, 0.25)),
    "precision": (
        lambda x: jnp.dot(x, x.T),
        lambda x: jnp.dot(x, x.T, precision="highest"),
    ),
    "axis": (lambda x: x.sum(0).sum(), lambda x: x.sum(1).sum()),
    "operands": (lambda x: x - 2 * x, lambda x: 2 * x - x),
    "dtype": (lambda x: x.astype("bfloat16"), lambda x: x.astype("float16")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_change_of_what_is_computed_changes_it(name: str) -> None:
    first, second = DIFFERENT[name]
    assert fingerprint(first) == fingerprint(first)
    assert fingerprint(first) != fingerprint(second)


def test_names_and_places_do_not_matter() -> None:
    @jax.jit
    def inner(value: jax.Array) -> jax.Array:
        return jnp.tanh(value) * 2

    @jax.jit
    def renamed(other: jax.Array) -> jax.Array:
        result = jnp.tanh(other)

        return result * 2

    assert fingerprint(lambda x: inner(x)) == fingerprint(lambda y: renamed(y))


def test_shardings_do_not_matter() -> None:
    def constrained(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return lambda x: 2 * jax.lax.with_sharding_constraint(x + 1, sharding)

    meshes = [make_mesh("data=8"), make_mesh("data=1", jax.devices()[:1])]
    digests = {fingerprint(constrained(mesh)) for mesh in meshes}
    assert digests == {fingerprint(lambda x: 2 * (x + 1))}


def test_the_mesh_of_a_model_does_not_matter() -> None:
    def digest(mesh: Mesh) -> str:
        spec = abstract_state(
            lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.adam(1e-3), mesh
        )

        def forward(state: object, x: jax.Array) -> jax.Array:
            return Mean(spec.module(state)(x).sum(-1)).value

        return fingerprint(forward, spec.abstract, X)

    one = make_mesh("data=1", jax.devices()[:1])
    assert digest(one) == digest(make_mesh("data=2,fsdp=4"))


PROGRAM = """
import jax, optax
from flax import nnx
from shardwise.loss.fingerprint import jaxpr_fingerprint
from shardwise.mesh import make_mesh
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.state import abstract_state

config = GPTConfig(64, 16, 2, 2, 8, dropout=0.1, remat="dots")
mesh = make_mesh("data=1")
spec = abstract_state(lambda rngs: GPT(config, rngs), optax.adam(1e-3), mesh)

def forward(state, tokens):
    features, table = spec.module(state, jax.random.key(0)).features(tokens)
    return nnx.softmax(features @ table.T)

tokens = jax.ShapeDtypeStruct((2, 16), "int32")
print(jaxpr_fingerprint(jax.make_jaxpr(forward)(spec.abstract, tokens)))
"""


def test_it_is_the_same_in_another_process() -> None:
    digests = set()
    for seed in "12":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == 32
