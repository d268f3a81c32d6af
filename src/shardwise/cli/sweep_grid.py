"""A command line whose arguments have several values, as a grid of runs; every value is tried on the recipe first."""

import contextlib
import inspect
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.files.durable import text_digest
from shardwise.recipe import bind_recipe
from shardwise.text import did_you_mean

MOST_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """One run of the grid: its directory's name, its values by argument, its words on the command line."""

    name: str
    values: dict[str, str]
    words: list[str]


def split_words(words: Sequence[str]) -> dict[str, list[str]]:
    """The values behind each --name; several are kept together."""
    given: dict[str, list[str]] = {}
    twice, stray = [], []
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name in given:
                twice.append(name)
            given[name] = [value] if equals else []
        elif name:
            given[name].append(word)
        else:
            stray.append(word)
    mistakes = [f"'{word}' belongs to no argument." for word in stray]
    mistakes += [f"{name} is given twice; put its values behind one: {name} 1 2." for name in twice]
    if "--out" in given:
        mistakes.append("--out takes one directory; each run gets its own below it.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return given


def check_arguments(
    recipe: Callable[..., Any], given: Mapping[str, list[str]], prog: str
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(arguments that span the grid, those for all runs), after trying every value on the recipe; all mistakes are told at once."""
    parameters = inspect.signature(recipe).parameters
    if "out" not in parameters:
        raise ConfigError(
            f"the recipe '{recipe.__name__}' has no argument 'out', so its runs would have one directory. Give it one."
        )
    needed = {
        f"--{name.replace('_', '-')}" for name, p in parameters.items() if p.default is p.empty
    }
    base = {name: values[:1] for name, values in given.items() if name in needed}
    grid: dict[str, list[str]] = {}
    fixed: dict[str, list[str]] = {}
    mistakes: dict[str, None] = {}  # in order, each once

    def refused(name: str, words: list[str]) -> str | None:
        text = _refused(
            recipe,
            [*flat({other: values for other, values in base.items() if other != name}), *words],
            prog,
        )
        return text if text is None or name in text else f"{' '.join(words)}: {text}"

    for name, values in given.items():
        if (
            len(values) > 1 and refused(name, [name, *values]) is not None
        ):  # else it takes several values itself
            spelled = [_spelled(recipe, name, value) for value in values]
            mistakes |= {
                text: None for words in spelled if (text := refused(name, words)) is not None
            }
            shown = [show_value(value) for value in values]
            mistakes |= {
                f"{name} {value} is given twice.": None for value in shown if shown.count(value) > 1
            }
            grid[name] = values
        else:
            if (text := refused(name, [name, *values])) is not None:
                mistakes[text] = None
            fixed[name] = values
    for name in needed - given.keys():
        mistakes[f"{name} is needed."] = None
    if not grid and not mistakes:
        mistakes[
            "no argument has several values, so there is one run only: use `shardwise train`, or add some: --lr 1e-4 3e-4."
        ] = None
    if math.prod(map(len, grid.values())) > MOST_POINTS:
        mistakes[
            f"the grid has {math.prod(map(len, grid.values())):,} runs; at most {MOST_POINTS:,}."
        ] = None
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return grid, fixed


def _refused(recipe: Callable[..., Any], words: list[str], prog: str) -> str | None:
    """What is wrong with this command line, in a line; None if nothing is."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            bind_recipe(recipe, words, prog)
        return None
    except SystemExit:
        lines = [line.strip(" │|") for line in said.getvalue().splitlines()]
        rules = [i for i, line in enumerate(lines) if line and set(line) <= set("-─╭╮╰╯")]
        told = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
        text = " ".join(line for line in told if line) or "it is refused."
        if unknown := re.search(r"Unrecognized options: (--[\w.-]+)", text):
            names = [f"--{name.replace('_', '-')}" for name in inspect.signature(recipe).parameters]
            return f"the recipe has no argument {unknown[1]}.{did_you_mean(unknown[1], names)}"
        return text


def is_switch(recipe: Callable[..., Any], name: str) -> bool:
    parameter = name.removeprefix("--").replace("-", "_")
    return inspect.get_annotations(recipe, eval_str=True).get(parameter) is bool


def _spelled(recipe: Callable[..., Any], name: str, value: str) -> list[str]:
    return _words(name, value, is_switch(recipe, name))


def _words(name: str, value: str, is_bool: bool) -> list[str]:
    """A switch is on by its name and off by another."""
    if is_bool and value.lower() in ("true", "false"):
        return [name if value.lower() == "true" else f"--no-{name.removeprefix('--')}"]
    return [name, value]


def flat(given: Mapping[str, list[str]]) -> list[str]:
    return [word for name, values in given.items() for word in (name, *values)]


def show_value(text: str) -> str:
    """A number in one way only, so that 1e-4 and 0.0001 are the same run."""
    with contextlib.suppress(ValueError):
        return str(int(text))
    with contextlib.suppress(ValueError):
        value = float(text)
        return short if float(short := f"{value:g}") == value else repr(value)
    return text


def make_points(grid: Mapping[str, list[str]], switches: set[str]) -> list[Point]:
    """All combinations, the last argument changing fastest."""
    points = []
    for values in itertools.product(*grid.values()):
        chosen = {name: show_value(value) for name, value in zip(grid, values, strict=True)}
        words = [
            word
            for name, value in zip(grid, values, strict=True)
            for word in _words(name, value, name in switches)
        ]
        points.append(
            Point(
                point_name(chosen),
                {name.removeprefix("--"): value for name, value in chosen.items()},
                words,
            )
        )
    names = [point.name for point in points]
    return [
        Point(f"{p.name}-{text_digest(json.dumps(p.values))[:8]}", p.values, p.words)
        if names.count(p.name) > 1
        else p
        for p in points
    ]


def point_name(values: Mapping[str, str]) -> str:
    """A name for the directory: lr=0.0001,seed=0. What a path cannot have is left out."""
    parts = []
    for name, value in values.items():
        safe = re.sub(r"[^A-Za-z0-9._+-]", "", value.replace(",", ".").replace("/", ".")).lstrip(
            "."
        )
        parts.append(f"{name.removeprefix('--')}={safe}")
    name = ",".join(parts)
    return name if len(name) <= 200 else f"{name[:180]}-{text_digest(name)[:8]}"
