"""A digest of what a row of data holds, whichever types hold it.

Takes a value; gives a few hexadecimal digits, or None where nothing certain can be said. Keeps true: numbers have the
same digest as a tensor, an array and a list; an absolute path counts by its last name, so that a cache may be somewhere
else; of a large value the beginning and the end are read; no address, hash seed or random number has a part in it.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import os
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

_MOST_NUMBERS = 1 << 17
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_DIGITS = 8


_PLAIN = (enum.Enum, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal)


class _Indistinct(Exception):
    """A value of which nothing certain can be said."""


def row_digest(value: Any) -> str | None:
    """Returns the digest of a value; None for one of a class that is not known here, or one that cannot be read.

    Example:
        >>> row_digest({"ids": [1, 2]}) == row_digest({"ids": torch.tensor([1, 2])}), row_digest(object()) is None
        (True, True)
        >>> row_digest("/home/a/cache/7.png") == row_digest("/data/7.png"), row_digest([1, 2]) == row_digest([2, 1])
        (True, False)
    """
    hasher = xxhash.xxh3_64()
    try:
        _feed(hasher.update, value, _MOST_DEPTH)
    except (_Indistinct, ValueError, TypeError, RuntimeError, OverflowError, MemoryError):
        return None
    return hasher.hexdigest()[:_DIGITS]


def _feed(put: Callable[[bytes], object], value: Any, depth: int) -> None:
    if depth == 0:
        raise _Indistinct
    numbers = _numbers(value)
    if numbers is not None:
        shape, flat = numbers
        put(f"numbers {flat.dtype.kind} {shape}".encode())
        put(flat.tobytes())
    elif value is None:
        put(b"none")
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        _feed(put, text if isinstance(text, bytes) else _without_place(text).encode("utf-8", "surrogatepass"), depth)
    elif isinstance(value, bytes | bytearray | memoryview):
        put(f"bytes {len(value)} ".encode())
        put(bytes(_ends(memoryview(value).cast("B"), _MOST_BYTES)))
    else:
        _feed_parts(put, value, depth)


def _feed_parts(put: Callable[[bytes], object], value: Any, depth: int) -> None:
    if isinstance(value, Mapping):
        put(f"mapping {len(value)}".encode())
        for name in sorted(value, key=str):
            _feed(put, str(name), depth - 1)
            _feed(put, value[name], depth - 1)
    elif isinstance(value, Set):
        put(f"set {sorted(str(row_digest(item)) for item in value)}".encode())
    elif isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim):
        put(f"sequence {len(value)}".encode())
        for item in value:
            _feed(put, item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(put, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth)
    elif all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # as PIL has images
        _feed(put, [str(value.mode), value.size, value.tobytes()], depth)
    elif isinstance(value, _PLAIN):
        put(f"{type(value).__name__} {value}".encode())
    else:
        raise _Indistinct


def _numbers(value: Any) -> tuple[Sequence[int], np.ndarray[Any, Any]] | None:
    """Returns the shape of numbers, and the numbers as int64, float64 or complex128; None for what is none."""
    if isinstance(value, Tensor):
        flat = _ends(value.detach().reshape(-1), _MOST_NUMBERS).cpu()
        return _widened(value.shape, (flat.double() if flat.is_floating_point() else flat).numpy())
    if isinstance(value, list | tuple | range):
        if not _begins_with_a_number(value):
            return None
        try:
            found = np.asarray(_ends(value, _MOST_NUMBERS))
        except (ValueError, OverflowError):  # rows of uneven length
            return None
        return _widened((len(value), *found.shape[1:]), found.reshape(-1))
    if isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        found = np.asarray(value)
        return _widened(found.shape, found.reshape(-1))
    return None


def _widened(shape: Sequence[int], flat: np.ndarray[Any, Any]) -> tuple[Sequence[int], np.ndarray[Any, Any]] | None:
    wide = {"b": np.int64, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}.get(flat.dtype.kind)
    return None if wide is None else (tuple(shape), _ends(flat, _MOST_NUMBERS).astype(wide))


def _begins_with_a_number(value: Any) -> bool:
    while isinstance(value, list | tuple | range) and len(value):
        value = value[0]
    return isinstance(value, bool | int | float | np.generic | list | tuple | range)


def _ends(value: Any, most: int) -> Any:
    """Returns the beginning and the end of something long, and all of what is not."""
    if len(value) <= most:
        return value
    first, last = value[: most // 2], value[-(most - most // 2) :]
    if isinstance(value, Tensor):
        return torch.cat([first, last])
    return np.concatenate([first, last]) if isinstance(value, np.ndarray) else [*first, *last]


def _without_place(text: str) -> str:
    return os.path.basename(text) if os.path.isabs(text) and len(text) < 4096 and "\n" not in text else text
