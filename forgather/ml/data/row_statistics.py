"""Statistics of the rows of a data set: lengths, trained tokens, padding, duplicates, rows without a target.

Takes collated batches one at a time; gives plain numbers. Memory grows by 40 bytes per row.

Shapes:
    B rows, T tokens, N rows that were read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from forgather.ml.data.collated_rows import RowBatch, array_of
from forgather.ml.data.token_kinds import IGNORED, Kind, TokenBatch

LISTED = 20
"""The number of rows that are listed by number."""
_BINS = 10
_CLASSES = 50
_DIGEST_BYTES = 16
# Rows of tokens are equal if these columns are; other columns, such as an index, are no input of the model.
_TOKEN_COLUMNS = ("input_ids", "labels", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of the rows that were read. Counts of tokens are None for rows without tokens.

    Args:
        rows_read: the number of rows that were read.
        tokens: the number of tokens without padding.
        trained_tokens: the number of tokens with a loss; None if the labels are not of tokens.
        padding_tokens: the number of padding tokens in the batches.
        labelled_padding_tokens: the number of padding tokens with a label, which the loss counts.
        documents: the number of documents in the rows; None if the rows have no positions.
        min_length: the tokens of the shortest row.
        median_length: the median of the tokens of a row.
        mean_length: the mean of the tokens of a row.
        max_length: the tokens of the longest row.
        rows_at_max: the number of rows with as many tokens as the longest one.
        rows_at_max_without_end: the number of them that do not end with a token at which generation stops, perhaps
            before a line break; None if there is no such token.
        histogram: the number of rows by length, as (first length, last length, rows).
        duplicate_rows: the number of rows that are equal to an earlier row.
        duplicates: the first of them, as (row, earlier row).
        untrained_rows: the number of rows without a trained token or label.
        untrained: the numbers of the first of them.
        classes: the number of rows by label, if each row has one label that is a whole number.
    """

    rows_read: int
    tokens: int | None = None
    trained_tokens: int | None = None
    padding_tokens: int | None = None
    labelled_padding_tokens: int = 0
    documents: int | None = None
    min_length: int | None = None
    median_length: float | None = None
    mean_length: float | None = None
    max_length: int | None = None
    rows_at_max: int | None = None
    rows_at_max_without_end: int | None = None
    histogram: list[tuple[int, int, int]] = field(default_factory=list)
    duplicate_rows: int = 0
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    untrained_rows: int = 0
    untrained: list[int] = field(default_factory=list)
    classes: dict[int, int] | None = None

    @property
    def padding_share(self) -> float | None:
        """The share of padding among all positions of the batches, from 0 to 1."""
        if self.tokens is None or self.padding_tokens is None:
            return None
        return self.padding_tokens / max(1, self.tokens + self.padding_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Returns the statistics as plain data."""
        return {**asdict(self), "padding_share": self.padding_share}


class StatisticsCounter:
    """Counts the rows of batches.

    Args:
        end_ids: the ids of the tokens at which generation stops.
    """

    def __init__(self, end_ids: Collection[int] = ()) -> None:
        self._end_ids = np.asarray(list(end_ids), dtype=np.int64)
        self._numbers, self._lengths = array("q"), array("q")
        self._digests = bytearray()
        self._ends = bytearray()
        self._counts: Counter[str] = Counter()
        self._untrained: list[int] = []
        self._classes: Counter[int] | None = Counter()
        self._has_tokens = self._has_kinds = self._has_positions = False

    def add(self, batch: RowBatch, tokens: TokenBatch | None) -> None:
        """Counts the rows of a batch.

        Args:
            batch: the batch.
            tokens: its tokens, or None for rows without tokens.
        """
        for number, row in batch.rows.items():
            self._numbers.append(number)
            self._digests += row_digest(row)
        if tokens is not None:
            self._add_tokens(batch, tokens)
        self._add_targets(batch, tokens)

    def _add_tokens(self, batch: RowBatch, tokens: TokenBatch) -> None:
        is_token_BT = tokens.kinds_BT != Kind.PADDING
        lengths_B = is_token_BT.sum(axis=1)
        self._lengths.extend(int(length) for length in lengths_B)
        self._counts["tokens"] += int(lengths_B.sum())
        self._counts["padding"] += int(is_token_BT.size - lengths_B.sum())
        self._counts["documents"] += int(tokens.starts_BT.sum())
        self._counts["labelled_padding"] += int(tokens.labelled_padding_BT.sum())
        self._has_tokens, self._has_positions = True, self._has_positions or tokens.has_positions
        # The last token that is not padding, at either side of which padding may be.
        last_B = is_token_BT.shape[1] - 1 - is_token_BT[:, ::-1].argmax(axis=1)
        rows_B = np.arange(len(last_B))
        # Chat templates write a line break after the token that ends a turn.
        last_ids_B2 = np.stack(
            [tokens.ids_BT[rows_B, last_B], tokens.ids_BT[rows_B, np.maximum(last_B - 1, 0)]], axis=1
        )
        self._ends += bytes(np.isin(last_ids_B2, self._end_ids).any(axis=1).tolist())
        if tokens.labels_BT is not None:
            trained_B = (tokens.kinds_BT == Kind.TRAINED).sum(axis=1)
            self._has_kinds = True
            self._counts["trained"] += int(trained_B.sum())
            self._note_untrained(batch, trained_B == 0)

    def _add_targets(self, batch: RowBatch, tokens: TokenBatch | None) -> None:
        """Counts labels that are not of the tokens: of whole rows, or of another sequence."""
        labels_B = batch.columns.get("label")
        if tokens is None or tokens.labels_BT is None:
            labels_B = batch.columns.get("labels", labels_B)
        if labels_B is None or labels_B.dtype == object:
            self._classes = None
            return
        if labels_B.ndim > 1 and np.issubdtype(labels_B.dtype, np.integer) and tokens is not None:
            # The tokens of a decoder.
            is_trained_BT = labels_B != IGNORED
            self._has_kinds = True
            self._counts["trained"] += int(is_trained_BT.sum())
            self._note_untrained(batch, ~is_trained_BT.reshape(len(labels_B), -1).any(axis=1))
        if labels_B.ndim != 1 or not np.issubdtype(labels_B.dtype, np.integer):
            self._classes = None
            return
        self._note_untrained(batch, labels_B == IGNORED)
        if self._classes is not None:
            self._classes.update(int(label) for label in labels_B if label != IGNORED)
            if len(self._classes) > _CLASSES:
                self._classes = None

    def _note_untrained(self, batch: RowBatch, is_untrained_B: np.ndarray) -> None:
        found = [number for number, untrained in zip(batch.numbers, is_untrained_B, strict=True) if untrained]
        self._counts["untrained"] += len(found)
        # The lowest numbers, also where rows are read in a random order.
        self._untrained = sorted([*self._untrained, *found])[:LISTED]

    def result(self) -> Statistics:
        """Returns the statistics of all rows that were counted."""
        pairs = self._duplicates()
        classes = dict(sorted(self._classes.items())) if self._classes else None
        known: dict[str, Any] = {
            "rows_read": len(self._numbers),
            "duplicate_rows": len(pairs),
            "duplicates": pairs[:LISTED],
            "untrained_rows": self._counts["untrained"],
            "untrained": self._untrained,
            "classes": classes,
        }
        if not self._has_tokens:
            return Statistics(**known)
        lengths_N = np.asarray(self._lengths, dtype=np.int64)
        at_max_N = lengths_N == lengths_N.max()
        ends_N = np.frombuffer(self._ends, dtype=np.uint8).astype(bool)
        return Statistics(
            **known,
            tokens=self._counts["tokens"],
            trained_tokens=self._counts["trained"] if self._has_kinds else None,
            padding_tokens=self._counts["padding"],
            labelled_padding_tokens=self._counts["labelled_padding"],
            documents=self._counts["documents"] if self._has_positions else None,
            min_length=int(lengths_N.min()),
            median_length=float(np.median(lengths_N)),
            mean_length=float(lengths_N.mean()),
            max_length=int(lengths_N.max()),
            rows_at_max=int(at_max_N.sum()),
            rows_at_max_without_end=None if not len(self._end_ids) else int((at_max_N & ~ends_N).sum()),
            histogram=histogram(lengths_N),
        )

    def _duplicates(self) -> list[tuple[int, int]]:
        """Returns the rows that are equal to an earlier one, in their order, each with the first row of its kind."""
        numbers_N = np.asarray(self._numbers, dtype=np.int64)
        digests_N2 = np.frombuffer(bytes(self._digests), dtype=np.uint64).reshape(-1, 2)
        # Sorted by content, then by number: equal rows are neighbours, and the first of them is the earliest.
        order_N = np.lexsort((numbers_N, digests_N2[:, 1], digests_N2[:, 0]))
        sorted_N2, found = digests_N2[order_N], []
        is_equal = (sorted_N2[1:] == sorted_N2[:-1]).all(axis=1)
        first = 0
        for place in np.flatnonzero(is_equal):
            if place == 0 or not is_equal[place - 1]:
                first = int(numbers_N[order_N[place]])
            found.append((int(numbers_N[order_N[place + 1]]), first))
        return sorted(found)


def histogram(lengths_N: np.ndarray, bins: int = _BINS) -> list[tuple[int, int, int]]:
    """Returns the number of rows by length, in at most `bins` ranges of equal width without gaps.

    Example:
        >>> histogram(np.array([1, 2, 2, 9]), bins=3)
        [(1, 3, 3), (4, 6, 0), (7, 9, 1)]
        >>> histogram(np.array([128, 128]))
        [(128, 128, 2)]
    """
    low, high = int(lengths_N.min()), int(lengths_N.max())
    width = -(-(high - low + 1) // bins)
    counts = np.bincount((lengths_N - low) // width)
    # The last range ends with the longest row.
    return [
        (low + width * place, min(low + width * (place + 1) - 1, high), int(count))
        for place, count in enumerate(counts)
    ]


def row_digest(row: Any) -> bytes:
    """Returns a digest of the content of a row, which is equal for equal rows, of tensors as of lists.

    Only the tokens, labels and positions of a row of tokens count, so that an index does not make rows different.

    Example:
        >>> row_digest({"input_ids": [1, 2], "id": 1}) == row_digest({"input_ids": np.array([1, 2]), "id": 2})
        True
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if isinstance(row, Mapping):
        has_tokens = "input_ids" in row
        names = sorted(str(name) for name in row if not has_tokens or name in _TOKEN_COLUMNS)
        values: Sequence[Any] = [row[name] for name in names]
    else:
        names, values = [], list(row) if isinstance(row, list | tuple) else [row]
    for name, value in zip(names or map(str, range(len(values))), values, strict=True):
        content = array_of(value)
        if content.dtype == object or content.dtype.kind in "US":
            parts = (b"text", repr(value).encode(errors="replace"))
        else:
            # A type of 32 bits, as on disk, has the same content as one of 64.
            content = content.astype(np.int64 if content.dtype.kind in "iub" else np.float64)
            parts = (repr(content.shape).encode(), content.tobytes())
        for part in (name.encode(), *parts):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
