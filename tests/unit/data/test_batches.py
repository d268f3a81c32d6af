"""The batch of a step is a pure function of (seed, step)."""

from typing import NamedTuple

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Arrays, Batches, Mix, Tokens, keep, stdlib_bytes
from shardwise.data.shuffle import BLOCK, keys_of, order, permute
from shardwise.errors import DataError

ORDER_OF_1000 = [791, 367, 792, 937, 268, 617, 549, 346]
ORDER_OF_MANY = [111758968, 62871303, 204148766, 527276148]


@given(st.integers(1, 3000), st.integers(-(2**63), 2**64))
def test_the_shuffle_is_a_bijection(size, seed):
    assert np.array_equal(
        np.sort(permute(np.arange(size), size, keys_of(seed))), np.arange(size)
    )


@given(
    st.integers(2**20, 2**62),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 2**20 - 1), min_size=2, max_size=50, unique=True),
)
def test_the_shuffle_of_a_huge_source_stays_in_range_and_repeats_nothing(
    size, seed, indices
):
    found = permute(np.array(indices), size, keys_of(seed))
    assert len(set(found.tolist())) == len(indices)
    assert ((found >= 0) & (found < size)).all()


@pytest.mark.parametrize(
    ("size", "orders_of"),
    [
        (5, order),
        (12, order),
        (100, order),
        (
            100,
            lambda size, first, last, seed: permute(
                np.arange(size), size, keys_of(seed)
            ),
        ),
    ],
)
def test_every_row_is_as_likely_at_every_place(size, orders_of):
    draws = 4000
    orders = np.array([orders_of(size, 0, size, seed) for seed in range(draws)])
    for place in (0, size // 2, size - 1):
        assert chi_squared(np.bincount(orders[:, place], minlength=size)) < 4
    assert (
        chi_squared(
            np.bincount((orders[:, 1] - orders[:, 0]) % size, minlength=size)[1:]
        )
        < 4
    )  # neighbours are as strangers


def chi_squared(counts):
    """How far counts are from alike, in standard deviations of chi squared."""
    freedom = len(counts) - 1
    return (((counts - counts.mean()) ** 2 / counts.mean()).sum() - freedom) / np.sqrt(
        2 * freedom
    )


def test_the_order_is_fixed_for_all_time():
    """A resumed run must see the order of its first part, also after an update of shardwise."""
    assert order(1000, 0, 8, seed=0).tolist() == ORDER_OF_1000
    assert order(10**9 + 7, 10**12, 10**12 + 4, seed=3).tolist() == ORDER_OF_MANY


@settings(max_examples=40)
@given(
    st.integers(1000, 3 * BLOCK),
    st.integers(0, 5 * BLOCK),
    st.integers(0, 2 * BLOCK),
    st.integers(0, 9),
    st.booleans(),
)
def test_an_order_is_the_same_in_one_piece_and_in_two(
    size, first, count, seed, shuffle
):
    middle = first + count // 3
    parts = [
        order(size, first, middle, seed, shuffle),
        order(size, middle, first + count, seed, shuffle),
    ]
    assert np.array_equal(
        np.concatenate(parts), order(size, first, first + count, seed, shuffle)
    )


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_each_epoch_holds_every_row_once(rows, batch_size, seed):
    if batch_size > rows:
        with pytest.raises(
            DataError, match=f"{rows} examples, too few for a batch of {batch_size}"
        ):
            Batches({"x": np.arange(rows)}, batch_size)
        return
    batches = Batches({"x": np.arange(rows)}, batch_size, seed=seed)
    seen = np.concatenate(
        [batches(step)["x"] for step in range(-(-2 * rows // batch_size))]
    )
    assert sorted(seen[:rows]) == list(range(rows))
    assert sorted(seen[rows : 2 * rows]) == list(range(rows))


def test_batches_depend_on_nothing_but_seed_and_step():
    make = lambda seed: Batches({"x": np.arange(1000)}, 16, seed=seed)  # noqa: E731
    forward = [make(3)(step)["x"] for step in range(100)]
    backward = [make(3)(step)["x"] for step in reversed(range(100))][::-1]
    assert np.array_equal(forward, backward)
    assert not np.array_equal(forward, [make(4)(step)["x"] for step in range(100)])
    assert not np.array_equal(np.sort(forward[0]), forward[0])
    epochs = np.concatenate(forward + [make(3)(step)["x"] for step in range(100, 125)])
    assert not np.array_equal(epochs[:1000], epochs[1000:2000])


@given(st.integers(1, 200), st.data(), st.integers(0, 500))
def test_some_rows_of_a_batch_are_a_slice_of_it(rows, data, step):
    batch_size = data.draw(st.integers(1, rows))
    first = data.draw(st.integers(0, batch_size))
    last = data.draw(st.integers(first, batch_size))
    batches = Batches({"x": np.arange(rows) * 3}, batch_size, seed=step)
    assert np.array_equal(
        batches.rows(step, first, last)["x"], batches(step)["x"][first:last]
    )


def test_once_gives_each_row_once_in_order_with_a_short_last_batch():
    parts = [batch["x"] for batch in Batches({"x": np.arange(10)}, 4).once()]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_windows_of_tokens_have_labels_one_later():
    source = Tokens(np.arange(100, dtype=np.uint8), length=8)
    assert len(source) == 12
    rows = source.rows(np.array([0, 11]))
    assert rows["inputs"].tolist() == [list(range(8)), list(range(88, 96))]
    assert np.array_equal(rows["labels"], rows["inputs"] + 1)
    assert rows["inputs"].dtype == np.int32
    with pytest.raises(DataError, match="8 tokens are too few for one window of 8"):
        Tokens(np.arange(8), length=8)


def test_arrays_must_have_their_rows_in_common():
    with pytest.raises(DataError, match=r"x \(3,\), y \(4,\)"):
        Arrays({"x": np.zeros(3), "y": np.zeros(4)})


def test_the_standard_library_is_a_corpus():
    train, held_out = stdlib_bytes()
    assert len(train) > 2_000_000
    assert 0.01 < len(held_out) / len(train) < 0.2
    assert b"import" in train[:100_000].tobytes()


def test_a_grain_dataset_and_a_list_are_sources():
    dataset = grain.MapDataset.range(100).map(Row())
    batches = Batches(dataset, 8, seed=1)
    assert np.array_equal(
        batches(3)["x"], Batches({"x": np.arange(100) * 2}, 8, seed=1)(3)["x"]
    )
    listed = Batches([Row()(i) for i in range(100)], 8, seed=1)
    assert listed.fingerprint()["source"] == batches.fingerprint()["source"]
    assert Batches(dataset.map(Row()), 8).fingerprint() != batches.fingerprint()
    with pytest.raises(DataError, match="is None: a filter"):
        Batches(
            grain.MapDataset.range(100).filter(lambda i: i % 2 == 0).map(Row()), 100
        )(0)


class Pair(NamedTuple):
    x: np.ndarray
    y: int


@pytest.mark.parametrize("kind", [tuple, Pair._make])
def test_items_may_be_tuples(kind):
    pairs = [kind((np.full(3, i, np.float32), i % 7)) for i in range(20)]
    batches = Batches(pairs, 8, seed=1)
    x, y = batches(2)
    assert type(batches(2)) is type(pairs[0])
    expected = Batches({"x": np.arange(20)}, 8, seed=1)(2)["x"]
    assert np.array_equal(x[:, 0], expected)
    assert np.array_equal(y, expected % 7)
    assert [leaf.shape for leaf in batches.example()] == [(8, 3), (8,)]
    assert set(batches.fingerprint()["source"]["sample"]) == {"0", "1"}
    # Sources made of it have tuples, too.
    kept = keep(pairs, lambda example: example[1] == 3)
    assert len(kept) == 3
    mix = Mix([(pairs, 0.5), (kept, 0.5)])
    assert [part[:, 0].tolist() for part in [mix.rows(np.array([5, 21]))[0]]] == [
        [5.0, 10.0]
    ]
    assert mix.rows(np.array([5, 21]))[1].tolist() == [5, 3]


def test_items_may_be_arrays_or_nested():
    assert Batches(list(np.eye(4)), 2, shuffle=False)(0).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
    ]
    nested = [{"a": {"b": i}, "c": np.ones(2)} for i in range(4)]
    batch = Batches(nested, 2, shuffle=False)(1)
    assert batch["a"]["b"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["one", "two"], r"column 'text' is text: 'one' in item 0. .*remove_columns"),
        ([b"one", b"two"], r"column 'text' is text: b'one' in item 0"),
        ([["a", "b"], ["c"]], r"column 'text' is text: \['a', 'b'\] in item 0"),
        ([None, None], r"column 'text' is not an array of numbers: None in item 0"),
        (
            [[1, 2], [3]],
            r"'text' has shape \(2,\) in item 0 and \(1,\) in item 1. .*pad",
        ),
    ],
)
def test_columns_that_are_no_arrays_are_named(column, words):
    items = [{"x": i, "text": value} for i, value in enumerate(column)]
    batches = Batches(items, 2, shuffle=False)
    with pytest.raises(DataError, match=words):
        batches(0)
    with pytest.raises(DataError, match=words):
        batches.fingerprint()
    with pytest.raises(DataError, match="column '1'"):
        Batches([(i, value) for i, value in enumerate(column)], 2, shuffle=False)(0)


class Row:
    def __call__(self, i):
        return {"x": np.int64(2 * (i["x"] if isinstance(i, dict) else i))}
