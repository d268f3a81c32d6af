"""`shardwise replay`: compute steps of a run again and compare them with what it recorded."""

import argparse
import inspect
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.cli.options import command_parser
from shardwise.cli.recipes import protect_workers, recorded_recipe
from shardwise.cluster.signals import stop_on_signals
from shardwise.errors import ConfigError, ExitCode
from shardwise.rundir.files import RunFiles
from shardwise.text import Json

if TYPE_CHECKING:
    from shardwise.run import Run

# More virtual devices than this are not created because a run directory says so.
MAX_CPU_DEVICES = 256


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise replay`; return what `--json` writes, and the exit code."""
    options, recipe_args = command_parser("replay").parse_known_args(args)
    try:
        about = RunFiles(options.run).read().about
    except OSError as error:
        raise ConfigError(f"{options.run} cannot be read: {error.strerror}.") from error
    if options.recipe is None:
        raise ConfigError(_name_the_recipe(options, about))
    with stop_on_signals(may_exit=True) as stop:
        stop.last_words = "stopped by a signal; nothing was written."
        return _replay(options, recipe_args, shared, about)


def _replay(
    options: argparse.Namespace,
    recipe_args: list[str],
    shared: argparse.Namespace,
    about: Json,
) -> tuple[Json, int]:
    from rich.console import Console

    from shardwise.console import progress_bar

    console = Console(stderr=True, highlight=False)
    with console.status("importing JAX"):
        from shardwise.runtime import use_compilation_cache
        from shardwise.training.replay import replay

        run = _load(options, recipe_args, shared, about)
        use_compilation_cache()
    first, last = options.steps
    with progress_bar(console) as bar:
        task = bar.add_task("replaying", total=None, status="")

        def show(step: int, until: int) -> None:
            bar.update(task, completed=step, total=until, status=f"step {step}")

        result = replay(run, first, last, console=console, progress=show)
    print(result.text())
    is_equal = result.first_difference is None
    return result.as_json(), ExitCode.DONE if is_equal else ExitCode.NUMERICS


def _load(
    options: argparse.Namespace,
    recipe_args: list[str],
    shared: argparse.Namespace,
    about: Json,
) -> "Run":
    """Return the run of the recipe with its recorded arguments, and those of the command line."""
    from shardwise.mesh import use_cpu_devices
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    count = shared.cpu_devices or _recorded_cpu_devices(about)
    if count is not None:
        use_cpu_devices(count)
    protect_workers()
    recipe = load_recipe(*find_recipe(options.recipe))
    recorded = _recorded_arguments(about, recipe)
    prog = f"shardwise replay {options.run} --recipe {options.recipe}"
    run = make_run(recipe, bind_recipe(recipe, [*recorded, *recipe_args], prog=prog))
    return replace(run, out=options.run)


def _recorded_cpu_devices(about: Json) -> int | None:
    """Return the number of virtual devices of a run on a CPU, or None."""
    devices = about.get("devices")
    if not isinstance(devices, dict) or devices.get("kind") != "cpu":
        return None
    count = devices.get("count")
    is_valid = type(count) is int and 1 < count <= MAX_CPU_DEVICES
    return count if is_valid else None


def _recorded_arguments(about: Json, recipe: Callable[..., object]) -> list[str]:
    """Return the arguments that a run recorded as words of a command line.

    Args:
        about: the content of run.json.
        recipe: the recipe. Arguments that it does not have, or with their defaults, are omitted.
    """
    arguments = about.get("arguments")
    if not isinstance(arguments, dict):
        return []
    words: list[str] = []
    for name, parameter in inspect.signature(recipe).parameters.items():
        value = arguments.get(name)
        if not isinstance(value, str) or value == str(parameter.default):
            continue
        flag = name.replace("_", "-")
        if value in ("True", "False"):
            words.append(f"--{flag}" if value == "True" else f"--no-{flag}")
        else:
            words += [f"--{flag}", value]
    return words


def _name_the_recipe(options: argparse.Namespace, about: Json) -> str:
    first, last = options.steps
    command = shlex.join(
        [
            "shardwise",
            "replay",
            str(options.run),
            "--steps",
            f"{first}:{last}",
            "--recipe",
            recorded_recipe(about),
        ]
    )
    return (
        "a run directory does not decide what is executed. Name the recipe of the run; its "
        f"recorded arguments are used:\n  {command}"
    )
