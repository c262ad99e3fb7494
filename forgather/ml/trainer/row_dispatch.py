"""Rows that one process of a machine reads, and deals out to the processes that compute them.

Where there are fewer virtual streams than replicas, several replicas need rows of the same stream. On each machine, one
of them reads the stream; the others get their rows from it, one message for each optimizer step. The exchange is made
by the thread that trains, in the order of its other collectives, over a gloo group of these processes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from forgather.errors import ForgatherError, TrainingError, first_line
from forgather.ml.distributed import collectives
from forgather.ml.distributed.group import training_timeout
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.batch_sampler import RankShare

_log = get_logger(__name__)


class Place(NamedTuple):
    """The place of a process.

    Args:
        rank: the global rank.
        host: the first global rank of the machine.
        replica: the data-parallel rank.
    """

    rank: int
    host: int
    replica: int


class Deal(NamedTuple):
    """What a process gets for one optimizer step.

    Args:
        rows: the rows that it computes, with their places in the epoch.
        filler: a row for the shapes of a micro-batch of padding; None if the process has had a row already.
        is_last: whether the streams have ended after these rows.
        num_bad: the number of rows of the streams that were left out.
    """

    rows: list[tuple[int, Any]]
    filler: Any
    is_last: bool
    num_bad: int


class StepRows:
    """The rows of each optimizer step, for the replicas for which this process reads.

    Args:
        rows: the rows of these replicas with their places in the epoch, in order.
        share: the slice of each global micro-batch that this process computes.
        replicas: the data-parallel ranks.
        guard: the object that counts the rows that are left out.
    """

    def __init__(
        self, rows: Iterator[tuple[int, Any]], share: RankShare, replicas: frozenset[int], guard: BadRows
    ) -> None:
        self._rows, self._share, self._replicas, self._guard = rows, share, replicas, guard
        self._ahead: tuple[int, Any] | None = None
        self._is_begun = False
        self._had_rows: set[int] = set()

    def take(self, end: int) -> dict[int, Deal]:
        """Returns what each replica gets for the next step.

        Args:
            end: the number of rows of the epoch that are given after this step, over all ranks.
        """
        if not self._is_begun:
            self._is_begun, self._ahead = True, next(self._rows, None)
        parts: dict[int, list[tuple[int, Any]]] = {replica: [] for replica in self._replicas}
        latest = None
        while self._ahead is not None and self._ahead[0] < end:
            latest = self._ahead
            parts[latest[0] % self._share.size].append(latest)
            self._ahead = next(self._rows, None)
        known = latest or self._ahead
        self._had_rows |= {replica for replica, part in parts.items() if part}
        return {
            replica: Deal(
                part,
                None if known is None or replica in self._had_rows else known[1],
                self._ahead is None,
                self._guard.num_read,
            )
            for replica, part in parts.items()
        }


def groups_of_places(places: Sequence[Place], apart: int) -> list[list[Place]]:
    """Returns the groups of processes of a machine that need rows of the same streams, the reader first.

    A group has several replicas; a process that is in no group reads its own streams.

    Args:
        places: the places of all processes, in the order of ranks.
        apart: the number of different sets of streams: replicas whose numbers differ by a multiple of it need the same.

    Example:
        >>> places = [Place(rank, rank // 4 * 4, rank) for rank in range(8)]
        >>> [[place.rank for place in group] for group in groups_of_places(places, 2)]
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> groups_of_places(places, 4)
        []
    """
    found: dict[tuple[int, int], list[Place]] = {}
    for place in places:
        found.setdefault((place.host, place.replica % apart), []).append(place)
    several = (group for group in found.values() if len({place.replica for place in group}) > 1)
    return [sorted(group, key=lambda place: (place.replica, place.rank)) for group in several]


@dataclass(frozen=True, slots=True)
class RowDispatch:
    """The processes of a machine among which rows are dealt out.

    Args:
        members: the places of the processes. The first one reads.
        group: the process group; its first process is the reader.
    """

    members: Sequence[Place]
    group: Any

    @property
    def is_reader(self) -> bool:
        """Whether this process reads."""
        return self.members[0].rank == dist.get_rank()

    @property
    def replicas(self) -> frozenset[int]:
        """The data-parallel ranks of the processes."""
        return frozenset(place.replica for place in self.members)

    def deal(self, read: Callable[[], Mapping[int, Deal]]) -> Deal:
        """Returns what this process gets for the next optimizer step.

        Collective: every process of the group must call it.

        Args:
            read: the function that returns what each replica gets; it is called by the reader only.

        Raises:
            ForgatherError: on every process, if `read` raises one.
            DistributedError: FG854 on the other processes, if `read` raises any other exception.
            TrainingError: FG749 on every process, if a row cannot be sent.
        """
        parts: list[Any] | None = None
        failure: Exception | None = None
        if self.is_reader:
            try:
                parts = _packets(read(), self.members)
            except Exception as error:  # noqa: BLE001 - the border between processes: raised on each of them
                failure = error
                told = collectives.transferable(error, dist.get_rank(), ", which reads rows for this process, failed")
                parts = [told] * len(self.members)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, parts, src=self.members[0].rank, group=self.group)
        if failure is not None:
            raise failure
        if isinstance(mine[0], ForgatherError):
            raise mine[0]
        answer: Deal = pickle.loads(mine[0])  # noqa: S301 - of a process of the same run
        return answer


def _packets(deals: Mapping[int, Deal], members: Sequence[Place]) -> list[bytes]:
    made: dict[int, bytes] = {}
    for replica, deal in deals.items():
        try:
            made[replica] = pickle.dumps(deal, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # anything may be in a row of a user
            raise TrainingError(
                f"rows are dealt out to the processes of a machine, and a row cannot be sent: {type(error).__name__}: "
                f"{first_line(error)}",
                code="FG749",
                hint="give rows of numbers, texts, arrays and tensors, or set dispatch_rows: false, with which each "
                "process reads all rows of its streams",
            ).about("args.dispatch_rows") from error
    # In the order of the ranks of the group.
    return [made[place.replica] for place in sorted(members)]


_kept: dict[tuple[Any, tuple[int, ...]], Any] = {}


def dispatch_of(place: Place, num_streams: int, replicas: int, *, is_wanted: bool) -> RowDispatch | None:
    """Returns the processes among which the rows of this process are dealt out; None if it reads its own streams.

    Collective: every process must call it, before it reads a row.

    Args:
        place: the place of this process.
        num_streams: the number of virtual streams.
        replicas: the number of data-parallel ranks.
        is_wanted: whether rows may be dealt out.

    Raises:
        DistributedError: FG855 if the number of streams or the setting differs between processes.
    """
    if not collectives.is_multi_process() or collectives.is_simulated():
        return None
    # Other numbers of shards on another machine would make other groups, whose processes wait for one another.
    collectives.require_equal_facts({"the number of virtual streams": num_streams, "dispatch_rows": is_wanted})
    apart = math.gcd(num_streams, replicas)
    if apart == replicas or not is_wanted:
        return None
    mine = None
    for members in groups_of_places(collectives.all_gather(place), apart):
        # A process that is no member makes this call too, for the names that torch gives. It sends nothing.
        group = _group_of(members)
        mine = RowDispatch(members, group) if place in members else mine
    if mine is not None and mine.is_reader:
        _log.info(
            "the rows of %s are read once on this machine, and dealt out to %s",
            plural(num_streams // apart, "virtual stream"),
            plural(len(mine.replicas), "replica"),
        )
    return mine


def _group_of(members: Sequence[Place]) -> Any:
    """Returns the process group of some processes, which is made once for each default process group."""
    key = (dist.group.WORLD, tuple(place.rank for place in members))
    if key not in _kept:
        for old in [one for one in _kept if one[0] is not dist.group.WORLD]:
            del _kept[old]
        # In a group of its own: NCCL would copy the rows through the GPU.
        _kept[key] = dist.new_group(sorted(key[1]), backend="gloo", timeout=training_timeout())
    return _kept[key]
