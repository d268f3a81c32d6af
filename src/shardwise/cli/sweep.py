"""`shardwise sweep`: a recipe for every combination of some arguments, each a run of its own, one after the other."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.checkpoint.reader import read_json, what_is_best
from shardwise.cli.report import MOST_RUNS
from shardwise.cli.report import main as report
from shardwise.cli.sweep_grid import (
    Point,
    check_arguments,
    flat,
    is_switch,
    make_points,
    split_words,
)
from shardwise.cluster.signals import EXIT_STOPPED, noted_signals
from shardwise.errors import ConfigError, DirectoryInUseError, Parser, ShardwiseError
from shardwise.files.durable import check_writable, text_digest, write_atomically
from shardwise.files.lock import check_unlocked, lock_directory
from shardwise.recipe import find_recipe, load_recipe
from shardwise.rundir.files import RunFiles
from shardwise.rundir.summary import summarize
from shardwise.text import NONE, did_you_mean, show_number, show_seconds

USAGE = """\
shardwise sweep RECIPE [--out DIRECTORY] [--retry] [--by METRIC] --lr 1e-4 3e-4 --seed 0 1 [--steps 200 ...]

  arguments of the recipe with several values span the grid; those with one value are for all runs
  --out DIRECTORY  where the runs go, each to a directory with its values as name; sweeps/RECIPE if it is not given
  --retry          also run again what has failed
  --by METRIC      sort by eval_loss, loss ...; as the runs choose their best checkpoint if it is not given
  --largest        with --by: more is better
  --dry-run        show the grid, run nothing
Killed or stopped, the same command goes on. Exit code 0 when all runs are done, 75 when stopped by a signal, else that of the
first failed run.
"""
FILE = "sweep.json"
MEANING = {
    1: "an error of the recipe or of shardwise",
    2: "usage or configuration",
    3: "data",
    4: "checkpoint",
    5: "numbers not finite, or diverged",
    6: "a process lost or stuck",
    7: "directory in use",
    EXIT_STOPPED: "stopped by a signal",
}
CHILD = "from shardwise.cluster.launch import end_with_parent; end_with_parent(); from shardwise.cli import entry; entry()"  # JAX forbids forking here
PATIENCE = 60.0  # seconds to wait for the run that a killed sweep has left


def main(args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    if not args or args[0].startswith("-"):
        if {"-h", "--help"} & set(args):
            print(USAGE, end="")
            return {}, 0
        raise ConfigError(
            f"'shardwise sweep' needs a recipe: shardwise sweep file.py --lr 1e-4 3e-4\n\n{USAGE}"
        )
    target, *words = args
    if {"-h", "--help"} & set(words):
        print(USAGE)
    parser = Parser(
        prog="shardwise sweep", usage=USAGE, add_help=False, allow_abbrev=False, help_text=USAGE
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--retry", action="store_true")
    parser.add_argument("--by")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    mine, rest = parser.parse_known_args(words)
    path, function = find_recipe(target)
    given = split_words(rest)
    with _on_cpu():
        recipe = load_recipe(path, function)
        grid, fixed = check_arguments(recipe, given, f"shardwise sweep {target}")
    points = make_points(grid, {name for name in given if is_switch(recipe, name)})
    out = mine.out or Path("sweeps") / path.stem
    if mine.dry_run:
        for point in points:
            print(
                f"shardwise train {' '.join([target, *flat(fixed), *point.words])} --out {out / point.name}"
            )
        return {
            "out": str(out),
            "points": [{"name": point.name, "arguments": point.values} for point in points],
        }, 0
    check_writable(out)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_directory(out):
        about = {
            "recipe": f"{path.name}:{function}",
            "fixed": fixed,
            "axes": list(grid),
            "source_digest": text_digest(path.read_text()),
        }
        record = Record.open(out, about, points)
        sweep = Sweep(target, flat(fixed) + _passed_on(options), out, record, points, mine.retry)
        code = sweep.run()
        rows = sorted_rows(out, record, points, mine.by, mine.largest)
    return finish(out, rows, code, options)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options of `shardwise` itself that each run shall have, too."""
    given = vars(options)
    if any(
        given.get(name) is not None
        for name in ("coordinator", "num_processes", "process_id", "bind")
    ):
        raise ConfigError(
            "a sweep runs on one process: --coordinator and its kin belong to `shardwise train`."
        )
    words = []
    for name in ("cpu_devices", "watchdog", "profile"):
        if given.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    for name in ("accept", "track"):
        words += [word for value in given.get(name) or [] for word in (f"--{name}", value)]
    return words + [
        f"--{name.replace('_', '-')}" for name in ("force_unlock", "no_plan") if given.get(name)
    ]


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """The recipe is imported here for its arguments alone: the accelerator is for the runs."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


# What is kept


@dataclass
class Record:
    """`sweep.json`: what the sweep is, and how each of its runs has ended."""

    path: Path
    about: dict[str, Any]
    points: dict[
        str, dict[str, Any]
    ]  # by name: values, and once it has ended its code and the seconds it took

    @classmethod
    def open(cls, out: Path, about: dict[str, Any], points: Sequence[Point]) -> "Record":
        """Refuses another sweep than the one that is there; more or fewer values of its arguments are fine."""
        path, known = out / FILE, {}
        if path.exists():
            try:
                found = read_json(path)
                before, known = (
                    found["sweep"],
                    {str(name): dict(point) for name, point in found["points"].items()},
                )
                differ = [
                    name for name in ("recipe", "axes", "fixed") if before[name] != about[name]
                ]
            except (ShardwiseError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{path} is not what a sweep writes ({error}); choose another --out, or remove it."
                ) from error
            if differ:
                rows = "\n".join(
                    f"  {name}: {_shown(before[name])} before, {_shown(about[name])} now"
                    for name in differ
                )
                raise ConfigError(
                    f"{out} holds another sweep; choose another --out, or the same arguments:\n{rows}"
                )
            if before.get("source_digest") != about["source_digest"]:
                print(
                    f"shardwise: the recipe has changed since {out} was begun; runs that are done are of the old one.",
                    file=sys.stderr,
                )
            new = [point.name for point in points if point.name not in known]
            gone = [name for name in known if name not in {point.name for point in points}]
            if new:
                print(f"shardwise: {len(new)} runs are new in this sweep.", file=sys.stderr)
            if gone:
                print(
                    f"shardwise: {len(gone)} runs are not in this grid any more; they are kept, and shown.",
                    file=sys.stderr,
                )
        record = cls(
            path,
            about,
            {**known, **{p.name: {**known.get(p.name, {}), "values": p.values} for p in points}},
        )
        record.write()
        return record

    def write(self) -> None:
        write_atomically(
            self.path, json.dumps({"sweep": self.about, "points": self.points}, indent=2) + "\n"
        )

    def ended(self, name: str, code: int, seconds: float) -> None:
        point = self.points[name]
        point.update(code=code, seconds=round(point.get("seconds", 0.0) + seconds, 1))
        self.write()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(flat(value)) or "nothing"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# The runs


@dataclass
class Sweep:
    """Carries out the runs that are left, in turn."""

    target: str
    words: list[str]
    out: Path
    record: Record
    points: list[Point]
    retry: bool
    signals: int = 0

    def run(self) -> int:
        """The exit code: 0, 75, or that of the first run that has failed."""
        failed = []
        with noted_signals() as self._heard:
            for number, point in enumerate(self.points, 1):
                before = self.record.points[point.name].get("code")
                if before == 0:
                    self.say(number, point, "is done")
                    continue
                if before not in (None, EXIT_STOPPED) and not self.retry:
                    self.say(
                        number, point, f"has failed before ({means(before)}); --retry runs it again"
                    )
                    failed.append(before)
                    continue
                self.say(number, point, "goes on" if before == EXIT_STOPPED else "begins")
                began = time.monotonic()
                code = self._train(point)
                self.record.ended(point.name, code, time.monotonic() - began)
                if self.signals:
                    print(
                        f"shardwise: the sweep was stopped by a signal; the same command goes on with {point.name}.",
                        file=sys.stderr,
                    )
                    return EXIT_STOPPED
                if code != 0:
                    self.say(number, point, f"has failed: {means(code)}")
                    failed.append(code)
        return next((code if code > 0 else 6 for code in failed), 0)

    def say(self, number: int, point: Point, text: str) -> None:
        print(
            f"shardwise sweep: [{number} of {len(self.points)}] {point.name} {text}",
            file=sys.stderr,
            flush=True,
        )

    def _train(self, point: Point) -> int:
        """`shardwise train` for one point; signals are passed on to it."""
        if not self._wait_for(self.out / point.name):
            return DirectoryInUseError.exit_code if not self.signals else EXIT_STOPPED
        command = [
            "train",
            self.target,
            *self.words,
            *point.words,
            "--out",
            str(self.out / point.name),
        ]
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on once
        )
        while child.poll() is None:
            for number in self._heard[self.signals :]:
                self.signals += 1
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.1)
        self.signals = len(self._heard)
        return child.returncode

    def _wait_for(self, directory: Path) -> bool:
        """A sweep that was killed has asked its run to stop; that may still be saving."""
        end = time.monotonic() + PATIENCE
        told = False
        while True:
            try:
                check_unlocked(directory)
                return True
            except DirectoryInUseError as error:
                if self._heard or time.monotonic() > end:
                    self.signals = len(self._heard)
                    print(f"shardwise: {error}", file=sys.stderr)
                    return False
                if not told:
                    print(f"shardwise: waiting for it: {error}", file=sys.stderr)
                told = True
                time.sleep(0.2)


def means(code: int) -> str:
    if code < 0:
        extra = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{extra}"
    return f"exit code {code}: {MEANING.get(code, 'not known')}"


# The comparison


def sorted_rows(
    out: Path, record: Record, points: Sequence[Point], by: str | None, largest: bool
) -> list[dict[str, Any]]:
    """All runs, the best first, those without the number last."""
    there = [name for name in record.points if (out / name / "run.json").exists()]
    summaries = {name: summarize(RunFiles(out / name).read()) for name in there}
    known = sorted(
        {"loss"} | {f"eval_{name}" for summary in summaries.values() for name in summary.held_out}
    )
    if by is not None and by not in known:
        print(
            f"shardwise: --by {by}: there are {', '.join(known)}.{did_you_mean(by, known)}",
            file=sys.stderr,
        )
        by = None
    if by is None:
        by, largest = what_is_best(out / there[0] / "checkpoints") if there else ("loss", False)
        by = by if by in known else "loss"
    inside = {point.name for point in points}
    rows = []
    for name, point in record.points.items():
        summary = summaries.get(name)
        value = None
        if summary is not None:
            value = (
                summary.loss
                if by == "loss"
                else summary.held_out.get(by.removeprefix("eval_"), (None, 0, None))[2]
            )
        code = point.get("code")
        state = "not begun" if code is None else "done" if code == 0 else means(code)
        rows.append(
            {
                "name": name,
                "arguments": point.get("values", {}),
                "state": state if name in inside else f"{state}; not in this grid",
                "code": code,
                "by": by,
                "value": value,
                "loss": summary.loss if summary else None,
                "step": summary.step if summary else 0,
                "seconds": point.get("seconds"),
                "out": str(out / name),
            }
        )
    sign = -1.0 if largest else 1.0
    return sorted(
        rows,
        key=lambda row: (
            row["value"] is None,
            sign * row["value"] if row["value"] is not None else 0.0,
        ),
    )


def finish(
    out: Path, rows: list[dict[str, Any]], code: int, options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """The table, and one page for all runs that have begun."""
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    names = list(dict.fromkeys(name for row in rows for name in row["arguments"]))
    by = rows[0]["by"]
    table = Table(
        *names,
        by,
        *([] if by == "loss" else ["loss"]),
        "step",
        "time",
        "",
        title=str(out),
        title_justify="left",
    )
    for row in rows:
        numbers = [
            NONE if row[key] is None else show_number(row[key])
            for key in (("value",) if by == "loss" else ("value", "loss"))
        ]
        seconds = NONE if row["seconds"] is None else show_seconds(row["seconds"])
        table.add_row(
            *(row["arguments"].get(name, NONE) for name in names),
            *numbers,
            f"{row['step']}",
            seconds,
            row["state"],
        )
    console.print(table)
    answer: dict[str, Any] = {
        "out": str(out),
        "by": by,
        "best": rows[0]["name"] if rows[0]["value"] is not None else None,
        "points": rows,
    }
    begun = [row["out"] for row in rows if (Path(row["out"]) / "run.json").exists()][:MOST_RUNS]
    if begun:
        answer["page"] = report([*begun, "--out", str(out / "report.html")], options)[0]["page"]
    return answer, code
