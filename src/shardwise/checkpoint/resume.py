"""What differs between the run that wrote a checkpoint and the one that takes it up: the same, resharded, or refused."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.text import columns

# What would make it another run, so that it is refused unless it is accepted by name.
ACCEPTABLE = {
    "data": "other data, or the same in another order",
    "lr": "another learning rate, or a schedule of another length",
    "optimizer": "another optimizer",
    "seed": "other random numbers",
    "compute_dtype": "other arithmetic",
}
HARMLESS = {
    "mesh": "resharded",
    "devices": "resharded",
    "accumulate": "the same sums in other parts",
}


@dataclass(frozen=True)
class Difference:
    """One value that is not what it was."""

    key: str  # a key of the descriptions, such as "data"
    name: str  # the whole path to the value, such as "data/seed"
    saved: Any
    now: Any

    def verdict(self, accept: Collection[str]) -> str:
        if self.key not in ACCEPTABLE:
            return HARMLESS.get(self.key, "noted")
        return (
            f"accepted: {ACCEPTABLE[self.key]}"
            if self.key in accept
            else f"refused: --accept {self.key}"
        )


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """All values that differ between two descriptions of runs, as nested dictionaries. Numbers may differ by rounding."""
    a, b = _flat(saved), _flat(now)
    names = [*b, *(name for name in a if name not in b)]
    found = [
        Difference(name.split("/")[0], name, a.get(name), b.get(name))
        for name in names
        if not _equal(a.get(name), b.get(name))
    ]
    order = [*ACCEPTABLE, *HARMLESS]
    return sorted(found, key=lambda d: order.index(d.key) if d.key in order else len(order))


def check_accepted(differences: list[Difference], accept: Collection[str], place: str) -> None:
    """Refuses what may not differ, all of it at once, with both values."""
    refused = [
        difference
        for difference in differences
        if difference.key in ACCEPTABLE and difference.key not in accept
    ]
    if not refused:
        return
    keys = list(dict.fromkeys(difference.key for difference in refused))
    flags, names = " ".join(f"--accept {key}" for key in keys), ", ".join(map(repr, keys))
    raise ConfigError(
        f"{place} was saved by a run that differs from this one:\n"
        + _table(refused)
        + f"\nIf that is meant, say {flags} (in Python: Run(accept=({names},)))."
    )


def report(differences: list[Difference], accept: Collection[str], title: str) -> Table | str:
    """One screen: what is not as it was, and what follows from it."""
    if not differences:
        return f"{title}: nothing differs from the run that saved it"
    table = Table("", "saved", "now", "", title=title, title_justify="left")
    for key in dict.fromkeys(difference.key for difference in differences):
        rows = [difference for difference in differences if difference.key == key]
        for row in rows[:4]:
            table.add_row(row.name, _short(row.saved), _short(row.now), row.verdict(accept))
        if len(rows) > 4:
            table.add_row(f"{key}/...", f"{len(rows) - 4} more", "", rows[0].verdict(accept))
    return table


def _table(differences: list[Difference], count: int = 12) -> str:
    rows = [(d.name, _short(d.saved), _short(d.now)) for d in differences[:count]]
    rest = f"\n  and {len(differences) - count} more" if len(differences) > count else ""
    return columns([("", "saved", "now"), *rows]) + rest


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5)
    return a == b or (
        isinstance(a, list | tuple) and isinstance(b, list | tuple) and list(a) == list(b)
    )


def _short(value: Any, length: int = 60) -> str:
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= length else text[: length - 4] + " ..."
