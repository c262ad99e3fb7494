"""Groups of rows of similar length, so that a micro-batch needs little padding.

Takes the lengths of all rows; gives their order for an epoch. The order depends on the lengths, the size of a group and
the state of a generator alone, so it is the same on all processes and after a resume.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from forgather.errors import TrainingError
from forgather.ml.trainer.data_rng import IsolatedRNG

_IDS = "input_ids"
_READ_ROWS = 4096


class LengthGroups:
    """The lengths of all rows, and how many rows of similar length follow one another.

    Args:
        lengths: the length of each row in tokens.
        group_rows: the number of rows of an optimizer step.
    """

    def __init__(self, lengths: Sequence[int], group_rows: int) -> None:
        self._lengths, self._group_rows = lengths, group_rows

    def order(self, generator: torch.Generator) -> list[int]:
        """Returns the numbers of all rows: shuffled, then sorted by length within each 50 steps, the longest first.

        Args:
            generator: the generator that shuffles the rows.

        Source:
            `transformers.trainer_pt_utils.get_length_grouped_indices`.
        """
        grouped: list[int] = get_length_grouped_indices(  # type: ignore[no-untyped-call]
            self._lengths, self._group_rows, generator=generator
        )
        return grouped


def row_lengths(dataset: Any) -> list[int]:
    """Returns the number of tokens of each row of a map-style data set, without changing the global random state.

    Args:
        dataset: the data set. One that is not of `datasets` is read once as a whole.

    Raises:
        TrainingError: FG946 if a row has no list of tokens in `input_ids`.
    """
    if stored := stored_lengths(dataset, [_IDS]):
        return stored[_IDS]
    found = []
    with IsolatedRNG().seeded(0):
        for number in range(len(dataset)):
            row = dataset[number]
            ids = row.get(_IDS) if isinstance(row, Mapping) else None
            if not isinstance(ids, Sized):
                raise no_lengths(f"row {number} has no tokens in {_IDS!r}")
            found.append(len(ids))
    return found


def stored_lengths(dataset: Any, columns: Collection[str] | None = None) -> dict[str, list[int]] | None:
    """Returns the lengths of all rows in columns of lists, without reading the rows.

    Args:
        dataset: the data set.
        columns: the names of the columns; by default all of them. Those that hold no lists are left out.

    Returns:
        The lengths by the name of the column; None if the data set is not of `datasets`, or transforms its rows.
    """
    # Here: a run that groups no rows, and has no rows of `datasets`, does not wait for these imports.
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return None
    kinds = dataset.features.arrow_schema
    lists = [one.name for one in kinds if pa.types.is_list(one.type) or pa.types.is_large_list(one.type)]
    names = [name for name in lists if columns is None or name in columns]
    found: dict[str, list[int]] = {name: [] for name in names}
    if names:
        for batch in dataset.select_columns(names).with_format("arrow").iter(batch_size=_READ_ROWS):
            for name in names:
                found[name] += pc.list_value_length(batch[name]).to_pylist()
    return found


def no_lengths(reason: str) -> TrainingError:
    """Returns the FG946 error, for rows that cannot be grouped by length.

    Args:
        reason: what is missing.
    """
    return TrainingError(
        f"rows cannot be grouped by length: {reason}",
        code="FG946",
        hint="set train_sampling_strategy: random",
    ).about("args.train_sampling_strategy")
