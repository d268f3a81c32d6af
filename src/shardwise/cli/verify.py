"""`shardwise verify`: compare a recipe on meshes with the same recipe on one device."""

import argparse
import inspect
import sys

from rich.console import Console

from shardwise.cli.recipes import split_recipe
from shardwise.cluster.signals import stop_on_signals
from shardwise.console import working
from shardwise.errors import ConfigError, NumericsError
from shardwise.mesh import use_cpu_devices
from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run
from shardwise.run import Run
from shardwise.text import Json
from shardwise.verification.verify import verify

DEFAULT_CPU_DEVICES = 8


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise verify`; return what `--json` writes, and the exit code."""
    target, options, recipe_args = split_recipe("verify", args)
    with stop_on_signals(may_exit=True) as stop:
        stop.last_words = "stopped by a signal; nothing was written."
        return _verify(target, options, recipe_args, shared)


def _verify(
    target: str,
    options: argparse.Namespace,
    recipe_args: list[str],
    shared: argparse.Namespace,
) -> tuple[Json, int]:
    path, function = find_recipe(target)
    if not options.real_devices:
        count = shared.cpu_devices
        use_cpu_devices(DEFAULT_CPU_DEVICES if count is None else count)
    elif shared.cpu_devices is not None:
        raise ConfigError(
            "--real-devices and --cpu-devices exclude each other. Use one of them."
        )
    recipe = load_recipe(path, function)
    arguments = bind_recipe(recipe, recipe_args, prog=f"shardwise verify {target}")
    takes_mesh = "mesh" in inspect.signature(recipe).parameters
    meshes = options.meshes
    if meshes is None and any(
        word.partition("=")[0] == "--mesh" for word in recipe_args
    ):
        meshes = [arguments["mesh"]]

    def make(mesh: str) -> Run:
        changes = {"mesh": mesh} if takes_mesh else {}
        return make_run(recipe, {**arguments, **changes})

    progress = Console(stderr=True)
    with working(progress) as show:
        verification = verify(make, meshes, options.verify_steps, show)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(verification.table())
    for line in verification.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    answer = {"recipe": f"{path}:{function}", **verification.as_json()}
    return answer, 0 if verification.ok else NumericsError.exit_code
