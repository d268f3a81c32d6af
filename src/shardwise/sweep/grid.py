"""The grid of a sweep: command-line arguments with several values, as one run per combination.

Every value is tried on the recipe's parser first, so that a typo is reported before anything runs.
"""

import contextlib
import inspect
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError
from shardwise.files.durable import text_digest
from shardwise.recipe import bind_recipe
from shardwise.text import did_you_mean

MAX_POINTS = 10_000

# The values of each argument, by its option: {"--lr": ["1e-4", "3e-4"]}.
Arguments = dict[str, list[str]]


@dataclass(frozen=True)
class GridPoint:
    """One run of the grid.

    Attributes:
        name: the name of its directory.
        values: its value of each argument that spans the grid, by the name of the argument.
        words: the same as words of a command line.
    """

    name: str
    values: dict[str, str]
    words: list[str]


def split_words(words: Sequence[str]) -> Arguments:
    """Group the words of a command line by option; several values of one option stay together.

    Raises:
        ConfigError: for a value without an option, or an option that is given twice.
    """
    arguments: Arguments = {}
    mistakes = []
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if option in arguments:
                mistakes.append(
                    f"{option} is given twice. Put all values after one: {option} 1 2."
                )
            arguments[option] = [value] if equals else []
        elif option:
            arguments[option].append(word)
        else:
            mistakes.append(f"'{word}' belongs to no argument.")
    if "--out" in arguments:
        mistakes.append("--out takes one directory; each run gets its own below it.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return arguments


def check_arguments(
    recipe: Callable[..., object], arguments: Arguments, prog: str
) -> tuple[Arguments, Arguments]:
    """Try every value on the recipe's parser.

    Args:
        recipe: the recipe function.
        arguments: what `split_words` returned.
        prog: the command, for messages.

    Returns:
        The arguments that span the grid, and those that are the same for all runs.

    Raises:
        ConfigError: with all mistakes at once.
    """
    parameters = inspect.signature(recipe).parameters
    if "out" not in parameters:
        raise ConfigError(
            f"the recipe '{recipe.__name__}' has no argument 'out', so all runs would share one"
            " directory. Add `out: Path | None = None` to it."
        )
    required = {
        option_of(name) for name, p in parameters.items() if p.default is p.empty
    }
    # Required arguments must be present when another one is tried.
    base = {
        option: values[:1] for option, values in arguments.items() if option in required
    }

    def problem(option: str, words: list[str]) -> str | None:
        others = {name: values for name, values in base.items() if name != option}
        text = _parse_problem(recipe, [*flat(others), *words], prog)
        if text is None or option in text:
            return text
        return f"{' '.join(words)}: {text}"

    grid: Arguments = {}
    fixed: Arguments = {}
    # A dictionary keeps the order and drops repeated messages.
    mistakes: dict[str, None] = {}
    for option, values in arguments.items():
        whole_problem = problem(option, [option, *values])
        # An argument that accepts all values at once, such as a tuple, is the same for all runs.
        if len(values) == 1 or whole_problem is None:
            fixed[option] = values
            if whole_problem is not None:
                mistakes[whole_problem] = None
            continue
        grid[option] = values
        for value in values:
            words = _words(option, value, is_switch(recipe, option))
            value_problem = problem(option, words)
            if value_problem is not None:
                mistakes[value_problem] = None
        names = [show_value(value) for value in values]
        for name in names:
            if names.count(name) > 1:
                mistakes[f"{option} {name} is given twice."] = None
    for option in required - arguments.keys():
        mistakes[f"{option} is required."] = None
    size = math.prod(map(len, grid.values()))
    if not grid and not mistakes:
        mistakes[
            "no argument has several values, so there is one run only: use `shardwise train`, or"
            " add values: --lr 1e-4 3e-4."
        ] = None
    if size > MAX_POINTS:
        mistakes[f"the grid has {size:,} runs; the maximum is {MAX_POINTS:,}."] = None
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return grid, fixed


def option_of(parameter: str) -> str:
    """Return the option of an argument of a recipe: "--batch-size" for "batch_size"."""
    return f"--{parameter.replace('_', '-')}"


def _parse_problem(
    recipe: Callable[..., object], words: list[str], prog: str
) -> str | None:
    """Return what is wrong with a command line, in one line; None if it is fine."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            bind_recipe(recipe, words, prog)
    except SystemExit:
        return _first_message(output.getvalue(), recipe)
    return None


def _first_message(output: str, recipe: Callable[..., object]) -> str:
    """Take the message out of the box that tyro draws around it."""
    lines = [line.strip(" │|") for line in output.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and set(line) <= set("-─╭╮╰╯")]
    inside = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = " ".join(line for line in inside if line) or "the recipe refuses it."
    unknown = re.search(r"Unrecognized options: (--[\w.-]+)", text)
    if unknown is None:
        return text
    options = [option_of(name) for name in inspect.signature(recipe).parameters]
    return (
        f"the recipe has no argument {unknown[1]}.{did_you_mean(unknown[1], options)}"
    )


def is_switch(recipe: Callable[..., object], option: str) -> bool:
    """Return whether an argument of the recipe is a flag: `--bias` and `--no-bias`."""
    parameter = option.removeprefix("--").replace("-", "_")
    return inspect.get_annotations(recipe, eval_str=True).get(parameter) is bool


def _words(option: str, value: str, is_flag: bool) -> list[str]:
    """Return the words for one value: a flag is on by its name and off by `--no-NAME`."""
    if is_flag and value.lower() == "true":
        return [option]
    if is_flag and value.lower() == "false":
        return [f"--no-{option.removeprefix('--')}"]
    return [option, value]


def flat(arguments: Mapping[str, list[str]]) -> list[str]:
    """Return arguments as words of a command line."""
    return [word for option, values in arguments.items() for word in (option, *values)]


def show_value(text: str) -> str:
    """Write a number in one way only, so that 1e-4 and 0.0001 are the same run.

    Example:
        >>> show_value("1e-4"), show_value("03"), show_value("adam")
        ('0.0001', '3', 'adam')
    """
    with contextlib.suppress(ValueError):
        return str(int(text))
    with contextlib.suppress(ValueError):
        value = float(text)
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return text


def make_points(grid: Arguments, switches: set[str]) -> list[GridPoint]:
    """Return all combinations of the grid; the last argument changes fastest.

    Args:
        grid: the arguments that span it.
        switches: those of them that are flags.
    """
    points = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        shown = {option: show_value(value) for option, value in chosen.items()}
        words = []
        for option, value in chosen.items():
            words += _words(option, value, option in switches)
        by_name = {option.removeprefix("--"): value for option, value in shown.items()}
        points.append(GridPoint(point_name(by_name), by_name, words))
    # Different values may have the same name once characters that paths cannot have are dropped.
    names = [point.name for point in points]
    return [
        replace(point, name=f"{point.name}-{text_digest(json.dumps(point.values))[:8]}")
        if names.count(point.name) > 1
        else point
        for point in points
    ]


def point_name(values: Mapping[str, str]) -> str:
    """Return a directory name such as `lr=0.0001,seed=0`.

    Characters that could lead out of the directory are dropped.
    """
    parts = []
    for name, value in values.items():
        value = value.replace(",", ".").replace("/", ".")
        safe = re.sub(r"[^A-Za-z0-9._+-]", "", value).lstrip(".")
        parts.append(f"{name}={safe}")
    name = ",".join(parts)
    return name if len(name) <= 200 else f"{name[:180]}-{text_digest(name)[:8]}"
