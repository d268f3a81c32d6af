"""Run one case by shardwise and by hand, and compare everything that both compute."""

import io
import json
import math
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from shardwise import (
    Batches,
    Mean,
    Rules,
    Run,
    ShardwiseError,
    abstract_state,
    evaluate,
    fit,
    freeze,
    init_state,
    make_eval_step,
    make_mesh,
    make_train_step,
    steps,
)
from shardwise.errors import NumericsError
from shardwise.state import StateSpec, TrainState
from shardwise.tree import named_leaves, nest
from tests.fuzz import cases
from tests.fuzz.cases import Case
from tests.fuzz.problems import (
    Scalar,
    Term,
    eval_batches,
    make_arrays,
    make_data,
    make_model,
    make_optimizer,
    make_terms,
    make_wrt,
    pack,
    plain_batches,
    unpack,
)
from tests.fuzz.reference import Reference, Trace, distance, to_host

# (path, value) -> a changed value.
Change: TypeAlias = Callable[[str, Any], Any]
# Relative difference of float32 numbers after a few steps, and the same for parameters, which are
# compared with the largest element of their array.
TOLERANCE = 2e-5
ABSOLUTE = 2e-6
# bfloat16 has 8 significant bits.
HALF_TOLERANCE = 0.04
# A difference counts only if it is larger than this multiple of what a change of the initial
# parameters in their last bits causes: some optimizers divide rounding errors by their size.
CHAOS = 30


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        status: "same", "refused", "different", "error", "nonfinite" (or diverging), or "micro" for
            a model with batch statistics that does what a loop by hand does with each micro-batch
            alone.
        detail: the first differences, or the message.
        kind: a short text that is equal for outcomes of the same cause.
    """

    status: str
    detail: str = ""
    kind: str = ""


def run_case(case: Case, folder: Path | None = None) -> Outcome:
    """Run a case both ways and compare.

    Args:
        case: the case.
        folder: the parent of the run directory; it must be the same for all processes. It is
            removed if it is not given.
    """
    if folder is not None:
        return _run_case(case, folder)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-fuzz-"))
    try:
        return _run_case(case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_case(case: Case, folder: Path) -> Outcome:
    try:
        ours = train(case, folder)
    except NumericsError as error:
        ours = error
    except ShardwiseError as error:
        text = str(error)
        return Outcome(
            "refused", text, f"{type(error).__name__}: {message_class(text)}"
        )
    except Exception as error:
        return _error("shardwise", error)
    try:
        return _compare_by_hand(case, ours, folder)
    except ShardwiseError as error:
        return _error("shardwise on one device", error)
    except Exception as error:
        return _error("by hand", error)


def _error(who: str, error: Exception) -> Outcome:
    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if "/shardwise/" in f.filename or "fuzz" in f.filename]
    last = places[-1] if places else frames[-1]
    place = f"{Path(last.filename).name}:{last.name}"
    kind = f"{who}: {type(error).__name__} in {place}: {message_class(str(error))}"
    return Outcome("error", text[-3000:], kind)


def _compare_by_hand(case: Case, ours: Trace | Exception, folder: Path) -> Outcome:
    if is_random(case):
        if isinstance(ours, Exception):
            return Outcome("nonfinite", str(ours))
        one = replace(
            case, mesh="data=1", resume_at=0, drive="steps", data=_function_of(case)
        )
        try:
            expected = train(one, folder / "one")
        except ShardwiseError as error:
            text = str(error)
            return Outcome("refused", text, f"on one device: {message_class(text)}")
        if not is_finite(case, expected):
            return Outcome("nonfinite")
        found = differences(case, expected, ours)
        if found:

            def again(change: Change) -> Trace:
                moved = replace(one, compiled_init=False)
                return train(moved, folder / "moved", change)

            found = _without_chaos(again, expected, found)
        return _outcome(case, found, "one device")
    batches = host_batches(case)
    evaluate_after = evaluation_steps(case)
    reference = Reference(case, by_micro_batches=case.separate)
    if isinstance(ours, Exception):
        if is_finite(case, reference.train(batches)):
            return Outcome("different", f"by hand all is finite: {ours}", "nonfinite")
        return Outcome("nonfinite", str(ours))
    # A run by `fit` does not show its initial state.
    far = reference.load(ours.initial)
    wrong = {k: v for k, v in far.items() if v > (3e-2 if is_half(case) else 1e-5)}
    if wrong or (ours.initial and not set(far) >= set(reference.params)):
        return Outcome("different", f"initial values differ: {wrong}", "init")
    expected = reference.train(batches, evaluate_after)
    if not is_finite(case, expected):
        return Outcome("nonfinite")
    found = differences(case, expected, ours)
    if not found:
        return Outcome("same")

    def retrain(change: Change) -> Trace:
        return reference.train(batches, evaluate_after, change)

    found = _without_chaos(retrain, expected, found)
    if found and case.accumulate > 1 and is_stateful(case):
        by_parts = Reference(case, by_micro_batches=True)
        by_parts.load(ours.initial)
        expected = by_parts.train(batches, evaluate_after)
        rest = differences(case, expected, ours)
        if rest:

            def retrain_parts(change: Change) -> Trace:
                return by_parts.train(batches, evaluate_after, change)

            rest = _without_chaos(retrain_parts, expected, rest)
        if not rest:
            return Outcome("micro", found[0].text, "micro-batch statistics")
    if found and case.accumulate > 1 and case.separate:
        averaged = Reference(case, by_micro_batches=True, average_sums=True)
        averaged.load(ours.initial)
        expected = averaged.train(batches, evaluate_after)
        if not differences(case, expected, ours):
            return Outcome("micro", found[0].text, "a sum that couples is averaged")
    return _outcome(case, found, "by hand")


def _outcome(case: Case, found: list["Difference"], who: str) -> Outcome:
    if not found:
        return Outcome("same")
    first = found[0]
    features = [f"loss={case.loss}", f"stage={first.stage}", who]
    if case.accumulate > 1:
        features.append("accumulate")
    if is_padded(case):
        features.append("padded")
    features += [name for name in cases.STATEFUL if name in case.blocks]
    return Outcome(
        "different", "; ".join(d.text for d in found[:4]), ", ".join(features)
    )


@dataclass(frozen=True)
class Difference:
    """One number or array that differs.

    Attributes:
        key: where it is, see `_values`.
        stage: the kind of number, such as "loss" or "params".
        size: the largest absolute difference.
        text: the difference for people.
    """

    key: tuple[str, ...]
    stage: str
    size: float
    text: str


def _values(trace: Trace) -> dict[tuple[str, ...], Any]:
    """Return everything that a run has computed, in the order in which it was."""
    values: dict[tuple[str, ...], Any] = {}
    for n, metrics in enumerate(trace.steps, 1):
        for name, value in metrics.items():
            values["step", str(n), name] = value
    for n, metrics in trace.evaluations.items():
        for name, value in metrics.items():
            values["eval", str(n), name] = value
    for name, array in trace.params.items():
        values["params", name] = array
    for name, array in trace.other.items():
        values["other", name] = array
    return values


def differences(case: Case, expected: Trace, ours: Trace) -> list[Difference]:
    """Return everything that differs by more than rounding."""
    want, have = _values(expected), _values(ours)
    tolerance = HALF_TOLERANCE if is_half(case) else TOLERANCE
    found = []
    for key, a in want.items():
        stage = key[2] if key[0] == "step" else key[0]
        if key[:2] == ("step", str(case.bad_step)):
            continue
        if any(f"metric '{key[-1]}' is averaged" in text for text in ours.warnings):
            continue
        if key not in have:
            # Not every run computes and logs all norms.
            is_needed = key[0] != "step" or key[-1] in ("loss", "grad_norm")
            if is_needed or key[-1].startswith("m_"):
                found.append(Difference(key, stage, math.inf, f"{key} is missing"))
            continue
        if is_half(case) and key[0] in ("params", "other"):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(have[key], np.float64)
        if a.shape != b.shape:
            text = f"{key} has shape {b.shape} instead of {a.shape}"
            found.append(Difference(key, stage, math.inf, text))
            continue
        far = distance(a, b)
        size = float(far.max(initial=0))
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=0))
        if not size <= tolerance * scale + ABSOLUTE:
            at = np.unravel_index(np.argmax(far), a.shape)
            text = f"{'/'.join(key)}: {b[at]:.8g} instead of {a[at]:.8g}"
            found.append(Difference(key, stage, size, text))
    return found


def _without_chaos(
    train: Callable[[Change], Trace], expected: Trace, found: list[Difference]
) -> list[Difference]:
    """Return the differences that are larger than those of rounding errors at the start.

    Args:
        train: trains again, with initial parameters that the given function has changed.
        expected: the run without changes.
        found: the differences.
    """
    noise: dict[tuple[str, ...], float] = {}
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def change(name: str, value: Any, rng: Any = rng) -> Any:
            factor = 1 + 2e-7 * rng.standard_normal(value.shape)
            return (value.astype(jnp.float32) * factor).astype(value.dtype)

        values = _values(train(change))
        for key, a in _values(expected).items():
            size = float(distance(a, values.get(key, a)).max(initial=0))
            noise[key] = max(noise.get(key, 0.0), size)
    return [d for d in found if not d.size <= CHAOS * noise[d.key]]


# Facts about a case.


def is_random(case: Case) -> bool:
    has_block = any(name in case.blocks for name in cases.RANDOM)
    return has_block or case.signature in ("rngs", "rngs_last")


def is_stateful(case: Case) -> bool:
    return any(name in case.blocks for name in cases.STATEFUL)


def is_finite(case: Case, trace: Trace) -> bool:
    """Return whether a run has not diverged, so that rounding errors stay small."""
    first = trace.steps[0]["grad_norm"]
    limit = 100 * max(first, 1) if math.isfinite(first) else 100
    return all(
        math.isfinite(x["loss"] + x["grad_norm"]) and x["grad_norm"] <= limit
        for n, x in enumerate(trace.steps, 1)
        if n != case.bad_step
    )


def is_half(case: Case) -> bool:
    is_lossy = "half_precision" in (case.loss, *case.metrics)
    return is_lossy or case.param_dtype != "float32" or case.compute_dtype != ""


def is_padded(case: Case) -> bool:
    shards = 1
    for axis in case.mesh.split(","):
        name, size = axis.split("=")
        shards *= 1 if name == "model" else int(size)
    return case.batch_size % (shards * case.accumulate) != 0


def message_class(text: str) -> str:
    """Return the first words of a message without its numbers and names."""
    text = re.sub(r"'[^']*'|`[^`]*`|\([^)]*\)|\[[^]]*\]", "_", text.splitlines()[0])
    return re.sub(r"[\d.,]+", "#", text)[:110]


def _function_of(case: Case) -> str:
    """Return the kind of data that has the same batches without being a stream."""
    return {"iterator": "function", "generator": "function"}.get(case.data, case.data)


def host_batches(case: Case) -> list[Any]:
    """Return the batches of each step, for the loop by hand."""
    if case.data in ("batches", "list"):
        data = make_data(case)
        return [data(step) for step in range(case.steps)]
    return plain_batches(case)


def evaluation_steps(case: Case) -> list[int]:
    if not case.eval_examples:
        return []
    if case.drive == "steps" or not case.eval_every:
        return [case.steps]
    every = case.eval_every
    due = {n for n in range(1, case.steps + 1) if n % every == 0 or n == case.steps}
    if case.resume_at:
        # The first part of the run evaluates at its own end.
        due.add(case.resume_at)
    return sorted(due)


# The case by shardwise.


def to_mean(term: Term) -> Any:
    if isinstance(term, Scalar):
        return term.value
    return Mean(term.total) if term.weight is None else Mean(term.total, term.weight)


def make_loss(case: Case) -> Callable[..., Any]:
    """Return the loss as a user of shardwise writes it."""
    terms = make_terms(case)

    def loss(model: Any, batch: Any, step: Any = 0) -> Any:
        value, metrics = terms(model, batch, step)
        named = {name: to_mean(term) for name, term in metrics.items()}
        return (to_mean(value), named) if named else to_mean(value)

    def with_rngs(model: Any, batch: Any, rngs: Any) -> Any:
        x, *rest = unpack(case, batch)
        if case.stem != "tokens":
            shape = x.shape if case.signature == "rngs" else x.shape[::-1]
            noise = jax.random.normal(rngs.noise(), shape)
            x = x + 0.1 * (noise if case.signature == "rngs" else noise.T)
        changed = dict(zip("xywm", (x, *rest), strict=True))
        return loss(model, pack(case, changed))

    if case.signature in ("rngs", "rngs_last"):
        return with_rngs
    if case.signature == "step":
        return lambda model, batch, step: loss(model, batch, step)
    return lambda model, batch: loss(model, batch)


def mesh_of(text: str) -> Any:
    """Return a mesh on as many devices as it needs."""
    count = math.prod(int(axis.split("=")[1]) for axis in text.split(","))
    return make_mesh(text, jax.devices()[:count])


def train(case: Case, folder: Path, change: Change | None = None) -> Trace:
    """Train the case by shardwise, from initial parameters that `change` may change."""
    model = make_model(case)
    if case.frozen:
        model = freeze(model, case.frozen)
    options: dict[str, Any] = {"wrt": make_wrt(case)} if case.wrt else {}
    parts = {
        **options,
        "model": model,
        "loss": make_loss(case),
        "optimizer": make_optimizer(case)[0],
        "rules": Rules(fsdp_min_size=case.min_size),
    }
    if case.drive == "steps":
        return _by_steps(case, parts, change)
    return _by_fit(case, parts, folder)


def _by_steps(case: Case, parts: dict[str, Any], change: Change | None) -> Trace:
    data, trace = make_data(case), Trace()
    example = host_batches(case)[0]
    state: Any = None
    for mesh, until in _legs(case):
        spec = abstract_state(
            parts["model"],
            parts["optimizer"],
            mesh_of(mesh),
            parts["rules"],
            **({"wrt": parts["wrt"]} if case.wrt else {}),
        )
        step = make_train_step(
            spec,
            parts["loss"],
            example,
            seed=case.seed,
            accumulate=case.accumulate,
            norms=case.norms,
            compute_dtype=case.compute_dtype or None,
            **_micro_batches(case),
        )
        for finding in step.traced.findings:
            trace.warnings.append(str(finding))
        if state is None:
            state = _initial_state(case, spec, change)
            trace.initial = _arrays(state)
        else:
            state = jax.device_put(jax.device_get(state), spec.shardings)
        for _, new_state, metrics in steps(step, state, data, until=until):
            state = new_state
            trace.steps.append({k: float(v) for k, v in metrics.items()})
    if case.eval_examples:
        batches = list(eval_batches(case))
        eval_step = make_eval_step(
            spec,
            parts["loss"],
            batches[0],
            compute_dtype=case.compute_dtype or None,
        )
        source: Any = batches
        if case.structure == "dict" and case.seed % 2:
            source = eval_source(case)
        trace.evaluations[case.steps] = evaluate(eval_step, state, source)
    _add_final(trace, state)
    return trace


def _micro_batches(case: Case) -> dict[str, str]:
    return {"coupled_examples": "separate"} if case.separate else {}


def _initial_state(case: Case, spec: StateSpec, change: Change | None) -> TrainState:
    if case.compiled_init:
        return init_state(spec, case.seed)
    reference = Reference(case)
    if change is not None:
        reference.params = {k: change(k, v) for k, v in reference.params.items()}

    def nested(arrays: dict[str, Any]) -> Any:
        return nest({tuple(name.split("/")): x for name, x in arrays.items()})

    params = nested(reference.params)
    state = TrainState(
        jnp.zeros((), jnp.int32),
        params,
        nested({k: v for k, v in reference.other.items() if k in spec.other}),
        spec.optimizer.init(params),
        nested(reference.frozen),
    )
    return jax.device_put(jax.tree.map(jnp.copy, state), spec.shardings)


def _by_fit(case: Case, parts: dict[str, Any], folder: Path) -> Trace:
    trace = Trace()
    for mesh, until in _legs(case):
        run = Run(
            **parts,
            data=make_data(case),
            steps=until,
            mesh=mesh_of(mesh),
            seed=case.seed,
            accumulate=case.accumulate,
            norms=case.norms,
            compute_dtype=case.compute_dtype or None,
            on_nonfinite="skip",
            **_micro_batches(case),
            eval_data=eval_source(case) if case.eval_examples else None,
            eval_every=case.eval_every,
            data_threads=case.threads,
            out=folder / "run",
        )
        text = io.StringIO()
        result = fit(run, console=Console(file=text, width=500))
        trace.warnings.append(text.getvalue())
    records = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, records):
        values = {k: float(v) for k, v in record.items() if _is_number(v)}
        n = int(values.pop("step"))
        if "loss" in values:
            trace.steps.append(values)
        elif "eval_loss" in values:
            trace.evaluations[n] = {
                k.removeprefix("eval_"): v for k, v in values.items()
            }
    _add_final(trace, result.state)
    return trace


def _legs(case: Case) -> Iterator[tuple[str, int]]:
    """Yield mesh and last step of each part of the run."""
    if case.resume_at:
        yield case.mesh, case.resume_at
        yield case.resume_mesh, case.steps
    else:
        yield case.mesh, case.steps


def eval_source(case: Case) -> Any:
    """Return the validation data for `fit`."""
    arrays = make_arrays(case, case.eval_examples, case.seed + 1)
    size = min(case.eval_batch, case.eval_examples)
    if case.structure == "dict":
        return Batches(arrays, size)
    return _Packed(case, Batches(arrays, size))


class _Packed(Batches):
    """Validation batches of another structure than a dictionary."""

    def __init__(self, case: Case, batches: Batches):
        super().__init__(batches.source, batches.batch_size)
        object.__setattr__(self, "case", case)

    def __call__(self, step: int) -> Any:
        return pack(self.case, super().__call__(step))

    def once(self) -> Iterator[Any]:
        for batch in super().once():
            yield pack(self.case, batch)


def _arrays(state: Any) -> dict[str, np.ndarray]:
    named = {**named_leaves(state.params), **named_leaves(state.other)}
    named |= named_leaves(state.frozen)
    return {name: np.array(_whole(value)) for name, value in named.items()}


def _add_final(trace: Trace, state: Any) -> None:
    params, other, frozen = (
        {name: _whole(value) for name, value in named_leaves(part).items()}
        for part in (state.params, state.other, state.frozen)
    )
    trace.params = to_host({**params, **frozen})
    trace.other = to_host(other)


def _whole(array: jax.Array) -> Any:
    """Return an array of which this process may hold a part only."""
    if array.is_fully_addressable:
        return array
    return multihost_utils.process_allgather(array, tiled=True)


def _is_number(value: object) -> bool:
    # Non-finite numbers are written as text.
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")
