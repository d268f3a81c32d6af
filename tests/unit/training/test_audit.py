"""Audits find devices that compute or store wrong bits, and nothing else."""

import io
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich.console import Console

from shardwise import Batches, Rules, Run, fit
from shardwise.errors import ConfigError, NumericsError
from shardwise.run import describe_state
from shardwise.training import audit
from shardwise.training.audit import check_auditable, replica_axes
from tests.unit.step.test_digests import with_wrong_copy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 16)).astype("f4")
DATA = {"x": X, "y": X.sum(1)}
PATHS = {"first/kernel": (None, "model"), "second/kernel": ("model", None)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.second = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))[:, 0]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def run_of(mesh="data=8", **changes):
    settings = {
        "model": Net,
        "loss": loss,
        "optimizer": optax.adamw(1e-2),
        "data": Batches(DATA, 32),
        "steps": 12,
        "mesh": mesh,
        "rules": Rules(paths=PATHS if "model" in str(mesh) else (), fsdp_min_size=1),
        "audit_every": 3,
    }
    return Run(**{**settings, **changes})


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize(
    "mesh",
    [
        "data=8",
        pytest.param("data=2,fsdp=4", marks=pytest.mark.slow),
        pytest.param("data=4,model=2", marks=pytest.mark.slow),
        pytest.param("fsdp=8", marks=pytest.mark.slow),
        pytest.param("data=1", marks=pytest.mark.slow),
    ],
)
def test_clean_runs_pass_and_compute_the_same(mesh, tmp_path):
    if mesh == "data=1":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    plain = fit(run_of(mesh, audit_every=0), console=quiet())
    audited = fit(run_of(mesh, out=tmp_path), console=quiet())
    jax.tree.map(np.testing.assert_array_equal, audited.state, plain.state)
    assert audited.seconds["audit"] > 0
    lines = (tmp_path / "phases.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["seconds"]["audit"] > 0


class Faulty(Net):
    """A net whose first layer is slightly wrong on the device with index 5 of the data axis."""

    def __call__(self, x):
        def scale(kernel):
            is_wrong = jax.lax.axis_index("data") == 5
            return jnp.where(is_wrong, kernel * (1 + 2**-20), kernel)

        kernel = jax.shard_map(
            scale,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )(self.first.kernel[...])
        return self.second(jnp.tanh(self.norm(x @ kernel)))[:, 0]


def test_a_device_that_is_always_wrong_is_found_by_its_replicas(tmp_path):
    run = run_of(model=Faulty, out=tmp_path)
    with pytest.raises(NumericsError, match="gradients of the same examples differ"):
        fit(run, console=quiet())
    report = json.loads((tmp_path / "audit" / "3" / "report.json").read_text())
    assert report["step"] == 3
    assert report["suspects"] == "device 5 of process 0"
    assert (tmp_path / "audit" / "3" / "batch.npz").exists()
    # Nothing was saved after the step that was found.
    assert not (tmp_path / "checkpoints" / "3").exists()


class Transient:
    """Computes a step, and changes one bit of its result once."""

    def __init__(self, at):
        self.at = at
        self.calls = 0

    def wrap(self, step, flip):
        def function(state, batch):
            self.calls += 1
            result = step.function(state, batch)
            if self.calls == self.at:
                result = (flip(result[0]), *result[1:])
            return result

        return function


def flip_weight(state, name, *devices):
    """Return a state in which some devices have another bit in their copy of an array."""
    leaves, structure = jax.tree.flatten_with_path(state)
    changed = []
    for path, leaf in leaves:
        if name in jax.tree_util.keystr(path):
            leaf = with_wrong_copy(np.asarray(leaf), leaf.sharding, *devices)
        changed.append(leaf)
    return jax.tree.unflatten(structure, changed)


@pytest.mark.parametrize("name", ["params['first']['kernel']", "mu['second']['bias']"])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,fsdp=2"])
def test_a_wrong_copy_of_weights_or_moments_is_found(mesh, name, monkeypatch):
    """A bit of one device changes at step 4; the audit of step 6 names the device."""
    transient = Transient(at=4)
    original = audit.Auditor.audited
    device = jax.devices()[6]

    def audited(self, step):
        broken = transient.wrap(step, lambda state: flip_weight(state, name, device))
        return original(self, replace(step, function=broken))

    monkeypatch.setattr(audit.Auditor, "audited", audited)
    with pytest.raises(NumericsError, match=r"step 6: .* differ") as caught:
        fit(run_of(mesh), console=quiet())
    assert "device 6 of process 0" in str(caught.value)
    assert "The last audit without a difference was step 3" in str(caught.value)


@pytest.mark.parametrize("mesh", ["fsdp=8", "model=2"])
def test_an_error_that_does_not_repeat_is_found_without_replicas(mesh, monkeypatch):
    """Calls: steps 1 and 2, then step 3 twice. The second computation of step 3 is wrong."""
    transient = Transient(at=4)
    original = audit.Auditor.audited
    if mesh == "model=2":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))

    def audited(self, step):
        def flip(state):
            device = state.step.sharding.mesh.devices.flat[1]
            return flip_weight(state, "params['second']['kernel']", device)

        return original(self, replace(step, function=transient.wrap(step, flip)))

    monkeypatch.setattr(audit.Auditor, "audited", audited)
    with pytest.raises(NumericsError, match="two computations of the step differ") as e:
        fit(run_of(mesh), console=quiet())
    assert "params/second/kernel" in str(e.value)
    assert "device 1 of process 0" in str(e.value)


def test_which_axes_are_replicas():
    assert replica_axes(describe_state(run_of("data=8"))) == ("data",)
    assert replica_axes(describe_state(run_of("model=8"))) == ()


def test_a_gpu_that_is_not_deterministic_cannot_be_audited():
    class Device:
        platform = "gpu"

    class Mesh:
        devices = np.array([Device()])

    class Spec:
        mesh = Mesh()

    with pytest.raises(ConfigError, match="audit_every=3 compares bits"):
        check_auditable(run_of(deterministic=False), Spec())
    check_auditable(run_of(), Spec())
