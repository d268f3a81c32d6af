"""Explain what an optimizer does to each parameter, and find likely mistakes in it.

`explain(optimizer, model)` works for any Optax transformation: settings are read where possible and
measured elsewhere. The findings are mistakes that train without an error and without success.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.table import Table

from shardwise.console import line_picture
from shardwise.errors import ShardwiseError
from shardwise.explanation.findings import Row, View, find
from shardwise.explanation.predict import predict
from shardwise.files.paths import AnyPath, local_path
from shardwise.findings import Finding
from shardwise.mesh import make_mesh
from shardwise.module import ModelFactory, path_name
from shardwise.optim.parts import state_changes
from shardwise.optim.probe import PLAIN, STILL, Probe, probe
from shardwise.optim.read import (
    ANY,
    Chain,
    Chains,
    Optimizer,
    SampledUpdates,
    calls_per_update,
    read_chains,
)
from shardwise.sharding import Placement, Rules, show_spec
from shardwise.state import StateSpec, abstract_state
from shardwise.text import Json, show_bytes, sparkline
from shardwise.tree import Params, lookup, named_leaves, nest, num_bytes, owner_of


@dataclass(frozen=True)
class Explanation:
    """What an optimizer does in a run.

    Attributes:
        steps: the length of the run in updates.
        rows: what it does to each parameter. Empty if it does not work for the model.
        findings: likely mistakes.
        curves: for each group that moves, the numbers of updates and the learning rates at them,
            each of shape (n,).
    """

    steps: int
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def table(self) -> Table:
        """Return a table with one line for each parameter."""
        return _table(self.rows)

    def lines(self) -> Iterator[str]:
        """Yield a line of text for the learning rate of each group, then one for each finding."""
        width = max((len(group) for group in self.curves), default=0)
        for group, (_, values) in self.curves.items():
            summary = f"peak {values.max():.3g}, last {values[-1]:.3g}"
            yield f"{group:{width}}  {sparkline(values.tolist())}  {summary}"
        for finding in self.findings:
            yield finding.line()
        if not self.findings:
            yield "nothing suspicious found"

    def as_json(self) -> Json:
        """Return the explanation as a JSON object."""
        curves = {
            group: {"steps": steps.tolist(), "lr": values.tolist()}
            for group, (steps, values) in self.curves.items()
        }
        return {
            "steps": self.steps,
            "parameters": [asdict(row) for row in self.rows],
            "findings": [asdict(finding) for finding in self.findings],
            "curves": curves,
        }

    def plot(self, picture: AnyPath) -> None:
        """Draw the learning rate of each group over the run.

        Groups with the same learning rate share a line.

        Args:
            picture: the PNG file to write.

        Raises:
            ConfigError: if it is a URL.
        """
        groups_of: dict[bytes, list[str]] = {}
        for group, (_, values) in self.curves.items():
            groups_of.setdefault(values.tobytes(), []).append(group)
        with line_picture(
            local_path(picture),
            xlabel="update",
            ylabel="learning rate",
            title="Learning rate of each group",
            ylim=(0, None),
        ) as axes:
            for groups in groups_of.values():
                steps, values = self.curves[groups[0]]
                label = f"{', '.join(groups)}: peak {values.max():.3g}"
                axes.plot(steps, values, linewidth=2, label=label)


def explain(
    optimizer: optax.GradientTransformation,
    model: ModelFactory | nnx.Module,
    *,
    steps: int = 1000,
    mesh: Mesh | str | None = None,
    rules: Rules | None = None,
) -> Explanation:
    """Explain what an optimizer does to the parameters of a model.

    No array of the size of the model is created.

    Args:
        optimizer: any Optax transformation.
        model: a model, or a function `(rngs) -> nnx.Module`.
        steps: the length of the run in updates. Schedules are compared with it.
        mesh: the device mesh whose layout the table shows. One device by default.
        rules: the sharding rules.

    Returns:
        A table of what each parameter gets, learning rates over the run, and findings.

    Raises:
        ShardwiseError: if parameter groups, mesh or rules do not fit the model.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        >>> explanation = explain(optax.adamw(1e-3, weight_decay=0.1), model)
        >>> [finding.name for finding in explanation.findings]
        ['decay-of-vectors']
    """
    factory = (lambda rngs: model) if isinstance(model, nnx.Module) else model
    mesh = make_mesh("data=1", jax.devices()[:1]) if mesh is None else make_mesh(mesh)
    try:
        spec = abstract_state(factory, optimizer, mesh, rules)
    except ShardwiseError:
        raise
    except Exception as error:
        # A transformation can raise anything.
        return _not_applicable(steps, error)
    return explain_state(spec, steps)


def explain_state(spec: StateSpec, steps: int) -> Explanation:
    """Explain the optimizer of an abstract training state.

    Args:
        spec: the description of the training state.
        steps: the length of the run in updates.
    """
    params = spec.abstract.params
    try:
        changes = state_changes(spec.optimizer, params)
    except Exception as error:
        # A transformation can raise anything.
        return _not_applicable(steps, error)
    if changes:
        finding = Finding(
            "state-changes",
            f"an update changes the type of the optimizer state ({changes[0]}), so it can be "
            "neither compiled once nor saved",
            "Use float32 parameters, or wrap the optimizer in shardwise.optim.with_master.",
        )
        return Explanation(steps, (), (finding,), {})

    chains = read_chains(spec.optimizer, params)
    measured, representative = _probe(spec.optimizer, params, chains, steps)
    view = _view(spec, steps, chains, measured, representative)
    within = slice(measured.num_within)
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for row in view.rows:
        if row.moves:
            curves.setdefault(
                row.group, (measured.steps[within], view.rates[row.path][within])
            )
    return Explanation(steps, view.rows, find(view), curves)


def predict_findings(spec: StateSpec, steps: int) -> tuple[Finding, ...]:
    """Return the findings that need no measurement, in milliseconds.

    Args:
        spec: the description of the training state.
        steps: the length of the run in updates.

    Returns:
        Findings of `explain_state`. None about an optimizer with a part whose effect is not known,
        or with `optax.MultiSteps`.
    """
    params = named_leaves(spec.abstract.params)
    chains = read_chains(spec.optimizer, spec.abstract.params)
    representative = _representatives(spec.abstract.params, chains)
    try:
        predicted = predict(
            {path: chains[path] for path in sorted(set(representative.values()))},
            {path: leaf.dtype for path, leaf in params.items()},
            SampledUpdates.of_run(steps),
        )
    except Exception:
        # A schedule can raise anything for an update after the end of the run.
        return ()
    if predicted is None:
        return ()
    return find(_view(spec, steps, chains, predicted, representative))


def _view(
    spec: StateSpec,
    steps: int,
    chains: Chains,
    measured: Probe,
    representative: Mapping[str, str],
) -> View:
    """Return what the checks read, from measurements of representative parameters."""
    column = {path: measured.paths.index(representative[path]) for path in spec.params}
    rate_of = {
        path: _learning_rate(chains[path], measured, measured.paths.index(path))
        for path in set(representative.values())
    }
    rates = {path: rate_of[representative[path]] for path in spec.params}
    state_bytes = _state_bytes(spec)
    tied = {
        path_name(path): leaf.other_paths
        for path, leaf in spec.definition.params.items()
    }
    rows = tuple(
        _row(
            placement,
            chains[path],
            measured,
            column[path],
            rates[path],
            state_bytes.get(path, 0),
            tied[path],
        )
        for path, placement in spec.params.items()
    )
    return View(spec, steps, rows, chains, measured, column, rates)


def _not_applicable(steps: int, error: Exception) -> Explanation:
    first_line = str(error).partition("\n")[0]
    finding = Finding(
        "not-applicable",
        f"the optimizer does not work for this model: {type(error).__name__}: {first_line}",
        "Labels and masks must be functions of the parameters, or trees of exactly their "
        "structure. Extra arguments of `update` are limited to value and grad.",
    )
    return Explanation(steps, (), (finding,), {})


def _probe(
    tx: Optimizer, params: Params, chains: Chains, steps: int
) -> tuple[Probe, dict[str, str]]:
    """Measure one parameter of each kind.

    Parameters have one kind if they pass through the same parts. That is certain only if all
    parts are known; otherwise every parameter is measured. The same holds if the optimizer does
    not work on a subset of the parameters, for example because it has a tree of labels.

    Returns:
        The measurements, and for each parameter the measured one that represents it.
    """
    paths = list(named_leaves(params))
    every = calls_per_update(chains)
    if all(part.is_known for part in chains[ANY].parts):
        representative = _representatives(params, chains)
        keys = [tuple(path.split("/")) for path in sorted(set(representative.values()))]
        subset = nest({key: lookup(params, key) for key in keys})
        try:
            return probe(tx, subset, steps, every), representative
        except Exception:  # noqa: S110
            # A transformation can raise anything for a subset of its parameters.
            pass
    return probe(tx, params, steps, every), {path: path for path in paths}


def _representatives(params: Params, chains: Chains) -> dict[str, str]:
    """Return for each parameter the first one of its kind."""
    first_of_kind: dict[tuple[object, ...], str] = {}
    return {
        path: first_of_kind.setdefault(_kind(path, params, chains[path]), path)
        for path in named_leaves(params)
    }


def _kind(path: str, params: Params, chain: Chain) -> tuple[object, ...]:
    """Return a key that is equal for two parameters if the optimizer treats them alike."""
    leaf = lookup(params, tuple(path.split("/")))
    # Settings such as arrays and functions are compared by identity.
    parts = tuple(
        (part.name, tuple(map(id, part.settings.values()))) for part in chain.parts
    )
    return (chain.groups, parts, leaf.ndim, leaf.dtype, path.rpartition("/")[2])


def _learning_rate(chain: Chain, measured: Probe, column: int) -> np.ndarray:
    """Return the learning rate at each of `measured.steps`: read if possible, or measured."""
    # The schedule inside `MultiSteps` counts updates, while the measurement counts calls.
    if not any(part.name == "MultiSteps" for part in chain.parts):
        rate = chain.learning_rate(measured.steps)
        if rate is not None:
            return rate
    return measured.learning_rate(column)


def _row(
    placement: Placement,
    chain: Chain,
    measured: Probe,
    column: int,
    rate: np.ndarray,
    state_bytes: int,
    other_paths: tuple[str, ...],
) -> Row:
    within = slice(measured.num_within)
    size = np.nan_to_num(measured.size[PLAIN, within, column], nan=np.inf)
    return Row(
        path=placement.path,
        shape=placement.shape,
        dtype=str(placement.dtype),
        group=chain.group,
        transformations=tuple(map(str, chain.parts)),
        peak_lr=float(rate[within].max()) if size.any() else 0.0,
        peak_update=float(size.max()),
        decay=_decay(measured, column, size if chain.is_self_tuned else rate[within]),
        state_bytes=state_bytes,
        layout=show_spec(placement.spec),
        moves=bool(size.any()),
        other_paths=other_paths,
    )


def _decay(measured: Probe, column: int, rate: np.ndarray) -> float:
    """Return the measured weight decay as a multiple of the learning rate."""
    within = slice(measured.num_within)
    shrink = measured.shrink[STILL, within, column]
    moves = measured.size[STILL, within, column] > 0
    acting = np.flatnonzero(moves & (rate > 0))[:50]
    if not len(acting) or _is_rounding(shrink[acting]):
        return 0.0
    return float(shrink[acting[0]] / rate[acting[0]])


def _is_rounding(shrink: np.ndarray) -> bool:
    """Return whether weights shrink by rounding errors only.

    Decay always pulls one way. Rounding errors, as in an update that is a difference of two
    averages, pull both ways or not at all.
    """
    median = np.median(shrink)
    return bool(not median or np.mean(np.sign(shrink) == np.sign(median)) < 0.9)


def _state_bytes(spec: StateSpec) -> dict[str, int]:
    """Return the bytes of optimizer state that belong to each parameter, over all devices."""
    total: dict[str, int] = {}
    for path, placement in spec.opt_state.items():
        owner = owner_of(path, spec.params)
        if owner is not None:
            total[owner] = total.get(owner, 0) + num_bytes(
                placement.shape, placement.dtype
            )
    return total


def _table(rows: Sequence[Row]) -> Table:
    letters: dict[tuple[str, ...], str] = {}
    for row in rows:
        letters.setdefault(row.transformations, _letter(len(letters)))
    legend = [
        f"{letter}: {' -> '.join(parts) or 'nothing'}"
        for parts, letter in letters.items()
    ]
    legend += [
        f"{row.path} is also {' and '.join(row.other_paths)}"
        for row in rows
        if row.other_paths
    ]
    table = Table(
        title="what each parameter gets",
        title_justify="left",
        caption="\n".join(legend),
        caption_justify="left",
    )
    for column in ("parameter", "shape", "group", "parts"):
        table.add_column(column, overflow="fold", no_wrap=column == "parameter")
    for column in ("peak lr", "peak update", "decay", "state"):
        table.add_column(column, justify="right")
    table.add_column("layout", no_wrap=True)
    for row in rows:
        table.add_row(
            row.path,
            " x ".join(map(str, row.shape)) or "scalar",
            row.group,
            letters[row.transformations],
            _number(row.peak_lr),
            _number(row.peak_update),
            _number(row.decay),
            show_bytes(row.state_bytes),
            row.layout,
        )
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "-"


def _letter(index: int) -> str:
    """Return a name for a chain: A to Z, then AA, AB and so on."""
    letters = string.ascii_uppercase
    first = letters[index // 26 - 1] if index >= 26 else ""
    return first + letters[index % 26]
