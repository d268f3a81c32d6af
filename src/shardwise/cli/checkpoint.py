"""`shardwise checkpoint`: list, describe, compare, check and export saved steps.

Everything runs on the CPU, whatever hardware wrote the checkpoint. Text that comes from a
checkpoint is printed without control characters, because a checkpoint may be a stranger's.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shardwise.checkpoint.reader import (
    SavedStep,
    best_step,
    directory_bytes,
    find_checkpoints,
    find_damage,
    find_step,
    in_groups,
    is_step,
    leaf_bytes,
    open_step,
    read_json,
    saved_steps,
    show_leaf,
    verify_step,
    what_is_best,
)
from shardwise.cli.options import command_parser
from shardwise.errors import CheckpointError, ConfigError, ExitCode
from shardwise.text import Json, printable

# Elements that are converted to float64 at a time, so that memory stays small.
BLOCK = 2**20
# Metrics that `ls` has columns for, at most.
MAX_METRICS = 5


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise checkpoint`; return what `--json` writes, and the exit code."""
    options = command_parser("checkpoint").parse_args(args)
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, markup=False, highlight=False)
    commands = {
        "ls": list_steps,
        "show": show_step,
        "diff": diff_steps,
        "verify": verify_steps,
        "export": export_step,
    }
    return commands[options.command](options, console)


# ls


def list_steps(options: argparse.Namespace, console: Console) -> tuple[Json, int]:
    """Print a table of all saved steps of a run; exit code 4 if one is damaged."""
    directory = find_checkpoints(options.target)
    steps = [
        _describe_step(directory / str(step), options.verify)
        for step in saved_steps(directory)
    ]
    best = best_step(directory)
    if best is not None and len(steps) > 1:
        entry = next(entry for entry in steps if entry["step"] == str(best))
        entry["best"] = what_is_best(directory)[0]
        entry["state"] = ", ".join(
            filter(None, [entry["state"], f"best {entry['best']}"])
        )
    steps += [
        _describe_leftover(path)
        for path in sorted(directory.iterdir())
        if _is_other(path)
    ]
    console.print(_steps_table(steps, str(directory)))
    is_damaged = any("damaged:" in entry["state"] for entry in steps)
    code = ExitCode.CHECKPOINT if is_damaged else ExitCode.DONE
    return {"directory": str(directory), "steps": steps}, code


def _describe_step(path: Path, verify: bool) -> Json:
    state = ""
    metrics: object = {}
    try:
        metrics = read_json(path / "meta.json").get("metrics", {})
    except CheckpointError as error:
        state = f"damaged: {error}"
    if verify:
        problems = find_damage(path)
        state = f"damaged: {problems[0]}" if problems else "verified"
    numbers = {}
    if isinstance(metrics, dict):
        numbers = {name: value for name, value in metrics.items() if _is_number(value)}
    return _entry(path, state, numbers)


def _is_other(path: Path) -> bool:
    return path.is_dir() and not path.name.isdecimal()


def _describe_leftover(path: Path) -> Json:
    """Describe a directory among the checkpoints that is not a saved step."""
    if ".bad" in path.name:
        state = "damaged, set aside"
    elif path.suffix == ".tmp":
        state = "unfinished save"
    else:
        state = "not a checkpoint"
    return _entry(path, state, {})


def _entry(path: Path, state: str, metrics: dict[str, float]) -> Json:
    return {
        "step": path.name,
        "state": state,
        "bytes": directory_bytes(path),
        "time": path.stat().st_mtime,
        "metrics": metrics,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _steps_table(steps: Sequence[Json], title: str) -> Table:
    names: list[str] = []
    for entry in steps:
        for name in entry["metrics"]:
            is_shown = name == "loss" or name.startswith("eval_")
            if is_shown and name not in names and len(names) < MAX_METRICS:
                names.append(name)
    columns = ["step", "size", "saved", "age", *map(printable, names), ""]
    table = Table(*columns, title=title, title_justify="left")
    for entry in steps:
        table.add_row(
            printable(entry["step"]),
            decimal(entry["bytes"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"])),
            _age(time.time() - entry["time"]),
            *(_show_value(entry["metrics"].get(name)) for name in names),
            printable(entry["state"]),
        )
    return table


def _age(seconds: float) -> str:
    for unit, size in {"d": 86400, "h": 3600, "min": 60}.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


# verify


def verify_steps(options: argparse.Namespace, console: Console) -> tuple[Json, int]:
    """Check the files and arrays of one step or of all steps; exit code 4 if any is damaged."""
    if options.step is not None or is_step(options.target):
        paths = [find_step(options.target, options.step)]
    else:
        directory = find_checkpoints(options.target)
        paths = [directory / str(step) for step in saved_steps(directory)]
    problems: dict[str, list[str]] = {}
    for path in paths:
        size = decimal(directory_bytes(path))
        _use_cpu()
        with console.status(f"reading {size} of {path}"):
            damage = problems[str(path)] = verify_step(path)
        verdict = "damaged" if damage else f"complete, {size}"
        _print(console, f"{path}: {verdict}", *(f"  {problem}" for problem in damage))
    if not paths:
        _print(console, f"{options.target} has no checkpoints yet")
    code = ExitCode.CHECKPOINT if any(problems.values()) else ExitCode.DONE
    return {"steps": problems}, code


# show


def show_step(options: argparse.Namespace, console: Console) -> tuple[Json, int]:
    """Print what the run was, and every array of a step."""
    saved = _open(find_step(options.target, options.step), console)
    size = decimal(directory_bytes(saved.directory))
    _print(console, f"{saved.directory}: {size}, all files verified")
    console.print(_description_table(saved.metadata))
    statistics = _statistics(saved) if options.values else {}
    leaves: list[Json] = [
        {
            "path": name,
            "shape": list(saved.leaves[name].shape),
            "dtype": str(saved.leaves[name].dtype),
            "bytes": leaf_bytes(saved.leaves[name]),
            **statistics.get(name, {}),
        }
        for name in sorted(saved.leaves, key=_parameters_first)
    ]
    columns = ("min", "max", "mean", "std", "not_finite") if statistics else ()
    table = Table(
        "path", "array", "bytes", *columns, title="arrays", title_justify="left"
    )
    for leaf in leaves:
        table.add_row(
            printable(leaf["path"]),
            show_leaf(saved.leaves[leaf["path"]]),
            decimal(leaf["bytes"]),
            *(_show_value(leaf.get(column)) for column in columns),
        )
    console.print(table)
    totals = _totals(leaves)
    for part, total in totals.items():
        elements = f"{total['elements']:,} elements"
        _print(
            console,
            f"{part}: {total['arrays']} arrays, {elements}, {decimal(total['bytes'])}",
        )
    answer = {
        "directory": str(saved.directory),
        "metadata": saved.metadata,
        "totals": totals,
        "leaves": leaves,
    }
    return answer, 0


def _totals(leaves: Sequence[Json]) -> dict[str, dict[str, int]]:
    """Sum up arrays, elements and bytes of the parameters, the optimizer state, and so on."""
    totals: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        part = leaf["path"].partition("/")[0]
        total = totals.setdefault(part, {"arrays": 0, "elements": 0, "bytes": 0})
        total["arrays"] += 1
        total["elements"] += math.prod(leaf["shape"])
        total["bytes"] += leaf["bytes"]
    return totals


def _description_table(metadata: Json) -> Table:
    table = Table("", "", show_header=False, title="the run", title_justify="left")
    for key, value in metadata.items():
        lines = [
            f"{printable(name)} {_show_value(content)}".strip()
            for name, content in _described_pairs(key, value)
        ]
        table.add_row(printable(key), "\n".join(lines))
    return table


def _described_pairs(key: str, value: object) -> list[tuple[str, object]]:
    """Return one entry of the metadata as lines of a name and a value."""
    if not isinstance(value, dict):
        return [("", value)]
    if key == "lr":
        return [(group, _schedule_range(rates)) for group, rates in value.items()]
    if key == "optimizer":
        # Many parameters have the same optimizer chain: show each chain once.
        chains = [str(chain) for chain in value.values()]
        unique = dict.fromkeys(chains)
        return [
            (f"{chains.count(chain)} kinds of parameters:", chain) for chain in unique
        ]
    return list(value.items())


def _schedule_range(rates: object) -> str:
    """Summarize a schedule, of which a checkpoint keeps samples."""
    if not isinstance(rates, dict) or not rates:
        return str(rates)
    values = [value for value in rates.values() if _is_number(value)]
    if len(values) != len(rates):
        return str(rates)
    return f"from {min(values):.3g} to {max(values):.3g} ({len(rates)} samples)"


def _statistics(saved: SavedStep) -> dict[str, dict[str, float]]:
    """Return min, max, mean and std of the finite values of every array, and how many are not.

    The real and imaginary parts of complex numbers are values of their own. Random keys have none.
    """
    from shardwise.tree import is_key

    statistics: dict[str, dict[str, float]] = {}
    for group in in_groups(
        {
            name: leaf_bytes(leaf)
            for name, leaf in saved.leaves.items()
            if not is_key(leaf.dtype)
        }
    ):
        for name, array in saved.read(group).items():
            statistics[name] = _array_statistics(_real_parts(array))
    return statistics


def _real_parts(array: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(array):
        return np.stack([array.real, array.imag])
    return array


def _array_statistics(array: np.ndarray) -> dict[str, float]:
    count, total = 0, 0.0
    low, high = math.inf, -math.inf
    for block in _finite_blocks(array):
        count += block.size
        total += block.sum()
        low = min(low, block.min())
        high = max(high, block.max())
    if count == 0:
        missing = math.nan
        return {
            "min": missing,
            "max": missing,
            "mean": missing,
            "std": missing,
            "not_finite": array.size,
        }
    mean = total / count
    variance = (
        sum(((block - mean) ** 2).sum() for block in _finite_blocks(array)) / count
    )
    return {
        "min": float(low),
        "max": float(high),
        "mean": float(mean),
        "std": float(variance**0.5),
        "not_finite": array.size - count,
    }


def _finite_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    for block in _blocks(array):
        finite = block[np.isfinite(block)]
        if finite.size:
            yield finite


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        yield block.astype(np.complex128 if np.iscomplexobj(block) else np.float64)


# diff


def diff_steps(options: argparse.Namespace, console: Console) -> tuple[Json, int]:
    """Compare two steps bit for bit; exit code 1 if any array differs."""
    from shardwise.checkpoint.resume import compare

    a, b = (
        _open(find_step(target, options.step), console) for target in options.target
    )
    _print(console, f"A: {a.directory}", f"B: {b.directory}")
    different, equal = _compare_arrays(a, b)
    if different:
        console.print(_differences_table(different))
    _print(console, f"{equal} arrays are bit-identical, {len(different)} differ")
    changes = compare(a.metadata, b.metadata)
    if changes:
        table = Table(
            "", "A", "B", title="descriptions of the runs", title_justify="left"
        )
        for change in changes:
            table.add_row(
                printable(change.name),
                _show_value(change.saved),
                _show_value(change.now),
            )
        console.print(table)
    answer = {
        "a": str(a.directory),
        "b": str(b.directory),
        "equal": equal,
        "different": different,
        "metadata": [{"name": c.name, "a": c.saved, "b": c.now} for c in changes],
    }
    return answer, 1 if different else 0


def _compare_arrays(a: SavedStep, b: SavedStep) -> tuple[list[Json], int]:
    """Return the arrays that differ, and how many are bit-identical."""
    different: list[Json] = []
    comparable = []
    for name in sorted(a.leaves.keys() | b.leaves.keys(), key=_parameters_first):
        # Shape and dtype, or "-" where a step does not have the array.
        text_a, text_b = (
            show_leaf(saved.leaves[name]) if name in saved.leaves else "-"
            for saved in (a, b)
        )
        if text_a == text_b:
            comparable.append(name)
        else:
            different.append({"path": name, "a": text_a, "b": text_b})
    equal = 0
    for group in in_groups({name: leaf_bytes(a.leaves[name]) for name in comparable}):
        arrays_a, arrays_b = a.read(group), b.read(group)
        for name in group:
            difference = _difference(arrays_a[name], arrays_b[name])
            if not difference["elements"]:
                equal += 1
                continue
            text = show_leaf(a.leaves[name])
            different.append({"path": name, "a": text, "b": text, **difference})
    return different, equal


def _differences_table(different: Sequence[Json]) -> Table:
    columns = (
        "path",
        "A",
        "B",
        "elements that differ",
        "largest difference",
        "relative",
    )
    table = Table(*columns, title="arrays", title_justify="left")
    for entry in different:
        path = printable(entry["path"])
        if "elements" in entry:
            numbers = [_show_value(entry["absolute"]), _show_value(entry["relative"])]
            table.add_row(path, entry["a"], "same", f"{entry['elements']:,}", *numbers)
        else:
            table.add_row(path, entry["a"], entry["b"])
    return table


def _difference(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Return how many elements have different bits, and the largest difference.

    The difference is infinite where only one of the two values is finite.
    """
    elements, absolute, relative = 0, 0.0, 0.0
    for x, y, is_same in zip(_blocks(a), _blocks(b), _same_bits(a, b), strict=True):
        elements += int((~is_same).sum())
        x, y = x[~is_same], y[~is_same]
        with np.errstate(all="ignore"):
            gap = np.abs(x - y)
            scale = np.maximum(np.abs(x), np.abs(y))
            ratio = np.where(gap == 0, 0.0, gap / scale)
        absolute = max(
            absolute, float(np.where(np.isnan(gap), np.inf, gap).max(initial=0))
        )
        relative = max(
            relative, float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0))
        )
    return {"elements": elements, "absolute": absolute, "relative": relative}


def _same_bits(a: np.ndarray, b: np.ndarray) -> Iterator[np.ndarray]:
    bytes_a, bytes_b = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
        for array in (a, b)
    )
    for start in range(0, a.size, BLOCK):
        yield (bytes_a[start : start + BLOCK] == bytes_b[start : start + BLOCK]).all(1)


# export


def export_step(options: argparse.Namespace, console: Console) -> tuple[Json, int]:
    """Write the weights of a step as safetensors, or as a directory for transformers."""
    if options.vocab_size is not None and options.format == "safetensors":
        raise ConfigError("--vocab-size needs --format hf.")
    if options.trained_only and (
        options.base is not None or options.format != "safetensors"
    ):
        raise ConfigError(
            "--trained-only works with --format safetensors only, and without --base."
        )
    from shardwise.weights.export import export_hf, export_plain
    from shardwise.weights.load import merged_step

    saved = _open(find_step(options.target, options.step), console)
    average = options.average
    if not options.trained_only:
        merged = merged_step(saved, options.base, average=average)
        # The averages of adapters are merged already.
        average = average and merged is saved
        saved = merged
    with console.status(f"writing {options.out}"):
        if options.format == "safetensors":
            names = export_plain(saved, options.out, average=average)
        else:
            names = export_hf(
                saved, options.out, average=average, vocab_size=options.vocab_size
            )
    is_file = options.out.is_file()
    size = decimal(
        options.out.stat().st_size if is_file else directory_bytes(options.out)
    )
    _print(
        console,
        f"wrote {len(names)} tensors of {saved.directory}, {size}: {options.out}",
    )
    return {"out": str(options.out), "tensors": names, "digest": saved.digest}, 0


def _use_cpu() -> None:
    """Have JAX use the CPU: nothing here needs an accelerator, and one may be busy with the run."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _open(path: Path, console: Console) -> SavedStep:
    _use_cpu()
    with console.status(f"verifying {path}"):
        return open_step(path)


def _parameters_first(name: str) -> tuple[bool, str]:
    return not name.startswith("params/"), name


def _print(console: Console, *lines: str) -> None:
    console.print(*(printable(line) for line in lines), sep="\n", soft_wrap=True)


def _show_value(value: object, length: int = 90) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    text = printable(str(value))
    return text if len(text) <= length else text[: length - 4] + " ..."
