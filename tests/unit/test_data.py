"""The batch of a step is a pure function of (seed, step)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Arrays, Batches, Tokens, stdlib_bytes
from shardwise.errors import DataError


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_each_epoch_holds_every_row_once(rows, batch_size, seed):
    if batch_size > rows:
        with pytest.raises(DataError, match=f"{rows} rows, too few for a batch of {batch_size}"):
            Batches({"x": np.arange(rows)}, batch_size)(0)
        return
    batches = Batches({"x": np.arange(rows)}, batch_size, seed=seed)
    seen = np.concatenate([batches(step)["x"] for step in range(-(-2 * rows // batch_size))])
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
