"""Likely mistakes in a run that do not stop it: what was found, and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A likely mistake, and what to do about it.

    Attributes:
        name: a stable name, such as `decay-of-vectors`.
        fact: what was found, with values.
        remedy: what to do.
        paths: the parameters or groups that it concerns. Empty if it concerns the whole run.
    """

    name: str
    fact: str
    remedy: str
    paths: tuple[str, ...] = ()
