"""`shardwise checkpoint`: what there is, what is in it, whether it is whole, and its weights for other programs."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shardwise.checkpoint.reader import (
    SavedStep,
    best_step,
    directory_bytes,
    find_checkpoints,
    find_step,
    in_groups,
    is_step,
    leaf_bytes,
    open_step,
    read_json,
    saved_steps,
    show_leaf,
    step_name,
    what_is_best,
)
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.manifest import verify_manifest

Answer = dict[str, Any]

HELP = """\
TARGET is a run directory, its 'checkpoints', or one step in it: runs/a, runs/a --step 200, runs/a/checkpoints/200.
Without a step, the newest is meant. All of it works on one CPU, whatever wrote the checkpoint.
"""


def main(args: list[str], options: argparse.Namespace) -> tuple[Answer, int]:
    """Runs one command; returns what it found and the exit code."""
    parser = _Parser(
        prog="shardwise checkpoint",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        call: Callable[..., tuple[Answer, int]], name: str, targets: int | None, text: str
    ) -> argparse.ArgumentParser:
        verb = verbs.add_parser(
            name,
            help=text,
            description=f"{text}\n\n{HELP}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_argument("target", type=Path, nargs=targets, metavar="TARGET")
        verb.set_defaults(call=call)
        return verb

    ls = command(list_steps, "ls", None, "the steps of a run, with sizes and metrics")
    ls.add_argument(
        "--verify", action="store_true", help="also check every file against its digest"
    )
    show = command(show_step, "show", None, "what the run was, and every array of a step")
    show.add_argument(
        "--values",
        action="store_true",
        help="also the least, greatest and mean value of every array",
    )
    diff = command(
        diff_steps,
        "diff",
        2,
        "what differs between two steps, to the bit; exit code 1 if any array does",
    )
    verify = command(
        verify_steps,
        "verify",
        None,
        "every file of all steps, or of one, against its digest; exit code 4 if any is damaged",
    )
    export = command(
        export_step,
        "export",
        None,
        "the weights as safetensors, or as a GPT-2 or Llama for transformers",
    )
    export.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the file, or with --format hf the directory, to write",
    )
    export.add_argument(
        "--format",
        choices=["safetensors", "hf", "gpt2"],
        default="safetensors",
        help="hf (gpt2 is the same): for transformers",
    )
    export.add_argument(
        "--average", action="store_true", help="the averaged weights that the optimizer keeps"
    )
    export.add_argument(
        "--base",
        help="where the frozen weights are that a fine-tuned run was trained beside, if they were moved",
    )
    export.add_argument(
        "--trained-only",
        action="store_true",
        help="without those, and without merging adapters into them",
    )
    export.add_argument(
        "--vocab-size", type=int, help="hf: leave out the rows of the embedding from here on"
    )
    for verb in (show, diff, verify, export):
        verb.add_argument(
            "--step", type=step_name, help="this step of the run, or 'best', rather than the newest"
        )
    chosen = parser.parse_args(args)
    return chosen.call(
        chosen, Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{self.prog}: {message}")


# ls


def list_steps(chosen: argparse.Namespace, console: Console) -> tuple[Answer, int]:
    directory = find_checkpoints(chosen.target)
    rows = [_row(directory / str(step), chosen.verify) for step in saved_steps(directory)]
    if (best := best_step(directory)) is not None and len(rows) > 1:
        row = next(row for row in rows if row["step"] == str(best))
        row["best"] = what_is_best(directory)[0]
        row["state"] = ", ".join(filter(None, [row["state"], f"best {row['best']}"]))
    aside = [path for path in directory.iterdir() if path.is_dir() and not path.name.isdecimal()]
    for path in sorted(aside):
        state = (
            "damaged, kept aside"
            if ".bad" in path.name
            else "left over, not finished"
            if path.suffix == ".tmp"
            else "no checkpoint"
        )
        rows.append(
            {
                "step": path.name,
                "state": state,
                "bytes": directory_bytes(path),
                "time": path.stat().st_mtime,
                "metrics": {},
            }
        )
    names = list(
        dict.fromkeys(
            name
            for row in rows
            for name in row["metrics"]
            if name == "loss" or name.startswith("eval_")
        )
    )[:5]
    table = Table(
        "step",
        "size",
        "saved",
        "age",
        *map(_plain, names),
        "",
        title=str(directory),
        title_justify="left",
    )
    for row in rows:
        metrics = [_show_number(row["metrics"].get(name)) for name in names]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        table.add_row(
            _plain(row["step"]),
            decimal(row["bytes"]),
            when,
            _age(time.time() - row["time"]),
            *metrics,
            _plain(row["state"]),
        )
    console.print(table)
    return {"directory": str(directory), "steps": rows}, 0 if all(
        "damaged:" not in row["state"] for row in rows
    ) else 4


def _row(path: Path, verify: bool) -> Answer:
    try:
        metrics = read_json(path / "meta.json").get("metrics", {})
        state = ""
    except CheckpointError as error:
        metrics, state = {}, f"damaged: {error}"
    if verify:
        problems = verify_manifest(path)
        state = f"damaged: {problems[0]}" if problems else "verified"
    metrics = (
        {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if isinstance(metrics, dict)
        else {}
    )
    return {
        "step": path.name,
        "state": state,
        "bytes": directory_bytes(path),
        "time": path.stat().st_mtime,
        "metrics": metrics,
    }


def _age(seconds: float) -> str:
    for unit, size in {"d": 86400, "h": 3600, "min": 60}.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


# verify


def verify_steps(chosen: argparse.Namespace, console: Console) -> tuple[Answer, int]:
    if chosen.step is not None or is_step(chosen.target):
        steps = [find_step(chosen.target, chosen.step)]
    else:
        directory = find_checkpoints(chosen.target)
        steps = [directory / str(step) for step in saved_steps(directory)]
    found: dict[str, list[str]] = {}
    for path in steps:
        size = decimal(directory_bytes(path))
        with console.status(f"reading {size} of {path}"):
            problems = found[str(path)] = verify_manifest(path)
        _say(
            console,
            f"{path}: damaged" if problems else f"{path}: whole, {size}",
            *(f"  {problem}" for problem in problems),
        )
    if not steps:
        _say(console, f"{chosen.target} has no checkpoints yet")
    return {"steps": found}, 4 if any(found.values()) else 0


# show


def show_step(chosen: argparse.Namespace, console: Console) -> tuple[Answer, int]:
    saved = _open(find_step(chosen.target, chosen.step), console)
    _say(
        console,
        f"{saved.directory}: {decimal(directory_bytes(saved.directory))}, every file as it was written",
    )
    console.print(_description(saved.metadata))
    values = _statistics(saved) if chosen.values else {}
    numbers = ("min", "max", "mean", "std", "not_finite") if values else ()
    table = Table("path", "array", "bytes", *numbers, title="arrays", title_justify="left")
    rows: list[Answer] = [
        {
            "path": name,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "bytes": leaf_bytes(leaf),
            **values.get(name, {}),
        }
        for name, leaf in sorted(saved.leaves.items(), key=lambda item: _parameters_first(item[0]))
    ]
    totals: dict[str, dict[str, int]] = {}
    for row in rows:
        cells = (_show_number(row[number]) for number in numbers)
        table.add_row(
            _plain(row["path"]), show_leaf(saved.leaves[row["path"]]), decimal(row["bytes"]), *cells
        )
        total = totals.setdefault(
            row["path"].partition("/")[0], {"arrays": 0, "elements": 0, "bytes": 0}
        )
        total["arrays"] += 1
        total["elements"] += math.prod(row["shape"])
        total["bytes"] += row["bytes"]
    console.print(table)
    for part, total in totals.items():
        _say(
            console,
            f"{part}: {total['arrays']} arrays, {total['elements']:,} elements, {decimal(total['bytes'])}",
        )
    return {
        "directory": str(saved.directory),
        "metadata": saved.metadata,
        "totals": totals,
        "leaves": rows,
    }, 0


def _description(metadata: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False, title="the run", title_justify="left")
    for key, value in metadata.items():
        pairs = value.items() if isinstance(value, dict) else [("", value)]
        if key == "lr" and isinstance(value, dict):
            pairs = [(group, _range(rates)) for group, rates in value.items()]
        if key == "optimizer" and isinstance(value, dict):
            texts = [str(text) for text in value.values()]
            pairs = [
                (f"{texts.count(text)} kinds of parameters:", text) for text in dict.fromkeys(texts)
            ]
        table.add_row(
            _plain(key),
            "\n".join(f"{_plain(name)} {_show_number(content)}".strip() for name, content in pairs),
        )
    return table


def _range(rates: Any) -> str:
    """A schedule, of which a checkpoint keeps samples, in a few words."""
    if not isinstance(rates, dict) or not rates:
        return str(rates)
    numbers = [value for value in rates.values() if isinstance(value, int | float)]
    return (
        f"from {min(numbers):.3g} to {max(numbers):.3g} ({len(rates)} samples)"
        if len(numbers) == len(rates)
        else str(rates)
    )


def _statistics(saved: SavedStep) -> dict[str, dict[str, float]]:
    """Of the finite values of every leaf, and how many are not finite."""
    found: dict[str, dict[str, float]] = {}
    for group in in_groups({name: leaf_bytes(leaf) for name, leaf in saved.leaves.items()}):
        for name, array in saved.read(group).items():
            finite = lambda array=array: (block[np.isfinite(block)] for block in _blocks(array))  # noqa: E731
            count = sum(block.size for block in finite())
            mean = sum(block.sum() for block in finite()) / count if count else np.nan
            found[name] = {
                "min": float(
                    min((block.min() for block in finite() if block.size), default=np.nan)
                ),
                "max": float(
                    max((block.max() for block in finite() if block.size), default=np.nan)
                ),
                "mean": float(mean),
                "std": float(
                    (sum(((block - mean) ** 2).sum() for block in finite()) / count) ** 0.5
                )
                if count
                else np.nan,
                "not_finite": array.size - count,
            }
    return found


# diff


def diff_steps(chosen: argparse.Namespace, console: Console) -> tuple[Answer, int]:
    from shardwise.checkpoint.resume import compare

    a, b = (_open(find_step(target, chosen.step), console) for target in chosen.target)
    _say(console, f"A: {a.directory}", f"B: {b.directory}")
    rows: list[Answer] = []
    same = []
    for name in sorted(a.leaves.keys() | b.leaves.keys(), key=_parameters_first):
        texts = [show_leaf(saved.leaves[name]) if name in saved.leaves else "-" for saved in (a, b)]
        if texts[0] != texts[1]:
            rows.append({"path": name, "a": texts[0], "b": texts[1]})
        else:
            same.append(name)
    equal = 0
    for group in in_groups({name: leaf_bytes(a.leaves[name]) for name in same}):
        first, second = a.read(group), b.read(group)
        for name in group:
            found = _difference(first[name], second[name])
            equal += not found["elements"]
            if found["elements"]:
                rows.append(
                    {
                        "path": name,
                        "a": show_leaf(a.leaves[name]),
                        "b": show_leaf(b.leaves[name]),
                        **found,
                    }
                )
    table = Table(
        "path",
        "A",
        "B",
        "elements that differ",
        "largest difference",
        "relative",
        title="arrays",
        title_justify="left",
    )
    for row in rows:
        numbers = (
            [f"{row['elements']:,}", _show_number(row["absolute"]), _show_number(row["relative"])]
            if "elements" in row
            else []
        )
        table.add_row(_plain(row["path"]), row["a"], row["b"] if not numbers else "same", *numbers)
    if rows:
        console.print(table)
    _say(console, f"{equal} arrays are equal to the bit, {len(rows)} differ")
    described = compare(a.metadata, b.metadata)
    notes = Table("", "A", "B", title="what the runs say of themselves", title_justify="left")
    for difference in described:
        notes.add_row(
            _plain(difference.name), _show_number(difference.saved), _show_number(difference.now)
        )
    if described:
        console.print(notes)
    metadata = [
        {"name": difference.name, "a": difference.saved, "b": difference.now}
        for difference in described
    ]
    return {
        "a": str(a.directory),
        "b": str(b.directory),
        "equal": equal,
        "different": rows,
        "metadata": metadata,
    }, 1 if rows else 0


def _difference(a: Any, b: Any) -> dict[str, float]:
    """How many elements have other bits, and by how much at most; infinite where one of two numbers is not finite."""
    elements, absolute, relative = 0, 0.0, 0.0
    for x, y, same in zip(_blocks(a), _blocks(b), _same_bits(a, b), strict=True):
        elements += int((~same).sum())
        x, y = x[~same], y[~same]
        with np.errstate(all="ignore"):
            gap = np.abs(x - y)
            scale = np.maximum(np.abs(x), np.abs(y))
            ratio = np.where(gap == 0, 0.0, gap / scale)
        absolute = max(absolute, float(np.where(np.isnan(gap), np.inf, gap).max(initial=0)))
        relative = max(relative, float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0)))
    return {"elements": elements, "absolute": absolute, "relative": relative}


BLOCK = 2**20  # elements that are converted at a time


def _blocks(array: Any) -> Iterator[Any]:
    flat = array.reshape(-1)
    return (flat[start : start + BLOCK].astype(np.float64) for start in range(0, flat.size, BLOCK))


def _same_bits(a: Any, b: Any) -> Iterator[Any]:
    rows = [
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
        for array in (a, b)
    ]
    return (
        (rows[0][start : start + BLOCK] == rows[1][start : start + BLOCK]).all(1)
        for start in range(0, a.size, BLOCK)
    )


# export


def export_step(chosen: argparse.Namespace, console: Console) -> tuple[Answer, int]:
    if chosen.vocab_size is not None and chosen.format == "safetensors":
        raise ConfigError("--vocab-size belongs to --format hf.")
    if chosen.trained_only and (chosen.base is not None or chosen.format != "safetensors"):
        raise ConfigError("--trained-only is without a --base, and for --format safetensors alone.")
    from shardwise.weights.export import export_hf, export_plain
    from shardwise.weights.load import merged_step

    found = _open(find_step(chosen.target, chosen.step), console)
    saved = (
        found if chosen.trained_only else merged_step(found, chosen.base, average=chosen.average)
    )
    average = chosen.average and saved is found  # those of adapters are merged already
    with console.status(f"writing {chosen.out}"):
        if chosen.format == "safetensors":
            names = export_plain(saved, chosen.out, average=average)
        else:
            names = export_hf(saved, chosen.out, average=average, vocab_size=chosen.vocab_size)
    size = chosen.out.stat().st_size if chosen.out.is_file() else directory_bytes(chosen.out)
    _say(console, f"{len(names)} tensors of {saved.directory}, {decimal(size)}: {chosen.out}")
    return {"out": str(chosen.out), "tensors": names, "digest": saved.digest}, 0


def _open(path: Path, console: Console) -> SavedStep:
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing here is worth an accelerator
    with console.status(f"verifying {path}"):
        return open_step(path)


def _parameters_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params/"), name


def _say(console: Console, *lines: str) -> None:
    console.print(*(_plain(line) for line in lines), sep="\n", soft_wrap=True)


def _show_number(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else _short(value)


def _short(value: Any, length: int = 90) -> str:
    text = _plain(str(value))
    return text if len(text) <= length else text[: length - 4] + " ..."


def _plain(text: str) -> str:
    """Without anything that a terminal would take for a command."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
