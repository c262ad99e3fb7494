"""What processes tell one another outside of the model: facts, decisions and failures.

Takes small values, and acts that one process does for all. Gives the values of all, or the same outcome everywhere.
Keeps true: in one process nothing is sent; every process calls the same functions in the same order; the hosts speak
with one another, so nothing here waits for a device; an act of the writer that fails, fails on every process with the
writer's error, so that nobody waits for a file that never comes; so does what all do, each its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forgather.errors import DistributedError, ForgatherError
from forgather.ml.distributed.group import training_timeout

T = TypeVar("T")


def several() -> bool:
    """Tells whether there is anybody to agree with."""
    return dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Returns the number of this process among those that agree."""
    return dist.get_rank() if several() else 0


def _hosts() -> Any:
    """Returns the group through which hosts speak: the one of all processes where that is gloo, else one beside it."""
    if (channel := _channel.get()) is not None:
        return channel
    return dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group(_beside)


def _gloo_group(kept: dict[Any, Any]) -> Any:
    """Returns a group of all hosts, made once for each group of all processes."""
    key = dist.group.WORLD
    if key not in kept:
        kept.clear()
        kept[key] = dist.new_group(backend="gloo", timeout=training_timeout())
    return kept[key]


_beside: dict[Any, Any] = {}
_second: dict[Any, Any] = {}
_channel: ContextVar[Any] = ContextVar("channel", default=None)


def second_channel() -> Any:
    """Returns a group for a thread beside the run, so that neither hears what the other is told; None in one process.

    Every process calls it, and gets the same one each time.
    """
    return _gloo_group(_second) if several() else None


@contextmanager
def through(channel: Any) -> Iterator[None]:
    """Lets what this thread says go through a group of its own."""
    before = _channel.set(channel)
    try:
        yield
    finally:
        _channel.reset(before)


def size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if several() else 1


def gathered(value: T) -> list[T]:
    """Returns the value of each process, by rank. Values are pickled."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_hosts())
    return values


def run_on_main(act: Callable[[], T]) -> T:
    """Returns, on every process, what `act` gives on the one that writes.

    Raises:
        ForgatherError: that of the writer; DistributedError FG854 on the others where it is none of ours.
    """
    if not several():
        return act()
    failure: Exception | None = None
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except Exception as error:  # noqa: BLE001 - the border between processes: it is raised again below
            failure = error
            outcome[1] = error if isinstance(error, ForgatherError) else _of_writer(error)
    dist.broadcast_object_list(outcome, src=0, group=_hosts())
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def run_collectively(act: Callable[[], T]) -> T:
    """Returns what `act` gives here, once every process has done it.

    Raises:
        ForgatherError: that of the first process that failed, on every process; its message names the rank where not
            all failed alike. DistributedError FG854 on the others where it is none of ours.
    """
    if not several():
        return act()
    failure: Exception | None = None
    told: Exception | None = None
    answer: Any = None
    try:
        answer = act()
    except Exception as error:  # noqa: BLE001 - the border between processes: it is raised again below
        failure = error
        told = error if isinstance(error, ForgatherError) else _of_rank(dist.get_rank(), error)
    errors = gathered(told)
    failed = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)
    if failed is None:
        found: T = answer
        return found
    rank, first = failed
    if rank == dist.get_rank() and failure is not None and not isinstance(failure, ForgatherError):
        raise failure
    if isinstance(first, ForgatherError) and any(str(error) != str(first) for error in errors):
        first.message = first.message if first.code == "FG854" else f"rank {rank}: {first.message}"
    raise first from failure


def by_all(act: Callable[[], T]) -> list[T]:
    """Returns, on every process, what `act` gives on each of them, by rank. Values are pickled.

    Raises:
        ForgatherError: as `run_collectively`.
    """
    return gathered(run_collectively(act))


def _of_rank(rank: int, error: Exception) -> DistributedError:
    return DistributedError(
        f"rank {rank} failed in what all processes do together: {type(error).__name__}: {error}",
        code="FG854",
        hint=f"what rank {rank} says itself comes first",
    )


def _of_writer(error: Exception) -> DistributedError:
    return DistributedError(
        f"rank 0, which writes for all processes, failed: {type(error).__name__}: {error}",
        code="FG854",
        hint="what rank 0 says itself comes first",
    )


def total(value: float) -> float:
    """Returns the sum of a number over all processes."""
    return Total(value).read()


class Total:
    """The sum of a number over all processes, under way: this one goes on with its own things meanwhile.

    Args:
        value: what this process adds.
    """

    def __init__(self, value: float) -> None:
        self._sum = torch.tensor(value, dtype=torch.float64)
        self._work = dist.all_reduce(self._sum, group=_hosts(), async_op=True) if several() else None

    def read(self) -> float:
        """Returns the sum; waits for the processes that have not come as far."""
        if self._work is not None:
            self._work.wait()
        return self._sum.item()


def largest(value: float) -> float:
    """Returns the largest of a number of all processes; none of them may be NaN."""
    if not several():
        return value
    largest_of_all = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest_of_all, op=dist.ReduceOp.MAX, group=_hosts())
    return largest_of_all.item()


def broadcast_from_main(switches: Sequence[bool]) -> list[bool]:
    """Returns the switches of the process that writes."""
    if not several():
        return list(switches)
    values = torch.tensor(list(switches))
    dist.broadcast(values, src=0, group=_hosts())
    return values.tolist()


def refuse_differences(facts: Mapping[str, Any]) -> None:
    """Compares facts that every process must have alike; called before the first thing that all do together.

    Raises:
        DistributedError: FG855, on every process.
    """
    every = gathered(dict(facts))
    for name in facts:
        values = [one[name] for one in every]
        if any(value != values[0] for value in values):
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise DistributedError(
                f"{name} differs between processes: {values[0]!r} on rank 0 and {values[other]!r} on rank {other}",
                code="FG855",
                hint="every process must make the same data from the same settings",
            )


def refuse_other_weights(shapes: Mapping[str, Sequence[int]]) -> None:
    """Compares the weights of the model that each process has made, before they are exchanged.

    Args:
        shapes: the shape of each weight, by name.

    Raises:
        DistributedError: FG855, on every process.
    """
    every = gathered([(name, tuple(shape)) for name, shape in shapes.items()])
    rank = next((rank for rank, one in enumerate(every) if one != every[0]), None)
    if rank is None:
        return
    first, other = every[0], every[rank]
    place = next((n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    shown = [
        f"{one[place][0]} of shape {list(one[place][1])}" if place < len(one) else "none" for one in (first, other)
    ]
    raise DistributedError(
        f"the model differs between processes: weight {place} is {shown[0]} on rank 0 and {shown[1]} on rank {rank}",
        code="FG855",
        hint="every process must make the same model from the same settings, whatever its rank",
    )


def in_step(items: Iterator[T]) -> Iterator[T]:
    """Yields items of a stream while every process has one.

    Raises:
        DistributedError: FG855, on every process, where some have one and others have none left.
    """
    if not several():
        yield from items
        return
    nothing: Any = object()
    for number in range(1 << 62):
        item = next(items, nothing)
        present = int(total(float(item is not nothing)))
        if 0 < present < dist.get_world_size():
            raise DistributedError(
                f"the data ended after {number} batches on {dist.get_world_size() - present} of "
                f"{dist.get_world_size()} processes, and goes on on the others",
                code="FG855",
                hint="a data set without a length must give the same rows on every process, whatever its rank",
            )
        if item is nothing:
            return
        yield item
