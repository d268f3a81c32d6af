"""The loop by hand: Flax and Optax on one device, the whole batch at once, nothing of shardwise."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.fuzz.cases import Case
from tests.fuzz.problems import (
    Scalar,
    Term,
    eval_batches,
    make_model,
    make_optimizer,
    make_terms,
    make_wrt,
)

Arrays = dict[str, np.ndarray]


@dataclass
class Trace:
    """What a run has computed.

    Attributes:
        initial: the initial parameters and other variables, by path.
        steps: the metrics of each step.
        params: the parameters at the end, by path.
        other: other variables at the end, by path.
        evaluations: the validation metrics after some steps.
        warnings: what the run has printed.
    """

    initial: Arrays = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    params: Arrays = field(default_factory=dict)
    other: Arrays = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Reference:
    """A case trained by hand.

    Args:
        case: the case.
        by_micro_batches: split each batch into micro-batches, example i into i % accumulate. Models
            with batch statistics then see each micro-batch alone, as in any loop that accumulates.
        average_sums: average a scalar that is a sum over micro-batches, too.
    """

    def __init__(
        self, case: Case, by_micro_batches: bool = False, average_sums: bool = False
    ):
        self.case = case
        self.average_sums = average_sums
        self.count = case.accumulate if by_micro_batches else 1
        with nnx.use_eager_sharding(False):
            model = make_model(case)(nnx.Rngs(jax.random.key(case.seed)))
        model.train()
        self.train_def, state = nnx.split(model)
        model.eval()
        self.eval_def, _ = nnx.split(model)
        model.train()
        self.paths = {}
        # The parameters that the model reads in the dtype of computation.
        self.cast: set[str] = set()
        # Keys and counters of random streams, which shardwise derives from the step.
        self.random: set[str] = set()
        is_trained = nnx.filterlib.to_predicate(make_wrt(case))
        self.params: dict[str, Any] = {}
        self.frozen: dict[str, Any] = {}
        self.other: dict[str, Any] = {}
        for path, variable in nnx.to_flat_state(state):
            name = "/".join(map(str, path))
            self.paths[name] = path
            is_param = isinstance(variable, nnx.Param)
            if is_param:
                self.cast.add(name)
            if isinstance(variable, nnx.RngState):
                self.random.add(name)
            if is_param and case.frozen and fnmatch.fnmatch(name, case.frozen):
                group = self.frozen
            elif is_trained(path, variable):
                group = self.params
            else:
                group = self.other
            group[name] = _value(variable)
        _, self.optimizer, self.eval_params = make_optimizer(case)
        self.terms = make_terms(case)
        self.step = jax.jit(self._step)
        self.evaluate_batch = jax.jit(self._evaluate_batch)

    def load(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Take the given initial values; return how far each is from the own one."""
        far = {}
        for group in (self.params, self.frozen, self.other):
            for name, value in group.items():
                if name in arrays:
                    far[name] = float(distance(value, arrays[name]).max(initial=0))
                    group[name] = jnp.asarray(arrays[name])
        return far

    def _merge(self, definition: Any, params: Any, other: Any) -> nnx.Module:
        values = {**params, **self.frozen, **other}
        if self.case.compute_dtype:
            dtype = jnp.dtype(self.case.compute_dtype)
            names = (self.cast - set(other)) & set(values)
            values |= {name: values[name].astype(dtype) for name in names}
        state = nnx.from_flat_state((self.paths[k], v) for k, v in values.items())
        return nnx.merge(definition, state)

    def _total(self, params: Any, other: Any, batch: Any, step: Any) -> Any:
        """Return the total of the loss, and its weight, metrics, new variables and parameters."""
        model = self._merge(self.train_def, params, other)
        loss, metrics = self.terms(model, batch, step)
        new = {
            "/".join(map(str, path)): _value(variable)
            for path, variable in nnx.to_flat_state(nnx.state(model))
        }
        other = {name: new[name] for name in other}
        # A forward pass may write parameters, as `nnx.SpectralNorm` does.
        params = {name: new[name].astype(params[name].dtype) for name in params}
        parts = 1 if self.average_sums else self.count
        total, weight = reduce_term(loss, parts)
        sums = {k: reduce_term(v, parts) for k, v in metrics.items()}
        return total, (weight, sums, other, params)

    def _mean(self, params: Any, other: Any, batch: Any, step: Any) -> Any:
        """Return the loss as everyone writes it, one number, and what `_total` returns."""
        total, aux = self._total(params, other, batch, step)
        return total / aux[0], aux

    def _gradients(self, params: Any, other: Any, batch: Any, step: Any) -> Any:
        """Return gradients, loss, metrics, and new variables and parameters."""
        if self.count == 1:
            mean = jax.value_and_grad(self._mean, has_aux=True)
            (loss, aux), grads = mean(params, other, batch, step)
            _, metrics, other, params = aux
            values = {k: total / weight for k, (total, weight) in metrics.items()}
            return grads, loss, values, other, params
        gradient = jax.value_and_grad(self._total, has_aux=True)
        parts = []
        for index in range(self.count):
            part = jax.tree.map(lambda x, i=index: x[i :: self.count], batch)
            (total, aux), grads = gradient(params, other, part, step)
            weight, metrics, other, params = aux
            parts.append((total, weight, metrics, grads))
        total, weight, metrics, grads = jax.tree.map(lambda *x: sum(x), *parts)
        grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
        values = {k: total / weight for k, (total, weight) in metrics.items()}
        return grads, total / weight, values, other, params

    def _step(
        self, params: Any, opt_state: Any, other: Any, batch: Any, step: Any
    ) -> Any:
        """Return the new parameters, optimizer state and variables, and the metrics."""
        before = params, opt_state, other
        grads, loss, values, other, params = self._gradients(params, other, batch, step)
        optimizer = optax.with_extra_args_support(self.optimizer)
        updates, new_opt_state = optimizer.update(
            grads, opt_state, params, value=loss, grad=grads
        )
        metrics = {
            "loss": loss,
            "grad_norm": _norm(grads),
            "update_norm": _norm(updates),
            **values,
        }
        params = optax.apply_updates(params, updates)
        metrics["param_norm"] = _norm(params)
        # A step with a NaN changes nothing, also if only a variable that is kept becomes NaN.
        is_good = jnp.isfinite(loss + metrics["grad_norm"])
        pairs = zip(jax.tree.leaves(other), jax.tree.leaves(before[2]), strict=True)
        for new_leaf, old_leaf in pairs:
            if jnp.issubdtype(new_leaf.dtype, jnp.inexact):
                stays = jnp.isfinite(new_leaf) | ~jnp.isfinite(old_leaf)
                is_good &= stays.all()
        new, old = (params, new_opt_state, other), before
        params, opt_state, other = jax.tree.map(
            lambda n, o: jnp.where(is_good, n, o), new, old
        )
        return params, opt_state, other, metrics

    def _evaluate_batch(self, params: Any, other: Any, batch: Any, step: Any) -> Any:
        model = self._merge(self.eval_def, params, other)
        loss, metrics = self.terms(model, batch, step)
        rows = jax.tree.leaves(batch)[0].shape[0]
        # A number of a batch counts as often as the batch has examples.
        result = {}
        for name, term in {"loss": loss, **metrics}.items():
            total, weight = reduce_term(term)
            factor = rows if isinstance(term, Scalar) else 1
            result[name] = (total * factor, weight * factor)
        return result

    def evaluate(
        self, params: Any, opt_state: Any, other: Any, step: Any
    ) -> dict[str, float]:
        """Return the mean of the loss and of each metric over the validation data."""
        params = self.eval_params(opt_state, params)
        parts = [
            jax.device_get(self.evaluate_batch(params, other, batch, step))
            for batch in eval_batches(self.case)
        ]
        return {
            name: float(
                sum(float(part[name][0]) for part in parts)
                / sum(float(part[name][1]) for part in parts)
            )
            for name in parts[0]
        }

    def train(
        self,
        batches: Sequence[Any],
        evaluate_after: Sequence[int] = (),
        change: Callable[[str, Any], Any] = lambda name, value: value,
    ) -> Trace:
        """Train on the batches.

        Args:
            batches: one batch per step.
            evaluate_after: the steps after which to evaluate.
            change: a function `(path, value)` that changes initial parameters.
        """
        params = {name: change(name, value) for name, value in self.params.items()}
        opt_state, other = self.optimizer.init(params), self.other
        trace = Trace()
        uses_step = self.case.signature == "step"
        for n, batch in enumerate(batches, 1):
            params, opt_state, other, metrics = self.step(
                params, opt_state, other, batch, n - 1 if uses_step else 0
            )
            trace.steps.append({k: float(v) for k, v in metrics.items()})
            if n in evaluate_after:
                trace.evaluations[n] = self.evaluate(
                    params, opt_state, other, n if uses_step else 0
                )
        trace.params = to_host({**params, **self.frozen})
        trace.other = to_host(
            {name: value for name, value in other.items() if name not in self.random}
        )
        return trace


def reduce_term(term: Term, parts: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return total and weight of a term of one of `parts` parts, as float32 numbers."""
    if isinstance(term, Scalar):
        weight = 1 / parts if term.is_sum else 1
        return jnp.asarray(term.value, jnp.float32), jnp.float32(weight)
    total = jnp.asarray(term.total, jnp.float32)
    weight = jnp.asarray(1.0 if term.weight is None else term.weight, jnp.float32)
    weight = weight.reshape(weight.shape + (1,) * (total.ndim - weight.ndim))
    return total.sum(), jnp.broadcast_to(weight, total.shape).sum()


def distance(a: Any, b: Any) -> np.ndarray:
    """Return absolute differences; equal infinities and two NaN have none."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.abs(np.where(is_same, 0, a) - np.where(is_same, 0, b))


def _value(leaf: Any) -> Any:
    """Return the array of a variable, or of an attribute that is an array itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _norm(tree: Any) -> jax.Array:
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in leaves))


def to_host(tree: Mapping[str, Any]) -> Arrays:
    """Return arrays in host memory, floating-point ones as float32."""
    result = {}
    for name, value in tree.items():
        array = jnp.asarray(value)
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(jnp.float32)
        result[name] = np.array(array)
    return result
