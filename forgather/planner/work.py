"""The work of a step as counts: operators with FLOPs and bytes, messages between ranks, and the sizes of the run.

`forgather/ml/planner` counts them in a trace; `step_time.py` turns them into seconds.

Units:
    FLOPs as multiplications and additions, two for each multiply-add; bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ON_HOST = "host"
"""The phase of operators that run on processors in a run of GPUs: those of an offloaded optimizer."""
TO_DEVICE, TO_HOST = "host.to_device", "host.to_host"
"""The names of messages between a device and its host."""


class Operation(NamedTuple):
    """Operators that do the same work.

    Args:
        phase: "forward", "backward", "recompute", "update", "evaluation", or `ON_HOST` for what the host computes.
        name: the name of the operator, such as "aten.mm".
        dtype: the dtype of its first tensor, such as "bfloat16".
        flops: the floating-point operations of one call.
        num_bytes: the bytes that one call reads and writes.
        num_keys: of a causal or masked attention, the number of keys for each query that its FLOPs count: half of all
            keys if it is causal, all of them if it is given a mask. 0 for any other operator.
    """

    phase: str
    name: str
    dtype: str
    flops: int
    num_bytes: int
    num_keys: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Whether the operator is a fused attention."""
        return "attention" in self.name


class Message(NamedTuple):
    """Collectives and transfers that move the same bytes.

    Args:
        phase: as in `Operation`.
        name: the name of the operator, such as "c10d._allgather_base_", or `TO_DEVICE` or `TO_HOST`.
        num_bytes: the bytes of the largest tensor that takes part, on this rank.
        group_size: the number of ranks that take part.
        stride: the difference between the first two ranks of the group: 1 for neighbors.
    """

    phase: str
    name: str
    num_bytes: int
    group_size: int
    stride: int = 1


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of a range of ranks that do the same, in one optimizer step.

    Args:
        ranks: the first and the last rank of the range.
        stages: the numbers of the pipeline stages on these ranks; empty without a pipeline.
        operations: the number of equal operators, or its mean where the accumulation changes.
        messages: the number of equal messages.
    """

    ranks: tuple[int, int]
    stages: tuple[int, ...]
    operations: Mapping[Operation, float]
    messages: Mapping[Message, float]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the range."""
        return self.ranks[1] - self.ranks[0] + 1


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """The work of a run.

    Args:
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        rows_per_update: the number of rows of one optimizer step, over all data-parallel ranks; where the accumulation
            changes, the mean.
        tokens_per_row: the number of tokens of a row; None if rows have no token ids.
        num_updates: the number of optimizer steps of the run; None if the config does not say.
        schedule: the name of the pipeline schedule; None without a pipeline.
        micro_batches: the number of micro-batches that one run of the schedule passes through the pipeline.
        schedule_runs: the number of runs of the schedule in an optimizer step, or the mean.
        ranks: the work of all ranks.
        document_length: of a causal language model, the length of the document of a token, as a mean over the tokens;
            a row that is not packed is one document. None if it is unknown.

    Units:
        document_length: tokens.
    """

    world_size: int
    local_world_size: int
    rows_per_update: float
    tokens_per_row: int | None
    num_updates: int | None
    schedule: str | None
    micro_batches: int
    schedule_runs: float
    ranks: tuple[RankWork, ...]
    document_length: float | None = None

    @property
    def model_flops(self) -> int:
        """The FLOPs of the forward and the backward pass on all ranks, without anything that is computed twice.

        Matrix products, convolutions and attention count. Of a causal attention, half of the scores count. Of packed
        rows, the scores inside of documents count, whatever attention computes. An attention that is given another mask
        counts in full, as it is computed. In its backward pass, a fused attention computes the scores again: one of its
        five products is left out.
        """
        return round(sum(self._model_flops(one.operations) * one.num_ranks for one in self.ranks))

    @property
    def document_flops(self) -> int:
        """Those of `model_flops` that grow with the length of documents, in proportion: causal and masked attention.

        0 without a `document_length`.
        """
        if self.document_length is None:
            return 0
        found = (
            self._model_flops({key: count for key, count in one.operations.items() if key.num_keys}) * one.num_ranks
            for one in self.ranks
        )
        return round(sum(found))

    def _model_flops(self, operations: Mapping[Operation, float]) -> float:
        total: float = 0
        for operation, count in operations.items():
            if operation.phase not in ("forward", "backward"):
                continue
            again = operation.is_attention and operation.name.endswith("_backward")
            flops: float = operation.flops * 4 // 5 if again else operation.flops
            if operation.num_keys and self.document_length is not None:
                # A token sees half of its document in the mean.
                flops *= self.document_length / 2 / operation.num_keys
            total += count * flops
        return total

    @property
    def executed_flops(self) -> int:
        """The FLOPs that all ranks execute in a step, those of recomputed activations and scores included."""
        found = (
            operation.flops * count * one.num_ranks
            for one in self.ranks
            for operation, count in one.operations.items()
            if operation.phase != "evaluation"
        )
        return round(sum(found))


def work_on_line(
    low: Mapping[Any, int], high: Mapping[Any, int], *, between: tuple[int, int], at: int
) -> dict[Any, int]:
    """Returns the work of another size, on the line through the work of two sizes.

    The same program runs with every size, so that calls of an operator correspond in the order of their size. Where the
    numbers of calls differ, all calls of an operator are drawn as one, whose sums are on the line.

    Args:
        low: the number of equal `Operation`s or `Message`s of the smaller size.
        high: the same of the larger size.
        between: both sizes.
        at: the size that is asked for.

    Units:
        Sizes in any unit in which FLOPs and bytes are affine, such as rows.
    """
    found: dict[Any, int] = {}
    small, large = _by_kind(low), _by_kind(high)
    for kind in {**small, **large}:
        for one, other, count in _pairs(small.get(kind, []), large.get(kind, [])):
            key = (one or other)._replace(
                **{
                    size: max(0, _line(one, other, size, between, at))
                    for size in _SIZES
                    if size in (one or other)._fields
                }
            )
            found[key] = found.get(key, 0) + count
    return found


_SIZES = ("flops", "num_bytes")


def _line(one: Any, other: Any, size: str, between: tuple[int, int], at: int) -> int:
    below, above = (0 if work is None else getattr(work, size) for work in (one, other))
    return int(below + (above - below) * (at - between[0]) // (between[1] - between[0]))


def _by_kind(work: Mapping[Any, int]) -> dict[Any, list[tuple[Any, int]]]:
    """Returns the operations or messages of each kind with their counts, smallest first."""
    found: dict[Any, list[tuple[Any, int]]] = {}
    for key in sorted(work, key=lambda key: (key.num_bytes, getattr(key, "flops", 0))):
        if work[key]:
            found.setdefault(key._replace(**{size: 0 for size in _SIZES if size in key._fields}), []).append(
                (key, work[key])
            )
    return found


def _pairs(small: list[tuple[Any, int]], large: list[tuple[Any, int]]) -> Iterator[tuple[Any, Any, int]]:
    """Returns pairs of calls of the two sizes, each with the number of such pairs."""
    # A number that was drawn from two depths may be below zero where the operators differ; the sums are right.
    are_calls = all(count > 0 for _, count in (*small, *large))
    if not are_calls or sum(count for _, count in small) != sum(count for _, count in large):
        yield _total(small), _total(large), 1
        return
    rest = [list(pair) for pair in reversed(large)]
    for key, count in small:
        while count:
            number = min(count, rest[-1][1])
            yield key, rest[-1][0], number
            count -= number
            rest[-1][1] -= number
            if not rest[-1][1]:
                rest.pop()


def _total(calls: Iterable[tuple[Any, int]]) -> Any:
    calls = list(calls)
    if not calls:
        return None
    first = calls[0][0]
    sizes = {size: sum(getattr(key, size) * count for key, count in calls) for size in _SIZES if size in first._fields}
    return first._replace(**sizes)
