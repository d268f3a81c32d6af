"""Likely mistakes in a run that do not stop it: what was found, and what to do about it."""

from collections.abc import Sequence
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

    def line(self) -> str:
        """Return the finding as one line: name, fact, the first parameters, remedy.

        Example:
            >>> Finding("ascends", "updates point uphill", "Add a minus.", ("a", "b")).line()
            'ascends: updates point uphill (a, b). Add a minus.'
        """
        where = f" ({_first_few(self.paths)})" if self.paths else ""
        return f"{self.name}: {self.fact}{where}. {self.remedy}"


def _first_few(paths: Sequence[str], count: int = 3) -> str:
    """Return the first paths, and how many more there are."""
    text = ", ".join(paths[:count])
    num_more = len(paths) - count
    return f"{text} and {num_more} more" if num_more > 0 else text
