"""The tree of small process groups over which ranks exchange values on the host.

gloo connects every process of a group with every other. In a group of all ranks, the sockets of a process and the steps
of a sum would therefore grow with the number of ranks. Here the ranks form a tree of groups of at most `FAN_OUT`
neighbours: the first rank of each group is a member of a group on the next level. Values go up to the top and come down
again, so a process has a number of sockets and of messages that grows with the logarithm of the number of ranks. Up to
`FAN_OUT` ranks, the tree is one group.

All ranks must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from forgather.ml.distributed.group import training_timeout

FAN_OUT = 8
"""The number of ranks in a group. Eight is the usual number of devices of a machine, whose ranks are neighbours."""


@dataclass(frozen=True, slots=True)
class Level:
    """A group of the tree that this rank is a member of.

    Args:
        ranks: the ranks of the group. The first one is also a member of a group on the next level, if there is one.
        group: the process group; None for the default group.
    """

    ranks: tuple[int, ...]
    group: Any


def groups_of(world_size: int, fan_out: int) -> Iterator[tuple[int, ...]]:
    """Yields the ranks of each group of the tree, level by level from the leaves; the last one is the top.

    Args:
        world_size: the number of ranks, at least 2.
        fan_out: the largest number of ranks in a group.

    Example:
        >>> list(groups_of(5, 2))
        [(0, 1), (2, 3), (0, 2), (0, 4)]
    """
    stride = 1
    while stride < world_size:
        for first in range(0, world_size, stride * fan_out):
            ranks = tuple(range(first, min(first + stride * fan_out, world_size), stride))
            # A rank that is left over alone has nobody to exchange values with on this level.
            if len(ranks) > 1:
                yield ranks
        stride *= fan_out


class HostTree:
    """The groups of the tree that this rank is a member of, and the exchanges over them.

    Collective: every rank must construct one.

    Args:
        uses_default: whether a tree of one group may use the default process group. Two threads need two groups.
    """

    def __init__(self, *, uses_default: bool) -> None:
        size, backend = dist.get_world_size(), dist.get_backend()
        # The processes of a dry run are simulated, and gloo would wait for them.
        own = backend if backend == "fake" else "gloo"
        *_, top = groups = list(groups_of(size, FAN_OUT))
        if uses_default and size <= FAN_OUT and backend == own:
            levels = [Level(top, None)]
        else:
            # A rank that is no member makes this call too, for the names that torch gives. It sends nothing.
            every = [Level(ranks, _group_of(ranks, own)) for ranks in groups]
            levels = [level for level in every if dist.get_rank() in level.ranks]
        is_at_top = levels[-1].ranks == top
        self._below = levels[:-1] if is_at_top else levels
        self._top = levels[-1] if is_at_top else None
        self._unfinished: Callable[[], None] | None = None

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a tensor over all ranks, in place, and returns it."""
        return self.start_all_reduce(tensor, op)()

    def start_all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], Tensor]:
        """Starts to reduce a tensor over all ranks, in place, and returns a function that waits for the result.

        The first level is reduced in the background, the levels above when somebody waits.
        """
        self._finish_earlier()
        steps = self._steps_up(tensor, op)
        # The first step is begun, and not waited for.
        first = next(steps)

        def finish() -> None:
            first.wait()
            for work in steps:
                work.wait()
            self._down(tensor)

        self._unfinished = finish

        def result() -> Tensor:
            if self._unfinished is finish:
                self._finish_earlier()
            return tensor

        return result

    def _finish_earlier(self) -> None:
        """Finishes the reduction that was started last, so that all ranks use each group in the same order."""
        finish, self._unfinished = self._unfinished, None
        if finish is not None:
            finish()

    def _steps_up(self, tensor: Tensor, op: Any) -> Iterator[Any]:
        for level in self._below:
            yield dist.reduce(tensor, group_dst=0, op=op, group=level.group, async_op=True)
        if self._top is not None:
            yield dist.all_reduce(tensor, op=op, group=self._top.group, async_op=True)

    def _down(self, tensor: Tensor) -> Tensor:
        for level in reversed(self._below):
            dist.broadcast(tensor, group_src=0, group=level.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Sends a tensor of rank 0 to all ranks, in place, and returns it."""
        self._finish_earlier()
        if self._top is not None:
            dist.broadcast(tensor, group_src=0, group=self._top.group)
        return self._down(tensor)

    def broadcast_objects(self, values: list[Any]) -> None:
        """Sends a list of picklable values of rank 0 to all ranks, in place."""
        self._finish_earlier()
        for level in [*([] if self._top is None else [self._top]), *reversed(self._below)]:
            dist.broadcast_object_list(values, group_src=0, group=level.group)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in the order of ranks."""
        self._finish_earlier()
        values = self._gathered_below(value)
        if self._top is not None:
            parts = [None] * len(self._top.ranks)
            dist.all_gather_object(parts, values, group=self._top.group)
            values = _joined(parts)
        answer = [values]
        for level in reversed(self._below):
            dist.broadcast_object_list(answer, group_src=0, group=level.group)
        return answer[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in the order of ranks, on rank 0; part of them elsewhere."""
        self._finish_earlier()
        values = self._gathered_below(value)
        return values if self._top is None else _gathered(values, self._top)

    def gather_distinct(self, value: Any) -> list[Any]:
        """Returns the distinct picklable values of all ranks, by the first rank that has each, on rank 0.

        Equal values are sent up the tree once per group. Elsewhere, part of the values are returned.
        """
        self._finish_earlier()
        values = [value]
        for level in [*self._below, *([] if self._top is None else [self._top])]:
            values = list(dict.fromkeys(_gathered(values, level)))
        return values

    def _gathered_below(self, value: Any) -> list[Any]:
        """Returns the values of the ranks below this one in the tree, up to the level below the top."""
        # Groups hold neighbours, so the lists of a group's members follow one another.
        values = [value]
        for level in self._below:
            values = _gathered(values, level)
        return values

    def scatter(self, values: Sequence[Any]) -> Any:
        """Returns the picklable value that rank 0 has for this rank.

        Args:
            values: one value for each rank, in the order of ranks; used on rank 0 only.
        """
        self._finish_earlier()
        for level in [*([] if self._top is None else [self._top]), *reversed(self._below)]:
            parts: list[Any] | None = None
            if dist.get_rank() == level.ranks[0]:
                # Of a member, the values of the ranks from itself to the next member.
                starts = [rank - level.ranks[0] for rank in level.ranks]
                ends = [*starts[1:], len(values)]
                parts = [values[start:end] for start, end in zip(starts, ends, strict=True)]
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, parts, group_src=0, group=level.group)
            values = mine[0]
        return values[0]


def _gathered(values: list[Any], level: Level) -> list[Any]:
    parts: list[Any] | None = [None] * len(level.ranks) if dist.get_rank() == level.ranks[0] else None
    dist.gather_object(values, parts, group_dst=0, group=level.group)
    return _joined(parts or [])


def _joined(parts: list[Any]) -> list[Any]:
    return [each for part in parts for each in part]


def _group_of(ranks: tuple[int, ...], backend: str) -> Any:
    return dist.new_group(list(ranks), backend=backend, timeout=training_timeout())
