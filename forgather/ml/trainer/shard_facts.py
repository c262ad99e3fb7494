"""What a checkpoint stores of the shards of a stream, and what is different in those of a resumed run.

Takes shards (`ml.data.shards.ShardedRows`); gives a `Fingerprint` of their number, names and sizes, and of samples of
the content of some. The rows that were read are compared apart, see `ml.data.virtual_streams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forgather.ml.data.data_errors import file_unreadable
from forgather.ml.data.shards import ShardedRows
from forgather.ml.number_format import plural
from forgather.ml.trainer.data_fingerprint import SAMPLED, Digests, Fingerprint, row_digest

# "shard" is the only one that earlier releases stored.
_RECORDED, _LISTED, _CONTENT = "shard", "listing", "content"
_MOST_GROUPS = 1024


def shards_fingerprint(shards: ShardedRows) -> Fingerprint:
    """Returns the fingerprint of shards: all names and sizes, and digests of samples of at most 64 shards.

    Raises:
        DataFileError: FG834 if a file cannot be read.
    """
    name_of = getattr(shards, "recorded_name", shards.shard_name)
    digest_of = getattr(shards, "shard_digest", lambda shard: "")
    content_of = getattr(shards, "content_digest", lambda shard: "")
    sampled = _sampled(shards)
    columns: dict[str, list[str | None]] = {_RECORDED: [], _CONTENT: []}
    for one in sampled:
        try:
            facts = (shards.num_shards, name_of(one), shards.shard_size(one), digest_of(one))
            columns[_CONTENT].append(row_digest(content_of(one)))
        except OSError as error:
            raise file_unreadable(shards.shard_name(one), error) from error
        columns[_RECORDED].append(row_digest(list(map(str, facts))))
    columns[_LISTED] = [row_digest(group) for group in _groups(_listing(shards))]
    return Fingerprint(None, {name: tuple(found) for name, found in columns.items()})


def shard_changes(before: Fingerprint, now: Fingerprint, shards: ShardedRows) -> list[str]:
    """Returns descriptions of the differences between the shards of a checkpoint and those of this run.

    Args:
        before: the fingerprint of a checkpoint, of this release or an earlier one.
        now: the fingerprint of this run.
        shards: the shards of this run.
    """
    if _LISTED not in before.columns:
        return before.differences(Fingerprint(None, {_RECORDED: now.columns[_RECORDED]}))
    listed, groups = _listing(shards), _groups(_listing(shards))
    if len(before.columns[_LISTED]) != len(now.columns[_LISTED]):
        return [f"the number of files or shards was another one, and is {len(listed)} now"]
    if places := _other_places(before.columns[_LISTED], now.columns[_LISTED]):
        first = groups[places[0]]
        # A group has several names where there are very many shards.
        where = first[0] if len(first) == 1 else f"between {first[0]} and {first[-1]}"
        return [_sentence(len(places), len(groups), "another name or size", where)]
    sampled = _sampled(shards)
    if places := _other_places(before.columns[_CONTENT], now.columns[_CONTENT]):
        return [_sentence(len(places), len(sampled), "another content", shards.shard_name(sampled[places[0]]))]
    return before.differences(now)


def _sentence(count: int, total: int, what: str, first: str) -> str:
    have = "has" if count == 1 else "have"
    return f"{count} of {plural(total, 'shard')} {have} {what}, the first of them {first}"


def _sampled(shards: ShardedRows) -> list[int]:
    return list(dict.fromkeys(shards.num_shards * place // SAMPLED for place in range(SAMPLED)))


def _listing(shards: ShardedRows) -> list[str]:
    """Returns the name and size of every shard, or of every file of them where the shards know these faster."""
    if (listing := getattr(shards, "listing", None)) is not None:
        return list(listing())
    return [f"{shards.shard_name(one)}, size {shards.shard_size(one)}" for one in range(shards.num_shards)]


def _groups(listed: Sequence[str]) -> list[list[str]]:
    length = max(1, math.ceil(len(listed) / _MOST_GROUPS))
    return [list(listed[begin : begin + length]) for begin in range(0, len(listed), length)]


def _other_places(before: Digests, now: Digests) -> list[int]:
    pairs = enumerate(zip(before, now, strict=True))
    return [place for place, (then, later) in pairs if then != later and None not in (then, later)]
