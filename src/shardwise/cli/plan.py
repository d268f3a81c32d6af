"""`shardwise plan`: will it fit, on which mesh, how fast."""

import argparse
import inspect
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rich.console import Console
from rich.table import Table

from shardwise.axes import SEARCHED
from shardwise.cli.recipes import split_recipe
from shardwise.cluster.signals import Stop, stop_on_signals
from shardwise.errors import ConfigError
from shardwise.mesh import make_mesh, mesh_text, parse_mesh, show_sizes, use_cpu_devices
from shardwise.plan.compile import plan_cache, plan_run
from shardwise.plan.plan import Plan
from shardwise.plan.search import Candidate, Search, find_meshes, search
from shardwise.plan.target import Target, cpu_devices_of, find_target, local_target
from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run
from shardwise.report.plan_page import plan_page
from shardwise.run import Run
from shardwise.sharding import num_batch_shards
from shardwise.text import show_bytes, show_count, show_seconds

USAGE = """\
shardwise plan RECIPE [--on TARGET] [--search] [--html FILE] [arguments of the recipe]

  --on TARGET      cpu:8, gpu, gpu:8, v5e:4x4, v5p:8x8x8, 2*v5e:16x16 ...; the devices at hand if it is not given
  --search         all meshes of that many devices, ranked, with accumulation and rematerialization where memory lacks
  --compile-at-most N   of a search; a third of the candidates if it is not given
  --largest-batch  the largest batch_size of the recipe that fits
  --tokens N       also the time and the chip-hours for so many tokens (or images ...); 3e11 works
  --html FILE      the plan as a page to look at
  --no-cache       compile again what is known already
"""


@dataclass(frozen=True)
class Recipe:
    """A recipe with the arguments of the command line, to be called again with some of them changed."""

    target: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    words: list[str]

    def run(self, candidate: Candidate) -> Run:
        """A change goes to the recipe where it has an argument of that name, else to the run that it makes."""
        changes = {"mesh": candidate.mesh, **dict(candidate.options)}
        takes = inspect.signature(self.function).parameters
        run: Run = make_run(
            self.function,
            {**self.arguments, **{name: value for name, value in changes.items() if name in takes}},
        )
        return replace(run, **{name: value for name, value in changes.items() if name not in takes})

    def value(self, name: str) -> Any:
        takes = inspect.signature(self.function).parameters
        return self.arguments.get(name, takes[name].default if name in takes else None)

    def choices(self, name: str) -> list[Any]:
        """The values of an argument that is one of a few, from the given one on."""
        annotation = inspect.get_annotations(self.function, eval_str=True).get(name)
        values = list(get_args(annotation)) if get_origin(annotation) is Literal else []
        return values[values.index(self.value(name)) :] if self.value(name) in values else []

    def command(self, verb: str, candidate: Candidate, on: Target) -> str:
        """The command line of a candidate; what the recipe has no argument for is told behind it."""
        takes = inspect.signature(self.function).parameters
        changes = {"mesh": candidate.mesh, **dict(candidate.options)}
        changes = {
            name: value
            for name, value in changes.items()
            if name not in self.arguments or self.arguments[name] != value
        }
        words, skip = [], False
        for word in self.words:
            if skip and not word.startswith("--"):
                skip = False
                continue
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            skip = word.startswith("--") and name in changes and "=" not in word
            if not (word.startswith("--") and name in changes):
                words.append(word)
        for name, value in changes.items():
            if name in takes and value != takes[name].default:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if on.platform == "cpu":
            words += ["--cpu-devices", str(len(on.devices))]
        own = {name: value for name, value in changes.items() if name not in takes and value != 1}
        behind = (
            f"   # with Run({', '.join(f'{name}={value!r}' for name, value in own.items())}) in the recipe"
            if own
            else ""
        )
        return shlex.join(["shardwise", verb, self.target, *words]) + behind


def plan_recipe(
    target: str, args: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    parser = argparse.ArgumentParser(
        prog=f"shardwise plan {target}",
        usage=USAGE,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--on", default="")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--compile-at-most", type=int)
    parser.add_argument("--largest-batch", action="store_true")
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--no-cache", action="store_true")
    try:
        mine, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if {"-h", "--help"} & set(rest):
        print(USAGE)
    if mine.compile_at_most is not None and mine.compile_at_most < 1:
        raise ConfigError(f"--compile-at-most {mine.compile_at_most}: it must be at least 1.")
    if mine.search and mine.largest_batch:
        raise ConfigError(
            "--search takes the batch as it is, and --largest-batch the mesh: one after the other."
        )
    if mine.html is not None and not mine.html.absolute().parent.is_dir():
        raise ConfigError(
            f"--html {mine.html}: there is no directory {mine.html.absolute().parent}."
        )
    with stop_on_signals(may_exit=True) as stop:
        stop.last_words = "stopped by a signal" + (
            "."
            if mine.no_cache
            else "; what was compiled is kept, and the same command goes on there."
        )
        return _plan(target, rest, mine, options, stop)


def _plan(
    target: str, words: list[str], mine: argparse.Namespace, options: argparse.Namespace, stop: Stop
) -> tuple[dict[str, Any], int]:
    path, function = find_recipe(target)
    count = options.cpu_devices if options.cpu_devices is not None else cpu_devices_of(mine.on)
    if count is not None:
        use_cpu_devices(count)
    loaded = load_recipe(path, function)
    recipe = Recipe(
        target, loaded, bind_recipe(loaded, words, prog=f"shardwise plan {target}"), words
    )
    on = find_target(mine.on) if mine.on else local_target()
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = Console(stderr=True)
    cache = None if mine.no_cache else plan_cache()

    def compile_one(candidate: Candidate, run: Run) -> Plan:
        return plan_run(run, on, dict(candidate.options), cache)

    found = Search()
    if mine.search:
        stop.before_exit.append(lambda: _show_ranking(console, found))
        plan, candidate = _searched(
            recipe, on, compile_one, console, shown, found, mine.compile_at_most
        )
    elif mine.largest_batch:
        plan, candidate = _largest(recipe, on, compile_one, console, shown)
    else:
        plan, candidate = _planned(recipe, on, compile_one, console, shown)
    if plan is None:
        return {
            "target": on.name,
            "fits": False,
            "candidates": [entry.as_json() for entry in found.ranking],
        }, 2
    command = recipe.command("train", candidate, on)
    if mine.tokens:
        _show_cost(console, plan, mine.tokens)
    rows = [
        {**entry.as_json(), "chosen": entry.candidate == candidate and entry.plan is not None}
        for entry in found.ranking
    ]
    if mine.html is not None:
        mine.html.write_text(
            plan_page(plan, rows, f"{target} on {on.name}", command), encoding="utf-8"
        )
        console.print(f"page: {mine.html}", highlight=False, soft_wrap=True)
    if plan.fits:
        console.print(f"\n{command}", highlight=False, soft_wrap=True)
    return {"plan": plan.as_json(), "candidates": rows, "command": command}, 0 if plan.fits else 2


CompileOne = Callable[[Candidate, Run], Plan]


def _as_asked(recipe: Recipe, on: Target) -> Candidate:
    """The recipe as it stands."""
    run = make_run(recipe.function, recipe.arguments)
    text = run.mesh if isinstance(run.mesh, str) else mesh_text(run.mesh)
    candidate = Candidate(show_sizes(parse_mesh(text, len(on.devices))))
    for name, value in (
        ("accumulate", run.accumulate),
        ("remat", recipe.value("remat")),
        ("loss_chunks", recipe.value("loss_chunks")),
    ):
        candidate = candidate.with_option(name, value) if value is not None else candidate
    return candidate


def _largest(
    recipe: Recipe, on: Target, compile_one: CompileOne, console: Console, shown: Console
) -> tuple[Plan | None, Candidate]:
    """The plan with the largest batch that fits."""
    asked, given = _as_asked(recipe, on), recipe.value("batch_size")
    if not isinstance(given, int):
        raise ConfigError(
            f"{recipe.target} has no argument batch_size, which --largest-batch changes."
        )
    run = recipe.run(asked)
    shards = num_batch_shards(make_mesh(asked.mesh, on.devices), run.rules) * run.accumulate

    def compile_rows(rows: int) -> Plan:
        candidate = asked.with_option("batch_size", rows)
        with shown.status(f"compiling for {on.name}, {rows} rows a batch"):
            plan = compile_one(candidate, recipe.run(candidate))
        shown.print(
            f"{rows} rows a batch: {plan.line()}{'' if plan.fits else ', too large'}",
            highlight=False,
            soft_wrap=True,
        )
        return plan

    rows, plan = largest_batch(compile_rows, shards, given)
    if plan is None:
        console.print(f"not even {rows} rows a batch fit {on.name}.", highlight=False)
        return None, asked
    show_plan(console, plan)
    return plan, asked.with_option("batch_size", rows)


def largest_batch(
    compile_rows: Callable[[int], Plan], unit: int, first: int
) -> tuple[int, Plan | None]:
    """The largest multiple of `unit` rows whose plan fits, or None beside `unit`. Memory grows almost evenly with the rows, from the
    state alone, so a straight line through two plans, or through that and one, says where the limit will be."""
    known: dict[int, Plan] = {}
    rows, low, width = max(first // unit, 1) * unit, 0, math.inf
    while rows > 0:
        plan = known[rows] = compile_rows(rows)
        fit, large = (sorted(n for n in known if known[n].fits is good) for good in (True, False))
        low, high = fit[-1] if fit else 0, large[0] if large else math.inf
        if high - low <= unit:
            break
        ends = [low, large[0]] if fit and large else [0, *(fit or large[:1])][-2:]
        peaks = [known[n].memory.peak if n else plan.memory.state for n in ends]
        guess = ends[0] + (ends[1] - ends[0]) * (plan.limit - peaks[0]) / max(
            peaks[1] - peaks[0], 1
        )
        if fit and large and high - low > width / 2:  # not even halved by the last line
            guess = (low + high) / 2
        width = high - low
        rows = int(min(max(guess // unit * unit, low + unit), high - unit, 8 * low or high))
    return (low, known[low]) if low else (unit, None)


def _planned(
    recipe: Recipe, on: Target, compile_one: CompileOne, console: Console, shown: Console
) -> tuple[Plan | None, Candidate]:
    """The plan of the recipe as it stands; where that does not fit, what would make it fit."""
    candidate = _as_asked(recipe, on)
    with shown.status(f"compiling for {on.name}, mesh {candidate.mesh}"):
        plan = compile_one(candidate, recipe.run(candidate))
    show_plan(console, plan)
    if not plan.fits:
        _show_remedies(recipe, candidate, plan, compile_one, console, shown)
    return plan, candidate


def _searched(
    recipe: Recipe,
    on: Target,
    compile_one: CompileOne,
    console: Console,
    shown: Console,
    found: Search,
    budget: int | None,
) -> tuple[Plan | None, Candidate]:
    if on.chip is None:
        raise ConfigError(
            f"--search ranks by time, and the speed of '{on.kind}' is not known. Name a chip that is: --on v5e:2x4."
        )
    run = make_run(recipe.function, recipe.arguments)
    asked = [
        part.partition("=")[0].strip()
        for part in (run.mesh if isinstance(run.mesh, str) else mesh_text(run.mesh)).split(",")
    ]
    axes = list(dict.fromkeys([*SEARCHED, *asked]))
    options: dict[str, list[Any]] = {"accumulate": [run.accumulate * 2**k for k in range(5)]}
    if remats := recipe.choices("remat"):
        options["remat"] = remats
    meshes = find_meshes(len(on.devices), axes)
    with shown.status("counting") as status:

        def tell(found: Search, candidate: Candidate) -> None:
            best = f", best so far {found.best.candidate.mesh}" if found.best else ""
            limit = budget or math.ceil(found.num_candidates / 3)
            status.update(
                f"compiling {_name(candidate)} ({found.num_compiled + 1}, at most {limit} of {found.num_candidates}{best})"
            )

        search(recipe.run, compile_one, on, meshes, options, budget=budget, found=found, tell=tell)
    _show_ranking(console, found)
    if found.best is None or found.best.plan is None:
        states = {entry.status for entry in found.entries.values()}
        if "not compiled" in states:
            why = f"nothing that was compiled fits {on.name}; allow more than {found.num_compiled} compilations (--compile-at-most)."
        elif states == {"refused"}:
            why = f"no mesh of {len(on.devices)} devices suits this run."
        else:
            why = f"nothing fits {on.name}. Take more devices, or a smaller batch."
        console.print(why, highlight=False)
        return None, Candidate("")
    show_plan(console, found.best.plan)
    return found.best.plan, found.best.candidate


def _name(candidate: Candidate) -> str:
    return " ".join(
        [
            candidate.mesh,
            *(f"{name}={value}" for name, value in candidate.options if value not in (1, "none")),
        ]
    )


def show_plan(console: Console, plan: Plan) -> None:
    """One plan as tables."""
    m = plan.memory
    table = Table(
        title=f"{plan.num_devices} x {plan.chip}, mesh {show_sizes(plan.mesh)}: memory of each device",
        title_justify="left",
    )
    for column in (
        "parameters",
        "optimizer",
        "other",
        "batch",
        "activations, temporaries",
        "peak",
        "of",
    ):
        table.add_column(column, justify="right")
    row = (m.parameters, m.optimizer, m.other, m.batch, m.temporaries, m.peak, plan.limit)
    table.add_row(*(show_bytes(value) for value in row))
    console.print(table)
    share = m.peak / plan.limit
    console.print(
        f"[bold green]fits[/]: {share:.0%} of the memory"
        if plan.fits
        else f"[bold red]too large[/]: {share:.0%} of the memory",
        highlight=False,
    )
    if not plan.fits and plan.buffers:
        table = Table(title="largest buffers among the temporaries", title_justify="left")
        table.add_column("bytes", justify="right")
        table.add_column("shape")
        table.add_column("made by", overflow="fold")
        for buffer in plan.buffers[:8]:
            table.add_row(show_bytes(buffer.bytes), buffer.shape, buffer.name)
        console.print(table)
    if plan.traffic:
        table = Table(title="exchanges of a step, on each device", title_justify="left")
        for column, justify in (
            ("kind", "left"),
            ("axes", "left"),
            ("over", "left"),
            ("count", "right"),
            ("bytes", "right"),
        ):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        table.add_column("takes", justify="right")
        table.add_column("waited for", justify="right")
        for t in plan.traffic:
            took = (
                (f"{t.seconds * 1e3:.2f} ms", f"{t.waited * 1e3:.2f} ms")
                if plan.times
                else ("", "")
            )
            table.add_row(t.kind, t.axes, t.link, str(t.count), show_bytes(t.bytes), *took)
        console.print(table)
    model = show_count(plan.model_flops / plan.num_devices, " ")
    console.print(
        f"a step: {show_count(plan.flops, ' ')}FLOP on each device, {model}FLOP of them the model's; {show_bytes(plan.bytes)} of memory "
        f"traffic; {plan.items:,} {plan.unit} in all",
        highlight=False,
        soft_wrap=True,
    )
    if plan.times is not None:
        times = plan.times
        waits = "".join(
            f", waiting on {axes} {seconds * 1e3:.1f}"
            for axes, seconds in times.network.items()
            if seconds > 5e-5
        )
        console.print(
            f"estimate: [bold]{times.total * 1e3:.1f} ms[/] a step, bound by {times.bound} (ms: arithmetic {times.arithmetic * 1e3:.1f}, "
            f"memory {times.memory * 1e3:.1f}{waits}); {plan.items_per_second:,.0f} {plan.unit}/s"
            + (f", MFU {plan.mfu:.1%}" if plan.mfu is not None else ""),
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(
            f"no estimate of the time: the table of hardware does not know '{plan.chip}'.",
            highlight=False,
        )
    if plan.unknown_kernels:
        names = ", ".join(f"{name} ({calls} calls)" for name, calls in plan.unknown_kernels.items())
        console.print(
            f"the arithmetic of these kernels is not known, only their bytes count: {names}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"[dim]memory, FLOP, bytes and exchanges: from the compiler; times: from a model of the hardware. "
        f"Compiled in {show_seconds(plan.compile_seconds)}, with {show_bytes(plan.compile_memory)} of this machine's memory.[/]",
        highlight=False,
        soft_wrap=True,
    )


def _show_cost(console: Console, plan: Plan, tokens: float) -> None:
    if plan.items_per_second is None:
        console.print(
            f"how long {show_count(tokens)} {plan.unit} take cannot be told for '{plan.chip}'.",
            highlight=False,
        )
        return
    seconds = tokens / plan.items_per_second
    hours = seconds / 3600 * plan.num_devices
    month = math.ceil(plan.num_devices * seconds / (30 * 86400))
    console.print(
        f"{show_count(tokens)} {plan.unit}: {show_seconds(seconds)} on {plan.num_devices} chips, {hours:,.0f} chip-hours; "
        f"in 30 days with {month} of them, at the same share of their peak",
        highlight=False,
        soft_wrap=True,
    )


def _show_ranking(console: Console, found: Search) -> None:
    table = Table(
        title=f"{found.num_compiled} of {found.num_candidates} candidates compiled",
        title_justify="left",
    )
    for column, justify in (
        ("mesh", "left"),
        ("options", "left"),
        ("step", "right"),
        ("per second", "right"),
        ("MFU", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("peak", justify="right")
    table.add_column("bound by, or why not")
    refused = [entry for entry in found.ranking if entry.status == "refused"]
    for entry in (entry for entry in found.ranking if entry.status != "refused"):
        plan = entry.plan
        options = " ".join(
            f"{name}={value}" for name, value in entry.candidate.options if value not in (1, "none")
        )
        if plan is not None and plan.times is not None:
            mfu = f"{plan.mfu:.1%}" if plan.mfu is not None else ""
            numbers = (
                f"{plan.times.total * 1e3:.1f} ms",
                show_count(plan.items_per_second or 0),
                mfu,
                show_bytes(plan.memory.peak),
            )
        else:
            numbers = ("", "", "", show_bytes(plan.memory.peak) if plan is not None else "")
        why = entry.why or (plan.times.bound if plan is not None and plan.times is not None else "")
        style = None if entry.status == "compiled" else "dim"
        table.add_row(
            entry.candidate.mesh,
            options,
            *numbers,
            f"{entry.status}: {why}" if style else why,
            style=style,
        )
    console.print(table)
    if refused:
        meshes = ", ".join(f"'{_name(entry.candidate)}'" for entry in refused)
        console.print(
            f"not possible: {meshes}. The first: {refused[0].why}", highlight=False, soft_wrap=True
        )


def _show_remedies(
    recipe: Recipe,
    candidate: Candidate,
    plan: Plan,
    compile_one: CompileOne,
    console: Console,
    shown: Console,
) -> None:
    """What would make it fit, compiled: the cheapest changes first."""
    table = Table(title="what it would take instead", title_justify="left")
    for column in ("change", "saves", "peak", "", "step"):
        table.add_column(column, justify="left" if column in ("change", "") else "right")
    for label, other in _remedies(recipe, candidate):
        try:
            with shown.status(f"compiling with {label}"):
                changed = compile_one(other, recipe.run(other))
        except ConfigError:
            continue
        saved = plan.memory.peak - changed.memory.peak
        step = f"{changed.times.total * 1e3:.1f} ms" if changed.times and changed.fits else ""
        table.add_row(
            label,
            show_bytes(max(0.0, saved)),
            show_bytes(changed.memory.peak),
            "fits" if changed.fits else "too large",
            step,
        )
    console.print(table)


def _remedies(recipe: Recipe, candidate: Candidate) -> list[tuple[str, Candidate]]:
    takes = inspect.signature(recipe.function).parameters

    def label(name: str, value: Any) -> str:
        return f"--{name.replace('_', '-')} {value}" if name in takes else f"Run({name}={value!r})"

    found: list[tuple[str, Candidate]] = []
    if recipe.value("loss_chunks") == 1:
        found.append((label("loss_chunks", 8), candidate.with_option("loss_chunks", 8)))
    remats = recipe.choices("remat")[1:]
    found += [(label("remat", value), candidate.with_option("remat", value)) for value in remats]
    parts = [candidate["accumulate"] * k for k in (2, 8)]
    found += [(label("accumulate", value), candidate.with_option("accumulate", value)) for value in parts]
    sizes = {
        name: int(size) for name, size in (part.split("=") for part in candidate.mesh.split(","))
    }
    if "data" in sizes:
        moved = {
            "fsdp" if name == "data" else name: size
            for name, size in sizes.items()
            if name != "fsdp"
        }
        mesh = show_sizes({**moved, "fsdp": sizes["data"] * sizes.get("fsdp", 1)})
        found.append((label("mesh", mesh), replace(candidate, mesh=mesh)))
        if remats:
            both = f"{label('mesh', mesh)} {label('remat', remats[-1])}"
            found.append((both, replace(candidate.with_option("remat", remats[-1]), mesh=mesh)))
    return found


def main(args: list[str], shared: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run `shardwise plan`; return what `--json` writes, and the exit code."""
    target, _, _ = split_recipe("plan", args)
    return plan_recipe(target, args[1:], shared)
