"""Datasets, iterators and loaders of Grain train, resume bit for bit, and evaluate."""

import json
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardwise import Batches, Mean, Run, fit, make_mesh
from shardwise.checkpoint.store import position_path
from shardwise.data import Prefetch, Stream, as_batches
from shardwise.data.evaluation import Once, as_evaluation
from shardwise.data.grain import MapBatches, is_endless, makes_batches
from shardwise.errors import ConfigError, DataError
from shardwise.files.manifest import write_manifest
from shardwise.run import prepare

ROWS = 50
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def examples(seed=1):
    return grain.MapDataset.source(X).seed(seed).shuffle().map(lambda x: {"x": x})


def is_large(example):
    return example["x"].sum() > -1


class AsDictionary(grain.transforms.Map):
    def map(self, x):
        return {"x": x}


def loader(batch_size=8, num_epochs=None, **options):
    sampler = grain.samplers.IndexSampler(
        ROWS,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        num_epochs=num_epochs,
        seed=2,
    )
    operations = [AsDictionary(), grain.transforms.Batch(batch_size, True)]
    return grain.DataLoader(
        data_source=X, sampler=sampler, operations=operations, **options
    )


def packed():
    lengths = {"x": 6}
    tokens = grain.MapDataset.range(1, 60).map(
        lambda n: {"x": np.full(n % 5 + 1, n, np.int32)}
    )
    packs = grain.experimental.FirstFitPackIterDataset(
        tokens.seed(3).shuffle().repeat().to_iter_dataset(),
        length_struct=lengths,
        num_packing_bins=4,
    )
    return packs.batch(8)


# Pipelines that yield batches of 8 examples endlessly.
STREAMS = {
    "filter": lambda: examples().repeat().to_iter_dataset().filter(is_large).batch(8),
    "mix": lambda: grain.IterDataset.mix(
        [
            examples(4).repeat().to_iter_dataset(),
            examples(5).repeat().to_iter_dataset(),
        ],
        weights=[0.7, 0.3],
    ).batch(8),
    "window shuffle": lambda: grain.experimental.WindowShuffleIterDataset(
        examples().repeat().to_iter_dataset(), window_size=20, seed=3
    ).batch(8),
    "pack": packed,
    "random map": lambda: (
        examples()
        .repeat()
        .to_iter_dataset()
        .seed(3)
        .random_map(lambda e, rng: {"x": e["x"] + rng.normal(size=4).astype("f4")})
        .batch(8)
    ),
    "loader": loader,
    "iterator": lambda: iter(STREAMS["filter"]()),
}


def read(batches, *steps):
    return [np.array(batches(step)["x"]) for step in steps]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_returns_to_any_of_its_positions(name):
    stream = Stream(STREAMS[name]())
    expected, positions = [], []
    for step in range(12):
        expected.append(stream(step)["x"])
        positions.append(stream.position)
    assert len({batch.tobytes() for batch in expected}) == 12
    for step in (1, 6, 11):
        again = Stream(STREAMS[name]())
        # A run reads the first batch before it resumes.
        again(0)
        again.resume(step, positions[step - 1])
        assert np.array_equal(read(again, *range(step, 12)), expected[step:])
        again.close()


def test_a_position_is_json_and_belongs_to_the_batch_that_was_returned():
    stream = Stream(STREAMS["filter"]())
    with Prefetch(stream, 0, 20, depth=6) as prefetch:
        batches = [prefetch(step) for step in range(5)]
        position = prefetch.position
        # The thread reads ahead meanwhile.
        while stream.position == position:
            pass
        assert prefetch.position == position
        expected = prefetch(5)["x"]
    assert json.loads(position).keys() == {"json"}
    assert len(batches) == 5
    again = Stream(STREAMS["filter"]())
    again.resume(5, position)
    assert np.array_equal(again(5)["x"], expected)


def test_states_of_a_loader_are_bytes():
    stream = Stream(loader())
    stream(0)
    assert json.loads(stream.position).keys() == {"base64"}


class Counter:
    """An iterator with a state that JSON cannot express."""

    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return self

    def __next__(self):
        return {"x": X}

    def get_state(self):
        return {"value": self.state}

    def set_state(self, state):
        assert state == {"value": 3}, "no"


def test_any_iterator_with_a_state_resumes_if_the_state_is_json():
    stream = Stream(Counter(np.int64(3)))
    stream(0)
    stream.resume(1, stream.position)
    with pytest.raises(
        DataError, match="cannot return to its position at step 1: Asse"
    ):
        stream.resume(1, '{"json": 4}')
    with pytest.raises(DataError, match="cannot return to its position at step 1: Key"):
        stream.resume(1, "{}")
    stream = Stream(Counter(object()))
    stream(0)
    assert stream.position is None
    assert (
        stream.problem == "the state of the data iterator is not JSON: it has a object"
    )


def test_an_iterator_that_the_user_made_stays_open():
    iterator = iter(STREAMS["filter"]())
    stream = Stream(iterator)
    stream(0)
    stream.close()
    next(iterator)
    dataset = STREAMS["filter"]()
    stream = Stream(dataset)
    stream(0)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream(1)


# Random access


def test_a_map_dataset_is_a_function_of_the_step():
    dataset = examples().batch(10)
    batches = as_batches(dataset)
    assert isinstance(batches, MapBatches)
    assert batches.num_batches == 5
    epochs = np.concatenate(read(batches, *range(10))).reshape(2, ROWS, 4)
    assert not np.array_equal(*epochs)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch, axis=0), np.sort(X, axis=0))
    assert as_batches(examples().repeat().batch(8)).num_batches is None


def test_a_map_dataset_must_have_batches():
    with pytest.raises(ConfigError, match=r"MapDataset without batch\(\).*Batches\("):
        as_batches(examples())
    with pytest.raises(DataError, match=r"no batches\. With drop_remainder=True"):
        as_batches(examples().batch(ROWS + 1, drop_remainder=True))
    gaps = as_batches(examples().batch(10).filter(lambda batch: False))
    with pytest.raises(DataError, match=r"batch 0 .* is None: a filter leaves gaps"):
        gaps(0)
    with pytest.raises(
        ConfigError, match="Batches needs examples by index, which a Gr"
    ):
        Batches(loader(), 8)


@pytest.mark.parametrize(
    ("data", "endless", "batched"),
    [
        (examples(), False, False),
        (examples().batch(8), False, True),
        (examples().repeat(), True, False),
        (examples().repeat(3).batch(8), False, True),
        (examples().repeat().batch(2048), True, True),
        (STREAMS["filter"](), True, True),
        (examples().to_iter_dataset().filter(is_large).batch(8), False, True),
        (STREAMS["mix"](), True, True),
        (
            grain.IterDataset.mix(
                [examples().repeat().to_iter_dataset(), examples().to_iter_dataset()]
            ),
            False,
            False,
        ),
        (
            grain.experimental.RepeatIterDataset(examples().to_iter_dataset()),
            True,
            False,
        ),
        (grain.experimental.LimitIterDataset(STREAMS["mix"](), 3), False, True),
        (
            STREAMS["mix"]().mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
            True,
            True,
        ),
        (loader(), True, True),
        (loader(num_epochs=1), False, True),
    ],
)
def test_graphs_of_datasets_are_understood(data, endless, batched):
    assert is_endless(data) == endless
    assert makes_batches(data) == batched


# Runs


class Constant(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros(4))


def loss(model, batch):
    return Mean(((batch["x"] - model.weight[...]) ** 2).sum(-1))


def make(data, **options):
    mesh = make_mesh("data=2", jax.devices()[:2])
    fields = {"model": Constant, "loss": loss, "optimizer": optax.adam(0.1)}
    return Run(data=data, **{**fields, "mesh": mesh, "steps": 6, **options})


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


KINDS = {
    "MapDataset": lambda: examples().repeat().batch(8),
    "IterDataset": STREAMS["filter"],
    "DataLoader": loader,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_uninterrupted_run(kind, tmp_path):
    straight = fit(make(KINDS[kind](), out=tmp_path / "a"))
    fit(make(KINDS[kind](), steps=3, out=tmp_path / "b"))
    resumed = fit(make(KINDS[kind](), out=tmp_path / "b"))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(set(losses(tmp_path / "a"))) == 6
    assert np.array_equal(
        straight.state.params["weight"], resumed.state.params["weight"]
    )


def spread(out, step, count):
    """Let a checkpoint look as if `count` processes had saved it."""
    place = out / "checkpoints" / str(step)
    first = position_path(place, 0, 1)
    text = first.read_text()
    first.unlink()
    for index in range(count):
        position_path(place, index, count).write_text(text)
    write_manifest(place)


def test_another_number_of_processes_works_or_is_refused(tmp_path):
    """Data sharded by process cannot be divided differently. Complete batches can."""
    for scope in ("global", "process"):
        out = tmp_path / scope
        fit(make(loader(), steps=2, out=out, data_scope=scope))
        spread(out, 2, 3)
    straight = fit(make(loader()))
    resumed = fit(make(loader(), out=tmp_path / "global"))
    assert np.array_equal(
        straight.state.params["weight"], resumed.state.params["weight"]
    )
    words = r"saved by 3 processes, .* this run has 1. Start 3 processes. .* MapDataset"
    with pytest.raises(DataError, match=words):
        fit(make(loader(), out=tmp_path / "process", data_scope="process"))


def test_other_data_is_refused_before_anything_is_compiled(tmp_path, capfd):
    out = tmp_path / "run"
    fit(make(loader(8), steps=2, out=out))
    capfd.readouterr()
    with pytest.raises(ConfigError, match=r"data/batch_size +8 +16\n"):
        fit(make(loader(16), out=out))
    with pytest.raises(ConfigError, match="data/first_batch"):
        fit(make(STREAMS["filter"](), out=out))
    with pytest.raises(
        DataError, match=r"cannot return to its position at step 2: TypeError"
    ):
        fit(make(STREAMS["filter"](), out=out, accept=("data",)))
    with pytest.raises(DataError, match="a list_iterator, which has no get_state"):
        fit(make(iter([{"x": X[:8]}] * 9), out=out))
    assert "compiling" not in capfd.readouterr().err
    fit(make(KINDS["MapDataset"](), steps=2, out=tmp_path / "map"))
    with pytest.raises(DataError, match="no position of a data iterator"):
        fit(make(loader(8), out=tmp_path / "map", accept=("data",)))


def test_a_run_that_cannot_resume_says_so_at_its_start(tmp_path, capfd):
    def batches():
        while True:
            yield {"x": X[:8]}

    fit(make(batches(), steps=2, out=tmp_path / "run"))
    printed = " ".join(capfd.readouterr().err.split())
    assert printed.count("this run will not be able to resume: the data is a gen") == 1
    assert printed.index("cannot-resume") < printed.index("compiling")
    with pytest.raises(DataError, match=r"this run cannot resume from .*/2: the data"):
        fit(make(batches(), steps=4, out=tmp_path / "run"))
    # Nothing is left to do, so there is nothing to read.
    fit(make(batches(), steps=2, out=tmp_path / "run"))
    fit(make(batches(), steps=2))
    assert "cannot-resume" not in capfd.readouterr().err.split("nothing to do")[1]


def test_elements_that_are_examples_or_shorter_are_refused():
    labeled = grain.MapDataset.source(X).map(lambda x: {"x": x, "y": x.sum()})
    with pytest.raises(
        DataError, match=r"are examples: 'y' is a single number. Add batch"
    ):
        prepare(make(labeled.to_iter_dataset()))
    with pytest.raises(
        DataError, match=r"last of 7 batches .* has 2 examples, .* has 8"
    ):
        prepare(make(examples().batch(8), steps=7))
    prepare(make(examples().batch(8), steps=6))
    prepare(make(examples().batch(8, drop_remainder=True), steps=7))
    with pytest.raises(DataError, match=r"ended after 6 batches; .*dataset.repeat\(\)"):
        fit(make(examples().batch(8, drop_remainder=True).to_iter_dataset(), steps=7))


# Evaluations

BATCHES = [{"x": X[first : first + 16]} for first in range(0, ROWS, 16)]


def in_order():
    return grain.MapDataset.source(X).map(lambda x: {"x": x})


@pytest.mark.parametrize(
    "data",
    [
        BATCHES,
        tuple(BATCHES),
        lambda: iter(BATCHES),
        lambda: in_order().batch(16),
        in_order().batch(16),
        in_order().to_iter_dataset().batch(16),
        grain.DataLoader(
            data_source=X,
            sampler=grain.samplers.SequentialSampler(ROWS),
            operations=[AsDictionary(), grain.transforms.Batch(16)],
            shard_options=grain.sharding.NoSharding(),
        ),
    ],
    ids=["list", "tuple", "function", "dataset function", "map", "iter", "loader"],
)
def test_validation_data_has_every_example_once(data):
    once = as_evaluation(data)
    assert isinstance(once, Once)
    for _ in range(2):
        read = list(once)
        assert np.array_equal(np.concatenate([batch["x"] for batch in read]), X)
        assert [len(batch["x"]) for batch in read] == [16, 16, 16, 2]


def test_evaluations_of_batches_and_of_their_source_agree():
    metrics = [
        fit(make(KINDS["MapDataset"](), eval_every=3, eval_data=data)).eval_metrics
        for data in (Batches({"x": X}, 16), BATCHES, in_order().batch(16))
    ]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-6)
    assert metrics[1] == metrics[2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (iter(BATCHES), "which can be read only once.*a function that returns it"),
        (iter(in_order().batch(16).to_iter_dataset()), "can be read only once"),
        (lambda step: BATCHES[step], r"function with arguments.*map\(function, range"),
        ({"x": X}, r"is a dict, .* Use Batches\(examples, batch_size"),
        (3, "is a int, which is not a collection"),
        (examples(), r"a Grain MapDataset without batch\(\)"),
        (examples().repeat().batch(8), r"Map\w+ that repeats endlessly.*dataset\[:n\]"),
        (STREAMS["filter"](), "IterDataset that repeats endlessly.*Limit"),
        (loader(), "DataLoader that repeats endlessly.*num_epochs=1"),
        (lambda: STREAMS["mix"](), "endlessly"),
        (
            [{"x": x} for x in X],
            r"shape \(4,\) in eval_data and \(8, 4\) in data.*Batches",
        ),
    ],
)
def test_validation_data_that_cannot_be_read_again_is_refused(data, words):
    with pytest.raises(ConfigError, match=words):
        prepare(make(lambda step: {"x": X[:8]}, eval_data=data))


def test_empty_validation_data_is_refused():
    for data in ([], lambda: iter([]), in_order().batch(99, drop_remainder=True)):
        with pytest.raises(DataError, match="eval_data has no batches"):
            as_evaluation(data)


def test_a_larger_batch_may_come_later():
    run = make(KINDS["MapDataset"](), steps=1, eval_data=BATCHES[::-1])
    assert fit(run).eval_metrics["loss"] > 0
    small = BATCHES[-1]
    run = make(
        KINDS["MapDataset"](), steps=1, eval_data=lambda: iter([small, small, *BATCHES])
    )
    with pytest.raises(DataError, match="Put the largest batch first"):
        fit(run)


def test_grain_is_imported_by_its_users_only():
    code = """if True:
        import sys
        import shardwise, shardwise.data, shardwise.run
        shardwise.fit, shardwise.Batches
        sys.exit("grain" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
