"""Documents packed into windows of equal length, each separated from its neighbors."""

from dataclasses import dataclass, field

import numpy as np

from shardwise.data.files import TokenFile, are_offsets, array_fingerprint
from shardwise.data.sources import Examples, Tokens, tokens_fingerprint
from shardwise.errors import DataError
from shardwise.text import Json


@dataclass(frozen=True)
class Packed:
    """Windows of tokens, as in `Tokens`, that also say which document each token belongs to.

    No token is skipped and nothing is padded: a document that does not fit continues in the next
    window. An example has

    - `inputs` and `labels`, int32;
    - `segment_ids`, int32: 1 for the first document in the window, 2 for the next;
    - `positions`, int32: counted from 0 in each document of the window;
    - `weights`, float32: 0 where the label belongs to another document, otherwise 1.

    Attributes:
        tokens: integers, in memory or in a file (`open_tokens`).
        length: tokens per window.
        documents: the offset of each document, then the number of tokens. A file written by
            `shardwise data prepare` brings its own.

    Raises:
        DataError: if the offsets are missing or do not rise from 0 to the number of tokens.

    Example:
        >>> source = Packed(np.arange(9), length=8, documents=np.array([0, 5, 9]))
        >>> source.rows(np.array([0]))["segment_ids"]
        array([[1, 1, 1, 1, 1, 2, 2, 2]], dtype=int32)
    """

    tokens: np.ndarray | TokenFile
    length: int
    documents: np.ndarray | None = None
    _offsets: np.ndarray = field(init=False, repr=False, compare=False)
    _windows: Tokens = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offsets = self.documents
        if offsets is None and isinstance(self.tokens, TokenFile):
            offsets = self.tokens.documents
        if offsets is None:
            raise DataError(
                "Packed(array, length) needs documents=, the offset of each document in the array."
            )
        if len(offsets) < 2 or not are_offsets(np.asarray(offsets), len(self.tokens)):
            raise DataError(
                "the offsets of documents must rise from 0 to the number of tokens,"
                f" {len(self.tokens)}."
            )
        object.__setattr__(self, "_offsets", np.asarray(offsets))
        object.__setattr__(self, "_windows", Tokens(self.tokens, self.length))

    def __reduce__(
        self,
    ) -> tuple[type["Packed"], tuple[np.ndarray | TokenFile, int, np.ndarray | None]]:
        return Packed, (self.tokens, self.length, self.documents)

    def __len__(self) -> int:
        return len(self._windows)

    def rows(self, indices: np.ndarray) -> Examples:
        """Return the windows at `indices`."""
        examples = self._windows.rows(indices)
        is_start = self._document_starts(np.asarray(indices) * self.length)
        # The label of a token is the next token: it counts unless a document starts there.
        weights = np.logical_not(is_start[:, 1:]).astype(np.float32)
        is_start = is_start[:, :-1]
        is_start[:, 0] = True
        index = np.arange(self.length, dtype=np.int32)
        last_start = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
        return {
            **examples,
            "segment_ids": np.cumsum(is_start, axis=1, dtype=np.int32),
            "positions": index - last_start,
            "weights": weights,
        }

    def _document_starts(self, starts: np.ndarray) -> np.ndarray:
        """Return where documents start in each window.

        Args:
            starts: offset of the first token of each window.

        Returns:
            Booleans of shape (windows, length + 1): one per token, and one for the last label.
        """
        offsets = self._offsets
        first = np.searchsorted(offsets, starts)
        counts = np.searchsorted(offsets, starts + self.length, side="right") - first
        # For every document that starts in a window: the window, and the number of the document.
        window = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        document = within + np.repeat(first, counts)
        is_start = np.zeros((len(starts), self.length + 1), bool)
        is_start[window, offsets[document] - starts[window]] = True
        return is_start

    def fingerprint(self) -> Json:
        """Return the window length and the fingerprints of offsets and tokens."""
        return {
            "packed": True,
            "length": self.length,
            "documents": array_fingerprint(self._offsets),
            **tokens_fingerprint(self.tokens),
        }
