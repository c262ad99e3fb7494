"""Fingerprints of data sets: digests of some rows, which show whether two runs or two processes read the same data.

`row_digest` returns the digest of one value as hexadecimal digits, or None if the content of the value is unknown.
Numbers have the same digest in a tensor, an array and a list. Of an absolute path only the last component is hashed, so
that cache folders can be moved. Of a large value only the beginning and the end are hashed. A digest does not depend on
object addresses, hash seeds or random numbers. A `Fingerprint` contains the number of rows and the digests of sampled
rows by column; checkpoints store it.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from forgather.errors import DistributedError
from forgather.ml.distributed import collectives
from forgather.ml.number_format import plural
from forgather.ml.trainer.data_rng import IsolatedRNG, seed_of

_MOST_NUMBERS = 1 << 17
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_DIGITS = 8


_PLAIN = (enum.Enum, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal)


class _UnknownContent(Exception):
    """Raised for a value whose content cannot be read reliably."""


def row_digest(value: Any) -> str | None:
    """Returns the digest of a value as hexadecimal digits; None if the value has an unknown class or cannot be read.

    Example:
        >>> row_digest({"ids": [1, 2]}) == row_digest({"ids": torch.tensor([1, 2])}), row_digest(object()) is None
        (True, True)
        >>> row_digest("/home/a/cache/7.png") == row_digest("/data/7.png"), row_digest([1, 2]) == row_digest([2, 1])
        (True, False)
    """
    hasher = xxhash.xxh3_64()
    try:
        _update_digest(hasher.update, value, _MOST_DEPTH)
    except (_UnknownContent, ValueError, TypeError, RuntimeError, OverflowError, MemoryError):
        return None
    return hasher.hexdigest()[:_DIGITS]


def _update_digest(put: Callable[[bytes], object], value: Any, depth: int) -> None:
    # A structure that contains itself would never end.
    if depth == 0:
        raise _UnknownContent
    numbers = _numbers(value)
    if numbers is not None:
        shape, flat = numbers
        # Kind and shape first: [1, 2] and [[1], [2]] hold the same bytes.
        put(f"numbers {flat.dtype.kind} {shape}".encode())
        put(flat.tobytes())
    elif value is None:
        put(b"none")
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        _update_digest(
            put, text if isinstance(text, bytes) else _without_folder(text).encode("utf-8", "surrogatepass"), depth
        )
    elif isinstance(value, bytes | bytearray | memoryview):
        put(f"bytes {len(value)} ".encode())
        put(bytes(_head_and_tail(memoryview(value).cast("B"), _MOST_BYTES)))
    else:
        _update_digest_of_parts(put, value, depth)


def _update_digest_of_parts(put: Callable[[bytes], object], value: Any, depth: int) -> None:
    if isinstance(value, Mapping):
        put(f"mapping {len(value)}".encode())
        # Sorted: the order of columns depends on how the data set was made, not on its rows.
        for name in sorted(value, key=str):
            _update_digest(put, str(name), depth - 1)
            _update_digest(put, value[name], depth - 1)
    elif isinstance(value, Set):
        # The iteration order of a set of strings changes with the hash seed of the process.
        put(f"set {sorted(str(row_digest(item)) for item in value)}".encode())
    elif isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim):
        put(f"sequence {len(value)}".encode())
        for item in value:
            _update_digest(put, item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _update_digest(put, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth)
    elif all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # as PIL has images
        _update_digest(put, [str(value.mode), value.size, value.tobytes()], depth)
    elif isinstance(value, _PLAIN):
        put(f"{type(value).__name__} {value}".encode())
    else:
        raise _UnknownContent


def _numbers(value: Any) -> tuple[Sequence[int], np.ndarray[Any, Any]] | None:
    """Returns the shape and the flattened numbers of a value; None if the value does not consist of numbers.

    Numbers are widened to int64, float64 or complex128, so that they have the same digest in all containers: `datasets`
    returns lists by default, and int32 tensors if its format is set to torch.
    """
    if isinstance(value, Tensor):
        flat = _head_and_tail(value.detach().reshape(-1), _MOST_NUMBERS).cpu()
        # NumPy has no bfloat16; float64 holds every floating-point type of torch exactly.
        return _as_widest(value.shape, (flat.double() if flat.is_floating_point() else flat).numpy())
    if isinstance(value, list | tuple | range):
        if not _begins_with_a_number(value):
            return None
        try:
            found = np.asarray(_head_and_tail(value, _MOST_NUMBERS))
        except (ValueError, OverflowError):  # rows of uneven length
            return None
        return _as_widest((len(value), *found.shape[1:]), found.reshape(-1))
    if isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        found = np.asarray(value)
        return _as_widest(found.shape, found.reshape(-1))
    return None


def _as_widest(shape: Sequence[int], flat: np.ndarray[Any, Any]) -> tuple[Sequence[int], np.ndarray[Any, Any]] | None:
    wide = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}.get(flat.dtype.kind)
    return None if wide is None else (tuple(shape), _head_and_tail(flat, _MOST_NUMBERS).astype(wide))


def _begins_with_a_number(value: Any) -> bool:
    while isinstance(value, list | tuple | range) and len(value):
        value = value[0]
    return isinstance(value, bool | int | float | np.generic | list | tuple | range)


def _head_and_tail(value: Any, most: int) -> Any:
    """Returns the first and last items of a value, `most` in total. A value of at most `most` items is returned whole.

    Hashing a gigabyte of pixels for 64 rows would delay the start of a run. A change that affects only the middle of a
    long value is therefore not detected.
    """
    if len(value) <= most:
        return value
    first, last = value[: most // 2], value[-(most - most // 2) :]
    if isinstance(value, Tensor):
        return torch.cat([first, last])
    return np.concatenate([first, last]) if isinstance(value, np.ndarray) else [*first, *last]


def _without_folder(text: str) -> str:
    return os.path.basename(text) if os.path.isabs(text) and len(text) < 4096 and "\n" not in text else text


SAMPLED = 64
_SECONDS = 2.0
_MOST_COLUMNS = 32
_ROW = "row"

Digests = tuple[str | None, ...]
_Read = tuple[dict[str, str | None], dict[str, str | None]]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The number of rows of a data set, and digests of sampled rows.

    Args:
        num_rows: the number of rows; None if the data set is a stream, that is, if it can only be iterated over.
        columns: the digests of the sampled rows, by column. A digest is None if it is unknown. The digests of a column
            are empty if reading it draws random numbers.
    """

    num_rows: int | None
    columns: Mapping[str, Digests] = field(default_factory=dict)

    @classmethod
    def from_state(cls, state: Any) -> Fingerprint:
        """Returns the fingerprint whose state `to_state` returned.

        Raises:
            TypeError, ValueError, LookupError: if `state` does not have the form that `to_state` returns.
        """
        num_rows, columns = state["num_rows"], state["columns"]
        if not (num_rows is None or (type(num_rows) is int and num_rows >= 0)):
            raise ValueError(f"its number of rows is {num_rows!r:.40}")
        for digests in columns.values():
            if not isinstance(digests, list) or not all(one is None or type(one) is str for one in digests):
                raise TypeError(f"digests of rows are {digests!r:.40}")
        return cls(num_rows, {str(name): tuple(digests) for name, digests in columns.items()})

    def to_state(self) -> dict[str, Any]:
        """Returns the fingerprint as data that can be stored as JSON."""
        return {"num_rows": self.num_rows, "columns": {name: list(found) for name, found in self.columns.items()}}

    @property
    def facts(self) -> dict[str, Any]:
        """The number of rows, and one digest of the whole fingerprint, as a manifest stores them."""
        text = json.dumps(self.to_state(), sort_keys=True)
        return {"rows": self.num_rows, "digest": xxhash.xxh3_64(text.encode()).hexdigest()}

    def differences(self, other: Fingerprint) -> list[str]:
        """Returns descriptions of the differences to another fingerprint.

        The list is empty if all digests that both fingerprints contain are equal.
        """
        if self.num_rows != other.num_rows:
            return [f"{_rows(self.num_rows)} became {_rows(other.num_rows)}"]
        if not self.columns or not other.columns:
            return []
        gone = [f"the column {name!r} is gone" for name in self.columns if name not in other.columns]
        new = [f"the column {name!r} is new" for name in other.columns if name not in self.columns]
        both = {name: (self.columns[name], other.columns[name]) for name in self.columns if name in other.columns}
        return [*gone, *new, *self._other_rows(both)]

    def _other_rows(self, columns: Mapping[str, tuple[Digests, Digests]]) -> list[str]:
        changed = {name: _changed_rows(*pair) for name, pair in columns.items()}
        places = sorted(set(itertools.chain.from_iterable(changed.values())))
        if not places:
            return []
        compared = max(min(map(len, pair)) for pair in columns.values())
        # The same digests in another order: a changed shuffle needs another remedy than changed rows.
        moved = all(sorted(map(str, a)) == sorted(map(str, b)) for a, b in columns.values())
        first = sampled_rows(self.num_rows)[places[0]] if self.num_rows else places[0]
        named = ", ".join(repr(name) for name in changed if changed[name] and name != _ROW)
        what = "are the same in another order" if moved else "differ" + (f" in {named}" if named else "")
        return [f"{len(places)} of {compared} compared rows {what}, the first of them row {first}"]


def _rows(number: int | None) -> str:
    return "a stream" if number is None else plural(number, "row")


def _changed_rows(before: Digests, now: Digests) -> list[int]:
    pairs = enumerate(zip(before, now, strict=False))
    return [place for place, (a, b) in pairs if a is not None and b is not None and a != b]


def sampled_rows(num_rows: int) -> list[int]:
    """Returns the numbers of the rows that are sampled: at most 64 rows, which depend on `num_rows` alone.

    Example:
        >>> sampled_rows(3), len(set(sampled_rows(10**9))), sampled_rows(10**9) == sampled_rows(10**9)
        ([0, 1, 2], 64, True)
    """
    if num_rows <= SAMPLED:
        return list(range(num_rows))
    drawn = (seed_of(num_rows, number) % num_rows for number in itertools.count())
    # The ends are always sampled: rows are most often added or removed there.
    found = dict.fromkeys((0, num_rows - 1))
    while len(found) < SAMPLED:
        found[next(drawn)] = None
    return list(found)


def fingerprint(dataset: Any, options: Mapping[str, Any], known: Iterable[str] | None = None) -> Fingerprint:
    """Returns the fingerprint of a map-style data set.

    Args:
        dataset: the data set, which has a length and returns rows by number. If it has an attribute `fingerprinted`,
            the rows of that data set are compared in place of its own.
        options: the options of the run's `DataLoader`, see `loader_options`.
        known: the names of the columns that the model uses; None includes all columns.
    """
    dataset = getattr(dataset, "fingerprinted", dataset)
    sample = _Sample(dataset, None if known is None else frozenset(known))
    rows = sampled_rows(len(dataset))
    if options["num_workers"]:
        # Read as the run itself reads its rows: in a worker process, after the same `worker_init_fn`.
        read: list[_Read | None] = list(
            DataLoader(
                sample,
                sampler=rows,
                batch_size=None,
                num_workers=1,
                worker_init_fn=options.get("worker_init_fn"),
                generator=torch.Generator().manual_seed(0),
            )
        )
    else:
        read = [sample[row] for row in rows]
    # Rows after the time limit are None; the rows before it are compared.
    found = list(itertools.takewhile(lambda one: one is not None, read))
    both = [one for one in found if one is not None]
    names = dict.fromkeys(name for first, _ in both for name in first)
    # Augmentation changes a column between two readings: its digests would never agree.
    drawn = {name for name in names if any(first.get(name) != second.get(name) for first, second in both)}
    columns = {name: () if name in drawn else tuple(first.get(name) for first, _ in both) for name in names}
    return Fingerprint(len(dataset), columns)


class _Sample(Dataset[Any]):
    """A data set whose items are digests: each item contains the digests of two readings of a row, by column.

    Once a time limit of two seconds has passed, all further items are None.
    """

    def __init__(self, dataset: Any, known: frozenset[str] | None) -> None:
        self.dataset = dataset
        self.known = known
        self._apart = IsolatedRNG()
        self._ends: float | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> _Read | None:
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + _SECONDS
        elif now > self._ends:
            return None
        # Read twice: a column whose digests differ draws random numbers.
        return self._digests(row), self._digests(row)

    def _digests(self, row: int) -> dict[str, str | None]:
        several = getattr(self.dataset, "__getitems__", None)
        with self._apart.seeded(0):
            try:
                found = several([row])[0] if several else self.dataset[row]
            except Exception:  # noqa: BLE001 - code of a user's data set: the run itself raises it when it reads the row
                return {}
        return {name: row_digest(value) for name, value in self._columns(found).items()}

    def _columns(self, row: Any) -> dict[str, Any]:
        if isinstance(row, Mapping):
            named = {str(name): row[name] for name in sorted(row, key=str) if self.known is None or name in self.known}
        elif isinstance(row, tuple):
            named = {str(place): item for place, item in enumerate(row)}
        else:
            return {_ROW: row}
        if len(named) <= _MOST_COLUMNS:
            return named
        names = list(named)
        return {name: named[name] for name in names[: _MOST_COLUMNS - 1]} | {
            f"{names[_MOST_COLUMNS - 1]} and further ones": [named[name] for name in names[_MOST_COLUMNS - 1 :]]
        }


class FirstRows:
    """Records the digests of the first rows of an iterable data set while the rows are read.

    Args:
        in_workers: whether worker processes read the data set. If so, the digests are stored in shared memory.
    """

    def __init__(self, *, in_workers: bool) -> None:
        self._digests = torch.zeros(SAMPLED, dtype=torch.int64)
        # The rows are read in a worker process, and the digests are needed in this one.
        if in_workers:
            self._digests.share_memory_()  # type: ignore[no-untyped-call]

    def noted(self, rows: Iterable[Any]) -> Iterable[Any]:
        """Yields all rows unchanged, and records the digests of the first 64 rows."""
        self._digests.zero_()
        rows = iter(rows)
        for place, row in enumerate(itertools.islice(rows, SAMPLED)):
            self._digests[place] = int(row_digest(row) or "0", 16)
            yield row
        yield from rows

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the recorded rows."""
        # 0 stands for an unread row and for an unknown digest; both end the list.
        noted = list(itertools.takewhile(bool, self._digests.tolist()))
        return Fingerprint(None, {_ROW: tuple(f"{digest:08x}" for digest in noted)} if noted else {})


def refuse_other_data(what: str, own: Fingerprint) -> None:
    """Raises an error if the processes read different data. Collective: every process must call it.

    Args:
        what: the name of the data in the message.
        own: the fingerprint of the data that the calling process reads.

    Raises:
        DistributedError: FG855, on every process, if the fingerprint of one process differs from that of rank 0.
    """
    every: Sequence[Fingerprint] = collectives.all_gather(own)
    for rank, other in enumerate(every):
        if differences := every[0].differences(other):
            raise DistributedError(
                f"{what} differs between processes: from rank 0 to rank {rank}, {'; '.join(differences)}",
                code="FG855",
                hint="every process must make the same data from the same settings",
            )
