"""Documents packed into windows, each kept apart from its neighbours."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.data.files import TokenFile, array_fingerprint
from shardwise.data.sources import Tokens, tokens_fingerprint
from shardwise.errors import DataError


@dataclass(frozen=True)
class Packed:
    """Windows of `length` tokens, as `Tokens` has them, that tell the documents in them apart.

    A row has `inputs` and `labels`; `segment_ids`, 1 for the first document in the window, 2 for the next ...;
    `positions`, counted from 0 in each of them; and `weights`, 0 where the label belongs to another document, else 1.
    No token is left out and none is padding: a document that does not fit goes on in the next window.
    """

    tokens: np.ndarray | TokenFile
    length: int
    documents: np.ndarray | None = (
        None  # where each begins, then the number of tokens; a prepared file brings its own
    )

    def __post_init__(self) -> None:
        offsets = (
            self.tokens.documents
            if self.documents is None and isinstance(self.tokens, TokenFile)
            else self.documents
        )
        if offsets is None:
            raise DataError(
                "Packed(array, length) needs documents=, the offset of each document in the array."
            )
        if (
            len(offsets) < 2
            or offsets[0] != 0
            or offsets[-1] != len(self.tokens)
            or (np.diff(offsets) < 0).any()
        ):
            raise DataError(
                f"the offsets of documents must rise from 0 to the number of tokens, {len(self.tokens)}."
            )
        object.__setattr__(self, "_offsets", np.asarray(offsets))
        object.__setattr__(self, "_windows", Tokens(self.tokens, self.length))

    def __reduce__(self) -> Any:
        return Packed, (self.tokens, self.length, self.documents)

    def __len__(self) -> int:
        return len(self._windows)  # type: ignore[attr-defined]

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows: dict[str, np.ndarray] = self._windows.rows(indices)  # type: ignore[attr-defined]
        begins = self._begins(np.asarray(indices) * self.length)
        at = np.arange(self.length, dtype=np.int32)
        weights = np.logical_not(begins[:, 1:]).astype(np.float32)
        begins = begins[:, :-1]
        begins[:, 0] = True
        positions = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
        return {
            **rows,
            "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32),
            "positions": positions,
            "weights": weights,
        }

    def _begins(self, starts: np.ndarray) -> np.ndarray:
        """For each window, whether a document begins at each of its tokens and at the label after the last."""
        offsets = self._offsets  # type: ignore[attr-defined]
        first = np.searchsorted(offsets, starts)
        counts = np.searchsorted(offsets, starts + self.length, side="right") - first
        rows = np.repeat(np.arange(len(starts)), counts)
        numbers = (
            np.arange(counts.sum())
            - np.repeat(np.cumsum(counts) - counts, counts)
            + np.repeat(first, counts)
        )
        begins = np.zeros((len(starts), self.length + 1), bool)
        begins[rows, offsets[numbers] - starts[rows]] = True
        return begins

    def fingerprint(self) -> dict[str, Any]:
        documents = array_fingerprint(self._offsets)  # type: ignore[attr-defined]
        return {
            "packed": True,
            "length": self.length,
            "documents": documents,
            **tokens_fingerprint(self.tokens),
        }
