"""Reads rows of a data set by number and collates them, as a training does, without a model.

Takes a data set and a collator; gives batches of arrays with the numbers of their rows. An error of the data set or of
the collator is raised with the number of the row. A data set without a length is read once, from its start.

The trainer removes the columns that the model does not take. The model is not known here, so columns are removed only
if the collator fails with them: first those that are not numbers, then all but the usual ones of a language model.
"""

from __future__ import annotations

import itertools
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgather.errors import ForgatherError, first_line
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.preference_collator import COMPLETION_MASK, JUDGED
from forgather.ml.data.token_kinds import IGNORED

Collate = Callable[[list[Any]], Any]
ANSWER = "answer"
"""The column that says whether a row is the chosen or the rejected answer of a pair."""
_USUAL_COLUMNS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "label", "label_ids"}
)
_OURS = str(Path(__file__).parents[2])
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))


class RowError(DataError):
    """A row that the data set cannot give or that the collator cannot collate; also a row that does not exist.

    The attribute `is_of_collator` tells which of the two failed.
    """

    code = "FG482"
    is_of_collator = False


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """The rows of one batch.

    Args:
        numbers: the number in the data set of each row of the batch. A collator may make several rows of one.
        rows: the rows as the data set gives them, by number.
        columns: the columns that the collator returned; the first dimension is the row of the batch.
    """

    numbers: list[int]
    rows: Mapping[int, Any]
    columns: Mapping[str, np.ndarray]


class RowReader:
    """Reads and collates the rows of a data set.

    The attribute `left_out` has the names of the columns that were removed, and `joins_rows` tells whether the collator
    makes one row of all rows of a batch; each row is then collated alone.

    Args:
        dataset: a data set with a length, or an iterable of rows.
        collate: the collator; None to stack the rows of a batch without changing them.
        name: the name of the data set for messages.
        batch_rows: the number of rows of a batch.
        removes_columns: whether columns with which the collator fails may be removed.
        only_tokens: whether rows without `input_ids` are not collated, as those of a target that no trainer uses.

    Raises:
        RowError: FG480 if the object is not a data set.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        *,
        name: str,
        batch_rows: int = 8,
        removes_columns: bool = True,
        only_tokens: bool = False,
    ) -> None:
        self.name, self.batch_rows = name, batch_rows
        self.left_out: tuple[str, ...] = ()
        self.joins_rows = False
        self._dataset, self._collate, self._removes_columns = dataset, collate, removes_columns
        self._only_tokens = only_tokens
        self._kept: frozenset[str] | None = None
        self._is_chosen = False
        self._head: list[Any] = []
        self._length = _length(dataset)
        if self._length is None and not _is_iterable(dataset):
            raise RowError(
                f"{name} is not a data set: it is an object of the class {type(dataset).__name__}",
                code="FG480",
                hint="a data set has __len__ and __getitem__, or __iter__",
            )
        self._stream = iter(()) if self._length is not None else self._opened()

    @property
    def length(self) -> int | None:
        """The number of rows; None if it is not known, as of an iterable data set that was not read to its end."""
        return self._length

    @property
    def collates(self) -> bool:
        """Whether the rows that were read are collated."""
        return self._collate is not None

    @property
    def has_length(self) -> bool:
        """Whether any row can be read by its number."""
        return hasattr(self._dataset, "__getitem__") and _length(self._dataset) is not None

    def shown(self, start: int, stop: int) -> list[RowBatch]:
        """Returns the rows from `start` to `stop`, without `stop`, in batches; fewer if the data set ends before.

        Raises:
            RowError: FG481 if the data set has no row `start`, FG482 if a row cannot be read or collated.
        """
        if not self.has_length:
            self._head += [row for _, row in self._next(range(len(self._head), stop))]
        known = len(self._head) if not self.has_length else int(self._length or 0)
        if start >= known:
            what = "has no rows" if not known else f"has {known:,} rows, and no row {start:,}"
            hint = f"the last row is {known - 1}" if known else "see what the data set is made from: 'fgcli construct'"
            raise RowError(f"{self.name} {what}", code="FG481", hint=hint)
        numbers = list(range(start, min(stop, known)))
        rows = [self._head[number] for number in numbers] if not self.has_length else self._rows(numbers)
        return [batch for part in _parts(numbers, rows, self.batch_rows) for batch in self._collated(*part)]

    def all(self, numbers: Sequence[int]) -> Iterator[list[RowBatch]]:
        """Yields the rows with the given numbers, collated in batches in this order. Reads a batch at a time.

        Args:
            numbers: the numbers of the rows; a range from 0 for a data set without a length, which may end before.

        Raises:
            RowError: FG482 if a row cannot be read or collated.
        """
        if self.has_length:
            for begin in range(0, len(numbers), self.batch_rows):
                part = list(numbers[begin : begin + self.batch_rows])
                yield self._collated(part, self._rows(part))
            return
        read = itertools.chain(enumerate(self._head), self._next(range(len(self._head), len(numbers))))
        stream = itertools.islice(read, len(numbers))
        while part_of := list(itertools.islice(stream, self.batch_rows)):
            yield self._collated([number for number, _ in part_of], [row for _, row in part_of])

    def _next(self, numbers: range) -> Iterator[tuple[int, Any]]:
        """Yields the next rows of the stream; the length is known when the stream ends."""
        for number in numbers:
            try:
                row = next(self._stream)
            except StopIteration:
                self._length = number
                return
            except Exception as error:  # noqa: BLE001 - code of the user, located by the row
                raise self._not_read(number, error) from error
            yield number, row

    def _opened(self) -> Iterator[Any]:
        try:
            return iter(self._dataset)
        except Exception as error:  # noqa: BLE001 - code of the user
            raise self._not_read(0, error) from error

    def _rows(self, numbers: list[int]) -> list[Any]:
        # As torch reads a batch: `datasets` decodes several rows at once much faster.
        several = getattr(self._dataset, "__getitems__", None)
        if several is not None:
            try:
                return list(several(numbers))
            except Exception:  # noqa: BLE001, S110 - the rows are read one by one below, which names the row that fails
                pass
        rows = []
        for number in numbers:
            try:
                rows.append(self._dataset[number])
            except Exception as error:  # noqa: BLE001 - code of the user, located by the row
                raise self._not_read(number, error) from error
        return rows

    def _not_read(self, number: int, error: Exception) -> RowError:
        what = f"row {number:,} of {self.name} cannot be read: {_as_phrase(error)}"
        return RowError(what, hint=getattr(error, "hint", None) or "correct the data set, or the files that it reads")

    def _collated(self, numbers: list[int], rows: list[Any]) -> list[RowBatch]:
        if self._only_tokens and not (isinstance(rows[0], Mapping) and "input_ids" in rows[0]):
            self._collate = None
        if self._collate is None:
            return [RowBatch(numbers=numbers, rows=dict(zip(numbers, rows, strict=True)), columns={})]
        if self.joins_rows and len(rows) > 1:
            return [batch for part in _parts(numbers, rows, 1) for batch in self._collated(*part)]
        columns = self._columns(numbers, rows)
        made = _num_rows(columns)
        if made != len(rows) and len(rows) > 1:
            self.joins_rows = True
            return self._collated(numbers, rows)
        of_each = numbers if made == len(rows) else numbers * made
        return [RowBatch(numbers=of_each, rows=dict(zip(numbers, rows, strict=True)), columns=columns)]

    def _columns(self, numbers: list[int], rows: list[Any]) -> dict[str, np.ndarray]:
        if self._is_chosen:
            return self._attempt(numbers, rows, self._kept)
        *others, last = self._choices(rows[0])
        for kept in others:
            try:
                columns = arrays_of(self._call(rows, kept))
            except Exception:  # noqa: BLE001, S112 - the last choice reports the error
                continue
            self._choose(kept, rows[0])
            return columns
        columns = self._attempt(numbers, rows, last)
        self._choose(last, rows[0])
        return columns

    def _choose(self, kept: frozenset[str] | None, row: Any) -> None:
        self._is_chosen, self._kept = True, kept
        self.left_out = () if kept is None else tuple(name for name in row if name not in kept)

    def _choices(self, row: Any) -> list[frozenset[str] | None]:
        if not self._removes_columns or not isinstance(row, Mapping):
            return [None]
        found: list[frozenset[str]] = [frozenset(row), frozenset(name for name in row if not _is_text(row[name]))]
        if "input_ids" in row:
            found.append(frozenset(row) & _USUAL_COLUMNS)
        distinct = [kept for kept in dict.fromkeys(found) if kept]
        return [None if kept == frozenset(row) else kept for kept in distinct] or [None]

    def _call(self, rows: list[Any], kept: frozenset[str] | None) -> Any:
        # Copies: collators of transformers change the rows that they get.
        given = [
            {name: row[name] for name in row if kept is None or name in kept} if isinstance(row, Mapping) else row
            for row in rows
        ]
        assert self._collate is not None  # noqa: S101 - callers check it
        return self._collate(given)

    def _attempt(self, numbers: list[int], rows: list[Any], kept: frozenset[str] | None) -> dict[str, np.ndarray]:
        try:
            return arrays_of(self._call(rows, kept))
        except Exception as error:  # noqa: BLE001 - code of the user, located by the row
            raise self._not_collated(numbers, rows, kept, error) from error

    def _not_collated(
        self, numbers: list[int], rows: list[Any], kept: frozenset[str] | None, error: Exception
    ) -> RowError:
        where = f"rows {numbers[0]:,} to {numbers[-1]:,} of {self.name}, though on none of them alone"
        if len(rows) == 1:
            where = f"row {numbers[0]:,} of {self.name}"
        for number, row in zip(numbers, rows, strict=True) if len(rows) > 1 else ():
            try:
                arrays_of(self._call([row], kept))
            except Exception as own:  # noqa: BLE001 - code of the user
                where, error = f"row {number:,} of {self.name}", own
                break
        found = RowError(
            f"the collator fails on {where}: {_as_phrase(error)}",
            hint=getattr(error, "hint", None) or "'--no-collator' shows the rows as the data set gives them",
        )
        found.is_of_collator = True
        return found


def with_answers_as_rows(batch: RowBatch, *, trained_part: str | None) -> RowBatch:
    """Returns a batch of preferences with each answer as a row, and any other batch unchanged.

    A row of `PreferenceCollator` holds two answers. Of a judged answer, the answer to another prompt is left out,
    because it is not trained.

    Args:
        batch: the batch.
        trained_part: the tokens that get labels, which depends on the loss: "answers", "chosen sequence" (the answers
            and the prompt of the chosen one), or None if the model gives one score to the whole.

    Shapes:
        `input_ids` of a batch of preferences: (B, 2, T). Of the result: (2 B, T), or (B, T) for judged answers.
    """
    ids_BAT, mask_BAT = batch.columns.get("input_ids"), batch.columns.get(COMPLETION_MASK)
    if ids_BAT is None or mask_BAT is None or ids_BAT.ndim != 3 or mask_BAT.shape != ids_BAT.shape:
        return batch
    is_judged = "completion_ids" in batch.rows[batch.numbers[0]]
    count = 1 if is_judged else 2
    columns = {}
    for name, values in batch.columns.items():
        if values.ndim > 1:
            columns[name] = values[:, :count].reshape(-1, *values.shape[2:])
        elif name not in ("labels", JUDGED):
            columns[name] = values.repeat(count)
    del columns[COMPLETION_MASK]
    if trained_part is not None:
        if trained_part == "chosen sequence":
            mask_BAT = mask_BAT.copy()
            mask_BAT[:, 0] |= batch.columns["attention_mask"][:, 0]
        columns["labels"] = np.where(mask_BAT == 1, ids_BAT, IGNORED)[:, :count].reshape(-1, ids_BAT.shape[-1])
    if is_judged:
        columns["label"] = batch.columns["labels"]
    else:
        columns[ANSWER] = np.array(["chosen", "rejected"] * len(batch.numbers))
    numbers = [number for number in batch.numbers for _ in range(count)]
    return RowBatch(numbers=numbers, rows=batch.rows, columns=columns)


def arrays_of(batch: Any) -> dict[str, np.ndarray]:
    """Returns what a collator returned as arrays by column; the columns of a tuple are named by their position.

    Raises:
        TypeError: if the batch is neither a mapping, a sequence nor a tensor.

    Example:
        >>> {name: values.tolist() for name, values in arrays_of((torch.tensor([[1.0]]), torch.tensor([2]))).items()}
        {'0': [[1.0]], '1': [2]}
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        items = {str(name): batch[name] for name in batch.keys()}  # noqa: SIM118 - BatchEncoding iterates over its data
    elif isinstance(batch, torch.Tensor | np.ndarray):
        items = {"0": batch}
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        items = {str(position): value for position, value in enumerate(batch)}
    else:
        raise TypeError(f"it returns an object of the class {type(batch).__name__}, not a mapping of tensors")
    return {name: array_of(value) for name, value in items.items()}


def array_of(value: Any) -> np.ndarray:
    """Returns a value as an array; what is not of numbers of one shape becomes an array of objects."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(len(value), dtype=object)
        array[:] = list(value)
    return array


def _num_rows(columns: Mapping[str, np.ndarray]) -> int:
    # Other columns may be of the whole batch, as the lengths of flattened documents are.
    ids = columns.get("input_ids")
    with_rows = [ids] if ids is not None else [values for values in columns.values() if values.ndim]
    return len(with_rows[0]) if with_rows and with_rows[0].ndim else 0


def _parts(numbers: list[int], rows: list[Any], size: int) -> Iterator[tuple[list[int], list[Any]]]:
    for begin in range(0, len(numbers), size):
        yield numbers[begin : begin + size], rows[begin : begin + size]


def _length(dataset: Any) -> int | None:
    # An iterable data set may have a length, but no row can be read by its number.
    if isinstance(dataset, torch.utils.data.IterableDataset | str | Mapping) or not hasattr(dataset, "__getitem__"):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_iterable(dataset: Any) -> bool:
    return hasattr(dataset, "__iter__") and not isinstance(dataset, str | bytes | Mapping)


def _is_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and _is_text(value[0])
    return value is None or isinstance(value, str | bytes | Mapping)


def _as_phrase(error: Exception) -> str:
    """Returns an error as one phrase, with the line of the user's code that raised it if there is one."""
    if isinstance(error, ForgatherError):
        return f"[{error.code}] {error.message}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OURS, *_LIBRARIES, "<"))]
    place = f", at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {first_line(error)[:200]}{place}"
