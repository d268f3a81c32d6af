"""`shardwise scale`: hyperparameters that transfer across model sizes."""

import argparse
import inspect
import itertools
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
from rich.console import Console

from shardwise.cli.recipes import split_recipe
from shardwise.console import working
from shardwise.errors import ConfigError, NumericsError
from shardwise.files.durable import check_writable
from shardwise.files.lock import lock_directory
from shardwise.mesh import use_cpu_devices
from shardwise.recipe import Recipe, bind_recipe, find_recipe, load_recipe, make_run
from shardwise.run import Run
from shardwise.scaling.check import LIMIT, Check, check_coordinates, plot_checks
from shardwise.scaling.grid import TransferGrid
from shardwise.scaling.price import find_price
from shardwise.scaling.roles import SETTABLE, Role, find_roles
from shardwise.scaling.scaled import (
    Settings,
    find_scaling,
    scale_recipe,
    settings_of,
)
from shardwise.scaling.size import Size
from shardwise.scaling.trace import training_flops
from shardwise.scaling.transfer import (
    Best,
    best_rates,
    loss_table,
    parse_rates,
    plot_rates,
    predict,
    relative_error,
)
from shardwise.sweep.grid import option_of
from shardwise.text import Json, did_you_mean


@dataclass(frozen=True)
class _Task:
    """What the command line asks for.

    Attributes:
        target: the recipe as it was named.
        path: its file.
        function: its function.
        recipe: the recipe without scaling.
        settings: how it is scaled.
        arguments: its other arguments.
        words: the same as words of a command line.
        options: the options of the command.
        sizes: the widths.
    """

    target: str
    path: Path
    function: str
    recipe: Recipe
    settings: Settings
    arguments: Json
    words: list[str]
    options: argparse.Namespace
    sizes: list[int]

    @property
    def out(self) -> Path:
        """The directory of runs and pictures."""
        return self.options.out or Path("scales") / self.path.stem

    @property
    def scaled_recipe(self) -> Recipe:
        """The recipe, scaled unless `--standard` is given."""
        if self.options.standard:
            return self.recipe
        return scale_recipe(self.recipe, self.settings)  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        """The depth of the models."""
        return self.settings.size_of(self._bound()).depth

    def _bound(self) -> Json:
        signature = inspect.signature(self.recipe)
        width = {self.settings.width_name: self.sizes[-1]}
        bound = signature.bind(**{**self.arguments, **width})
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def seed(self) -> int:
        """The value of the argument `seed`.

        Raises:
            ConfigError: if the recipe has none.
        """
        seed = self._bound().get("seed")
        if not isinstance(seed, int):
            raise ConfigError(
                "--transfer with several --seeds needs an integer argument 'seed' of the recipe. "
                "Add `seed: int = 0` to it and pass it on to `Run(seed=seed)`, or remove --seeds."
            )
        return seed

    def run_at(self, recipe: Recipe, size: Size, **changes: object) -> Run:
        """Return the run of a recipe at a size."""
        sizes = self.settings.arguments_of(size)
        return make_run(recipe, {**self.arguments, **sizes, **changes})


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise scale`; return what `--json` writes, and the exit code."""
    target, options, words = split_recipe("scale", args)
    if options.check and options.transfer:
        raise ConfigError("--check and --transfer are two commands. Use one of them.")
    if options.transfer:
        # The accelerator is for the runs, which are other processes.
        jax.config.update("jax_platforms", "cpu")
        return _transfer(_read_task(target, options, words), shared)
    if shared.cpu_devices is not None:
        use_cpu_devices(shared.cpu_devices)
    task = _read_task(target, options, words)
    return _check(task) if options.check else _show_roles(task)


def _read_task(target: str, options: argparse.Namespace, words: list[str]) -> _Task:
    path, function = find_recipe(target)
    recipe = load_recipe(path, function)
    known = settings_of(recipe)
    recipe = getattr(recipe, "__wrapped__", recipe)
    settings = _read_settings(known, options)
    placeholders = _placeholders(recipe, settings, options, words)
    prog = f"shardwise scale {target}"
    arguments = bind_recipe(recipe, [*words, *placeholders], prog=prog)
    given = sorted(set(settings.arguments_of(settings.base)) & set(arguments))
    if settings.width_name in given and _is_given(settings.width_name, words):
        raise ConfigError(
            f"--{settings.width_name} is the argument that --sizes varies. Give its values there."
        )
    base = settings.base.width
    sizes = options.sizes or [base, 2 * base, 4 * base]
    # Refuses arguments that the recipe does not have.
    scale_recipe(recipe, settings)  # type: ignore[arg-type]
    arguments.pop(settings.width_name, None)
    return _Task(
        target=target,
        path=path,
        function=function,
        recipe=recipe,
        settings=settings,
        arguments=arguments,
        words=words,
        options=options,
        sizes=sizes,
    )


def _placeholders(
    recipe: Recipe, settings: Settings, options: argparse.Namespace, words: list[str]
) -> list[str]:
    """Return words for required arguments of the recipe that --sizes and --rates set."""
    varied = {settings.width_name: str(settings.base.width)}
    if options.transfer:
        varied[options.rate_name] = "1"
    parameters = inspect.signature(recipe).parameters
    return [
        word
        for name, value in varied.items()
        if name in parameters
        and parameters[name].default is inspect.Parameter.empty
        and not _is_given(name, words)
        for word in (option_of(name), value)
    ]


def _is_given(name: str, words: list[str]) -> bool:
    return any(word.partition("=")[0] == option_of(name) for word in words)


def _read_settings(known: Settings | None, options: argparse.Namespace) -> Settings:
    """Return how the recipe is scaled: options first, then its decorator."""
    smallest = None if options.sizes is None else options.sizes[0]
    if known is None:
        width = options.base or smallest
        if width is None:
            raise ConfigError(
                "the base width is unknown. Use --sizes 64,128,256 or --base 64, or decorate the "
                "recipe with @shardwise.scaled(width=64)."
            )
        known = Settings(Size(width))
    base = known.base
    if options.base is not None:
        base = replace(base, width=options.base)
    if options.base_depth is not None:
        base = replace(base, depth=options.base_depth)
    depth_name = options.vary_depth or known.depth_name
    if (options.vary_depth is None) != (options.base_depth is None):
        raise ConfigError("--vary-depth and --base-depth belong together. Give both.")
    given = _read_roles(options.role)
    # The first pattern that matches decides.
    roles = {**given, **known.roles, **given}
    width_name = options.vary or known.width_name
    return Settings(
        base=base, width_name=width_name, depth_name=depth_name, roles=roles
    )


def _read_roles(words: list[str]) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for word in words:
        path, _, name = word.rpartition("=")
        found = next((role for role in SETTABLE if role == name), None)
        if not path or found is None:
            raise ConfigError(
                f"--role '{word}' is not PATH=ROLE with one of {', '.join(SETTABLE)}."
                f"{did_you_mean(name, SETTABLE)}"
            )
        roles[path] = found
    return roles


def _console() -> Console:
    width = None if sys.stdout.isatty() else 180
    return Console(width=width, markup=False, highlight=False)


def _show_roles(task: _Task) -> tuple[Json, int]:
    """Print the role of each parameter, and how it is scaled to the largest size."""
    progress = Console(stderr=True)
    size = Size(task.sizes[-1], task.depth)
    with working(progress, "tracing the model and measuring the optimizer"):
        scaling = find_scaling(
            lambda size: task.run_at(task.recipe, size),
            size,
            task.settings.base,
            task.settings.roles,
        )
    console = _console()
    console.print(scaling.table())
    for warning in scaling.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    coupled = sorted(set(scaling.parameters) - scaling.separable)
    if coupled:
        console.print(
            f"weight decay of {len(coupled)} parameters is scaled together with their updates, "
            f"because the optimizer does not keep it apart: {', '.join(coupled[:3])}"
            f"{' ...' if len(coupled) > 3 else ''}",
            soft_wrap=True,
        )
    return {"recipe": _name(task), **scaling.as_json()}, 0


def _name(task: _Task) -> str:
    return f"{task.path}:{task.function}"


# The coordinate check


def _check(task: _Task) -> tuple[Json, int]:
    check_writable(task.out)
    task.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    recipe = task.scaled_recipe
    title = "standard" if task.options.standard else "scaled"
    steps = task.options.check_steps
    changes: dict[str, object] = {}
    parameters = inspect.signature(task.recipe).parameters
    if "steps" in parameters and not _is_given("steps", task.words):
        # The schedule of the learning rate then covers the steps of the check.
        changes["steps"] = steps
    progress = Console(stderr=True)

    def run_at(width: int) -> Run:
        return task.run_at(recipe, Size(width, task.depth), **changes)

    with working(progress) as report:
        arguments = (run_at, task.sizes, steps, task.options.seeds or 3, title, report)
        check = check_coordinates(*arguments, _outputs(task))
    picture = task.out / f"coordinate_check_{title}.png"
    plot_checks([check], picture)
    _print_check(check, picture)
    code = 0 if check.is_ok else NumericsError.exit_code
    return {"recipe": _name(task), "picture": str(picture), **check.as_json()}, code


def _outputs(task: _Task) -> set[str]:
    """Return the parameters whose results are outputs of the model."""

    def run_at(width: int) -> Run:
        return task.run_at(task.recipe, Size(width, task.depth))

    roles = find_roles(run_at, task.settings.base.width, task.settings.roles)
    return {
        path
        for path, parameter in roles.parameters.items()
        if parameter.role in ("output", "tied")
    }


def _print_check(check: Check, picture: Path) -> None:
    console = _console()
    console.print(check.table())
    verdict = "all slopes are within" if check.is_ok else "some slopes are outside of"
    limits = f"±{LIMIT:g} (outputs may shrink)"
    console.print(f"{verdict} {limits}; worst {check.worst:+.3f}")
    if check.may_be_noise:
        console.print(
            "Changes may shrink because a part of the updates of narrow models is noise. Check "
            "larger widths, or use a smaller batch."
        )
    console.print(f"picture: {picture}", soft_wrap=True)


# The transfer of learning rates


def _transfer(task: _Task, shared: argparse.Namespace) -> tuple[Json, int]:
    options = task.options
    if options.rates is None:
        raise ConfigError("--transfer needs --rates, for example --rates 1e-3:1e-1:7.")
    rates = parse_rates(options.rates)
    num_seeds = options.seeds or 1
    first_seed = task.seed if num_seeds > 1 else 0
    kind = "standard" if options.standard else "scaled"
    grid = _grid(task, task.out / kind, shared)
    check_writable(grid.out)
    grid.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_directory(grid.out):
        grid.write_recipe()
        losses, code = grid.train(task.sizes, rates)
        best = best_rates(losses)
        if num_seeds > 1 and best and code == 0:
            best, code = grid.train_seeds(best, first_seed, num_seeds)
    console = _console()
    console.print(loss_table(losses, best, f"loss, {kind}"))
    answer: Json = {
        "recipe": _name(task),
        "out": str(grid.out),
        "losses": {
            str(width): {f"{rate:g}": loss for rate, loss in by_rate.items()}
            for width, by_rate in losses.items()
        },
        "best": [vars(found) for found in best],
    }
    if not best:
        console.print("no run has finished with a finite loss")
        return answer, code or NumericsError.exit_code
    picture = task.out / f"transfer_{kind}.png"
    plot_rates(losses, picture, f"{task.path.stem}, {kind}")
    answer["picture"] = str(picture)
    _print_best(console, best, num_seeds, picture)
    if code == 0:
        answer |= _predictions(task, console, best)
        if options.to is not None:
            answer |= _large_run(task, console, best, grid)
    return answer, code


def _grid(task: _Task, out: Path, shared: argparse.Namespace) -> TransferGrid:
    devices = shared.cpu_devices
    return TransferGrid(
        recipe=task.recipe,
        path=task.path,
        function=task.function,
        settings=task.settings,
        is_standard=task.options.standard,
        rate_name=task.options.rate_name,
        words=task.words,
        options=[] if devices is None else ["--cpu-devices", str(devices)],
        out=out,
        retry=task.options.retry,
        jobs=task.options.jobs,
    )


def _print_best(
    console: Console, best: list[Best], num_seeds: int, picture: Path
) -> None:
    rates = [found.rate for found in best]
    spread = max(rates) / min(rates)
    console.print(
        f"the best rates differ by a factor of {spread:.3g}; picture: {picture}"
    )
    for narrow, wide in itertools.pairwise(best):
        if wide.loss > narrow.loss:
            console.print(
                f"width {wide.width} is worse than {narrow.width}: "
                f"{wide.loss:.4f} instead of {narrow.loss:.4f}"
            )
    edges = [str(found.width) for found in best if found.is_edge]
    if edges:
        console.print(
            f"the best rate of width {', '.join(edges)} is the smallest or the largest of --rates. "
            "Try more rates.",
            soft_wrap=True,
        )
    for found in best:
        if num_seeds > 1 and len(found.seeds) < num_seeds:
            console.print(
                f"only {len(found.seeds)} of {num_seeds} seeds of width {found.width} have "
                f"finished with a finite loss at its best rate"
            )


def _predictions(task: _Task, console: Console, best: list[Best]) -> Json:
    """Print the predicted losses: of the largest run from the others, and of `--to`."""
    widths = [found.width for found in best]
    if task.options.to is not None:
        widths.append(task.options.to)
    compute = {
        width: training_flops(task.run_at(task.recipe, Size(width, task.depth)))
        for width in widths
    }
    answer: Json = {"flops": {str(width): value for width, value in compute.items()}}
    known = [compute[found.width] for found in best]
    losses = [found.loss for found in best]
    error = relative_error(best)
    if len(best) > 3:
        held_out = predict(known[:-1], losses[:-1], known[-1], error)
        difference = held_out.loss / losses[-1] - 1
        console.print(
            f"width {best[-1].width} from the narrower ones: predicted {held_out.loss:.4f} "
            f"({held_out.low:.4f} to {held_out.high:.4f}), measured {losses[-1]:.4f}: "
            f"{difference:+.2%}",
            soft_wrap=True,
        )
        answer["held_out"] = {"predicted": held_out.loss, "error": difference}
    if task.options.to is not None and len(best) > 2:
        found = predict(known, losses, compute[task.options.to], error)
        console.print(
            f"loss = {found.law.limit:.4g} + {found.law.factor:.4g} * (C / "
            f"{found.law.unit:.3g} FLOP)^-{found.law.exponent:.2f}; width {task.options.to}: "
            f"{found.loss:.4f} ({found.low:.4f} to {found.high:.4f})",
            soft_wrap=True,
        )
        answer["prediction"] = {
            "loss": found.loss,
            "low": found.low,
            "high": found.high,
            "law": vars(found.law),
        }
    return answer


def _large_run(
    task: _Task, console: Console, best: list[Best], grid: TransferGrid
) -> Json:
    """Print the learning rate and the price of the run of `--to`."""
    width, rate = task.options.to, best[-1].rate
    console.print(f"learning rate for width {width}: {rate:g}")
    words = [option_of(task.settings.width_name), str(width)]
    words += [option_of(task.options.rate_name), f"{rate:g}", *task.words]
    words += ["--on", task.options.on] if task.options.on else grid.options
    steps = task.run_at(task.recipe, Size(width, task.depth)).steps
    price = find_price(grid.target, words, steps)
    if isinstance(price, str):
        console.print(f"no price: {price}")
        return {"rate": rate}
    console.print(f"price of width {width}: {price}")
    return {"rate": rate, "price": asdict(price)}
