"""Changes of a forward pass that nobody keeps are findings, and so are modules from outside."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise.loss.trace import trace_loss
from shardwise.state import abstract_state

BATCH = {"x": np.ones((8, 4), np.float32)}
OUTSIDE = nnx.Linear(4, 1, rngs=nnx.Rngs(0))


class Net(nnx.Module):
    """A layer, and what a forward pass may change.

    Args:
        rngs: random streams.
        change: the name of the change.
    """

    def __init__(self, rngs, change=""):
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.change = change
        self.calls = 0
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if self.change == "attribute":
            self.calls += 1
        elif self.change == "variable":
            self.cache = nnx.Variable(x)
        elif self.change == "sow":
            self.x = nnx.Intermediate(x)
        elif self.change == "kept":
            self.count[...] += 1
        return self.out(x)


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def names_of(model, loss):
    spec = abstract_state(model, optax.sgd(0.1), "data=8")
    return {finding.name: finding for finding in trace_loss(spec, loss, BATCH).findings}


@pytest.mark.parametrize(
    ("change", "name", "path"),
    [
        ("attribute", "attribute-not-kept", "calls"),
        ("variable", "variable-not-kept", "cache"),
    ],
)
def test_a_change_that_is_lost_is_a_finding(change, name, path):
    findings = names_of(partial(Net, change=change), loss)
    assert set(findings) == {name}
    assert findings[name].paths == (path,)
    if change == "attribute":
        assert "from 0 to 1" in findings[name].fact


@pytest.mark.parametrize("change", ["", "sow", "kept"])
def test_a_change_that_is_kept_or_meant_to_be_dropped_is_not(change):
    assert names_of(partial(Net, change=change), loss) == {}


def by_global(model, batch):
    return ((model(batch["x"]) - OUTSIDE(batch["x"])) ** 2).mean()


def by_argument(model, batch, teacher):
    return ((model(batch["x"]) - teacher(batch["x"])) ** 2).mean()


def test_a_module_from_outside_is_a_finding():
    closed = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def by_closure(model, batch):
        return by_argument(model, batch, closed)

    for function, name in (
        (by_global, "OUTSIDE"),
        (by_closure, "closed"),
        (partial(by_argument, teacher=OUTSIDE), "teacher"),
    ):
        finding = names_of(Net, function)["module-outside"]
        assert finding.paths == (name,)
        assert "constants" in finding.fact
