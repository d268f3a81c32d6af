"""Frozen modules compute the same in every step: no dropout, and no statistics that move."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Batches, InitFrom, Mean, Run, fit
from shardwise.errors import ConfigError
from shardwise.loop import steps
from shardwise.module import build_module, split_module
from shardwise.state import abstract_state, init_state
from shardwise.step import make_eval_step, make_train_step
from shardwise.tree import named_leaves
from shardwise.weights.adapters import freeze, lora

RATE = 0.5
LEARNING_RATE = 0.1


class Body(nnx.Module):
    """A layer with batch statistics and dropout, in whatever mode it is built."""

    def __init__(self, rngs, mode=False):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=mode, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, deterministic=mode, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.norm(self.linear(x))))


class Distilled(nnx.Module):
    """A student that learns the output of its teacher."""

    def __init__(self, rngs, mode=False):
        self.teacher = Body(rngs, mode)
        # Statistics that are not those of a new module, as after loading a trained teacher.
        self.teacher.norm.mean[...] = jnp.arange(8.0) / 8
        self.teacher.norm.var[...] = 1 + jnp.arange(8.0)
        self.student = Body(rngs)
        self.student.dropout.rate = 0.0

    def __call__(self, x):
        return self.student(x), self.teacher(x)


def rows(count=64):
    x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    return Batches({"x": x}, 16, shuffle=False)


def errors(model, batch):
    student, teacher = model(batch["x"])
    return ((student - jax.lax.stop_gradient(teacher)) ** 2).mean(-1)


def loss(model, batch):
    return Mean(errors(model, batch))


def by_hand(module, batches, count):
    """Train the student of a module with plain Flax, and return losses and final variables."""
    module.teacher.eval()
    student = nnx.All(nnx.Param, nnx.PathContains("student"))
    optimizer = nnx.Optimizer(module, optax.sgd(LEARNING_RATE), wrt=student)
    losses = []
    for step in range(count):
        value, grads = nnx.value_and_grad(
            lambda model, step=step: errors(model, batches(step)).mean(),
            argnums=nnx.DiffState(0, student),
        )(module)
        optimizer.update(module, grads)
        losses.append(float(value))
    return losses, {
        "/".join(map(str, path)): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.state(module))
        if not isinstance(variable, nnx.RngState)
    }


def trained(factory, batches, count, loss=loss, **options):
    spec = abstract_state(factory, optax.sgd(LEARNING_RATE), "data=-1")
    step = make_train_step(spec, loss, batches(0), **options)
    first = init_state(spec, seed=0)
    # The first step deletes the arrays of its state.
    before = jax.tree.map(np.array, first)
    losses = []
    for _, state, metrics in steps(step, first, batches, until=count):
        losses.append(float(metrics["loss"]))
        last = state
    return spec, before, jax.tree.map(np.array, last), losses


def arrays(state):
    return {
        **named_leaves(state.params),
        **named_leaves(state.other),
        **named_leaves(state.frozen),
    }


@pytest.mark.parametrize("mode", [False, True, None])
def test_a_frozen_teacher_equals_a_hand_written_loop(mode):
    factory = freeze(lambda rngs: Distilled(rngs, mode), "teacher/*")
    batches = rows()
    _, before, after, losses = trained(factory, batches, 5)
    module = Distilled(nnx.Rngs(0))
    state = nnx.state(module)
    for path, variable in nnx.to_flat_state(state):
        if not isinstance(variable, nnx.RngState):
            variable.set_value(jnp.asarray(arrays(before)["/".join(path)]))
    nnx.update(module, state)
    expected, variables = by_hand(module, batches, 5)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for path, value in arrays(after).items():
        np.testing.assert_allclose(value, variables[path], rtol=2e-5, atol=1e-6)
        is_fixed = np.array_equal(value, arrays(before)[path])
        assert is_fixed == path.startswith("teacher/"), path


def test_the_output_of_a_frozen_module_does_not_depend_on_the_key():
    factory = freeze(Distilled, "teacher/*")
    spec = abstract_state(factory, optax.sgd(0.1), "data=-1")
    state = init_state(spec, seed=0)
    x = rows()(0)["x"]
    outputs = [spec.module(state, jax.random.key(n)).teacher(x) for n in range(2)]
    np.testing.assert_array_equal(*outputs)
    module = spec.module(state)
    # Evaluation mode is the only mode of a frozen module.
    module.eval()
    np.testing.assert_array_equal(module.teacher(x), outputs[0])


def flags(factory):
    module = build_module(factory, jax.random.key(0))
    names = ("deterministic", "use_running_average")
    return {
        "/".join(map(str, path)): getattr(part, name)
        for path, part in nnx.iter_modules(module)
        for name in names
        if hasattr(part, name)
    }


@pytest.mark.parametrize("mode", [False, None])
def test_only_modules_without_a_trained_parameter_are_frozen(mode):
    make = lambda rngs: Distilled(rngs, mode)  # noqa: E731
    frozen = {
        "student/dropout": False,
        "student/norm": False,
        "teacher/dropout": True,
        "teacher/norm": True,
    }
    assert flags(freeze(make, "teacher/*")) == frozen
    # The kernel of the teacher is trained, but all parameters of its normalization are frozen.
    partly = freeze(make, "teacher/norm/*")
    assert flags(partly) == {**frozen, "teacher/dropout": False}
    # One trained parameter of a normalization keeps its statistics moving.
    assert not any(flags(freeze(make, "teacher/norm/scale")).values())


def test_layers_with_adapters_are_trained_and_keep_dropout():
    adapted = lora(Distilled, "teacher/linear/kernel", rank=2, train=("student/*",))
    assert flags(adapted) == {
        "student/dropout": False,
        "student/norm": False,
        "teacher/dropout": False,
        "teacher/norm": True,
    }
    # `lora` decides last what is trained.
    assert flags(
        lora(
            freeze(Distilled, "teacher/*"),
            "teacher/linear/kernel",
            train=("student/*",),
        )
    ) == flags(adapted)


def test_a_part_that_a_trained_module_shares_stays_as_it_is():
    def make(rngs):
        model = Distilled(rngs)
        model.teacher.dropout = model.student.dropout
        model.teacher.norm.mean = model.student.norm.mean
        return model

    factory = freeze(make, "teacher/*")
    assert flags(factory)["student/dropout"] is False
    definition, _, _ = split_module(build_module(factory, jax.random.key(0)))
    assert set(definition.moving) == {"student/norm/mean", "student/norm/var"}


def test_a_loss_that_calls_train_does_not_move_the_statistics():
    def restless(model, batch):
        model.train()
        return loss(model, batch)

    _, before, after, _ = trained(freeze(Distilled, "teacher/*"), rows(), 2, restless)
    for name in ("mean", "var"):
        path = f"teacher/norm/{name}"
        np.testing.assert_array_equal(arrays(after)[path], arrays(before)[path])


def test_micro_batches_of_a_frozen_module_equal_one_batch():
    class Probe(nnx.Module):
        def __init__(self, rngs):
            self.teacher = Distilled(rngs).teacher
            self.head = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(self.teacher(x))

    def probe_loss(model, batch):
        return Mean((model(batch["x"])[:, 0] - batch["x"].sum(-1)) ** 2)

    factory = freeze(Probe, "teacher/*")
    one = trained(factory, rows(), 3, probe_loss)
    two = trained(factory, rows(), 3, probe_loss, accumulate=2)
    np.testing.assert_allclose(one[3], two[3], rtol=1e-5)
    # Nothing that padding could change: 13 examples on 8 devices.
    x = np.random.default_rng(1).normal(size=(13, 8)).astype(np.float32)
    trained(factory, Batches({"x": x}, 13), 1, probe_loss)
    with pytest.raises(ConfigError, match="head_norm/mean"):
        trained(with_norm(factory), Batches({"x": x}, 13), 1, probe_loss)


def with_norm(factory):
    def make(rngs):
        model = factory(rngs)
        model.head_norm = nnx.BatchNorm(8, rngs=rngs)
        return model

    return make


def test_stacked_layers_can_be_frozen():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=2)
            @nnx.vmap
            def make(rngs):
                return Body(rngs)

            self.layers = make(rngs)
            self.head = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def apply(x, layer):
                return layer(x)

            return self.head(apply(x, self.layers)), x

    _, before, after, losses = trained(freeze(Stack, "layers/*"), rows(), 3)
    for name in ("mean", "var"):
        path = f"layers/norm/{name}"
        np.testing.assert_array_equal(arrays(after)[path], arrays(before)[path])
    _, _, _, again = trained(freeze(Stack, "layers/*"), rows(), 3, seed=7)
    # Another seed of the random streams changes nothing: dropout is off.
    assert losses == again


def test_the_evaluation_step_computes_what_training_computes():
    factory = freeze(Distilled, "teacher/*")
    spec, _, _, _ = trained(factory, rows(), 1)
    state = init_state(spec, seed=0)

    def teacher_loss(model, batch):
        return Mean(model(batch["x"])[1].mean(-1))

    batch = rows()(0)
    step = make_eval_step(spec, teacher_loss, batch)
    evaluated = step(state, batch, 16)["loss"]
    output = spec.module(state, jax.random.key(1)).teacher(batch["x"])
    np.testing.assert_allclose(
        float(evaluated.total / evaluated.weight), float(output.mean()), rtol=1e-6
    )


def test_statistics_are_loaded_saved_and_resumed(tmp_path):
    base = Run(
        model=Distilled,
        loss=loss,
        optimizer=optax.sgd(LEARNING_RATE),
        data=rows(),
        steps=3,
        out=tmp_path / "base",
    )
    started = fit(base)
    tune = Run(
        model=freeze(Distilled, "teacher/*"),
        loss=loss,
        optimizer=optax.sgd(LEARNING_RATE),
        data=rows(),
        steps=3,
        out=tmp_path / "tuned",
        init_from=InitFrom(tmp_path / "base"),
    )
    fit(tune)
    resumed = fit(replace(tune, steps=6))
    statistics = lambda result: result.state.other["teacher"]["norm"]  # noqa: E731
    for name in ("mean", "var"):
        np.testing.assert_array_equal(
            statistics(resumed)[name], statistics(started)[name]
        )
