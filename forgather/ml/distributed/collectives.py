"""Host collectives: gather, broadcast and sum small Python values, and raise an exception of one rank on all ranks.

The functions take small values, or functions that the main process or all processes run. They return the values of all
ranks, or the same outcome on every rank. All ranks must call the same functions in the same order. With one process
nothing is sent. The values are sent over gloo, so a collective never waits for a device. An exception on one rank is
raised on every rank, so that no rank waits for a peer that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from forgather.errors import DistributedError, ForgatherError
from forgather.ml.distributed.host_tree import HostTree
from forgather.ml.number_format import plural

T = TypeVar("T")


def is_multi_process() -> bool:
    """Returns True if the default process group has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_simulated(group: Any = None) -> bool:
    """Returns True if the other processes of a group are simulated, as in a dry run: each of them equals this one.

    Args:
        group: the process group; None for the default group.
    """
    return bool(dist.get_backend(group) == "fake")


def rank() -> int:
    """Returns the rank of this process, which is 0 in a run of one process."""
    return dist.get_rank() if is_multi_process() else 0


def _host_tree() -> HostTree:
    """Returns the groups over which the collectives of this module send: those of `use_groups`, or the main ones."""
    return _tree_override.get() or _tree(_main_trees, uses_default=True)


def _tree(kept: dict[Any, HostTree], *, uses_default: bool) -> HostTree:
    """Returns a tree over all ranks, which is made once for each default process group."""
    key = dist.group.WORLD
    if key not in kept:
        # A new default group means that the earlier one was destroyed, and its subgroups with it.
        kept.clear()
        kept[key] = HostTree(uses_default=uses_default)
    return kept[key]


_main_trees: dict[Any, HostTree] = {}
_background_trees: dict[Any, HostTree] = {}
# Per thread: an asynchronous save must not use the groups of the training loop, see `background_groups`.
_tree_override: ContextVar[HostTree | None] = ContextVar("host_tree", default=None)


def background_groups() -> HostTree | None:
    """Returns process groups for a background thread, or None if there is only one process.

    The first call is a collective: every rank must make it. The background thread needs separate groups, because two
    threads that use one group would interleave their collectives differently on each rank.
    """
    return _tree(_background_trees, uses_default=False) if is_multi_process() else None


@contextmanager
def use_groups(tree: HostTree | None) -> Iterator[None]:
    """Context manager that makes the host collectives of the current thread use other process groups.

    Args:
        tree: the groups from `background_groups`, or None for those that are used outside of the context.
    """
    before = _tree_override.set(tree)
    try:
        yield
    finally:
        _tree_override.reset(before)


def size() -> int:
    """Returns the number of processes, which is 1 without a process group."""
    return dist.get_world_size() if is_multi_process() else 1


def all_gather(value: T) -> list[T]:
    """Returns a list of the values of all ranks, in the order of ranks.

    Collective: every rank must call it. The values are pickled.
    """
    if not is_multi_process():
        return [value]
    if is_simulated():
        return [value] * dist.get_world_size()
    # Over gloo: with NCCL the pickled bytes would be copied through the GPU.
    return _host_tree().all_gather(value)


def gather_on_main(value: T) -> list[T]:
    """Returns a list of the values of all ranks on the main process, in the order of ranks; an empty list elsewhere.

    Collective: every rank must call it. The values are pickled.
    """
    if not is_multi_process() or is_simulated():
        return [value] * size() if rank() == 0 else []
    values = _host_tree().gather(value)
    return values if dist.get_rank() == 0 else []


def gather_distinct_on_main(value: T) -> list[T]:
    """Returns the distinct values of all ranks on the main process, in the order of ranks; an empty list elsewhere.

    Collective: every rank must call it. The values are pickled. No process receives equal values of many ranks.

    Args:
        value: the value of this rank, which must be hashable.
    """
    if not is_multi_process() or is_simulated():
        return [value] if rank() == 0 else []
    values = _host_tree().gather_distinct(value)
    return values if dist.get_rank() == 0 else []


def scatter_from_main(act: Callable[[], Sequence[T]]) -> T:
    """Runs `act` on the main process, which returns a value for each rank, and returns that of this rank.

    Collective: every rank must call it. The values are pickled.

    Args:
        act: the function that is called on rank 0 only.

    Raises:
        ForgatherError: on every rank, if `act` raises a ForgatherError on rank 0.
        DistributedError: FG854 on the other ranks, if `act` raises any other exception on rank 0.
    """
    if not is_multi_process() or is_simulated():
        return act()[rank()]
    values, failure, told = _tried_on_main(act, ", which plans for all processes, failed")
    mine: Any = _host_tree().scatter(values if told is None else [told] * size())
    if failure is not None:
        raise failure
    if isinstance(mine, ForgatherError):
        raise mine
    answer: T = mine
    return answer


def run_on_main(act: Callable[[], T]) -> T:
    """Runs `act` on the main process and returns the result of `act` on every rank.

    Collective: every rank must call it. The result is pickled.

    Args:
        act: the function that is called on rank 0 only.

    Raises:
        ForgatherError: on every rank, if `act` raises a ForgatherError on rank 0.
        DistributedError: FG854 on the other ranks, if `act` raises any other exception on rank 0.
    """
    if not is_multi_process() or is_simulated():
        return act()
    value, failure, told = _tried_on_main(act, ", which writes for all processes, failed")
    outcome: list[Any] = [value, told]
    # Rank 0 broadcasts even after an exception: the other ranks are waiting for exactly this call.
    _host_tree().broadcast_objects(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer


def _tried_on_main(act: Callable[[], Any], what: str) -> tuple[Any, Exception | None, ForgatherError | None]:
    """Runs `act` on the main process, and returns its result, its exception, and the error for the other processes."""
    if dist.get_rank() != 0:
        return None, None, None
    try:
        return act(), None, None
    except Exception as error:  # noqa: BLE001 - the border between processes: the caller raises it on every rank
        return None, error, transferable(error, 0, what)


def run_collectively(act: Callable[[], T]) -> T:
    """Runs `act` on every rank and returns this rank's result once all ranks have finished.

    Collective: every rank must call it.

    Args:
        act: the function that is called on every rank.

    Raises:
        ForgatherError: on every rank, if `act` raises a ForgatherError on the lowest rank that failed. The message
            names that rank, unless all ranks failed with the same message.
        DistributedError: FG854 on the other ranks, if `act` raises any other exception on the lowest rank that failed.
    """
    if not is_multi_process():
        return act()
    failure: Exception | None = None
    reported: ForgatherError | None = None
    answer: Any = None
    try:
        answer = act()
    except Exception as error:  # noqa: BLE001 - the border between processes: it is raised again below
        failure = error
        reported = transferable(error, dist.get_rank(), " failed in an operation of all processes")
    # Also after a success: every rank must take part in the same collective. Errors are gathered only if there are any.
    failed_somewhere = bool(all_max(float(reported is not None)))
    errors = all_gather(reported) if failed_somewhere else []
    failed = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)
    if failed is None:
        found: T = answer
        return found
    rank, first = failed
    # The rank that failed raises its own exception, with its type and traceback.
    if rank == dist.get_rank() and failure is not None and not isinstance(failure, ForgatherError):
        raise failure
    # The same message on all ranks (a missing file, for example) has one cause for all, and no rank is to be named.
    if isinstance(first, ForgatherError) and any(str(error) != str(first) for error in errors):
        first.message = first.message if first.code == "FG854" else f"rank {rank}: {first.message}"
    raise first from failure


def run_and_gather(act: Callable[[], T]) -> list[T]:
    """Runs `act` on every rank and returns a list of the results of all ranks.

    Collective: every rank must call it. The results are pickled.

    Args:
        act: the function that is called on every rank.

    Raises:
        ForgatherError: under the same conditions as in `run_collectively`.
    """
    return all_gather(run_collectively(act))


def transferable(error: Exception, rank: int, what: str) -> ForgatherError:
    """Returns an error that can be pickled, so that the other ranks can raise it."""
    # Only our errors are certain to be picklable; any other exception is described in one of ours.
    if isinstance(error, ForgatherError):
        return error
    return DistributedError(
        f"rank {rank}{what}: {type(error).__name__}: {error}", code="FG854", hint=f"see the error of rank {rank} first"
    )


def all_sum(value: float) -> float:
    """Returns the sum of a number over all ranks. Collective: every rank must call it."""
    return AsyncSum(value).read()


class AsyncSum:
    """An asynchronous all-reduce that sums a number over all ranks. Collective: every rank must construct one.

    The constructor starts the all-reduce, and `read` waits for the result.

    Args:
        value: the number that this rank adds to the sum.
    """

    def __init__(self, value: float) -> None:
        # float64, so that counts of tokens are exact up to 2**53.
        self._sum = torch.tensor(value, dtype=torch.float64)
        self._result = _host_tree().start_all_reduce(self._sum) if is_multi_process() else None

    def read(self) -> float:
        """Waits until all ranks have contributed, and returns the sum as a Python number."""
        if self._result is not None:
            self._result()
        return self._sum.item()


def all_max(value: float) -> float:
    """Returns the maximum of a number over all ranks. Collective: every rank must call it.

    Args:
        value: the number of this rank, which must not be NaN.
    """
    if not is_multi_process() or is_simulated():
        return value
    largest_of_all = torch.tensor(value, dtype=torch.float64)
    return _host_tree().all_reduce(largest_of_all, dist.ReduceOp.MAX).item()


def broadcast_from_main(switches: Sequence[bool]) -> list[bool]:
    """Broadcasts the booleans of the main process; every rank returns them. Collective: every rank must call it.

    Args:
        switches: the booleans of this rank. Every rank must pass the same number of booleans; the values are used on
            rank 0 only.
    """
    if not is_multi_process():
        return list(switches)
    # A tensor, since pickling would cost more than the broadcast itself.
    values = torch.tensor(list(switches))
    return _host_tree().broadcast(values).tolist()


def _all_look_equal(value: Any) -> bool:
    """Returns whether the text of a value has the same digest on all ranks. Collective: every rank must call it.

    The lists of all ranks would be large with many ranks, so they are gathered only to say what differs.
    """
    if not is_multi_process() or is_simulated():
        return True
    digest = xxhash.xxh3_128_intdigest(repr(value).encode())
    # float64 holds 53 bits. The largest digest equals the smallest one if all are equal.
    parts = [float(digest >> shift & (1 << 48) - 1) for shift in (0, 48, 96)]
    extremes = torch.tensor([*parts, *(-part for part in parts)], dtype=torch.float64)
    largest, smallest = _host_tree().all_reduce(extremes, dist.ReduceOp.MAX).chunk(2)
    return bool(torch.equal(largest, -smallest))


def require_equal_facts(facts: Mapping[str, Any]) -> None:
    """Raises an error unless all ranks pass equal values.

    Collective: every rank must call it, before the first collective of training.

    Args:
        facts: the small values that are compared, by name. Every rank must pass the same names.

    Raises:
        DistributedError: FG855, on every rank, if a value differs between ranks.
    """
    if _all_look_equal(dict(facts)):
        return
    every = all_gather(dict(facts))
    for name in facts:
        values = [one[name] for one in every]
        if any(value != values[0] for value in values):
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise DistributedError(
                f"{name} differs between processes: {values[0]!r} on rank 0 and {values[other]!r} on rank {other}",
                code="FG855",
                hint="every process must make the same data from the same settings",
            )


def require_equal_weights(shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises an error unless the models of all ranks have the same weight names and shapes, in the same order.

    Collective: every rank must call it. The check comes before weights are exchanged, because a collective over tensors
    of different shapes would hang or crash.

    Args:
        shapes: the shape of each weight by name, in the order of the model's parameters.

    Raises:
        DistributedError: FG855, on every rank, if a name, a shape or the number of weights differs between ranks.
    """
    # Names as well as shapes: two layers of equal shape in another order would be exchanged silently.
    own = [(name, tuple(shape)) for name, shape in shapes.items()]
    if _all_look_equal(own):
        return
    every = all_gather(own)
    rank = next((rank for rank, one in enumerate(every) if one != every[0]), None)
    if rank is None:
        return
    first, other = every[0], every[rank]
    # `min` of the lengths: one list can be a prefix of the other.
    place = next((n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    shown = [
        f"{one[place][0]} of shape {list(one[place][1])}" if place < len(one) else "none" for one in (first, other)
    ]
    raise DistributedError(
        f"the model differs between processes: weight {place} is {shown[0]} on rank 0 and {shown[1]} on rank {rank}",
        code="FG855",
        hint="every process must make the same model from the same settings, whatever its rank",
    )


def iterate_in_step(items: Iterator[T]) -> Iterator[T]:
    """Yields the items of an iterator as long as every rank has a next item.

    Collective: every rank must iterate, because each item costs one all-reduce.

    Args:
        items: the iterator of this rank.

    Raises:
        DistributedError: FG855, on every rank, if the iterator ends on some ranks and continues on others.
    """
    if not is_multi_process():
        yield from items
        return
    nothing: Any = object()
    for number in range(1 << 62):
        item = next(items, nothing)
        require_all_or_none(item is not nothing, number)
        if item is nothing:
            return
        yield item


def require_all_or_none(has_next: bool, number: int) -> None:
    """Raises an error if some ranks have a further item and others do not. Collective: every rank must call it.

    Args:
        has_next: whether this rank has a further item.
        number: the number of items so far.

    Raises:
        DistributedError: FG855, on every rank, if some ranks have a further item and others do not.
    """
    if is_multi_process():
        # One sum per item tells each rank how many ranks have one; all of them then take the same branch.
        refuse_some(int(all_sum(float(has_next))), number)


def refuse_some(present: int, number: int) -> None:
    """Raises an error if some ranks, but not all, have a further item.

    Args:
        present: the number of ranks that have one.
        number: the number of items so far.

    Raises:
        DistributedError: FG855 if some ranks have a further item and others do not.
    """
    if 0 < present < dist.get_world_size():
        raise DistributedError(
            f"the data ended after {plural(number, 'batch', 'batches')} on {dist.get_world_size() - present} of "
            f"{dist.get_world_size()} processes, and continues on the others",
            code="FG855",
            hint="a data set without a length must give the same rows on every process, whatever its rank",
        )
