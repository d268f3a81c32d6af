"""Devices that compute or store wrong bits: planted in a running process, found by audit or replay.

These experiments do not start the command: they change one bit of an array on one device between
two steps, or of a gradient inside of a step.
"""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness import Silent, experiment
from rich.console import Console

from shardwise import Batches, Rules, Run, fit, replay
from shardwise.errors import CorruptionError, NumericsError
from shardwise.training.audit import Auditor
from shardwise.tree import leaf_name

RNG = np.random.default_rng(31)
X = RNG.normal(size=(256, 16)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}
STEPS = 9
AUDIT_EVERY = 3
TRIALS = 50
CLEAN_AUDITS = 1000
# Bits of float32. A changed lower bit of a moment once left no trace: all devices ended with the
# state of a run without the change.
BITS = (8, 31)
MESHES = ("data=8", "data=4,fsdp=2", "fsdp=8", "data=1")


class Net(nnx.Module):
    """Two layers; the gradient of the first passes through `Flip`."""

    def __init__(self, rngs, flip=None):
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.second = nnx.Linear(64, 1, rngs=rngs)
        self.flip = flip

    def __call__(self, x):
        x = self.first(x)
        if self.flip is not None:
            x = self.flip(x)
        return self.second(jnp.tanh(x))[:, 0]


class Flip:
    """Changes one bit of a gradient, in one call of the backward pass."""

    def __init__(self, at, index, bit):
        self.at, self.index, self.bit = at, index, bit
        self.calls = 0

    def __call__(self, x):
        @jax.custom_vjp
        def identity(x):
            return x

        def backward(_, g):
            return (jax.pure_callback(self.change, g, g),)

        identity.defvjp(lambda x: (x, None), backward)
        return identity(x)

    def change(self, g):
        self.calls += 1
        return flipped(g, self.index, self.bit) if self.calls == self.at else g


def flipped(array, index, bit):
    array = np.array(array)
    array.reshape(-1).view(np.uint32)[index % array.size] ^= np.uint32(1 << bit)
    return array


def wrong_on(array, device, index, bit):
    """Return an array with one changed bit in the shard of one device."""
    shards = []
    for shard in array.addressable_shards:
        data = np.asarray(shard.data)
        if shard.device == device:
            data = flipped(data, index, bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def make_run(mesh, out, **changes):
    if mesh == "data=1":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    settings = {
        "model": Net,
        "loss": lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        "optimizer": optax.adamw(1e-2),
        "data": Batches(DATA, 32),
        "steps": STEPS,
        "mesh": mesh,
        "rules": Rules(fsdp_min_size=1),
        "digest_every": 1,
        "audit_every": AUDIT_EVERY,
        "out": out,
    }
    return Run(**{**settings, **changes})


def quiet():
    return Console(file=io.StringIO(), width=200)


def planted(monkeypatch, change, at):
    """Call `change(state, batch)` before step `at` of every run from now on."""
    original = Auditor.audited

    def audited(self, step):
        count = 0

        def function(state, batch):
            nonlocal count
            # An audit may compute a step twice; its first computation has the same arguments.
            if int(state.step) + 1 == at and not count:
                count = 1
                state, batch = change(state, batch)
            return step.function(state, batch)

        return original(self, replace(step, function=function))

    monkeypatch.setattr(Auditor, "audited", audited)


def plant(kind, mesh, random, monkeypatch, out):
    """Return a run with one planted bit, and the step that it belongs to."""
    at = int(random.integers(1, STEPS + 1))
    index, bit = int(random.integers(10**6)), int(random.integers(*BITS))
    device = jax.devices()[int(random.integers(1 if mesh == "data=1" else 8))]
    if kind == "gradient":
        # A loss with a callback runs on one device.
        flip = Flip(at + (at - 1) // AUDIT_EVERY, index, bit)
        return make_run("data=1", out, model=lambda rngs: Net(rngs, flip)), at
    if kind == "batch":

        def change(state, batch):
            x = wrong_on(batch["x"], device, index, bit)
            return state, {**batch, "x": x}
    else:
        part = {"weights": "params/", "moments": "/nu/"}[kind]
        layer = ("first/kernel", "second/kernel", "first/bias")[index % 3]

        def change(state, batch):
            def leaf(path, x):
                name = leaf_name(path)
                is_chosen = part in name and name.endswith(layer)
                return wrong_on(x, device, index, bit) if is_chosen else x

            return jax.tree_util.tree_map_with_path(leaf, state), batch

    planted(monkeypatch, change, at)
    return make_run(mesh, out), at


def error_of(run):
    """Return the error that ends a run, or None."""
    try:
        fit(run, console=quiet())
    except NumericsError as error:
        return error
    return None


@pytest.mark.faults
def test_f38_bits_that_change_during_a_run(tmp_path):
    random = np.random.default_rng(31)
    by_audit = 0
    with experiment(
        "F38",
        "one bit changed in a running process: weights, moments, gradients, batch",
    ) as row:
        for trial in range(TRIALS):
            kind = ("weights", "moments", "gradient", "batch")[trial % 4]
            mesh = MESHES[trial // 4 % len(MESHES)]
            with (
                row.ours.trial(f"{kind}, {mesh}, trial {trial}"),
                pytest.MonkeyPatch.context() as monkeypatch,
            ):
                out = tmp_path / str(trial)
                run, at = plant(kind, mesh, random, monkeypatch, out)
                error = error_of(run)
                if error is not None:
                    by_audit += 1
                    next_audit = -(-at // AUDIT_EVERY) * AUDIT_EVERY
                    # A large number may not be finite, which shows at once.
                    is_audit = isinstance(error, CorruptionError)
                    found_at = next_audit if is_audit else at
                    assert f"step {found_at}:" in str(error), (at, str(error))
                    continue
                monkeypatch.undo()
                clean = make_run(run.mesh, out, model=run.model)
                found = replay(clean, 1, STEPS, console=quiet()).first_difference
                if found is None:
                    raise Silent(f"a bit of the {kind} changed before step {at}")
                assert found.step == at, (found.step, at)
        row.note = (
            f"{by_audit} found by the next audit or because a number is not finite, "
            "the others by a replay"
        )


@pytest.mark.faults
def test_f39_audits_without_a_fault(tmp_path):
    with experiment("F39", f"{CLEAN_AUDITS} audits of sound devices: no alarm") as row:
        for mesh in MESHES:
            with row.ours.trial(mesh):
                count = CLEAN_AUDITS // len(MESHES)
                run = make_run(mesh, None, steps=count, audit_every=1, digest_every=0)
                result = fit(run, console=quiet())
                assert int(result.state.step) == count
