"""Combined sources (mixes, splits, filters, packed documents) are functions of the index."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Batches, Mix, Packed, Subset, Tokens, keep, split
from shardwise.data.combine import apportion
from shardwise.errors import ConfigError, DataError


def numbers(start, count):
    return {"x": np.arange(start, start + count)}


# Mix


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 99),
    st.data(),
)
def test_a_mix_gives_each_source_its_share_in_epochs_of_its_own(parts, seed, data):
    sources = [
        (numbers(1000 * i, count), weight) for i, (count, weight) in enumerate(parts)
    ]
    mix = Mix(sources)
    pattern = sum(apportion({str(i): weight for i, (_, weight) in enumerate(sources)}))
    repeats = 12
    batch_size = data.draw(st.integers(1, len(mix)))
    batches = Batches(mix, batch_size, seed=seed)
    seen = np.concatenate(
        [batches(step)["x"] for step in range(-(-pattern * repeats // batch_size))]
    )[: pattern * repeats]
    for i, (count, weight) in enumerate(parts):
        of_source = seen[seen // 1000 == i] - 1000 * i
        share = weight / sum(weight for _, weight in parts)
        assert len(of_source) == round(share * pattern * repeats)
        for epoch in range(len(of_source) // count):
            assert sorted(of_source[epoch * count : (epoch + 1) * count]) == list(
                range(count)
            )
    for first in range(0, len(seen) - pattern, pattern):
        counts = np.bincount(
            seen[first : first + pattern] // 1000, minlength=len(parts)
        )
        assert counts.tolist() == [
            round(share * pattern) for share in mix.shares.values()
        ]
    step = data.draw(st.integers(0, 50))
    first = data.draw(st.integers(0, batch_size))
    assert np.array_equal(
        batches.rows(step, first, batch_size)["x"], batches(step)["x"][first:]
    )
    assert sorted(np.concatenate([batch["x"] for batch in batches.once()])) == sorted(
        np.concatenate([s["x"] for s, _ in sources])
    )


def test_the_seed_changes_the_pattern_and_the_rows_of_a_mix():
    mix = Mix({"a": (numbers(0, 50), 0.7), "b": (numbers(1000, 70), 0.3)})
    assert mix.shares == {"a": 0.7, "b": 0.3}
    one, two = (Batches(mix, 20, seed=seed)(0)["x"] for seed in (1, 2))
    assert not np.array_equal(one // 1000, two // 1000)
    plain = Batches(mix, 20, shuffle=False)(0)["x"]
    assert plain[plain < 1000].tolist() == list(range(14))


def test_a_mix_of_mixes():
    inner = Mix([(numbers(0, 5), 1), (numbers(1000, 5), 1)])
    seen = Batches(Mix([(inner, 1), (numbers(2000, 5), 1)]), 4)
    counts = np.bincount(
        np.concatenate([seen(step)["x"] for step in range(100)]) // 1000
    )
    assert counts.tolist() == [100, 100, 200]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_positions_are_apportioned_to_a_ten_thousandth(weights):
    shares = np.array(weights) / sum(weights)
    if shares.min() < 1e-4:
        return
    counts = np.array(apportion({str(i): weight for i, weight in enumerate(weights)}))
    assert counts.min() >= 1
    assert np.abs(counts / counts.sum() - shares).max() <= 1e-4


def test_impossible_mixes_are_refused():
    with pytest.raises(DataError, match=r"must be positive: {'0': 1, '1': 0}"):
        Mix([(numbers(0, 5), 1), (numbers(0, 5), 0)])
    with pytest.raises(DataError, match="must be positive"):
        Mix([])
    with pytest.raises(DataError, match=r"have the same arrays:\n  a: .*\n  b: "):
        Mix({"a": (numbers(0, 5), 1), "b": ({"x": np.zeros((5, 2))}, 1)})
    with pytest.raises(DataError, match="'b' of the mix has no examples"):
        Mix({"a": (numbers(0, 5), 1), "b": (numbers(0, 0), 1)})
    with pytest.raises(DataError, match="source '1' has 1e-06 of the weights"):
        Mix([(numbers(0, 5), 1), (numbers(0, 5), 1e-6)])
    with pytest.raises(ConfigError, match="Split or filter the sources, then mix them"):
        split(Mix([(numbers(0, 50), 1)]), 0.5)


# Split and filter


@given(st.integers(2, 500), st.floats(0.01, 0.9), st.integers(0, 9), st.integers(1, 7))
def test_a_split_is_disjoint_and_complete(rows, share, seed, block):
    blocks = -(-rows // block)
    if not 0 < round(blocks * share) < blocks:
        with pytest.raises(DataError, match="each part needs at least one block"):
            split(numbers(0, rows), share, seed, block=block)
        return
    train, held_out = split(numbers(0, rows), share, seed, block=block)
    parts = [part.rows(np.arange(len(part)))["x"] for part in (train, held_out)]
    assert sorted(np.concatenate(parts)) == list(range(rows))
    # The last block may be short, and the number of blocks is rounded.
    assert abs(len(held_out) - rows * share) <= 1.5 * block
    assert (
        len(np.unique(parts[0] // block)) + len(np.unique(parts[1] // block)) == blocks
    )
    again = split(numbers(0, rows), share, seed, block=block)[1]
    assert np.array_equal(again.indices, held_out.indices)


def test_a_filter_keeps_what_its_predicate_says():
    kept = keep(numbers(0, 1000), lambda row: row["x"] % 3 == 0)
    assert np.array_equal(kept.indices, np.arange(0, 1000, 3))
    assert sorted(
        np.concatenate([batch["x"] for batch in Batches(kept, 50).once()])
    ) == list(range(0, 1000, 3))
    inner = keep(kept, lambda row: row["x"] > 900)
    assert inner.rows(np.arange(len(inner)))["x"].tolist() == list(range(903, 1000, 3))
    with pytest.raises(DataError, match="the filter kept 0 of 1000 examples"):
        keep(numbers(0, 1000), lambda row: False)
    with pytest.raises(DataError, match="334 examples, too few for a batch of 335"):
        Batches(kept, 335)


def test_a_long_filter_shows_its_progress(capfd):
    keep(numbers(0, 30), lambda row: time.sleep(0.1) or True, chunk=2)
    assert "filtering" in capfd.readouterr().err
    keep(numbers(0, 30), lambda row: True, chunk=2)
    assert capfd.readouterr().err == ""


def test_a_subset_has_the_rows_of_its_indices():
    subset = Subset(Tokens(np.arange(100), 9), np.array([5, 2]))
    assert subset.rows(np.array([1, 0]))["inputs"][:, 0].tolist() == [18, 45]


# Packing


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 16), st.data()
)
def test_packed_windows_say_what_each_token_is(lengths, length, data):
    """Against the definition, token by token."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    tokens = np.arange(total) + 7
    if total <= length:
        with pytest.raises(DataError, match="too few for one window"):
            Packed(tokens, length, offsets)
        return
    document = np.repeat(np.arange(len(lengths)), lengths)
    source = Packed(tokens, length, offsets)
    indices = np.array(
        data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=5))
    )
    rows = source.rows(indices)
    for row, index in enumerate(indices):
        start, segment, position = index * length, 0, 0
        for at in range(length):
            here = start + at
            fresh = at == 0 or document[here] != document[here - 1]
            segment, position = segment + fresh, 0 if fresh else position + 1
            assert rows["inputs"][row, at] == tokens[here]
            assert rows["labels"][row, at] == tokens[here + 1]
            assert rows["segment_ids"][row, at] == segment
            assert rows["positions"][row, at] == position
            assert rows["weights"][row, at] == (document[here] == document[here + 1])
    assert {name: str(array.dtype) for name, array in rows.items()} == {
        "inputs": "int32",
        "labels": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "weights": "float32",
    }


def test_documents_must_cover_the_tokens():
    for offsets in ([0, 5], [1, 10], [0, 7, 6, 10], [0]):
        with pytest.raises(
            DataError, match="must rise from 0 to the number of tokens, 10"
        ):
            Packed(np.arange(10), 4, np.array(offsets))
    with pytest.raises(DataError, match="needs documents="):
        Packed(np.arange(10), 4)
