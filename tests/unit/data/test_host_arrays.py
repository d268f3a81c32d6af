"""What reaches the devices is what the data function returned, or it is refused."""

import json
import threading
import time
from collections import UserList

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import (
    Batches,
    Mean,
    Run,
    abstract_state,
    evaluate,
    fit,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    steps,
)
from shardwise.data import Prefetch, Stream, as_batches, part_of
from shardwise.data.layout import batch_shapes, check_integers, num_rows
from shardwise.errors import ConfigError, DataError
from shardwise.run import describe_run, prepare

ROWS, WIDTH, STEPS = 8, 1024, 12


class Constant(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros(()))


def mean_of_x(model, batch):
    """The mean of the batch, so that the loss of a step shows which batch it got."""
    return Mean(batch["x"].mean(-1) + 0 * model.weight[...])


def mesh_of(count):
    return make_mesh(f"data={count}", jax.devices()[:count])


def make(data, devices=1, **options):
    fields = {"model": Constant, "loss": mean_of_x, "optimizer": optax.sgd(0.1)}
    fields |= {"mesh": mesh_of(devices), "steps": STEPS}
    return Run(data=data, **{**fields, **options})


def losses(path):
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def aligned(shape):
    """Return an array that JAX shares with a CPU device instead of copying it."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


def reusing():
    """Return a data function that fills the same array at each step."""
    buffer = aligned((ROWS, WIDTH))

    def batches(step):
        buffer[:] = step
        return {"x": buffer}

    return batches


# Arrays that are filled again.


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", ["function", "iterator"])
def test_a_run_may_get_the_same_array_at_each_step(tmp_path, devices, kind):
    data = reusing() if kind == "function" else map(reusing(), range(STEPS))
    fit(make(data, devices, out=tmp_path / "run"))
    assert losses(tmp_path / "run") == list(range(STEPS))


def test_a_custom_loop_may_get_the_same_array_at_each_step():
    spec = abstract_state(Constant, optax.sgd(0.1), mesh_of(1))
    data = reusing()
    step = make_train_step(spec, mean_of_x, data(0))
    state = init_state(spec, 0)
    seen = [metrics["loss"] for *_, metrics in steps(step, state, data, until=STEPS)]
    assert [float(value) for value in seen] == list(range(STEPS))
    # Also without `steps`.
    placed = [step.place(data(number)) for number in range(STEPS)]
    assert [float(batch["x"].mean()) for batch in placed] == list(range(STEPS))


def test_an_evaluation_may_get_the_same_array_for_each_batch():
    spec = abstract_state(Constant, optax.sgd(0.1), mesh_of(1))
    data = reusing()
    step = make_eval_step(spec, mean_of_x, data(0))
    state = init_state(spec, 0)
    found = evaluate(step, state, map(data, range(20)))["loss"]
    assert found == pytest.approx(np.arange(20).mean())


class Reusing:
    """A source that fills the same array at each call."""

    def __init__(self):
        self.buffer = aligned((ROWS, WIDTH))

    def __len__(self):
        return ROWS * STEPS

    def rows(self, indices):
        self.buffer[: len(indices)] = indices[:, None] // ROWS
        return {"x": self.buffer[: len(indices)]}

    def fingerprint(self):
        return {"rows": len(self)}


def test_a_source_may_reuse_its_arrays(tmp_path):
    batches = Batches(Reusing(), ROWS, shuffle=False)
    fit(make(batches, out=tmp_path / "run"))
    assert losses(tmp_path / "run") == list(range(STEPS))


def test_a_source_may_reuse_its_arrays_for_the_parts_of_a_batch():
    batches = Batches(Reusing(), 2 * ROWS, shuffle=False)
    local = part_of(batches, [(0, 2), (14, 16)])
    assert local(0)["x"][:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("threads", [2, 4])
def test_one_array_for_several_threads_is_refused(threads):
    with pytest.raises(DataError, match=r"same memory for batches \d and \d .*shape"):
        fit(make(reusing(), data_threads=threads))


def test_two_arrays_in_turn_for_several_threads_are_refused():
    buffers = [aligned((ROWS, WIDTH)) for _ in range(2)]

    def batches(step):
        buffer = buffers[step % 2]
        buffer[:] = step
        return {"x": buffer}

    with (
        Prefetch(batches, 0, 50, threads=4) as prefetch,
        pytest.raises(DataError, match=r"return new arrays, or set data_threads=1"),
    ):
        [prefetch(step) for step in range(50)]


def test_several_threads_may_get_constant_arrays_views_and_new_arrays(tmp_path):
    constant = aligned((ROWS, WIDTH))
    views = np.repeat(np.arange(4, dtype=np.float32), ROWS * WIDTH).reshape(4, ROWS, -1)
    for data, expected in (
        (lambda step: {"x": constant}, [0] * STEPS),
        (lambda step: {"x": views[step % 4]}, [step % 4 for step in range(STEPS)]),
        (
            lambda step: {"x": np.full((ROWS, WIDTH), step, np.float32)},
            list(range(STEPS)),
        ),
    ):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        fit(make(data, data_threads=3, out=out))
        assert losses(out) == expected


def test_a_function_is_called_by_one_thread_at_a_time_unless_several_are_allowed():
    inside = []
    most = []

    def batches(step):
        inside.append(step)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(step)
        return {"x": np.full((1, 1), step)}

    def read(prefetch):
        return [int(prefetch(step)["x"][0, 0]) for step in range(8)]

    with Prefetch(batches, 0, 8) as prefetch:
        # A second reader, such as the report on a bad step.
        other = threading.Thread(target=lambda: prefetch._batches(3))
        other.start()
        assert read(prefetch) == list(range(8))
        other.join()
    assert max(most) == 1
    with Prefetch(batches, 0, 8, threads=4) as prefetch:
        assert read(prefetch) == list(range(8))
    assert max(most) > 1


# Numbers that do not fit.


@pytest.mark.parametrize(
    ("value", "dtype", "wrapped"),
    [
        (2**40 + 7, np.int64, "7"),
        (-(2**31) - 1, np.int64, "2,147,483,647"),
        (2**32 + 5, np.uint64, "5"),
    ],
)
def test_integers_that_wrap_on_the_device_are_refused(value, dtype, wrapped):
    x = np.zeros((8, 3), dtype)
    x[5, 1] = value
    words = rf"leaf 'ids' .* has the value {value:,}. .* wrap around to {wrapped}\."
    with pytest.raises(DataError, match=words):
        check_integers({"ids": x})


def test_integers_that_fit_are_accepted():
    limits = np.array([-(2**31), 2**31 - 1])
    check_integers({"x": limits, "y": np.array([2**32 - 1], np.uint64)})
    check_integers({"x": np.empty((0, 3), np.int64), "y": np.array([1e300])})
    with jax.enable_x64(True):
        check_integers({"x": np.array([2**40])})


def test_integers_are_checked_in_the_first_batch_and_in_later_ones():
    def loss(model, batch):
        return Mean(batch["x"] * 1.0 + 0 * model.weight[...])

    def batches(bad):
        return lambda step: {"x": np.full(8, 2**40 if step == bad else step)}

    with pytest.raises(DataError, match="1,099,511,627,776"):
        prepare(make(batches(0), loss=loss))
    with pytest.raises(DataError, match="1,099,511,627,776"):
        fit(make(batches(3), loss=loss))
    data = Batches({"x": np.arange(32) + 2**40}, 8)
    with pytest.raises(DataError, match="leaf 'x'"):
        prepare(make(data, loss=loss))
    run = make(batches(-1), loss=loss, eval_data=data)
    with pytest.raises(DataError, match="leaf 'x'"):
        fit(run)


# Collections instead of batches.


class Torchlike:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": np.zeros(8, np.float32)}


X = np.zeros((10, 8), np.float32)


@pytest.mark.parametrize(
    "data",
    [
        [{"x": row} for row in X],
        tuple({"x": row} for row in X),
        UserList([{"x": row} for row in X]),
        X,
        Torchlike(),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_collection_is_not_taken_for_batches(data):
    name = type(data).__name__
    words = (
        rf"the data is a {name} of 10 items.*Batches\(data, batch_size=...\) if its items "
        r"are examples, or lambda step: data\[step % len\(data\)\] if they are batches"
    )
    with pytest.raises(ConfigError, match=words):
        prepare(make(data))
    spec = abstract_state(Constant, optax.sgd(0.1), mesh_of(1))
    step = make_train_step(spec, mean_of_x, {"x": X})
    with pytest.raises(ConfigError, match=words):
        next(steps(step, init_state(spec, 0), data, until=3))


def test_other_things_are_not_taken_for_batches_either():
    with pytest.raises(ConfigError, match="a dictionary of 'x', 'y', not a function"):
        as_batches({"x": X, "y": X})
    with pytest.raises(ConfigError, match="the data is a int, neither a function"):
        as_batches(3)


def test_iterables_are_accepted():
    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([1, 2, 3])

    dataset = grain.MapDataset.source(X).map(lambda x: {"x": x})
    for data in (
        Loader(),
        iter([1, 2]),
        (number for number in range(3)),
        dataset.batch(2).to_iter_dataset(),
    ):
        assert isinstance(as_batches(data), Stream)


# Leaves that are not arrays of examples.


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (
            "text",
            r"leaf 'w' of the batch is str 'text'. Convert text to arrays of tokens",
        ),
        ([1, 2, 3], r"leaf 'w' of the batch is a list of 3 numbers. .*np.array\("),
        (np.array(["a", "b"]), r"leaf 'w' of the batch is an array of dtype <U1"),
        (np.array([None] * 10), r"leaf 'w' of the batch is an array of dtype object"),
        (object, r"leaf 'w' of the batch is type .*np.asarray"),
    ],
)
def test_a_leaf_that_is_no_array_of_examples_is_named(leaf, words):
    batch = {"x": X, "w": leaf}
    with pytest.raises(DataError, match=words):
        prepare(make(lambda step: batch))
    for function in (num_rows, batch_shapes):
        with pytest.raises(DataError, match=words):
            function(batch)


# Numbers that all examples share.


def weighted(model, batch):
    weight = batch["weight"] * model.weight[...]
    return Mean(batch["x"].mean(-1) + weight + weight**2)


@pytest.mark.parametrize(
    ("devices", "rows", "accumulate", "kind"),
    [(8, 16, 1, float), (4, 16, 2, np.float32), (8, 13, 1, np.array)],
)
def test_a_number_is_shared_by_all_examples(devices, rows, accumulate, kind):
    """As if every example had it, also in micro-batches and next to padding."""
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("f4")

    def shared(step):
        return {"x": x, "weight": kind(0.5 + step)}

    def per_example(step):
        return {"x": x, "weight": np.full(rows, 0.5 + step, "f4")}

    options = {"loss": weighted, "accumulate": accumulate, "steps": 3}
    options |= {"eval_data": Batches({"x": x, "weight": np.ones(rows, "f4")}, rows)}
    one, all_of_them = (
        fit(make(data, devices, **options)) for data in (shared, per_example)
    )
    assert float(one.state.params["weight"]) != 0
    assert float(one.state.params["weight"]) == pytest.approx(
        float(all_of_them.state.params["weight"]), rel=1e-6
    )
    assert one.metrics["loss"] == pytest.approx(all_of_them.metrics["loss"], rel=1e-6)


def test_a_batch_of_numbers_alone_is_refused():
    with pytest.raises(DataError, match="no array with one entry per example"):
        prepare(make(lambda step: {"x": 0.5, "weight": 1}))


# Data functions in checkpoints.


def test_a_run_does_not_resume_with_another_data_function(tmp_path):
    def constant(value):
        return lambda step: {"x": np.full((ROWS, WIDTH), value, np.float32)}

    out = tmp_path / "run"
    fit(make(constant(1.0), steps=2, out=out))
    with pytest.raises(ConfigError, match="data/first_batch"):
        fit(make(constant(2.0), steps=4, out=out))
    # The same function, and another mesh.
    assert int(fit(make(constant(1.0), 8, steps=4, out=out)).state.step) == 4
    accepted = make(constant(2.0), steps=6, out=out, accept=("data",))
    assert int(fit(accepted).state.step) == 6


def test_a_run_resumes_from_a_checkpoint_that_does_not_know_its_data(tmp_path):
    out = tmp_path / "run"
    # The description of an iterator is what older checkpoints have for functions, too.
    fit(make(map(reusing(), range(2)), steps=2, out=out))
    assert int(fit(make(reusing(), steps=4, out=out)).state.step) == 4


def test_the_first_batch_identifies_a_function():
    def described(data, **options):
        run = make(data, **options)
        return describe_run(run, prepare(run))["data"]

    same = [described(reusing()), described(reusing(), devices=8)]
    assert same[0] == same[1]
    assert list(same[0]) == ["first_batch"]
    batch = {"x": np.zeros((ROWS, WIDTH), np.float32)}
    assert described(lambda step: batch) == same[0]
    assert described(lambda step: {"x": batch["x"] + 1}) != same[0]
    assert described(lambda step: {"x": batch["x"][:4]}) != same[0]
    assert described(iter([batch])) == (
        "a function or an iterator, whose content is not known"
    )


# One process with data for its own devices, which are all of them.


def test_one_process_is_the_same_with_both_scopes(tmp_path):
    def batches(step):
        return {"x": np.random.default_rng(step).normal(size=(16, 4)).astype("f4")}

    found = []
    for scope in ("global", "process"):
        out = tmp_path / scope
        fit(make(batches, 8, data_scope=scope, accumulate=2, out=out))
        found.append(losses(out))
    assert found[0] == found[1]


def test_local_batches_are_never_padded():
    data = reusing()
    with pytest.raises(
        DataError, match=r"supplied 8 examples for 3 of the 3 .* use a multiple of 3 "
    ):
        prepare(make(data, 3, data_scope="process"))
    with pytest.raises(DataError, match=r"8 examples together, .* multiple of 12"):
        prepare(make(data, 4, data_scope="process", accumulate=3))
    with pytest.raises(ConfigError, match="data_scope='local'; it must be 'global' or"):
        prepare(make(data, data_scope="local"))
