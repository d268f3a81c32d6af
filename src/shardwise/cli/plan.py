"""`shardwise plan`: whether a run fits, on which mesh, and how fast it is."""

import argparse
import inspect
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

from rich.console import Console

from shardwise.axes import DATA, FSDP
from shardwise.cli.plan_tables import (
    show_candidate,
    show_cost,
    show_plan,
    show_ranking,
    show_remedies,
)
from shardwise.cli.recipes import split_recipe
from shardwise.cluster.signals import Stop, stop_on_signals
from shardwise.console import working
from shardwise.data import as_batches
from shardwise.errors import ConfigError, ExitCode
from shardwise.mesh import make_mesh, mesh_text, parse_mesh, show_sizes, use_cpu_devices
from shardwise.plan.compile import find_idle_axes, plan_cache, plan_run
from shardwise.plan.largest_batch import largest_batch
from shardwise.plan.plan import OptionValue, Plan
from shardwise.plan.search import (
    Candidate,
    Search,
    Status,
    find_meshes,
    search,
    searched_axes,
)
from shardwise.plan.target import Target, cpu_devices_of, find_target, local_target
from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run
from shardwise.report.plan_page import plan_page
from shardwise.run import Run, describe_state
from shardwise.sharding import num_batch_shards
from shardwise.text import Json

DOES_NOT_FIT = ExitCode.CONFIG
# A search tries to accumulate over 1, 2, 4 ... micro-batches, times what the recipe asks for.
ACCUMULATIONS = (1, 2, 4, 8, 16)


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise plan`; return what `--json` writes, and the exit code."""
    target, options, recipe_args = split_recipe("plan", args)
    _check_options(options)
    with stop_on_signals(may_exit=True) as stop:
        stop.last_words = "stopped by a signal."
        if not options.no_cache:
            stop.last_words += (
                " Compiled plans are cached: the same command continues from them."
            )
        return _plan(target, options, recipe_args, shared, stop)


def _check_options(options: argparse.Namespace) -> None:
    if options.compile_at_most is not None and options.compile_at_most < 1:
        raise ConfigError(
            f"--compile-at-most {options.compile_at_most}: it must be at least 1."
        )
    if options.search and options.largest_batch:
        raise ConfigError(
            "--search changes the mesh and --largest-batch the batch size. Use one after the other."
        )
    if options.html is not None:
        folder = options.html.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"--html {options.html}: there is no directory {folder}.")


def _plan(
    recipe_name: str,
    options: argparse.Namespace,
    recipe_args: list[str],
    shared: argparse.Namespace,
    stop: Stop,
) -> tuple[Json, int]:
    path, function_name = find_recipe(recipe_name)
    num_devices = shared.cpu_devices
    if num_devices is None:
        num_devices = cpu_devices_of(options.on)
    if num_devices is not None:
        use_cpu_devices(num_devices)
    function = load_recipe(path, function_name)
    arguments = bind_recipe(function, recipe_args, prog=f"shardwise plan {recipe_name}")
    planner = Planner(
        recipe=BoundRecipe(recipe_name, function, arguments, recipe_args),
        target=find_target(options.on) if options.on else local_target(),
        console=Console(width=None if sys.stdout.isatty() else 160),
        progress=Console(stderr=True),
        cache=None if options.no_cache else plan_cache(),
    )
    result = Search()
    if options.search:
        stop.before_exit.append(lambda: show_ranking(planner.console, result))
        choice = planner.search(result, options.compile_at_most)
    elif options.largest_batch:
        choice = planner.find_largest_batch()
    else:
        choice = planner.plan_as_given()
    if choice is None:
        candidates = [entry.as_json() for entry in result.ranking]
        answer = {
            "target": planner.target.name,
            "fits": False,
            "candidates": candidates,
        }
        return answer, DOES_NOT_FIT
    return _answer(planner, choice, result, options)


@dataclass(frozen=True)
class Choice:
    """The candidate that a command ends with, and its plan.

    Attributes:
        candidate: the candidate.
        plan: its plan. It may be too large, if the recipe was planned as given.
    """

    candidate: Candidate
    plan: Plan


def _answer(
    planner: "Planner", choice: Choice, result: Search, options: argparse.Namespace
) -> tuple[Json, int]:
    """Print the end of the answer, write the page, and return the JSON and the exit code."""
    plan, console = choice.plan, planner.console
    command = planner.recipe.command("train", choice.candidate, planner.target)
    if options.tokens:
        show_cost(console, plan, options.tokens)
    rows = []
    for entry in result.ranking:
        is_chosen = entry.candidate == choice.candidate and entry.plan is not None
        rows.append({**entry.as_json(), "chosen": is_chosen})
    if options.html is not None:
        title = f"{planner.recipe.name} on {planner.target.name}"
        options.html.write_text(plan_page(plan, rows, title, command), encoding="utf-8")
        console.print(f"page: {options.html}", highlight=False, soft_wrap=True)
    if plan.fits:
        console.print(f"\n{command}", highlight=False, soft_wrap=True)
    answer = {"plan": plan.as_json(), "candidates": rows, "command": command}
    return answer, 0 if plan.fits else DOES_NOT_FIT


@dataclass(frozen=True)
class BoundRecipe:
    """A recipe with the arguments of the command line, which can be changed for a candidate.

    Attributes:
        name: the recipe as the user wrote it: `file.py` or `file.py:function`.
        function: the recipe.
        arguments: the arguments that were bound.
        words: the same arguments as the user wrote them.
    """

    name: str
    function: Callable[..., object]
    arguments: Mapping[str, object]
    words: list[str]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the recipe, by name."""
        return inspect.signature(self.function).parameters

    def as_given(self) -> Run:
        """Return the run without changes."""
        return self._make({})

    def run(self, candidate: Candidate) -> Run:
        """Return the run of a candidate.

        A change goes to the argument of the recipe with that name. If there is none, it goes to the
        field of the `Run`.
        """
        changes = _changes(candidate)
        to_recipe = {
            name: value for name, value in changes.items() if name in self.parameters
        }
        to_run = {
            name: value
            for name, value in changes.items()
            if name not in self.parameters
        }
        return replace(self._make(to_recipe), **to_run)  # type: ignore[arg-type]

    def _make(self, changes: Mapping[str, OptionValue]) -> Run:
        return make_run(self.function, {**self.arguments, **changes})

    def value(self, name: str) -> object:
        """Return the value of an argument, or None if the recipe has no such argument."""
        if name in self.arguments:
            return self.arguments[name]
        return self.parameters[name].default if name in self.parameters else None

    def choices(self, name: str) -> list[OptionValue]:
        """Return the values of a `Literal` argument, beginning with the given one."""
        annotation = inspect.get_annotations(self.function, eval_str=True).get(name)
        values = list(get_args(annotation)) if get_origin(annotation) is Literal else []
        value = self.value(name)
        return values[values.index(value) :] if value in values else []

    def command(self, verb: str, candidate: Candidate, target: Target) -> str:
        """Return the command line of a candidate, to paste into a shell.

        Changes that the recipe has no argument for follow in a comment.
        """
        changes: dict[str, OptionValue] = {}
        for name, value in _changes(candidate).items():
            if name not in self.arguments or self.arguments[name] != value:
                changes[name] = value
        words = _without_options(self.words, changes)
        run_fields = []
        for name, value in changes.items():
            if name not in self.parameters:
                if value != 1:
                    run_fields.append(f"{name}={value!r}")
            elif value != self.parameters[name].default:
                words += [_option(name), str(value)]
        if target.platform == "cpu":
            words += ["--cpu-devices", str(len(target.devices))]
        command = shlex.join(["shardwise", verb, self.name, *words])
        if run_fields:
            command += f"   # with Run({', '.join(run_fields)}) in the recipe"
        return command


def _changes(candidate: Candidate) -> dict[str, OptionValue]:
    return {"mesh": candidate.mesh, **dict(candidate.options)}


def _option(name: str) -> str:
    """Return the command line option of an argument of a recipe."""
    return f"--{name.replace('_', '-')}"


def _without_options(words: list[str], names: Mapping[str, OptionValue]) -> list[str]:
    """Return the words of a command line without some options and their values."""
    kept: list[str] = []
    is_value = False
    for word in words:
        is_option = word.startswith("--")
        if is_value and not is_option:
            is_value = False
            continue
        name, equals, _ = word.partition("=")
        is_removed = is_option and name.removeprefix("--").replace("-", "_") in names
        is_value = is_removed and not equals
        if not is_removed:
            kept.append(word)
    return kept


@dataclass(frozen=True)
class Planner:
    """Plans a recipe for a target in one of three ways, and prints what it finds.

    Attributes:
        recipe: the recipe.
        target: the devices to plan for.
        console: standard output.
        progress: standard error, for progress.
        cache: the folder of the plan cache, or None.
    """

    recipe: BoundRecipe
    target: Target
    console: Console
    progress: Console
    cache: Path | None

    def compile(self, candidate: Candidate, run: Run | None = None) -> Plan:
        """Return the plan of a candidate."""
        run = self.recipe.run(candidate) if run is None else run
        return plan_run(run, self.target, dict(candidate.options), self.cache)

    def plan_as_given(self) -> Choice:
        """Plan the recipe as it is. If it does not fit, also show what would make it fit."""
        candidate = self._candidate_as_given()
        text = f"compiling for {self.target.name}, mesh {candidate.mesh}"
        with working(self.progress, text):
            plan = self.compile(candidate)
        show_plan(self.console, plan)
        for finding in find_idle_axes(plan, self.recipe.run(candidate).rules):
            self.console.print(finding.line(), highlight=False, soft_wrap=True)
        if not plan.fits:
            show_remedies(self.console, plan, self._compiled_remedies(candidate))
        return Choice(candidate, plan)

    def find_largest_batch(self) -> Choice | None:
        """Find the largest batch size that fits. None if there is none."""
        given = self._candidate_as_given()
        batch_size = self.recipe.value("batch_size")
        if not isinstance(batch_size, int):
            raise ConfigError(
                f"--largest-batch changes the argument batch_size, which {self.recipe.name} lacks."
            )
        run = self.recipe.run(given)
        mesh = make_mesh(given.mesh, self.target.devices)
        unit = num_batch_shards(mesh, run.rules) * run.accumulate

        def compile_size(size: int) -> Plan:
            text = f"compiling for {self.target.name}, batch size {size}"
            with working(self.progress, text):
                plan = self.compile(given.with_option("batch_size", size))
            verdict = "" if plan.fits else ", too large"
            line = f"batch size {size}: {plan.line()}{verdict}"
            self.progress.print(line, highlight=False, soft_wrap=True)
            return plan

        size, plan = largest_batch(compile_size, unit, batch_size)
        if plan is None:
            message = f"not even a batch size of {size} fits {self.target.name}."
            self.console.print(message, highlight=False)
            return None
        show_plan(self.console, plan)
        return Choice(given.with_option("batch_size", size), plan)

    def search(self, result: Search, budget: int | None) -> Choice | None:
        """Search for the fastest mesh. None if nothing fits.

        Args:
            result: filled with the candidates, also if a signal ends the process.
            budget: maximum number of compilations.
        """
        target = self.target
        if target.chip is None:
            raise ConfigError(
                f"--search ranks by time, but the speed of '{target.kind}' is unknown. "
                "Name a known chip, for example --on v5e:2x4."
            )
        run = self.recipe.as_given()
        one = make_mesh("data=1", target.devices[:1])
        model = describe_state(replace(run, mesh=one)).definition
        batch = as_batches(run.data)(0)
        searched = searched_axes(batch, model, len(target.devices))
        axes = list(dict.fromkeys([*searched, *_axis_names(run)]))
        options: dict[str, list[OptionValue]] = {
            "accumulate": [run.accumulate * factor for factor in ACCUMULATIONS]
        }
        if remats := self.recipe.choices("remat"):
            options["remat"] = remats
        with working(self.progress, "counting candidates") as show:

            def show_progress(result: Search, candidate: Candidate) -> None:
                limit = budget or math.ceil(result.num_candidates / 3)
                best = (
                    f", best so far {result.best.candidate.mesh}" if result.best else ""
                )
                progress = f"{result.num_compiled + 1}, at most {limit} of {result.num_candidates}"
                show(f"compiling {show_candidate(candidate)} ({progress}{best})")

            search(
                self.recipe.run,
                self.compile,
                target,
                find_meshes(len(target.devices), axes),
                options,
                budget=budget,
                result=result,
                before_compile=show_progress,
            )
        show_ranking(self.console, result)
        best = result.best
        if best is None or best.plan is None:
            self.console.print(_why_nothing_fits(result, target), highlight=False)
            return None
        show_plan(self.console, best.plan)
        return Choice(best.candidate, best.plan)

    def _candidate_as_given(self) -> Candidate:
        """Return the recipe as it is, as a candidate."""
        run = self.recipe.as_given()
        mesh = show_sizes(parse_mesh(_mesh_of(run), len(self.target.devices)))
        candidate = Candidate(mesh).with_option("accumulate", run.accumulate)
        for name in ("remat", "loss_chunks"):
            value = self.recipe.value(name)
            if isinstance(value, OptionValue) and value is not None:
                candidate = candidate.with_option(name, value)
        return candidate

    def _compiled_remedies(self, candidate: Candidate) -> Iterator[tuple[str, Plan]]:
        """Yield the changes that are possible, with their plans."""
        for change, other in _remedies(self.recipe, candidate):
            try:
                with working(self.progress, f"compiling with {change}"):
                    plan = self.compile(other)
            except ConfigError:
                continue
            yield change, plan


def _mesh_of(run: Run) -> str:
    return run.mesh if isinstance(run.mesh, str) else mesh_text(run.mesh)


def _axis_names(run: Run) -> list[str]:
    return [axis.partition("=")[0].strip() for axis in _mesh_of(run).split(",")]


def _why_nothing_fits(result: Search, target: Target) -> str:
    statuses = {entry.status for entry in result.entries.values()}
    if Status.NOT_COMPILED in statuses:
        return (
            f"nothing that was compiled fits {target.name}. Allow more than {result.num_compiled} "
            "compilations with --compile-at-most."
        )
    if statuses == {Status.REFUSED}:
        return f"no mesh of {len(target.devices)} devices suits this run."
    return f"nothing fits {target.name}. Use more devices or a smaller batch."


def _remedies(recipe: BoundRecipe, candidate: Candidate) -> list[tuple[str, Candidate]]:
    """Return changes that save memory, as text and as candidates, cheapest first."""

    def text(name: str, value: OptionValue) -> str:
        is_argument = name in recipe.parameters
        return f"{_option(name)} {value}" if is_argument else f"Run({name}={value!r})"

    changes: list[tuple[str, OptionValue]] = []
    if recipe.value("loss_chunks") == 1:
        changes.append(("loss_chunks", 8))
    remats = recipe.choices("remat")[1:]
    changes += [("remat", remat) for remat in remats]
    accumulate = candidate["accumulate"]
    assert isinstance(accumulate, int)
    changes += [("accumulate", accumulate * factor) for factor in (2, 8)]
    remedies = [(text(*change), candidate.with_option(*change)) for change in changes]
    mesh = _sharded_mesh(candidate.mesh)
    if mesh is not None:
        remedies.append((text("mesh", mesh), replace(candidate, mesh=mesh)))
        if remats:
            both = f"{text('mesh', mesh)} {text('remat', remats[-1])}"
            other = candidate.with_option("remat", remats[-1])
            remedies.append((both, replace(other, mesh=mesh)))
    return remedies


def _sharded_mesh(mesh: str) -> str | None:
    """Return a mesh with its `data` axis merged into `fsdp`, or None if it has no `data` axis."""
    axes = [axis.partition("=") for axis in mesh.split(",")]
    sizes = {name: int(size) for name, _, size in axes}
    if DATA not in sizes:
        return None
    merged = sizes[DATA] * sizes.get(FSDP[0], 1)
    # `fsdp` takes the place of `data`.
    sharded = {}
    for name, size in sizes.items():
        if name == DATA:
            sharded[FSDP[0]] = merged
        elif name != FSDP[0]:
            sharded[name] = size
    return show_sizes(sharded)
