"""What `fit` does before the first step: claim the run directory, and find or build the state."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from shardwise.checkpoint.resume import (
    check_accepted,
    compare,
    not_comparable,
    report,
)
from shardwise.checkpoint.store import Checkpoints
from shardwise.cluster.group import ProcessGroup, wait_for
from shardwise.cluster.watch import Watch
from shardwise.console import warn, working
from shardwise.data import Stream
from shardwise.errors import CheckpointError, ConfigError, DataError
from shardwise.explanation.explain import explain_state, predict_findings
from shardwise.files.durable import (
    check_links,
    check_writable,
    text_digest,
    write_atomically,
)
from shardwise.files.lock import lock_directory
from shardwise.files.regular import check_run_files, file_errors
from shardwise.metrics import read_metrics
from shardwise.optim.read import sample_rates
from shardwise.run import Prepared, Run, describe_run
from shardwise.rundir.columns import as_number
from shardwise.state import StateSpec, TrainState, init_state
from shardwise.text import Json

# Seconds until a directory that one process created must be visible to the others.
SHARED_DIRECTORY_TIMEOUT = 10


def claim_directory(
    stack: ExitStack, directory: Path, watch: Watch, force_unlock: bool = False
) -> None:
    """Create and lock a run directory, until `stack` is closed.

    Args:
        stack: releases the lock.
        directory: the run directory.
        watch: releases the lock if a signal ends the process.
        force_unlock: take over the lock of a run on another machine that did not release it.

    Raises:
        ConfigError: another process of the run does not see the directory.
        DirectoryInUseError: another run holds the lock.
        CheckpointError: the directory cannot be written, or has links where a run writes, or has
            something else than a file where a run needs one.
    """
    if watch.group.is_first:
        check_writable(directory)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_links(directory)
        check_run_files(directory)
        unlock = stack.enter_context(lock_directory(directory, force_unlock))
        watch.stop.before_exit.insert(0, unlock)
        # Runs before the lock is closed: its descriptor may then belong to another file.
        stack.callback(watch.stop.before_exit.remove, unlock)
    watch.group.share("directory", None)
    if not wait_for((directory / "lock").exists, SHARED_DIRECTORY_TIMEOUT):
        raise ConfigError(
            f"{watch.group.name(watch.group.index)} does not see {directory.resolve()}, which "
            f"process 0 created. Put the run directory on a file system that all processes share."
        )
    watch.folder = directory


def check_findings(run: Run, prepared: Prepared, console: Console) -> None:
    """Print likely mistakes of a run, or refuse to start it with `Run.strict`.

    Without `strict`, only findings about the optimizer that need no measurement are printed: a
    measurement takes seconds.

    Args:
        run: the run.
        prepared: the same run, prepared.
        console: where to print, one line for each finding.

    Raises:
        ConfigError: there is a finding, and `run.strict` is set.
    """
    if run.strict:
        about_optimizer = explain_state(prepared.spec, run.steps).findings
    else:
        about_optimizer = predict_findings(prepared.spec, run.steps)
    lines = [finding.line() for finding in (*prepared.findings, *about_optimizer)]
    if lines and run.strict:
        listed = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"strict is set, and there are findings:\n{listed}\n"
            "Correct them, or start without strict (--strict)."
        )
    for line in lines:
        warn(console, line)


def describe(run: Run, prepared: Prepared, extra: Mapping[str, object]) -> Json:
    """Return the description of a run that its checkpoints carry.

    Args:
        run: the run.
        prepared: the same run, prepared.
        extra: further entries. Checkpoints carry a digest of "source" instead of the text.
    """
    about = {key: value for key, value in extra.items() if key != "source"}
    about |= describe_run(run, prepared)
    if "source" in extra:
        about["source_digest"] = text_digest(str(extra["source"]))
    return about


def find_checkpoint(
    run: Run,
    prepared: Prepared,
    checkpoints: Checkpoints,
    about: Json,
    console: Console,
) -> int | None:
    """Return the step to resume from, after reporting what differs from the run that saved it.

    Args:
        run: the run.
        prepared: the same run, prepared.
        checkpoints: the checkpoints in its directory.
        about: its description.
        console: where to print differences and damaged checkpoints.

    Returns:
        The newest step whose checkpoint is undamaged, or None if there is none.

    Raises:
        ConfigError: a difference would make it another run, and `run.accept` does not name it.
        DataError: the data iterator cannot return to the checkpoint.
        CheckpointError: the checkpoint does not fit the model, or its description is damaged.
    """
    with console.status(escape(f"verifying the newest checkpoint of {run.out}")):
        step = checkpoints.newest_good(lambda text: warn(console, text))
    if step is None:
        return None
    spec = prepared.spec
    checkpoints.check_fits(spec, step)
    if step < run.steps:
        find_position(run, prepared, checkpoints, step)
    saved = {
        key: value for key, value in checkpoints.metadata(step).items() if key in about
    }
    saved_rates = _saved_rates(checkpoints, step, saved)
    rates = _current_rates(run, spec, saved_rates)
    if not rates or not saved_rates:
        # An Optax release may make the optimizer unreadable. That must not stop a run.
        if saved_rates or about.get("lr"):
            warn(
                console,
                "the learning rates of this run or of its checkpoint could not be read, so they "
                "are not compared. Make sure that the schedule is the same.",
            )
        rates = saved_rates = {}
    skipped = not_comparable(saved, about)
    before = {**saved, "lr": _by_update(saved_rates)}
    after = {**about, "lr": _by_update(rates)}
    for key in skipped:
        before.pop(key, None)
        after.pop(key, None)
    differences = compare(before, after)
    check_accepted(differences, run.accept, f"checkpoint {checkpoints.path(step)}")
    title = f"resuming {run.out} at step {step}"
    # Without learning rates, an empty description was compared with an empty one.
    names = {"source_digest": "source"}
    if "first_batch" in about["data"]:
        names["data"] = "data (its first batch)"
    compared = [
        names.get(key, key) for key in after if key in before and (key != "lr" or rates)
    ]
    for part in report(differences, run.accept, title, compared, skipped):
        console.print(part, markup=False, highlight=False, soft_wrap=True)
    return step


def _saved_rates(
    checkpoints: Checkpoints, step: int, saved: Json
) -> dict[str, dict[str, float]]:
    """Return the learning rates of a checkpoint by group and update, from `step` on."""
    try:
        return {
            group: _rates_from(step, rates)
            for group, rates in saved.get("lr", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoints.path(step) / 'meta.json'} does not describe the learning rates of a "
            f"run: {error}. Remove this checkpoint to resume from an earlier one."
        ) from error


def _rates_from(step: int, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the samples of a schedule that matter from `step` on, and the last one before."""
    previous = max((int(update) for update in rates if int(update) < step), default=0)
    return {
        update: float(rate) for update, rate in rates.items() if int(update) >= previous
    }


def _current_rates(
    run: Run, spec: StateSpec, saved_rates: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the learning rates at the updates of `saved_rates`; empty if they are unknown."""
    updates = {int(update) for rates in saved_rates.values() for update in rates}
    if not updates:
        return {}
    return sample_rates(
        run.optimizer, spec.abstract.params, np.array(sorted(updates), int)
    )


def _by_update(rates: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"of group '{group}' at update {update}": rate
        for group, values in rates.items()
        for update, rate in values.items()
    }


def find_position(
    run: Run, prepared: Prepared, checkpoints: Checkpoints, step: int
) -> str | None:
    """Return the position of the data iterator of this process in a checkpoint.

    Returns:
        The position as JSON; None if the data is a function of the step.

    Raises:
        DataError: the iterator cannot return to this checkpoint.
    """
    batches = prepared.batches
    place = checkpoints.path(step)
    if not isinstance(batches, Stream):
        return None
    if batches.problem is not None:
        raise DataError(
            f"this run cannot resume from {place}: {batches.problem}. Use a function of the step, "
            "such as Batches(...), or a dataset of Grain. To start over, choose another --out."
        )
    group = checkpoints.group
    position = checkpoints.position(step, group.index, group.count)
    if position is not None:
        return position
    count = checkpoints.num_positions(step)
    if not count:
        raise DataError(
            f"{place} has no position of a data iterator: the run that saved it had other data. "
            "Use the same data, or start a new run from its weights with init_from and another "
            "--out."
        )
    saved = checkpoints.metadata(step).get("data")
    scope = saved.get("scope", "global") if isinstance(saved, dict) else "global"
    first = checkpoints.position(step, 0, count)
    # Every process has the complete batches, or the iterator counts examples of all processes.
    if first and (scope == run.data_scope == "global" or "global_next_index" in first):
        return first
    raise DataError(
        f"{place} was saved by {count} processes, each with the position of its own part of the "
        f'data (data_scope="process"), and this run has {group.count}. Start {count} processes. '
        "For another number, every process must be able to read any batch: use a Grain MapDataset "
        'or Batches with data_scope="global", or grain.experimental.ElasticIterator.'
    )


def resume_data(
    prepared: Prepared, step: int, position: str | None, group: ProcessGroup
) -> None:
    """Return the data iterators of all processes to their positions.

    Args:
        prepared: the prepared run.
        step: the step that the run starts from.
        position: the position of this process, see `find_position`.
        group: the processes of the run.

    Raises:
        DataError: an iterator cannot return; the same one in every process.
    """
    batches = prepared.batches
    if not isinstance(batches, Stream) or position is None:
        return
    problem = ""
    try:
        batches.resume(step, position)
    except DataError as error:
        problem = str(error)
    problems = group.union("data position", problem)
    for index, text in enumerate(problems):
        if text:
            name = f"{group.name(index)}: " if group.count > 1 else ""
            raise DataError(f"{name}{text}")


def load_state(
    run: Run,
    spec: StateSpec,
    checkpoints: Checkpoints | None,
    step: int | None,
    about: Json,
    console: Console,
) -> TrainState:
    """Return the state that a run starts from: a checkpoint, initial weights, or random ones.

    Frozen parameters are in no checkpoint. They are loaded again and compared with the checksums
    in the checkpoint.

    Args:
        run: the run.
        spec: its abstract state.
        checkpoints: the checkpoints in its directory, if it has one.
        step: the checkpoint to load, or None for the first start of a run.
        about: the description of the run; a description of frozen parameters is added to it.
        console: where to print progress and the weights that were loaded.
    """
    if checkpoints is None or step is None:
        return _initial_state(run, spec, about, console)
    with working(console, f"loading step {step}"):
        state = checkpoints.restore(spec, step)
    if spec.frozen:
        from shardwise.weights.frozen import check_frozen

        frozen = _initial_state(run, spec, about, console).frozen
        check_frozen(
            checkpoints.metadata(step), about["frozen"], checkpoints.path(step)
        )
        state = replace(state, frozen=frozen)
    return state


def _initial_state(
    run: Run, spec: StateSpec, about: Json, console: Console
) -> TrainState:
    """Return the state of step 0; describe its frozen parameters in `about`."""
    loaded = None
    if run.init_from is None:
        state = init_state(spec, run.seed)
    else:
        # `weights` imports all model families, which most starts do not need.
        from shardwise.weights.load import load_initial

        state, loaded = load_initial(run.init_from, spec, run.seed)
        console.print(loaded.table(), highlight=False)
    if spec.frozen:
        from shardwise.weights.frozen import describe_frozen

        about["frozen"] = describe_frozen(spec, state.frozen, loaded)
    return state


def read_evaluations(
    run: Run, start: int, group: ProcessGroup
) -> list[tuple[int, float]]:
    """Return `(step, value)` of the evaluations that early stopping depends on.

    Args:
        run: the run.
        start: the step it starts from; later evaluations are made again.
        group: the processes of the run. The first one reads the file.
    """
    if run.stop_when is None or run.out is None:
        return []
    metric = run.stop_when.metric
    records: list[Json] = []
    if group.is_first and start:
        records = read_metrics(run.out / "metrics.jsonl")
    values = [(record["step"], as_number(record.get(metric))) for record in records]
    evaluations = [
        [step, value] for step, value in values if value is not None and step <= start
    ]
    return [
        (int(step), float(value))
        for step, value in group.share("evaluations", evaluations)
    ]


def write_run_json(run: Run, description: Json, stop_reason: str | None) -> None:
    """Write `run.json`.

    Args:
        run: the run; it has a directory.
        description: what describes the run, including the source of its recipe.
        stop_reason: why the run has stopped early, or None.
    """
    assert run.out is not None
    keep = asdict(run.keep)
    content = {
        **description,
        "steps": run.steps,
        "keep": {name: keep[name] for name in ("best", "metric", "largest")},
    }
    if stop_reason is not None:
        content["stopped_early"] = stop_reason
    path = run.out / "run.json"
    with file_errors(path):
        write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")
