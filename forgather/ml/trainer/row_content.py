"""Digests of the content of many rows, which are cheap enough to be made of every row that a stream reads.

Takes rows as a shard gives them, before they are tokenized; gives hexadecimal digits. Rows of texts and numbers take a
short way; others are digested one by one (`data_fingerprint.row_digest`).
"""

from __future__ import annotations

import marshal
from typing import Any

import xxhash

from forgather.ml.trainer.data_fingerprint import row_digest

_NUMBERS = frozenset([int, float, bool, type(None)])
# The first one without references, whose bytes depend on which objects are the same.
_MARSHAL_VERSION = 2


def rows_digest(rows: list[Any]) -> str:
    """Returns a digest of the content of rows, in their order.

    Example:
        >>> one, other = [{"text": "a"}], [{"text": "b"}]
        >>> rows_digest(one) == rows_digest([{"text": "a"}]), rows_digest(one) == rows_digest(other)
        (True, False)
    """
    if all(isinstance(row, dict) and all(map(_is_plain, row.values())) for row in rows):
        return xxhash.xxh3_64_hexdigest(marshal.dumps(rows, _MARSHAL_VERSION))
    return xxhash.xxh3_64_hexdigest(" ".join(str(row_digest(row)) for row in rows).encode())


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return not value.startswith("/")
    parts = value if type(value) is list else [value]
    return all(type(part) in _NUMBERS for part in parts)


def chained(before: str, digest: str) -> str:
    """Returns the digest of the rows of two digests, one after the other."""
    return xxhash.xxh3_64_hexdigest(f"{before} {digest}".encode())
