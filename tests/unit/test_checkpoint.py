"""A checkpoint is plain Orbax, restores onto any mesh, and is refused with all differences at once."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from shardwise import Checkpoints, Rules, abstract_state, init_state, make_mesh
from shardwise.errors import CheckpointError
from shardwise.tree import named_leaves


class Net(nnx.Module):
    def __init__(self, rngs, width=32):
        self.hidden = nnx.Linear(16, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)


def spec_for(mesh, devices=8, optimizer=None, **options):
    rules = Rules(fsdp_min_size=16)
    return abstract_state(
        lambda rngs: Net(rngs, **options), optimizer or optax.adamw(1e-3), make_mesh(mesh, jax.devices()[:devices]), rules
    )


@pytest.fixture
def saved(tmp_path):
    state = init_state(spec_for("data=2,fsdp=4"), 5)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, {"step": 0})
    checkpoints.close()
    return tmp_path / "checkpoints", {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


@pytest.mark.parametrize(("mesh", "devices"), [("data=2,fsdp=4", 8), ("fsdp=8", 8), ("fsdp=2", 2), ("data=1", 1)])
def test_it_restores_to_the_bit_onto_any_mesh(saved, mesh, devices):
    directory, leaves = saved
    spec = spec_for(mesh, devices)
    state = Checkpoints(directory).restore(spec, 0)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == spec.shardings
    for name, leaf in named_leaves(state).items():
        assert np.asarray(leaf).tobytes() == leaves[name].tobytes(), name


def test_plain_orbax_reads_it(saved):
    directory, leaves = saved
    handler = ocp.PyTreeCheckpointHandler()
    item = handler.metadata(directory / "0" / "state")
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item.tree)
    tree = handler.restore(directory / "0" / "state", args=ocp.args.PyTreeRestore(restore_args=restore_args))
    assert np.array_equal(tree["params"]["hidden"]["kernel"], leaves["params/hidden/kernel"])


def test_what_does_not_fit_is_refused_with_all_differences(saved):
    directory, _ = saved
    with pytest.raises(CheckpointError) as error:
        Checkpoints(directory).restore(spec_for("fsdp=8", width=64, optimizer=optax.sgd(0.1, momentum=0.9)), 0)
    text = str(error.value)
    assert "params/hidden/kernel: saved float32[16, 32], wanted float32[16, 64]" in text
    assert "opt_state/0/mu/hidden/kernel: only in the checkpoint" in text
    assert "opt_state/0/trace/hidden/kernel: not in the checkpoint" in text
