"""The command line. JAX is imported only when a recipe has been found."""

import argparse
import gc
import importlib
import io
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.resume import ACCEPTABLE
from shardwise.cluster.signals import stop_on_signals
from shardwise.errors import ConfigError, Parser, ShardwiseError
from shardwise.files.durable import check_writable
from shardwise.files.lock import check_unlocked
from shardwise.runtime import has_accelerator, keep_freed_memory
from shardwise.text import did_you_mean
from shardwise.trackers.base import TRACKERS, make_trackers

if TYPE_CHECKING:
    from shardwise.cluster.watch import Watch
    from shardwise.trackers.base import Tracker

BEGAN = time.monotonic()

HELP = """\
shardwise trains any Flax NNX model on any device mesh.

  shardwise train RECIPE [arguments of the recipe]      train, or go on where the run directory stands
  shardwise explain RECIPE [arguments of the recipe]    what the optimizer will do to each parameter, how each leaf is laid
                                                        out and why, and what is probably not meant
  shardwise plan RECIPE [--on v5e:4x4] [--search] ...   whether it fits, on which mesh, how fast, on hardware you need not have
  shardwise verify RECIPE [arguments of the recipe]     whether it computes on meshes what it computes on one device
  shardwise launch --processes 2 -- train RECIPE ...    the same on several processes of this machine; or a job file for a cluster
  shardwise data prepare | show                         text to token files; statistics and examples of any batch
  shardwise checkpoint ls | show | diff | verify | export
  shardwise report RUN [RUN ...] [--watch]              what a run did, as one page; several side by side; while it goes on
  shardwise sample RUN --prompt TEXT                    text from a trained or published model
  shardwise sweep RECIPE --lr 1e-4 3e-4 --seed 0 1 ...  the recipe for every combination, one after the other, and a page to compare
  shardwise doctor [RUN]                                whether training can work here, or how a run stands, and what to do

RECIPE is file.py or file.py:function; `shardwise train RECIPE --help` shows its arguments.

before or after the verb:
  --cpu-devices N    use the CPU as N virtual devices
  --json FILE        write the answer for programs, too
  --version          the version, and nothing else
  --completion SHELL a script that makes bash, zsh or fish complete commands: eval "$(shardwise --completion bash)"
  --plot FILE        explain: a picture of the learning rate of every group
  --accept WHAT      train: resume although this has changed: lr, data, optimizer, seed or compute_dtype
  --force-unlock     train: take over a directory that a run on another machine has not left in order
  --track NAME       train: also tell tensorboard, wandb, mlflow or trackio; may be given several times
  --profile 10:15    train: trace these steps, for Perfetto or TensorBoard
  --no-plan          train: begin even if the step seems to need more memory than there is
  --watchdog S       train: end with exit code 6 after S seconds without progress (300 with several processes, 0: never)
  --coordinator HOST:PORT --num-processes N --process-id I
                     train: this is process I of N; under Slurm, Open MPI, Kubernetes and on Cloud TPUs JAX finds that out
  --bind ADDRESS     train: where process 0 listens for the others, if not on the address of the coordinator
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return error.exit_code


def entry() -> None:
    """The command. A thread that still waits, for data or for other processes, must not be met by Python's end: it would abort."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except Exception:  # a mistake of ours, or of a recipe, with its traceback
        traceback.print_exc()
        code = 1
    if any(thread.name.startswith("shardwise-") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _main(argv: list[str]) -> int:
    if argv[:1] == ["launch"]:
        from shardwise.cluster.launch import main as launch

        return launch(argv[1:])
    if argv[:1] == ["--completion"]:
        from shardwise.cli.completion import completion

        print(completion(*(argv[1:3] or [""])), end="")
        return 0
    parser = Parser(prog="shardwise", add_help=False, allow_abbrev=False)
    parser.add_argument("--cpu-devices", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--accept", action="append", default=[], choices=list(ACCEPTABLE))
    parser.add_argument("--force-unlock", action="store_true")
    parser.add_argument("--track", action="append", default=[], choices=list(TRACKERS))
    parser.add_argument("--profile", type=_window, metavar="FIRST:LAST")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--watchdog", type=float)
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--bind")
    options, rest = parser.parse_known_args(argv)
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if rest else 2
    verb, *args = rest
    if verb == "--version":
        from importlib.metadata import version

        print(f"shardwise {version('shardwise')}")
        return 0
    if verb in TOOLS:
        return _answered(importlib.import_module(TOOLS[verb]).main(args, options), options)
    if verb not in VERBS:
        commands = [*VERBS, "launch", *TOOLS]
        inner = next((f"{tool} {verb}" for tool, verbs in INNER.items() if verb in verbs), None)
        hint = f" Did you mean '{inner}'?" if inner else did_you_mean(verb, commands)
        raise ConfigError(f"there is no command '{verb}'; there are {', '.join(commands)}.{hint}")
    if not args or args[0].startswith("-"):
        if {"-h", "--help"} & set(args):
            module, name = VERB_HELP.get(verb, (__name__, "HELP"))
            print(getattr(importlib.import_module(module), name), end="")
            return 0
        raise ConfigError(f"'shardwise {verb}' needs a recipe: shardwise {verb} file.py")
    return _answered(VERBS[verb](args[0], args[1:], options), options)


def _window(text: str) -> tuple[int, int]:
    """ "10:15" are the steps 10 to 15, "10" is one step."""
    first, _, last = text.partition(":")
    if not (
        first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first)
    ):
        raise ConfigError(
            f"--profile {text}: give the first and the last step to trace, such as 10:15."
        )
    return int(first), int(last or first)


def _answered(found: tuple[dict[str, Any], int], options: argparse.Namespace) -> int:
    """Every command gives what it found and its exit code; --json is for all of them, and written by one process."""
    answer, code = found
    if options.json is not None and _seems_first(options):
        options.json.write_text(json.dumps(_finite(answer), indent=2, default=str) + os.linesep)
    return code


def _finite(value: Any) -> Any:
    """The same without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _load(
    verb: str, target: str, args: list[str], options: argparse.Namespace, is_first: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The run that the recipe gives for these arguments, and what run.json shall say of it."""
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    path, function = find_recipe(target)
    if options.cpu_devices is not None:
        from shardwise.mesh import use_cpu_devices

        use_cpu_devices(options.cpu_devices)
    recipe = load_recipe(path, function)
    with ExitStack() as stack:
        if not is_first:  # one process says what is wrong with the arguments
            stack.enter_context(redirect_stdout(io.StringIO()))
            stack.enter_context(redirect_stderr(io.StringIO()))
        arguments = bind_recipe(recipe, args, prog=f"shardwise {verb} {target}")
    described = {
        "recipe": f"{path}:{function}",
        "arguments": {k: str(v) for k, v in arguments.items()},
        "source": path.read_text(),
    }
    return make_run(recipe, arguments), described


def train(target: str, args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from shardwise.recipe import find_recipe

    with stop_on_signals(may_exit=True) as stop:
        find_recipe(target)
        trackers = make_trackers(options.track)
        given = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        given.add_argument("--out", type=Path, nargs="?")
        if (out := given.parse_known_args(args)[0].out) is not None and _seems_first(options):
            check_writable(out)  # what is wrong with it can be said before JAX is imported
            check_unlocked(out)
        with _without_collection():
            if (
                options.cpu_devices
                or os.environ.get("JAX_PLATFORMS") == "cpu"
                or not has_accelerator()
            ):
                keep_freed_memory()
            importlib.import_module("shardwise.training.fit")
            from shardwise.cluster.group import start_group
            from shardwise.cluster.watch import Watch

        group = start_group(
            options.coordinator, options.num_processes, options.process_id, bind=options.bind
        )
        with Watch(group, stop, options.watchdog, BEGAN) as watch:
            return _train(target, args, options, watch, trackers)


@contextmanager
def _without_collection() -> Iterator[None]:
    """For imports: what they make is no garbage. Looking through it again and again takes an eighth of their time, and every full look
    later on would go through all of it once more."""
    is_fresh = "jax" not in sys.modules  # elsewhere there may be garbage already
    if is_fresh:
        gc.disable()
    try:
        yield
    finally:
        if is_fresh:
            gc.freeze()
            gc.enable()


def _seems_first(options: argparse.Namespace) -> bool:
    """Whether this is the first process of its run, or the only one, as far as that can be told without JAX."""
    ranks = [
        os.environ[name]
        for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
        if name in os.environ
    ]
    return options.process_id == 0 if options.process_id is not None else set(ranks) <= {"0"}


def _train(
    target: str,
    args: list[str],
    options: argparse.Namespace,
    watch: "Watch",
    trackers: tuple["Tracker", ...],
) -> tuple[dict[str, Any], int]:
    run, described = _load("train", target, args, options, watch.group.is_first)
    _quiet_orbax()
    from shardwise.runtime import use_compilation_cache
    from shardwise.training.fit import fit

    if (why := use_compilation_cache()) and watch.group.is_first:
        print(f"shardwise: {why}.", file=sys.stderr)

    if run.out is None:
        stem = Path(target.partition(":")[0]).stem
        started = os.environ.get("SHARDWISE_STARTED") or time.strftime("%Y%m%d-%H%M%S")
        run = replace(run, out=Path("runs") / watch.group.share("out", f"{stem}-{started}"))
    run = replace(run, accept=(*run.accept, *options.accept), trackers=(*run.trackers, *trackers))
    if options.profile is not None:
        run = replace(run, profile=options.profile)
    result = fit(
        run,
        describe=described,
        watch=watch,
        force_unlock=options.force_unlock,
        plan=not options.no_plan,
    )
    answer = {
        "out": str(run.out),
        "metrics": result.metrics,
        "eval": result.eval_metrics,
        "seconds": result.seconds,
    }
    if result.stopped_early is not None:
        answer["stopped_early"] = result.stopped_early
    if not watch.group.is_first:
        return answer, 0
    devices = f" --cpu-devices {options.cpu_devices}" if options.cpu_devices else ""
    kept = [
        word
        for i, word in enumerate(args)
        if "--steps" not in (word.partition("=")[0], args[i - 1] if i else "")
    ]
    again = " ".join([target, *kept, *([] if "--out" in args else ["--out", str(run.out)])])
    command = (
        "shardwise"
        if shutil.which("shardwise") or Path(sys.argv[0]).name != "shardwise"
        else sys.argv[0]
    )
    if watch.group.count == 1:
        from shardwise.cli.sample import can_sample

        sample = (
            f'  {command} sample {run.out} --prompt "..."   # text from it\n'
            if can_sample(Path(str(run.out)))
            else ""
        )
        print(
            f"next:\n  {command} report {run.out}   # one page: curves, where the time went, the layout\n{sample}"
            f"  {command} train {again} --steps {2 * run.steps} --accept lr{devices}   # go on from here, with a longer schedule\n"
            f"  {command} explain {target} --mesh data=2,fsdp=4 --cpu-devices 8   # another layout, before paying for it",
            file=sys.stderr,
        )
    return answer, 0


def _quiet_orbax() -> None:
    """A save that fails is told in one line by us; Orbax and TensorStore would add hundreds (the loop they wait in is closed)."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook = hook


def explain(
    target: str, args: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    run, _ = _load("explain", target, args, options)
    from rich.console import Console

    from shardwise.explanation.explain import explain_state
    from shardwise.mesh import make_mesh, mesh_text
    from shardwise.sharding import placement_table
    from shardwise.state import abstract_state

    mesh = make_mesh(run.mesh)
    spec = abstract_state(run.model, run.optimizer, mesh, run.rules)
    console = Console(width=None if sys.stdout.isatty() else 160)
    parts = {"parameters": spec.params, "other variables": spec.other, "optimizer": spec.opt_state}
    for title, placements in parts.items():
        if placements:
            console.print(
                placement_table(placements.values(), f"{title} on mesh {mesh_text(mesh)}")
            )
    rows = [
        {
            "kind": kind,
            "path": p.path,
            "shape": p.shape,
            "dtype": str(p.dtype),
            "spec": list(p.spec),
            "why": p.reason,
            "bytes": p.bytes_per_device,
        }
        for kind, placements in parts.items()
        for p in placements.values()
    ]
    with console.status(f"measuring the optimizer over {run.steps} steps"):
        explanation = explain_state(spec, run.steps)
    console.print(explanation.table())
    for line in explanation.lines():
        console.print(line, highlight=False, soft_wrap=True)
    if options.plot is not None:
        explanation.plot(options.plot)
        console.print(f"learning rates: {options.plot}", highlight=False, soft_wrap=True)
    return {"mesh": dict(mesh.shape), "leaves": rows, "optimizer": explanation.as_json()}, 0


def verify(target: str, args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from shardwise.cli.verify import verify_recipe

    return verify_recipe(target, args, options)


def plan(target: str, args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from shardwise.cli.plan import plan_recipe

    return plan_recipe(target, args, options)


VERB_HELP = {"plan": ("shardwise.cli.plan", "USAGE"), "verify": ("shardwise.cli.verify", "HELP")}
INNER = {
    "checkpoint": ("ls", "show", "diff", "export"),
    "data": ("prepare",),
}  # asked for without the first word
VERBS = {"train": train, "plan": plan, "verify": verify, "explain": explain}
TOOLS = {
    "data": "shardwise.cli.data",
    "checkpoint": "shardwise.cli.checkpoint",
    "sample": "shardwise.cli.sample",
    "report": "shardwise.cli.report",
    "sweep": "shardwise.cli.sweep",
    "doctor": "shardwise.doctor.doctor",
}
