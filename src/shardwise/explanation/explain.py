"""What an optimizer will do to each parameter, for any Optax transformation: read where it can be read, measured elsewhere.

`explain(optimizer, model)` gives a table and findings: the mistakes that train without an error and without success.
"""

import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.table import Table

from shardwise.console import line_picture
from shardwise.errors import ShardwiseError
from shardwise.explanation.findings import Finding, Row, View, find, updates_for_one
from shardwise.mesh import make_mesh
from shardwise.module import ModelFactory
from shardwise.optim.parts import state_changes
from shardwise.optim.probe import DOUBLE, PLAIN, STILL, Probe, probe
from shardwise.optim.read import ANY, Chain, read_chains
from shardwise.sharding import Placement, Rules, show_spec
from shardwise.state import StateSpec, abstract_state
from shardwise.text import show_bytes
from shardwise.tree import lookup, named_leaves, nest, num_bytes, owner_of


@dataclass(frozen=True)
class Explanation:
    steps: int
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    curves: Mapping[
        str, tuple[np.ndarray, np.ndarray]
    ]  # (update, learning rate) of each group, over the run

    def table(self) -> Table:
        return _table(self)

    def lines(self) -> Iterator[str]:
        """The schedule of each group, drawn, and the findings."""
        width = max((len(group) for group in self.curves), default=0)
        for group, (_, values) in self.curves.items():
            yield f"{group:{width}}  {sparkline(values)}  peak {values.max():.3g}, last {values[-1]:.3g}"
        for finding in self.findings:
            where = f" ({_some(finding.paths)})" if finding.paths else ""
            yield f"{finding.name}: {finding.fact}{where}. {finding.remedy}"
        if not self.findings:
            yield "nothing suspicious found"

    def as_json(self) -> dict[str, Any]:
        curves = {
            group: {"steps": steps.tolist(), "lr": values.tolist()}
            for group, (steps, values) in self.curves.items()
        }
        return {
            "steps": self.steps,
            "parameters": [asdict(row) for row in self.rows],
            "findings": list(map(asdict, self.findings)),
            "curves": curves,
        }

    def plot(self, picture: Path) -> None:
        """The learning rate of every group over the run, as a PNG file."""
        distinct = {values.tobytes(): (steps, values) for steps, values in self.curves.values()}
        with line_picture(
            picture,
            xlabel="update",
            ylabel="learning rate",
            title="Learning rate of each group",
            ylim=(0, None),
        ) as axes:
            for steps, values in distinct.values():
                groups = ", ".join(
                    group
                    for group, (_, other) in self.curves.items()
                    if np.array_equal(other, values)
                )
                axes.plot(steps, values, linewidth=2, label=f"{groups}: peak {values.max():.3g}")


def explain(
    optimizer: optax.GradientTransformation,
    model: ModelFactory | nnx.Module,
    *,
    steps: int = 1000,
    mesh: Mesh | str | None = None,
    rules: Rules | None = None,
) -> Explanation:
    """Explains `optimizer` for the parameters of `model` in a run of `steps` updates."""
    factory = (lambda rngs: model) if isinstance(model, nnx.Module) else model
    mesh = make_mesh("data=1", jax.devices()[:1]) if mesh is None else make_mesh(mesh)
    try:
        spec = abstract_state(factory, optimizer, mesh, rules)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever a transformation may raise
        return _not_applicable(steps, error)
    return explain_state(spec, steps)


def explain_state(spec: StateSpec, steps: int) -> Explanation:
    """The same for a state that is described already."""
    params = spec.abstract.params
    try:
        changes = state_changes(spec.optimizer, params)
    except Exception as error:  # whatever a transformation may raise
        return _not_applicable(steps, error)
    if changes:
        fact = f"the state changes at an update ({changes[0]}), so it can be neither compiled once nor saved"
        remedy = "Keep float32 parameters, or wrap the optimizer: shardwise.optim.with_master(optimizer)."
        return Explanation(steps, (), (Finding("state-changes", fact, remedy),), {})
    chains = read_chains(spec.optimizer, params)
    found, stand_in = _probe(spec.optimizer, params, chains, steps)
    column = {path: found.paths.index(stand_in[path]) for path in spec.params}
    leaf_bytes = _state_bytes(spec)
    rate_of = {
        path: _learning_rate(chains[path], found, column[path]) for path in set(stand_in.values())
    }
    rates = {path: rate_of[stand_in[path]] for path in spec.params}
    rows = []
    for path, placement in spec.params.items():
        rows.append(
            _row(
                path,
                placement,
                chains[path],
                found,
                column[path],
                rates[path],
                leaf_bytes.get(path, 0),
            )
        )
    findings = find(View(spec, steps, tuple(rows), chains, found, column, rates))
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for row in rows:
        if row.moves:
            curves.setdefault(
                row.group, (found.steps[: found.num_within], rates[row.path][: found.num_within])
            )
    return Explanation(steps, tuple(rows), findings, curves)


def _not_applicable(steps: int, error: Exception) -> Explanation:
    fact = f"the optimizer cannot be applied to this model: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    remedy = "Labels and masks must be functions of the parameters, or trees of their very structure; extra arguments are value and grad."
    return Explanation(steps, (), (Finding("not-applicable", fact, remedy),), {})


def _probe(
    tx: Any, params: Any, chains: Mapping[str, Chain], steps: int
) -> tuple[Probe, dict[str, str]]:
    """Measures one parameter for all that are treated alike, and says which stands for which.

    Parameters are alike when they go through the same parts, all of them known; if the optimizer does not work on
    a part of the tree, as one with a tree of labels does not, all are measured.
    """
    leaves = named_leaves(params)
    kind = {
        path: (chains[path], leaf.ndim, leaf.dtype, path.rpartition("/")[2])
        for path, leaf in leaves.items()
    }
    firsts: dict[Any, str] = {}
    every = updates_for_one(chains)
    if all(part.is_known for part in chains[ANY].parts):
        for path in leaves:
            firsts.setdefault(_signature(*kind[path]), path)
        kept = sorted(firsts.values())
        few = nest(
            {tuple(path.split("/")): lookup(params, tuple(path.split("/"))) for path in kept}
        )
        try:
            return probe(tx, few, steps, every), {
                path: firsts[_signature(*kind[path])] for path in leaves
            }
        except Exception:  # noqa: S110 - whatever a transformation may raise for a part of its tree
            pass
    return probe(tx, params, steps, every), {path: path for path in leaves}


def _signature(chain: Chain, *rest: Any) -> tuple[Any, ...]:
    return (
        chain.groups,
        tuple((part.name, tuple(map(id, part.settings.values()))) for part in chain.parts),
        *rest,
    )


def _learning_rate(chain: Chain, found: Probe, column: int) -> np.ndarray:
    """Of each update: as the chain says, or as it was measured."""
    read = chain.learning_rate(found.steps)
    if read is not None and not any(part.name == "MultiSteps" for part in chain.parts):
        return read
    size, double = (
        np.nan_to_num(found.size[run, :, column], posinf=0.0) for run in (PLAIN, DOUBLE)
    )
    is_linear = size.any() and np.allclose(double, 2 * size, rtol=0.1)
    return size / found.gradient_rms[column] if is_linear else size


def _row(
    path: str,
    placement: Placement,
    chain: Chain,
    found: Probe,
    column: int,
    rate: np.ndarray,
    state_bytes: int,
) -> Row:
    within = slice(0, found.num_within)
    size = np.nan_to_num(found.size[PLAIN, within, column], nan=np.inf)
    shrink, steady = (
        found.shrink[STILL, within, column],
        size if chain.is_self_tuned else rate[within],
    )
    acting = np.flatnonzero((found.size[STILL, within, column] > 0) & (steady > 0))[:50]
    return Row(
        path=path,
        shape=placement.shape,
        dtype=str(placement.dtype),
        group=chain.group,
        transformations=tuple(map(str, chain.parts)),
        peak_lr=float(rate[within].max()) if size.any() else 0.0,
        peak_update=float(size.max()),
        decay=float(shrink[acting[0]] / steady[acting[0]])
        if len(acting) and not _is_rounding(shrink[acting])
        else 0.0,
        state_bytes=state_bytes,
        layout=show_spec(placement.spec),
        moves=bool(size.any()),
    )


def _is_rounding(shrink: np.ndarray) -> bool:
    """Decay pulls one way; rounding errors, as in an update that is a difference of two averages, pull both ways or not at all."""
    return bool(
        np.mean(np.sign(shrink) == np.sign(np.median(shrink))) < 0.9 or not np.median(shrink)
    )


def _state_bytes(spec: StateSpec) -> dict[str, int]:
    """Bytes of optimizer state that belong to each parameter, over all devices."""
    total: dict[str, int] = {}
    for path, placement in spec.opt_state.items():
        if (owner := owner_of(path, spec.params)) is not None:
            total[owner] = total.get(owner, 0) + num_bytes(placement.shape, placement.dtype)
    return total


def _table(explanation: Explanation) -> Table:
    chains: dict[tuple[str, ...], str] = {}
    for row in explanation.rows:
        chains.setdefault(row.transformations, _letter(len(chains)))
    legend = "\n".join(
        f"{letter}: {' -> '.join(parts) or 'nothing'}" for parts, letter in chains.items()
    )
    table = Table(
        title="what each parameter gets",
        title_justify="left",
        caption=legend,
        caption_justify="left",
    )
    for column in ("parameter", "shape", "group", "parts"):
        table.add_column(column, overflow="fold", no_wrap=column == "parameter")
    for column in ("peak lr", "peak update", "decay", "state"):
        table.add_column(column, justify="right")
    table.add_column("layout", no_wrap=True)
    for row in explanation.rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        numbers = [
            f"{value:.3g}" if value else "-" for value in (row.peak_lr, row.peak_update, row.decay)
        ]
        table.add_row(
            row.path,
            shape,
            row.group,
            chains[row.transformations],
            *numbers,
            show_bytes(row.state_bytes),
            row.layout,
        )
    return table


def _letter(number: int) -> str:
    letters = string.ascii_uppercase
    return (
        letters[number]
        if number < len(letters)
        else f"{letters[number // 26 - 1]}{letters[number % 26]}"
    )


def sparkline(values: np.ndarray, width: int = 60) -> str:
    """A curve in one line of text, from zero to its peak."""
    if not len(values) or not np.nanmax(values) > 0:
        return "▁" * width
    picked = values[np.linspace(0, len(values) - 1, min(width, len(values))).round().astype(int)]
    return "".join(
        "▁▂▃▄▅▆▇█"[min(7, int(8 * value / np.nanmax(values)))] for value in np.nan_to_num(picked)
    )


def _some(paths: Iterable[str], count: int = 3) -> str:
    paths = list(paths)
    return ", ".join(paths[:count]) + (
        f" and {len(paths) - count} more" if len(paths) > count else ""
    )
