"""What can be read from an Optax transformation: for each parameter, the parts that it goes through, in order.

A transformation is a pair of closures. Their names say which part of Optax made them (`scale_by_adam.<locals>.update_fn`), and
the variables they close over are its settings: inner transformations, masks, labels, schedules and numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise.optim.groups import param_path
from shardwise.optim.schedules import Schedule, as_schedule

Labels = Mapping[str, Any]  # by path
ANY = ""  # the path of a parameter that every mask and every group lets through
SELF_TUNED = (
    "prodigy",
    "dadapt_adamw",
    "dog",
    "dowg",
    "cocob",
    "mechanize",
    "momo",
    "momo_adam",
)  # they find their rate


@dataclass(frozen=True)
class Part:
    """One transformation that a parameter goes through."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True  # made by Optax or shardwise, so that nothing but masks and labels can tell parameters apart

    def __str__(self) -> str:
        numbers = [
            f"{name}={_show(value)}" for name, value in self.settings.items() if _is_setting(value)
        ]
        return f"{self.name}({', '.join(numbers)})" if numbers else self.name

    @property
    def factor(self) -> Schedule | None:
        """The number by which this part multiplies an update, as a function of the count; None if it does something else."""
        settings = self.settings
        if self.name == "scale_by_lr":
            return settings["value"]
        if self.name == "scale_by_schedule":
            return settings["step_size_fn"]
        if self.name == "scale":
            return lambda n: settings["step_size"]
        if self.name in SELF_TUNED and "learning_rate" in settings:
            return as_schedule(settings["learning_rate"])
        return None


@dataclass(frozen=True)
class Chain:
    """Everything that one parameter goes through, and the names of the groups that led there."""

    parts: tuple[Part, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return "/".join(self.groups) or "all"

    @property
    def is_self_tuned(self) -> bool:
        """Whether the learning rate is a multiple of one that is found during the run."""
        return any(part.name in SELF_TUNED for part in self.parts)

    def into(self, group: str) -> "Chain":
        return self if self.groups[-1:] == (group,) else Chain(self.parts, (*self.groups, group))

    def learning_rate(self, steps: np.ndarray) -> np.ndarray | None:
        """The size of all constant factors and schedules together; None when there are none."""
        factors = [part.factor for part in self.parts if part.factor is not None]
        if not factors:
            return None
        return np.prod([np.abs(evaluate(factor, steps)) for factor in factors], axis=0)


def read_chains(tx: Any, params: Any) -> dict[str, Chain]:
    """For each parameter, by path, and under ANY all parts there are, also those that no mask lets through.

    `params` may be abstract.
    """
    leaves = {param_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return _walk(tx, params, {path: Chain() for path in (*leaves, ANY)})


def sample_rates(tx: Any, params: Any, steps: np.ndarray) -> dict[str, dict[str, float]]:
    """The learning rate of each group at these updates, where it can be read; ready for JSON."""
    rates: dict[str, dict[str, float]] = {}
    for path, chain in read_chains(tx, params).items():
        if (
            path != ANY
            and chain.group not in rates
            and (values := chain.learning_rate(steps)) is not None
        ):
            rates[chain.group] = {
                str(step): float(value) for step, value in zip(steps, values, strict=True)
            }
    return rates


def evaluate(schedule: Schedule, steps: np.ndarray) -> np.ndarray:
    """The values of a schedule at all of these steps, also of one that takes one step at a time."""
    try:
        at_all = jax.jit(
            jax.vmap(lambda n: jnp.asarray(schedule(n), jnp.float32))
        )  # one program, where each operation would be one
        values = np.asarray(at_all(steps))
    except Exception:  # whatever a schedule written by hand may raise for an array
        values = np.asarray([float(schedule(int(n))) for n in steps])
    return values


def _walk(tx: Any, params: Any, chains: dict[str, Chain]) -> dict[str, Chain]:
    """`chains` with what `tx` adds to each of them."""
    if not chains:
        return chains
    owner = getattr(tx.update, "__self__", None)
    if isinstance(owner, optax.MultiSteps):
        return _walk(
            owner.inner_opt,
            params,
            _extended(chains, Part("MultiSteps", {"every_k": owner._every_k_schedule(0)})),
        )
    name = _made_by(tx.update)
    made, cells = _cells(tx.init), _cells(tx.update)
    if name == "with_extra_args_support":
        return _walk(cells["tx"], params, chains)
    if name == "chain":
        for pair in zip(made["init_fns"], cells["update_fns"], strict=True):
            chains = _walk(optax.GradientTransformation(*pair), params, chains)
        return chains
    if name == "named_chain":
        for _, part in cells["transforms"]:
            chains = _walk(part, params, chains)
        return chains
    if name == "partition":
        labels = _by_path(cells["param_labels"], params)
        out = dict(chains)
        for label, inner in cells["transforms"].items():
            inside = {
                path: out[path].into(str(label))
                for path in chains
                if path == ANY or labels.get(path) == label
            }
            out |= _walk(inner, params, inside)
        return out
    if name == "masked":
        mask = _by_path(cells["mask"], params)
        return chains | _walk(
            cells["inner"],
            params,
            {path: chain for path, chain in chains.items() if path == ANY or mask.get(path)},
        )
    if name == "inject_hyperparams":
        schedules = {
            key: getattr(value, "schedule_fn", value) for key, value in cells["sched_hps"].items()
        }
        try:
            inner = cells["inner_factory"](**cells["other_hps"], **made["numeric_hps"], **schedules)
        except TypeError:  # a factory that takes no schedule for one of its numbers
            return _extended(chains, Part(f"inject_hyperparams({cells['inner_factory'].__name__})"))
        return _walk(inner, params, chains)
    inners = {
        key: value
        for key, value in cells.items()
        if isinstance(value, optax.GradientTransformation)
    }
    if name not in [_made_by(inner.update) for inner in inners.values()]:
        chains = _extended(
            chains,
            Part(
                name,
                {key: value for key, value in cells.items() if key not in inners},
                _is_known(tx.update),
            ),
        )
    for inner in inners.values():
        chains = _walk(inner, params, chains)
    return chains


def _made_by(function: Any) -> str:
    """The function whose closure this is: of Optax, of shardwise, or the user's."""
    name: str = getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]
    return (
        _made_by(_cells(function)["f"])
        if name in ("stateless", "stateless_with_tree_map")
        else name
    )


def _is_known(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("optax", "shardwise")


def _extended(chains: dict[str, Chain], part: Part) -> dict[str, Chain]:
    if part.name in ("identity", "record"):  # they change nothing
        return chains
    return {path: Chain((*chain.parts, part), chain.groups) for path, chain in chains.items()}


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, those of functions of Optax's own inside included."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars if code else (), closure or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return cells


def _by_path(labels: Any, params: Any) -> Labels:
    """A mask or a tree of labels, or the function that makes it, as a dictionary; prefixes hold for all below."""
    tree = labels(params) if callable(labels) else labels
    spread: Callable[[Any, Any], Any] = lambda label, below: jax.tree.map(lambda _: label, below)  # noqa: E731
    full = jax.tree.map(spread, tree, params)
    return {param_path(path): label for path, label in jax.tree_util.tree_leaves_with_path(full)}


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
