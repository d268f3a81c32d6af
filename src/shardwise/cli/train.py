"""`shardwise train`: train the run of a recipe, or resume it."""

import argparse
import gc
import importlib
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.dispatch import is_first_process
from shardwise.cli.recipes import load_run, split_recipe
from shardwise.cluster.signals import stop_on_signals
from shardwise.files.durable import check_writable
from shardwise.files.lock import check_unlocked
from shardwise.files.paths import run_path
from shardwise.runtime import has_accelerator, keep_freed_memory
from shardwise.text import Json
from shardwise.trackers.base import make_trackers

if TYPE_CHECKING:
    from shardwise.cluster.watch import Watch
    from shardwise.run import Run
    from shardwise.trackers.base import Tracker

# Full garbage collections happen after 700 * 10 * FULL_COLLECTION_EVERY new objects. Python's 10
# means about 20 of them while a step is traced, a twentieth of the time until the first step.
FULL_COLLECTION_EVERY = 100

# When the process began, for the time accounting of the run.
STARTED = time.monotonic()


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise train`; return what `--json` writes, and the exit code."""
    target, _, recipe_args = split_recipe("train", args)
    # The signal handlers come first: a compilation or an import may take minutes.
    with stop_on_signals(may_exit=True) as stop:
        from shardwise.recipe import find_recipe

        # Mistakes that can be seen without JAX are reported before it is imported.
        find_recipe(target)
        trackers = make_trackers(shared.track)
        _check_out(recipe_args, shared)
        with _no_garbage_collection():
            # Before JAX starts its threads.
            if _computes_on_cpu(shared):
                keep_freed_memory()
            importlib.import_module("shardwise.training.fit")
            from shardwise.cluster.group import start_group
            from shardwise.cluster.watch import Watch

        group = start_group(
            shared.coordinator,
            shared.num_processes,
            shared.process_id,
            bind=shared.bind,
        )
        with Watch(group, stop, shared.watchdog, STARTED) as watch:
            return _train(target, recipe_args, shared, watch, trackers), 0


def _check_out(recipe_args: list[str], shared: argparse.Namespace) -> None:
    """Refuse a run directory that cannot be used, if the command line names one."""
    out = find_out(recipe_args)
    if out is not None and is_first_process(shared):
        check_writable(out)
        check_unlocked(out)


def find_out(recipe_args: list[str]) -> Path | None:
    """Return the run directory that the arguments of a recipe name, or None.

    Raises:
        ConfigError: if it is empty, a URL, or not UTF-8.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--out", type=run_path, nargs="?")
    out: Path | None = parser.parse_known_args(recipe_args)[0].out
    return out


def _computes_on_cpu(shared: argparse.Namespace) -> bool:
    asked_for_cpu = shared.cpu_devices or os.environ.get("JAX_PLATFORMS") == "cpu"
    return bool(asked_for_cpu) or not has_accelerator()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection during imports, and make later collections cheaper.

    Imports create no garbage. Collections take an eighth of the time that importing JAX takes, and
    every later full collection would visit all of these objects again.
    """
    # If JAX is imported already, there may be garbage.
    is_fresh = "jax" not in sys.modules
    if is_fresh:
        gc.disable()
    try:
        yield
    finally:
        if is_fresh:
            gc.freeze()
            gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_EVERY)
            gc.enable()


def _train(
    target: str,
    recipe_args: list[str],
    shared: argparse.Namespace,
    watch: "Watch",
    trackers: tuple["Tracker", ...],
) -> Json:
    is_first = watch.group.is_first
    run, description = load_run(
        "train", target, recipe_args, shared, quiet=not is_first
    )
    _silence_orbax()
    from shardwise.runtime import use_compilation_cache
    from shardwise.training.fit import fit

    problem = use_compilation_cache()
    if problem and is_first:
        print(f"shardwise: {problem}.", file=sys.stderr)
    if run.out is None:
        run = replace(run, out=_default_out(target, watch))
    result = fit(
        _with_options(run, shared, trackers),
        describe=description,
        watch=watch,
        force_unlock=shared.force_unlock,
        plan=not shared.no_plan,
    )
    answer: Json = {
        "out": str(run.out),
        "metrics": result.metrics,
        "eval": result.eval_metrics,
        "seconds": result.seconds,
    }
    if result.stopped_early is not None:
        answer["stopped_early"] = result.stopped_early
    if watch.group.count == 1:
        print(_next_steps(target, recipe_args, shared, run), file=sys.stderr)
    return answer


def _with_options(
    run: "Run", shared: argparse.Namespace, trackers: tuple["Tracker", ...]
) -> "Run":
    """Return the run of a recipe with the options of the command line."""
    return replace(
        run,
        accept=(*run.accept, *shared.accept),
        trackers=(*run.trackers, *trackers),
        profile=shared.profile or run.profile,
        strict=shared.strict or run.strict,
        audit_every=shared.audit_every or run.audit_every,
        deterministic=run.deterministic and not shared.no_deterministic,
    )


def _default_out(target: str, watch: "Watch") -> Path:
    """Return `runs/RECIPE-TIME`, the same for all processes."""
    recipe = Path(target.partition(":")[0]).stem
    started = os.environ.get("SHARDWISE_STARTED") or time.strftime("%Y%m%d-%H%M%S")
    name = str(watch.group.share("out", f"{recipe}-{started}"))
    return Path("runs") / name


def _next_steps(
    target: str, recipe_args: list[str], shared: argparse.Namespace, run: "Run"
) -> str:
    """Return the commands that a user probably wants next."""
    from shardwise.cli.sample import can_sample

    is_on_path = shutil.which("shardwise") or Path(sys.argv[0]).name != "shardwise"
    command = "shardwise" if is_on_path else shlex.quote(sys.argv[0])
    longer = [target, *_without_option("--steps", recipe_args)]
    if not any(word.split("=")[0] == "--out" for word in recipe_args):
        longer += ["--out", str(run.out)]
    longer += ["--steps", str(2 * run.steps), "--accept", "lr"]
    if shared.cpu_devices:
        longer += ["--cpu-devices", str(shared.cpu_devices)]
    other_mesh = [target, *_without_option("--mesh", recipe_args)]
    other_mesh += ["--mesh", "data=2,fsdp=4", "--cpu-devices", "8"]
    out = shlex.quote(str(run.out))
    lines = [
        "next:",
        f"  {command} report {out}   # a web page: curves, where the time went, the layout",
    ]
    if run.out is not None and can_sample(run.out):
        lines.append(f'  {command} sample {out} --prompt "..."   # generate text')
    lines += [
        f"  {command} train {shlex.join(longer)}   # continue with a longer schedule",
        f"  {command} explain {shlex.join(other_mesh)}   # try another mesh",
    ]
    return "\n".join(lines)


def _without_option(name: str, args: list[str]) -> list[str]:
    """Return `args` without an option and its value."""
    kept = []
    skip_value = False
    for word in args:
        if skip_value:
            skip_value = False
        elif word == name:
            skip_value = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept


def _silence_orbax() -> None:
    """Suppress what Orbax and TensorStore print when a save fails.

    shardwise reports a failed save in one line. Orbax would add hundreds, because the event loop
    that its background tasks wait in is closed.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            default_hook(unraisable)

    sys.unraisablehook = hook
