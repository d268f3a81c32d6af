"""What several processes must supply, and the check that they do.

Either every process supplies the complete global batch, or every process supplies only the
examples of its devices. A loader of the one kind that is taken for the other trains on wrong
batches without an error: examples are dropped, or counted twice. So the processes exchange digests
of their batches, and compare them before the first step, at the first steps, and rarely later.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from jax.sharding import NamedSharding

from shardwise.cluster.group import ProcessGroup
from shardwise.data.layout import (
    BatchLayout,
    array_leaves,
    as_arrays,
    map_rows,
    num_rows,
    scalar_leaves,
)
from shardwise.errors import DataError
from shardwise.text import Json
from shardwise.tree import Batch, Leaf

Index: TypeAlias = tuple[slice, ...]
Scope: TypeAlias = Literal["global", "process"]
SCOPES: tuple[Scope, ...] = ("global", "process")
# Digests are compared for this many steps at the start, and then every `CHECK_EVERY` steps.
FIRST_STEPS = 3
CHECK_EVERY = 1000
# What checkpoints say about data that cannot be identified.
UNKNOWN_DATA = "a function or an iterator, whose content is not known"
# What to do about validation data that differs between processes.
EVERY_PROCESS = (
    "Every process must supply the complete validation batches: do not shard eval_data by "
    "process. With Batches, each process reads only the examples of its devices."
)
# The part of a batch that is not divided into shards.
COMPLETE = "complete"


def shards_of_processes(sharding: NamedSharding) -> dict[int, tuple[int, ...]]:
    """Return which shards of a batch the devices of each process hold, by process index.

    Args:
        sharding: the sharding of a batch along its first dimension.
    """
    count = _num_shards(sharding)
    held: dict[int, set[int]] = {}
    indices: Mapping[jax.Device, Index] = sharding.devices_indices_map((count,))
    for device, (index, *_) in indices.items():
        held.setdefault(device.process_index, set()).add(index.start or 0)
    return {process: tuple(sorted(shards)) for process, shards in sorted(held.items())}


def _num_shards(sharding: NamedSharding) -> int:
    axes = sharding.spec[0] if sharding.spec else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return int(np.prod([sharding.mesh.shape[name] for name in names], dtype=int))


def global_shapes(batch: Batch, sharding: NamedSharding) -> Batch:
    """Return shapes and dtypes of the global batch, of which this process supplies `batch`.

    Args:
        batch: the examples for the devices of this process.
        sharding: the sharding of a batch, such as `step.layout.sharding`.

    Raises:
        DataError: if the examples cannot be divided evenly over the devices of this process.
    """
    rows = num_rows(batch)
    held = len(shards_of_processes(sharding).get(jax.process_index(), ()))
    if not held or rows % held:
        raise DataError(
            f"this process supplied {rows} examples for {held} of the "
            f"{_num_shards(sharding)} batch shards of mesh {dict(sharding.mesh.shape)}. With "
            'data_scope="process" a batch is never padded: use a multiple of '
            f"{max(held, 1)} examples per process."
        )
    total = rows // held * _num_shards(sharding)

    def shape_of(x: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((total, *x.shape[1:]), x.dtype)

    return map_rows(shape_of, as_arrays(batch))


def describe_batch(batch: Batch, layout: BatchLayout) -> Json:
    """Return a summary of what this process supplied, to be compared with other processes.

    Args:
        batch: the host batch.
        layout: its layout. If it is local, each shard gets its own digest.

    Returns:
        `rows`, the number of examples in the global batch; `digest` of this batch; `leaves` with
        shape, dtype and mean of each array; `parts` with the digests of the arrays in each shard;
        `scalars`, the numbers that all examples share.
    """
    scalars = {name: _on_host(leaf) for name, leaf in scalar_leaves(batch).items()}
    leaves = {name: _on_host(leaf) for name, leaf in array_leaves(batch).items()}
    parts = {COMPLETE: leaves}
    if layout.is_local:
        held = shards_of_processes(layout.sharding).get(jax.process_index(), ())
        parts = {
            str(shard): {
                name: np.array_split(leaf, len(held))[number]
                for name, leaf in leaves.items()
            }
            for number, shard in enumerate(held)
        }
    return {
        "rows": layout.rows,
        "digest": _digest(
            {name: _leaf_digest(leaf) for name, leaf in {**leaves, **scalars}.items()}
        ),
        "leaves": {
            name: {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "mean": _mean(leaf),
            }
            for name, leaf in leaves.items()
        },
        "parts": {
            part: {name: _leaf_digest(leaf) for name, leaf in arrays.items()}
            for part, arrays in parts.items()
        },
        "scalars": {name: str(leaf) for name, leaf in scalars.items()},
    }


def first_batch_digest(summaries: Sequence[Json]) -> str:
    """Return one digest of a batch from the summaries of all processes.

    If every process supplies the complete batch, it does not depend on processes or devices.
    """
    if COMPLETE in summaries[0]["parts"]:
        return str(summaries[0]["digest"])
    # Processes with the same shards supply the same examples. The number of shards per process
    # does not matter: it changes with the mesh.
    distinct = {_shards(summary): summary["digest"] for summary in summaries}
    return _digest([digest for _, digest in sorted(distinct.items())])


def _shards(summary: Json) -> tuple[int, ...]:
    return tuple(sorted(int(shard) for shard in summary["parts"]))


def check_summaries(
    summaries: Sequence[Json], step: int, group: ProcessGroup, *, is_early: bool = True
) -> None:
    """Check that the processes supplied what the contract asks for.

    Args:
        summaries: what `describe_batch` returned in each process.
        step: the step of the batch, counted from 0.
        group: the processes.
        is_early: whether to refuse equal examples for different shards. Later in a run they may
            be equal by chance.

    Raises:
        DataError: the same one in every process.
    """
    _check_structure(summaries, step, group)
    for index in range(1, len(summaries)):
        for other in range(index):
            _check_pair(summaries, other, index, step, group, is_early)


def _check_structure(summaries: Sequence[Json], step: int, group: ProcessGroup) -> None:
    first = summaries[0]
    for index, summary in enumerate(summaries):
        if list(summary["leaves"]) != list(first["leaves"]):
            raise DataError(
                f"batch {step}: {group.name(0)} supplied arrays {_names(first)}, and "
                f"{group.name(index)} supplied {_names(summary)}. All processes must supply the "
                "same arrays."
            )
        if summary["scalars"] != first["scalars"]:
            raise DataError(
                f"batch {step}: {group.name(0)} supplied the numbers {first['scalars']}, and "
                f"{group.name(index)} supplied {summary['scalars']}. All examples share them: "
                "every process must supply the same."
            )
        if summary["rows"] != first["rows"] and COMPLETE not in first["parts"]:
            raise DataError(
                f"batch {step}: the examples of {group.name(0)} are part of a global batch of "
                f"{first['rows']}, and those of {group.name(index)} of one of "
                f"{summary['rows']}. Each process must supply the same number of examples for "
                f"each batch shard: {group.name(0)} holds {len(first['parts'])} shards, "
                f"{group.name(index)} {len(summary['parts'])}."
            )


def _names(summary: Json) -> str:
    return ", ".join(map(repr, summary["leaves"]))


def _check_pair(
    summaries: Sequence[Json],
    one: int,
    two: int,
    step: int,
    group: ProcessGroup,
    is_early: bool,
) -> None:
    parts = [summaries[index]["parts"] for index in (one, two)]
    names = f"{group.name(one)} and {group.name(two)}"
    for part in sorted(parts[0].keys() & parts[1].keys()):
        for leaf, digest in parts[0][part].items():
            if digest == parts[1][part][leaf]:
                continue
            values = " and ".join(
                _show(summaries[index]["leaves"][leaf]) for index in (one, two)
            )
            if part == COMPLETE:
                raise DataError(
                    f"batch {step}: {names} supplied different batches. Array '{leaf}' differs: "
                    f"{values}. Each process must supply the complete batch. If the data is "
                    "sharded by process (ShardByJaxProcess, data[i::n], a distributed sampler), "
                    'set Run(data_scope="process"). If it is random, use the same seed in every '
                    "process."
                )
            raise DataError(
                f"batch {step}: the devices of {names} hold the same examples (batch shard "
                f"{part}), but the processes supplied different ones. Array '{leaf}' differs: "
                f"{values}. {_assignment(summaries)}"
            )
    shared = parts[0].keys() & parts[1].keys()
    if is_early and not shared and list(parts[0].values()) == list(parts[1].values()):
        leaf = next(iter(summaries[one]["leaves"]))
        raise DataError(
            f"batch {step}: {names} supplied the same examples (array '{leaf}': "
            f"{_show(summaries[one]['leaves'][leaf])}), but their devices hold different parts of "
            f"the batch. {_assignment(summaries)} If every process supplies the complete batch, "
            'use Run(data_scope="global").'
        )


def _assignment(summaries: Sequence[Json]) -> str:
    """Return which process must load which shard of the data."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, summary in enumerate(summaries):
        groups.setdefault(_shards(summary), []).append(index)
    if len(groups) == 1:
        return (
            "The devices of each process hold the complete batch: all processes must load the "
            'same examples, as with Run(data_scope="global").'
        )
    texts = [
        f"shard {number} of {len(groups)} in process {', '.join(map(str, processes))}"
        for number, (_, processes) in enumerate(sorted(groups.items()))
    ]
    return f"Load {'; '.join(texts)}."


def _show(leaf: Json) -> str:
    shape = tuple(leaf["shape"])
    return f"{leaf['dtype']} of shape {shape} with mean {leaf['mean']:.6g}"


class DataCheck:
    """Compares the batches of all processes while a run trains.

    Args:
        group: the processes, with keys that nobody else uses.
        layout: the layout of the batches.
        first: the first step, counted from 0.
    """

    def __init__(self, group: ProcessGroup, layout: BatchLayout, first: int):
        self._group = group
        self._layout = layout
        self._first = first
        self._summaries: dict[int, Json] = {}
        self._last_name = ""

    def inspect(self, step: int, batch: Batch) -> None:
        """Summarize the batch of a step, if it is compared. Any thread may call this."""
        if self._is_due(step):
            self._summaries[step] = describe_batch(batch, self._layout)

    def agree(self, step: int) -> None:
        """Compare the batch of a step with those of the other processes, if it is due.

        Collective: all processes call it for the same steps.

        Raises:
            DataError: if the processes contradict each other.
        """
        if not self._is_due(step):
            return
        name = f"batch{step}"
        summaries = self._group.union(name, self._summaries.pop(step))
        if self._last_name:
            # All processes have reached this step, so they have read the one before.
            self._group.drop(self._last_name)
        self._last_name = name
        check_summaries(summaries, step, self._group, is_early=self._is_early(step))

    def _is_early(self, step: int) -> bool:
        return step < self._first + FIRST_STEPS

    def _is_due(self, step: int) -> bool:
        is_due = self._is_early(step) or step % CHECK_EVERY == 0
        return self._group.count > 1 and is_due


def same_in_all(
    batches: Iterable[Batch], group: ProcessGroup, what: str
) -> Iterator[Batch]:
    """Yield batches that every process supplies completely, once all have the same one.

    Collective: all processes must read all batches.

    Args:
        batches: the batches.
        group: the processes, with keys that nobody else uses.
        what: the name of the field of `Run`, for the message.

    Raises:
        DataError: if a batch or the number of batches differs; the same one in every process.
    """
    last_name = ""
    for number, batch in enumerate(chain(batches, [None])):
        name = f"{what}{number}"
        digests = group.union(name, batch if batch is None else batch_digest(batch))
        if last_name:
            # All processes have reached this batch, so they have read the one before.
            group.drop(last_name)
        last_name = name
        if len(set(digests)) > 1:
            kinds = ["no batch" if digest is None else digest for digest in digests]
            raise DataError(
                f"batch {number} of Run.{what} differs between processes: "
                f"{', '.join(dict.fromkeys(kinds))}. {EVERY_PROCESS}"
            )
        if batch is not None:
            yield batch


def batch_digest(batch: Batch) -> str:
    """Return a digest of all arrays and numbers of a batch."""
    leaves = {**array_leaves(batch), **scalar_leaves(batch)}
    return _digest({name: _leaf_digest(leaf) for name, leaf in leaves.items()})


def check_same_data(
    group: ProcessGroup, what: str, fingerprint: Json, advice: str = ""
) -> None:
    """Check that `Batches` are the same in all processes, by their fingerprints.

    Collective: all processes must call it.

    Args:
        group: the processes.
        what: the name of the field of `Run`, for the message.
        fingerprint: the fingerprint in this process.
        advice: what to do if they differ, instead of the advice for `Batches`.

    Raises:
        DataError: if the fingerprints differ; the same one in every process.
    """
    # The fingerprint of a mix of many files is long. Only digests are always exchanged.
    digests = group.union(f"fingerprint/{what}", _digest(fingerprint))
    if len(set(digests)) == 1:
        return
    flat = _flatten(fingerprint)
    everyone = group.union(f"fingerprint values/{what}", flat)
    index = next(
        index for index in range(group.count) if everyone[index] != everyone[0]
    )
    first, other = everyone[0], everyone[index]
    name = next(key for key in {**first, **other} if first.get(key) != other.get(key))
    if not advice:
        advice = (
            "Build the same Batches in every process: each one reads only the examples of its "
            "devices."
        )
    if what == "data":
        advice += (
            " If the data is sharded by process (data[i::n]), set "
            'Run(data_scope="process") and the batch size per process.'
        )
    raise DataError(
        f"Run.{what} differs between processes: {name} is {first.get(name)} in {group.name(0)} "
        f"and {other.get(name)} in {group.name(index)}. {advice}"
    )


def _flatten(tree: Json, prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest(16)


def _leaf_digest(leaf: Leaf) -> str:
    array = np.ascontiguousarray(_on_host(leaf))
    hasher = blake3(f"{array.dtype} {array.shape} ".encode())
    hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest(16)


def _on_host(leaf: Leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            # The loader has assembled a global array. No process can read all of it.
            return np.empty((*leaf.shape, 0), np.uint8)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _mean(leaf: np.ndarray) -> float:
    # For messages only. Complex numbers are shown by their real part.
    return float(np.mean(np.real(leaf), dtype=np.float64)) if leaf.size else 0.0
