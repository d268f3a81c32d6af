"""`shardwise sweep`: train every combination of some arguments, and compare the runs."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.checkpoint.reader import what_is_best
from shardwise.cli import report
from shardwise.cli.recipes import split_recipe
from shardwise.errors import ConfigError
from shardwise.files.durable import check_writable, text_digest
from shardwise.files.lock import lock_directory
from shardwise.recipe import find_recipe, load_recipe, read_source
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import Summary, summarize
from shardwise.sweep.grid import (
    GridPoint,
    check_arguments,
    flat,
    is_switch,
    make_points,
    split_words,
)
from shardwise.sweep.runs import Sweep, SweepRecord, describe_exit
from shardwise.text import NONE, Json, did_you_mean, show_number, show_seconds


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise sweep`; return what `--json` writes, and the exit code."""
    target, options, recipe_args = split_recipe("sweep", args)
    path, function = find_recipe(target)
    arguments = split_words(recipe_args)
    with _on_cpu():
        recipe = load_recipe(path, function)
        grid, fixed = check_arguments(recipe, arguments, f"shardwise sweep {target}")
    switches = {option for option in arguments if is_switch(recipe, option)}
    points = make_points(grid, switches)
    out = options.out or Path("sweeps") / path.stem
    if options.dry_run:
        return _dry_run(target, out, flat(fixed), points), 0
    check_writable(out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_directory(out):
        about = {
            "recipe": f"{path.name}:{function}",
            "fixed": fixed,
            "axes": list(grid),
            "source_digest": text_digest(read_source(path)),
        }
        record = SweepRecord.open(out, about, points)
        words = flat(fixed) + _forwarded_options(shared)
        code = Sweep(
            target, words, out, record, points, options.retry, options.jobs
        ).run()
        results = _sorted_results(out, record, points, options.by, options.largest)
    return _show_results(out, results, shared), code


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Use the CPU while the recipe is read for its arguments; the accelerator is for the runs."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


def _dry_run(
    target: str, out: Path, fixed: list[str], points: Sequence[GridPoint]
) -> Json:
    for point in points:
        words = [target, *fixed, *point.words, "--out", str(out / point.name)]
        print(f"shardwise train {shlex.join(words)}")
    return {
        "out": str(out),
        "points": [{"name": point.name, "arguments": point.values} for point in points],
    }


def _forwarded_options(shared: argparse.Namespace) -> list[str]:
    """Return the options of `shardwise train` that every run gets too."""
    names = ("coordinator", "num_processes", "process_id", "bind")
    if any(getattr(shared, name) is not None for name in names):
        raise ConfigError(
            "a sweep runs on one process: --coordinator, --num-processes, --process-id and --bind"
            " are options of `shardwise train`."
        )
    words = []
    if shared.cpu_devices is not None:
        words += ["--cpu-devices", str(shared.cpu_devices)]
    if shared.watchdog is not None:
        words += ["--watchdog", str(shared.watchdog)]
    if shared.profile is not None:
        first, last = shared.profile
        words += ["--profile", f"{first}:{last}"]
    for name in shared.accept:
        words += ["--accept", name]
    for name in shared.track:
        words += ["--track", name]
    if shared.force_unlock:
        words.append("--force-unlock")
    if shared.no_plan:
        words.append("--no-plan")
    if shared.strict:
        words.append("--strict")
    return words


# The comparison


def _sorted_results(
    out: Path,
    record: SweepRecord,
    points: Sequence[GridPoint],
    metric: str | None,
    is_largest_best: bool,
) -> list[Json]:
    """Return all runs, the best first, those without the metric last."""
    started = [name for name in record.points if (out / name / "run.json").exists()]
    summaries = {name: summarize(RunFiles(out / name).read()) for name in started}
    known = _metrics_of(summaries)
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known)
        print(
            f"shardwise: --by {metric}: there are {', '.join(known)}.{hint}",
            file=sys.stderr,
        )
        metric = None
    if metric is None:
        metric, is_largest_best = "loss", False
        if started:
            metric, is_largest_best = what_is_best(out / started[0] / "checkpoints")
        if metric not in known:
            metric = "loss"
    in_grid = {point.name for point in points}
    results = []
    for name, point in record.points.items():
        result = _result(out / name, point, summaries.get(name), metric)
        if name not in in_grid:
            result["state"] += "; not in this grid"
        results.append(result)
    sign = -1.0 if is_largest_best else 1.0

    def order(result: Json) -> tuple[bool, float]:
        value = result["value"]
        return value is None, 0.0 if value is None else sign * value

    return sorted(results, key=order)


def _metrics_of(summaries: Mapping[str, Summary]) -> list[str]:
    names = {"loss"}
    for summary in summaries.values():
        names |= {f"eval_{name}" for name in summary.held_out}
    return sorted(names)


def _result(path: Path, point: Json, summary: Summary | None, metric: str) -> Json:
    code = point.get("code")
    if code is None:
        state = "not started"
    else:
        state = "done" if code == 0 else describe_exit(code)
    return {
        "name": path.name,
        "arguments": point.get("values", {}),
        "state": state,
        "code": code,
        "by": metric,
        "value": None if summary is None else _metric_value(summary, metric),
        "loss": None if summary is None else summary.loss,
        "step": 0 if summary is None else summary.step,
        "seconds": point.get("seconds"),
        "out": str(path),
    }


def _metric_value(summary: Summary, metric: str) -> float | None:
    if metric == "loss":
        return summary.loss
    # (best value, its step, last value)
    values = summary.held_out.get(metric.removeprefix("eval_"))
    return None if values is None else values[2]


def _show_results(out: Path, results: list[Json], shared: argparse.Namespace) -> Json:
    """Print the table, and write one report page for all runs that have started."""
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, markup=False, highlight=False)
    console.print(_results_table(results, str(out)))
    best = results[0]
    answer: Json = {
        "out": str(out),
        "by": best["by"],
        "best": best["name"] if best["value"] is not None else None,
        "points": results,
    }
    started = [
        result["out"]
        for result in results
        if (Path(result["out"]) / "run.json").exists()
    ]
    if started:
        report_args = [*started[: report.MOST_RUNS], "--out", str(out / "report.html")]
        answer["page"] = report.main(report_args, shared)[0]["page"]
    return answer


def _results_table(results: Sequence[Json], title: str) -> Table:
    names = list(
        dict.fromkeys(name for result in results for name in result["arguments"])
    )
    metric = results[0]["by"]
    metrics = (
        {"loss": "value"} if metric == "loss" else {metric: "value", "loss": "loss"}
    )
    table = Table(
        *names, *metrics, "step", "time", "", title=title, title_justify="left"
    )
    for result in results:
        values = [result[key] for key in metrics.values()]
        seconds = result["seconds"]
        table.add_row(
            *(result["arguments"].get(name, NONE) for name in names),
            *(NONE if value is None else show_number(value) for value in values),
            str(result["step"]),
            NONE if seconds is None else show_seconds(seconds),
            result["state"],
        )
    return table
