"""`shardwise verify`: the recipe on one device and on meshes, as a table, a first difference, and an exit code."""

import argparse
import inspect
import sys
from typing import Any

from rich.console import Console

from shardwise.cli.recipes import split_recipe
from shardwise.cluster.signals import stop_on_signals
from shardwise.errors import ConfigError, NumericsError, Parser
from shardwise.mesh import use_cpu_devices
from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run
from shardwise.run import Run
from shardwise.verification.verify import verify

HELP = """\
shardwise verify RECIPE [arguments of the recipe]
  --meshes MESH ...   such as data=8 data=4,model=2; when not said, a handful that the model can use
  --verify-steps N    how many steps to compare; 3 when not said
  --cpu-devices N     virtual devices; 8 when not said
  --real-devices      the devices of this machine
Exit code 0 when all agree, 5 when one differs.

"""


def verify_recipe(
    target: str, args: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """Runs `shardwise verify TARGET ARGS`; returns what it found and the exit code."""
    parser = Parser(help_text=HELP, prog="shardwise verify", add_help=False, allow_abbrev=False)
    parser.add_argument("--meshes", nargs="+")
    parser.add_argument("--verify-steps", type=int, default=3)
    parser.add_argument("--real-devices", action="store_true")
    said, rest = parser.parse_known_args(args)
    if {"-h", "--help"} & set(rest):
        print(HELP)
    with stop_on_signals(may_exit=True) as stop:
        stop.last_words = "stopped by a signal; nothing was written."
        return _verify(target, rest, said, options)


def _verify(
    target: str, rest: list[str], said: argparse.Namespace, options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    path, function = find_recipe(target)
    if not said.real_devices:
        use_cpu_devices(8 if options.cpu_devices is None else options.cpu_devices)
    elif options.cpu_devices is not None:
        raise ConfigError("--real-devices and --cpu-devices exclude each other.")
    recipe = load_recipe(path, function)
    arguments = bind_recipe(recipe, rest, prog=f"shardwise verify {target}")
    knows_mesh = "mesh" in inspect.signature(recipe).parameters
    meshes = said.meshes
    if meshes is None and any(word.partition("=")[0] == "--mesh" for word in rest):
        meshes = [arguments["mesh"]]

    def make(mesh: str) -> Run:
        return make_run(recipe, {**arguments, "mesh": mesh} if knows_mesh else arguments)

    console = Console(stderr=True)
    with console.status("") as status:
        tell = (
            status.update
            if console.is_terminal
            else lambda text: console.print(text, highlight=False)
        )
        found = verify(make, meshes, said.verify_steps, tell)
    out = Console(width=None if sys.stdout.isatty() else 160)
    out.print(found.table())
    for line in found.lines():
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    return {
        "recipe": f"{path}:{function}",
        **found.as_json(),
    }, 0 if found.ok else NumericsError.exit_code


def main(args: list[str], shared: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run `shardwise verify`; return what `--json` writes, and the exit code."""
    target, _, _ = split_recipe("verify", args)
    return verify_recipe(target, args[1:], shared)
