"""Compare the run that wrote a checkpoint with the run that resumes from it.

A checkpoint carries a JSON description of its run. On resume it is compared with the description of
the current run. Settings that only reshard the state may change freely. Settings that would make it
a different run are refused, unless the user accepts them by name with `--accept`.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from shardwise.errors import ConfigError
from shardwise.text import Json, columns, printable

# Settings that would make it a different run, and what a change means. They need --accept.
ACCEPTABLE = {
    "loss": "the loss or the model computes something else",
    "data": "other data, or the same data in another order",
    "lr": "another learning rate, or a schedule of another length",
    "optimizer": "another optimizer",
    "seed": "other random numbers",
    "compute_dtype": "another precision",
    "matmul_dtype": "another precision",
}
# Settings that may change between two starts of a run.
HARMLESS = {
    "mesh": "resharded",
    "devices": "resharded",
    "accumulate": "same sums, split differently",
    "microbatches": "same sums, split differently",
    "rounds": "same sums, split differently",
    "deterministic": "not bit-identical from here on",
}
# The same loss has another fingerprint with another version of these packages.
TRACING_PACKAGES = ("shardwise", "jax", "flax", "optax")
# How many values of one setting `report` lists, and how many `check_accepted` lists in all.
VALUES_PER_SETTING = 4
MAX_REFUSED = 12


@dataclass(frozen=True)
class ChangedSetting:
    """A value that differs between the saved run and the current one.

    Attributes:
        key: the top-level key of the description, such as `data`.
        name: the full path of the value, such as `data/seed`.
        saved: the value of the run that wrote the checkpoint. None if it had none.
        now: the value of the current run. None if it has none.
    """

    key: str
    name: str
    saved: object
    now: object

    def verdict(self, accept: Collection[str]) -> str:
        """Return what follows from the change: refused, accepted, resharded, or only logged.

        Args:
            accept: the keys that the user accepts.
        """
        if self.key not in ACCEPTABLE:
            return HARMLESS.get(self.key, "logged only")
        if self.key in accept:
            return f"accepted: {ACCEPTABLE[self.key]}"
        return f"refused: --accept {self.key}"


def compare(saved: Json, now: Json) -> list[ChangedSetting]:
    """Return all values that differ between two descriptions of runs.

    Args:
        saved: the description in the checkpoint, as nested dictionaries.
        now: the description of the current run.

    Returns:
        The differences. Settings that need to be accepted come first. Floating-point numbers are
        equal if they agree to a relative error of 1e-5.
    """
    before = _flatten(saved)
    after = _flatten(now)
    changes = []
    for name in dict.fromkeys([*after, *before]):
        if not _equal(before.get(name), after.get(name)):
            key = name.split("/")[0]
            changes.append(ChangedSetting(key, name, before.get(name), after.get(name)))
    order = {key: index for index, key in enumerate([*ACCEPTABLE, *HARMLESS])}
    return sorted(changes, key=lambda change: order.get(change.key, len(order)))


def not_comparable(saved: Json, now: Json) -> dict[str, str]:
    """Return the settings that cannot be compared, and why.

    Args:
        saved: the description in the checkpoint.
        now: the description of the current run.
    """
    reasons: dict[str, str] = {}
    # The description of a data function or an iterator is a text.
    if isinstance(saved.get("data"), str):
        reasons["data"] = "the checkpoint does not describe its content"
    if "loss" not in now:
        return reasons
    if "loss" not in saved:
        reasons["loss"] = "the checkpoint does not describe it"
    elif saved["loss"].get("fingerprint") != now["loss"].get("fingerprint"):
        # The fingerprint also depends on these. It says nothing if one of them has changed.
        before, after = _traced_with(saved), _traced_with(now)
        changed = [name for name in after if before.get(name) != after[name]]
        if changed:
            reasons["loss"] = f"it depends on {', '.join(changed)}, which changed"
    return reasons


def _traced_with(description: Json) -> Json:
    """Return what the fingerprint of a loss depends on, apart from the loss."""
    versions = description.get("versions", {})
    return {
        **{f"the version of {name}": versions.get(name) for name in TRACING_PACKAGES},
        "the device": description.get("devices", {}).get("kind"),
        "compute_dtype": description.get("compute_dtype"),
        "the shapes of the batch": description.get("loss", {}).get("batch"),
    }


def check_accepted(
    changes: list[ChangedSetting], accept: Collection[str], place: str
) -> None:
    """Check that the user accepts every change that would make it a different run.

    Args:
        changes: the differences that `compare` found.
        accept: the keys that the user accepts.
        place: a name of the checkpoint, for the message.

    Raises:
        ConfigError: if any change is not accepted. The message lists all of them with both values.
    """
    refused = [
        change
        for change in changes
        if change.key in ACCEPTABLE and change.key not in accept
    ]
    if not refused:
        return
    keys = list(dict.fromkeys(change.key for change in refused))
    flags = " ".join(f"--accept {key}" for key in keys)
    names = ", ".join(map(repr, keys))
    raise ConfigError(
        f"{place} was saved by a run with different settings:\n{_text_table(refused)}\n"
        f"To resume anyway, pass {flags} (in Python: Run(accept=({names},)))."
    )


def report(
    changes: list[ChangedSetting],
    accept: Collection[str],
    title: str,
    compared: Collection[str],
    skipped: Mapping[str, str],
) -> Iterator[Table | str]:
    """Yield a table of changes and their consequences that fits on one screen, and notes.

    Args:
        changes: the differences that `compare` found.
        accept: the keys that the user accepts.
        title: the title of the table.
        compared: the keys that were compared.
        skipped: the keys that were not compared, and why.
    """
    if changes:
        yield _table(changes, accept, title)
    else:
        yield f"{title}: no differences in {', '.join(compared)}"
    for key, reason in skipped.items():
        yield f"not compared: {key}, because {reason}"


def _table(changes: list[ChangedSetting], accept: Collection[str], title: str) -> Table:
    table = Table("", "saved", "now", "", title=Text(title), title_justify="left")
    for key in dict.fromkeys(change.key for change in changes):
        same_key = [change for change in changes if change.key == key]
        for change in same_key[:VALUES_PER_SETTING]:
            # Not as markup: the names and values of a checkpoint may be anything.
            cells = (change.name, _short(change.saved), _short(change.now))
            shown = [Text(printable(cell)) for cell in cells]
            table.add_row(*shown, change.verdict(accept))
        hidden = len(same_key) - VALUES_PER_SETTING
        if hidden > 0:
            more = (Text(f"{key}/..."), f"{hidden} more", "")
            table.add_row(*more, same_key[0].verdict(accept))
    return table


def _text_table(changes: list[ChangedSetting]) -> str:
    lines = [
        (change.name, _short(change.saved), _short(change.now))
        for change in changes[:MAX_REFUSED]
    ]
    text = columns([("", "saved", "now"), *lines])
    hidden = len(changes) - MAX_REFUSED
    return f"{text}\n  and {hidden} more" if hidden > 0 else text


def _flatten(tree: Json, prefix: str = "") -> Json:
    """Return nested dictionaries as a flat one with paths such as `data/seed` for keys."""
    flat: Json = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(dict(value), f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5)
    # JSON has no tuples: the saved value is a list.
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return a == b


def _short(value: object, length: int = 60) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= length else text[: length - 4] + " ..."
