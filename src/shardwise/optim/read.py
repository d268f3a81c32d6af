"""Read what an Optax transformation does to each parameter: the parts of its chain, in order.

An Optax transformation is a pair of closures, `init` and `update`. The qualified name of a closure
says which function made it (`scale_by_adam.<locals>.update_fn`). The variables that it closes over
are its settings: inner transformations, masks, labels, schedules and numbers.

Optax does not promise to keep the names of these variables. A transformation that cannot be read
is therefore reported as a part with `is_unread=True`, and one warning names all of them. Learning
rates of such an optimizer are measured with `shardwise.optim.probe` instead.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwise.errors import ShardwiseError
from shardwise.optim.groups import param_path
from shardwise.optim.probe import BEYOND, probe
from shardwise.optim.schedules import Schedule, as_schedule
from shardwise.tree import Params, PyTree

Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps
# The variables that a function closes over, by name. They can be anything.
Variables: TypeAlias = Mapping[str, Any]
# The key in the result of `read_chains` under which all parts are, whatever masks and labels say.
ANY = ""
# Optimizers that find their learning rate themselves. `learning_rate` is a factor for it.
SELF_TUNED = (
    "prodigy",
    "dadapt_adamw",
    "dog",
    "dowg",
    "cocob",
    "mechanize",
    "momo",
    "momo_adam",
)
# Schedules are evaluated at this many updates at once.
CHUNK = 512
# Transformations that multiply the update by a number, and the variable that holds it.
FACTOR_VARIABLES = {
    "scale": "step_size",
    "scale_by_schedule": "step_size_fn",
    "scale_by_lr": "value",
}


@dataclass(frozen=True)
class ChainPart:
    """One transformation that a parameter passes through.

    Attributes:
        name: the function that made it, such as `scale_by_adam`.
        settings: the variables that it closes over, by name.
        is_known: whether Optax or shardwise made it. Only masks and labels can make a known
            transformation treat parameters differently.
        is_unread: whether its settings could not be read, because Optax changed.
    """

    name: str
    settings: Variables = field(default_factory=dict)
    is_known: bool = True
    is_unread: bool = False

    def __str__(self) -> str:
        if self.is_unread:
            return f"{self.name}(unknown)"
        settings = [
            f"{name}={value:.12g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in zip(
                self.settings, map(_as_number, self.settings.values()), strict=True
            )
            # Flags are shown where they are set.
            if isinstance(value, int | float | str) and value is not False
        ]
        return f"{self.name}({', '.join(settings)})" if settings else self.name

    @property
    def factor(self) -> Schedule | None:
        """The number by which this part multiplies the update, as a function of the count.

        None if the part does something else.
        """
        value = self._factor
        return None if value is None else as_schedule(value)

    @property
    def _factor(self) -> float | Schedule | None:
        variable = FACTOR_VARIABLES.get(self.name)
        if self.name in SELF_TUNED:
            variable = "learning_rate"
        value: float | Schedule | None = None
        if variable is not None:
            value = self.settings.get(variable)
        return value

    def factors(self, steps: np.ndarray) -> np.ndarray | None:
        """Return what the update is multiplied by at some updates, shape (n,), or None.

        Args:
            steps: numbers of updates, shape (n,).
        """
        value = self._factor
        if value is None:
            return None
        # `scale_by_lr` multiplies by minus its value.
        sign = -1 if self.name == "scale_by_lr" else 1
        if callable(value):
            return sign * schedule_values(value, steps)
        return np.full(len(steps), sign * float(value), "f4")


@dataclass(frozen=True)
class Chain:
    """Everything that one parameter passes through.

    Attributes:
        parts: the transformations, in order.
        groups: the labels of the partitions that the parameter belongs to, outermost first.
    """

    parts: tuple[ChainPart, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The name of the parameter's group, `all` if the optimizer has no groups."""
        return "/".join(self.groups) or "all"

    @property
    def is_self_tuned(self) -> bool:
        """Whether the optimizer finds the learning rate during the run."""
        return any(part.name in SELF_TUNED for part in self.parts)

    @property
    def is_readable(self) -> bool:
        """Whether all parts could be read. If not, learning rates have to be measured."""
        return not any(part.is_unread for part in self.parts)

    def in_group(self, group: str) -> "Chain":
        """Return the chain of a parameter that also belongs to `group`."""
        is_same = self.groups[-1:] == (group,)
        return self if is_same else Chain(self.parts, (*self.groups, group))

    def then(self, part: ChainPart) -> "Chain":
        """Return this chain with one more part at its end."""
        return Chain((*self.parts, part), self.groups)

    def learning_rate(self, steps: np.ndarray) -> np.ndarray | None:
        """Return the absolute product of all constant factors and schedules.

        Args:
            steps: numbers of updates, shape (n,).

        Returns:
            The learning rate at these updates, shape (n,). None if the chain has no such factor,
            or has parts that could not be read.
        """
        if not self.is_readable:
            return None
        factors = [part.factors(steps) for part in self.parts]
        sizes = [np.abs(values) for values in factors if values is not None]
        return np.asarray(np.prod(sizes, axis=0)) if sizes else None


Chains: TypeAlias = dict[str, Chain]


def read_chains(tx: Optimizer, params: Params) -> Chains:
    """Return what each parameter passes through.

    Parts of Optax that cannot be read have `is_unread=True`. One `UserWarning` names them.

    Args:
        tx: the optimizer.
        params: the parameters; may be abstract.

    Returns:
        The chain of each parameter by path. The key `ANY` has all parts, including those that
        no mask lets through.

    Raises:
        ShardwiseError: if the labels or masks of a shardwise optimizer do not fit the parameters.
    """
    reader = _Reader(params)
    paths = [
        param_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    chains = reader.read(tx, {path: Chain() for path in (*paths, ANY)})
    if reader.problems:
        # The location is this line, whoever calls: Python shows the warning once per process.
        warnings.warn(
            f"cannot read {'; '.join(reader.problems)} of Optax {version('optax')}. Learning rates "
            "are measured instead, and checks of the optimizer that need these settings do not "
            "run. Training is not affected. To read them again, install Optax 0.2.8.",
            stacklevel=1,
        )
    return chains


@dataclass(frozen=True)
class SampledUpdates:
    """Numbers of updates at which the schedules of a run are evaluated.

    Attributes:
        numbers: numbers of updates in ascending order, shape (n,). Some are after the end of the
            run, to see whether a schedule ends later.
        num_within: how many of them are within the run.
    """

    numbers: np.ndarray
    num_within: int

    @classmethod
    def of_run(cls, steps: int) -> "SampledUpdates":
        """Return 257 updates that are evenly spaced over a run, and 128 beyond its end."""
        within = np.unique(np.linspace(0, steps - 1, 257).astype(int))
        beyond = np.unique(np.geomspace(steps, BEYOND * steps, 128).astype(int))
        return cls(np.concatenate([within, beyond]), len(within))


def sample_rates(
    tx: Optimizer, params: Params, steps: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return the learning rate of each group at some updates, ready for JSON.

    Rates are read from the schedules where possible. Rates of an optimizer that cannot be read,
    because Optax changed, are measured.

    Args:
        tx: the optimizer.
        params: the parameters; may be abstract.
        steps: numbers of updates, in ascending order.

    Returns:
        For each group, the learning rate by the number of the update. A group is absent if its
        optimizer has no factor that is a learning rate.

    Raises:
        Exception: whatever a schedule raises when it is called with the number of an update.
    """
    rates: dict[str, np.ndarray] = {}
    unread: dict[str, set[str]] = {}
    for path, chain in read_chains(tx, params).items():
        if path == ANY:
            continue
        if not chain.is_readable:
            unread.setdefault(chain.group, set()).add(path)
        elif chain.group not in rates:
            values = chain.learning_rate(steps)
            if values is not None:
                rates[chain.group] = values
    if unread:
        rates |= _measured_rates(tx, params, unread, steps)
    return {
        group: {
            str(step): float(value) for step, value in zip(steps, values, strict=True)
        }
        for group, values in rates.items()
    }


def _measured_rates(
    tx: Optimizer,
    params: Params,
    groups: Mapping[str, Collection[str]],
    steps: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the largest measured learning rate of each group: that of parameters that move."""
    try:
        measured = probe(tx, params, int(steps.max()) + 1)
    except Exception:
        # A transformation may not work on small copies. Training reports its own errors.
        return {}
    rates = {}
    for group, paths in groups.items():
        indices = [index for index, path in enumerate(measured.paths) if path in paths]
        largest = np.max([measured.learning_rate(index) for index in indices], axis=0)
        rates[group] = np.interp(steps, measured.steps, largest)
    return rates


def calls_per_update(chains: Mapping[str, Chain]) -> int:
    """Return how many calls make one update: the micro-batches of `optax.MultiSteps`, or 1."""
    for part in chains[ANY].parts:
        if part.name == "MultiSteps":
            return int(part.settings.get("every_k", 1))
    return 1


def schedule_values(schedule: Schedule, steps: np.ndarray) -> np.ndarray:
    """Return the values of a schedule at several updates.

    Args:
        schedule: the schedule. It may accept one number at a time only.
        steps: numbers of updates, shape (n,).

    Returns:
        The values, shape (n,).

    Raises:
        Exception: whatever the schedule raises for a single number.
    """
    try:
        return _compiled_values(schedule, tuple(steps.tolist()))
    except Exception:
        # A schedule written in Python, with `if` or `math`, fails on traced values.
        return np.asarray([float(schedule(int(n))) for n in steps])


@lru_cache(maxsize=128)
def _compiled_values(schedule: Schedule, steps: tuple[int, ...]) -> np.ndarray:
    # The shape is always the same, so that a schedule is compiled once.
    padded = np.pad(np.array(steps), (0, -len(steps) % CHUNK), mode="edge")
    function = _compiled(schedule)
    values = [np.asarray(function(chunk)) for chunk in padded.reshape(-1, CHUNK)]
    return np.concatenate(values)[: len(steps)]


@lru_cache(maxsize=128)
def _compiled(schedule: Schedule) -> Callable[[np.ndarray], jax.Array]:
    # One compiled program. Without jit, each operation would be compiled on its own.
    return jax.jit(jax.vmap(lambda n: jnp.asarray(schedule(n), jnp.float32)))


class _Unreadable(Exception):
    """Raised if a transformation is not built the way that this module knows."""


class _Reader:
    """Takes a transformation apart.

    Attributes:
        params: the parameters; may be abstract.
        problems: the transformations that could not be read, and why.
    """

    def __init__(self, params: Params):
        self.params = params
        self.problems: list[str] = []
        self.wrappers: dict[str, Callable[[Variables, Variables, Chains], Chains]] = {
            "with_extra_args_support": self._with_extra_args_support,
            "chain": self._chain,
            "named_chain": self._named_chain,
            "partition": self._partition,
            "masked": self._masked,
            "inject_hyperparams": self._inject_hyperparams,
            # Of `shardwise.scaling.transform`.
            "scale_updates": self._scale_updates,
        }

    def read(self, tx: Optimizer, chains: Chains) -> Chains:
        """Return `chains` with the parts that `tx` adds to each of them."""
        if not chains:
            return chains
        try:
            return self._read(tx, chains)
        except ShardwiseError:
            raise
        except Exception as error:
            # Whatever a change of Optax may cause. User functions that raise here, such as
            # masks, also raise when the optimizer state is created, so nothing is hidden.
            owner = getattr(tx.update, "__self__", None)
            name = _maker(tx.update) if owner is None else type(owner).__name__
            problem = f"{name} ({type(error).__name__}: {error})"
            if problem not in self.problems:
                self.problems.append(problem)
            return _extended(chains, ChainPart(name, is_known=False, is_unread=True))

    def _read(self, tx: Optimizer, chains: Chains) -> Chains:
        owner = getattr(tx.update, "__self__", None)
        if isinstance(owner, optax.MultiSteps):
            part = ChainPart("MultiSteps", {"every_k": owner._every_k_schedule(0)})
            return self.read(owner.inner_opt, _extended(chains, part))
        name = _maker(tx.update)
        of_init = _closure(tx.init)
        of_update = _closure(tx.update)
        if name in self.wrappers and _is_known(tx.update):
            return self.wrappers[name](of_init, of_update, chains)
        inner = {
            key: value for key, value in of_update.items() if _is_transformation(value)
        }
        if name not in [_maker(tx.update) for tx in inner.values()]:
            settings = {
                key: value for key, value in of_update.items() if key not in inner
            }
            part = ChainPart(name, settings, _is_known(tx.update))
            _check_part(part)
            chains = _extended(chains, part)
        return self._read_all(inner.values(), chains)

    def _read_all(self, transformations: Iterable[Optimizer], chains: Chains) -> Chains:
        for tx in transformations:
            chains = self.read(tx, chains)
        return chains

    def _with_extra_args_support(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        return self.read(of_update["tx"], chains)

    def _chain(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        pairs = zip(of_init["init_fns"], of_update["update_fns"], strict=True)
        return self._read_all(
            (optax.GradientTransformation(*pair) for pair in pairs), chains
        )

    def _named_chain(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        return self._read_all((tx for _, tx in of_update["transforms"]), chains)

    def _partition(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        labels = self._by_path(of_update["param_labels"])
        result = dict(chains)
        for label, tx in of_update["transforms"].items():
            members = {
                path: result[path].in_group(str(label))
                for path in chains
                if path == ANY or labels.get(path) == label
            }
            result |= self.read(tx, members)
        return result

    def _masked(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        mask = self._by_path(of_update["mask"])
        selected = {
            path: chain
            for path, chain in chains.items()
            if path == ANY or mask.get(path)
        }
        return chains | self.read(of_update["inner"], selected)

    def _inject_hyperparams(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        factory = of_update["inner_factory"]
        schedules = {
            key: getattr(value, "schedule_fn", value)
            for key, value in of_update["sched_hps"].items()
        }
        settings = {**of_update["other_hps"], **of_init["numeric_hps"], **schedules}
        try:
            inner = factory(**settings)
        except TypeError:
            # The factory does not accept a schedule for one of its numbers.
            return _extended(
                chains, ChainPart(f"inject_hyperparams({factory.__name__})")
            )
        return self.read(inner, chains)

    def _scale_updates(
        self, of_init: Variables, of_update: Variables, chains: Chains
    ) -> Chains:
        chains = self.read(of_update["inner"], chains)
        multipliers = _closure(of_update["scaled"])["multipliers"]
        # One part for all parameters with the same number.
        parts = {
            number: ChainPart("scale_updates", {"multiplier": number})
            for number in multipliers.values()
        }
        return {
            path: chain
            if multipliers.get(path, 1.0) == 1.0
            else chain.then(parts[multipliers[path]])
            for path, chain in chains.items()
        }

    def _by_path(
        self, labels: PyTree | Callable[[Params], PyTree]
    ) -> dict[str, object]:
        """Return labels by path, from a tree of labels, a prefix of it, or a function."""
        tree = labels(self.params) if callable(labels) else labels

        def spread(label: object, subtree: PyTree) -> PyTree:
            return jax.tree.map(lambda _: label, subtree)

        full = jax.tree.map(spread, tree, self.params)
        leaves = jax.tree_util.tree_leaves_with_path(full)
        return {param_path(path): label for path, label in leaves}


def _as_number(value: object) -> object:
    """Return a setting; an array of one number as this number, unless it is traced."""
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not value.ndim:
        return None if isinstance(value, jax.core.Tracer) else value.item()
    return value


def _check_part(part: ChainPart) -> None:
    """Raise if a part of Optax holds something that this module ought to read and cannot."""
    if not part.is_known:
        return
    variable = FACTOR_VARIABLES.get(part.name)
    if variable is not None and part.factor is None:
        raise _Unreadable(f"no variable '{variable}'")
    for name, value in part.settings.items():
        items = list(value.values()) if isinstance(value, Mapping) else value
        if not isinstance(items, list | tuple):
            continue
        if any(_is_transformation(item) or _is_update(item) for item in items):
            raise _Unreadable(f"transformations in variable '{name}'")


def _is_transformation(value: object) -> bool:
    return isinstance(value, optax.GradientTransformation)


def _is_update(value: object) -> bool:
    """Return whether `value` is the `update` of a transformation, which Optax calls update_fn."""
    return callable(value) and getattr(value, "__name__", "") in ("update", "update_fn")


def _maker(function: Callable[..., object]) -> str:
    """Return the name of the function that made a closure."""
    qualified: str = getattr(function, "__qualname__", type(function).__name__)
    name = qualified.partition(".<locals>")[0]
    if name in ("stateless", "stateless_with_tree_map"):
        # These wrap a function `f`, and the function that made `f` has the telling name.
        wrapped = _closure(function).get("f")
        return name if wrapped is None else _maker(wrapped)
    return name


def _is_known(function: Callable[..., object]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in (
        "optax",
        "shardwise",
    )


def _extended(chains: Chains, part: ChainPart) -> Chains:
    # `identity` and `record` do not change the updates.
    if part.name in ("identity", "record"):
        return chains
    return {path: chain.then(part) for path, chain in chains.items()}


def _closure(function: Callable[..., object]) -> dict[str, Any]:
    """Return the variables that a function closes over. Those not assigned yet are omitted."""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code else ()
    variables = {}
    for name, cell in zip(
        names, getattr(function, "__closure__", None) or (), strict=True
    ):
        try:
            variables[name] = cell.cell_contents
        except ValueError:
            continue
    return variables
