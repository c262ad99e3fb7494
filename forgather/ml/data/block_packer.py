"""Packing inside a stream: joins the segments of a virtual stream and cuts them into blocks of equal length.

Takes segments (`ml.data.shards`); gives rows of `input_ids`, `labels` and `position_ids`. The tokens that do not fill a
block are held back for the next segments, and a checkpoint stores them. The last block of an epoch is filled with
padding, so that no token is lost.

Shape suffixes: T tokens per block, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forgather.ml.data.shards import Row, Segment

_IGNORED = -100


class BlockPacker:
    """Cuts the segments of a stream into blocks, as `tokenize` does with stored rows.

    `position_ids` restart at 0 at the start of each segment and of each block, and the first token of a segment has the
    label -100.

    Args:
        block_size: the number of tokens per block.
        padding_id: the token that fills the last block. Its labels are -100, and it is a document of its own.
        document_boundaries: False to omit `position_ids` and keep all labels.

    Example:
        >>> packer = BlockPacker(4, 0)
        >>> [row["input_ids"].tolist() for row in packer.add([Segment(np.array([5, 6, 7])), Segment(np.array([8, 9]))])]
        [[5, 6, 7, 8]]
        >>> [(row["input_ids"].tolist(), row["labels"].tolist()) for row in packer.finish()]
        [([9, 0, 0, 0], [-100, -100, -100, -100])]
    """

    def __init__(self, block_size: int, padding_id: int, *, document_boundaries: bool = True) -> None:
        self._size, self._padding_id, self._has_boundaries = block_size, padding_id, document_boundaries
        # Token, label, and 1 at the first token of a segment.
        self._held_3N = np.empty((3, 0), dtype=np.int32)

    def add(self, segments: Sequence[Segment]) -> list[Row]:
        """Takes the next segments of the stream, and returns the blocks that are full.

        Shapes:
            The columns of a row are (T,), int64, as labels must be.
        """
        parts = [self._held_3N]
        for segment in segments:
            starts_N = np.zeros(len(segment.ids_N), dtype=np.int32)
            starts_N[:1] = 1
            labels_N = segment.ids_N if segment.labels_N is None else segment.labels_N
            parts.append(np.stack([segment.ids_N, labels_N, starts_N]).astype(np.int32))
        all_3N = np.concatenate(parts, axis=1)
        used = all_3N.shape[1] - all_3N.shape[1] % self._size
        self._held_3N = all_3N[:, used:].copy()
        return [self._row(all_3N[:, begin : begin + self._size]) for begin in range(0, used, self._size)]

    def finish(self) -> list[Row]:
        """Returns the last block, filled with padding; nothing if no token is held back."""
        if not (held := self._held_3N.shape[1]):
            return []
        padding_N = np.full(self._size - held, self._padding_id, dtype=np.int32)
        ignored_N = np.full(self._size - held, _IGNORED, dtype=np.int32)
        return self.add([Segment(padding_N, ignored_N)]) if len(padding_N) else []

    def state_dict(self) -> dict[str, Any]:
        """Returns the tokens that are held back, with their labels and starts."""
        return {"held": torch.from_numpy(self._held_3N.copy())} if self._held_3N.size else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        held = state.get("held")
        self._held_3N = np.empty((3, 0), dtype=np.int32) if held is None else np.asarray(held, dtype=np.int32).copy()

    def _row(self, block_3T: np.ndarray) -> Row:
        ids_T, labels_T, starts_T = block_3T
        if not self._has_boundaries:
            return {"input_ids": ids_T.astype(np.int64), "labels": labels_T.astype(np.int64)}
        columns_T = np.arange(self._size)
        # Column 0 counts as a start even where a document continues from the block before.
        positions_T = columns_T - np.maximum.accumulate(np.where(starts_T, columns_T, 0))
        # The first token of a document would otherwise be predicted from the end of the document before.
        labels_T = np.where(positions_T == 0, _IGNORED, labels_T.astype(np.int64))
        return {"input_ids": ids_T.astype(np.int64), "labels": labels_T, "position_ids": positions_T}
